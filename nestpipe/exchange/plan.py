"""ExchangePlan: who holds which table and what travels together, worked out once from the declarations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from nestpipe.exchange.hot import HotKeys
from nestpipe.exchange.mesh import Mesh
from nestpipe.schedule.ops import AVERAGE, MERGE
from nestpipe.tables import Feature, HotRows, Table, check_declarations

WORTH_IT = 0.8  # a table is worth one worker of its own where it then sends at most this share of the bytes


@dataclasses.dataclass(frozen=True)
class Holders:
    """Who holds a table, as one worker sees it.

    owners: the workers that it asks for rows; shards are dealt to them in this order.
    peers: the workers that hold the same part as this one, by rank, itself among them; all replicas add up in this order.
    everywhere: every one of several workers holds all of it, so that nothing travels but what keeps replicas together.
    """

    owners: np.ndarray
    peers: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.int64))
    everywhere: bool = False


def place(tables: Sequence[Table], features: Sequence[Feature], mesh: Mesh, rank: int) -> list[Holders]:
    """Those of each table. One that some workers of a group hold goes to neighbours that have least to do so far, by the
    floats that its features read of a key."""
    group, shard = mesh.place(rank)
    load, holders = np.zeros(mesh.world), []
    for table in tables:
        alone, everyone = np.array([rank]), np.arange(mesh.world)
        if table.replicas == "all" or (mesh.shards == 1 and table.replicas is None):
            holders.append(Holders(alone, everyone, everywhere=mesh.world > 1))
            continue
        groups, peers = mesh.ranks, np.sort(mesh.ranks[:, shard])
        if table.replicas == 1 or mesh.replicas == 1:
            groups, peers = everyone[None], alone
        if len(groups) > 1 and table.owners == "auto":
            raise ValueError(
                f"table {table.name!r}: owners='auto' is not decided for tables with replicas; give a number, None for all, or "
                f"replicas=1"
            )
        size = groups.shape[1]
        count = min(size, table.owners) if isinstance(table.owners, int) else size
        begin = 0
        if count < size:
            of_group = load[groups].max(axis=0)  # the same part of every group
            begin = min(range(size), key=lambda first: of_group[(first + np.arange(count)) % size].max())
        chosen = (begin + np.arange(count)) % size
        load[groups[:, chosen]] += table.dim * sum(feature.table == table.name for feature in features) / count
        holders.append(Holders(groups[group if len(groups) > 1 else 0, chosen], peers))
    return holders


def with_twins(tables: Sequence[Table], mesh: Mesh) -> list[Table]:
    """The tables, and behind them those of their hot rows, where not every worker holds all rows anyway."""

    def is_spread(table: Table) -> bool:
        return mesh.world > 1 if table.replicas == 1 else mesh.shards > 1

    return [*tables, *(HotRows.of(table) for table in tables if table.hot and is_spread(table))]


class ExchangePlan:
    """Tables of one dim share a message, so that the number of collectives does not grow with the number of tables.

    tables, features: as declared, twins behind; a table is referred to by its place in `tables`.
    twins: {k: its hot rows, as a table}. hot[k]: which keys they are; None: not chosen yet, or there are none to be.
    features_of[k]: the features that read table k.
    groups: {dim: [k, ...]}.
    owners[k], peers[k]: who holds table k, see Holders.
    together: tables whose parts have the same peers, and these: what keeps replicas together travels in one message for all
        of them.
    placed[k]: why they hold it, of a table declared owners="auto"; None while undecided: until then all workers are its owners.
        Empty: as declared.
    at_owner[k]: True if bags of table k are pooled where its rows live, False if rows travel, None while undecided.
    """

    def __init__(
        self, tables: Sequence[Table], features: Sequence[Feature], holders: Sequence[Holders] | None = None
    ) -> None:
        check_declarations([table for table in tables if not isinstance(table, HotRows)], features)
        holders = place(tables, features, Mesh.flat(1), 0) if holders is None else holders
        self.owners = [of_table.owners for of_table in holders]
        self.peers = [of_table.peers for of_table in holders]
        self._everywhere = [of_table.everywhere for of_table in holders]
        self.together: dict[tuple[int, ...], list[int]] = {}
        for k, peers in enumerate(self.peers):
            if len(peers) > 1:
                self.together.setdefault(tuple(peers.tolist()), []).append(k)
        self.tables = list(tables)
        names = [table.name for table in tables]
        self.twins = {names.index(t.name): k for k, t in enumerate(tables) if isinstance(t, HotRows)}
        self.hot: list[HotKeys | None] = [None] * len(tables)
        self.features = list(features)
        self.features_of = [[f for f in features if f.table == table.name] for table in tables]
        self.groups: dict[int, list[int]] = {}
        for k, table in enumerate(tables):
            self.groups.setdefault(table.dim, []).append(k)
        self.at_owner: list[bool | None] = [self._declared(k) for k in range(len(tables))]
        self.why: list[str] = ["every worker holds it" if everywhere else "declared" for everywhere in self._everywhere]
        for k in self.twins:
            self.why[k] = "as it has hot rows"
        self.placed: list[str | None] = [self._placed(k) for k in range(len(tables))]

    def _placed(self, k: int) -> str | None:
        table = self.tables[k]
        if table.owners != "auto":
            return ""
        if len(self.owners[k]) == 1:
            return "there is one worker"
        if table.tier == "disk":
            return "a table on disk is shared by all"
        if self.at_owner[k] is False:
            return "its rows are sent one by one, from wherever they are"
        return None

    def _declared(self, k: int) -> bool | None:
        table = self.tables[k]
        sequences = [feature.name for feature in self.features_of[k] if feature.pooling is None]
        if sequences:
            if table.pooled_at == "owner":
                raise ValueError(
                    f"table {table.name!r} is declared pooled_at='owner' but feature {sequences[0]!r} is a sequence, which "
                    f"needs its rows one by one; use 'auto' or 'source', or give the pooled features a table of their own"
                )
            return False
        if k in self.twins or isinstance(table, HotRows):
            return False
        if self._everywhere[k]:
            return True
        return {"owner": True, "source": False, "auto": None}[table.pooled_at]

    def is_exact(self, k: int) -> bool:
        """Whether table k has replicas that apply one and the same update."""
        return len(self.peers[k]) > 1 and self.tables[k].sync == "exact"

    def is_averaged(self, k: int) -> bool:
        """Whether table k has replicas that are averaged now and then."""
        return len(self.peers[k]) > 1 and self.tables[k].sync == "average"

    def is_copy(self, k: int, rank: int) -> bool:
        """Whether another worker stands for this one where replicas of table k must count once."""
        return len(self.peers[k]) > 1 and int(self.peers[k][0]) != rank

    @property
    def keeping(self) -> list[str]:
        """The operations that keep replicas together."""
        every = range(len(self.tables))
        wanted = {MERGE: any(map(self.is_exact, every)), AVERAGE: any(map(self.is_averaged, every))}
        return [name for name, needed in wanted.items() if needed]

    @property
    def undecided(self) -> list[int]:
        return [k for k, choice in enumerate(self.at_owner) if choice is None]

    @property
    def unplaced(self) -> list[int]:
        return [k for k, why in enumerate(self.placed) if why is None]

    @property
    def unchosen(self) -> list[int]:
        """Tables whose hot keys are still to be chosen."""
        return [k for k in self.twins if self.hot[k] is None]

    @property
    def declared(self) -> range:
        """The tables without twins."""
        return range(len(self.tables) - len(self.twins))

    def decisions(self) -> dict[str, list[Any]]:
        """All that may still change, as it is now; for `put_back`."""
        return {name: list(getattr(self, name)) for name in ("tables", "owners", "at_owner", "why", "placed", "hot")}

    def put_back(self, decisions: dict[str, list[Any]]) -> None:
        for name, of_tables in decisions.items():
            setattr(self, name, of_tables)

    def put(self, k: int, owners: np.ndarray, why: str, *, pooled: bool = False) -> None:
        """Fixes who holds table k, before it has any row. pooled: bags are pooled there, as if it had been declared so."""
        self.owners[k], self.placed[k] = owners, why
        if pooled:
            self.tables[k] = dataclasses.replace(self.tables[k], pooled_at="owner")
            self.at_owner[k], self.why[k] = True, "as one worker holds it"

    def decide(self, k: int, *, row_bytes: int, bag_bytes: int, whole_bytes: int) -> None:
        """Fixes how table k travels from the bytes counted over all workers; on a tie (one worker) bags are pooled in place.
        whole_bytes: as pooled vectors if one worker held the table, which is for the user to declare, or for `placement`."""
        self.at_owner[k] = bag_bytes <= row_bytes
        self.why[k] = f"first batch: {row_bytes / 1e6:.2f} MB as rows, {bag_bytes / 1e6:.2f} MB as pooled vectors"
        declared = not self.placed[k]
        if declared and len(self.owners[k]) > 1 and whole_bytes < WORTH_IT * min(row_bytes, bag_bytes):
            self.why[k] += f"; {whole_bytes / 1e6:.2f} MB if it fits one worker and is declared owners=1"

    def resume(self, k: int, at_owner: bool | None) -> None:
        """Goes on as a checkpoint says."""
        self.at_owner[k] = at_owner
        self.why[k] = "as in the checkpoint"

    def describe(self) -> list[str]:
        """One line per table for the run's report."""
        lines = []
        for k in self.declared:
            table = self.tables[k]
            how = {True: "pooled at the owner", False: "rows to the source", None: "not decided yet"}[self.at_owner[k]]
            names = ", ".join(f"{f.name} ({f.pooling or 'sequence'})" for f in self.features_of[k])
            held = "" if table.owners is None else f"held by {_some(self.owners[k].tolist())}, "
            if table.owners == "auto":
                held = f"{held[:-2]} [auto: {self.placed[k] or 'not decided yet'}], "
            held += self._replicas(k) + self._hot_rows(k)
            lines.append(f"table {table.name}: dim {table.dim}, {held}{how} [{self.why[k]}]; features: {names}")
        return lines

    def _hot_rows(self, k: int) -> str:
        if k not in self.twins:
            return ""
        hot = self.hot[k]
        return f"{'hot rows not chosen yet' if hot is None else f'{len(hot):,} hot rows on every worker'}, "

    def _replicas(self, k: int) -> str:
        if len(self.peers[k]) == 1:
            return ""
        every = self.tables[k].sync_every
        how = "exact" if self.is_exact(k) else f"averaged every {every} steps" if every > 1 else "averaged every step"
        return f"{len(self.peers[k])} replicas ({how}), "


def _some(workers: list[int]) -> str:
    if len(workers) == 1:
        return f"worker {workers[0]}"
    return f"workers {', '.join(map(str, workers))}" if len(workers) <= 4 else f"{len(workers)} workers"

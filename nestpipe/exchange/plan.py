"""ExchangePlan: what travels together, worked out once from the declarations."""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.tables import Feature, Table, check_declarations


class ExchangePlan:
    """Tables of one dim share a message, so that the number of collectives does not grow with the number of tables.

    tables, features: as declared; a table is referred to by its place in `tables`.
    features_of[k]: the features that read table k.
    groups: {dim: [k, ...]}.
    at_owner[k]: True if bags of table k are pooled where its rows live, False if rows travel, None while undecided.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[Feature]) -> None:
        check_declarations(tables, features)
        self.tables = list(tables)
        self.features = list(features)
        self.features_of = [[f for f in features if f.table == table.name] for table in tables]
        self.groups: dict[int, list[int]] = {}
        for k, table in enumerate(tables):
            self.groups.setdefault(table.dim, []).append(k)
        self.at_owner: list[bool | None] = [self._declared(k) for k in range(len(tables))]
        self.why: list[str] = ["declared"] * len(tables)

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
        return {"owner": True, "source": False, "auto": None}[table.pooled_at]

    @property
    def undecided(self) -> list[int]:
        return [k for k, choice in enumerate(self.at_owner) if choice is None]

    def decide(self, k: int, *, row_bytes: int, bag_bytes: int) -> None:
        """Fixes how table k travels from the bytes counted over all workers; on a tie (one worker) bags are pooled in place."""
        self.at_owner[k] = bag_bytes <= row_bytes
        self.why[k] = f"first batch: {row_bytes / 1e6:.2f} MB as rows, {bag_bytes / 1e6:.2f} MB as pooled vectors"

    def resume(self, k: int, at_owner: bool | None) -> None:
        """Goes on as a checkpoint says."""
        self.at_owner[k] = at_owner
        self.why[k] = "as in the checkpoint"

    def describe(self) -> list[str]:
        """One line per table for the run's report."""
        lines = []
        for k, table in enumerate(self.tables):
            how = {True: "pooled at the owner", False: "rows to the source", None: "not decided yet"}[self.at_owner[k]]
            names = ", ".join(f"{f.name} ({f.pooling or 'sequence'})" for f in self.features_of[k])
            lines.append(f"table {table.name}: dim {table.dim}, {how} [{self.why[k]}]; features: {names}")
        return lines

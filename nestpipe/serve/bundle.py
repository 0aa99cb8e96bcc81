"""Bundle: a trained model with its rows, out of the files of `nestpipe export`, in one plain process.

Shape legend: B samples, n keys, D row width.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe import inference, kinds, weights
from nestpipe.batch import Batch, check_batch, one_list
from nestpipe.errors import did_you_mean
from nestpipe.inference import Recommended
from nestpipe.sealed import Damaged
from nestpipe.serve import manifest as manifests
from nestpipe.serve.lookup import lookup
from nestpipe.serve.manifest import DENSE, Manifest
from nestpipe.serve.recommend import recommend
from nestpipe.serve.rows import Layer, TableRows
from nestpipe.tables import Feature, Table

if TYPE_CHECKING:
    from nestpipe.data.columns import Columns


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """What `load_bundle` gives: one version of weights and rows, which never changes. Any number of threads may ask it.

    `updated` makes another one; whoever holds this one gets the same answers as before. So a server keeps the newest in one
    variable, takes it once per request and answers from that.

    model: in evaluation mode; its parameters need no gradient. Move it to a device, and rows follow.
    """

    manifest: Manifest
    model: nn.Module
    _rows: Mapping[str, TableRows]

    @property
    def version(self) -> str:
        """Of weights and rows together: another one after every delta."""
        return self.manifest.version

    @property
    def step(self) -> int:
        """Steps of training that it has behind it."""
        return self.manifest.step

    @property
    def tables(self) -> list[Table]:
        """As far as they were declared for reading: name, dim, dtype, first values, admission."""
        return [stored.table for stored in self.manifest.tables]

    @property
    def features(self) -> list[Feature]:
        return list(self.manifest.features)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Of the run, by section; None for one that has none."""
        return self.manifest.config

    @property
    def columns(self) -> Columns:
        """What makes batches of raw columns as the run's training did, strings, buckets and crosses included, without labels:
        `bundle.predict(bundle.columns.batch(pa.table({"site": ["a1"], "price": [3.5]})))`. For runs on Parquet or CSV files."""
        from nestpipe.data import DATASETS  # Arrow, which nothing else here needs
        from nestpipe.data.tabular import Tabular, columns_of

        entries = (self.config or {}).get("data", {})
        if not issubclass(DATASETS.get(entries.get("kind"), object), Tabular):
            raise ValueError(
                f"{self.manifest.path} does not say how columns become batches: its run had "
                f"{'no config' if self.config is None else 'data of kind ' + repr(entries.get('kind'))}, not parquet or csv; "
                f"make the Batch yourself"
            )
        return columns_of({**entries, "label": None})

    def predict(self, batch: Batch) -> Any:
        """What the model predicts for each sample: its `predict(batch, rows)`, where it has one, else `Output.predictions` of its
        forward. The same bits as in `Trainer.evaluate` of the same batch; see docs/serving.md.

        A key without a row counts with the values it would be born with, or with the row that rare keys share, as in training.
        """
        check_batch(batch, [feature.name for feature in self.features])
        with torch.no_grad():
            return inference.predict(self.model, *self._inputs(batch, self.features))

    def rows(self, table: str, keys: Tensor | np.ndarray | Sequence[int]) -> Tensor:
        """The rows of any keys, [n, D]. A key without a row gives the values it would be born with, or the row that rare keys
        share."""
        return torch.from_numpy(self._of(table).read(np.ascontiguousarray(one_list(keys).values.numpy())))

    def num_keys(self, table: str) -> int:
        """How many keys of a table have a row of their own."""
        return len(self._of(table))

    def keys(self, table: str) -> np.ndarray:
        """The keys of a table that have a row of their own, in no order."""
        return np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in self._of(table).blocks())])

    def recommend(
        self,
        batch: Batch,
        k: int,
        *,
        history: str | None = None,
        exclude_seen: bool = True,
        candidates: Tensor | np.ndarray | Sequence[int] | None = None,
    ) -> Recommended:
        """The k items of highest score for each sample, exactly: every item is scored. For models with
        `query(batch, rows) -> [B, D]` and `score(query, candidate_rows) -> [B, N]`, such as HSTU.

        The batch needs the features that `query` reads, and no others.

        history: the feature with what the user has had; the model's own `history` if left out. The items are in its table, or in
            that of the feature that the model calls its `item` (TwoTower).
        exclude_seen: leaves out what the user has had: `batch.dense["seen"]`, or where there is none the sample's history.
        candidates: the keys to choose from; all that have a row if left out.
        """
        name = inference.history_of(self.model, history)
        features = [feature for feature in self.features if feature.name in batch.keys]
        known, tables = [feature.name for feature in features], {f.name: f.table for f in self.features}
        inference.need_query_and_score(self.model, "`recommend`")
        items = inference.items_of(self.model, name, tables)
        if name not in known and (items == name or history is not None):
            raise ValueError(f"recommend: history {name!r} of the batch, {did_you_mean(name, known)}")
        check_batch(batch, known)
        with torch.no_grad():
            inputs, rows = self._inputs(batch, features)
            return recommend(
                self.model,
                self.model.query(inputs, rows),  # type: ignore[operator]
                self._of(tables[items]),
                k,
                seen=inference.to_leave_out(batch, name) if exclude_seen else None,
                candidates=None if candidates is None else one_list(candidates).values.numpy(),
            )

    def updated(self, delta: str | Path, *, verify: bool = False) -> Bundle:
        """This bundle with what a delta of it changes: weights, and rows changed, born or gone. Files of both stay mapped; only
        the model is copied. verify: checks the tables of the delta too."""
        manifest = manifests.read(Path(delta))
        if manifest.base is None:
            raise ValueError(f"{delta} is a full bundle, not a delta: load it with load_bundle")
        if manifest.base.crc != self.manifest.crc:
            raise ValueError(
                f"{delta} holds what changed since version {manifest.base.version} ({manifest.base.name}), this is version "
                f"{self.version}: apply the deltas in their order, each once, or load a full bundle"
            )
        layers = _open(manifest, verify=verify)
        rows = {
            stored.name: self._of(stored.name).with_layer(stored, layers[stored.name]) for stored in manifest.tables
        }
        # Weights may fit a model that computes otherwise: of more heads, say.
        same = manifest.recipe == self.manifest.recipe
        model = copy.deepcopy(self.model) if same else _made(manifest).to(self._device)
        return Bundle(manifest, _with_weights(model, manifest), rows)

    def _of(self, table: str) -> TableRows:
        if table not in self._rows:
            raise ValueError(f"table {table!r}, {did_you_mean(str(table), list(self._rows))}")
        return self._rows[table]

    def _inputs(self, batch: Batch, features: Sequence[Feature]) -> tuple[Batch, dict[str, Any]]:
        return batch.to(self._device), lookup(batch, features, self._rows, self._device)

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))


def load_bundle(path: str | Path, *, model: nn.Module | None = None, verify: bool = False) -> Bundle:
    """A trained model with its rows, ready to answer, from the folder that `nestpipe export` wrote. Takes as long for a large
    table as for a small one: rows are read when they are asked for, from pages that all processes on the machine share.

    A delta is loaded with the bundles that it builds on, which lie beside it.

    model: for a run without a config, or whose class is not to be found here: the model, whose weights are replaced. Else it is
        made as the run's config says.
    verify: checks every byte. Without it, manifest, sizes and weights are checked (`nestpipe bundle verify` checks the rest).

    ValueError (nestpipe.sealed.Damaged) for a bundle that is not complete or sound.
    """
    newest, *bases = manifests.chain(Path(path))
    layers: dict[str, list[Layer]] = {stored.name: [] for stored in newest.tables}
    for manifest in (*reversed(bases), newest):
        for name, layer in _open(manifest, verify=verify).items():
            if name not in layers:
                raise Damaged(f"{newest.path} and its base {manifest.path} have other tables; {manifests.KIND.remedy}")
            layers[name].append(layer)
    made = _made(newest) if model is None else model
    rows = {stored.name: TableRows(stored, layers[stored.name]) for stored in newest.tables}
    return Bundle(newest, _with_weights(made, newest), rows)


def _open(manifest: Manifest, *, verify: bool) -> dict[str, Layer]:
    if verify:
        manifests.check(manifest, [stored.file for stored in manifest.tables])
    return {stored.name: Layer.open(manifest, stored) for stored in manifest.tables}


def _made(manifest: Manifest) -> nn.Module:
    if manifest.recipe is None:
        raise ValueError(
            f"{manifest.path} does not say how its model is made, because the run had no config: "
            f"load_bundle(path, model=...) with a model of the same class and sizes"
        )
    try:
        with torch.random.fork_rng(devices=[]):  # its first weights are drawn; they are of no account
            return kinds.made("model", kinds.model_class(manifest.recipe), kinds.arguments(manifest.recipe))
    except ValueError as error:
        raise ValueError(f"{manifest.path}: {error}; or give the model: load_bundle(path, model=...)") from error


def _with_weights(model: nn.Module, manifest: Manifest) -> nn.Module:
    manifests.check(manifest, [DENSE])
    state = weights.from_bytes((manifest.path / DENSE).read_bytes())
    weights.check_fits(state, model, where=manifest.path, kind="bundle")
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)

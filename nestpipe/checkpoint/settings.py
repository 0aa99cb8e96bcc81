"""Settings: what a trainer that goes on wants back from a checkpoint, beside tables, model and place in the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a table travels and who holds it decide the order of sums, so a run that goes on must not decide anew.

    lr_factor: what `scale_lr` was told last.
    pooled_at_owner: {table: whether its bags are pooled where its rows live}; None: not decided yet.
    micro_batches, balance: as measured; None where nothing was.
    config: of the run, by section; None for one that has none.
    run: which one it is; None where nobody has said.
    owners: {table: the workers that hold it}; None: not decided yet.
    hot: {table: the keys of its hot rows}, of tables that are to have any; None: not chosen yet.
    inits, features, recipe: for `nestpipe export`: {table: the law of its first values}, features as declared, the model's kind
        and arguments. None: there is no config that says so; or a version has saved it that did not note them.
    replicas: {table: how many times it was held, if more than once}: of workers that held the same each has saved a part.
    extra: JSON values by name, see Trainer.extra.
    """

    lr_factor: float
    pooled_at_owner: Mapping[str, bool | None]
    owners: Mapping[str, Sequence[int] | None]
    micro_batches: int | None = None
    config: Mapping[str, Mapping[str, Any]] | None = None
    run: str | None = None
    replicas: Mapping[str, int] = dataclasses.field(default_factory=dict)
    hot: Mapping[str, Sequence[int] | None] = dataclasses.field(default_factory=dict)
    balance: float | None = None
    inits: Mapping[str, Mapping[str, Any]] | None = None
    features: Sequence[Mapping[str, Any]] | None = None
    recipe: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, values: Any) -> Settings:
        """What an earlier version did not save yet has its default, what a later one may add is passed over. Raises ValueError or
        KeyError for what nestpipe never wrote."""
        if type(values) is not dict:
            raise ValueError(f"the settings are {values!r:.80}")
        config, measured, run = (values.get(name) for name in ("config", "micro_batches", "run"))
        lr_factor, pooled_at_owner, owners = (values[name] for name in ("lr_factor", "pooled_at_owner", "owners"))
        if type(lr_factor) not in (int, float) or type(pooled_at_owner) is not dict or type(owners) is not dict:
            raise ValueError(f"the settings are {values!r:.80}")
        if config is not None and (type(config) is not dict or not all(type(part) is dict for part in config.values())):
            raise ValueError(f"the config is {config!r:.80}")
        if type(measured) not in (int, type(None)) or type(run) not in (str, type(None)):
            raise ValueError(f"micro_batches is {measured!r:.40}, the run {run!r:.40}")
        replicas = values.get("replicas", {})
        if type(replicas) is not dict or not all(type(count) is int for count in replicas.values()):
            raise ValueError(f"the replicas are {replicas!r:.80}")
        hot = values.get("hot", {})
        if type(hot) is not dict or not all(_are_keys(keys) for keys in hot.values()):
            raise ValueError(f"the hot rows are {hot!r:.80}")
        balance = values.get("balance")
        if type(balance) not in (int, float, type(None)):
            raise ValueError(f"the balance is {balance!r:.40}")
        inits, features, recipe = (values.get(name) for name in ("inits", "features", "recipe"))
        if type(inits) not in (dict, type(None)) or type(recipe) not in (dict, type(None)):
            raise ValueError(f"inits are {inits!r:.80}, the recipe of the model {recipe!r:.80}")
        if features is not None and (type(features) is not list or not all(type(one) is dict for one in features)):
            raise ValueError(f"the features are {features!r:.80}")
        extra = values.get("extra", {})
        if type(extra) is not dict:
            raise ValueError(f"extra is {extra!r:.80}")
        return cls(
            lr_factor,
            pooled_at_owner,
            owners,
            measured,
            config,
            run,
            replicas,
            hot,
            balance,
            inits,
            features,
            recipe,
            extra=extra,
        )

    @property
    def shared_out(self) -> bool:
        """Whether rows of one worker may be in the files of others, which programs from before that do not look into."""
        return bool(self.replicas or any(self.hot.values()))


def _are_keys(keys: Any) -> bool:
    return keys is None or (type(keys) is list and all(type(key) is int and -(2**63) <= key < 2**63 for key in keys))

"""The class that `data.kind` names, and what a class takes of [data] and [model]. (nestpipe.kinds has those of models.)"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from nestpipe.data import DATASETS, SPLITS
from nestpipe.data.tabular import Tabular
from nestpipe.errors import did_you_mean
from nestpipe.fields import check, hints
from nestpipe.kinds import MODELS, arguments, class_of

BATCHES = "batches(self, split, *, batch_size, rank, world, seed, epoch=0)"


def dataset_class(data: Mapping[str, Any]) -> type[Any]:
    """Of [data]."""
    return class_of("data", data, DATASETS, _not_a_dataset)


def check_features(data: Any) -> None:
    """What a class of the user's own sets when it is made, and so cannot be seen before."""
    features = getattr(data, "features", None)
    fits = isinstance(features, tuple | list) and features and all(isinstance(name, str) for name in features)
    if not fits:
        got = "it has none" if features is None else f"it is {features!r}"
        raise ValueError(
            f"config: {type(data).__name__}.features must be the names in `batch.keys` of its batches, as in "
            f'self.features = ("user", "item"); {got}'
        )


def check_arguments(section: str, values: Mapping[str, Any], kind: type[Any]) -> None:
    """Raises ValueError for entries that the class does not take; for our own also for values that are not of their type."""
    parameters = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # it takes anything
    for name, value in arguments(values).items():
        if name not in parameters:
            raise ValueError(f"config: {section}.{name}, {did_you_mean(name, list(parameters))}")
        if kind in (*DATASETS.values(), *MODELS.values()):
            check(f"config: {section}.{name}", value, hints(kind.__init__)[name])
    if section == "data" and issubclass(kind, Tabular):
        try:
            inspect.signature(kind).bind(**arguments(values))
            kind.check_entries(arguments(values))
        except TypeError as error:
            raise ValueError(f"config: the entries of [data] do not fit {kind.__name__}: {error}") from error
        except ValueError as error:
            raise ValueError(f"config: data: {error}") from error


def _not_a_dataset(own: Any) -> str | None:
    """See nestpipe.data.Dataset."""
    if not isinstance(own, type):
        return f"it must be a class with {BATCHES}"
    batches = getattr(own, "batches", None)
    if not callable(batches):
        return f"it has no method {BATCHES}"
    try:
        inspect.signature(batches).bind(None, SPLITS[0], batch_size=1, rank=0, world=1, seed=0, epoch=0)
    except TypeError as error:
        return f"its method must be {BATCHES}: {error}"
    return None

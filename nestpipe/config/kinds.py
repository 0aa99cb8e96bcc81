"""The classes that `data.kind` and `model.kind` name: ours, or the user's own as MODULE:CLASS."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from nestpipe import models
from nestpipe.data import DATASETS, SPLITS
from nestpipe.errors import did_you_mean
from nestpipe.fields import check, hints

MODELS: dict[str, type[nn.Module]] = {
    "dlrm": models.DLRM,
    "fuxi": models.FuXi,
    "fuxi_ranker": models.FuXiRanker,
    "hstu": models.HSTU,
    "hstu_ranker": models.HSTURanker,
}
BATCHES = "batches(self, split, *, batch_size, rank, world, seed, epoch=0)"


def dataset_class(data: Mapping[str, Any]) -> type[Any]:
    """Of [data]."""
    return _class("data", data, DATASETS, _not_a_dataset)


def model_class(model: Mapping[str, Any]) -> type[nn.Module]:
    """Of [model]."""
    return _class("model", model, MODELS, _not_a_model)


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


def arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of [data] or [model] that are given to the class."""
    return {name: value for name, value in values.items() if name != "kind"}


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


def made(section: str, kind: type[Any], given: Mapping[str, Any]) -> Any:
    """Arguments that do not fit the signature are the config's fault; what goes wrong inside a class of the user's own is not,
    and its traceback shows the line."""
    try:
        inspect.signature(kind).bind(**given)
    except TypeError as error:
        raise ValueError(f"config: the entries of [{section}] do not fit {kind.__name__}: {error}") from error
    return kind(**given)


def _class(
    section: str, values: Mapping[str, Any], known: Mapping[str, type[Any]], problem: Callable[[Any], str | None]
) -> type[Any]:
    """problem: what the user's own class would need, if it is none of the right kind."""
    kind = values.get("kind")
    if kind is None:
        raise ValueError(
            f"config: {section}.kind is missing; one of {', '.join(sorted(known))}, or MODULE:CLASS of your own"
        )
    if not isinstance(kind, str) or ":" not in kind:
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"config: {section}.kind {kind!r}, {did_you_mean(str(kind), list(known))}")
        return known[kind]
    own = _imported(section, kind)
    wrong = problem(own)
    if wrong is not None:
        what = f"the class {own.__name__}" if isinstance(own, type) else f"a {type(own).__name__}"
        raise ValueError(f"config: {section}.kind {kind!r} is {what}; {wrong}")
    return own


def _imported(section: str, kind: str) -> Any:
    module_name, _, name = kind.partition(":")
    problem = f"config: {section}.kind {kind!r} cannot be imported"
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ValueError(f"{problem}: write MODULE:CLASS, as in package.module:{section.capitalize()}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{problem}: {error}. Modules are looked for in the folder where the command is run, and where Python looks"
        ) from error
    if not hasattr(module, name):
        classes = [known for known, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(f"{problem}: {module_name} has no {name!r}, {did_you_mean(name, classes)}")
    return getattr(module, name)


def _not_a_model(own: Any) -> str | None:
    if isinstance(own, type) and issubclass(own, nn.Module):
        return None
    return "it must be a class of torch.nn.Module"


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

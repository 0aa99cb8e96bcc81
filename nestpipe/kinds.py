"""The class that a `kind` names: one of ours, or the user's own as MODULE:CLASS."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from nestpipe import models
from nestpipe.errors import did_you_mean

MODELS: dict[str, type[nn.Module]] = {
    "dcn": models.DCN,
    "deepfm": models.DeepFM,
    "din": models.DIN,
    "dlrm": models.DLRM,
    "fuxi": models.FuXi,
    "fuxi_ranker": models.FuXiRanker,
    "hstu": models.HSTU,
    "hstu_ranker": models.HSTURanker,
    "mmoe": models.MMoE,
    "sasrec": models.SASRec,
    "two_tower": models.TwoTower,
}


def model_class(model: Mapping[str, Any]) -> type[nn.Module]:
    """Of [model]."""
    return class_of("model", model, MODELS, _not_a_model)


def arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of [data] or [model] that are given to the class."""
    return {name: value for name, value in values.items() if name != "kind"}


def made(section: str, kind: type[Any], given: Mapping[str, Any]) -> Any:
    """Arguments that do not fit the signature are the config's fault; what goes wrong inside a class of the user's own is not,
    and its traceback shows the line."""
    try:
        inspect.signature(kind).bind(**given)
    except TypeError as error:
        raise ValueError(f"config: the entries of [{section}] do not fit {kind.__name__}: {error}") from error
    return kind(**given)


def class_of(
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

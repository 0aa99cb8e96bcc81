"""Where a source of batches stands, by its own word: `state_dict()`, and `load_state_dict(state)` to go on from there.

These are the two methods of torchdata's StatefulDataLoader, and of any source of one's own that cannot be read again from its
beginning. A state is kept as JSON, with tensors, arrays and bytes as text in it; never as a pickle, which can run code.
"""

from __future__ import annotations

import base64
import contextlib
import math
from typing import Any

import numpy as np
import torch

_KIND = "__nestpipe__"  # marks what JSON has no word for


def state_of(source: Any) -> Any:
    """What the source says, as JSON; None if it says nothing."""
    state_dict = getattr(source, "state_dict", None)
    return None if state_dict is None else to_json(state_dict())


def has_state(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def to_json(value: Any, where: str = "state_dict()") -> Any:
    """A copy, so that it stays what it is when the source goes on. ValueError for what only a pickle could hold."""
    if value is None or isinstance(value, bool | str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [to_json(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, dict):
        items = {name: to_json(item, f"{where}[{name!r}]") for name, item in value.items()}
        if all(isinstance(name, str) for name in items) and _KIND not in items:
            return items
        return {_KIND: "dict", "items": [[to_json(name, f"a key of {where}"), item] for name, item in items.items()]}
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": to_json(list(value), where)}
    if isinstance(value, float):
        return {_KIND: "float", "value": repr(value)}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(TypeError):  # a dtype that NumPy does not have
            return {**to_json(value.detach().cpu().numpy(), where), _KIND: "tensor"}
    if isinstance(value, np.generic):
        return {**to_json(np.asarray(value), where), _KIND: "number"}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "base64": text}
    raise ValueError(
        f"{where} of the data is a {type(value).__name__}, which a checkpoint cannot hold: give numbers, strings, bytes, lists, "
        f"tuples, dicts, arrays and tensors"
    )


def from_json(value: Any) -> Any:
    """What `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {name: from_json(item) for name, item in value.items()}
    if kind == "dict":
        return {from_json(name): from_json(item) for name, item in value["items"]}
    if kind == "tuple":
        return tuple(from_json(value["items"]))
    if kind == "float":
        return float(value["value"])
    content = base64.b64decode(value["base64"])
    if kind == "bytes":
        return content
    array = np.frombuffer(content, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return torch.from_numpy(array) if kind == "tensor" else array[()] if kind == "number" else array

"""A model's weights as the bytes of a safetensors file, and back: of checkpoints and of bundles. No code is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import nn

EXTRA = "extra_state"  # of the model, as JSON, in the metadata


def to_bytes(model: nn.Module) -> bytes:
    state = model.state_dict()
    # Clones, because the format refuses tensors that share memory: tied weights.
    weights = {n: t.detach().cpu().contiguous().clone() for n, t in state.items() if isinstance(t, torch.Tensor)}
    extra = {name: value for name, value in state.items() if name not in weights}
    for name, value in extra.items():
        changed = _changed_by_json(value)
        if changed is not None:
            raise ValueError(
                f"the model's {name} ({changed}) can only be saved if get_extra_state gives a tensor or what JSON holds: "
                f"numbers, text, None, lists, and dicts whose keys are text"
            )
    return tensors_to_bytes(weights, metadata={EXTRA: json.dumps(extra)})


def _changed_by_json(value: Any) -> str | None:
    """The first thing in it that JSON refuses, or gives back as something else."""
    if isinstance(value, dict):
        keys = (f"a key {key!r}" for key in value if not isinstance(key, str))
        return next(keys, None) or _changed_by_json(list(value.values()))
    if isinstance(value, list):
        return next((changed for changed in map(_changed_by_json, value) if changed is not None), None)
    return None if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def from_bytes(content: bytes) -> dict[str, Any]:
    """The model's state, for `load_state_dict`."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    extra = json.loads(header.get("__metadata__", {}).get(EXTRA, "{}"))
    return {**tensors_from_bytes(content), **extra}


def check_fits(weights: dict[str, Any], model: nn.Module, *, where: Path, kind: str) -> None:
    """Raises ValueError that names the first weight that the model does not have, or has in another shape. kind: what `where`
    is."""
    here = model.state_dict()
    another = f"{where}: the model of the {kind} is another one"
    if set(weights) != set(here):
        odd = sorted(set(weights) ^ set(here))[0]
        raise ValueError(f"{another}: {odd!r} is {'here but not in it' if odd in here else 'in it but not here'}")
    for name, tensor in weights.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape != here[name].shape:
            raise ValueError(
                f"{another}: {name!r} has shape {tuple(tensor.shape)} in it, {tuple(here[name].shape)} here"
            )

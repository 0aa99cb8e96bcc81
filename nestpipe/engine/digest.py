"""Digest: one hash over all that training has made, to compare runs bit by bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.engine.step import Store
from nestpipe.errors import TrainingError
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.transport import Transport


def digest(stores: Sequence[Store], plan: ExchangePlan, model: nn.Module, transport: Transport) -> str:
    """Of every table's (key, row, optimizer state), in any order and on any number of workers, and the model's weights. Raises
    TrainingError if replicas that are kept exactly together differ."""
    sums = np.array([store.digest() for store in stores], np.uint64).reshape(len(stores), 2)
    if plan.together:
        everybody = np.array(transport.gather_objects(sums.tolist()), np.uint64)
        for k, store in enumerate(stores):
            if plan.is_exact(k) and transport.any(bool((everybody[plan.peers[k], k] != sums[k]).any())):
                raise TrainingError(f"the replicas of table {store.table.name!r} are not alike; this must never happen")
            if plan.is_copy(k, transport.rank):
                sums[k] = 0
    sums = transport.sum(sums.view(np.int64)).view(np.uint64)  # wraps around, as it should
    total = hashlib.blake2b(digest_size=16)
    for k, twin in plan.twins.items():  # of a table, wherever its rows are
        sums[k] += sums[twin]
    by_name = sorted((stores[k].table.name, sums[k].tolist()) for k in plan.declared)
    for name, (a, b) in by_name:
        total.update(f"{name} {a:016x} {b:016x};".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):  # get_extra_state
            try:
                total.update(f"{name} {json.dumps(tensor, sort_keys=True)};".encode())
            except TypeError as error:
                raise ValueError(
                    f"the model's {name} has no digest ({error}): let get_extra_state give a tensor or what JSON holds"
                ) from None
            continue
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()

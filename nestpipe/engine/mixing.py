"""Losses that mix samples: splitting a batch would change what they mean.

A model says so itself: `mixes_samples = True` (in-batch negatives, say) is refused where the batch is cut into
micro-batches; `False` is taken at its word. If it says nothing, the first micro-batch is tried in two ways and a
difference is warned about.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from nestpipe.batch import Batch, Jagged, Output

log = logging.getLogger("nestpipe")


def refuse_mixing(model: nn.Module, *, rank: int, world: int, micro_batches: int | str) -> None:
    """Raises ValueError, or warns, if the model says, or its layers show, that its loss mixes samples and the batch is split."""
    if world > 1 or micro_batches != 1:
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise ValueError(
                    f"the model's {name or type(module).__name__} is a batch norm, which mixes samples: its result would depend "
                    f"on how the batch is split over workers and micro-batches; use LayerNorm, or one worker and micro_batches=1"
                )
    if not getattr(model, "mixes_samples", False):
        return
    if micro_batches != 1:
        raise ValueError(
            f"the model declares mixes_samples = True, so its loss depends on which samples are together, and "
            f"micro_batches={micro_batches} would change it; use micro_batches=1 (with schedule 'dbp' lookups are hidden all "
            f"the same), or a loss of each sample by itself, such as negatives drawn per sample"
        )
    if world > 1 and rank == 0:
        log.warning("the model declares mixes_samples = True: samples are mixed within each worker's part of the batch")


def warn_if_mixed(model: nn.Module, batch: Batch, rows: dict[str, Any]) -> None:
    """Warns if the losses of the first half of the samples are not the same without the second half.

    The state of the random generator is left as it is: a data source may be drawing from it in another thread.
    """
    half = batch.size // 2
    if not half or getattr(model, "mixes_samples", None) is not None:
        return
    first_rows = {name: _first(part, half) for name, part in rows.items()}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            whole, again = (_losses(model(batch, rows)) for _ in range(2))
            alone = _losses(model(batch.slice(0, half), first_rows))
        random = not torch.equal(whole, again)
        if not random and not torch.allclose(whole[:half], alone, rtol=1e-3, atol=1e-5):
            sample = int((whole[:half] - alone).abs().argmax())
            log.warning(
                f"the loss of a sample depends on the other samples of its micro-batch (sample {sample}: "
                f"{float(whole[sample]):.6g} among {batch.size}, {float(alone[sample]):.6g} among {half}): cutting the batch "
                f"into micro-batches changes what is trained. Use micro_batches=1, or set mixes_samples = False in the model "
                f"to say that it is meant so"
            )
    except Exception as error:  # what is really wrong shows in training itself
        log.debug("could not try whether the model mixes samples: %s", error)
    finally:
        model.train(training)


def _first(part: Any, count: int) -> Any:
    if isinstance(part, Jagged):
        return part.slice(0, count)
    return part[:count]


def _losses(output: Any) -> torch.Tensor:
    return output.losses if isinstance(output, Output) else output

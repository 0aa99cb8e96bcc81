"""Losses that mix samples: splitting a batch would change what they mean.

A model says so itself: `mixes_samples = True` (in-batch negatives, say) is refused where the batch is cut into
micro-batches; "micro-batch" says that the samples of a micro-batch are meant, whatever the split, and is told at the start;
`False` is taken at its word. If it says nothing, it is tried on the first batch, before anything is updated.

The trial asks two things of some of the samples of a batch. Are their losses the same without the others? And have they a
gradient with respect to rows, dense inputs or labels of the others? The first sees what depends on the number, the lengths or
the statistics of other samples, the second what depends on their numbers, however little and whatever is drawn. Both are asked
of the batch as it is, and of made-up ones in which a mix shows better: rows are born small, and lists of a first batch may all
have one length, so there rows have unit size, and then some lists are cut short. To a model that treats each sample by itself
all of this is one and the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch, Jagged, labels_of, like_labels
from nestpipe.engine.dense import remember
from nestpipe.engine.draws import Mark
from nestpipe.engine.outputs import Checked, checked_output, tasks_of
from nestpipe.engine.sharing import GLOBAL, embed
from nestpipe.models.batch_norm import SyncBatchNorm

log = logging.getLogger("nestpipe")

MICRO_BATCH = "micro-batch"  # what a model declares that mixes the samples of a micro-batch, and is meant so
ENOUGH = 32  # samples to try, if the batch has as many; micro-batches may be of a single one
FEW = 4  # so few samples have other statistics than the batch
SAME, ABOUT_THE_SAME = 0.002, 0.03  # relative difference of losses that rounding makes; where some of it is in few bits
STEADY = 0.1  # of that difference between two runs on the same samples: more is chance
NOTHING = 1e-4  # of a gradient, against that of the samples' own rows: rounding, where sums cancel


def refuse_mixing(
    model: nn.Module,
    *,
    rank: int,
    world: int,
    micro_batches: int | str,
    balance: str | float = "none",
) -> None:
    """Raises ValueError, or warns, if the model says, or its layers show, that its loss mixes samples and the batch is split."""
    refuse_batch_norm(model, world=world, micro_batches=micro_batches)
    declared = getattr(model, "mixes_samples", None)
    if not any(declared is known for known in (None, True, False)) and declared not in (MICRO_BATCH, GLOBAL):
        raise ValueError(
            f"the model declares mixes_samples = {declared!r}; it is True, False, {MICRO_BATCH!r} or {GLOBAL!r}"
        )
    if not declared:
        return
    if declared == GLOBAL:
        missing = [name for name in ("embed", "compare") if not callable(getattr(model, name, None))]
        if missing:
            raise ValueError(
                f"the model declares mixes_samples = {GLOBAL!r} and has no method {missing[0]}; what is compared must go to all "
                f"workers in between embed(batch, rows) and compare(own, shared, first): see docs/negatives.md"
            )
        return
    if balance == "auto" and world > 1:
        raise ValueError(
            f"the model declares mixes_samples = {declared!r}, so its loss depends on which samples a worker has, and with "
            f"balance='auto' the clock would decide on it; give a number, 'tokens' or 'none'"
        )
    if declared == MICRO_BATCH:
        _tell_split(rank=rank, world=world, micro_batches=micro_batches)
        return
    if micro_batches != 1:
        raise ValueError(
            f"the model declares mixes_samples = True, so its loss depends on which samples are together, and "
            f"micro_batches={micro_batches} would change it; use micro_batches=1 (with schedule 'dbp' lookups are hidden all "
            f"the same), or a loss of each sample by itself, such as negatives drawn per sample"
        )
    if world > 1 and rank == 0:
        log.warning("the model declares mixes_samples = True: samples are mixed within each worker's part of the batch")


def refuse_batch_norm(model: nn.Module, *, world: int, micro_batches: int | str) -> None:
    """Raises ValueError if a batch norm that trains would see a part of the batch only. One in eval mode inside a model that
    trains is frozen: it treats each sample by itself."""
    for name, module in model.named_modules():
        frozen = model.training and not module.training and getattr(module, "track_running_stats", False)
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or frozen:
            continue
        what = f"the model's {name or type(module).__name__} is a batch norm, which mixes samples"
        if micro_batches != 1:
            raise ValueError(
                f"{what}: of micro_batches={micro_batches} each would be normalised by itself; use micro_batches=1 (with "
                f"schedule 'dbp' lookups are hidden all the same), LayerNorm, or freeze it with its eval()"
            )
        if world > 1 and not isinstance(module, SyncBatchNorm):
            raise ValueError(
                f"{what}: each of {world} workers would normalise its own part of the batch; use "
                f"nestpipe.models.SyncBatchNorm.convert(model), whose statistics are those of all workers, LayerNorm, or freeze "
                f"it with its eval()"
            )


def _tell_split(*, rank: int, world: int, micro_batches: int | str) -> None:
    if micro_batches == "auto":
        raise ValueError(
            f"the model declares mixes_samples = {MICRO_BATCH!r}, so its loss depends on the split, and with "
            f"micro_batches='auto' the clock would decide on it; give a number"
        )
    if rank == 0 and (world > 1 or micro_batches != 1):
        log.warning(
            f"the model declares mixes_samples = {MICRO_BATCH!r}: a sample's loss depends on the samples that share its "
            f"micro-batch, so the result depends on the split (micro_batches={micro_batches}, clustering, balance, {world} "
            f"workers); with the same split it is the same under every schedule"
        )


class Embedding(nn.Module):
    """The first half of a model whose loss is over all workers' samples, for a trial: micro-batches go through it one by one, so
    here each sample must be by itself. What belongs to no sample in particular is not looked at."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        own, shared = embed(self.model, batch, rows)
        per_sample = [part.sum() if isinstance(part, Jagged) else part for part in (*own.values(), *shared.values())]
        losses_B = torch.zeros(batch.size, device=next(iter(shared.values())).device)
        for part in per_sample:
            if len(part) == batch.size and part.is_floating_point():
                values = part.reshape(batch.size, -1)
                # Not a plain sum, nor one of squares: of vectors of one length that says nothing.
                losses_B = losses_B + values @ torch.linspace(0.5, 1.5, values.shape[1]).to(values)
        return losses_B


@dataclasses.dataclass
class Trial:
    """What a trial that has not found a mix leaves open.

    learns: whether losses depend on rows at all; they do not where an output layer begins with zeros.
    doubt: what could not be tried, for the user.
    """

    learns: bool = False
    doubt: str | None = None


def try_mixing(model: nn.Module, batch: Batch, rows: dict[str, Any]) -> Trial:
    """Raises ValueError if the loss of a sample depends on the other samples. Model and generator are left as they were."""
    draw = torch.Generator().manual_seed(batch.size)
    order = torch.randperm(batch.size, generator=draw)
    half = batch.size // 2
    subsets = [part.sort().values for part in (order[:half], order[half : half + min(FEW, half)])]
    trial = Trial()
    with _as_it_was(model), torch.enable_grad():
        for mode in (True, False):  # in training, and if that is random (dropout), in evaluation too
            if not mode:
                model.eval()
            try:
                steady = _look(model, batch, rows, subsets, trial)
            except _Mixed:
                raise
            except Exception as error:  # the batch itself is fine, or training will say so
                trial.doubt = (
                    f"it could not be tried whether the loss of a sample depends on the others: for some of its samples the "
                    f"model raises {type(error).__name__}: {error}"
                )
                return trial
            for cut, how in (
                (None, " (with made-up rows)"),
                (subsets[0], " (with made-up rows, some lists cut short)"),
            ):
                made_up = _made_up(batch, rows, draw, cut)
                try:
                    steady &= _look(model, *made_up, subsets, trial, how)
                except _Mixed:
                    raise
                except Exception as error:  # a model need not take what its data does not hold
                    log.debug("not tried%s: %s", how, error)
            if steady:
                return trial
    trial.doubt = (
        "the model draws random numbers in eval mode too, so that it could only be tried whether the loss of a sample depends on "
        "the rows of others, not on their number or lengths"
    )
    return trial


class _Mixed(ValueError):
    def __init__(self, evidence: str) -> None:
        super().__init__(
            f"the loss of a sample depends on the other samples of its micro-batch, so cutting the batch into micro-batches "
            f"changes what is trained: {evidence}. Use micro_batches=1 (with schedule 'dbp' lookups are hidden all the same); "
            f"or a loss of each sample by itself (Jagged has mean, sum, max, first and last per sample; draw negatives per "
            f"sample); or say in the model that it is meant so: mixes_samples = '{MICRO_BATCH}', or "
            f"mixes_samples = False"
        )


def _look(
    model: nn.Module, batch: Batch, rows: dict[str, Any], subsets: list[Tensor], trial: Trial, how: str = ""
) -> bool:
    """Raises _Mixed if a subset of the samples is not by itself; returns whether losses are the same each time."""
    leaves = {name: _values(part).detach().requires_grad_() for name, part in rows.items()}
    rows = {name: _put(part, leaves[name]) for name, part in rows.items()}
    mark = Mark()
    tasks = tasks_of(model)
    whole, again = (checked_output(model(_copied(batch), rows), batch.size, tasks) for _ in range(2))
    same = ABOUT_THE_SAME if _rounds(whole.losses) else SAME
    # By chance two runs can be alike: a small batch has few masks of dropout.
    steady = not mark.moved and _difference(whole, again)[0] < STEADY * same
    for samples in subsets:
        named = {f"the rows of {name!r}": part for name, part in rows.items()}
        trial.learns |= _refuse_gradients(whole.losses, named, list(leaves.values()), samples, how) > 0
        if not steady:
            continue
        some = {name: _select(part, samples) for name, part in rows.items()}
        alone = checked_output(model(batch.select(samples), some), len(samples), tasks)
        among = Checked(whole.losses[samples], None if whole.weights is None else whole.weights[samples])
        difference, place, what, values = _difference(among, alone)
        if difference > same:
            raise _Mixed(
                f"sample {int(samples[place])} has the {what} {values[0]:.6g} among {batch.size} samples, {values[1]:.6g} among "
                f"{len(samples)} of them{how}"
            )
    for of_labels in (False, True):
        try:
            _look_at_inputs(model, batch, rows, subsets, how, of_labels=of_labels)
        except _Mixed:
            raise
        except Exception as error:  # a loss need not be differentiable by what is given
            log.debug("gradients of %s not tried%s: %s", "labels" if of_labels else "dense inputs", how, error)
    return steady


def _look_at_inputs(
    model: nn.Module, batch: Batch, rows: dict[str, Any], subsets: list[Tensor], how: str, *, of_labels: bool
) -> None:
    """Raises _Mixed if losses have a gradient with respect to dense inputs, or labels, of other samples."""
    inputs = labels_of(batch) if of_labels else batch.dense
    inputs = {name: part for name, part in inputs.items() if _values(part).is_floating_point()}
    if not inputs:
        return
    leaves, moved = [], {}
    for name, part in inputs.items():
        # The leaf is what is added, in units of the input: then all inputs count alike. And a model may change the sum in place.
        values = _values(part).detach()
        unit = float(values.square().mean().sqrt()) if values.numel() else 0.0
        leaves.append(torch.zeros_like(values).requires_grad_())
        moved[name] = _put(part, values + leaves[-1] * (unit or 1.0))
    given = _copied(batch)
    if of_labels:
        given.labels = like_labels(given, {**labels_of(given), **moved})
    else:
        given.dense.update(moved)
    losses = checked_output(model(given, rows), batch.size, tasks_of(model)).losses
    of_task = {name: f"the labels of {name!r}" if name else "the labels" for name in inputs}
    named = {of_task[name] if of_labels else f"the dense input {name!r}": part for name, part in inputs.items()}
    for samples in subsets:
        _refuse_gradients(losses, named, leaves, samples, how)


def _refuse_gradients(
    losses: Tensor, parts: Mapping[str, Tensor | Jagged], leaves: list[Tensor], samples: Tensor, how: str
) -> float:
    """Raises _Mixed if losses of some samples have a gradient with respect to the others' part of the leaves; returns how large
    it is with respect to their own. parts: whose leaves they are, which tells what belongs to which sample."""
    own, other, name = _gradients(losses[samples].sum(), parts, leaves, samples)
    if other > NOTHING * own:
        raise _Mixed(
            f"the losses of {len(samples)} samples have a gradient with respect to {name} of the other "
            f"{len(losses) - len(samples)}{how}"
        )
    return own


def _gradients(
    loss: Tensor, parts: Mapping[str, Tensor | Jagged], leaves: list[Tensor], samples: Tensor
) -> tuple[float, float, str]:
    """How large the gradient of some samples' loss is, with respect to their part of the leaves and to that of the others; and
    which leaf has most of the others'."""
    if not loss.requires_grad:
        return 0.0, 0.0, ""
    own, others = 0.0, {"": 0.0}
    grads = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    for (name, part), grad in zip(parts.items(), grads, strict=True):
        if grad is None:
            continue
        squares = grad.double().square().nan_to_num(0.0, 0.0, 0.0)
        is_own = torch.zeros(len(part), dtype=torch.bool, device=grad.device).index_fill(
            0, samples.to(grad.device), True
        )
        is_own = is_own[part.sample_ids()] if isinstance(part, Jagged) else is_own
        own += float(squares[is_own].sum())
        others[name] = float(squares[~is_own].sum())
    return own**0.5, sum(others.values()) ** 0.5, max(others, key=lambda name: others[name])


def _rounds(losses: Tensor) -> bool:
    """Whether numbers of another type than float32 may lie behind the losses: its graph has a cast, as autocast makes them, or
    cannot be looked into."""
    if losses.dtype != torch.float32 or losses.device.type != "cpu":
        return True
    seen, ahead = set(), [losses.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith(("ToCopy", "Compiled")):
            return True
        seen.add(node)
        ahead += [before for before, _ in node.next_functions]
    return False


def _difference(output: Checked, other: Checked) -> tuple[float, int, str, tuple[float, float]]:
    """The largest relative difference of losses or weights: how large, of which sample, of what, and both values. What is not
    finite is passed over: training says so."""
    worst = (0.0, 0, "loss", (0.0, 0.0))
    for what, a, b in (("loss", output.losses, other.losses), ("weight", output.weights, other.weights)):
        if a is None or b is None or not len(a):
            continue
        a, b = a.detach().double(), b.detach().double()
        sizes = (a.abs() + b.abs()).nan_to_num(0.0, 0.0, 0.0)
        apart = ((a - b).abs() / (sizes + sizes.mean())).nan_to_num(0.0, 0.0, 0.0) * 2
        place = int(apart.argmax())
        if float(apart[place]) > worst[0]:
            worst = (float(apart[place]), place, what, (float(a[place]), float(b[place])))
    return worst


def _made_up(
    batch: Batch, rows: dict[str, Any], draw: torch.Generator, cut: Tensor | None
) -> tuple[Batch, dict[str, Any]]:
    """The batch with other rows, of unit size, and with the lists of some samples cut to half their length."""

    def shortened(jagged: Jagged) -> Jagged:
        if cut is None:
            return jagged
        lengths = jagged.lengths.clone()
        lengths[cut] = (lengths[cut] + 1) // 2
        ids = jagged.sample_ids()
        kept = torch.arange(len(ids), device=ids.device) - jagged.offsets[:-1][ids] < lengths[ids]
        weights = None if jagged.weights is None else jagged.weights[kept]
        return Jagged.from_lengths(jagged.values[kept], lengths, weights)

    def unit(part: Any) -> Any:
        part = shortened(part) if isinstance(part, Jagged) else part
        values = _values(part)
        return _put(part, torch.randn(values.shape, generator=draw).to(values))

    dense = {name: shortened(part) if isinstance(part, Jagged) else part for name, part in batch.dense.items()}
    keys = {name: shortened(part) for name, part in batch.keys.items()}
    labels = {name: shortened(part) if isinstance(part, Jagged) else part for name, part in labels_of(batch).items()}
    return Batch(keys, dense, like_labels(batch, labels)), {name: unit(part) for name, part in rows.items()}


def _copied(batch: Batch) -> Batch:
    """For a model to use as it likes: some change their inputs in place, and training needs them as they were."""
    return batch.select(torch.arange(batch.size))


def _values(part: Any) -> Tensor:
    return part.values if isinstance(part, Jagged) else part


def _put(part: Any, values: Tensor) -> Any:
    return Jagged(values, part.offsets, part.weights) if isinstance(part, Jagged) else values


def _select(part: Any, samples: Tensor) -> Any:
    return part.select(samples) if isinstance(part, Jagged) else part[samples]


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """The generator is put back, and the model: some count calls, average what they see, or take their first batch to start
    from."""
    mark, put_back = Mark(), remember(model)
    try:
        yield
    finally:
        mark.put_back()
        put_back()

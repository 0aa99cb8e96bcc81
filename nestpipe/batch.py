"""Jagged and Batch: the data of one training step.

Shape legend: B samples, T keys (or positions) of all samples together, D row width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(eq=False)
class Jagged:
    """B lists of different lengths, stored end to end.

    `values` is [T] (keys, timestamps) or [T, D] (rows); list b is `values[offsets[b]:offsets[b + 1]]`.
    `weights`, if given, has one float per key: it scales the row in a pooled feature.

    One vector per sample, [B, D], comes from `sum`, `mean`, `max`, `first` and `last`. Each looks at its own list only: the
    result is the same to the bit whatever else is in the batch, so that micro-batches change nothing. An empty list gives
    zeros; `weights` are not applied. (The mean over `to_padded()` divides by the longest list of the batch instead: it mixes
    samples.)
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int | float]], *, dtype: torch.dtype = torch.int64) -> Jagged:
        """`Jagged.from_lists([[3, 5], [], [9]])`."""
        lengths = torch.tensor([len(entries) for entries in lists], dtype=torch.int64)
        values = torch.tensor([entry for entries in lists for entry in entries], dtype=dtype)
        return cls.from_lengths(values, lengths)

    @classmethod
    def from_strings(cls, strings: Iterable[Any]) -> Jagged:
        """`Jagged.from_strings([["shoe", "sock"], [], ["hat"]])`: the keys of strings, as `hash_strings` gives them.

        strings: for each sample a list of str or bytes; or a single one, or None for none. Or an Arrow array of such lists, or of
            strings: large ones, dictionaries and views too.
        """
        from nestpipe.strings import hash_lists  # Arrow and Numba, which a batch needs for nothing else

        keys, lengths = hash_lists(strings)
        return cls.from_lengths(torch.from_numpy(keys), torch.from_numpy(lengths))

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Jagged:
        _check_tensor("lengths of a Jagged", lengths)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return cls(values, offsets, weights)

    @classmethod
    def joined(cls, parts: Sequence[Jagged]) -> Jagged:
        """The lists of all, in order. All have weights, or none has."""
        weights = [part.weights for part in parts if part.weights is not None]
        values, lengths = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "lengths"))
        return cls.from_lengths(values, lengths, torch.cat(weights) if weights else None)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    def positions(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Where the values of the given samples lie, and the offsets of the lists made of them."""
        lengths = self.lengths[samples]
        offsets = torch.zeros(len(samples) + 1, dtype=torch.int64, device=samples.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        shift = torch.repeat_interleave(self.offsets[:-1][samples] - offsets[:-1], lengths)
        return torch.arange(len(shift), device=shift.device) + shift, offsets

    def select(self, samples: Tensor) -> Jagged:
        """The lists of the given samples, in the given order."""
        where, offsets = self.positions(samples)
        weights = None if self.weights is None else self.weights[where]
        return Jagged(self.values[where], offsets, weights)

    def slice(self, first: int, last: int) -> Jagged:
        """The lists of samples first to last - 1; values and weights are views."""
        a, z = int(self.offsets[first]), int(self.offsets[last])
        weights = None if self.weights is None else self.weights[a:z]
        return Jagged(self.values[a:z], self.offsets[first : last + 1] - a, weights)

    def to(self, device: torch.device) -> Jagged:
        weights = None if self.weights is None else self.weights.to(device, non_blocking=True)
        return Jagged(self.values.to(device, non_blocking=True), self.offsets.to(device, non_blocking=True), weights)

    def pin_memory(self) -> Jagged:
        weights = None if self.weights is None else self.weights.pin_memory()
        return Jagged(self.values.pin_memory(), self.offsets.pin_memory(), weights)

    def sample_ids(self) -> Tensor:
        """For each of the T values, the sample it belongs to."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.offsets.device), self.lengths)

    def places(self) -> Tensor:
        """For each of the T values, its place in its list: 0, 1, 2, ..."""
        starts = torch.repeat_interleave(self.offsets[:-1], self.lengths)
        return torch.arange(len(starts), device=starts.device) - starts

    def like(self, values: Tensor) -> Jagged:
        """The same lists of other values, one for each: what a layer made of them."""
        if len(values) != len(self.values):
            raise ValueError(f"Jagged.like: got {len(values)} values for lists of {len(self.values)}")
        return Jagged(values, self.offsets)

    def spread(self, per_sample: Tensor) -> Tensor:
        """[B, ...] -> [T, ...]: each sample's entry at each of its values; differentiable."""
        if len(per_sample) != len(self):
            raise ValueError(f"Jagged.spread: got {len(per_sample)} entries for {len(self)} lists")
        return per_sample.index_select(0, self.sample_ids())

    def split(self, heads: Tensor) -> tuple[Jagged, Jagged]:
        """The first `heads[b]` values of each list (all of a shorter one), and the others; differentiable."""
        heads = torch.minimum(heads.to(self.offsets), self.lengths)
        if heads.shape != self.lengths.shape or (len(heads) and int(heads.min()) < 0):
            raise ValueError("Jagged.split: heads must be one number of at least 0 for each sample")
        in_head = self.places() < heads.repeat_interleave(self.lengths)
        parts = []
        for kept, lengths in ((in_head, heads), (~in_head, self.lengths - heads)):
            where = kept.nonzero().squeeze(1)
            weights = None if self.weights is None else self.weights[where]
            parts.append(Jagged.from_lengths(self.values.index_select(0, where), lengths, weights))
        return parts[0], parts[1]

    def concat(self, other: Jagged) -> Jagged:
        """Each sample's list with the other's behind it: a history and its candidates, say; differentiable."""
        if len(other) != len(self):
            raise ValueError(f"Jagged.concat: {len(self)} lists and {len(other)}; both must be of the same samples")
        if (self.weights is None) != (other.weights is None):
            raise ValueError("Jagged.concat: one of the two has weights; give both weights, or none")
        offsets = self.offsets + other.offsets
        mine = self.places() + self.spread(offsets[:-1])
        others = other.places() + other.spread(offsets[:-1] + self.lengths)
        order = torch.cat([mine, others]).argsort()
        weights = None
        if self.weights is not None and other.weights is not None:
            weights = torch.cat([self.weights, other.weights])[order]
        return Jagged(torch.cat([self.values, other.values])[order], offsets, weights)

    def to_padded(self, length: int | None = None, value: float = 0) -> Tensor:
        """[B, length] or [B, length, D]; differentiable. `length` defaults to the longest list; longer lists are cut."""
        longest = int(self.lengths.max()) if len(self) else 0
        length = longest if length is None else length
        values, within = self.values, self.places()
        where = self.sample_ids() * length + within
        if longest > length:
            kept = within < length
            values, where = values[kept], where[kept]
        flat = values.new_full((len(self) * length, *values.shape[1:]), value)
        return flat.index_copy(0, where, values).view(len(self), length, *values.shape[1:])

    def sum(self) -> Tensor:
        """[B] or [B, D]: the sum of each list, added up in its own order; differentiable."""
        return self._zeros().index_add(0, self.sample_ids(), self.values)

    def mean(self) -> Tensor:
        """[B] or [B, D]: the mean of each list, zeros for an empty one; differentiable."""
        lengths = self.lengths.clamp(min=1).view(-1, *[1] * (self.values.ndim - 1))
        return self.sum() / lengths

    def max(self) -> Tensor:
        """[B] or [B, D]: the largest entry of each list and column, zeros for an empty list; differentiable, equal entries
        sharing the gradient."""
        where = self.sample_ids().view(-1, *[1] * (self.values.ndim - 1)).expand_as(self.values)
        return self._zeros().scatter_reduce(0, where, self.values, "amax", include_self=False)

    def first(self) -> Tensor:
        """[B] or [B, D]: the first entry of each list, zeros for an empty one; differentiable."""
        return self._entries(self.offsets[:-1])

    def last(self) -> Tensor:
        """[B] or [B, D]: the last entry of each list, zeros for an empty one; differentiable."""
        return self._entries(self.offsets[1:] - 1)

    def _entries(self, where: Tensor) -> Tensor:
        filled = self.lengths.nonzero()[:, 0]
        return self._zeros().index_copy(0, filled, self.values[where[filled]])

    def _zeros(self) -> Tensor:
        return self.values.new_zeros((len(self), *self.values.shape[1:]))

    def to_lists(self) -> list[list[Any]]:
        bounds = self.offsets.tolist()
        values = self.values.tolist()
        return [values[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


@dataclasses.dataclass(eq=False)
class Streamed:
    """B lists of rows that stay in host memory: what a model gets for a feature with `streamed=True`, to read as many of
    them at a time as it has room for. `nestpipe.ops.segmented_softmax` does.

    `gather(places, dtype)` gives the rows [n, D] at these places of all lists end to end, float32 on the model's device; a dtype
    of half precision rounds them on the way. `add_grad(places, grads)` adds [n, D] to their gradients, in the order of calls and
    of places: to be called in a backward only. `leaf` is an empty tensor for an operation to take as an input, so that autograd
    calls its backward even if nothing else has a gradient.

    The trial of a model that says nothing of `mixes_samples` gives a Jagged of the rows instead: take both.
    """

    offsets: Tensor
    gather: Callable[[Tensor, torch.dtype], Tensor]
    add_grad: Callable[[Tensor, Tensor], None]
    leaf: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]


SEEN = "seen"


@dataclasses.dataclass(eq=False)
class Batch:
    """One step's samples on one worker.

    keys: one Jagged of int64 keys per feature.
    dense: everything the model reads besides rows: tensors [B, ...] or Jagged.
    labels: [B] or [B, ...], if the model needs any; or a Jagged, one per candidate of a sample. Of several tasks: a dict by task.

    `dense["seen"]` of a batch that is ranked: a Jagged of all keys that each sample's user has had, where the history that the
    model reads is only the end of it (see `Trainer.evaluate_ranking`).
    """

    keys: dict[str, Jagged]
    dense: dict[str, Tensor | Jagged] = dataclasses.field(default_factory=dict)
    labels: Tensor | Jagged | dict[str, Tensor | Jagged] | None = None

    @property
    def size(self) -> int:
        """The number of samples B."""
        for part in (*self.keys.values(), *self.dense.values(), *labels_of(self).values()):
            return len(part)
        return 0

    def select(self, samples: Tensor) -> Batch:
        """The given samples, in the given order."""
        return self._map(lambda jagged: jagged.select(samples), lambda tensor: tensor[samples])

    def slice(self, first: int, last: int) -> Batch:
        """Samples first to last - 1, without a copy: how a micro-batch is cut out."""
        if first == 0 and last == self.size:
            return self
        return self._map(lambda jagged: jagged.slice(first, last), lambda tensor: tensor[first:last])

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":  # where batches are made
            return self
        return self._map(lambda jagged: jagged.to(device), lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which a device reads without the CPU."""
        return self._map(Jagged.pin_memory, Tensor.pin_memory)

    def _map(self, jagged: Callable[[Jagged], Jagged], tensor: Callable[[Tensor], Tensor]) -> Batch:
        def of_either(part: Tensor | Jagged) -> Tensor | Jagged:
            return jagged(part) if isinstance(part, Jagged) else tensor(part)

        return Batch(
            keys={name: jagged(part) for name, part in self.keys.items()},
            dense={name: of_either(part) for name, part in self.dense.items()},
            labels=like_labels(self, {name: of_either(part) for name, part in labels_of(self).items()}),
        )

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """One batch with the samples of all, in order. All have the same parts."""
        if len(batches) == 1:
            return batches[0]

        def join(parts: list[Any]) -> Any:
            return Jagged.joined(parts) if isinstance(parts[0], Jagged) else torch.cat(parts)

        first, labels = batches[0], [labels_of(batch) for batch in batches]
        return cls(
            keys={name: join([batch.keys[name] for batch in batches]) for name in first.keys},
            dense={name: join([batch.dense[name] for batch in batches]) for name in first.dense},
            labels=like_labels(first, {name: join([of_batch[name] for of_batch in labels]) for name in labels[0]}),
        )

    @classmethod
    def empty(cls, feature_names: Sequence[str]) -> Batch:
        """No samples: what a worker that ran out of data takes part with."""
        return cls({name: Jagged.from_lists([]) for name in feature_names})

    @classmethod
    def from_kjt(
        cls,
        kjt: Any,
        *,
        dense: Mapping[str, Tensor | Jagged] | None = None,
        labels: Tensor | Jagged | dict[str, Tensor | Jagged] | None = None,
    ) -> Batch:
        """Takes a TorchRec KeyedJaggedTensor; reads it through `keys()` and the JaggedTensors of `kjt[name]`."""
        keys = {}
        for name in kjt.keys():  # noqa: SIM118  (a KeyedJaggedTensor is not a mapping)
            jagged = kjt[name]
            weights = jagged.weights_or_none()
            keys[name] = Jagged(jagged.values().to(torch.int64), jagged.offsets().to(torch.int64), weights)
        return cls(keys, dict(dense or {}), labels)


SINGLE = ""  # the name, among labels by task, of labels that are of no task


def labels_of(batch: Batch) -> dict[str, Tensor | Jagged]:
    """By task; those of a batch without tasks are SINGLE."""
    if batch.labels is None:
        return {}
    return batch.labels if isinstance(batch.labels, dict) else {SINGLE: batch.labels}


def like_labels(batch: Batch, parts: dict[str, Tensor | Jagged]) -> Tensor | Jagged | dict[str, Tensor | Jagged] | None:
    """Parts that were made of `labels_of(batch)`, as the batch has them."""
    return parts if isinstance(batch.labels, dict) else parts.get(SINGLE)


@dataclasses.dataclass(eq=False)
class Output:
    """What a model's forward returns: one loss per sample, and what else the trainer should know.

    losses: [B], each the *sum* over what the sample is made of (tokens, say), so that splitting a batch changes nothing.
    weights: [B], how much each sample counts in the mean (its number of tokens); 1 each if left out.
    predictions: whatever metrics read, first dimension B (probabilities of a ranker); a Jagged where the labels are.

    A model of several tasks says so, `tasks = ("click", "like")`, and returns dicts by task. It trains on the sum of all
    losses of the global batch, divided by *one* number: the samples, or the sum of `weights` [B] if that is a tensor. So a
    task counts as much as the model multiplies its losses by, and samples that have no label for it (loss 0) make it count
    less. (Divided by a number of its own, a task's gradients could not be summed with those of others before the whole batch
    is known.) `weights` by task are for reports: the mean loss of a task is over its own, and its metrics are of samples
    whose weight is above 0.
    """

    losses: Tensor | dict[str, Tensor]
    weights: Tensor | dict[str, Tensor] | None = None
    predictions: Tensor | Jagged | dict[str, Tensor | Jagged] | None = None


def check_batch(batch: Batch, feature_names: Sequence[str]) -> None:
    """Raises ValueError, naming the feature and the value, for a batch that cannot be trained on."""
    for what, parts in (("keys", batch.keys), ("dense", batch.dense)):
        if not isinstance(parts, dict):
            raise ValueError(f"Batch.{what} must be a dict by name, got {type(parts).__name__}")
    for name, jagged in batch.keys.items():
        _check_kind(f"feature {name!r}", jagged)
    for name, part in batch.dense.items():
        if isinstance(part, Jagged):
            _check_kind(f"dense input {name!r}", part)
        else:
            _check_per_sample(f"dense input {name!r}", part)
    labels = {f"labels of {task!r}" if task else "labels": part for task, part in labels_of(batch).items()}
    for what, part in labels.items():
        if isinstance(part, Jagged):
            _check_kind(what, part)
        else:
            _check_per_sample(what, part)
    size = batch.size
    missing = [name for name in feature_names if name not in batch.keys]
    if missing:
        raise ValueError(
            f"feature {missing[0]!r} is declared but the batch has no keys for it (it has {sorted(batch.keys)}); "
            f"give every batch a Jagged for it (empty lists are fine) or drop the Feature"
        )
    for name, jagged in batch.keys.items():
        _check_jagged(f"feature {name!r}", jagged, size)
    for name in feature_names:
        values, weights = batch.keys[name].values, batch.keys[name].weights
        if values.dtype != torch.int64 or values.ndim != 1:
            raise ValueError(
                f"feature {name!r}: keys must be a 1-d int64 tensor, got {values.dtype} of shape {tuple(values.shape)}; "
                f"convert them with .to(torch.int64), strings with Jagged.from_strings"
            )
        if weights is not None:
            if weights.shape != values.shape or not weights.is_floating_point():
                raise ValueError(
                    f"feature {name!r}: weights must be one float per key, got {weights.dtype} of shape "
                    f"{tuple(weights.shape)} for {len(values)} keys"
                )
            _check_finite(f"feature {name!r}: weights", weights)
    for name, part in batch.dense.items():
        if isinstance(part, Jagged):
            _check_jagged(f"dense input {name!r}", part, size)
            _check_finite(f"dense input {name!r}", part.values)
        else:
            if len(part) != size:
                raise ValueError(f"dense input {name!r} has {len(part)} samples, the batch has {size}")
            _check_finite(f"dense input {name!r}", part)
    for what, part in labels.items():
        if isinstance(part, Jagged):
            _check_jagged(what, part, size)
            _check_finite(what, part.values)
        else:
            if len(part) != size:
                raise ValueError(f"{what} are given for {len(part)} samples, the batch has {size}")
            _check_finite(what, part)


def one_list(keys: Any) -> Jagged:
    """Keys, in whatever holds numbers, as the list of a single sample. Raises ValueError for what are no keys."""
    try:
        values = keys if isinstance(keys, Tensor) else torch.as_tensor(np.asarray(keys))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        values = torch.empty(0, 0)  # lists of different lengths, words, numbers beyond 64 bits
    if values.ndim != 1 or (values.dtype != torch.int64 and len(values)):
        raise ValueError(
            f"keys must be whole numbers of 64 bits (int64) in a 1-d tensor, array or list, got {keys!r:.80}"
        )
    return Jagged(values.to(torch.int64), torch.tensor([0, len(values)]))


def _check_tensor(what: str, values: Any) -> None:
    """Arrays and lists are not converted: of which type the numbers should be, only the user knows."""
    if not isinstance(values, Tensor):
        how = "torch.from_numpy(...)" if type(values).__module__ == "numpy" else "torch.tensor(...)"
        raise ValueError(f"{what} must be a tensor, got {type(values).__name__}; convert with {how}")


def _check_per_sample(what: str, values: Any) -> None:
    _check_tensor(what, values)
    if values.ndim == 0:
        raise ValueError(f"{what}: got a single number; give a tensor [B, ...], one entry per sample")


def _check_kind(what: str, jagged: Any) -> None:
    if not isinstance(jagged, Jagged):
        raise ValueError(
            f"{what} must be a Jagged, got {type(jagged).__name__}; see Jagged.from_lists and from_lengths"
        )
    _check_tensor(f"{what}: values", jagged.values)
    _check_tensor(f"{what}: offsets", jagged.offsets)
    if jagged.weights is not None:
        _check_tensor(f"{what}: weights", jagged.weights)


def _check_jagged(what: str, jagged: Jagged, size: int) -> None:
    offsets = jagged.offsets
    if offsets.dtype != torch.int64 or offsets.ndim != 1 or len(offsets) == 0:
        raise ValueError(
            f"{what}: offsets must be a 1-d int64 tensor of B + 1 entries, got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if len(jagged) != size:
        raise ValueError(f"{what} has {len(jagged)} samples, the batch has {size}")
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(jagged.values):
        raise ValueError(
            f"{what}: lengths do not sum up: offsets run from {int(offsets[0])} to {int(offsets[-1])}, "
            f"but there are {len(jagged.values)} values"
        )
    if size and int(jagged.lengths.min()) < 0:
        sample = int(jagged.lengths.argmin())
        raise ValueError(f"{what}: sample {sample} has the negative length {int(jagged.lengths[sample])}")


class NotFinite(ValueError):
    """NaN or infinity in an input or a loss: the one kind of bad batch that a run may be told to skip."""


def _check_finite(what: str, values: Tensor) -> None:
    if not values.is_floating_point() or not values.numel():
        return
    # One pass: the sum is finite unless an entry is not (or the sum overflows, which the slow path sorts out).
    if torch.isfinite(values.sum()):
        return
    bad = ~torch.isfinite(values)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise NotFinite(
            f"{what} holds {float(values[where])} at {list(where)}; clean the data, or set on_nonfinite='skip' "
            f"to leave such batches out and count them"
        )

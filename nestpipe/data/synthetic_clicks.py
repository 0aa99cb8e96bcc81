"""SyntheticClicks: bags of power-law keys, dense inputs and clicks from a hidden logistic model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from nestpipe.batch import Batch, Jagged
from nestpipe.data import dataset
from nestpipe.data.draws import (
    law_reach,
    mix,
    power_law,
    sample_state,
    stream_of,
    to_keys,
    uniform,
    uniform_ids,
    uniform_table,
)
from nestpipe.data.overlap import Overlap, cover
from nestpipe.data.synthetic import Synthetic
from nestpipe.kernels.jit import kernel

# What a stream is for; each purpose has its own, so that adding draws to one does not change another.
_DENSE, _CLICK, _HIDDEN, _LENGTH, _KEYS = 0, 1, 2, 3, 4
_UNIT_VARIANCE = 3**0.5  # uniform over -sqrt(3) .. sqrt(3) has variance 1


class SyntheticClicks(Synthetic):
    """Endless click samples: each epoch draws `num_samples` new ones from the same hidden law.

    Features "f0", "f1", ... have keys_per_table keys each (one number, or a list with one per feature); no two features
    share a key, so they may lie in one table or in several. Rank r of a feature is drawn with probability ~ r^-skew (0:
    uniform). A label is 1 with probability sigmoid(signal * z), where z adds a hidden weight per key and per dense
    input and has variance about 1.

    keys_per_bag: one number, or [least, most] for bags of different sizes.
    overlap: None, or the fraction (0 to 1) of the distinct keys of each feature of a training batch, all ranks
        together, that also occur in the training batch before it. With overlap set, every rank draws the whole global
        batch.
    spread_keys: keys all over the int64 range instead of small numbers.
    tasks: names of several things that a user may do; `labels` is then a dict by task. Each has a hidden law of its own, which
        shares most of its z with the first (0.8 of that one and 0.6 of one's own).
    seed: of the hidden law; the seed given to `batches` picks the samples.
    """

    def __init__(
        self,
        *,
        num_features: int = 8,
        keys_per_bag: int | list[int] = 10,
        keys_per_table: int | list[int] = 1_000_000,
        skew: float = 1.05,
        num_dense: int = 13,
        signal: float = 2.0,
        overlap: float | None = None,
        num_samples: int = 1_000_000,
        num_valid_samples: int = 20_000,
        num_test_samples: int = 20_000,
        spread_keys: bool = False,
        tasks: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(keys_per_bag, list) and len(keys_per_bag) != 2:
            raise ValueError(f"keys_per_bag is {keys_per_bag}; give one number, or the fewest and the most: [2, 10]")
        least, most = keys_per_bag if isinstance(keys_per_bag, list) else (keys_per_bag, keys_per_bag)
        sizes = keys_per_table if isinstance(keys_per_table, list) else [keys_per_table] * num_features
        dataset.check_at_least(
            num_features=(num_features, 1), keys_per_bag=(least, 0), most_keys_per_bag=(most, max(1, least)),
            keys_per_table=(min(sizes, default=1), 1), skew=(skew, 0), num_dense=(num_dense, 0),
            num_samples=(num_samples, 1), num_valid_samples=(num_valid_samples, 0),
            num_test_samples=(num_test_samples, 0), seed=(seed, 0),
        )  # fmt: skip
        if len(sizes) != num_features:
            raise ValueError(
                f"keys_per_table lists {len(sizes)} sizes for {num_features} features; give one per feature"
            )
        super().__init__(seed=seed, overlap=overlap, num_samples=(num_samples, num_valid_samples, num_test_samples))
        self.features = tuple(f"f{number}" for number in range(num_features))
        self.skew, self.num_dense, self.signal, self.spread_keys = float(skew), num_dense, signal, spread_keys
        self._bag_sizes = (least, most)
        self._sizes = sizes
        self._first_ids = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        if tasks is not None and (not tasks or len(set(tasks)) < len(tasks)):
            raise ValueError(f"tasks is {tasks}; give one or more different names, or leave it out")
        self.tasks = None if tasks is None else tuple(tasks)
        # The law of the first task is that of data without any.
        laws = [(_HIDDEN, *([number] if number else [])) for number in range(len(tasks or [""]))]
        self._hidden = [stream_of(seed, *law) for law in laws]
        self._dense_weights = [dataset.generator(seed, *law).standard_normal(num_dense) for law in laws]
        self._plans: dict[tuple[int, int], Overlap] = {}

    def _draw(self, where: tuple[int, ...], samples: np.ndarray, *, train: bool) -> Batch:
        return self._to_batch(where, samples, lambda number: self._bags(where, number, samples, self._sizes[number]))

    def _draw_overlapping(self, where: tuple[int, ...], samples: np.ndarray, index: int, *, full_size: int) -> Batch:
        bags_of = partial(self._overlapping_bags, where, samples=samples, index=index, full_size=full_size)
        return self._to_batch(where, samples, bags_of)

    def _to_batch(
        self, where: tuple[int, ...], samples: np.ndarray, bags_of: Callable[[int], tuple[np.ndarray, np.ndarray]]
    ) -> Batch:
        """bags_of: ids and offsets of the n-th feature."""
        logits = np.zeros((len(self._hidden), len(samples)))
        keys: dict[str, Jagged] = {}
        for number, name in enumerate(self.features):
            ids, offsets = bags_of(number)
            ids += self._first_ids[number]
            for of_task, hidden in zip(logits, self._hidden, strict=True):
                _add_weights(of_task, ids, offsets, hidden)
            keys[name] = dataset.jagged(to_keys(ids, spread_keys=self.spread_keys), offsets)
        dense = (uniform_table(stream_of(*where, _DENSE), samples, self.num_dense) * 2 - 1) * _UNIT_VARIANCE
        labels: list[torch.Tensor] = []
        for number, weights in enumerate(self._dense_weights):
            z = logits[number] / (2 * len(self.features)) ** 0.5 + dense @ weights / (2 * max(1, self.num_dense)) ** 0.5
            if number == 0:
                first = z
            else:
                z = 0.8 * first + 0.6 * z
            stream = stream_of(*where, _CLICK, *([number] if number else []))
            clicked = uniform_table(stream, samples, 1)[:, 0] < 1 / (1 + np.exp(-self.signal * z))
            labels.append(torch.from_numpy(clicked.astype(np.float32)))
        by_task: dict[str, torch.Tensor | Jagged] = dict(zip(self.tasks or (), labels, strict=False))
        inputs: dict[str, torch.Tensor | Jagged] = {"dense": torch.from_numpy(dense.astype(np.float32))}
        return Batch(keys, inputs, by_task or labels[0])

    def _bags(
        self, where: tuple[int, ...], number: int, samples: np.ndarray, num_ids: int, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if lengths is None:
            least, most = self._bag_sizes
            if least == most:
                lengths = np.full(len(samples), least)
            else:
                lengths = least + uniform_ids(stream_of(*where, _LENGTH, number), samples, 1, most - least + 1)[:, 0]
        offsets = dataset.offsets_of(lengths)
        return _draw_bags(stream_of(*where, _KEYS, number), samples, offsets, num_ids, self.skew), offsets

    def _overlapping_bags(
        self, where: tuple[int, ...], number: int, samples: np.ndarray, index: int, full_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        plan = self._plan(number, full_size)
        if len(samples) < full_size:
            plan = plan.at_most(fraction=self.overlap or 0.0, num_slots=self._distinct(number, len(samples)))
        lengths = self._even_lengths(len(samples), index)
        slots, offsets = self._bags(where, number, samples, max(1, plan.num_slots), lengths)
        cover(slots, num_slots=plan.num_slots, granule=1, num_free=0)
        return plan.to_ids(slots, index=index), offsets

    def _even_lengths(self, size: int, index: int) -> np.ndarray:
        """Bag sizes whose sum is the same for every batch, so that every batch has room for the same number of keys."""
        least, most = self._bag_sizes
        return dataset.generator(self.seed, index).permutation(least + np.arange(size) % (most - least + 1))

    def _plan(self, number: int, size: int) -> Overlap:
        if (number, size) not in self._plans:
            self._plans[number, size] = Overlap.plan(
                fraction=self.overlap or 0.0, num_slots=self._distinct(number, size), num_ids=self._sizes[number]
            )
        return self._plans[number, size]

    def _distinct(self, number: int, size: int) -> int:
        """How many distinct keys a batch of this size has under the law left to itself, by drawing one."""
        ids, _ = self._bags(
            (self.seed, 0, 0, 0), number, np.arange(size), self._sizes[number], self._even_lengths(size, 0)
        )
        return len(np.unique(ids))


@kernel
def _draw_bags(stream: np.uint64, samples: np.ndarray, offsets: np.ndarray, num_ids: int, skew: float) -> np.ndarray:
    ids = np.empty(offsets[-1], np.int64)
    reach = law_reach(num_ids, skew)
    for s in range(len(samples)):
        state = sample_state(stream, samples[s])
        for where in range(offsets[s], offsets[s + 1]):
            ids[where] = power_law(uniform(state, where - offsets[s]), num_ids, skew, reach)
    return ids


@kernel
def _add_weights(logits: np.ndarray, ids: np.ndarray, offsets: np.ndarray, hidden: np.uint64) -> None:
    """Adds the hidden weights of the keys of each bag, scaled so that bags of any size have variance 1."""
    for s in range(len(logits)):
        total = 0.0
        for where in range(offsets[s], offsets[s + 1]):
            total += (uniform(hidden ^ mix(np.uint64(ids[where])), 0) * 2 - 1) * _UNIT_VARIANCE
        logits[s] += total / np.sqrt(max(1, offsets[s + 1] - offsets[s]))

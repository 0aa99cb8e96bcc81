"""SyntheticSequences: user histories with a power law of popularity and a structure that a sequence model can learn."""

from __future__ import annotations

import statistics

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.data import dataset
from nestpipe.data.draws import (
    law_reach,
    power_law,
    sample_state,
    stream_of,
    to_keys,
    uniform,
    uniform_table,
)
from nestpipe.data.epoch import Epoch
from nestpipe.data.negatives import check_negatives, draw_negatives
from nestpipe.data.overlap import Overlap, cover
from nestpipe.data.synthetic import Synthetic
from nestpipe.kernels.jit import kernel

_LENGTHS = ("fixed", "geometric", "lognormal")
_FIRST_SECOND = 1_600_000_000
_QUANTILES = 4096  # of lengths
# What a stream is for; each purpose has its own, so that adding draws to one does not change another.
_WALK, _LENGTH, _NEGATIVES = 0, 1, 2


class SyntheticSequences(Synthetic):
    """Endless histories: each epoch draws `num_samples` new ones from the same hidden law.

    Item i lies in cluster i % num_clusters. From an item of cluster c the next one is, with probability
    `predictability`, from the cluster that follows c in a hidden cycle, otherwise from anywhere; inside a cluster, and
    anywhere, rank r is drawn with probability ~ r^-skew. So popularity is a power law beyond the num_clusters most
    popular items, and a model that learns the cycle ranks the target far above chance.

    lengths: "fixed", "geometric" or "lognormal" with mean `mean_length` before clipping to min_length .. max_length.
    num_negatives: uniform over all items. negatives_per: "sample": so many for each sample; "position": for each item of a
        history but the last.
    overlap: None, or the fraction (0 to 1) of the distinct keys of a training batch, history and negatives of all ranks
        together, that also occur in the training batch before it. With overlap set, every rank draws the whole global
        batch.
    spread_keys: keys all over the int64 range instead of 0 .. num_items - 1.
    seed: of the hidden law; the seed given to `batches` picks the samples.
    """

    features = ("history", "negatives")

    def __init__(
        self,
        *,
        num_items: int = 10_000,
        skew: float = 1.0,
        lengths: str = "geometric",
        mean_length: float = 20.0,
        min_length: int = 2,
        max_length: int = 50,
        num_negatives: int = 16,
        negatives_per: str = "sample",
        num_clusters: int | None = None,
        predictability: float = 0.8,
        overlap: float | None = None,
        num_samples: int = 100_000,
        num_valid_samples: int = 2_000,
        num_test_samples: int = 2_000,
        spread_keys: bool = False,
        seed: int = 0,
    ) -> None:
        if num_clusters is None:
            num_clusters = max(1, min(256, int(max(num_items, 1) ** 0.5)))
        dataset.check_at_least(
            num_items=(num_items, 1), skew=(skew, 0), num_clusters=(num_clusters, 1), min_length=(min_length, 1),
            max_length=(max_length, min_length), mean_length=(mean_length, min_length),
            num_samples=(num_samples, 1), num_valid_samples=(num_valid_samples, 0),
            num_test_samples=(num_test_samples, 0), seed=(seed, 0),
        )  # fmt: skip
        check_negatives(num_negatives, negatives_per)
        if num_clusters > num_items:
            raise ValueError(f"num_clusters is {num_clusters} for {num_items} items; use {num_items} at most")
        super().__init__(seed=seed, overlap=overlap, num_samples=(num_samples, num_valid_samples, num_test_samples))
        if not 0 <= predictability <= 1:
            raise ValueError(f"predictability is {predictability}; it must be between 0 and 1")
        self.num_items, self.skew = num_items, float(skew)
        self.num_negatives, self.negatives_per = num_negatives, negatives_per
        self.num_clusters, self.predictability = num_clusters, float(predictability)
        self.spread_keys = spread_keys
        self._length_quantiles = length_quantiles(lengths, mean_length, min_length, max_length)
        cycle = dataset.generator(seed).permutation(num_clusters)
        self._successors = np.empty(num_clusters, np.int64)
        self._successors[cycle] = np.roll(cycle, -1)
        self._plans: dict[int, Overlap] = {}

    def candidates(self) -> Tensor:
        """The keys of all items, sorted."""
        return dataset.sorted_keys(to_keys(np.arange(self.num_items), spread_keys=self.spread_keys))

    def epoch(self, split: str, *, seed: int, epoch: int) -> Epoch | None:
        """All samples of an epoch, to be read by index; None if neighbouring batches overlap, which are drawn as a whole."""
        if split == "train" and self.overlap is not None:
            return None
        where = self._where(split, seed, epoch)
        return Epoch(
            self._num_samples[split],
            "history",
            lambda places: self._drawn_lengths(where, places),
            lambda places: self._draw(where, places, train=split == "train"),
        )

    def _drawn_lengths(self, where: tuple[int, ...], samples: np.ndarray) -> np.ndarray:
        return self._lengths(uniform_table(stream_of(*where, _LENGTH), samples, 1)[:, 0])

    def _draw(self, where: tuple[int, ...], samples: np.ndarray, *, train: bool) -> Batch:
        lengths = self._drawn_lengths(where, samples)
        items, times = self._walk(where, samples, lengths + (not train), self.num_items)
        negatives, starts = self._negatives(where, samples, lengths, self.num_items)
        return self._to_batch(items, times, lengths, negatives, starts, with_targets=not train)

    def _negatives(
        self, where: tuple[int, ...], samples: np.ndarray, lengths: np.ndarray, num_items: int
    ) -> tuple[np.ndarray, np.ndarray]:
        stream = stream_of(*where, _NEGATIVES)
        return draw_negatives(
            stream, samples, lengths, num_items, num_negatives=self.num_negatives, per=self.negatives_per
        )

    def _lengths(self, u: np.ndarray) -> np.ndarray:
        return self._length_quantiles[(u * len(self._length_quantiles)).astype(np.int64)]

    def _walk(
        self, where: tuple[int, ...], samples: np.ndarray, lengths: np.ndarray, num_items: int
    ) -> tuple[np.ndarray, np.ndarray]:
        # With fewer items than clusters there is nothing to follow.
        successors = self._successors if num_items >= self.num_clusters else np.zeros(1, np.int64)
        offsets = dataset.offsets_of(lengths)
        return _walk(stream_of(*where, _WALK), samples, offsets, num_items, self.skew, successors, self.predictability)

    def _draw_overlapping(self, where: tuple[int, ...], samples: np.ndarray, index: int, *, full_size: int) -> Batch:
        size = len(samples)
        lengths = self._even_lengths(size, index)
        plan = self._plan(full_size)
        if size < full_size:
            plan = plan.at_most(fraction=self.overlap or 0.0, num_slots=self._distinct(size))
        slots, times = self._walk(where, samples, lengths, plan.num_slots)
        negatives, starts = self._negatives(where, samples, lengths, plan.num_slots)
        both = np.concatenate([slots, negatives])
        cover(both, num_slots=plan.num_slots, granule=self.num_clusters, num_free=negatives.size)
        ids = plan.to_ids(both, index=index)
        return self._to_batch(ids[: len(slots)], times, lengths, ids[len(slots) :], starts, with_targets=False)

    def _even_lengths(self, size: int, index: int) -> np.ndarray:
        """Lengths whose sum is the same for every batch, so that every batch has room for the same number of ids."""
        lengths = self._lengths((np.arange(size) + 0.5) / size)
        return dataset.generator(self.seed, index).permutation(lengths)

    def _plan(self, size: int) -> Overlap:
        if size not in self._plans:
            self._plans[size] = Overlap.plan(
                fraction=self.overlap or 0.0, num_slots=self._distinct(size), num_ids=self.num_items,
                granule=self.num_clusters,
            )  # fmt: skip
        return self._plans[size]

    def _distinct(self, size: int) -> int:
        """How many distinct ids a batch of this size has under the law left to itself, by drawing one."""
        where, samples, lengths = (self.seed, 0, 0, 0), np.arange(size), self._even_lengths(size, 0)
        items, _ = self._walk(where, samples, lengths, self.num_items)
        negatives, _ = self._negatives(where, samples, lengths, self.num_items)
        return len(np.unique(np.concatenate([items, negatives])))

    def _to_batch(
        self,
        items: np.ndarray,
        times: np.ndarray,
        lengths: np.ndarray,
        negatives: np.ndarray,
        negative_offsets: np.ndarray,
        *,
        with_targets: bool,
    ) -> Batch:
        labels = None
        if with_targets:  # each walk is one item longer than its history
            ends = np.cumsum(lengths + 1) - 1
            labels = torch.from_numpy(to_keys(items[ends], spread_keys=self.spread_keys))
            items, times = np.delete(items, ends), np.delete(times, ends)
        offsets = dataset.offsets_of(lengths)
        return Batch(
            keys={
                "history": dataset.jagged(to_keys(items, spread_keys=self.spread_keys), offsets),
                "negatives": dataset.jagged(to_keys(negatives, spread_keys=self.spread_keys), negative_offsets),
            },
            dense={"timestamps": dataset.jagged(times, offsets.copy())},
            labels=labels,
        )


def length_quantiles(kind: str, mean: float, shortest: int, longest: int) -> np.ndarray:
    """The lengths at evenly spaced quantiles: drawing one is a table lookup."""
    u = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    if kind == "fixed":
        lengths = np.full(_QUANTILES, mean)
    elif kind == "geometric":
        extra = mean - shortest
        lengths = shortest + (np.floor(np.log1p(-u) / np.log(extra / (extra + 1))) if extra > 0 else 0 * u)
    elif kind == "lognormal":
        normal = statistics.NormalDist()
        lengths = mean * np.exp(np.array([normal.inv_cdf(value) for value in u]) - 0.5)
    else:
        raise ValueError(f"lengths is {kind!r}; use one of {', '.join(_LENGTHS)}")
    return np.clip(np.rint(lengths), shortest, longest).astype(np.int64)


@kernel
def _walk(
    stream: np.uint64,
    samples: np.ndarray,
    offsets: np.ndarray,
    num_items: int,
    skew: float,
    successors: np.ndarray,
    predictability: float,
) -> tuple[np.ndarray, np.ndarray]:
    num_clusters = len(successors)
    per_cluster = (num_items + num_clusters - 1) // num_clusters
    inside, anywhere = law_reach(per_cluster, skew), law_reach(num_items, skew)
    items, times = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    for s in range(len(samples)):
        state = sample_state(stream, samples[s])
        second = _FIRST_SECOND + np.int64(uniform(state, 0) * 1e7)
        draw, item = 1, -1
        for where in range(offsets[s], offsets[s + 1]):
            if item >= 0 and uniform(state, draw) < predictability:
                cluster = successors[item % num_clusters]
                item = cluster + num_clusters * power_law(uniform(state, draw + 1), per_cluster, skew, inside)
                if item >= num_items:  # clusters differ by one item when the division leaves a rest
                    item -= num_clusters
            else:
                item = power_law(uniform(state, draw + 1), num_items, skew, anywhere)
            second += 1 + np.int64(-np.log1p(-uniform(state, draw + 2)) * 3600)
            items[where], times[where] = item, second
            draw += 3
    return items, times

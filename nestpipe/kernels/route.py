"""Kernels that lay messages out: which entry goes to which owner, at which place.

A *segment* is what one worker sends another of one table; segments of all tables to one worker lie side by side.
"""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import kernel
from nestpipe.kernels.keys import owner_of


@kernel
def copy_segments(source, source_start, target, target_start, counts):
    """For every w: target[target_start[w]:][:counts[w]] = source[source_start[w]:][:counts[w]]."""
    for w in range(len(counts)):
        a, b = source_start[w], target_start[w]
        for i in range(counts[w]):
            target[b + i] = source[a + i]


@kernel
def segment_places(counts, start, out):
    """out = the places of consecutive entries, counts[w] of them from start[w] on, for w in order."""
    n = 0
    for w in range(len(counts)):
        for i in range(counts[w]):
            out[n] = start[w] + i
            n += 1


@kernel
def mean_weights(offsets, weights, out):
    """out[i] = weight of key i divided by the sum over its bag; empty `weights` means 1 each."""
    for b in range(len(offsets) - 1):
        a, z = offsets[b], offsets[b + 1]
        if len(weights):
            total = np.float32(0)
            for i in range(a, z):
                total += weights[i]
            scale = np.float32(1) / total if total != 0 else np.float32(0)
            for i in range(a, z):
                out[i] = weights[i] * scale
        else:
            for i in range(a, z):
                out[i] = np.float32(1) / np.float32(z - a)


@kernel
def count_bags(keys, owners, offsets, last_bag, owner, num_bags, num_keys):
    """owner[i] = worker of keys[i]; how many bags have keys at each worker, and how many keys. last_bag: scratch [W]."""
    last_bag[:] = -1
    num_bags[:] = 0
    num_keys[:] = 0
    for b in range(len(offsets) - 1):
        for i in range(offsets[b], offsets[b + 1]):
            w = owner_of(keys[i], owners)
            owner[i] = w
            num_keys[w] += 1
            if last_bag[w] != b:
                last_bag[w] = b
                num_bags[w] += 1


@kernel
def fill_bags(
    keys, owner, offsets, weights, bag_next, key_next, vector_next, last_bag,
    lengths, sent_keys, sent_weights, vectors, vector_offsets,
):  # fmt: skip
    """Cuts every bag into one part per owner.

    Per owner, one after the other: lengths of parts, keys and their weights. At the source: `vectors` lists, bag after bag,
    where the parts' pooled vectors will arrive.
    bag_next, key_next, vector_next: first place of each owner in lengths, sent_keys and the buffer of vectors; used up.
    vector_offsets[0] says where the list goes on: bags may be filled in several calls.
    """
    last_bag[:] = -1
    n = vector_offsets[0]
    for b in range(len(offsets) - 1):
        for i in range(offsets[b], offsets[b + 1]):
            w = owner[i]
            if last_bag[w] != b:
                last_bag[w] = b
                lengths[bag_next[w]] = 0
                bag_next[w] += 1
                vectors[n] = vector_next[w]
                vector_next[w] += 1
                n += 1
            lengths[bag_next[w] - 1] += 1
            place = key_next[w]
            sent_keys[place] = keys[i]
            if len(weights):
                sent_weights[place] = weights[i]
            key_next[w] = place + 1
        vector_offsets[b + 1] = n


@kernel
def spread_over_bags(offsets, targets, out):
    """out[e] = targets[b] for every entry e of bag b."""
    for b in range(len(targets)):
        for e in range(offsets[b], offsets[b + 1]):
            out[e] = targets[b]

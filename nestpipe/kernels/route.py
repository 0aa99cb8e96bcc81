"""Kernels that lay messages out: which entry goes to which owner, at which place.

A *segment* is what one worker sends another of one table; segments of all tables to one worker lie side by side.
"""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import kernel


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
def mean_weights(offsets, weights, first, out):
    """out[first + i] = weight of key i divided by the sum over its bag; empty `weights` means 1 each."""
    for b in range(len(offsets) - 1):
        a, z = offsets[b], offsets[b + 1]
        if len(weights):
            total = np.float32(0)
            for i in range(a, z):
                total += weights[i]
            scale = np.float32(1) / total if total != 0 else np.float32(0)
            for i in range(a, z):
                out[first + i] = weights[i] * scale
        else:
            for i in range(a, z):
                out[first + i] = np.float32(1) / np.float32(z - a)


@kernel
def count_bags(inverse, owner, offsets, last_bag, num_bags, num_entries):
    """How many bags have keys at each owner, and how many keys. last_bag: scratch, one per owner."""
    last_bag[:] = -1
    num_bags[:] = 0
    num_entries[:] = 0
    for b in range(len(offsets) - 1):
        for i in range(offsets[b], offsets[b + 1]):
            w = owner[inverse[i]]
            num_entries[w] += 1
            if last_bag[w] != b:
                last_bag[w] = b
                num_bags[w] += 1


@kernel
def fill_bags(
    inverse, owner, place, key_start, offsets, weights, bag_start, entry_start, vector_start, last_bag,
    lengths, entries, entry_weights, vectors, vector_offsets,
):  # fmt: skip
    """Cuts every bag into one part per owner.

    Per owner, one after the other: lengths of parts, entries (place of the key among those sent to that owner) and their
    weights. At the source: `vectors` lists, bag after bag, where the parts' pooled vectors will arrive.
    bag_start, entry_start: first place of each owner in lengths / entries; used up as cursors, as is vector_start.
    """
    last_bag[:] = -1
    n = 0
    vector_offsets[0] = 0
    for b in range(len(offsets) - 1):
        for i in range(offsets[b], offsets[b + 1]):
            u = inverse[i]
            w = owner[u]
            if last_bag[w] != b:
                last_bag[w] = b
                lengths[bag_start[w]] = 0
                bag_start[w] += 1
                vectors[n] = vector_start[w]
                vector_start[w] += 1
                n += 1
            lengths[bag_start[w] - 1] += 1
            e = entry_start[w]
            entries[e] = place[u] - key_start[w]
            if len(weights):
                entry_weights[e] = weights[i]
            entry_start[w] += 1
        vector_offsets[b + 1] = n


@kernel
def entry_rows(entries, counts, key_start, inverse, out):
    """Entries name keys by their place in the source's message; out = which of the owner's distinct keys that is."""
    e = 0
    for s in range(len(counts)):
        for _ in range(counts[s]):
            out[e] = inverse[key_start[s] + entries[e]]
            e += 1


@kernel
def spread_over_bags(offsets, targets, out):
    """out[e] = targets[b] for every entry e of bag b."""
    for b in range(len(targets)):
        for e in range(offsets[b], offsets[b + 1]):
            out[e] = targets[b]

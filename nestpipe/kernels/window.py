"""Kernels of the frozen window: which micro-batch uses a row first and last, and where its vector then lies.

Keys come micro-batch by micro-batch; `ends[m]` is the number of keys up to the end of micro-batch m.
"""

from __future__ import annotations

from nestpipe.kernels.jit import kernel


@kernel
def first_and_last_use(inverse, ends, num_new, last):
    """inverse[i] numbers the distinct keys in order of first appearance. num_new[m] = how many appear first in micro-batch
    m; last[u] = the last one that uses u."""
    seen = 0
    i = 0
    for m in range(len(ends)):
        before = seen
        while i < ends[m]:
            u = inverse[i]
            if u == seen:
                seen += 1
            last[u] = m
            i += 1
        num_new[m] = seen - before


@kernel
def distinct_in_each(inverse, ends, num_new, request_of, origin):
    """Numbers the distinct keys of every micro-batch by themselves: inverse[i] becomes that number, origin[r] = which
    distinct key of the batch number r is. Returns how many; num_new[m] = how many of micro-batch m.

    request_of: scratch, one per distinct key of the batch.
    """
    request_of[:] = -1
    n = 0
    i = 0
    for m in range(len(ends)):
        before = n
        while i < ends[m]:
            u = inverse[i]
            if request_of[u] < before:
                request_of[u] = n
                origin[n] = u
                n += 1
            inverse[i] = request_of[u]
            i += 1
        num_new[m] = n - before
    return n


@kernel
def count_by_part(parts, counts, workers, out):
    """Entries come in segments, counts[s] of worker workers[s]: out[p, w] = how many of worker w are of part p."""
    out[:] = 0
    e = 0
    for s in range(len(counts)):
        for _ in range(counts[s]):
            out[parts[e], workers[s]] += 1
            e += 1


@kernel
def places_by_part(parts, counts, workers, next_place, out):
    """As above: out[e] = the next free place of the entry's part and worker. next_place [P, W] is used up."""
    e = 0
    for s in range(len(counts)):
        w = workers[s]
        for _ in range(counts[s]):
            p = parts[e]
            out[e] = next_place[p, w]
            next_place[p, w] += 1
            e += 1

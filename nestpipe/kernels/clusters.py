"""Kernels that put the samples of a batch into micro-batches by the rows they use.

Legend: start, rows: sample s uses the distinct rows `rows[start[s]:start[s + 1]]`; tokens[s]: its keys, repeats included;
home[s]: its micro-batch, -1 while it has none; value[r]: what it costs to bring row r into one more micro-batch.
Nothing here is random: the same batch gives the same micro-batches.
"""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import inlined, kernel

LEVELS = 512  # of a queue by score; finer ones choose no better
MOST_SWAPS = 1024  # each looks through all samples
SLACK = 0.02  # how far the predicted tokens of a micro-batch may be off before they come before shared rows


@kernel
def distinct_rows(feature_start, ids, num_rows):
    """start, rows, and frequency[r] = the samples that use row r.

    ids[feature_start[f, s] : feature_start[f, s + 1]] are the rows of feature f in sample s.
    """
    num_features, size = feature_start.shape[0], feature_start.shape[1] - 1
    start, rows = np.zeros(size + 1, np.int64), np.empty(len(ids), np.int32)
    frequency, seen_in = np.zeros(num_rows, np.int32), np.full(num_rows, -1, np.int32)
    n = 0
    for s in range(size):
        for f in range(num_features):
            for i in range(feature_start[f, s], feature_start[f, s + 1]):
                row = ids[i]
                if seen_in[row] != s:
                    seen_in[row] = s
                    frequency[row] += 1
                    rows[n] = row
                    n += 1
        start[s + 1] = n
    return start, rows[:n], frequency


@kernel
def users(start, rows, frequency, wanted):
    """The inverse, for the wanted rows: row r is used by the samples `user[user_start[r]:user_start[r + 1]]`."""
    user_start = np.zeros(len(frequency) + 1, np.int64)
    for r in range(len(frequency)):
        user_start[r + 1] = user_start[r] + (frequency[r] if wanted[r] else 0)
    place, user = user_start[:-1].copy(), np.empty(user_start[-1], np.int32)
    for s in range(len(start) - 1):
        for i in range(start[s], start[s + 1]):
            r = rows[i]
            if wanted[r]:
                user[place[r]] = s
                place[r] += 1
    return user_start, user


@kernel
def costs(start, rows, value):
    """What each sample costs alone: the sum of the values of its rows."""
    out = np.zeros(len(start) - 1, np.float32)
    for s in range(len(out)):
        for i in range(start[s], start[s + 1]):
            out[s] += value[rows[i]]
    return out


@inlined
def _link(after, before, s, head):
    after[s], before[s] = after[head], head
    before[after[head]] = s
    after[head] = s


@inlined
def _unlink(after, before, s):
    after[before[s]] = after[s]
    before[after[s]] = before[s]


@kernel
def grow(start, rows, user_start, user, value, cost, tokens, home, last, m, size, want):
    """Fills micro-batch m with `size` homeless samples of about `want` tokens that bring in few rows. Returns their tokens.

    Greedy: always the sample whose rows that are not there yet cost least beyond the usual price of its tokens. A queue
    for short and one for long samples keep the tokens right: who is behind takes a long one. Each row comes in once
    and then lowers the score of its users, so the time is linear in the keys of those. The queues are rings of samples
    by score, which move in constant time. last[r]: scratch, the micro-batch that row r came into last.
    """
    batch = len(home)
    free = np.flatnonzero(home < 0)
    price = cost[free].sum() / max(tokens[free].sum(), 1)
    mean, most = tokens[free].mean(), tokens[free].max()
    score = (cost - price * tokens).astype(np.float32)
    lowest, highest = -price * most, score[free].max()
    scale = (LEVELS - 1) / max(highest - lowest, 1e-6)
    after = np.arange(
        batch + 2 * LEVELS
    )  # entry batch + q * LEVELS + level is the head of a ring, q = 1 for long samples
    before, ring = after.copy(), np.empty(batch, np.int64)
    low = np.zeros(2, np.int64)  # no lower ring holds a sample
    for i in range(len(free) - 1, -1, -1):  # backwards, so that of equals the first comes first
        s = free[i]
        ring[s] = batch + (tokens[s] > mean) * LEVELS + max(0, int((score[s] - lowest) * scale))
        _link(after, before, s, ring[s])
    have = 0
    for taken in range(size):
        q = 1 if have * size <= want * taken else 0
        for _ in range(2):
            while low[q] < LEVELS and after[batch + q * LEVELS + low[q]] == batch + q * LEVELS + low[q]:
                low[q] += 1
            if low[q] < LEVELS:
                break
            q = 1 - q
        chosen = after[batch + q * LEVELS + low[q]]
        _unlink(after, before, chosen)
        home[chosen] = m
        have += tokens[chosen]
        for i in range(start[chosen], start[chosen + 1]):
            r = rows[i]
            if last[r] == m:
                continue
            last[r] = m
            for j in range(user_start[r], user_start[r + 1]):
                s = user[j]
                if home[s] >= 0:
                    continue
                score[s] -= value[r]
                q = (ring[s] - batch) // LEVELS
                level = max(0, int((score[s] - lowest) * scale))
                to = batch + q * LEVELS + level
                if to != ring[s]:
                    _unlink(after, before, s)
                    _link(after, before, s, to)
                    ring[s] = to
                    low[q] = min(low[q], level)
    return have


@kernel
def anchors(start, rows, frequency, most):
    """A row that names a sample's likely mates: its most frequent one that at most `most` samples use; -1 if none."""
    out = np.full(len(start) - 1, -1, np.int64)
    for s in range(len(out)):
        best = 1
        for i in range(start[s], start[s + 1]):
            if best < frequency[rows[i]] <= most:
                best = frequency[rows[i]]
                out[s] = rows[i]
    return out


@kernel
def deal(start, rows, value, tokens, order, home, first, sizes):
    """Gives the samples, in the given order, to micro-batches first, first + 1, ... of the given sizes.

    Each goes where its rows went last, by value and times the part of the micro-batch that is free (so that all fill
    evenly and a late sample still finds room beside its mates), if that keeps the tokens even: as predicted with samples
    of the mean length in the free places.
    """
    count = len(sizes)
    last = np.full(len(value), -1, np.int32)  # the micro-batch that got the row last
    shared, free, have = np.zeros(count), sizes.copy(), np.zeros(count, np.int64)
    left, tokens_left = len(order), tokens[order].sum()
    even = tokens_left / max(left, 1)
    for s in order:
        shared[:] = 1e-3  # where nothing is shared the emptiest is best
        for i in range(start[s], start[s + 1]):
            if last[rows[i]] >= 0:
                shared[last[rows[i]]] += value[rows[i]]
        left -= 1
        tokens_left -= tokens[s]
        mean = tokens_left / max(left, 1)
        best, best_score, fallback, least_off = -1, 0.0, -1, np.inf
        for m in range(count):
            if free[m] == 0:
                continue
            off = have[m] + tokens[s] + (free[m] - 1) * mean - sizes[m] * even
            helps = off < 0 if tokens[s] > mean else off > 0
            score = shared[m] * free[m] / sizes[m]
            if (helps or abs(off) <= SLACK * sizes[m] * even) and score > best_score:
                best, best_score = m, score
            if abs(off) < least_off:
                fallback, least_off = m, abs(off)
        m = best if best >= 0 else fallback
        home[s] = first + m
        free[m] -= 1
        have[m] += tokens[s]
        for i in range(start[s], start[s + 1]):
            last[rows[i]] = m


@kernel
def level(tokens, by_tokens, home, sizes, slack):
    """Swaps samples between the micro-batches with most and fewest tokens until all are within `slack` of even.

    by_tokens: the samples from short to long. A micro-batch that no swap brings nearer is left as it is.
    """
    count = len(sizes)
    off = -sizes * (tokens.sum() / max(len(tokens), 1))
    limit = slack * tokens.sum() / count
    for s in range(len(tokens)):
        off[home[s]] += tokens[s]
    stuck = np.zeros(count, np.bool_)
    for _ in range(min(4 * count, MOST_SWAPS)):
        over, under = -1, -1
        for m in range(count):
            if not stuck[m]:
                over = m if over < 0 or off[m] > off[over] else over
                under = m if under < 0 or off[m] < off[under] else under
        # Where one sample is more than a micro-batch's part, the others are all short of even: then alike is enough.
        if over == under or min(max(off[over], -off[under]), off[over] - off[under]) <= limit:
            break
        gap = (off[over] - off[under]) / 2  # the swap to look for moves this many tokens; twice as many help nothing
        nearest, give, take = gap, -1, -1
        givers, takers = by_tokens[home[by_tokens] == over], by_tokens[home[by_tokens] == under]
        places = np.searchsorted(tokens[takers], tokens[givers] - gap)
        for s, place in zip(givers, places):  # noqa: B905  (Numba has no strict)
            for other in takers[max(place - 1, 0) : place + 1]:
                miss = abs(tokens[s] - tokens[other] - gap)
                if miss < nearest:
                    nearest, give, take = miss, s, other
        if give < 0:
            stuck[over if off[over] > -off[under] else under] = True
            continue
        home[give], home[take] = under, over
        off[over] -= tokens[give] - tokens[take]
        off[under] += tokens[give] - tokens[take]

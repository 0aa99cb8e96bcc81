"""Which samples of a batch form which micro-batch, so that rows travel less or where nothing waits for them."""

from __future__ import annotations

import numpy as np

from nestpipe.batch import Batch
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.kernels import clusters
from nestpipe.kernels.keys import Deduplicator, owners_of, shards
from nestpipe.schedule.setting import CLUSTERINGS

MATES = 8  # a row of at most this many samples marks them as mates: neighbours in a session, say
EVERYWHERE = 0.02  # a row less likely than this to be missing from a micro-batch is taken to be there
TOKENS_OFF = 0.05  # of even, by which the tokens of a micro-batch may be off


def even_bounds(size: int, count: int) -> list[int]:
    """Cuts `size` samples into `count` runs that differ by at most one sample; some are empty if size < count."""
    return [size * m // count for m in range(count + 1)]


def tapered_bounds(size: int, count: int) -> list[int]:
    """Cuts `size` samples into runs of which the first and the last are a quarter as long as those in the middle, the ones
    beside them half; none is empty unless size < count."""
    if size < count:
        return even_bounds(size, count)
    weights = np.minimum(4, 2 ** np.minimum(np.arange(count), np.arange(count)[::-1]).clip(max=2))
    ends = (size - count) * np.cumsum(weights) // weights.sum() + np.arange(1, count + 1)
    return [0, *ends.tolist()]


def cluster(
    batch: Batch, plan: ExchangePlan, count: int, how: str, dedup: Deduplicator, *, rank: int, world: int
) -> tuple[np.ndarray | None, list[int]]:
    """The order of the samples (None: as they are) and bounds: micro-batch m is samples order[bounds[m] : bounds[m + 1]].

    "none": as they come.
    "shared": samples that share rows together: few distinct rows, summed over micro-batches that each fetch their own.
    "window": few distinct rows of other workers in the first and the last micro-batch, the only ones whose rows (gradients)
        nothing hides when each row travels once per batch; in between, about as many new and completed rows in each.
    "taper": the same with a smaller first and last micro-batch, see `tapered_bounds`: less to wait for than even ones can
        have, where computing is so much longer than travelling that a small one still hides the rows of the next.

    But for "taper" micro-batches are even in samples, to within one; in all, tokens (keys) are in proportion to samples to
    within 5% of an even part, where the samples allow it. Inside one the samples keep their order. A pure function of the
    keys and of who owns them; rows weigh as much as their table is wide, and where rows travel once those of this worker
    (rank) itself weigh nothing: they do not travel.
    """
    if how not in CLUSTERINGS:
        raise ValueError(f"clustering must be one of {', '.join(CLUSTERINGS)}, got {how!r}")
    bounds = (tapered_bounds if how == "taper" and world > 1 else even_bounds)(batch.size, count)
    if how == "none" or count == 1 or world == 1 or batch.size < count:
        return None, bounds
    feature_start, ids, width, owner = _rows(batch, plan, dedup)
    if not len(ids):
        return None, bounds
    start, rows, frequency = clusters.distinct_rows(feature_start, ids, len(width))
    tokens = (feature_start[:, 1:] - feature_start[:, :-1]).sum(axis=0)
    sizes = np.diff(bounds)
    home = np.full(batch.size, -1, np.int32)

    # A row costs its width times the chance that it would not be there anyway, were samples dealt at random; a row whose
    # samples fit one micro-batch at least `floor` of it, as data with groups of that size is not random at all.
    ends_only = how in ("window", "taper") and count > 2
    if how != "shared":
        width = np.where(owner == rank, np.float32(0), width)
    floor = 0.1 if ends_only else 1.0
    missing = (1 - 1 / count) ** np.arange(batch.size)  # by frequency - 1
    chance = np.where(np.arange(1, batch.size + 1) <= batch.size / count, np.maximum(missing, floor), missing)
    chance[chance < EVERYWHERE] = 0
    value = (width * chance[frequency - 1]).astype(np.float32)
    cost = clusters.costs(start, rows, value)
    user_start, user = clusters.users(start, rows, frequency, (frequency > 1) & (value > 0))

    # What grows first is cheapest: that is the first micro-batch, then the last.
    tokens_left, samples_left, last = tokens.sum(), batch.size, np.full(len(width), -1, np.int32)
    grown = (0, count - 1) if ends_only else (0, count - 1, *range(1, count - 1))
    for m in grown:
        want = tokens_left * sizes[m] / samples_left
        tokens_left -= clusters.grow(start, rows, user_start, user, value, cost, tokens, home, last, m, sizes[m], want)
        samples_left -= sizes[m]
    if ends_only:
        rest = np.flatnonzero(home < 0)
        rest = rest[np.argsort(clusters.anchors(start, rows, frequency, MATES)[rest], kind="stable")]
        value = (width * missing[frequency - 1]).astype(np.float32)
        clusters.deal(start, rows, value, tokens, rest, home, 1, sizes[1:-1])
    clusters.level(tokens, np.argsort(tokens, kind="stable"), home, sizes, TOKENS_OFF)
    return np.argsort(home, kind="stable"), bounds


def _rows(
    batch: Batch, plan: ExchangePlan, dedup: Deduplicator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys as rows 0, 1, ... over all tables: feature_start and ids as `distinct_rows` takes them; width and owner of each."""
    starts, ids, widths, owners = [], [np.empty(0, np.int32)], [np.empty(0, np.float32)], [np.empty(0, np.int64)]
    num_ids = num_rows = 0
    for k in plan.declared:
        table = plan.tables[k]
        if table.pooled_at == "owner":
            continue  # a vector for each bag, whatever its keys
        parts = [batch.keys[feature.name] for feature in plan.features_of[k]]
        for part in parts:
            starts.append(part.offsets.numpy() + num_ids)
            num_ids += len(part.values)
        keys = np.concatenate([np.empty(0, np.int64), *(part.values.numpy() for part in parts)])
        unique, inverse = np.empty_like(keys), np.empty(len(keys), np.int32)
        num_distinct = dedup(keys, unique, inverse)
        owner = owners_of(shards(unique[:num_distinct]), plan.owners[k])
        hot = plan.hot[k]
        if hot is not None:
            owner[hot.contains(unique[:num_distinct])] = plan.owners[plan.twins[k]][0]  # this worker itself
        owners.append(owner)
        ids.append(inverse + np.int32(num_rows))
        widths.append(np.full(num_distinct, table.dim, np.float32))
        num_rows += num_distinct
    starts = starts or [np.zeros(batch.size + 1, np.int64)]
    return np.stack(starts), np.concatenate(ids), np.concatenate(widths), np.concatenate(owners)

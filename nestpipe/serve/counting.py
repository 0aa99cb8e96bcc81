"""What an instance has done, as numbers under flat names: `what.which`, which metrics turn into a label."""

from __future__ import annotations

import dataclasses
from typing import Any

from nestpipe.serve.policy import Instance
from nestpipe.serve.requests import Source
from nestpipe.serve.states import Why
from nestpipe.serve.trigger import Reason


def flat(policy: Instance, now: float) -> dict[str, Any]:
    """Counters that only grow, and gauges: what waits, bytes in use, what the policy has learned."""
    cache, pool = policy.cache, policy.cache.pool
    counters = {
        f"cache.{field.name}": getattr(cache.counters, field.name)
        for field in dataclasses.fields(cache.counters)
        if field.name not in ("misses", "wasted_seconds")
    }
    return {
        **{f"answers.{source.name.lower()}": policy.sources[source] for source in Source},
        **{f"signals.{reason.name.lower()}": policy.trigger.counters[reason] for reason in Reason},
        **{f"misses.{why.name.lower()}": cache.counters.misses[why] for why in Why},
        **counters,
        "wasted_seconds": cache.counters.wasted_seconds,
        "rejected": policy.rejected,
        "failed": policy.failed,
        "expired": policy.signals.expired,
        "late": policy.queue.late,
        "queue": len(policy.queue),
        "waiting": policy.waiting,
        "prefixes": len(cache),
        "device_bytes": pool.device_used,
        "device_budget": pool.device_bytes,
        "host_bytes": pool.host_used,
        "host_budget": pool.host_bytes,
        "footprint_bytes": policy.trigger.footprint(now),
        "load": policy.trigger.load(now),
        "gap_seconds": policy.signals.gap,
        "queue_seconds": policy.delay,
        "residence_seconds": policy.trigger.residence,
        **{
            f"costs.{kind}.{number}": value
            for kind in ("ranking", "prefix", "copy")
            for number, value in enumerate(getattr(policy.costs, kind).coefficients)
        },
    }

"""A ranking service in one process: a bundle, a Worker, an early signal, and the ranking that finds the user's prefix computed.

    nestpipe train examples/hstu_ranker.toml --workers 2 --out runs/ranker
    nestpipe export runs/ranker runs/ranker/bundle
    python examples/serve.py runs/ranker/bundle

`nestpipe serve` puts the same Worker behind HTTP, several of them, with a router; see docs/serving.md.
"""

import sys
import time

import numpy as np

import nestpipe
from nestpipe.serve.messages import Ask, Signal
from nestpipe.serve.requests import Settings
from nestpipe.serve.worker import Worker


def main(path: str) -> None:
    bundle = nestpipe.load_bundle(path)
    print(f"{type(bundle.model).__name__}, version {bundle.version}, {bundle.num_keys('item'):,} items")
    draw = np.random.default_rng(0)
    items = np.sort(bundle.keys("item"))
    history, candidates = draw.choice(items, 200), draw.choice(items, 50, replace=False)
    times = 1_700_000_000 + 600 * np.arange(len(history))

    # trigger=False: a prefix for every signal; the default is for those alone whose full pass would take too long.
    with Worker(bundle, Settings(slo=0.1, wait=1.0, host_bytes=1 << 28, trigger=False)) as worker:
        worker.warm_up()
        # The user opens the app: the prefix is computed while other services still look for candidates.
        reason = worker.signal(Signal("ann", history[:190], times[:190], candidates=len(candidates)))
        print(f"signal: {reason.value if reason.name != 'ADMITTED' else 'admitted'}")
        time.sleep(0.05)
        # The candidates are there, and so are ten more items that the user has seen meanwhile.
        ranked = worker.rank(Ask("ann", history, candidates, times=times, now=float(times[-1] + 60))).result()
        # The same without any help from the cache: another user with the same history.
        full = worker.rank(Ask("bob", history, candidates, times=times, now=float(times[-1] + 60))).result()

    best = np.argsort(-ranked.scores)[:5]
    print(f"prefix: {ranked.source.value}; {1e3 * ranked.seconds:.1f} ms, full pass {1e3 * full.seconds:.1f} ms")
    print(f"largest difference of scores: {np.abs(ranked.scores - full.scores).max():.1e}")
    print("best:", ", ".join(f"item {candidates[place]} ({ranked.scores[place]:+.3f})" for place in best))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/serve.py BUNDLE   (make one: nestpipe export RUN BUNDLE)")
    main(sys.argv[1])

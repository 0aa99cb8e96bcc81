"""The comparison with peers, as far as it goes without them: contestants that take turns, workloads, what is made of results."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nestpipe.batch import Batch
from nestpipe.bench.alternate import Timing, alternate
from nestpipe.bench.peers.compare import NestpipeSide, adam
from nestpipe.bench.peers.comparison import Comparison, verdict
from nestpipe.bench.peers.dense_only import DenseOnly
from nestpipe.bench.peers.lineup import LINKS, PAIRS, QUICK_PAIRS, SETTINGS
from nestpipe.bench.peers.stepping import Stepper
from nestpipe.bench.peers.suite import sections
from nestpipe.bench.peers.workloads import BAGS, SEQUENCES, SHORT_BAGS, WORKLOADS, Workload
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Bars, Table, from_json, markdown, to_json
from tests.cluster import Cluster

STEPS = 7


def small(load: Workload) -> Workload:
    return dataclasses.replace(load, num_tables=2 if load.pooling else 1, num_rows=500, num_samples=16)


def side(setting: Setting, *, steps: int | None = None) -> tuple[NestpipeSide, list[Batch]]:
    load = small(BAGS)
    batches = load.batches(rank=dist.get_rank() if dist.is_initialized() else 0, count=3)
    return NestpipeSide(setting, load, load.model(), batches, steps=steps), batches


def train_in_turns() -> dict[str, Any]:
    """Two contestants side by side; the same weights as from one call of fit each?"""
    settings = [Setting("nested", 2, clustering="window"), Setting("serial", 2, clustering="window")]
    sides = [side(setting, steps=STEPS)[0] for setting in settings]
    for steps in (1, 3, STEPS - 4):
        for one in sides:
            one.stepper.run(steps)
            dist.barrier()  # in the group of all workers, which dense gradients use as well
    found: dict[str, Any] = {"steps": [one.trainer.steps for one in sides]}
    found["in turns"] = [one.trainer.digest() for one in sides]
    plain, batches = side(settings[0])
    plain.trainer.around = None
    plain.trainer.fit(itertools.cycle(batches), steps=STEPS)
    found["fit"] = plain.trainer.digest()

    load = small(SEQUENCES)
    batches = load.batches(rank=dist.get_rank(), count=2)
    dense = DenseOnly(load.model(), load.tables(), load.features(), batches=batches, dense_optimizer=adam)
    for _ in range(3):
        dense.step()
    found["dense"] = [float(p.detach().double().sum()) for p in dense._model.parameters()]
    return found


def test_steps_taken_in_turns_train_as_fit_does_to_the_bit(cluster: Cluster) -> None:
    first, second = cluster.run(2, train_in_turns)
    for found in (first, second):
        assert found["steps"] == [STEPS, STEPS]
        assert found["in turns"] == [found["fit"]] * 2
    assert first["dense"] == second["dense"]  # the floor under all contestants sums its gradients too


@pytest.mark.parametrize("schedule", ["serial", "dbp", "nested"])
def test_a_contestant_stands_still_between_its_steps(schedule: str) -> None:
    before = threading.active_count()
    one, _ = side(Setting(schedule, 2, clustering="none"))
    stepper, tasks = one.stepper, len(one.trainer.schedule.tasks)
    stepper.run(2)
    for steps in (1, 3, 1):
        before_it = stepper._operations, stepper._taken, one.trainer.steps
        stepper.run(steps)
        state = stepper._operations, stepper._taken, one.trainer.steps
        assert [b - a for a, b in zip(before_it, state, strict=True)] == [tasks * steps, steps, steps]
        time.sleep(0.1)
        assert stepper.resting and (stepper._operations, stepper._taken, one.trainer.steps) == state
    stepper.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed after 7 steps"):
        stepper.run(1)


def test_what_goes_wrong_in_fit_is_raised_by_step() -> None:
    load = small(BAGS)

    def breaks() -> Iterator[Batch]:
        yield from load.batches(rank=0, count=3)
        raise RuntimeError("the disk is gone")

    one, _ = side(Setting("nested", 2, clustering="none"))
    stepper = Stepper(one.trainer, breaks())
    with pytest.raises(Exception, match="the disk is gone"):
        stepper.run(4)
    with pytest.raises(Exception, match="the disk is gone"):
        stepper.run(1)
    stepper.close()


def test_a_source_that_ends_is_said() -> None:
    one, batches = side(Setting("nested"))
    stepper = Stepper(one.trainer, batches)
    with pytest.raises(ValueError, match="closed after 3 steps"):
        stepper.run(4)


class InBlocks:
    def __init__(self) -> None:
        self.blocks: list[int] = []

    def run(self, steps: int) -> None:
        self.blocks.append(steps)


def test_pipelined_contestants_run_blocks_and_what_they_send_is_counted() -> None:
    pipelined, plain, counter = InBlocks(), [], itertools.count(0, 10)
    turns = {"a": pipelined, "b": lambda: plain.append(1)}
    timings = alternate(turns, rounds=2, steps=2, warmup=5, count=lambda: next(counter))
    assert pipelined.blocks == [5, 1, 2, 1, 2] and len(plain) == sum(pipelined.blocks)
    assert timings["a"].counted == 5.0


@pytest.mark.parametrize("keys", ["uniform", "zipf"])
def test_workloads_are_the_same_at_every_call_and_differ_between_workers(keys: str) -> None:
    for load in map(small, WORKLOADS.values()):
        fewest, most = load.num_keys
        (one, other), again = load.batches(rank=0, count=2, keys=keys), load.batches(rank=0, count=2, keys=keys)
        elsewhere = load.batches(rank=1, count=1, keys=keys)[0]
        for name, jagged in one.keys.items():
            assert torch.equal(jagged.values, again[0].keys[name].values)
            assert not torch.equal(jagged.values, other.keys[name].values)
            assert not torch.equal(jagged.values, elsewhere.keys[name].values)
            assert int(jagged.values.min()) >= 0 and int(jagged.values.max()) < load.num_rows
            assert fewest <= int(jagged.lengths.min()) and int(jagged.lengths.max()) <= most
    lengths = small(SHORT_BAGS).batches(rank=0, count=1)[0].keys["f0"].lengths
    assert sorted(set(lengths.tolist())) == [1, 2]
    with pytest.raises(ValueError, match="'uniform' or 'zipf'"):
        small(BAGS).batches(rank=0, count=1, keys="even")


def test_everybody_in_the_lineup_can_be_made() -> None:
    assert set(SETTINGS) == set(LINKS)
    for settings in SETTINGS.values():
        assert settings[0] == Setting("serial") and len(settings) > 1
        for setting in settings:
            assert SCHEDULES[setting.schedule](micro_batches=setting.micro_batches)
    assert {load for load, _ in [*PAIRS, *QUICK_PAIRS]} <= set(WORKLOADS)


def made_up(link: str) -> Comparison:
    rounds = {
        "nestpipe serial": [120.0, 120.0, 240.0],
        "nestpipe nested, N = 4": [50.0, 60.0, 100.0],
        "torchrec base, table-wise": [130.0, 130.0, 260.0],
        "torchrec sparse_dist, table-wise": [100.0, 90.0, 200.0],
        "dense only": [40.0, 40.0, 80.0],
    }
    timings = {
        name: Timing(name, sorted(ms)[1], 10.0, 5.0, 1.0, ms, 2_500_000.0 * (1 + ("torchrec" in name)))
        for name, ms in rounds.items()
    }
    facts: dict[str, dict[str, Any]] = {name: {"table_bytes": 5_000_000} for name in rounds}
    facts["nestpipe serial"]["table_rows"] = 10_000
    return Comparison("bags", "zipf", link, 287.4, 1e-6, timings, facts, **verdict(timings))


def test_the_fastest_of_both_sides_are_compared_within_rounds() -> None:
    comparison = made_up("loopback")
    assert comparison.best == "nestpipe nested, N = 4" and comparison.best_peer == "torchrec sparse_dist, table-wise"
    assert comparison.speedup[comparison.best] == 2.0  # of 2, 1.5 and 2; medians alone would give 100 / 60
    assert comparison.over_dense_ms[comparison.best] == 20.0


def test_a_comparison_comes_back_from_json_the_same_under_the_keys_that_programs_read() -> None:
    comparison = made_up("loopback")
    written = json.loads(json.dumps(dataclasses.asdict(comparison)))
    assert Comparison.from_json(written) == comparison
    assert list(written) == [
        "workload", "keys", "link", "mbit_per_second", "difference", "timings", "facts", "best", "best_peer", "speedup",
        "over_dense_ms",
    ]  # fmt: skip
    assert written["timings"]["dense only"]["median_ms"] == 40.0


def test_results_are_told_by_link() -> None:
    page = sections({"comparisons": [dataclasses.asdict(made_up(link)) for link in ("loopback", "300mbit")]})
    assert [type(section) for section in page] == [Table, Bars, Table, Bars, Table]
    written = json.loads(json.dumps(to_json(page)))
    assert to_json(from_json(written)) == written
    table = written[0]
    assert table["values"][0][5:] == [2.0, [20.0, 60.0], [2.5, 5.0]] and table["values"][0][2] == [60.0, 10.0]
    text = markdown(page)
    assert "| 2.00x | 20 / 60 | 2.5 / 5.0 |" in text and "links of 300mbit/s" in text and "287 Mbit/s" in text
    assert "60 (10), nested, N = 4" in text and "100 (10), sparse_dist, table-wise" in text
    bars = page[1]
    assert isinstance(bars, Bars) and len(bars.labels) == 3
    assert bars.parts["dense part"][1] == 40.0
    assert sections({"comparisons": []}) == []

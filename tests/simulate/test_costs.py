"""Costs: how much each operation does and what it takes, by hand; jitter, crowding, shared cores, replicas, reading."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nestpipe.schedule import ops as op
from nestpipe.schedule.ops import OPERATIONS, Op
from nestpipe.schedule.setting import Setting
from nestpipe.simulate.costs import Costs
from nestpipe.simulate.network import Level, Network
from nestpipe.simulate.profile import READ
from nestpipe.simulate.sweep import predict, run
from nestpipe.simulate.workload import Workload, of_config
from nestpipe.sizes import BUCKET_BYTES, NUM_TOTALS
from tests.simulate import tiny
from tests.simulate.tiny import load, profile, workload

SERIAL = Setting("serial")
LINKS = Network(4, Level(latency=1e-6, bandwidth=1e9), Level(latency=1e-5, bandwidth=1e8))
NEEDED = [name for name, operation in OPERATIONS.items() if not operation.optional]  # without replicas
ONE_EACH = {name: (1.0, 0.0) for name in NEEDED}


def alone(costs: Costs, name: str) -> float:
    return float(np.mean(costs(Op(name, 0)).alone))


# -- how much ----------------------------------------------------------------------------------------------------------


def test_every_operation_does_as_much_as_by_hand() -> None:
    # 4 workers draw 160 keys, 80 of them distinct; each owns 20. In two batches it is 40: none is shared.
    costs = Costs(workload(), profile({}), SERIAL, 4)
    assert {name: costs.units(name) for name in NEEDED} == {
        "PREFETCH": 10, "H2D": 1000, "ROUTE": 40, "RETRIEVE": 20, "SYNC": 0, "EMB": 20 * 8 * 4, "FWD": 1e6, "BWD": 2e6,
        "REDUCE": 400, "AGREE": 1, "GRAD": 20 * 8 * 4, "UPDATE": 20, "DENSE": 400, "WRITEBACK": 20,
    }  # fmt: skip
    assert costs.units(READ) == 10 and costs.key_bytes == 20 * 8


def test_sync_does_the_rows_of_two_batches_in_a_row() -> None:
    # All workers draw from 30 keys, and always see all of them.
    few = workload(tables=[load(growth=lambda drawn: min(drawn, 30.0))])
    assert Costs(few, profile({}), SERIAL, 2).units("SYNC") == 15
    assert Costs(few, profile({}), SERIAL, 2).units("RETRIEVE") == 15


def test_an_operation_takes_its_fixed_time_and_one_for_each_unit() -> None:
    costs = Costs(workload(), profile({"RETRIEVE": (0.5, 0.01), "FWD": (0.0, 1e-6)}), SERIAL, 4)
    assert alone(costs, "RETRIEVE") == pytest.approx(0.5 + 0.2) and alone(costs, "FWD") == pytest.approx(1.0)
    assert alone(costs, "BWD") == 0


def test_what_workers_do_together_takes_what_the_network_says() -> None:
    costs = Costs(workload(), profile({}, network=LINKS), SERIAL, 8)
    rows = LINKS.all_to_all(20 * 8 * 4, 8)
    assert costs(Op("EMB", 0)).together == costs(Op("GRAD", 0)).together == rows > 0
    sizes = LINKS.all_to_all(8 * (1 + 4) * 8, 8)  # the state of the sender, and four figures of the one table
    assert costs(Op("ROUTE", 0)).together == pytest.approx(LINKS.all_to_all(20 * 8, 8) + sizes)
    assert costs(Op("AGREE", 0)).together == LINKS.all_reduce(8 * NUM_TOTALS, 8)
    for name in set(NEEDED) - {"ROUTE", "EMB", "GRAD", "AGREE", "REDUCE"}:
        assert costs(Op(name, 0)).together is None


def test_on_one_worker_nobody_meets() -> None:
    costs = Costs(workload(), profile(ONE_EACH, network=LINKS), SERIAL, 1)
    assert all(costs(Op(name, 0)).together is None for name in NEEDED)
    assert costs.counts.tolist() == [1]


def test_the_sum_of_dense_gradients_hides_behind_the_backward_but_for_its_last_bucket() -> None:
    big = workload(dense_bytes=4 * BUCKET_BYTES)
    whole, last = LINKS.all_reduce(4 * BUCKET_BYTES, 8), LINKS.all_reduce(BUCKET_BYTES, 8)
    for backward, left in ((0.0, whole), (0.02, whole - 0.02), (100.0, last)):
        costs = Costs(big, profile({"BWD": (backward, 0.0)}, network=LINKS), SERIAL, 8)
        assert costs(Op("REDUCE", 0)).together == pytest.approx(left)


def test_micro_batches_have_their_shares(histories: Workload) -> None:
    setting = Setting("nested", 4, False, "shared")
    split = histories.split(4, "shared", False)
    costs = Costs(histories, profile({}), setting, 4)
    for part in range(4):
        assert costs.units("EMB", part) == pytest.approx(costs.moved_bytes * split.rows[part])
        assert costs.units("GRAD", part) == pytest.approx(costs.moved_bytes * split.grads[part])
        assert costs.units("FWD", part) == pytest.approx(histories.forward_flops * split.compute[part])
    # dbp cuts the compute only: rows travel at once.
    cut = Costs(histories, profile({}), Setting("dbp", 4, clustering="none"), 4)
    assert cut.units("EMB") == pytest.approx(cut.moved_bytes)


# -- the cluster -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "stretched"), [(1, 1.0), (2, 1.0), (3, 1.5), (4, 2.0), (64, 2.0)])
def test_work_of_the_host_stretches_with_the_workers_on_its_cores(workers: int, stretched: float) -> None:
    hosted = profile(ONE_EACH, cores=2, hosted=("PREFETCH", "UPDATE"))  # nodes of four
    costs = Costs(workload(), hosted, SERIAL, workers)
    took = {name: alone(costs, name) for name in NEEDED}
    assert took == {name: stretched if name in ("PREFETCH", "UPDATE") else 1.0 for name in NEEDED}


def test_cores_enough_for_all_stretch_nothing() -> None:
    assert alone(Costs(workload(), profile(ONE_EACH, hosted=("FWD",)), SERIAL, 64), "FWD") == 1
    assert alone(Costs(workload(), profile(ONE_EACH, hosted=("FWD",), cores=9), SERIAL, 64), "FWD") == 1


def test_a_crowded_cluster_slows_lookups_down_and_nothing_else() -> None:
    each = {name: (0.5, 1.0) for name in NEEDED}
    costs = Costs(workload(), profile(each, crowding=0.01), SERIAL, 101)
    slowed = {name: 2.0 if operation.kind == op.LOOKUP else 1.0 for name, operation in OPERATIONS.items()}
    assert {name: alone(costs, name) for name in NEEDED} == {
        name: pytest.approx(0.5 + slowed[name] * costs.units(name)) for name in NEEDED
    }
    lonely = Costs(workload(), profile(each, crowding=0.01), SERIAL, 1)
    assert alone(lonely, "RETRIEVE") == 0.5 + lonely.units("RETRIEVE")


@pytest.mark.parametrize(("workers", "replicas"), [(6, 4), (2, 4), (0, 1)])
def test_replicas_must_divide_workers(workers: int, replicas: int) -> None:
    with pytest.raises(ValueError, match=f"{workers} workers cannot form {replicas} equal groups"):
        Costs(workload(), profile({}), Setting("serial", replicas=replicas), workers)


def test_there_is_at_least_one_replica() -> None:
    with pytest.raises(ValueError, match="replicas must be at least 1, got 0"):
        Setting("serial", replicas=0)


@pytest.mark.parametrize("near", ["shards", "replicas"])
def test_replicas_exchange_rows_in_smaller_groups_and_what_keeps_them_together_between_them(near: str) -> None:
    setting = Setting("serial", replicas=4, near=near)
    inside, between = (1, 4) if near == "shards" else (4, 1)  # how far apart workers of a group, and replicas, are
    exact, averaged = (
        Costs(load, profile({}, network=LINKS), setting, 16) for load in (workload(), workload().averaged(2))
    )
    assert exact.group == 4
    assert exact(Op("EMB", 0)).together == LINKS.all_to_all(20 * 8 * 4, 4, spread=inside)
    # An owner is asked for 20 rows by its group, and sends a sum for each to three others. It looks up those of all groups.
    assert exact(Op("MERGE", 0)).together == pytest.approx(LINKS.all_to_all(4 * 20 * 8 * 4, 4, spread=between))
    assert exact.units("RETRIEVE") == exact.units("UPDATE") == 80
    # Four groups in two steps: 160 rows, each with its state; to who averages them, and back.
    assert averaged(Op("AVERAGE", 0)).together == pytest.approx(2 * LINKS.all_to_all(160 * 36 / 2, 4, spread=between))
    assert not exact.schedule.has("AVERAGE") and not averaged.schedule.has("MERGE")
    assert not Costs(workload(), profile({}, network=LINKS), SERIAL, 16).schedule.has("MERGE")


def test_sums_of_rows_that_all_micro_batches_use_are_complete_with_the_last() -> None:
    setting = Setting("nested", 2, clustering="none", replicas=2)
    some = tiny.sequences("data.skew=1.2")
    costs = Costs(of_config(some), profile({}, network=LINKS), setting, 4)
    first, last = (costs.units("MERGE", part) for part in (0, 1))
    assert 0 < first < last


@pytest.mark.parametrize(("near", "groups"), [("shards", [0, 0, 0, 1, 1, 1]), ("replicas", [0, 1, 0, 1, 0, 1])])
def test_with_jitter_only_workers_of_a_group_or_replicas_wait_for_each_other(near: str, groups: list[int]) -> None:
    setting = Setting("serial", replicas=2, near=near)
    costs = Costs(workload(), profile({}, network=LINKS, jitter=0.1), setting, 6)
    group, replicas = costs(Op("EMB", 0)).group, costs(Op("MERGE", 0)).group
    assert group is not None and group.tolist() == groups
    assert replicas is not None and all(len(set(np.array(groups)[replicas == r])) == 2 for r in set(replicas.tolist()))
    assert costs(Op("AGREE", 0)).group is None


# -- jitter ------------------------------------------------------------------------------------------------------------


def test_without_jitter_one_column_stands_for_all() -> None:
    simulated, costs = run(workload(), profile(ONE_EACH), SERIAL, 1536, steps=3)
    assert costs.counts.tolist() == [1536] and simulated.world == 1536
    assert all(times.shape == (2, 1) for times in simulated.times.values())


def test_jitter_keeps_the_mean_and_has_the_deviation_asked_for() -> None:
    shaken = profile({"FWD": (2.0, 0.0)}, jitter=0.3, network=LINKS)
    costs = Costs(workload(), shaken, SERIAL, 500)
    assert costs.counts.tolist() == [1] * 500
    drawn = np.concatenate([np.asarray(costs(Op("FWD", batch)).alone) for batch in range(100)])
    assert drawn.mean() == pytest.approx(2.0, rel=0.01) and drawn.std() == pytest.approx(0.6, rel=0.03)
    assert (drawn > 0).all()
    plain = Costs(workload(), dataclasses.replace(shaken, jitter=0.0), SERIAL, 500)(Op("EMB", 0)).together
    meetings = [costs(Op("EMB", batch)).together for batch in range(2000)]
    assert np.ndim(meetings[0]) == 0, "a meeting ends for all at once"
    assert np.mean(meetings) == pytest.approx(plain, rel=0.03)


def test_jitter_is_new_for_each_operation_and_the_same_for_a_seed() -> None:
    shaken = profile(ONE_EACH, jitter=0.3)
    costs, again = (Costs(workload(), shaken, SERIAL, 4, seed=5) for _ in range(2))
    other = Costs(workload(), shaken, SERIAL, 4, seed=6)

    def drawn(of: Costs, name: str, batch: int) -> list[float]:
        return np.asarray(of(Op(name, batch)).alone).tolist()

    assert drawn(costs, "FWD", 1) == drawn(again, "FWD", 1)
    assert drawn(costs, "FWD", 1) not in (drawn(other, "FWD", 1), drawn(costs, "FWD", 2), drawn(costs, "BWD", 1))
    assert len(set(drawn(costs, "FWD", 1))) == 4


def test_jitter_makes_a_nested_step_longer(histories: Workload) -> None:
    """Workers wait for the slowest of them at every meeting."""
    operations = {"FWD": (1.0, 0.0), "BWD": (2.0, 0.0), "RETRIEVE": (3.0, 0.0), "SYNC": (0.1, 0.0)}
    setting = Setting("nested", 2, clustering="none")
    even = predict(histories, profile(operations, network=LINKS), setting, 16)
    shaken = predict(histories, profile(operations, network=LINKS, jitter=0.2), setting, 16)
    assert 1.05 * even.step < shaken.step < 2 * even.step
    assert shaken.compute == pytest.approx(even.compute, rel=0.1)


def test_8192_workers_with_jitter_can_be_run(histories: Workload) -> None:
    simulated, _ = run(
        histories, profile(ONE_EACH, jitter=0.1, network=LINKS), Setting("nested", 4, clustering="none"), 8192, steps=20
    )
    assert simulated.times[Op("DENSE", 19)].shape == (2, 8192) and simulated.world == 8192


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["serial", "dbp", "nested"])
@pytest.mark.parametrize(("reading", "step"), [(0.0, 3.0), (2.0, 3.0), (5.0, 5.0)])
def test_reading_hides_behind_compute_and_bounds_the_step_when_it_is_longest(
    name: str, reading: float, step: float
) -> None:
    reads = profile({READ: (reading, 0.0), "FWD": (1.0, 0.0), "BWD": (2.0, 0.0)})
    found = predict(workload(), reads, Setting(name), 4, steps=40)
    assert found.step == pytest.approx(1e3 * step, rel=1e-6)
    if reading > 3:
        assert (found.limit, found.limit_op) == ("source", READ)
    else:
        assert (found.limit, found.limit_op) == ("compute", "the model")


def test_reading_is_no_further_ahead_than_two_batches() -> None:
    simulated, costs = run(workload(), profile({READ: (0.1, 0.0), "FWD": (1.0, 0.0)}), SERIAL, 1, steps=8)
    begun = [simulated.times[Op(READ, batch)][0, 0] for batch in range(8)]
    taken = [simulated.times[Op("PREFETCH", batch)][1, 0] for batch in range(8)]
    assert begun[:2] == pytest.approx([0.0, 0.1])
    assert begun[2:] == pytest.approx([max(a, b + 0.1) for a, b in zip(taken, begun[1:], strict=False)][:6])
    assert "source" in costs.schedule.lanes
    assert "source" not in Costs(workload(), profile({}), SERIAL, 1).schedule.lanes


def test_reading_lets_all_else_run_as_without_it(histories: Workload) -> None:
    operations = {"PREFETCH": (0.2, 0.0), "RETRIEVE": (1.0, 0.0), "FWD": (1.0, 0.0), "BWD": (2.0, 0.0)}
    setting = Setting("nested", 2, clustering="none")
    without, _ = run(histories, profile(operations), setting, 2, steps=6)
    with_, _ = run(histories, profile({**operations, READ: (0.0, 0.0)}), setting, 2, steps=6)
    assert {one for one in with_.times if one.name != READ} == set(without.times)
    for one, times in without.times.items():
        np.testing.assert_array_equal(times, with_.times[one])


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_setting_is_called_what_it_does() -> None:
    assert SERIAL.name == "serial" and Setting("stale").name == "stale (NOT exact)"
    assert Setting("nested", 8, clustering="none").name == "nested, N = 8"
    assert (
        Setting("nested", 8, False, "shared", replicas=4).name
        == "nested, N = 8, no window cache, clustering shared, 4 replicas"
    )
    assert Setting("nested", 8, clustering="none").make().num_parts(op.EMB) == 8

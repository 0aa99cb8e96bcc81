"""An exception in the middle of a step, anywhere: the right bits afterwards, or a refusal that says why."""

from __future__ import annotations

import itertools

import pytest

from tests.behaviour.failures import Failure, all_failures, of_replicas, run
from tests.cluster import Cluster

EXPECTED: dict[object, str] = {}
ALONE = list(all_failures(world=1))[::29]  # `make failures` takes all of them
TOGETHER = [*list(all_failures(world=2))[::61], *list(of_replicas())[::13]]


@pytest.mark.parametrize("failure", ALONE, ids=lambda f: f"{f.schedule}-{f.tier}-{f.op}{f.part}")
def test_a_failure_ends_in_the_right_bits_or_in_a_refusal(cluster: Cluster, failure: Failure) -> None:
    wrong, _ = run(cluster, 1, failure, EXPECTED)
    assert not wrong


@pytest.mark.parametrize("failure", TOGETHER, ids=lambda f: f"{f.schedule}-{f.tier}-{f.op}{f.part}")
def test_a_failure_on_one_of_two_workers_ends_in_a_refusal_on_both(cluster: Cluster, failure: Failure) -> None:
    wrong, refused = run(cluster, 2, failure, EXPECTED)
    assert not wrong and refused


def test_the_failures_that_are_tried_here_cover_every_operation_and_schedule() -> None:
    assert {(f.schedule, f.tier) for f in ALONE} >= set(
        itertools.product(("serial", "dbp", "fwp", "nested"), ("memory", "disk"))
    )
    assert {f.op for f in ALONE} == {f.op for f in all_failures(world=1)}


def test_a_step_cut_before_anything_changed_can_be_gone_on_from(cluster: Cluster) -> None:
    for op in ("PREFETCH", "ROUTE", "FWD"):
        wrong, refused = run(cluster, 1, Failure("serial", "memory", True, op, 0, after=False), EXPECTED)
        assert not wrong and not refused

"""Learning rates of a step, and how workers tell that theirs are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from nestpipe import SGD, Adam, LRSchedule, Table
from nestpipe.engine.dense import Dense
from nestpipe.engine.rates import MARKS, Rates, StepRates, all_alike
from nestpipe.store.memory import MemoryStore

MARK = st.integers(0, MARKS - 1)


def store(table: Table) -> MemoryStore:
    return MemoryStore(table, seed=0)


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 3.0}], 2.0)


STORES = [
    store(Table("common", 2, optimizer=SGD(lr=0.5))),
    store(Table("own", 2, optimizer=Adam(lr=4.0), lr_schedule=lambda step: 1.0 / (1 + step))),
]


def test_a_table_has_its_own_schedule_and_all_else_the_common_one() -> None:
    rates = Rates(LRSchedule(warmup=4), Dense(nn.Linear(2, 1), two_groups))
    assert [rates.at(step, STORES).rows for step in (0, 1, 3, 9)] == [[0.125, 4.0], [0.25, 2.0], [0.5, 1.0], [0.5, 0.4]]
    assert [rates.at(step, STORES).dense for step in (0, 1, 3, 9)] == [[0.5, 0.75], [1.0, 1.5], [2.0, 3.0], [2.0, 3.0]]


def test_a_torch_scheduler_has_the_dense_rates_alone() -> None:
    def halves(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.ExponentialLR(optimizer, 0.5)

    dense = Dense(nn.Linear(2, 1), two_groups, lr_scheduler=halves)
    rates = Rates(LRSchedule(warmup=4), dense)
    assert rates.at(0, STORES) == StepRates([0.125, 4.0], [2.0, 3.0], 1.0)
    assert dense.optimizer is not None
    dense.optimizer.step()
    dense.next_step()
    dense.scale_lr(0.1)
    now = rates.at(1, STORES)
    assert (now.rows, now.dense_factor) == ([0.25, 2.0], 0.1) and now.dense == pytest.approx([0.1, 0.15])


def test_rates_that_differ_in_a_bit_have_another_mark() -> None:
    rates = StepRates([0.1, 0.2], [0.3], 1.0)
    others = [StepRates([0.1, np.nextafter(0.2, 1)], [0.3], 1.0), StepRates([0.2, 0.1], [0.3], 1.0)]
    assert rates.mark == StepRates([0.1, 0.2], [0.3], 1.0).mark
    assert all(rates.mark != other.mark for other in others)


@given(mark=MARK, world=st.integers(1, 5000))
def test_workers_with_one_mark_are_alike(mark: int, world: int) -> None:
    marks = np.full(world, float(mark))
    assert all_alike(marks.sum(), (marks**2).sum(), world)


@given(mark=MARK, other=MARK, world=st.integers(2, 5000), number=st.integers(1, 4999))
def test_one_worker_with_another_mark_is_seen_among_thousands(mark: int, other: int, world: int, number: int) -> None:
    marks = np.full(world, float(mark))
    marks[number % world] = other
    assert all_alike(marks.sum(), (marks**2).sum(), world) == (mark == other)


def test_rates_are_named_as_users_know_them() -> None:
    assert StepRates([0.1, 0.2], [0.3], 1.0).named(STORES, step=4) == {
        "learning rate of table 'common' in step 5": 0.1,
        "learning rate of table 'own' in step 5": 0.2,
        "learning rate of dense group 0 in step 5": 0.3,
    }

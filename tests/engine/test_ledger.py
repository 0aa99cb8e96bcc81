"""The ledger: after a failure at any point, whether tables are as so many whole steps left them."""

from __future__ import annotations

import pytest

from nestpipe.engine.ledger import LASTING, Ledger
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.ops import AVERAGE, BWD, DENSE, FWD, RETRIEVE, UPDATE, WRITEBACK, Op
from nestpipe.schedule.optional import including

SCHEDULE = including(SCHEDULES["serial"](), [AVERAGE])


def done(ledger: Ledger, batch: int, *names: str) -> None:
    for name in names:
        ledger.begin(Op(name, batch))
        ledger.end(Op(name, batch))


def test_after_whole_batches_nothing_stands_in_the_way_whatever_else_was_done_for_later_ones() -> None:
    ledger = Ledger(3, SCHEDULE)
    done(ledger, 3, *LASTING)
    done(ledger, 4, FWD, BWD)  # of no consequence: gradients are forgotten
    assert ledger.between(4, failed=4, forgives=False) is None


def test_a_batch_whose_end_nobody_was_told_of_is_told() -> None:
    ledger = Ledger(0, SCHEDULE)
    done(ledger, 0, *LASTING)
    assert ledger.between(0, failed=0, forgives=True) == "batch 0 was trained on, but its end was not told"


@pytest.mark.parametrize("name", LASTING)
def test_an_operation_that_was_cut_short_is_named(name: str) -> None:
    ledger = Ledger(0, SCHEDULE)
    done(ledger, 0, *LASTING[: LASTING.index(name)])
    ledger.begin(Op(name, 0))
    assert ledger.between(0, failed=0, forgives=True) == f"{name} of batch 0 was cut short"


def test_a_batch_that_was_only_looked_up_is_forgiven_where_new_keys_do_not_matter() -> None:
    ledger = Ledger(0, SCHEDULES["serial"]())
    done(ledger, 0, *LASTING)
    done(ledger, 1, RETRIEVE)
    assert ledger.between(1, failed=1, forgives=True) is None
    why = "batch 1 has got as far as RETRIEVE, and UPDATE and DENSE and WRITEBACK did not follow"
    assert ledger.between(1, failed=1, forgives=False) == why
    assert ledger.between(1, failed=2, forgives=True) == why  # it is not the one that failed: others wait for its rows


@pytest.mark.parametrize("names", [(RETRIEVE, UPDATE), (RETRIEVE, UPDATE, DENSE), (RETRIEVE, UPDATE, WRITEBACK)])
def test_a_batch_that_was_updated_in_part_is_never_forgiven(names: tuple[str, ...]) -> None:
    ledger = Ledger(0, SCHEDULE)
    done(ledger, 0, *names)
    told = ledger.between(0, failed=0, forgives=True)
    assert told is not None and told.startswith(f"batch 0 has got as far as {names[-1]}, and ")
    assert all(name in told for name in set(LASTING) - set(names))

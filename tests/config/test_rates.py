"""[train] and [tables]: learning rates that change, clipping, frozen rows, precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nestpipe import LRSchedule, config
from nestpipe.run import make_trainer
from tests.config.test_read import CLICKS, SEQUENCES, built, changed

LINEAR = ("train.steps=100", "train.lr_warmup=10", "train.lr_decay=linear", "train.lr_final=0.2")


def of_run(*entries: str) -> LRSchedule | None:
    return config.parse(changed(CLICKS, *entries)).train.lr_schedule()


def of_tables(*entries: str) -> list[Any]:
    return [table.lr_schedule for table in built(CLICKS, *entries).tables]


@pytest.mark.parametrize(
    ("entries", "schedule"),
    [
        ((), None),
        (("train.steps=100",), None),
        (("train.lr_decay=none",), None),
        (("train.lr_warmup=10",), LRSchedule(warmup=10)),
        (("train.steps=100", "train.lr_decay=cosine"), LRSchedule(decay="cosine", steps=100)),
        (LINEAR, LRSchedule(warmup=10, decay="linear", steps=100, final=0.2)),
        (("train.steps=9", "train.lr_decay=exponential"), LRSchedule(decay="exponential", steps=9)),
        (
            ("train.lr_decay=step", "train.lr_step_size=5", "train.lr_gamma=0.3"),
            LRSchedule(decay="step", step_size=5, gamma=0.3),
        ),
    ],
    ids=str,
)
def test_entries_of_train_make_the_schedule_of_all_rates(entries: tuple[str, ...], schedule: LRSchedule | None) -> None:
    assert of_run(*entries) == schedule
    assert of_tables(*entries) == [None] * 3  # they follow it


@pytest.mark.parametrize(
    ("own", "schedule"),
    [
        (("lr_warmup=3",), LRSchedule(warmup=3, decay="linear", steps=100, final=0.2)),
        (("lr_decay=cosine", "lr_final=0"), LRSchedule(warmup=10, decay="cosine", steps=100, final=0.0)),
        (("lr_decay=none", "lr_warmup=0"), LRSchedule(final=0.2)),
        (("lr_decay=step", "lr_step_size=7"), LRSchedule(warmup=10, decay="step", step_size=7, final=0.2)),
    ],
    ids=str,
)
def test_an_entry_of_a_table_stands_in_place_of_the_runs_and_the_others_stay(
    own: tuple[str, ...], schedule: LRSchedule
) -> None:
    assert of_tables(*LINEAR, *(f"tables.f*.{entry}" for entry in own)) == [schedule] * 3


def test_a_table_may_stay_out_of_the_runs_decay_by_steps() -> None:
    by_steps = ("train.lr_decay=step", "train.lr_step_size=5")
    assert of_tables(*by_steps, "tables.f*.lr_decay=none") == [LRSchedule()] * 3
    assert of_tables(*by_steps, "tables.f*.lr_gamma=0.5") == [LRSchedule(decay="step", step_size=5, gamma=0.5)] * 3


def test_one_table_may_have_its_own_rates_and_another_none() -> None:
    entries = {name: {"dim": 8, "pooling": "sum"} for name in ("f0", "f1", "f2")}
    values = changed({**CLICKS, "tables": entries}, *LINEAR, "tables.f1.lr_decay=none", "tables.f2.frozen_until=30")
    tables = config.build(config.parse(values)).tables
    assert [table.lr_schedule for table in tables] == [None, LRSchedule(warmup=10, final=0.2), None]
    assert [table.frozen_until for table in tables] == [0, 0, 30]


def test_all_of_it_arrives_at_the_trainer(tmp_path: Path) -> None:
    values = changed(CLICKS, *LINEAR, "train.clip_norm=0.5", "train.precision=bf16", "tables.f*.frozen_until=2")
    trainer, _ = make_trainer(config.parse(values), storage=tmp_path)
    with trainer:
        worker = trainer._worker
        first, later = (worker.ops._rates.at(step, worker.stores) for step in (0, 99))
        assert first.rows == pytest.approx([0.1 * store.lr for store in worker.stores])
        assert later.dense == pytest.approx([1e-3 * of_run(*LINEAR)(99)])  # type: ignore[misc]
        assert worker.dense._clip_norm == 0.5 and worker.dense._computing.precision == "bf16"
        assert {store.table.frozen_until for store in worker.stores} == {2}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("train.lr_decay=cosin", "train.lr_decay 'cosin', .*did you mean 'cosine'"),
        ("train.lr_decay=cosine", r"\[train\], entries lr_\*: decay 'cosine' needs steps, .*\(train.steps\)"),
        ("train.lr_decay=step", r"\[train\], entries lr_\*: decay 'step' needs step_size"),
        ("train.lr_step_size=5", r"\[train\], entries lr_\*: step_size=5 is for decay 'step'"),
        ("train.lr_warmup=-1", "train.lr_warmup must be at least 0, got -1"),
        ("train.lr_final=1.5", "train.lr_final must be at most 1, got 1.5"),
        ("train.lr_gama=0.5", "train.lr_gama, .*did you mean 'lr_gamma'"),
        ("tables.f*.lr_decay=cosine", r"\[tables.f\*\], entries lr_\*: decay 'cosine' needs steps"),
        ("tables.f*.lr_decay=cosin", r"tables.f\*.lr_decay 'cosin', .*did you mean 'cosine'"),
        ("tables.f*.lr_step_size=0", r"tables.f\*.lr_step_size must be at least 1, got 0"),
        ("tables.f*.frozen_until=-1", "frozen_until must be a number of steps, got -1"),
        ("train.clip_norm=-1", "train.clip_norm must be at least 0, got -1"),
        ("train.precision=bf17", "train.precision 'bf17', .*did you mean 'bf16'"),
        ("train.compile=1", "train.compile must be true or false, got 1"),
    ],
    ids=lambda text: text,
)
def test_what_cannot_be_meant_is_named(mistake: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(CLICKS, mistake)


def test_a_warmup_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[train\], entries lr_\*: a warmup of 100 steps leaves no step of 100"):
        built(SEQUENCES, "train.steps=100", "train.lr_warmup=100", "train.lr_decay=linear")

"""A run that was cut off and goes on from a checkpoint ends with the bits of one that was not."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nestpipe import Batch, Jagged, Trainer, run
from nestpipe.checkpoint import complete, manifest, problems
from nestpipe.checkpoint.commands import inspect
from nestpipe.checkpoint.manifest import folder_of
from nestpipe.config import Config, parse
from nestpipe.data import SyntheticClicks, dataset
from nestpipe.engine.context import StepResult
from nestpipe.errors import TrainingError
from nestpipe.tracking.progress import Progress
from tests.checkpoint.test_saving import FEATURES, TABLES, Model, contents
from tests.cluster import Cluster
from tests.waiting import PATIENCE, until

CLICKS: dict[str, Any] = {
    "data": {"kind": "synthetic_clicks", "num_features": 2, "keys_per_table": 60, "keys_per_bag": 2, "num_dense": 2,
             "num_samples": 4000, "num_valid_samples": 20, "num_test_samples": 40},
    "model": {"kind": "dlrm", "bottom": [4], "top": [4]},
    "tables": {"f*": {"dim": 4, "pooling": "sum", "lr": 0.1}},
    "train": {"batch_size": 16, "steps": 12, "checkpoint_every": 3, "keep_checkpoints": 9},
    "schedule": {},
}  # fmt: skip
SEQUENCES: dict[str, Any] = {
    "data": {"kind": "synthetic_sequences", "num_items": 50, "mean_length": 5, "max_length": 8, "num_negatives": 4,
             "num_samples": 400, "num_valid_samples": 5, "num_test_samples": 10},
    "model": {"kind": "hstu", "dropout": 0.3},
    "tables": {"item": {"dim": 8, "features": ["history", "negatives"], "lr": 0.1}},
    "train": {"batch_size": 8, "steps": 10, "checkpoint_every": 3, "rank_at": [5]},
    "schedule": {},
}  # fmt: skip


def configured(base: dict[str, Any] = CLICKS, **sections: dict[str, Any]) -> Config:
    values = json.loads(json.dumps(base))
    for section, entries in sections.items():
        values[section].update(entries)
    return parse(values)


class Cut(Exception):
    pass


class Interrupted:
    """While it lasts, a run is cut off after `step` steps, when its checkpoint of step `saved` (if any) is complete."""

    def __init__(self, folder: Path, *, step: int = 7, saved: int | None = 6) -> None:
        self._path, self._step = folder if saved is None else folder / "checkpoints" / folder_of(saved), step

    def __enter__(self) -> None:
        self._before = Progress.on_step

        def step(progress: Progress, result: StepResult) -> None:
            self._before(progress, result)
            if result.step == self._step:
                until(self._path.exists, f"{self._path} exists")
                raise Cut

        Progress.on_step = step  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Progress.on_step = self._before  # type: ignore[method-assign]


def train(config: Config, folder: Path, *, resume: bool = False) -> dict[str, Any]:
    return run.train(config, folder=folder, json_file=None, resume=resume)


def cut_off(config: Config, folder: Path, **when: int) -> None:
    with Interrupted(folder, **when):
        try:
            train(config, folder)
        except Exception as error:
            text = f"{error!r} {error.__cause__!r}"
            assert "Cut" in text, text
        else:
            raise AssertionError("the run was not cut off")


def whole_and_resumed(config: Config, folder: Path) -> dict[str, Any]:
    whole = train(config, folder / "whole")
    cut_off(config, folder / "cut")
    assert not (folder / "cut" / "result.json").exists()
    saved = [path.name for path in complete(folder / "cut" / "checkpoints")]
    resumed = train(config, folder / "cut", resume=True)
    return {"whole": whole, "resumed": resumed, "saved": saved}


def assert_alike(results: dict[str, Any], *, done: int = 6, steps: int = 12) -> None:
    whole, resumed = results["whole"], results["resumed"]
    assert results["saved"][0] == folder_of(done)
    assert whole["steps"] == resumed["steps"] == whole["session_steps"] == steps
    assert (resumed["session_steps"], resumed["resumed_after"]) == (steps - done, done)
    assert resumed["digest"] == whole["digest"]
    assert resumed["metrics"] == whole["metrics"] and resumed["last_loss"] == whole["last_loss"]


# -- one worker --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("schedule", ["serial", "dbp", "nested"])
def test_every_schedule_and_tier_goes_on_with_the_same_bits(tmp_path: Path, schedule: str, tier: str) -> None:
    tables = {"f*": {**CLICKS["tables"]["f*"], "tier": tier, "memory": "100MB"}} if tier == "disk" else {}
    micro_batches = 2 if schedule == "nested" else 1
    config = configured(
        tables=tables, schedule={"name": schedule, "micro_batches": micro_batches}, train={"full_every": 2}
    )
    assert_alike(whole_and_resumed(config, tmp_path))


def with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SyntheticClicks.batches

    def batches(self: SyntheticClicks, split: str, **options: Any) -> Iterator[Batch]:
        for number, batch in enumerate(original(self, split, **options)):
            if split == "train" and number % 3 == 1:
                for name, values in batch.dense.items():
                    batch.dense[name] = torch.full_like(values, float("nan"))
            yield batch

    monkeypatch.setattr(SyntheticClicks, "batches", batches)


@pytest.mark.parametrize("schedule", ["serial", "dbp", "nested"])
def test_batches_that_were_left_out_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    with_nan(monkeypatch)
    results = whole_and_resumed(
        configured(train={"on_nonfinite": "skip"}, schedule={"name": schedule, "micro_batches": 2}), tmp_path
    )
    assert_alike(results)
    assert results["whole"]["skipped_batches"] > results["resumed"]["skipped_batches"] > 0


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_dropout_goes_on_where_it_was(tmp_path: Path, schedule: str) -> None:
    config = configured(SEQUENCES, schedule={"name": schedule})
    results = whole_and_resumed(config, tmp_path)
    assert_alike(results, steps=10)
    dry = train(configured(SEQUENCES, model={"dropout": 0.0, "input_dropout": 0.0}), tmp_path / "dry")
    assert dry["digest"] != results["whole"]["digest"], "no dropout: the test shows nothing"


@pytest.mark.parametrize(
    "entries",
    [
        {"train": {"lr_decay": "cosine"}, "schedule": {"name": "dbp"}},
        {"train": {"steps": None, "epochs": 3}, "data": {"num_samples": 64}, "schedule": {"name": "nested"}},
        {"train": {"epochs": 3}, "data": {"num_samples": 64}},
        {"train": {"reader": "process"}},
        {"train": {"eval_every": 2}, "schedule": {"name": "dbp"}},
        {"tables": {"f*": {**CLICKS["tables"]["f*"], "ttl": 2, "admit_after": 2}}, "schedule": {"name": "dbp"}},
        {"tables": {"f*": {**CLICKS["tables"]["f*"], "max_rows": 50}}, "train": {"full_every": 4, "batch_size": 4}},
        {"tables": {"f*": {**CLICKS["tables"]["f*"], "admit_after": 2}}, "train": {"full_every": 4, "batch_size": 4}},
        {"tables": {"f*": {**CLICKS["tables"]["f*"], "optimizer": "adam", "dtype": "bfloat16"}},
         "train": {"full_every": 3}},
    ],
    ids=["cosine", "epochs", "epochs and steps", "reader process", "evaluations", "ttl and admission", "budget, changes",
         "admission, changes", "adam in half"],
)  # fmt: skip
def test_everything_that_has_a_state_goes_on(tmp_path: Path, entries: dict[str, Any]) -> None:
    assert_alike(whole_and_resumed(configured(**entries), tmp_path))


def resumed_slowly(config: Config, folder: Path, seconds: float) -> dict[str, str]:
    """The second worker needs so long to pass over what was trained on."""
    whole = train(config, folder / "whole")
    cut_off(config, folder / "cut")
    skip, passing = dataset.Indexed.skip, run.PASSING

    def slowly(self: dataset.Indexed, count: int) -> int:
        time.sleep(seconds if count and dist.get_rank() == 1 else 0)
        return skip(self, count)

    dataset.Indexed.skip, run.PASSING = slowly, 10.0  # type: ignore[method-assign]
    try:
        return {"whole": whole["digest"], "resumed": train(config, folder / "cut", resume=True)["digest"]}
    finally:
        dataset.Indexed.skip, run.PASSING = skip, passing  # type: ignore[method-assign]


def test_passing_over_data_may_take_longer_than_a_batch_may(cluster: Cluster, tmp_path: Path) -> None:
    for results in cluster.run(2, resumed_slowly, configured(train={"timeout": 2}), tmp_path, 3.5):
        assert results["whole"] == results["resumed"]


def test_a_worker_without_data_does_not_keep_the_others_waiting(cluster: Cluster, tmp_path: Path) -> None:
    """One block of text, which the first of two workers reads: the other's place in the data stays 0."""
    rows = [[str(n % 2), *["2"] * 13, *[f"{n + k:x}" for k in range(26)]] for n in range(200)]
    (tmp_path / "rows.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    tables = {"C*": {"dim": 4, "pooling": "sum", "lr": 0.1}}
    values = {**CLICKS, "data": {"kind": "criteo", "path": str(tmp_path / "rows.tsv")}, "tables": tables}
    for results in cluster.run(
        2, whole_and_resumed, configured(values, train={"batch_size": 8, "reader": "thread"}), tmp_path
    ):
        assert_alike(results)


def pass_over(seconds: float, limit: float, fails: int | None) -> tuple[int, int]:
    trainer = Trainer(Model(), TABLES, FEATURES, dense_optimizer=lambda p: torch.optim.Adam(p, 1e-2), data_timeout=0.5)
    over = threading.Event()

    def work() -> int:
        over.wait(seconds if trainer.rank == 1 else 0)
        if trainer.rank == fails:
            raise ValueError("line 7 is not a number")
        return trainer.rank

    try:
        return trainer.workers.wait_for(work, what="passing over data", limit=limit), trainer.rank
    finally:
        over.set()


def test_waiting_for_all_gives_each_its_own_result(cluster: Cluster) -> None:
    assert cluster.run(2, pass_over, 1.0, LONG, None) == [(0, 0), (1, 1)]


LONG = 2 * PATIENCE


@pytest.mark.parametrize(
    ("seconds", "limit", "fails", "told"),
    [
        (0.0, LONG, 0, "rank 0, passing over data: line 7 is not a number"),
        (LONG, LONG, 0, "rank 0, passing over data: line 7 is not a number"),
        (LONG, 0.5, None, "rank 1, passing over data: not done after"),
    ],
)
def test_what_goes_wrong_meanwhile_is_raised_on_all_at_once(
    cluster: Cluster, seconds: float, limit: float, fails: int | None, told: str
) -> None:
    for kind, value in cluster.outcomes(2, pass_over, seconds, limit, fails):
        assert kind != "ok" and told in str(value), value


def damage(path: Path) -> None:
    file = sorted(path.glob("table-*"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, folder = configured(), tmp_path / "run"
    whole = train(config, tmp_path / "whole")
    cut_off(config, folder)
    saved = folder / "checkpoints"
    damage(saved / folder_of(6))
    with caplog.at_level(logging.WARNING, "nestpipe"):
        resumed = train(config, folder, resume=True)
    assert resumed["digest"] == whole["digest"] and resumed["session_steps"] == 9
    said = [record.getMessage() for record in caplog.records]
    assert folder_of(6) in said[0] and "is damaged" in said[0]
    assert said[1] == f"resuming after step 3, from {saved / folder_of(3)}"


def test_a_damaged_checkpoint_is_replaced_by_a_sound_one_of_its_step(tmp_path: Path) -> None:
    """Otherwise a run that stops there says that it has saved, and has not."""
    config, folder = configured(), tmp_path / "run"
    cut_off(config, folder)
    damage(folder / "checkpoints" / folder_of(6))
    train(config, folder, resume=True)
    flaws = [flaw for path in complete(folder / "checkpoints") for flaw in problems(path)]
    assert not flaws


def test_no_sound_checkpoint_means_from_the_beginning_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, folder = configured(train={"steps": 7}), tmp_path / "run"
    with caplog.at_level(logging.WARNING, "nestpipe"):
        whole = train(config, folder, resume=True)
    saved = folder / "checkpoints"
    assert caplog.messages == [f"no checkpoint in {saved}: starting from the beginning"] and whole["steps"] == 7
    caplog.clear()
    for path in (folder / "final", *complete(saved)):
        damage(path)
    with caplog.at_level(logging.WARNING, "nestpipe"):
        again = train(config, folder, resume=True)
    assert caplog.messages[-1] == f"no sound checkpoint in {saved}: starting from the beginning"
    assert len(caplog.messages) == 4 and again["steps"] == 7 and again["digest"] == whole["digest"]
    assert (folder / "damaged-final-1").is_dir() and not list(problems(folder / "final"))


def test_a_checkpoint_has_the_configuration_of_its_run(tmp_path: Path) -> None:
    config = configured(train={"full_every": 2})
    train(config, tmp_path)
    for path in [*complete(tmp_path / "checkpoints"), tmp_path / "final"]:
        assert manifest.read(path).settings.config == json.loads((tmp_path / "config.json").read_text())
        said = inspect(path).splitlines()
        assert any(line.startswith("config [train]: batch_size = 16, steps = 12,") for line in said), said
        assert 'config [data]: kind = "synthetic_clicks"' in "\n".join(said)


# -- what is in the folder stays ---------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_that_is_resumed_trains_nothing_more_and_stays_as_it_is(tmp_path: Path) -> None:
    for name, entries in (("steps", {}), ("epochs", {"train": {"steps": None}, "data": {"num_samples": 128}})):
        folder = tmp_path / name
        whole, before = train(configured(**entries), folder), everything(folder)
        again = train(configured(**entries), folder, resume=True)
        assert (
            again["session_steps"] == 0 and again["digest"] == whole["digest"] and again["metrics"] == whole["metrics"]
        )
        assert everything(folder) == before


def test_a_result_that_is_lost_is_written_again_with_all_steps_of_the_run(tmp_path: Path) -> None:
    whole = train(configured(), tmp_path)
    (tmp_path / "result.json").unlink()
    train(configured(), tmp_path, resume=True)
    again = json.loads((tmp_path / "result.json").read_text())
    assert (again["steps"], again["resumed_after"], again["session_steps"]) == (12, 12, 0)
    assert again["digest"] == whole["digest"] and again["metrics"] == whole["metrics"]
    train(configured(train={"steps": 15}), tmp_path, resume=True)
    longer = json.loads((tmp_path / "result.json").read_text())
    assert (longer["steps"], longer["resumed_after"], longer["session_steps"], longer["samples"]) == (15, 12, 3, 3 * 16)


@pytest.mark.parametrize("name", ["config.json", "result.json", "final", "tensorboard", "checkpoints"])
def test_a_run_does_not_begin_in_the_folder_of_another(tmp_path: Path, name: str) -> None:
    """Whichever part of it is left."""
    first = train(configured(), tmp_path / "first")
    assert first["steps"] == 12
    folder = tmp_path / "second"
    folder.mkdir()
    (tmp_path / "first" / name).rename(folder / name)
    before = everything(folder)
    with pytest.raises(ValueError, match=r"has (a run in it|checkpoints of a run).*--resume.*or choose another --out"):
        train(configured(train={"seed": 5}), folder)
    assert everything(folder) == before


def test_a_run_begins_in_a_folder_that_has_only_other_things_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert train(configured(train={"steps": 1}), tmp_path)["steps"] == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_checkpoints_of_another_run_in_the_folder_that_the_config_names_are_left_alone(tmp_path: Path) -> None:
    config = configured(train={"checkpoints": str(tmp_path / "shared")})
    train(config, tmp_path / "one")
    before = everything(tmp_path)
    with pytest.raises(ValueError, match=r"shared has checkpoints of a run .*or train.checkpoints"):
        train(config, tmp_path / "two")
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": {"top": [8]}}, "the model of the checkpoint is another one"),
        ({"tables": {"f*": {"dim": 8, "pooling": "sum"}}}, "dim is 8 here but 4 in"),
        ({"train": {"seed": 1}}, "seed is 1 here but 0 in"),
    ],
)
def test_a_resume_that_is_refused_has_touched_nothing(tmp_path: Path, entries: Any, message: str) -> None:
    train(configured(), tmp_path)
    before = everything(tmp_path)
    with pytest.raises((ValueError, TrainingError), match=message):
        train(configured(**{**entries, "train": {"steps": 20, **entries.get("train", {})}}), tmp_path, resume=True)
    assert everything(tmp_path) == before


def test_a_resume_that_is_refused_leaves_damaged_checkpoints_where_they_are_too(tmp_path: Path) -> None:
    train(configured(), tmp_path)
    damage(tmp_path / "final")
    before = everything(tmp_path)
    with pytest.raises(ValueError, match="the model of the checkpoint is another one"):
        train(configured(model={"top": [8]}), tmp_path, resume=True)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("every", [0, 3, 5])
def test_a_finished_run_with_more_steps_goes_on_from_its_end(tmp_path: Path, every: int) -> None:
    short, long = (configured(train={"steps": steps, "checkpoint_every": every}) for steps in (12, 20))
    whole = train(long, tmp_path / "whole")
    first = train(short, tmp_path / "run")
    rest = train(long, tmp_path / "run", resume=True)
    assert (first["steps"], rest["steps"], rest["session_steps"]) == (12, 20, 8) and rest["digest"] == whole["digest"]
    assert manifest.read(tmp_path / "run" / "final").step == 20
    assert json.loads((tmp_path / "run" / "result.json").read_text())["digest"] == whole["digest"]
    assert not list(problems(tmp_path / "run" / "final-1")), "the end before is kept"


def test_a_run_that_is_lost_while_it_goes_on_from_its_end_still_has_that(tmp_path: Path) -> None:
    short, long = (configured(train={"steps": steps, "checkpoint_every": 0}) for steps in (6, 12))
    train(short, tmp_path)
    before = everything(tmp_path)
    with Interrupted(tmp_path, step=9, saved=None), pytest.raises(Cut):
        train(long, tmp_path, resume=True)
    after = everything(tmp_path)
    assert all(after[name] == before[name] for name in before if name.startswith(("final", "result.json")))
    assert train(long, tmp_path, resume=True)["session_steps"] == 6


@pytest.mark.parametrize("after", ["saved", "put aside"])
def test_a_run_that_is_killed_while_its_end_takes_the_place_of_the_one_before_loses_neither(
    tmp_path: Path, after: str
) -> None:
    short, long = (configured(train={"steps": steps, "checkpoint_every": 0}) for steps in (6, 12))
    train(short, tmp_path)
    whole = train(long, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "final", tmp_path / "final-next")
    if after == "put aside":
        (tmp_path / "result.json").unlink()
        (tmp_path / "final").rename(tmp_path / "final-1")
    again = train(long, tmp_path, resume=True)
    assert again["session_steps"] == 0 and again["digest"] == whole["digest"]
    assert [manifest.read(tmp_path / name).step for name in ("final", "final-1")] == [12, 6]
    assert sorted(path.name for path in tmp_path.glob("final*")) == ["final", "final-1"]
    assert json.loads((tmp_path / "result.json").read_text())["digest"] == whole["digest"]


# -- several workers ---------------------------------------------------------------------------------------------------


def test_two_workers_go_on_with_the_same_bits_each_with_its_own_dropout(cluster: Cluster, tmp_path: Path) -> None:
    config = configured(SEQUENCES, schedule={"name": "nested", "micro_batches": 2})
    for results in cluster.run(2, whole_and_resumed, config, tmp_path):
        assert_alike(results, steps=10)


def damaged_and_resumed(config: Config, folder: Path, name: str) -> tuple[str, str]:
    whole = train(config, folder / "whole")
    cut_off(config, folder / "cut")
    if torch.distributed.get_rank() == 0:
        file = folder / "cut" / "checkpoints" / folder_of(6) / name
        file.write_bytes(file.read_bytes()[:-1])
    torch.distributed.barrier()
    return whole["digest"], train(config, folder / "cut", resume=True)["digest"]


@pytest.mark.parametrize("name", ["table-f0.0-of-2.safetensors", "table-f0.1-of-2.safetensors"])
def test_two_workers_pass_over_a_damaged_checkpoint_whoever_finds_it(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    for kind, value in cluster.outcomes(2, damaged_and_resumed, configured(), tmp_path, name):
        assert kind == "ok", value
        assert value[0] == value[1]


def cut_and_saved(config: Config, folder: Path) -> list[str]:
    cut_off(config, folder, step=5, saved=3)
    return [path.name for path in complete(folder / "checkpoints")]


def resumed(config: Config, folder: Path) -> dict[str, Any]:
    return train(config, folder, resume=True)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_workers_trains_on_the_rest_of_the_samples(
    cluster: Cluster, tmp_path: Path, before: int, after: int
) -> None:
    num_samples, size = 600, 16
    config = configured(train={"steps": None, "epochs": 1}, data={"num_samples": num_samples})
    assert cluster.run(before, cut_and_saved, config, tmp_path)[0] == [folder_of(3)]
    result = cluster.run(after, resumed, config, tmp_path)[0]
    assert abs(3 * size * before + result["samples"] - num_samples) <= size * max(before, after)


def stop_on_one(schedule: str, micro_batches: int, at: int) -> dict[str, Any]:
    trainer = Trainer(
        Model(),
        TABLES,
        FEATURES,
        dense_optimizer=lambda p: torch.optim.Adam(p, 1e-2),
        schedule=schedule,
        micro_batches=micro_batches,
    )

    def batches() -> Iterator[Batch]:
        rng = np.random.default_rng([6, trainer.rank])
        for _ in range(200):
            yield Batch({table.name: Jagged.from_lists(rng.integers(0, 90, (8, 2)).tolist()) for table in TABLES})

    def on_step(result: StepResult) -> None:
        if result.step == at and trainer.rank == trainer.world - 1:
            trainer.stop()

    fitted = trainer.fit(batches(), on_step=on_step)
    return {"steps": trainer.steps, "fitted": fitted.steps, "position": trainer.position, "stopped": trainer.stopped,
            "contents": contents(trainer)["updates"], "digest": trainer.digest()}  # fmt: skip


@pytest.mark.parametrize("schedule", ["serial", "dbp", "fwp", "nested", "semi_async", "stale"])
def test_stop_on_one_worker_ends_all_after_the_same_step(cluster: Cluster, schedule: str) -> None:
    micro_batches = 2 if schedule in ("fwp", "nested", "semi_async") else 1
    results = cluster.run(2, stop_on_one, schedule, micro_batches, 5)
    assert results[0] == results[1] and results[0]["stopped"]
    assert 5 <= results[0]["steps"] <= 5 + 5
    assert results[0]["position"] == results[0]["fitted"] == results[0]["steps"]
    assert set(results[0]["contents"]) == {results[0]["steps"]}


def stopped_run(config: Config, folder: Path) -> str:
    """SIGTERM on one worker only, as its handler answers it."""
    before = Progress.on_step

    def step(progress: Progress, result: StepResult) -> None:
        before(progress, result)
        if result.step == 8 and Stopping.trainer.rank == 0:
            Stopping.trainer.stop()

    make = run.make_trainer

    def make_and_keep(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        Stopping.trainer = made[0]
        return made

    Progress.on_step, run.make_trainer = step, make_and_keep  # type: ignore[method-assign]
    try:
        train(config, folder)
    except run.Stopped as error:
        return str(error)
    finally:
        Progress.on_step, run.make_trainer = before, make  # type: ignore[method-assign]
        del Stopping.trainer
    return "not stopped"


class Stopping:
    trainer: Any


def stopped_and_resumed(config: Config, folder: Path) -> tuple[str, int, int, str, str]:
    whole = train(config, folder / "whole")
    said = stopped_run(config, folder / "cut")
    (newest, *_) = complete(folder / "cut" / "checkpoints")
    rest = train(config, folder / "cut", resume=True)
    return said, int(newest.name.split("-")[1]), rest["session_steps"], rest["digest"], whole["digest"]


def stopped_where_nothing_can_be_saved(config: Config, folder: Path) -> tuple[str, str, str]:
    before = run.check_places
    run.check_places = lambda *_: None  # it was a folder when the run began
    try:
        whole = train(
            dataclasses.replace(config, train=dataclasses.replace(config.train, checkpoints=None)), folder / "whole"
        )
        said = stopped_run(config, folder / "cut")
        return said, train(config, folder / "cut", resume=True)["digest"], whole["digest"]
    finally:
        run.check_places = before


def test_a_run_that_is_stopped_and_cannot_save_where_it_should_saves_in_its_own_folder(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    config = configured(train={"checkpoints": str(tmp_path / "file" / "deeper"), "checkpoint_every": 0})
    for said, digest, expected in cluster.run(2, stopped_where_nothing_can_be_saved, config, tmp_path):
        (newest,) = complete(tmp_path / "cut" / "checkpoints")
        assert f"saved to {newest}; go on with --resume" in said and digest == expected


@pytest.mark.parametrize(("schedule", "world"), [("serial", 2), ("dbp", 1), ("nested", 1), ("nested", 2)])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, schedule: str, world: int
) -> None:
    config = configured(schedule={"name": schedule}, train={"steps": 16, "lr_decay": "cosine"})
    for said, step, rest, digest, whole in cluster.run(world, stopped_and_resumed, config, tmp_path):
        assert said.startswith(f"stopped by a signal after step {step}; saved to ") and "--resume" in said
        assert 8 <= step < 16 and rest == 16 - step and digest == whole


def test_a_run_that_is_stopped_while_micro_batches_are_measured_does_not_count_as_finished(tmp_path: Path) -> None:
    config = configured(schedule={"micro_batches": "auto"}, train={"steps": 100, "checkpoint_every": 0})
    assert stopped_run(config, tmp_path).startswith("stopped by a signal after step 9")
    assert not (tmp_path / "result.json").exists()

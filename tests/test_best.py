"""Best: the best checkpoint is kept, training ends when nothing gets better, and a resumed run decides the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nestpipe import Best, Callback, Trainer, run
from nestpipe.checkpoint import manifest, next_of, problems, saving
from nestpipe.checkpoint.manifest import folder_of
from nestpipe.config import Config
from tests.behaviour.test_resume import configured, cut_off, train
from tests.checkpoint.test_background import NO_ROOM, Patched
from tests.cluster import Cluster
from tests.test_callbacks import batches, make
from tests.test_cli import CLICKS as RECIPE
from tests.test_cli import read
from tests.test_cli import run as command

ENTRIES = {"steps": 40, "eval_every": 2, "best_metric": "AUC", "patience": 3, "checkpoint_every": 3}
DECIDED = ("best", "steps", "ended_by", "judged", "metrics", "digest")


def held(folder: Path) -> int:
    """The step of a sound checkpoint."""
    assert not list(problems(folder))
    return manifest.read(folder).step


# -- runs --------------------------------------------------------------------------------------------------------------


def whole_and_cut(config: Config, folder: Path, step: int, saved: int) -> list[dict[str, Any]]:
    whole = train(config, folder / "whole")
    cut_off(config, folder / "cut", step=step, saved=saved)
    return [{name: result[name] for name in DECIDED} for result in (whole, train(config, folder / "cut", resume=True))]


@pytest.mark.parametrize(
    ("world", "schedule", "step", "saved"), [(1, "dbp", 7, 6), (2, "serial", 8, 6), (2, "nested", 11, 9)]
)
def test_a_run_that_is_cut_off_and_resumed_ends_after_the_same_step_with_the_same_best(
    cluster: Cluster, tmp_path: Path, world: int, schedule: str, step: int, saved: int
) -> None:
    config = configured(train=ENTRIES, schedule={"name": schedule, "micro_batches": 2 if schedule == "nested" else 1})
    for whole, resumed in cluster.run(world, whole_and_cut, config, tmp_path, step, saved):
        assert resumed == whole
        assert whole["ended_by"] == "patience" and whole["steps"] == whole["best"]["step"] + 2 * 3
    assert held(tmp_path / "whole" / "best") == held(tmp_path / "cut" / "best") == whole["best"]["step"]
    assert held(tmp_path / "cut" / "final") == whole["steps"]


def test_a_program_that_ends_while_one_best_takes_the_place_of_another_loses_neither(tmp_path: Path) -> None:
    """Folders as they are at each of these moments; all go on as the one that was cut off at none of them."""
    config = configured(train={**ENTRIES, "steps": 14})
    cut_off(config, tmp_path / "none", step=7, saved=6)
    moments = ("before the old one is moved", "before the new one takes its place", "before the old one is gone")
    for moment in moments:
        out = tmp_path / moment
        shutil.copytree(tmp_path / "none", out)
        best, older = out / "best", out / "checkpoints" / folder_of(3)
        assert held(older) < held(best)
        if moment != "before the old one is gone":
            best.rename(next_of(best))
        shutil.copytree(older, best if moment == "before the old one is moved" else out / ".best.old")
    expected = train(config, tmp_path / "none", resume=True)
    for moment in moments:
        out = tmp_path / moment
        resumed = train(config, out, resume=True)
        assert {name: resumed[name] for name in DECIDED} == {name: expected[name] for name in DECIDED}, moment
        assert held(out / "best") == expected["best"]["step"]
        assert not next_of(out / "best").exists() and not (out / ".best.old").exists()


def save_badly(config: Config, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The last worker has no room for the first best."""
    failed: list[Path] = []
    told: list[str] = []
    original: Callable[..., None] = saving.write_parts

    def write_parts(partial: Path, parts: Sequence[Any], rank: int) -> None:
        if "best" in partial.name and not failed and rank == 1:
            failed.append(partial)
            raise NO_ROOM
        original(partial, parts, rank)

    with Patched(saving, "write_parts", write_parts), Patched(run.log, "warning", told.append):
        return train(config, folder), told


def test_a_best_that_cannot_be_saved_is_told_and_the_next_one_takes_its_place(cluster: Cluster, tmp_path: Path) -> None:
    entries = {"steps": 8, "eval_every": 2, "checkpoint_every": 0, "best_metric": "loss"}  # better every time
    (result, told), (other, _) = cluster.run(2, save_badly, configured(train=entries), tmp_path)
    (said,) = (text for text in told if "cannot be saved" in text)
    assert "cannot be saved, training goes on: " in said and "rank 1" in said and "No space left on device" in said
    assert result["best"] == other["best"] and result["best"]["step"] > 2
    assert held(tmp_path / "best") == result["best"]["step"]
    assert sorted(path.name for path in tmp_path.iterdir() if "best" in path.name) == ["best"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.toml"
    path.write_text(f'{RECIPE}eval_every = 3\nbest_metric = "loss"\nbest_direction = "max"\npatience = 2\n')
    return path


def test_the_best_is_what_the_run_is_judged_by_and_what_is_told(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The "best" has the largest loss: the first one, and not the last."""
    out = tmp_path / "run"
    assert command("train", recipe, "--out", out) == 0
    said, result = capsys.readouterr().out, read(out / "result.json")
    assert result["best"]["step"] == held(out / "best") == 3 and result["steps"] == held(out / "final") == 9
    assert (result["ended_by"], result["judged"]) == ("patience", "best")
    assert f"best: loss {result['best']['value']:.4f} after step 3; ended early, with no better one in 2" in said
    assert "metrics of the best checkpoint: loss" in said and f"the best {out}/best" in said
    judged = {}
    for name, options in (("best", ["--checkpoint", "best"]), ("final", ["--checkpoint", "final"]), ("none", [])):
        assert command("evaluate", out, *options, "--json", tmp_path / "judged.json") == 0
        judged[name] = read(tmp_path / "judged.json")["metrics"]
    assert judged["best"] == judged["none"] == result["metrics"] and judged["final"]["loss"] < judged["best"]["loss"]
    assert command("train", recipe, "--out", out, "--resume") == 0  # finished: nothing changes
    assert read(out / "result.json") == result


def test_a_run_that_keeps_none_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(configured(train={"steps": 2}), tmp_path)
    assert command("evaluate", tmp_path, "--checkpoint", "best") == 1
    assert "has no checkpoint 'best': the run keeps none (train.best_metric)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"best_metric": "AUCC", "eval_every": 2, "best_direction": "max"}, "train.best_metric 'AUCC', which is not"),
        ({"best_metric": "AUC"}, "train.best_metric is of evaluations while training; set train.eval_every"),
        ({"patience": 2, "eval_every": 2}, "train.patience needs train.best_metric"),
        ({"best_metric": "Calibration", "eval_every": 2}, "whether a larger or a smaller 'Calibration' is better"),
    ],
)
def test_what_could_never_be_kept_is_told_before_the_training(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(configured(train=entries), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- scripts -----------------------------------------------------------------------------------------------------------


class Seen(Callback):
    def __init__(self) -> None:
        self.evaluations: list[float] = []

    def on_evaluate(self, split: str, metrics: Mapping[str, float], step: int) -> None:
        self.evaluations.append(metrics["AUC"])


def fit(
    trainer: Trainer, values: Sequence[float], best: Best, *, steps: int | None = None, first: int = 0
) -> list[float]:
    """Evaluates after every step, as is given."""
    given, seen = iter(values), Seen()
    data = batches(9, trainer.rank, first)
    trainer.fit(data, steps=steps, evaluate=lambda: {"AUC": next(given)}, evaluate_every=1, callbacks=[best, seen])
    return seen.evaluations


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([0.5, 0.7, 0.6, 0.7, 0.9], {"patience": 2}, (0.7, 2, 4)),  # as good is not better
        ([0.5, NAN, 0.7, NAN, NAN], {"patience": 2}, (0.7, 3, 5)),
        ([NAN, NAN], {"patience": 2}, (None, None, 2)),
        ([0.5, 0.4, 0.6], {"patience": 2, "direction": "min"}, (0.4, 2, None)),
        ([0.5, 0.4, 0.4], {}, (0.5, 1, None)),
    ],
)
def test_it_ends_after_so_many_evaluations_that_were_not_better(
    tmp_path: Path, values: list[float], options: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    value, step, ended = expected
    with make() as trainer:
        best = Best(trainer, "AUC", folder=tmp_path / "best", **options)
        fit(trainer, values, best, steps=len(values))
        assert (best.value, best.step) == (value, step) and trainer.steps == (ended or len(values))
        assert best.checkpoint() == (None if step is None else tmp_path / "best")
        assert step is None or held(tmp_path / "best") == step


def test_what_it_knows_goes_on_from_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "best"
    with make() as trainer:
        fit(trainer, [0.5, 0.8, 0.6], Best(trainer, "AUC", folder=place, patience=3), steps=3)
        trainer.save(tmp_path / "saved")
    with make() as trainer:
        trainer.load(tmp_path / "saved")
        best = Best(trainer, "AUC", folder=place, patience=3)
        assert (best.value, best.step, best.waited) == (0.8, 2, 1)
        assert fit(trainer, [0.7, 0.7, 0.9], best, first=3) == [0.7, 0.7]  # step 3 was judged before
        assert trainer.steps == 5 and best.has_waited_enough
        trainer.save(tmp_path / "ended")
    with make() as trainer:
        trainer.load(tmp_path / "ended")
        assert fit(trainer, [0.9], Best(trainer, "AUC", folder=place, patience=3), first=5) == []  # had ended
        assert trainer.steps == 5 and "the best checkpoint is looked for anew" not in caplog.text
    for options, why in (
        ({"direction": "min"}, "it was judged by AUC (max), now by AUC (min)"),
        ({"folder": tmp_path / "elsewhere"}, "there is no checkpoint in"),
    ):
        with make() as trainer:
            trainer.load(tmp_path / "saved")
            caplog.clear()
            assert Best(trainer, "AUC", **{"folder": place, **options}).value is None
            assert f"the best checkpoint is looked for anew: {why}" in caplog.text


def test_an_evaluation_that_was_due_when_a_checkpoint_was_saved_is_done_first(tmp_path: Path) -> None:
    with make() as trainer:
        fit(trainer, [0.5], Best(trainer, "AUC", folder=tmp_path / "best"), steps=1)
        trainer.fit(batches(1, first=1))
        trainer.save(tmp_path / "saved")
    with make() as trainer:
        trainer.load(tmp_path / "saved")
        best = Best(trainer, "AUC", folder=tmp_path / "best")
        assert fit(trainer, [0.9, 0.8], best, steps=1, first=2) == [0.9, 0.8]
        assert (best.step, held(tmp_path / "best")) == (2, 2)


def test_a_metric_that_is_not_there_is_told() -> None:
    with make() as trainer:
        with pytest.raises(ValueError, match="the best is kept by 'AUX', which is not known; did you mean 'AUC'"):
            fit(trainer, [0.5], Best(trainer, "AUX", direction="max"))
        with pytest.raises(ValueError, match="patience must be at least 1, got 0"):
            Best(trainer, "AUC", patience=0)
        with pytest.raises(ValueError, match="direction must be 'max' or 'min', got 'up'"):
            Best(trainer, "AUC", direction="up")

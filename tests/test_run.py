"""The end of a run: the training is saved before anything else, whatever comes after it; a signal at any time loses nothing."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nestpipe import Batch, Output, Trainer, run
from nestpipe.checkpoint import complete, manifest, problems
from nestpipe.checkpoint.manifest import folder_of
from nestpipe.config import Config
from nestpipe.data import SyntheticClicks, SyntheticSequences, dataset
from nestpipe.errors import TrainingError
from tests.behaviour.test_resume import CLICKS, SEQUENCES, configured, train, with_nan
from tests.checkpoint.test_background import Patched
from tests.cluster import Cluster
from tests.test_cli import CLICKS as RECIPE
from tests.test_cli import read
from tests.test_cli import run as command
from tests.waiting import PATIENCE

# -- an example --------------------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(("example", "size"), [("hstu_long", "batch_size=4"), ("fuxi_long", "batch_tokens=600")])
def test_the_examples_of_long_histories_train(tmp_path: Path, example: str, size: str) -> None:
    """As it is but for its size; lengths up to 2,048 in a few users."""
    smaller = ("data.num_users=12", "data.num_items=200", "data.num_evaluated=2", "data.num_negatives=4", "data.mean_length=200",
               "model.num_layers=1", "tables.item.dim=8", f"train.{size}", "train.steps=3", "data.seed=2")  # fmt: skip
    sets = [word for entry in smaller for word in ("--set", entry)]
    assert command("train", EXAMPLES / f"{example}.toml", *sets, "--out", tmp_path / "run") == 0
    result = read(tmp_path / "run" / "result.json")
    assert result["steps"] == 3 and result["metrics"]["targets"] == 2


def test_the_example_of_a_ranker_trains_and_its_lists_are_judged(tmp_path: Path) -> None:
    """As it is but for its size."""
    smaller = ("data.num_users=600", "data.num_items=60", "data.num_topics=6", "data.num_evaluated=300", "data.mean_length=12",
               "model.num_layers=1", "tables.item.dim=16", "train.steps=150", "train.batch_size=20", "train.dense_lr=1e-2",
               "schedule.micro_batches=1")  # fmt: skip
    sets = [word for entry in smaller for word in ("--set", entry)]
    assert command("train", EXAMPLES / "hstu_ranker.toml", *sets, "--out", tmp_path / "run") == 0
    metrics = read(tmp_path / "run" / "result.json")["metrics"]
    assert metrics.keys() == {"loss", "AUC", "GAUC", "NDCG@4", "MAP@10", "MRR"}  # as the example asks for
    assert metrics["AUC"] > 0.65 and metrics["GAUC"] > 0.65


# -- what comes after the training -------------------------------------------------------------------------------------


def fail(*_: Any, **__: Any) -> Any:
    raise ValueError("label 7 of sample 300 is neither 0 nor 1")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("what", ["evaluate", "save_trace", "digest"])
def test_what_fails_after_the_training_does_not_cost_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, what: str
) -> None:
    out = tmp_path / "run"
    with Patched(Trainer, what, fail):
        assert command("train", recipe, "--out", out, "--trace") == 1
    assert "label 7 of sample 300" in capsys.readouterr().err
    assert f"the training is complete and saved to {out / 'final'}; `nestpipe evaluate {out}` judges it" in caplog.text
    assert not list(problems(out / "final")) and not (out / "result.json").exists()
    assert command("evaluate", out, "--json", tmp_path / "judged.json") == 0
    before = (out / "final" / "manifest.json").read_bytes()
    assert command("train", recipe, "--out", out, "--resume") == 0
    assert read(out / "result.json")["metrics"] == read(tmp_path / "judged.json")["metrics"]
    assert (out / "final" / "manifest.json").read_bytes() == before and not (out / "final-1").exists()


def test_a_validation_that_fails_is_told_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    original, failed = run.evaluate_split, []

    def evaluate_split(trainer: Trainer, built: Any, config: Config, split: str, **options: Any) -> dict[str, float]:
        if split == "valid" and not failed:
            failed.append(split)
            raise TrainingError("rank 0, batch 3: the feed broke")
        return original(trainer, built, config, split, **options)

    with Patched(run, "evaluate_split", evaluate_split):
        result = train(configured(train={"eval_every": 4}), tmp_path / "run")
    assert "the evaluation after step 4 failed, training goes on: rank 0, batch 3: the feed broke" in caplog.text
    assert result["digest"] == train(configured(), tmp_path / "whole")["digest"]


def trained(config: Config, folder: Path) -> str:
    return str(train(config, folder)["digest"])


def lose_the_data_of_one(config: Config, folder: Path, what: str) -> tuple[str, list[str]]:
    """From its second use on, by the last worker."""
    calls: list[str] = []
    told: list[str] = []
    original = getattr(SyntheticSequences, what)

    def lost(self: SyntheticSequences, *args: Any, **options: Any) -> Any:
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if args != ("train",) and is_last:
            calls.append(what)
            if len(calls) == 2:  # before it, the first look or the first validation
                raise OSError(5, "Input/output error")
        return original(self, *args, **options)

    with Patched(SyntheticSequences, what, lost), Patched(run.log, "warning", told.append):
        return train(config, folder)["digest"], [text for text in told if "the evaluation after" in text]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("what", ["candidates", "batches"])
def test_validation_data_that_is_lost_on_one_worker_ends_no_training(
    cluster: Cluster, tmp_path: Path, what: str, world: int
) -> None:
    config = configured(SEQUENCES, train={"eval_every": 3, "eval_split": "none"})
    expected = cluster.run(world, trained, config, tmp_path / "whole")
    results = cluster.run(world, lose_the_data_of_one, config, tmp_path / "run", what)
    assert [digest for digest, _ in results] == expected
    (told,) = results[0][1]
    assert f"failed, training goes on: rank {world - 1}, " in told and "Input/output error" in told


def test_curves_that_cannot_be_written_do_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    assert train(configured(), tmp_path)["steps"] == 12
    assert caplog.text.count("no more curves in TensorBoard: OSError: [Errno 28] No space left") == 1


# -- what can be said before it ----------------------------------------------------------------------------------------


class Ranker(nn.Module):
    """Of sequences, with whatever a test leaves of it."""

    history = "history"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch, rows: dict[str, Any]) -> torch.Tensor:
        return self.scale * torch.stack(
            [part.sum() for part in rows["history"].values.split(batch.keys["history"].lengths.tolist())]
        )


class WithoutScore(Ranker):
    def query(self, batch: Batch, rows: dict[str, Any]) -> torch.Tensor:
        return torch.zeros(batch.size, 8)


class WithoutQuery(Ranker):
    def score(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return query @ rows.T


class OfAnotherWidth(WithoutQuery):
    def query(self, batch: Batch, rows: dict[str, Any]) -> torch.Tensor:
        return torch.zeros(batch.size, 7)


class OfAnotherHistory(WithoutScore, WithoutQuery):
    history = "histories"


class Clicker(nn.Module):
    """Its predictions are logits, and larger than a probability."""

    predicts = True

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((), 5.0))

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        logits = rows["f0"].sum(1) + self.bias
        return Output(logits.square(), predictions=logits if self.predicts else None)


class Silent(Clicker):
    predicts = False


@pytest.mark.parametrize(
    ("base", "model", "message"),
    [
        (SEQUENCES, Ranker, "Ranker has no query and no score: give it query(batch, rows)"),
        (SEQUENCES, WithoutScore, "WithoutScore has no score: give it query(batch, rows)"),
        (SEQUENCES, WithoutQuery, "WithoutQuery has no query: give it query(batch, rows)"),
        (SEQUENCES, OfAnotherWidth, "mat1 and mat2 shapes cannot be multiplied"),
        (SEQUENCES, OfAnotherHistory, "feature 'histories', which is not known; did you mean 'history'"),
        (CLICKS, Silent, "needs Output.predictions from the model"),
        (CLICKS, Clicker, "is outside [0, 1]; give probabilities, not logits"),
    ],
)
@pytest.mark.parametrize("when", ["test", "valid"])
def test_a_model_that_cannot_be_evaluated_is_told_before_the_training(
    tmp_path: Path, base: dict[str, Any], model: type[nn.Module], message: str, when: str
) -> None:
    values = {**base, "model": {"kind": f"{__name__}:{model.__name__}"}}
    entries = {"test": {"eval_split": "test"}, "valid": {"eval_split": "none", "eval_every": 5}}[when]
    with pytest.raises((ValueError, TrainingError), match=re.escape(message)):
        train(configured(values, train=entries), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    if when == "test":  # without an evaluation it trains
        result = train(configured(values, train={"eval_split": "none", "steps": 2}), tmp_path / "run")
        assert (result["steps"], result["metrics"]) == (2, {})


def test_labels_that_a_metric_refuses_are_told_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SyntheticClicks.batches

    def batches(self: SyntheticClicks, split: str, **options: Any) -> Iterator[Batch]:
        for batch in original(self, split, **options):
            if split == "test" and batch.labels is not None:
                batch.labels[3] = 0.5
            yield batch

    monkeypatch.setattr(SyntheticClicks, "batches", batches)
    with pytest.raises(TrainingError) as raised:
        train(configured(), tmp_path / "run")
    assert "AUC: label 0.5 of sample 3 is neither 0 nor 1" in str(raised.value)
    assert 'train.eval_split = "none"' in str(raised.value) and not (tmp_path / "run").exists()


def test_looking_at_the_evaluation_first_changes_nothing(tmp_path: Path) -> None:
    """Neither rows nor random numbers nor modes of modules."""
    for name, base in (("clicks", CLICKS), ("sequences", SEQUENCES)):
        judged = train(configured(base), tmp_path / name)
        assert judged["metrics"]
        plain = train(configured(base, train={"eval_split": "none"}), tmp_path / f"{name}-plain")
        assert plain["digest"] == judged["digest"] and plain["tables"] == judged["tables"] and plain["metrics"] == {}


def test_a_run_without_an_evaluation_is_told_and_reported_as_others_are(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert command("train", recipe, "--out", out, "--set", "train.eval_split=none") == 0
    said = capsys.readouterr().out
    assert "metrics" not in said and "digest: " in said
    assert command("report", out) == 0
    assert command("evaluate", out) == 1
    assert "say what to evaluate on with --split" in capsys.readouterr().err
    assert command("evaluate", out, "--split", "test") == 0


# -- a signal ----------------------------------------------------------------------------------------------------------


class Asked:
    """While it lasts, the last worker is asked to stop at a moment of the run, as the handler of SIGTERM does it."""

    def __init__(self, moment: str) -> None:
        self._moment = moment
        self._stack = contextlib.ExitStack()
        self._trainer: Any = None
        self._over = threading.Event()

    def __enter__(self) -> None:
        make = run.make_trainer

        def make_and_keep(*args: Any, **options: Any) -> Any:
            made = make(*args, **options)
            self._trainer = made[0]
            if self._moment == "start":
                self._ask()
            return made

        self._patch(run, "make_trainer", make_and_keep)
        patches: dict[str, Callable[[], None]] = {
            "waiting for data": self._in_training_data,
            "passing over data": self._in_passing,
            "validation": lambda: self._before(run, "evaluate_split", lambda *args: args[3] == "valid"),
            "final save": lambda: self._before(Trainer, "save", lambda *args: args[1].name == run.NEXT),
            "evaluation": lambda: self._before(run, "evaluate_split", lambda *args: args[3] == "test"),
        }
        patches.get(self._moment, lambda: None)()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._stack.close()
        self._trainer = None

    def _ask(self) -> None:
        if self._trainer is not None and self._trainer.rank == self._trainer.world - 1:
            self._trainer.stop()

    def _ask_and_wait(self) -> None:
        self._ask()
        if not self._over.wait(PATIENCE):
            raise AssertionError("it was asked to stop, and goes on waiting")

    def _patch(self, place: Any, name: str, value: Any) -> None:
        self._stack.enter_context(Patched(place, name, value))

    def _before(self, place: Any, name: str, applies: Callable[..., bool]) -> None:
        original = getattr(place, name)

        def ask_first(*args: Any, **options: Any) -> Any:
            if applies(*args):
                self._ask()
            return original(*args, **options)

        self._patch(place, name, ask_first)

    def _in_training_data(self) -> None:
        """The last worker's eighth batch does not come."""
        original = SyntheticClicks.batches

        def batches(data: SyntheticClicks, split: str, **options: Any) -> Iterator[Batch]:
            for number, batch in enumerate(original(data, split, **options)):
                if split == "train" and number == 8 and options["rank"] == options["world"] - 1:
                    self._ask_and_wait()
                yield batch

        self._patch(SyntheticClicks, "batches", batches)

    def _in_passing(self) -> None:
        original = dataset.Indexed.skip

        def skip(batches: dataset.Indexed, count: int) -> int:
            if count and self._trainer.rank == self._trainer.world - 1:
                self._ask_and_wait()
            return original(batches, count)

        self._patch(dataset.Indexed, "skip", skip)


def asked_and_resumed(config: Config, folder: Path, moments: list[str], nan: bool) -> dict[str, Any]:
    """Of each moment: what was said, the newest checkpoint, and the digest of the run that went on."""
    with pytest.MonkeyPatch.context() as patch:
        if nan:
            with_nan(patch)
        told: dict[str, Any] = {"whole": train(config, folder / "whole")["digest"]}
        for moment in moments:
            out = folder / moment
            if moment == "passing over data":
                with Asked("validation"), contextlib.suppress(run.Stopped):
                    train(config, out)
            said, resume = "not stopped", moment == "passing over data"
            with Asked(moment):
                try:
                    train(config, out, resume=resume)
                except run.Stopped as error:
                    said = str(error)
            if dist.is_initialized():
                dist.barrier()
            newest = [path.name for path in (*complete(out / "checkpoints")[:1], out / "final") if path.exists()]
            flaws = [flaw for path in complete(out / "checkpoints") for flaw in problems(path)]
            if dist.is_initialized():
                dist.barrier()
            told[moment] = said, newest, flaws, train(config, out, resume=True)["digest"]
        return told


SAYS = {
    "start": "stopped by a signal before the first step; there is nothing to save",
    "waiting for data": "stopped by a signal after step ",
    "validation": "stopped by a signal after step ",
    "passing over data": "stopped by a signal after step ",
    "final save": "stopped by a signal; the training is complete and saved to ",
    "evaluation": "stopped by a signal; the training is complete and saved to ",
}


@pytest.mark.parametrize(("world", "schedule"), [(1, "serial"), (2, "nested")])
def test_a_signal_at_any_time_saves_what_there_is_and_the_run_goes_on_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, world: int, schedule: str
) -> None:
    config = configured(
        schedule={"name": schedule, "micro_batches": 2}, train={"steps": 16, "eval_every": 5, "checkpoint_every": 0}
    )
    for told in cluster.run(world, asked_and_resumed, config, tmp_path, list(SAYS), False):
        for moment, says in SAYS.items():
            said, newest, flaws, digest = told[moment]
            assert said.startswith(says), (moment, said)
            assert digest == told["whole"] and not flaws, moment
            if "step " in said and "before" not in said:
                assert newest == [folder_of(int(said.split("step ")[1].split(";")[0]))] and "--resume" in said
            if "complete" in said:
                assert newest == ["final"]


@pytest.mark.parametrize(("schedule", "tier"), [("serial", "memory"), ("dbp", "disk"), ("nested", "memory")])
def test_a_signal_while_one_worker_waits_for_data_loses_no_batch_of_any(
    cluster: Cluster, tmp_path: Path, schedule: str, tier: str
) -> None:
    """Others have taken batches that nobody trains on then, and have passed over ones that were left out."""
    tables = {"f*": {**CLICKS["tables"]["f*"], "tier": tier, **({"memory": "100MB"} if tier == "disk" else {})}}
    config = configured(
        tables=tables, schedule={"name": schedule, "micro_batches": 1 if schedule == "dbp" else 2},
        train={"checkpoint_every": 0, "on_nonfinite": "skip"},
    )  # fmt: skip
    for told in cluster.run(2, asked_and_resumed, config, tmp_path, ["waiting for data"], True):
        said, newest, _, digest = told["waiting for data"]
        assert said.startswith("stopped by a signal after step ") and len(newest) == 1
        assert digest == told["whole"]
    (path,) = complete(tmp_path / "waiting for data" / "checkpoints")
    positions = [json.loads((path / manifest.state_file(rank, 2)).read_text())["position"] for rank in range(2)]
    assert positions[0] == positions[1] <= 8

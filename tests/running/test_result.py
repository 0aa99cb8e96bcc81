"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nestpipe import Callback, Trainer, run
from nestpipe.running.result import lines_of
from tests.behaviour.test_resume import configured, train
from tests.checkpoint.test_background import Patched


@pytest.mark.parametrize(
    ("track", "said"),
    [
        ([], "results: {out}/result.json, model and tables: {out}/final"),
        (["tensorboard"], "result.json, curves: tensorboard --logdir {out}, model"),
        (["mlflow", "wandb"], "result.json, curves: MLflow and Weights & Biases, model"),
    ],
)
def test_it_names_where_curves_are(tmp_path: Path, track: list[str], said: str) -> None:
    result = train(configured(train={"steps": 1, "track": []}), tmp_path)
    *_, last = lines_of(result, configured(train={"track": track}), tmp_path)
    assert said.format(out=tmp_path) in last


class Ends(Callback):
    trainer: Trainer

    def on_evaluate(self, *_: Any) -> None:
        self.trainer.end_fit()


def test_it_says_what_has_ended_it(tmp_path: Path) -> None:
    assert train(configured(train={"steps": 2}), tmp_path / "a")["ended_by"] == "steps"
    few = configured(data={"num_samples": 40}, train={"steps": None, "epochs": 1})
    assert train(few, tmp_path / "b")["ended_by"] == "data"
    make, ends = run.make_trainer, Ends()

    def make_and_keep(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        ends.trainer = made[0]
        return made

    with Patched(run, "make_trainer", make_and_keep):
        result = run.train(configured(train={"eval_every": 5}), folder=tmp_path / "c", callbacks=[ends])
    assert (result["ended_by"], result["steps"]) == ("callback", 5)

"""examples/sweep.py: trials are runs, and Optuna ends those of which it expects nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_cli import CLICKS, read

optuna = pytest.importorskip("optuna")
EXAMPLE = Path(__file__).parents[2] / "examples/sweep.py"


@pytest.fixture
def sweep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sweep", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_finds_the_best_trial_and_keeps_its_checkpoint(
    sweep: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "clicks.toml", tmp_path / "sweep"
    path.write_text(CLICKS)
    arguments = [
        "sweep.py",
        path,
        "--trials",
        2,
        "--out",
        out,
        "--set",
        "train.eval_every=4",
        "--set",
        "train.track=[]",
    ]
    monkeypatch.setattr("sys.argv", list(map(str, arguments)))
    sweep.main()
    results = [read(out / f"trial-{number}" / "result.json") for number in (0, 1)]
    best = max(results, key=lambda result: result["best"]["value"])
    number = results.index(best)
    assert f"AUC {best['best']['value']:.4f}: " in capsys.readouterr().out
    study = optuna.load_study(study_name="clicks", storage=f"sqlite:///{out}/study.db")
    assert study.best_trial.number == number and (out / f"trial-{number}" / "best").is_dir()
    assert list(study.trials[0].intermediate_values) == [4, 8, 12]
    rates = [read(out / f"trial-{number}" / "config.json")["train"]["dense_lr"] for number in (0, 1)]
    assert rates == [trial.params["dense_lr"] for trial in study.trials] and best["metrics"] == {}

    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=1.1))
    study.optimize(lambda trial: sweep.run_trial(trial, path, tmp_path / "pruned", ["train.eval_every=4"]), n_trials=1)
    assert study.trials[0].state == optuna.trial.TrialState.PRUNED
    assert list(study.trials[0].intermediate_values) == [4] and not (tmp_path / "pruned/trial-0/final").exists()

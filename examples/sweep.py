"""A sweep with Optuna: learning rates for a config; trials that fall behind the others are ended.

    pip install optuna
    python examples/sweep.py examples/clicks.toml --trials 20 --out runs/sweep
    nestpipe evaluate runs/sweep/trial-7 --split test      # the winner, on data that the sweep has not looked at

Every trial is a run in a folder of its own. Start the program several times, with the same --out, to run trials side by side.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import optuna

from nestpipe import Callback, config, run

METRIC = "AUC"  # of evaluations on "valid", while a trial trains


class Report(Callback):
    """Tells Optuna of every evaluation, and ends a trial of which it expects nothing."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def on_evaluate(self, split: str, metrics: Mapping[str, float], step: int) -> None:
        self._trial.report(metrics[METRIC], step)
        if self._trial.should_prune():
            raise optuna.TrialPruned(f"{METRIC} {metrics[METRIC]:.4f} after step {step}")


def run_trial(trial: optuna.Trial, path: Path, out: Path, overrides: Sequence[str] = ()) -> float:
    """The best METRIC of a run with what Optuna suggests."""
    suggested = [
        f"train.dense_lr={trial.suggest_float('dense_lr', 1e-4, 1e-2, log=True)}",
        f"tables.f*.lr={trial.suggest_float('row_lr', 1e-2, 1.0, log=True)}",
    ]
    evaluated = ["train.eval_every=100", f"train.best_metric={METRIC}", "train.patience=3", "train.eval_split=none"]
    described = config.read(path, [*evaluated, *suggested, *overrides])
    result = run.train(described, folder=out / f"trial-{trial.number}", callbacks=[Report(trial)])
    trial.set_user_attr("step", result["best"]["step"])
    return result["best"]["value"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=arguments.config.stem,
        storage=f"sqlite:///{arguments.out}/study.db",
        direction="maximize",
        sampler=optuna.samplers.TPESampler(),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        load_if_exists=True,
    )
    study.optimize(
        lambda trial: run_trial(trial, arguments.config, arguments.out, arguments.overrides), n_trials=arguments.trials
    )
    best = study.best_trial
    print(f"{METRIC} {best.value:.4f}: {best.params}, {arguments.out}/trial-{best.number}/best")


if __name__ == "__main__":
    main()

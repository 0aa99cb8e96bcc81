"""How a run is judged: on a part of the data, the same samples however many workers there are to look at them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe import run
from nestpipe.config import Config
from nestpipe.running.evaluating import evaluate_split, metric_names
from tests.behaviour.test_resume import CLICKS, SEQUENCES, configured
from tests.cluster import Cluster


def judged(config: Config, counts: list[int | None], folder: Path) -> tuple[list[dict[str, float]], list[str]]:
    """Metrics of so many samples, and the names that were known of them before."""
    trainer, built = run.make_trainer(config, storage=folder)
    try:
        names = metric_names(built, config)
        return [evaluate_split(trainer, built, config, "valid", samples=count) for count in counts], names
    finally:
        trainer.close()


@pytest.mark.parametrize("world", [1, 2])
def test_so_many_samples_are_looked_at_over_all_workers(cluster: Cluster, tmp_path: Path, world: int) -> None:
    config = configured(SEQUENCES, data={"num_valid_samples": 30}, train={"eval_batch_size": 4})
    for metrics, names in cluster.run(world, judged, config, [1, 7, 16, 30, 99, None], tmp_path):
        assert [one["targets"] for one in metrics] == [1, 7, 16, 30, 30, 30]
        assert names == [name for name in metrics[0] if name not in ("targets", "seen_targets")]


def test_names_are_known_before_the_first_evaluation(cluster: Cluster, tmp_path: Path) -> None:
    for entries in ({}, {"metrics": ["AUC", "LogLoss", "Calibration"]}):
        ((metrics, names),) = cluster.run(1, judged, configured(CLICKS, train=entries), [None], tmp_path)
        assert names == list(metrics[0])

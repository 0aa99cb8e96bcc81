"""Weights & Biases: a run without a network, read back from the file that would be sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nestpipe.tracking import tracker
from tests.behaviour.test_resume import configured, train

pytest.importorskip("wandb")


def records(folder: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            yield record


def test_its_file_has_the_config_and_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracker, "EVERY", 0.0)
    result = train(configured(train={"track": ["wandb"], "steps": 6, "eval_every": 4}), tmp_path)
    every = list(records(tmp_path))
    (begun,) = (record.run for record in every if record.HasField("run"))
    assert begun.project == "nestpipe" and begun.display_name == tmp_path.name
    assert begun.run_id == (tmp_path / "weightsandbiases-run.txt").read_text().strip()
    params = {entry.key: json.loads(entry.value_json) for entry in begun.config.update}
    assert params["train"]["batch_size"] == 16

    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in every
        if record.HasField("history")
    ]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "valid/AUC" in row] == [4]
    assert [(row["step"], row["test/AUC"]) for row in rows if "test/AUC" in row] == [(6, result["metrics"]["AUC"])]

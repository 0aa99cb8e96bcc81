"""From strings to AUC to predictions: the commands of docs/strings.md, as their reader types them."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch

from nestpipe import load_bundle
from nestpipe.export import export_bundle
from nestpipe.metrics import AUC
from tests.test_cli import run as command

ROOT = Path(__file__).parents[2]
ROWS, EVAL_BATCH = 4_000, 250
SMALLER = {
    "make_clicks": ["--rows", str(ROWS)],
    "train": [
        "--set",
        "train.batch_size=32",
        "--set",
        f"train.eval_batch_size={EVAL_BATCH}",
        "--set",
        "train.reader=thread",
    ],
}
KEYS = ("site_id", "app_id", "device_id", "device_type", "banner_pos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the page leave, on fewer rows."""
    folder = tmp_path_factory.mktemp("clicks")
    (folder / "examples").symlink_to(ROOT / "examples")
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/strings.md").read_text(), re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in block.splitlines():
            program, *arguments = shlex.split(line, comments=True)
            if program == "python":
                patch.setattr(sys, "argv", [*arguments, *SMALLER[Path(arguments[0]).stem]])
                runpy.run_path(arguments[0], run_name="__main__")
            else:
                assert program == "nestpipe" and command(*arguments, *SMALLER.get(arguments[0], [])) == 0, line
    return folder


def scores_of(folder: Path) -> pa.Table:
    return pq.read_table(folder / "scores.parquet")


def raw_columns(folder: Path) -> pa.Table:
    """As a server has them: strings, nulls for what is missing."""
    convert = pa_csv.ConvertOptions(column_types=dict.fromkeys(KEYS, pa.string()), strings_can_be_null=True)
    return pa_csv.read_csv(folder / "clicks.csv", convert_options=convert)


def test_the_run_learns_and_every_row_of_the_file_has_a_score(folder: Path) -> None:
    assert json.loads((folder / "runs/clicks/result.json").read_text())["metrics"]["AUC"] > 0.6
    scores = scores_of(folder)
    assert scores["label"].to_numpy().tolist() == raw_columns(folder)["click"].to_pylist()
    auc = AUC()
    auc.update(torch.tensor(scores["score"].to_pylist()), torch.tensor(scores["label"].to_pylist()))
    assert auc.compute() > 0.6


def test_a_bundle_makes_of_raw_columns_the_predictions_of_the_run(folder: Path) -> None:
    export_bundle(folder / "runs/clicks", folder / "bundle")
    bundle = load_bundle(folder / "bundle")
    rows = raw_columns(folder).drop_columns(["click"])
    for start in range(0, ROWS, EVAL_BATCH):
        predictions = bundle.predict(bundle.columns.batch(rows.slice(start, EVAL_BATCH)))
        expected = scores_of(folder)["score"].slice(start, EVAL_BATCH).to_numpy()
        np.testing.assert_array_equal(predictions.numpy(), expected)

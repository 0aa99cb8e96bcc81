"""A bundle to measure with: a ranker of any size that has trained for a step or two, so that weights and rows are drawn, not learned.

How long a ranking takes does not depend on what the weights say.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np

from nestpipe.bench.serving.environment import environment
from nestpipe.export import export_bundle
from nestpipe.serve.bundle import Bundle

CONFIG = """
[data]
kind = "kuairand_clicks"
num_users = 2_000
num_items = {items}
mean_length = 40
max_length = 200

[model]
kind = "hstu_ranker"
num_layers = {layers}
num_heads = {heads}
max_length = {longest}

[tables.item]
dim = {dim}
optimizer = "rowwise_adagrad"
lr = 0.05
features = ["history", "candidates"]

[train]
batch_size = 128
steps = {steps}
eval_split = "none"
"""


@dataclasses.dataclass(frozen=True)
class Ranker:
    """longest: items of a history that it takes. items: that there are."""

    dim: int = 64
    layers: int = 4
    heads: int = 2
    longest: int = 8_400
    items: int = 5_000
    steps: int = 2


def make_bundle(ranker: Ranker, folder: Path) -> Path:
    """Trains as the command line does, and exports. Gives the bundle's path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "ranker.toml"
    config.write_text(CONFIG.format(**dataclasses.asdict(ranker)))
    command = [sys.executable, "-m", "nestpipe", "train", str(config), "--out", str(folder / "run")]
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(), check=False)
    if finished.returncode:
        raise RuntimeError(f"no ranker to serve: `nestpipe train` failed:\n{finished.stdout.decode()[-2_000:]}")
    export_bundle(folder / "run", folder / "bundle")
    return folder / "bundle"


def item_keys(bundle: Bundle) -> np.ndarray:
    """Keys of the items that a ranker's candidates are rows of."""
    name = str(getattr(bundle.model, "candidates", "candidates"))
    table = next((feature.table for feature in bundle.features if feature.name == name), None)
    if table is None:
        raise ValueError(f"the bundle has no feature {name!r}, so there is nothing to rank; load is for bundles of rankers")
    return np.sort(bundle.keys(table))

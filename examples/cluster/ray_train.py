"""Ray Train as the launcher: python examples/cluster/ray_train.py my.toml /shared/runs/mine --workers 32

Ray places the workers on the machines of its cluster and tells each its rank; what runs there is `nestpipe train`, in the folder
in which this was started: that, the config and the run folder must be there on every machine. A run whose worker is lost is
started again and goes on from its newest checkpoint (set train.checkpoint_every).
"""

import argparse
import os

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings: dict[str, str]) -> None:
    """On every worker. Ray has set RANK, WORLD_SIZE and where to meet, and opened a process group, which nestpipe takes."""
    from nestpipe.cli import main

    os.chdir(settings["folder"])
    try:
        main(["train", settings["config"], "--out", settings["out"], "--resume"])
    except SystemExit as left:
        if left.code:
            raise RuntimeError(f"nestpipe left with {left.code}") from left


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("out", help="a folder that all machines see")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=1, help="of each worker")
    given = parser.parse_args()
    TorchTrainer(
        train,
        train_loop_config={"config": given.config, "out": given.out, "folder": os.getcwd()},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=given.workers, resources_per_worker={"CPU": given.cpus}, placement_strategy="SPREAD"
        ),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    ).fit()

"""Several machines: torchrun on each of them gives the bits of one machine with as many workers. Files to copy are what they
should be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nestpipe import run
from nestpipe.bench.links import links
from nestpipe.config import read as read_config
from tests.cluster import Cluster
from tests.test_cli import CLICKS
from tests.waiting import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
Node = tuple[list[str], str]  # what a command there begins with, and the interface


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.toml"
    path.write_text(CLICKS + '[schedule]\nname = "nested"\nmicro_batches = 2\n')
    return path


@pytest.fixture
def nodes() -> Iterator[tuple[str, list[Node]]]:
    """Where the first node is found, and both nodes: each with its own network stack, or where that is not allowed both here."""
    with links(2, rate="1gbit") as made:
        if made.why:
            yield "127.0.0.1", [([], "lo")] * 2
        else:
            prefixes = [["ip", "netns", "exec", name] for name in made.namespaces]
            yield made.addresses[0], [(prefix, made.interface) for prefix in prefixes]


def train_here(config: str, folder: str) -> str:
    return run.train(read_config(Path(config)), folder=Path(folder), json_file=None)["digest"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_two_nodes_with_a_worker_each_end_with_the_digest_of_one_with_two(
    cluster: Cluster, config: Path, tmp_path: Path, nodes: tuple[str, list[Node]]
) -> None:
    address, ends = nodes
    meet = ["--master-addr", address, "--master-port", str(free_port())]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet]
    program = ["-m", "nestpipe", "train", str(config), "--out", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    runs = [
        subprocess.Popen(
            [*prefix, *launch, "--node-rank", str(rank), *program],
            env={**environment, "GLOO_SOCKET_IFNAME": interface},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (prefix, interface) in enumerate(ends)
    ]
    try:
        together = cluster.run(2, train_here, str(config), str(tmp_path / "one"))  # while those import torch
        told = [node.communicate(timeout=PATIENCE)[1] for node in runs]
    finally:
        for node in runs:
            node.kill()
    assert [node.returncode for node in runs] == [0, 0], told
    assert json.loads((tmp_path / "two" / "result.json").read_text())["digest"] == together[0]


def test_the_slurm_script_is_sound_bash_and_runs_doctor_before_the_training() -> None:
    script = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert text.index("nestpipe doctor") < text.index("nestpipe train") and "--resume" in text
    assert "--ntasks-per-node=1" in text and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text


def test_the_pytorchjob_has_what_the_operator_reads() -> None:
    job = pytest.importorskip("yaml").safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    assert container["command"][:4] == ["torchrun", "-m", "nestpipe", "train"] and "--resume" in container["command"]
    assert job["spec"]["elasticPolicy"]["maxReplicas"] == worker["replicas"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}


def test_the_ray_example_is_a_program() -> None:
    compile((EXAMPLES / "ray_train.py").read_text(), "ray_train.py", "exec")

"""Starting N workers on this machine: torch's elastic launcher, the cores divided among them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence


def run_workers(arguments: Sequence[str], *, workers: int, port: int, restarts: int = 0) -> int:
    """Runs `python -m nestpipe ARGUMENTS` as `workers` processes of one group; returns an exit code.

    The first worker to fail ends the others; all are then started again, up to `restarts` times. port 0 takes any free one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from nestpipe.process import num_cores

    if port and not _is_free(port):
        print(f"nestpipe: error: port in use: {port} is taken by another program; choose another --port, or leave it out",
              file=sys.stderr)  # fmt: skip
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // workers)))
    # A store of its own for each start: in one that is kept, workers that were started again find the addresses of those that
    # are dead, and wait for them. (torch 2.13 keeps one unless told otherwise; so set this for torchrun too.)
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        run_id=str(uuid.uuid4()),
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "nestpipe", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was ended by {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else "stopped"
        print(f"nestpipe: worker {rank} {how}; all {workers} workers have left", file=sys.stderr)
        return 1
    except SignalException as error:  # Ctrl-C, or the scheduler: the workers have been told as well
        return 128 + int(error.sigval)
    return 0


def _is_free(port: int) -> bool:
    """On every address of this machine, as the launcher will want it."""
    both = socket.has_dualstack_ipv6()
    try:
        socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        ).close()
    except OSError:
        return False
    return True

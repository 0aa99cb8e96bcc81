"""What a worker process does before anything else: threads, allocator, process group."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist

from nestpipe.errors import TrainingError

GRACE = 30.0  # seconds
MOST_SECONDS = 10_000_000  # of a timeout, 115 days; clocks of torch and gloo overflow at some point beyond

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl
# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_large_blocks() -> bool:
    """Tells glibc to keep freed memory instead of returning it: fresh large tensors then cost no page faults.

    Measured to take a fifth off a training step. Elsewhere than glibc it does nothing; returns whether it did.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_TOP_PAD, 64 << 20))


def end_with(parent: int) -> None:
    """From now on this process is killed when `parent`, the process that started it, is gone. (On Linux only.)"""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it went before we asked
            os.kill(os.getpid(), signal.SIGKILL)


def under_launcher() -> bool:
    """Whether torchrun (or `nestpipe train`) started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def restarted() -> bool:
    """Whether the launcher has started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def check_timeout(name: str, timeout: float) -> None:
    """Raises ValueError for what is no number of seconds to wait."""
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout <= MOST_SECONDS:
        raise ValueError(f"{name} must be a number of seconds above 0 and up to {MOST_SECONDS:,}, got {timeout!r}")


def patience(timeout: float) -> datetime.timedelta:
    """How long a worker waits for another. Longer than that one waits for its data, so that it can say what is wrong."""
    return datetime.timedelta(seconds=timeout + GRACE)


def join_group(timeout: float = 300.0) -> None:
    """Joins the process group that the launcher describes, unless there is one already or this is a single process.

    timeout: seconds after which a worker that waits for data gives up; see `patience`.
    """
    if dist.is_initialized() or not under_launcher():
        return
    try:
        dist.init_process_group(timeout=patience(timeout))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '?')}"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise TrainingError(
                f"port in use: {address} is taken by another program; choose another port (--port of `nestpipe train`, "
                f"--master-port or --rdzv-endpoint of torchrun)"
            ) from error
        raise TrainingError(f"cannot join the process group at {address}: {error}") from error


def current_device() -> torch.device:
    """The accelerator of this worker if torch sees one, else the CPU. (Never run on an accelerator so far.)"""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return accelerator
    return torch.device("cpu")

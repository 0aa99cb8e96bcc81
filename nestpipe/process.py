"""What a worker process does before anything else, whoever started it: allocator, process group; and what it says of itself."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import torch
import torch.distributed as dist

from nestpipe.errors import TrainingError

GRACE = 30.0  # seconds
MOST_SECONDS = 10_000_000  # of a timeout, 115 days; clocks of torch and gloo overflow at some point beyond

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl
# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4

log = logging.getLogger("nestpipe")


@functools.cache  # once per process
def keep_large_blocks() -> bool:
    """Tells glibc to keep freed memory instead of returning it: fresh large tensors then cost no page faults.

    Measured to take a fifth off a training step. Elsewhere than glibc, or where the environment sets it up, it does nothing;
    returns whether it did.
    """
    if not sys.platform.startswith("linux") or allocator_is_set_up():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_TOP_PAD, 64 << 20))


def allocator_is_set_up() -> bool:
    """Whether whoever started this process has told glibc how to keep memory: then that holds."""
    names = "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_"
    return any(os.environ.get(name) for name in names) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tell(line: object) -> None:
    """What a run says about itself, for the first worker to call: through the logger "nestpipe"; to stderr in a program that has
    set up no logging, as Python does with warnings. A level set on that logger silences it."""
    if log.hasHandlers() or log.level != logging.NOTSET or log.manager.disable >= logging.INFO:
        log.info(line)
    else:
        print(line, file=sys.stderr)


def describe() -> list[str]:
    """Threads and memory of this process; what to set where the machine is not used as `nestpipe train` would use it."""
    threads, cores, workers = torch.get_num_threads(), num_cores(), os.environ.get("LOCAL_WORLD_SIZE", "")
    line = f"process: {threads} compute {'thread' if threads == 1 else 'threads'}"
    if workers.isdecimal() and int(workers):
        line += f" in each of {workers} workers, {cores} cores"
        even = max(1, cores // int(workers))
        if threads < even or (threads > even and threads * int(workers) > cores):
            line += f" (to use every core once, set OMP_NUM_THREADS={even} for the launcher)"
    why = "the environment sets up the allocator" if allocator_is_set_up() else "there is no glibc"
    kept = "is kept for reuse" if keep_large_blocks() else f"goes back to the system ({why})"
    return [f"{line}; freed memory {kept}"]


def end_with(parent: int) -> None:
    """From now on this process is killed when `parent`, the process that started it, is gone. (On Linux only.)"""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it went before we asked
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def first_interrupt(ask: Callable[[], None]) -> Iterator[threading.Event]:
    """While it lasts, the first Ctrl-C sets the event and calls `ask`, in a thread of its own (whom it interrupts may hold a
    lock); a second one raises KeyboardInterrupt wherever it is. Elsewhere than in the main thread, or where somebody else
    handles Ctrl-C, it is as it was."""
    asked = threading.Event()
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield asked
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            signal.default_int_handler(number, frame)
        asked.set()
        threading.Thread(target=ask, name="nestpipe-interrupted", daemon=True).start()

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def under_launcher() -> bool:
    """Whether torchrun (or `nestpipe train`) started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def rank() -> int:
    """Of this process among those that the launcher started; 0 where there is none."""
    return int(os.environ.get("RANK", "0"))


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
    """Every way into training passes here: sets up the allocator, and joins the process group that the launcher describes,
    unless there is one already or this is a single process.

    timeout: seconds after which a worker that waits for data gives up; see `patience`.
    """
    keep_large_blocks()
    if dist.is_initialized() or not under_launcher():
        return
    warn_of_shared_store()
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


def warn_of_shared_store() -> None:
    """Only the launcher can mend this, so it is said while there is time."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("RANK") == "0" and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        log.warning(
            f"torchrun --max-restarts {restarts}: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it; else workers that are started "
            f"again look for the addresses of those that are gone, and wait"
        )


def current_device() -> torch.device:
    """The accelerator of this worker if torch sees one, else the CPU. (Never run on an accelerator so far.)"""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return accelerator
    return torch.device("cpu")

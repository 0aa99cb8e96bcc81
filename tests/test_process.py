"""What a worker process is told about itself, and what it does whoever started it: `nestpipe train`, torchrun, or python."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nestpipe import process

SCRIPT = """
import ctypes, json, torch
from nestpipe import Batch, Feature, Jagged, Table, Trainer

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd b c d e f".split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo

def blocks_of_their_own():  # how many more blocks the allocator maps for one large tensor, and gives back after it
    before = mallinfo().hblks
    large = torch.ones(16_000_000)
    return mallinfo().hblks - before

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 1)

    def forward(self, batch, rows):
        return self.out(rows["user"])[:, 0] ** 2

before = blocks_of_their_own()
trainer = Trainer(Model(), [Table("user", 4)], [Feature("user", "user", "sum")],
                  dense_optimizer=lambda p: torch.optim.SGD(p, 0.1))
trainer.fit([Batch({"user": Jagged.from_lists([[1, 2], [3]])})] * 3)
print(json.dumps({"before": before, "after": blocks_of_their_own(), "told": trainer.describe()}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks glibc")
def test_a_script_has_the_allocator_of_a_worker_and_sees_what_the_run_says(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    result = json.loads(ended.stdout)
    assert (result["before"], result["after"]) == (1, 0)
    assert ended.stderr.splitlines() == result["told"]  # once, and nothing else
    assert any("schedule serial" in line for line in result["told"])
    assert any("freed memory is kept" in line for line in result["told"])


# -- what a run says ---------------------------------------------------------------------------------------------------


def without_logging(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """As in a program that has set up none. (No fixture: pytest sets up its own after fixtures.)"""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log = logging.getLogger("nestpipe")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", logging.NOTSET)
    return log


def test_without_logging_a_run_speaks_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_logging(monkeypatch)
    process.tell("schedule serial")
    assert capsys.readouterr() == ("", "schedule serial\n")


@pytest.mark.parametrize("logger", ["", "nestpipe"])
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_program_that_has_set_up_logging_gets_it_there_and_only_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logger: str, level: int
) -> None:
    log = without_logging(monkeypatch)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logging.getLogger(logger), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger(logger), "level", level)
    log.manager._clear_cache()  # type: ignore[attr-defined]  # of levels, which setLevel would do
    process.tell("schedule serial")
    log.manager._clear_cache()  # type: ignore[attr-defined]
    assert [record.getMessage() for record in records] == (["schedule serial"] if level == logging.INFO else [])
    assert capsys.readouterr() == ("", "")


def test_a_level_of_ones_own_silences_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log = without_logging(monkeypatch)
    log.setLevel(logging.WARNING)
    process.tell("schedule serial")
    assert capsys.readouterr() == ("", "")
    log.setLevel(logging.NOTSET)
    logging.disable(logging.INFO)
    process.tell("schedule serial")
    logging.disable(logging.NOTSET)
    assert capsys.readouterr() == ("", "")


# -- allocator, threads, launcher --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [("MALLOC_TRIM_THRESHOLD_", "131072", True), ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", True),
     ("GLIBC_TUNABLES", "glibc.pthread.rseq=0", False), ("MALLOC_TRIM_THRESHOLD_", "", False)],
)  # fmt: skip
def test_an_allocator_that_the_environment_sets_up_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, ours: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert process.allocator_is_set_up() is ours
    if ours:
        assert process.keep_large_blocks.__wrapped__() is False


@pytest.mark.parametrize(
    ("workers", "threads", "cores", "advice"),
    [
        (2, 1, 16, "set OMP_NUM_THREADS=8"),
        (4, 8, 16, "set OMP_NUM_THREADS=4"),
        (2, 8, 16, None),
        (2, 1, 2, None),
        (4, 1, 2, None),
        (3, 5, 16, None),
        (None, 1, 16, None),  # nobody has said how many there are
    ],
)
def test_too_few_or_too_many_threads_are_told(
    monkeypatch: pytest.MonkeyPatch, workers: int | None, threads: int, cores: int, advice: str | None
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if workers is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(workers))
    monkeypatch.setattr(process, "num_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    (line,) = process.describe()
    assert (advice in line) if advice else ("OMP_NUM_THREADS" not in line)


def test_a_launcher_that_would_hang_on_a_restart_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    for restarts, disabled, warned in (("0", None, False), ("3", "1", False), ("3", None, True)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
        if disabled:
            monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", disabled)
        caplog.clear()
        process.warn_of_shared_store()
        assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) is warned

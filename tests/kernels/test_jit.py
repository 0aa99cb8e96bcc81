"""Kernels are compiled once on a machine, by whichever process comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = """
import sys
import numpy as np
from nestpipe.kernels.jit import kernel

@kernel
def inner(x):
    return x * 2 + 1

@kernel
def outer(values):
    total = 0.0
    for value in values:
        total += inner(value)
    return total
"""
USE = """
import sys
import numpy as np
sys.stdin.readline()  # all begin together
import slow_kernels
assert slow_kernels.outer(np.arange(4.0)) == 16
print(sum(slow_kernels.outer.stats.cache_misses.values()))
"""


def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    (tmp_path / "slow_kernels.py").write_text(KERNELS)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen([sys.executable, "-c", USE], **options) for _ in range(3)]  # type: ignore[call-overload]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate()[0] for process in processes]
    assert sorted(map(int, told)) == [0, 0, 1]


def test_a_folder_that_cannot_be_locked_is_compiled_in_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "slow_kernels.py").write_text(KERNELS)
    lock = tmp_path / "__pycache__" / "slow_kernels.outer-11.lock"
    lock.mkdir(parents=True)  # what is a folder cannot be opened
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", USE]
    done = subprocess.run(command, input="go\n", capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and int(done.stdout) == 1, done.stderr

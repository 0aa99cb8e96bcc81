"""Checkpoints that are written while training goes on: each is of its own instant, and one that fails costs nothing else."""

from __future__ import annotations

import dataclasses
import gc
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestpipe import Batch, Jagged, Trainer, process
from nestpipe.checkpoint import background, complete, forked, manifest, problems, saving
from nestpipe.checkpoint.background import Background
from nestpipe.checkpoint.manifest import folder_of
from nestpipe.tensorfile import TensorReader
from tests.checkpoint.test_saving import FEATURES, TABLES, Model, contents, make_trainer, train
from tests.cluster import Cluster
from tests.waiting import PATIENCE, Signpost, until

NO_ROOM = OSError(28, "No space left on device")


def trainer_on(tier: str, folder: Path, **options: Any) -> Trainer:
    tables = [dataclasses.replace(table, tier=tier) for table in TABLES]
    make = lambda p: torch.optim.Adam(p, 1e-2)  # noqa: E731
    return Trainer(Model(), tables, FEATURES, dense_optimizer=make, storage=folder / "storage", **options)


def few_keys(trainer: Trainer, first: int, last: int) -> None:
    """Like `train`, with keys that wander: old ones are evicted, new ones born, and most rows stay as they are."""
    for step in range(first, last):
        rng = np.random.default_rng([7, step, trainer.rank])
        keys = {
            table.name: Jagged.from_lists([(10 * step + rng.integers(0, 30, 3)).tolist() for _ in range(4)])
            for table in TABLES
        }
        trainer.step(Batch(keys))


def children() -> set[int]:
    """Of this process. One that serves several tests has others besides: readers, say."""
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def base_of(path: Path) -> str | None:
    base = manifest.read(path).base
    return None if base is None else base.name


def child_of(background: Background) -> forked.Child:
    assert background._writing is not None
    return background._writing.child


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("step-"))


def listening(background: Background) -> list[str]:
    told: list[str] = []
    background._tell = told.append
    return told


class Patched:
    """Sets an attribute for as long as it lasts: workers of the cluster outlive a test."""

    def __init__(self, place: Any, name: str, value: Any) -> None:
        self._place, self._name, self._value = place, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._place, self._name)
        setattr(self._place, self._name, self._value)

    def __exit__(self, *_: object) -> None:
        setattr(self._place, self._name, self._before)


def instead_of_writing(what: Callable[[int, Path], None], trainer: Trainer) -> Patched:
    """what(rank, path) before each file is written, in whichever process does it."""
    write = saving._written

    def written(partial: Path, name: str, writer: Callable[[Path], None]) -> tuple[int, int]:
        what(trainer.rank, partial / name)
        return write(partial, name, writer)

    return Patched(saving, "_written", written)


# -- each is of its own instant ----------------------------------------------------------------------------------------


def save_slowly(folder: Path, tier: str) -> dict[str, Any]:
    before = children()
    trainer = trainer_on(tier, folder)
    checkpoints = trainer.checkpoints(folder / "saved", keep=2, full_every=3)
    parent, digests, states, listed = os.getpid(), {}, {}, []
    trained = Signpost()  # how many checkpoints have been trained beside

    def wait(rank: int, path: Path) -> None:
        if os.getpid() != parent:
            trained.wait_for(len(listed) + 1)

    with instead_of_writing(wait, trainer):
        for step in range(1, 6):
            few_keys(trainer, 3 * step - 3, 3 * step)
            if step == 4 and trainer.rank == 0:  # as a run that was killed leaves it
                partial = folder / "saved" / f".{folder_of(trainer.steps)}.partial"
                partial.mkdir()
                (partial / "table-stale.0-of-9.safetensors").write_text("half")
                assert partial not in complete(folder / "saved")
            digests[trainer.steps], states[trainer.steps] = trainer.digest(), contents(trainer)
            trainer.checkpoint(checkpoints)
            few_keys(trainer, 1000 * step, 1000 * step + 1)  # while it is written
            assert not (folder / "saved" / folder_of(trainer.steps - 1)).exists()
            trained.reach(step)
            checkpoints.wait()
            listed.append([path.name for path in complete(folder / "saved")])
    seen = {
        "digests": digests,
        "states": states,
        "listed": listed,
        "no child": children() <= before,
        "left": leftovers(folder / "saved"),
        "stalls": checkpoints.stalls,
    }
    trainer.close()
    return seen


def load_all(folder: Path, tier: str) -> dict[int, tuple[str, Any]]:
    loaded = {}
    for path in complete(folder / "saved"):
        trainer = trainer_on(tier, folder)
        trainer.load(path)
        loaded[trainer.steps] = trainer.digest(), contents(trainer)
        trainer.close()
    return loaded


def num_keys_and_records(path: Path, table: str) -> tuple[int, int]:
    keys = records = 0
    for file in path.glob(f"table-{table}.*"):
        with TensorReader(file) as reader:
            keys, records = keys + reader.shape("keys")[0], records + reader.shape("records")[0]
    return keys, records


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_each_checkpoint_is_what_the_trainer_was_at_its_step(cluster: Cluster, tmp_path: Path, tier: str) -> None:
    saved = cluster.run(2, save_slowly, tmp_path, tier)
    steps = sorted(saved[0]["digests"])
    names = {step: folder_of(step) for step in steps}
    a, b, c, d, e = (names[step] for step in steps)
    for result in saved:
        # Full, two with changes, full, changes: two stay, and the full one that they need.
        assert result["listed"] == [[a], [b, a], [c, b, a], [d, c, a], [e, d]]
        assert result["no child"] and len(result["stalls"]) == 5
    assert saved[0]["left"] == []
    folder = tmp_path / "saved"
    assert manifest.read(folder / d).base is None and base_of(folder / e) == d
    assert not list(folder.rglob("*stale*")) and not [p for path in complete(folder) for p in problems(path)]
    keys, records = num_keys_and_records(folder / e, "plain")
    assert 0 < records < keys
    for loaded in cluster.run(2, load_all, tmp_path, tier):
        assert sorted(loaded) == steps[-2:]
        for step, (digest, state) in loaded.items():
            for table in TABLES:
                expected = saved[0]["states"][step]["tables"][table.name]
                assert state["tables"][table.name] == expected, (step, table.name)
            assert (digest, state) == (saved[0]["digests"][step], saved[0]["states"][step])
    # Rows went and came between the two.
    old, new = (set(saved[0]["states"][step]["tables"]["short"]["rows"]) for step in steps[-2:])
    assert old - new and new - old


def save_changes_often(folder: Path, tier: str, full_every: int) -> list[tuple[int, str]]:
    trainer = trainer_on(tier, folder)
    checkpoints = trainer.checkpoints(folder / "saved", keep=100, full_every=full_every)
    digests = []
    for step in range(8):
        few_keys(trainer, step, step + 1)
        trainer.checkpoint(checkpoints)
        digests.append((trainer.steps, trainer.digest()))
    checkpoints.wait()
    trainer.close()
    return digests


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_many_small_changes_on_one_base_load_to_the_right_digest(cluster: Cluster, tmp_path: Path, tier: str) -> None:
    digests = dict(cluster.run(1, save_changes_often, tmp_path, tier, 5)[0])
    (loaded,) = cluster.run(1, load_all, tmp_path, "memory")
    assert [manifest.read(path).base is None for path in complete(tmp_path / "saved")][::-1] == [
        step % 5 == 0 for step in range(8)
    ]
    wrong = [step for step, (digest, _) in loaded.items() if digest != digests[step]]
    assert len(loaded) == 8 and not wrong


# -- one that fails ----------------------------------------------------------------------------------------------------


def fail_once(folder: Path, how: str, tier: str, first: int) -> dict[str, Any]:
    """Checkpoints 0, 1, ...: the `first` one fails."""
    before = children()
    trainer = trainer_on(tier, folder)
    checkpoints = trainer.checkpoints(folder / "saved", keep=5, full_every=2)
    told = listening(checkpoints)
    parent, digests, bases = os.getpid(), {}, []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def trouble(rank: int, path: Path) -> None:
        here = path.name.startswith("table-rare") if tier == "memory" else path.name.startswith("table-")
        if how == "raises" and rank == 1 and here:
            raise NO_ROOM
        if how == "first raises" and rank == 0 and "dense" in path.name:
            raise NO_ROOM
        if how == "too large" and rank == 1 and os.getpid() != parent:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))

    for number in range(4):
        few_keys(trainer, number, number + 1)
        digests[trainer.steps] = trainer.digest()
        with instead_of_writing(trouble if number == first else lambda *_: None, trainer):
            trainer.checkpoint(checkpoints)
            checkpoints.wait() if number == first else None
        if number == first:
            after = (
                [path.name for path in complete(folder / "saved")],
                leftovers(folder / "saved"),
                children() <= before,
            )
    checkpoints.wait()
    listed = complete(folder / "saved")
    bases = [base_of(path) for path in listed]
    loads = {}
    for path in listed:
        other = trainer_on(tier, folder / "other")
        other.load(path)
        loads[other.steps] = other.digest()
        other.close()
    trainer.close()
    return {"told": told, "digests": digests, "after": after, "listed": [path.name for path in listed], "bases": bases,
            "loads": loads, "left": leftovers(folder / "saved"), "no child": children() <= before}  # fmt: skip


@pytest.mark.parametrize(
    ("how", "tier", "failing"),
    [
        ("raises", "memory", 0),
        ("raises", "memory", 1),
        ("first raises", "memory", 2),
        ("too large", "memory", 2),
        ("raises", "disk", 2),
    ],
)
def test_a_checkpoint_that_fails_is_told_once_and_costs_nothing_else(
    cluster: Cluster, tmp_path: Path, how: str, tier: str, failing: int
) -> None:
    results = cluster.run(2, fail_once, tmp_path, how, tier, failing)
    names = [folder_of(step) for step in range(1, 5)]
    rest = [name for number, name in enumerate(names) if number != failing]
    told = results[0]["told"]
    assert len(told) == 1 and results[1]["told"] == []
    assert f"checkpoint of step {failing + 1} failed, training goes on" in told[0] and "Make room in" in told[0]
    assert ("there is none yet" if failing == 0 else f"the newest is {names[failing - 1]}") in told[0]
    cause = "File too large" if how == "too large" else "No space left"
    assert cause in told[0] and ("rank 0" if how == "first raises" else "rank 1") in told[0]
    assert results[0]["after"] == (rest[:failing][::-1], [], True) and results[0]["left"] == []
    for result in results:
        assert result["listed"] == rest[::-1] and result["no child"] and result["after"][2]
        # After one that failed, full or not, the next one is full.
        assert result["bases"][-1] is None and result["bases"][2 - failing] is None
        wrong = [step for step, digest in result["loads"].items() if digest != result["digests"][step]]
        assert len(result["loads"]) == 3 and not wrong


def lose_a_writer(folder: Path) -> tuple[list[str], list[str]]:
    trainer = make_trainer()
    checkpoints = trainer.checkpoints(folder)
    told = listening(checkpoints)
    parent = os.getpid()

    def die(rank: int, path: Path) -> None:
        if rank == 1 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out

    with instead_of_writing(die, trainer), Patched(saving, "PATIENCE", 2 * PATIENCE):
        train(trainer, 0, 1)
        trainer.checkpoint(checkpoints)
        train(trainer, 1, 2)
        checkpoints.wait()
    trainer.checkpoint(checkpoints)
    checkpoints.wait()
    return told, [path.name for path in complete(folder)]


def test_a_writer_that_is_killed_does_not_hold_the_others_up(cluster: Cluster, tmp_path: Path) -> None:
    """The writer of the first worker waits for a word that will not come; its worker must not wait with it."""
    outcomes = cluster.outcomes(2, lose_a_writer, tmp_path)
    assert [kind for kind, _ in outcomes] == ["ok", "ok"], outcomes
    told, listed = outcomes[0][1]
    assert len(told) == 1 and "rank 1" in told[0] and listed == [folder_of(2)]


def write_longer_than_the_patience_of_the_group(folder: Path) -> list[str]:
    with Patched(process, "GRACE", 0.0):
        trainer = trainer_on("memory", folder, data_timeout=2.0)
    checkpoints = trainer.checkpoints(folder / "saved")
    parent = os.getpid()

    def sleep(rank: int, path: Path) -> None:
        if rank == 0 and "state" in path.name and os.getpid() != parent:
            time.sleep(3.0)

    with instead_of_writing(sleep, trainer):
        train(trainer, 0, 1)
        trainer.checkpoint(checkpoints)
        train(trainer, 1, 2)
        trainer.checkpoint(checkpoints)
        train(trainer, 2, 3)
        checkpoints.wait()
    return [path.name for path in complete(folder / "saved")]


def test_a_slow_disk_of_one_worker_is_waited_for_longer_than_a_step_may_take(cluster: Cluster, tmp_path: Path) -> None:
    """train.timeout is for workers and data that are dead; a checkpoint of many gigabytes may take longer."""
    outcomes = cluster.outcomes(2, write_longer_than_the_patience_of_the_group, tmp_path)
    assert [kind for kind, _ in outcomes] == ["ok", "ok"], [value[1] for _, value in outcomes]
    assert outcomes[0][1] == [folder_of(2), folder_of(1)]


def fail_to_fork(folder: Path) -> tuple[list[str], int]:
    trainer = make_trainer()
    checkpoints = trainer.checkpoints(folder)
    told = listening(checkpoints)

    def fork() -> int:
        raise OSError(12, "Cannot allocate memory")

    train(trainer, 0, 1)
    with Patched(os, "fork", fork if trainer.rank == 1 else os.fork):
        trainer.checkpoint(checkpoints)
        train(trainer, 1, 2)
        checkpoints.wait()
    return told, trainer.steps


def test_a_fork_that_the_system_refuses_is_a_checkpoint_that_failed(cluster: Cluster, tmp_path: Path) -> None:
    outcomes = cluster.outcomes(2, fail_to_fork, tmp_path)
    assert [kind for kind, _ in outcomes] == ["ok", "ok"], outcomes
    assert len(outcomes[0][1][0]) == 1 and "Cannot allocate memory" in outcomes[0][1][0][0]
    assert leftovers(tmp_path) == [] and complete(tmp_path) == []


def test_refused_forks_leave_no_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="temporarily"):
            forked.fork(lambda: None)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_trainer_that_is_closed_gives_a_checkpoint_under_way_time_to_end(tmp_path: Path, tier: str) -> None:
    trainer = trainer_on(tier, tmp_path)
    few_keys(trainer, 0, 3)
    checkpoints = trainer.checkpoints(tmp_path / "saved")
    digest, closing = trainer.digest(), Signpost()
    with instead_of_writing(lambda *_: closing.wait_for(1), trainer):
        trainer.checkpoint(checkpoints)
    assert not complete(tmp_path / "saved")
    closing.reach(1)
    trainer.close()
    other = trainer_on("memory", tmp_path / "other")
    other.load(complete(tmp_path / "saved")[0])
    assert other.digest() == digest


def test_a_checkpoint_that_does_not_end_is_not_waited_for_when_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    train(trainer, 0, 1)
    checkpoints = trainer.checkpoints(tmp_path)
    told = listening(checkpoints)
    monkeypatch.setattr(background, "QUIET", 0.2)
    with instead_of_writing(lambda *_: time.sleep(2 * PATIENCE), trainer):
        trainer.checkpoint(checkpoints)
    trainer.close()
    assert told == [f"{folder_of(1)} is given up: nothing more of it was written to {tmp_path} for 0.2 s"]
    child = child_of(checkpoints)
    os.kill(child._pid, signal.SIGKILL)
    checkpoints.wait()


def fail_in_the_first_table(folder: Path) -> list[bool]:
    trainer = trainer_on("disk", folder)
    few_keys(trainer, 0, 2)
    checkpoints = trainer.checkpoints(folder / "saved")
    listening(checkpoints)

    def fail(rank: int, path: Path) -> None:
        if "table-plain" in path.name:
            raise NO_ROOM

    with instead_of_writing(fail, trainer):
        trainer.checkpoint(checkpoints)
    child = child_of(checkpoints)
    until(lambda: not child.is_running(), "the checkpoint has failed")
    undos = [store.file._undo for store in trainer.stores]  # type: ignore[union-attr]
    wanted = [undo is not None and undo.wanted() for undo in undos]
    checkpoints.wait()
    trainer.close()
    return wanted


def test_nothing_is_kept_for_a_checkpoint_that_has_failed(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(1, fail_in_the_first_table, tmp_path) == [[False] * len(TABLES)]


def test_waiting_long_for_a_checkpoint_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    train(trainer, 0, 1)
    checkpoints = trainer.checkpoints(tmp_path)
    told, said = [], Signpost()
    checkpoints._tell = lambda text: (told.append(text), said.reach(1))
    monkeypatch.setattr(background, "SILENCE", 0.1)
    with instead_of_writing(lambda *_: said.wait_for(1), trainer):
        trainer.checkpoint(checkpoints)
    checkpoints.wait()
    assert told == [f"training waits for {folder_of(1)}, which is still being written to {tmp_path}"]


def test_a_forked_process_that_never_comes_to_life_is_given_up_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of the interpreter that another thread held at that moment is held for ever in the copy."""
    fork, tried, before = os.fork, [], children()

    def sometimes() -> int:
        pid = fork()
        if pid == 0 and not tried:
            time.sleep(PATIENCE)
            os._exit(1)
        monkeypatch.setattr(forked, "ALIVE_WITHIN", PATIENCE if tried else 0.3)
        tried.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", sometimes)
    trainer = trainer_on("memory", tmp_path)
    few_keys(trainer, 0, 2)
    checkpoints = trainer.checkpoints(tmp_path / "saved")
    told = listening(checkpoints)
    trainer.checkpoint(checkpoints)
    checkpoints.wait()
    assert len(tried) == 2 and not told and children() <= before
    other = trainer_on("memory", tmp_path)
    other.load(complete(tmp_path / "saved")[0])
    assert other.digest() == trainer.digest()


def test_what_was_saved_before_is_not_written_again(tmp_path: Path) -> None:
    trainer = make_trainer()
    checkpoints = trainer.checkpoints(tmp_path)
    train(trainer, 0, 1)
    trainer.checkpoint(checkpoints)
    checkpoints.wait()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    trainer.checkpoint(checkpoints)
    checkpoints.wait()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_save_to_the_place_of_a_checkpoint_under_way_waits_for_it_and_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer()
    train(trainer, 0, 1)
    checkpoints = trainer.checkpoints(tmp_path)
    told = listening(checkpoints)
    with instead_of_writing(lambda *_: time.sleep(0.05), trainer):
        trainer.checkpoint(checkpoints)
    with pytest.raises(ValueError, match="exists already"):
        trainer.save(tmp_path / folder_of(1))
    assert not told and not list(problems(tmp_path / folder_of(1)))


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"full_every": 0}])
def test_nothing_to_keep_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        make_trainer().checkpoints(tmp_path, **wrong)


# -- whose folder it is ------------------------------------------------------------------------------------------------


def save_into_two_folders(folder: Path, tier: str) -> dict[str, list[tuple[str, str]]]:
    """Of each checkpoint in either: the digest that it had, and the one that it loads to."""
    trainer = trainer_on(tier, folder)
    often = trainer.checkpoints(folder / "often", keep=100, full_every=3)
    rarely = trainer.checkpoints(folder / "rarely", keep=100, full_every=2)
    digests = {}
    for step in range(9):
        few_keys(trainer, step, step + 1)
        digests[folder_of(trainer.steps)] = trainer.digest()
        trainer.checkpoint(often)
        if step % 2:
            trainer.checkpoint(rarely)
    often.wait()
    rarely.wait()
    trainer.close()
    return {
        name: [(digests[path.name], load_one(path, folder)) for path in complete(folder / name)]
        for name in ("often", "rarely")
    }


def load_one(path: Path, folder: Path) -> str:
    trainer = trainer_on("memory", folder / "other")
    trainer.load(path)
    digest = trainer.digest()
    trainer.close()
    return digest


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_two_folders_of_one_trainer_do_not_disturb_each_other(cluster: Cluster, tmp_path: Path, tier: str) -> None:
    for loaded in cluster.run(2, save_into_two_folders, tmp_path, tier):
        assert [len(loaded[name]) for name in ("often", "rarely")] == [9, 4]
        assert [pair for pairs in loaded.values() for pair in pairs if pair[0] != pair[1]] == []
    for name in ("often", "rarely"):
        assert not [flaw for path in complete(tmp_path / name) for flaw in problems(path)]
    bases = [base_of(path) for path in complete(tmp_path / "rarely")]
    assert bases == [folder_of(6), None, folder_of(2), None], "nothing builds on anything: the test shows nothing"


def save_by_two_runs(folder: Path) -> tuple[list[str], str, str]:
    first = trainer_on("memory", folder)
    few_keys(first, 0, 6)
    checkpoints = first.checkpoints(folder / "saved", keep=2)
    first.checkpoint(checkpoints)
    checkpoints.wait()
    second = trainer_on("memory", folder)
    said = ["", ""]
    try:
        second.checkpoints(folder / "saved", keep=2)
    except ValueError as error:
        said[0] = str(error)
    few_keys(second, 0, 6)
    try:
        second.checkpoints(folder / "saved", keep=2)
    except ValueError as error:
        said[1] = str(error)
    return [path.name for path in complete(folder / "saved")], *said


def test_a_folder_with_checkpoints_of_another_run_is_refused_on_every_worker(cluster: Cluster, tmp_path: Path) -> None:
    """Its steps would stand where this run's belong, and the newest, which are kept, would be the other's."""
    for listed, at_first, later in cluster.run(2, save_by_two_runs, tmp_path):
        assert listed == [folder_of(6)]
        assert f"{tmp_path / 'saved'} has a checkpoint of a later step, {folder_of(6)}" in at_first
        assert f"{tmp_path / 'saved'} has checkpoints of another run ({folder_of(6)}): save to another folder" in later


def test_a_trainer_that_was_loaded_from_a_folder_goes_on_saving_there(tmp_path: Path) -> None:
    trainer = make_trainer()
    train(trainer, 0, 2)
    checkpoints = trainer.checkpoints(tmp_path, keep=2)
    trainer.checkpoint(checkpoints)
    checkpoints.wait()
    other = make_trainer()
    other.load(tmp_path / folder_of(2))
    train(other, 2, 3)
    checkpoints = other.checkpoints(tmp_path, keep=2)
    other.checkpoint(checkpoints)
    checkpoints.wait()
    assert [path.name for path in complete(tmp_path)] == [folder_of(3), folder_of(2)]
    with pytest.raises(ValueError, match="has a checkpoint of a later step, step-000000003, than this trainer is at"):
        trainer.checkpoints(tmp_path)


def test_a_checkpoint_whose_base_was_tidied_away_is_followed_by_a_full_one(tmp_path: Path) -> None:
    trainer = trainer_on("memory", tmp_path)
    checkpoints = trainer.checkpoints(tmp_path / "saved", full_every=9)
    for step in range(3):
        few_keys(trainer, step, step + 1)
        trainer.checkpoint(checkpoints)
        checkpoints.wait()
        if step == 0:
            shutil.rmtree(tmp_path / "saved" / folder_of(1))
    assert [base_of(path) for path in complete(tmp_path / "saved")] == [folder_of(2), None]
    assert load_one(tmp_path / "saved" / folder_of(3), tmp_path) == trainer.digest()


# -- leaving while one is written --------------------------------------------------------------------------------------

SCRIPT = """
import atexit, os, sys
atexit.register(lambda: os._exit(int("failing" in sys.argv)))  # comes last; torch alone may take seconds to go
from nestpipe.checkpoint import background
from tests.checkpoint.test_saving import make_trainer, train
background.HEAD_START = 1.5  # it has not begun when the script is over
trainer = make_trainer()
train(trainer, 0, 3)
print(trainer.digest(), flush=True)
checkpoints = trainer.checkpoints(sys.argv[1])
trainer.checkpoint(checkpoints)
if "forgotten" in sys.argv:
    del trainer, checkpoints
if "failing" in sys.argv:
    raise ValueError("something else went wrong")
"""


def run_script(folder: Path, *options: str, workers: int = 1) -> list[tuple[int, str]]:
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    if workers > 1:
        environment |= {"WORLD_SIZE": str(workers), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), *options],
            env={**environment, **({"RANK": str(rank)} if workers > 1 else {})},
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        for rank in range(workers)
    ]
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(
    ("workers", "options", "code"), [(2, ["last line"], 0), (1, ["forgotten"], 0), (1, ["failing"], 1)]
)
def test_a_checkpoint_that_a_script_ends_with_is_there(
    tmp_path: Path, workers: int, options: list[str], code: int
) -> None:
    results = run_script(tmp_path / "saved", *options, workers=workers)
    assert [result[0] for result in results] == [code] * workers
    (path,) = complete(tmp_path / "saved")
    assert not list(problems(path)) and leftovers(tmp_path / "saved") == []
    assert load_one(path, tmp_path) == results[0][1].strip()


def test_a_part_that_never_comes_is_not_waited_for_for_ever_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first of two workers meets it when the other is dead."""
    trainer = make_trainer()
    train(trainer, 0, 1)
    checkpoints = trainer.checkpoints(tmp_path)
    told = listening(checkpoints)
    monkeypatch.setattr(background, "wait_for_all", lambda *_: time.sleep(2 * PATIENCE))
    monkeypatch.setattr(background, "QUIET", 1.0)
    monkeypatch.setattr(background, "WORD", 0.1)
    trainer.checkpoint(checkpoints)
    pid = child_of(checkpoints)._pid
    del trainer, checkpoints
    gc.collect()
    assert told == [
        f"rank 0 waits for {folder_of(1)}, which is still being written to {tmp_path}",
        f"{folder_of(1)} is given up: nothing more of it was written to {tmp_path} for 1 s",
    ]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_after_an_error_one_of_which_nothing_more_is_written_is_given_up_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    train(trainer, 0, 1)
    checkpoints = trainer.checkpoints(tmp_path)
    told = listening(checkpoints)
    monkeypatch.setattr(background, "LEAVING", 0.2)
    with instead_of_writing(lambda *_: time.sleep(2 * PATIENCE), trainer):
        trainer.checkpoint(checkpoints)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        trainer.close()
    assert told == [f"{folder_of(1)} is given up: nothing more of it was written to {tmp_path} for 0.2 s"]
    os.kill(child_of(checkpoints)._pid, signal.SIGKILL)
    checkpoints.wait()

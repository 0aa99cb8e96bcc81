"""`nestpipe doctor` finds what would spoil a run on several workers, names the worker and says what to do."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nestpipe.cli import main
from nestpipe.doctor import examine as examining
from nestpipe.doctor import facts, reach
from nestpipe.doctor.checks import FAIL, OK, WARN, Finding
from nestpipe.doctor.examine import Meeting, Question, examine
from tests.cluster import Cluster

CLICKS = """
[data]
kind = "synthetic_clicks"
num_features = 2
keys_per_table = 50
num_samples = 400
num_test_samples = 30
num_valid_samples = 10
[model]
kind = "dlrm"
[tables."f*"]
dim = 4
pooling = "sum"
"""
CHECKS = ["workers", "code", "config", "data", "network", "memory", "disk", "folder", "links inside machines", "clocks"]


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.toml"
    path.write_text(CLICKS)
    return path


def look(config: str, out: str, fault: str = "", timeout: float = 20.0) -> tuple[int, list[Finding]]:
    """On one of several workers; the last of them has the fault."""
    rank, world = dist.get_rank(), dist.get_world_size()
    told: list[Finding] = []
    question = Question(Path(config), (), Path(out), timeout=timeout)
    if rank == world - 1 and fault:
        if fault == "config":
            question = Question(Path(config), ("train.batch_size=7",), Path(out))
        elif fault == "misspelt":
            question = Question(Path(config), ("train.stps=7",), Path(out))
        elif fault == "folder":
            examining.SEEN_WITHIN = 0.5
            question = Question(Path(config), (), Path(f"{out}-elsewhere"))
        elif fault == "data":
            question = Question(Path(config), ("data.num_features=1", "tables.f1.features=['gone']"), Path(out))
        elif fault == "firewall":
            examining.own_address = lambda: "240.0.0.1"  # reserved: nobody has it
        elif fault == "silent":
            time.sleep(4 * timeout)
            return 1, []
        else:
            _plant(fault)
    store = dist.distributed_c10d._get_default_store()
    code = examine(question, store, rank, world, told.append)
    return code, told


def _plant(fault: str) -> None:
    gather = examining.gather

    def changed(*args: Any, **options: Any) -> Any:
        facts = gather(*args, **options)
        if fault == "code":
            facts["code"]["torch"] = "1.0"
        elif fault == "name of this machine":
            facts["host"], facts["network"]["address"] = "elsewhere", "127.0.1.1"
        elif fault == "interface":
            facts["network"]["wanted"] = "eth7"
        elif fault == "files":
            facts["data"]["files"] = [("part-0.parquet", 17)]
        elif fault == "schema":
            facts["data"]["schema"]["labels"] = "torch.int64 ()"
        return facts

    examining.gather = changed


FAULTS = [
    ("config", "config: train.batch_size is 256 on rank 0 and 7 on rank 1; give every worker the same file"),
    ("misspelt", "config: rank 1: config: train.stps"),
    ("data", "rank 1"),
    ("folder", "does not see it; checkpoints need a folder that all machines share"),
    ("code", "code: torch is 2"),
    (
        "name of this machine",
        ", which others cannot reach: set GLOO_SOCKET_IFNAME to the interface that joins the machines, one of ",
    ),
    ("interface", "rank 1 (vm) has no interface GLOO_SOCKET_IFNAME=eth7; it has lo"),
    ("files", "data: file number 0 is not there on rank 0 and ['part-0.parquet', 17] on rank 1"),
    ("firewall", "links: rank 0 (vm) cannot connect to 240.0.0.1: "),
    ("schema", "data: in the first batch labels is torch.float32 () on rank 0 and torch.int64 () on rank 1"),
]


def test_workers_in_order_pass_every_check_and_nothing_is_left_of_it(
    cluster: Cluster, clicks: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs" / "mine"
    (code, told), *others = cluster.run(3, look, str(clicks), str(out))
    assert code == 0 and others == [(0, [])] * 2  # the first tells, all know
    assert [finding.what for finding in told] == CHECKS
    levels = {
        finding.level for finding in told if finding.what != "links inside machines"
    }  # fast or not: a busy machine's
    assert levels == {OK} and told[-2].level != FAIL
    assert "3 pairs, median" in told[-2].says and "3 on 1 machine" in told[0].says
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_a_fault_on_one_worker_fails_the_check_and_names_it(
    cluster: Cluster, clicks: Path, tmp_path: Path, fault: str, message: str
) -> None:
    (code, told), (other_code, _) = cluster.run(2, look_and_forget, str(clicks), str(tmp_path / "run"), fault)
    assert code == other_code == 1
    failed = [str(finding) for finding in told if finding.level == FAIL]
    assert len(failed) == 1 and message.replace("(vm)", f"({socket.gethostname()})") in failed[0], failed
    assert not (tmp_path / "run").exists()


def look_and_forget(*args: Any) -> tuple[int, list[Finding]]:
    kept = examining.gather, examining.own_address
    reach.WITHIN = 0.5
    try:
        return look(*args)
    finally:
        examining.gather, examining.own_address = kept


def test_a_worker_that_says_nothing_is_named_and_nobody_waits_for_it(
    cluster: Cluster, clicks: Path, tmp_path: Path
) -> None:
    started = time.monotonic()
    (code, told), (_, _) = cluster.run(2, look, str(clicks), str(tmp_path / "run"), "silent", 0.5)
    assert code == 1 and str(told[0]).startswith("FAIL  workers: rank 1 of 2 said nothing in time")
    assert time.monotonic() - started < 30


def test_a_folder_that_cannot_be_written_is_said_by_one_worker_too(clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[Finding] = []
    question = Question(clicks, (), tmp_path / "file" / "run")
    assert examine(question, dist.HashStore(), 0, 1, told.append) == 1
    assert "cannot write there: Not a directory; mend that, or choose another: --out" in str(told[-1])


def test_data_that_is_not_there_or_hangs_is_a_failed_check(clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nclass Slow:\n    features = ('a',)\n"
        "    def batches(self, split, *, batch_size, rank, world, seed, epoch=0):\n        time.sleep(600)\n        yield\n"
    )
    clicks.write_text('[data]\nkind = "slow:Slow"\n[model]\nkind = "dlrm"\n[tables.a]\ndim = 4\npooling = "sum"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        told: list[Finding] = []
        question = Question(clicks, (), tmp_path / "run", timeout=0.3)
        assert examine(question, dist.HashStore(), 0, 1, told.append) == 1
    assert "no batch within 0 s" in next(finding.says for finding in told if finding.level == FAIL)


def test_what_a_meeting_has_lost_is_none_after_its_time() -> None:
    meeting = Meeting(dist.HashStore(), 0, 2, 0.1)
    started = time.monotonic()
    assert meeting.collect("facts", {"a": 1}, 0.2) == [{"a": 1}, None]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(("arguments", "code", "line"), [
    ((), 0, "ok    memory: "),
    (("--set", "data.tasks=['click', 'like']"), 0, "no files; the first batch is alike everywhere"),
    (("--rows", "f0=1e13"), 1, "FAIL  memory: "),
    (("--rows", "f7=10"), 1, "FAIL  memory: --rows names a table 'f7'; there are f0, f1"),
    (("--set", "tables.f*.tier=disk", "--rows", "f0=1e13"), 1, "FAIL  disk: "),
    (("--rows", "f0"), 2, "--rows 'f0': write it as TABLE=COUNT"),
    (("--workers", "0"), 2, "--workers must be at least 1"),
])  # fmt: skip
def test_the_command_tells_a_line_per_check_and_its_exit_code(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, line: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["doctor", str(clicks), "--out", str(tmp_path / "run"), *arguments])
    printed = capsys.readouterr()
    assert left.value.code == code and line in printed.out + printed.err, printed


def test_levels_are_words_of_their_own() -> None:
    assert len({OK, WARN, FAIL}) == 3 and str(Finding(OK, "data", "fine")) == "ok    data: fine"


def test_a_module_that_cannot_be_imported_is_a_failed_check_and_no_traceback(clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "unfinished.py").write_text("class Unfinished:\n    def\n")
    told: list[Finding] = []
    question = Question(clicks, ("data.kind=unfinished:Unfinished",), tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert examine(question, dist.HashStore(), 0, 1, told.append) == 1
    assert str(told[-1]).startswith("FAIL  config: rank 0: SyntaxError: ")


@pytest.mark.parametrize("before", ["", "file://"])
def test_files_are_known_by_name_and_size_wherever_they_lie(tmp_path: Path, before: str) -> None:
    for number in range(2):
        (tmp_path / f"part-{number}.csv").write_text("1,2\n" * (number + 1))
    named = {"kind": "csv", "path": f"{before}{tmp_path}/*.csv", "folder": str(tmp_path), "columns": ["a", "b"]}
    assert facts._files(named) == [("part-0.csv", 4), ("part-1.csv", 8)]

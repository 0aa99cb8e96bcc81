"""Links between workers: they have the rate that was asked for, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nestpipe.bench import links as network
from nestpipe.bench.links import (
    LOOPBACK,
    NAMESPACES,
    Links,
    bits_per_second,
    has_netem,
    links,
    remove_leftovers,
    throughput,
)
from nestpipe.bench.workers import run_workers
from tests.waiting import PATIENCE, is_alive, until


@pytest.fixture
def possible() -> None:
    with links(1) as made:
        if made.why:
            pytest.skip(f"no links here: {made.why}")


def are_gone(names: list[str]) -> bool:
    return not any((NAMESPACES / name).exists() for name in names)


def measure(made: Links) -> dict[str, float]:
    """At two rates, and what the interface has counted of it."""
    found = {}
    for rate in ("400mbit", "100mbit"):
        if dist.get_rank() == 0:
            made.change_rate(rate)
        dist.barrier()
        found[rate] = max(throughput(2.0) for _ in range(2))
        buckets = [("-n", name, "qdisc", "show", "dev", made.interface) for name in made.namespaces]
        shown = [subprocess.run(["tc", *bucket], capture_output=True, text=True).stdout for bucket in buckets]
        assert all(f" rate {rate.removesuffix('mbit')}Mbit " in text for text in shown), shown
        dist.barrier()
    before = made.bytes_sent()
    throughput(2.0)
    return {**found, "bytes": made.bytes_sent() - before}


def sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return float(value)


@pytest.mark.usefixtures("possible")
def test_workers_talk_at_the_rate_of_their_links() -> None:
    with links(2, rate="100mbit") as made:
        assert made.label == "100mbit/s links" and len(set(made.addresses)) == 2
        rates = run_workers(measure, made, workers=2, links=made)
        names = list(made.namespaces)
        assert all((NAMESPACES / name).exists() for name in names)
    assert 0 < rates["100mbit"] < 120 and 0 < rates["400mbit"] < 480  # less, where workers are held up by others
    assert 1e6 < rates["bytes"] < 1.2e6  # half of what throughput() is told is for the worker itself
    assert are_gone(names)


def send_once(made: Links, receiver: int) -> float:
    """Bytes that have gone from group to group for a megabyte from worker 0."""
    dist.barrier()
    before = made.bytes_between()
    dist.barrier()
    if dist.get_rank() == 0:
        dist.send(torch.zeros(250_000), receiver)
    elif dist.get_rank() == receiver:
        dist.recv(torch.zeros(250_000), 0)
    dist.barrier()
    return made.bytes_between() - before


@pytest.mark.usefixtures("possible")
def test_what_stays_in_a_group_does_not_cross_the_link_between_groups() -> None:
    with links(4, rate="400mbit", groups=2, between="200mbit") as made:
        assert made.label == "400mbit/s links, 2 groups with 200mbit/s between them"
        inside, across = (run_workers(send_once, made, to, workers=4, links=made) for to in (1, 2))
    assert inside < 1e5 and 1e6 < across < 1.2e6


def test_workers_that_cannot_form_equal_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="5 workers cannot form 2 equal groups"), links(5, groups=2, between="1mbit"):
        pass


@pytest.mark.usefixtures("possible")
def test_nothing_is_left_after_an_exception() -> None:
    names: list[str] = []

    def fail() -> None:
        with links(3) as made:
            names.extend(made.namespaces)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert len(names) == 3 and are_gone(names)


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_bench_that_was_ended_by_a_signal(how: signal.Signals) -> None:
    script = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
from nestpipe.bench.links import links
with links(2) as made:
    print(*made.namespaces, flush=True)
    time.sleep(600)
"""
    bench = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert bench.stdout is not None
    names = bench.stdout.readline().split()
    assert len(names) == 2 and all((NAMESPACES / name).exists() for name in names)
    assert all(name.startswith(f"nestpipe-{bench.pid}-") for name in names)
    bench.send_signal(how)
    assert bench.wait(PATIENCE) != 0
    until(lambda: are_gone(names), f"{names} are gone")


def test_nothing_is_left_of_workers_whose_bench_was_killed(tmp_path: Path) -> None:
    begun, temporary = tmp_path / "begun", tmp_path / "temporary"
    begun.mkdir()
    temporary.mkdir()
    script = f"""
if __name__ == "__main__":
    from nestpipe.bench.links import links
    from nestpipe.bench.workers import run_workers
    work = "import os, time; open(f'{begun}/{{os.getpid()}}', 'w').close(); time.sleep(600)"
    with links(2) as made:
        run_workers(exec, work, workers=2)
"""
    (tmp_path / "bench.py").write_text(script)
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.getcwd()}
    bench = subprocess.Popen([sys.executable, tmp_path / "bench.py"], stderr=subprocess.DEVNULL, env=environment)
    try:
        until(lambda: len(list(begun.iterdir())) == 2, "both workers have begun")
    finally:
        bench.kill()
    bench.wait()
    workers = [int(file.name) for file in begun.iterdir()]
    until(lambda: not any(is_alive(worker) for worker in workers), "both workers are gone")
    until(lambda: not list(temporary.iterdir()), "their files are gone")
    until(lambda: not list(NAMESPACES.glob(f"nestpipe-{bench.pid}-*")), "their links are gone")


def fail_on_the_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second is wrong")
    dist.barrier()


def test_what_goes_wrong_on_a_worker_is_raised_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)worker 1 failed:.*in fail_on_the_second.*the second is wrong"):
        run_workers(fail_on_the_second, workers=2)


@pytest.mark.usefixtures("possible")
def test_a_delay_is_refused_where_the_kernel_has_none() -> None:
    before = set(NAMESPACES.iterdir())
    if has_netem():
        pytest.skip("this kernel has netem")
    with pytest.raises(ValueError, match="no netem"), links(2, delay="2ms"):
        pass
    assert set(NAMESPACES.iterdir()) == before
    with pytest.raises(ValueError, match="'2ms'"), links(2, delay="2"):
        pass


@pytest.mark.usefixtures("possible")
def test_what_a_dead_bench_and_its_guardian_left_is_removed_at_the_next_start() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, alive = f"nestpipe-{dead.pid}-0", f"nestpipe-{os.getpid()}-mine"
    for name in (left, alive):
        subprocess.run(["ip", "netns", "add", name], check=True)
    inside = subprocess.Popen(["ip", "netns", "exec", left, "sleep", "600"])
    try:
        with links(1) as made:
            assert made.namespaces and not (NAMESPACES / left).exists() and (NAMESPACES / alive).exists()
        assert inside.wait(PATIENCE) == -signal.SIGKILL  # a worker that outlived its bench
        assert remove_leftovers() == []
    finally:
        subprocess.run(["ip", "netns", "del", alive], check=True)
        inside.kill()


def test_without_root_workers_use_loopback_and_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with links(2, rate="100mbit") as made:
        assert made == Links(why="they need root") and made.label == LOOPBACK
        assert run_workers(sum_of_ranks, workers=2, links=made) == 1.0
    assert "they need root" in capsys.readouterr().err


@pytest.mark.usefixtures("possible")
def test_a_kernel_that_cannot_is_said_with_the_command_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "QUEUE", "nonsense")
    before = set(NAMESPACES.iterdir())
    with links(2) as made:
        assert not made.namespaces and "tbf" in made.why
        assert set(NAMESPACES.iterdir()) == before
    assert "tbf" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["300", "mbit", "-3mbit", "0mbit", "fast", "3 mbit"])
def test_a_rate_without_number_or_unit_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="300mbit"):
        bits_per_second(rate)


def test_rates_are_read() -> None:
    assert bits_per_second("300mbit") == 3e8 and bits_per_second("1.5gbit") == 1.5e9

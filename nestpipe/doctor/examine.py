"""The workers meet: facts through the launcher's store, then connections and links. Rank 0 judges and tells."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nestpipe import config as configs
from nestpipe.doctor.checks import FAIL, UNSEEN, Finding, Link, of_facts, of_links
from nestpipe.doctor.facts import Facts, gather, shared_folders
from nestpipe.doctor.links import measure
from nestpipe.doctor.reach import listening, own_address, unreachable

SEEN_WITHIN = 5.0  # seconds: a network file system may show a new file that late
LEAVING = 3.0
OPEN = (
    "workers talk to each other on any port above 1023: open them between the machines, and set GLOO_SOCKET_IFNAME to the "
    "interface that joins them"
)


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be looked at. rows: see `checks.of_facts`. timeout: seconds for each part of it."""

    config: Path
    overrides: Sequence[str] = ()
    out: Path = Path("runs/doctor")
    rows: Mapping[str, float] = dataclasses.field(default_factory=dict)
    timeout: float = 60.0


def examine(question: Question, store: dist.Store, rank: int, world: int, tell: Callable[[Finding], None]) -> int:
    """0, or 1 if a check has failed, on every worker. tell: of rank 0, each finding as it is known."""
    meeting = Meeting(store, rank, world, question.timeout)
    findings: list[Finding] = []

    def conclude(some: list[Finding]) -> bool:
        for finding in some:
            tell(finding)
        findings.extend(some)
        return all(finding.level != FAIL for finding in findings)

    with _folders(question, meeting) as folders:
        facts = gather(
            question.config, question.overrides, rank=rank, world=world, out=question.out, timeout=question.timeout
        )
        facts["folders"] = folders()
        everybody = meeting.collect("facts", facts, 2 * question.timeout)  # behind those who wait for data
        go_on = meeting.from_first("go on", lambda: conclude(of_facts(everybody, question.rows)))
        if go_on and world > 1:
            hosts = [of_worker["host"] for of_worker in everybody]
            with listening(world) as port:
                meeting.say("place", (own_address(), port))
                found = unreachable((other for other in range(world) if other != rank), partial(meeting.of, "place"))
                blocked = meeting.collect("blocked", {"to": found}, 2 * question.timeout)
                go_on = meeting.from_first("reached", lambda: conclude(_of_blocked(blocked, hosts)))
        if go_on and world > 1:
            measured = meeting.collect("links", _links(store, rank, world, question.timeout), 2 * question.timeout)
            go_on = meeting.from_first("sound", lambda: conclude(_told(measured, hosts)))
    return 0 if go_on else 1


class Meeting:
    """Values of all workers, through the store: by name, each once. Rank 0 waits for the others no longer than it says."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: float) -> None:
        self._store, self.rank, self.world, self._timeout = (
            dist.PrefixStore("nestpipe doctor", store),
            rank,
            world,
            timeout,
        )

    def say(self, name: str, value: Any) -> None:
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def of(self, name: str, rank: int) -> Any:
        """What another has said; None if it does not in time."""
        return self._get(f"{name}/{rank}", self._timeout)

    def collect(self, name: str, value: Any, timeout: float) -> list[Any]:
        """Everybody's, by rank, for rank 0; None of those who do not say theirs in time. Nothing for the others."""
        self.say(name, value)
        if self.rank:
            return []
        deadline = time.monotonic() + timeout
        return [self._get(f"{name}/{other}", deadline - time.monotonic()) for other in range(self.world)]

    def from_first(self, name: str, work: Callable[[], Any]) -> Any:
        """What rank 0 makes of it, on every worker; None if it is gone."""
        if self.rank == 0:
            value = work()
            self._store.set(name, json.dumps(value))
            return value
        return self._get(name, 4 * self._timeout)

    def _get(self, key: str, timeout: float) -> Any:
        try:
            self._store.wait([key], datetime.timedelta(seconds=max(0.001, timeout)))
            return json.loads(self._store.get(key))
        except RuntimeError:  # too late, or the store is gone
            return None


@contextlib.contextmanager
def _folders(question: Question, meeting: Meeting) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """What it yields tries the folders that should be shared: rank 0 writes a file into each, the others look for it and write
    theirs; it returns each folder and what is wrong with it. Nothing is left of it afterwards, and rank 0 leaves last: the store
    may be its own."""
    try:
        places = shared_folders(configs.read(question.config, question.overrides), question.out)
    except Exception:  # told by `gather`
        places = []
    token = meeting.from_first("token", lambda: secrets.token_hex(8))
    written: list[Path] = []
    made: list[Path] = []

    def write(place: Path) -> str:
        try:
            if meeting.rank == 0:
                missing = [folder for folder in (place, *place.parents) if not folder.exists()]
                place.mkdir(parents=True, exist_ok=True)
                made.extend(missing)
            file = place / f".nestpipe-doctor-{token}-{meeting.rank}"
            written.append(file)
            file.write_text(str(token))
        except OSError as error:
            return f"cannot write there: {error.strerror or error}"
        return ""

    def look() -> list[tuple[str, str]]:
        problems = [write(place) for place in places] if meeting.rank == 0 else []
        meeting.from_first("written", lambda: True)
        if meeting.rank:
            problems = [write(place) if _appears(place, token, 0) else UNSEEN for place in places]
        return [(str(place), problem) for place, problem in zip(places, problems, strict=True)]

    def clean() -> None:
        for file in written:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        for folder in made:  # the deepest first; one that others have used meanwhile stays
            with contextlib.suppress(OSError):
                folder.rmdir()

    try:
        yield look
    finally:
        if meeting.rank:
            clean()
        meeting.collect("cleaned", True, LEAVING)
        clean()


def _appears(place: Path, token: str, rank: int) -> bool:
    file, deadline = place / f".nestpipe-doctor-{token}-{rank}", time.monotonic() + SEEN_WITHIN
    while True:
        with contextlib.suppress(OSError):
            os.listdir(place)  # makes a network file system look again
            if file.read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _links(store: dist.Store, rank: int, world: int, timeout: float) -> dict[str, Any]:
    """{"links": ...}, or {"problem": why there are none}."""
    try:
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("nestpipe doctor group", store),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout),
            )
        return {"links": [dataclasses.astuple(link) for link in measure()]}
    except (RuntimeError, ValueError) as error:
        return {"problem": str(error).splitlines()[0]}


def _of_blocked(blocked: Sequence[Facts | None], hosts: Sequence[str]) -> list[Finding]:
    """The first pair without a connection; who says nothing here is told of with the links."""
    for rank, found in enumerate(blocked):
        if found is not None and found["to"] is not None:
            other, why = found["to"]
            says = f"rank {rank} ({hosts[rank]}) {why}, where rank {other} ({hosts[other]}) listens; {OPEN}"
            return [Finding(FAIL, "links", says)]
    return []


def _told(measured: Sequence[Facts | None], hosts: Sequence[str]) -> list[Finding]:
    broken = [
        (rank, facts["problem"]) for rank, facts in enumerate(measured) if facts is not None and "problem" in facts
    ]
    silent = [rank for rank, facts in enumerate(measured) if facts is None]
    if broken or silent:
        rank, why = broken[0] if broken else (silent[0], "no answer in time")
        return [Finding(FAIL, "links", f"rank {rank} ({hosts[rank]}): {why}; {OPEN}")]
    return of_links([Link(*link) for facts in measured if facts for link in facts["links"]], hosts)

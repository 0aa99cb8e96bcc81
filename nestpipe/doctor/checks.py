"""What follows from everybody's facts: one finding per check, with what to do about it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nestpipe.doctor.facts import Facts
from nestpipe.simulate.plan import INDEX

OK, WARN, FAIL = "ok", "warn", "FAIL"
UNSEEN = "does not see it"  # of a folder that rank 0 has written to
SLOW = 0.5  # of the usual rate of its kind: a link worth naming
CLOCKS = 1.0  # seconds apart: logs and traces of several machines cannot be read together
FEW = 3  # links of a kind, below which there is no usual one


@dataclasses.dataclass(frozen=True)
class Finding:
    level: str
    what: str
    says: str

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.what}: {self.says}"


@dataclasses.dataclass(frozen=True)
class Link:
    """Between two workers, in both directions at once. ahead: how far the second one's clock is, if it was compared."""

    first: int
    second: int
    milliseconds: float
    mbit: float
    ahead: float | None = None


def of_facts(everybody: Sequence[Facts | None], rows: Mapping[str, float]) -> list[Finding]:
    """By rank; None: a worker that has said nothing. rows: that each table will have, over all workers."""
    missing = [rank for rank, facts in enumerate(everybody) if facts is None]
    if missing:
        says = f"rank {', '.join(map(str, missing))} of {len(everybody)} said nothing in time: look at its machine and its output"
        return [Finding(FAIL, "workers", says)]
    facts = [of_worker for of_worker in everybody if of_worker is not None]
    hosts = list(dict.fromkeys(of_worker["host"] for of_worker in facts))
    named = ", ".join(hosts[:8]) + (", ..." if len(hosts) > 8 else "")
    findings = [Finding(OK, "workers", f"{len(facts)} on {len(hosts)} machine{'s' * (len(hosts) > 1)} ({named})")]
    findings.append(_code(facts))
    broken = [f"rank {rank}: {of_worker['problem']}" for rank, of_worker in enumerate(facts) if "problem" in of_worker]
    if broken:
        return [*findings, Finding(FAIL, "config", broken[0])]
    findings.append(_config(facts))
    return [*findings, *_data(facts), *_network(facts), _memory(facts, rows), _disk(facts, rows), *_folders(facts)]


def of_links(links: Sequence[Link], hosts: Sequence[str]) -> list[Finding]:
    """hosts: of each rank."""
    findings = []
    for what, inside in (("links inside machines", True), ("links between machines", False)):
        some = [link for link in links if (hosts[link.first] == hosts[link.second]) == inside]
        if some:
            findings.append(_links(what, some, hosts, inside=inside))
    apart = [link for link in links if link.ahead is not None and abs(link.ahead) > CLOCKS]
    if apart:
        worst = max(apart, key=lambda link: abs(link.ahead or 0))
        says = f"rank {worst.second} ({hosts[worst.second]}) is {worst.ahead:+.1f} s off rank {worst.first}: run NTP on both"
        findings.append(Finding(WARN, "clocks", says))
    elif any(link.ahead is not None for link in links):
        most = max(abs(link.ahead) for link in links if link.ahead is not None)
        findings.append(Finding(OK, "clocks", f"within {1000 * most:.0f} ms of rank 0"))
    return findings


def _links(what: str, links: Sequence[Link], hosts: Sequence[str], *, inside: bool) -> Finding:
    rate, delay = (statistics.median(values) for values in ([k.mbit for k in links], [k.milliseconds for k in links]))
    # Of three or four machines one with a slow link has half of the pairs: what is usual is what the better ones have.
    usual = rate if inside or len(links) < FEW else statistics.quantiles((k.mbit for k in links), method="inclusive")[2]
    slowest = min(links, key=lambda link: link.mbit)
    says = f"{len(links)} pairs, median {rate:,.0f} Mbit/s each way, {delay:.2f} ms there and back"
    pair = f"rank {slowest.first} ({hosts[slowest.first]}) and rank {slowest.second} ({hosts[slowest.second]})"
    if len(links) >= FEW and slowest.mbit < SLOW * usual:
        return Finding(
            WARN, what, f"{says}; {pair} have {slowest.mbit:,.0f}: all wait for them, look at that machine's link"
        )
    return Finding(OK, what, says + (f", slowest {slowest.mbit:,.0f}" if len(links) > 1 else ""))


def _code(facts: Sequence[Facts]) -> Finding:
    codes = [{**of_worker["code"], **of_worker.get("own code", {})} for of_worker in facts]
    difference = _difference(codes)
    if difference is None:
        first = codes[0]
        return Finding(
            OK, "code", f"nestpipe {first['nestpipe']}, Python {first['Python']}, torch {first['torch']} everywhere"
        )
    return Finding(FAIL, "code", f"{difference}; install the same on every machine")


def _config(facts: Sequence[Facts]) -> Finding:
    difference = _difference([of_worker["config"] for of_worker in facts])
    if difference is None:
        return Finding(OK, "config", f"the same {len(facts[0]['config'])} entries everywhere")
    return Finding(FAIL, "config", f"{difference}; give every worker the same file and the same --set")


def _data(facts: Sequence[Facts]) -> list[Finding]:
    broken = [
        (rank, of_worker["data"]["problem"]) for rank, of_worker in enumerate(facts) if "problem" in of_worker["data"]
    ]
    if broken:
        return [Finding(FAIL, "data", f"rank {broken[0][0]} ({facts[broken[0][0]]['host']}): {broken[0][1]}")]
    # By name and size, not by path: folders may be mounted under another name.
    difference = _difference([dict(enumerate(of_worker["data"]["files"])) for of_worker in facts], "file number {}")
    if difference is not None:
        return [Finding(FAIL, "data", f"{difference}; every worker must see the same files")]
    empty = [rank for rank, of_worker in enumerate(facts) if not of_worker["data"]["schema"]]
    if empty:
        return [Finding(WARN, "data", f"rank {empty[0]} gets no batch: fewer samples, or files, than workers?")]
    difference = _difference([of_worker["data"]["schema"] for of_worker in facts])
    if difference is not None:
        return [Finding(FAIL, "data", f"in the first batch {difference}")]
    files, slowest = facts[0]["data"]["files"], max(of_worker["data"]["seconds"] for of_worker in facts)
    size = f"{len(files)} files, {_size(sum(size for _, size in files))}" if files else "no files"
    return [Finding(OK, "data", f"{size}; the first batch is alike everywhere, after at most {slowest:.1f} s")]


def _network(facts: Sequence[Facts]) -> list[Finding]:
    machines = len({of_worker["host"] for of_worker in facts})
    for rank, of_worker in enumerate(facts):
        network, here = of_worker["network"], f"rank {rank} ({of_worker['host']})"
        wanted = network["wanted"]
        if wanted is not None and not set(wanted.split(",")) <= set(network["interfaces"]):
            says = f"{here} has no interface GLOO_SOCKET_IFNAME={wanted}; it has {', '.join(network['interfaces'])}"
            return [Finding(FAIL, "network", says)]
        if machines > 1 and wanted is None and (network["address"] or "127.").startswith("127."):
            says = (
                f"the name of {here} stands for {network['address'] or 'no address'}, which others cannot reach: set "
                f"GLOO_SOCKET_IFNAME to the interface that joins the machines, one of {', '.join(network['interfaces'])}"
            )
            return [Finding(FAIL, "network", says)]
    chosen = sorted({str(of_worker["network"]["wanted"] or of_worker["network"]["address"]) for of_worker in facts})
    return [Finding(OK, "network", f"gloo listens on {', '.join(chosen[:8])}")]


def needed(tables: Sequence[Mapping[str, Any]], rows: Mapping[str, float], workers: int) -> tuple[float, float]:
    """Bytes of memory and of disk that tables take on a worker, as `nestpipe plan` counts them."""
    memory = disk = 0.0
    for table in tables:
        owners = min(workers, table["owners"] or workers)
        mine = rows.get(table["name"], 0.0) / owners
        if table["memory"] is None:
            memory += mine * (table["record"] + INDEX)
        else:
            memory += table["memory"] / owners
            disk += mine * (table["record"] + 16) * 4096 / (4096 - 232)  # slots in blocks, see docs/storage.md
    return memory, disk


def _memory(facts: Sequence[Facts], rows: Mapping[str, float]) -> Finding:
    return _room(facts, rows, "memory", 0, lambda of_worker: of_worker["memory"])


def _disk(facts: Sequence[Facts], rows: Mapping[str, float]) -> Finding:
    return _room(facts, rows, "disk", 1, lambda of_worker: min(of_worker["disk"].values()))


def _room(
    facts: Sequence[Facts], rows: Mapping[str, float], what: str, which: int, free_of: Callable[[Facts], int | None]
) -> Finding:
    """Whether the workers of each machine find room together."""
    tables = facts[0]["data"].get("tables", [])
    unknown = sorted(set(rows) - {table["name"] for table in tables})
    if unknown and tables:
        return Finding(
            FAIL, what, f"--rows names a table {unknown[0]!r}; there are {', '.join(t['name'] for t in tables)}"
        )
    of_worker = needed(tables, rows, len(facts))[which]
    hosts = [facts_of["host"] for facts_of in facts]
    shares = {host: (free_of(facts[hosts.index(host)]), of_worker * hosts.count(host)) for host in dict.fromkeys(hosts)}
    known = {host: (free, wanted) for host, (free, wanted) in shares.items() if free is not None}
    if not known:
        return Finding(WARN, what, "how much is free is not known here")
    tightest = min(known, key=lambda host: known[host][0] - known[host][1])
    free, wanted = known[tightest]
    uncounted = [table["name"] for table in tables if table["name"] not in rows]
    says = f"{_size(free)} free on {tightest}, tables take {_size(wanted)}"
    if wanted > free:
        return Finding(FAIL, what, f"{says}: more machines, fewer rows (max_rows), or tables with tier = 'disk'")
    if uncounted:
        says += (
            f" ({', '.join(uncounted[:3])}{', ...' if len(uncounted) > 3 else ''} counted as empty: --rows TABLE=COUNT)"
        )
    return Finding(OK, what, says)


def _folders(facts: Sequence[Facts]) -> list[Finding]:
    findings: list[Finding] = []
    if len({len(of_worker["folders"]) for of_worker in facts}) > 1:
        return findings  # their configs differ, which is said above
    for number, (folder, _) in enumerate(facts[0]["folders"]):  # by number: another worker may have another name for it
        blind = [
            (rank, problem) for rank, of_worker in enumerate(facts) if (problem := of_worker["folders"][number][1])
        ]
        if blind:
            rank, why = blind[0]
            says = f"{facts[rank]['folders'][number][0]}: rank {rank} ({facts[rank]['host']}) {why}"
            advice = (
                "checkpoints need a folder that all machines share" if why == UNSEEN else "mend that, or choose another"
            )
            findings.append(Finding(FAIL, "folder", f"{says}; {advice}: --out, or train.checkpoints"))
        else:
            findings.append(Finding(OK, "folder", f"{folder} is seen and written by all"))
    return findings


def _difference(everybody: Sequence[Mapping[Any, Any]], name: str = "{}") -> str | None:
    """Between the first and another, in words."""
    for rank, theirs in enumerate(everybody):
        for key in dict.fromkeys((*everybody[0], *theirs)):
            mine, other = (values.get(key, "not there") for values in (everybody[0], theirs))
            if mine != other:
                return f"{name.format(key)} is {mine} on rank 0 and {other} on rank {rank}"
    return None


def _size(value: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{value / factor:,.1f} {unit}"
    return f"{value / 1e3:,.1f} kB"

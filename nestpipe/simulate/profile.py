"""A profile: what things take on a cluster, as a TOML file. `nestpipe profile` writes one of this machine; two are here."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.schedule import ops as op
from nestpipe.simulate.network import Level, Network
from nestpipe.tables import did_you_mean

FOLDER = Path(__file__).parent / "profiles"

READ = "READ"  # what the thread does that reads ahead of PREFETCH; not an operation of a schedule

# Of what an operation does how much: the unit of `each`.
UNITS = {
    READ: "sample",
    op.PREFETCH: "sample",
    op.H2D: "byte of keys, dense inputs and labels",
    op.ROUTE: "key of the batch",
    op.RETRIEVE: "row that the owner finds",
    op.SYNC: "row of the owner that the batch before used too",
    op.EMB: "byte of rows",
    op.FWD: "floating-point operation",
    op.BWD: "floating-point operation",
    op.REDUCE: "byte of dense parameters",
    op.AGREE: "step",
    op.GRAD: "byte of gradients",
    op.UPDATE: "row that the owner updates",
    op.DENSE: "byte of dense parameters",
    op.WRITEBACK: "row that the owner writes",
}
# What a growing cluster slows down, see `Profile.crowding`.
LOOKUPS = (op.PREFETCH, op.ROUTE, op.RETRIEVE, op.WRITEBACK)


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds of an operation on its own worker: `fixed` for doing it at all (each micro-batch does), `each` for every unit."""

    fixed: float = 0.0
    each: float = 0.0

    def __post_init__(self) -> None:
        if not (self.fixed >= 0 and self.each >= 0):
            raise ValueError(f"seconds of an operation must be at least 0, got fixed={self.fixed}, each={self.each}")

    def __call__(self, units: float = 0.0) -> float:
        return self.fixed + self.each * units


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """name, note: whose it is and how it came about.
    network: links inside a node and between nodes, and how many workers a node has.
    operations: by name; what is left out takes no time.
    cores: of a node, shared by its workers' host work; 0: enough for all of them.
    hosted: operations that the host's cores do.
    crowding: by how much lookups slow down for every further worker in the cluster, as a part of their time on one worker.
        Of a published cluster, where it was seen; nobody said why.
    jitter: standard deviation of an operation's time, as a part of it; log-normal, new for each worker and batch.
    device_memory, host_memory, disk: bytes of a worker; 0: not known. device_memory 0: rows live on the host.
    """

    name: str
    network: Network
    operations: Mapping[str, Work]
    note: str = ""
    cores: int = 0
    hosted: tuple[str, ...] = ()
    crowding: float = 0.0
    jitter: float = 0.0
    device_memory: float = 0.0
    host_memory: float = 0.0
    disk: float = 0.0

    def __post_init__(self) -> None:
        for name in (*self.operations, *self.hosted):
            if name not in UNITS:
                raise ValueError(f"profile {self.name}: operation {name!r}, {did_you_mean(name, list(UNITS))}")
        for field in ("cores", "crowding", "jitter", "device_memory", "host_memory", "disk"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"profile {self.name}: {field} must be at least 0, got {getattr(self, field)}")

    def work(self, name: str) -> Work:
        return self.operations.get(name, NOTHING)


NOTHING = Work()
_PLAIN = ("note", "cores", "hosted", "crowding", "jitter", "device_memory", "host_memory", "disk")


def names() -> list[str]:
    """Of the profiles that come with nestpipe."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> Profile:
    """A profile that comes with nestpipe, by its name, or a file."""
    path = Path(name)
    if path.suffix != ".toml":
        if name not in names():
            raise ValueError(
                f"profile {name!r}, {did_you_mean(name, names())}, or the path of a .toml file; `nestpipe profile "
                f"CONFIG.toml --out {name}.toml` writes one of this machine"
            )
        path = FOLDER / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read the profile {path}: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    return parse(path.stem, values)


def parse(name: str, values: Mapping[str, Any]) -> Profile:
    rest = dict(values)
    try:
        links = dict(rest.pop("links"))
        network = Network(int(links.pop("per_node")), *(Level(**links.pop(level)) for level in ("inside", "between")))
        operations = {one: Work(**work) for one, work in dict(rest.pop("operations")).items()}
    except KeyError as error:
        raise ValueError(f"profile {name}: {error.args[0]!r} is missing; see docs/scaling.md for an example") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"profile {name}: {error}") from None
    if network.per_node < 1:
        raise ValueError(f"profile {name}: links.per_node must be at least 1, got {network.per_node}")
    for entry in (*links, *rest):
        if entry not in _PLAIN:
            raise ValueError(f"profile {name}: {entry!r}, {did_you_mean(entry, ['links', 'operations', *_PLAIN])}")
    if "hosted" in rest:
        rest["hosted"] = tuple(rest["hosted"])
    try:
        return Profile(name=name, network=network, operations=operations, **rest)
    except TypeError as error:  # text where a number is wanted
        raise ValueError(f"profile {name}: {error}") from None


def to_toml(profile: Profile) -> str:
    """As `read` reads it, with the unit of each operation beside it."""
    network = profile.network
    lines = [f"# {line}" for line in profile.note.splitlines()] + ["", f'note = """\n{profile.note}"""']
    for name in _PLAIN[1:]:
        value = getattr(profile, name)
        shown = "[" + ", ".join(f'"{one}"' for one in value) + "]" if name == "hosted" else f"{value:.6g}"
        lines.append(f"{name} = {shown}")
    lines = lines[len(profile.note.splitlines()) + 1 :]
    lines += ["", "[links]", f"per_node = {network.per_node}  # workers"]
    for name, level in (("inside", network.inside), ("between", network.between)):
        lines += ["", f"[links.{name}]", f"latency = {level.latency:.6g}  # seconds a message"]
        lines += [f"bandwidth = {level.bandwidth:.6g}  # bytes a second", f"congestion = {level.congestion:.6g}"]
    lines += ["", "[operations]  # seconds: fixed, and for each unit"]
    for name in UNITS:
        if name in profile.operations:
            work = profile.operations[name]
            lines.append(f"{name} = {{ fixed = {work.fixed:.6g}, each = {work.each:.6g} }}  # {UNITS[name]}")
    return "\n".join(lines) + "\n"

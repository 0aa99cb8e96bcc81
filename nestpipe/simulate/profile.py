"""A profile: what things take on a cluster, as a TOML file. `nestpipe profile` writes one of this machine; two are here."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestpipe.errors import did_you_mean
from nestpipe.schedule.ops import OPERATIONS
from nestpipe.simulate.network import Level, Network

FOLDER = Path(__file__).parent / "profiles"

READ = "READ"  # what the thread does that reads ahead of PREFETCH; not an operation of a schedule


def units() -> dict[str, str]:
    """Of what each operation does how much: the unit of `each`."""
    return {READ: "sample", **{name: operation.unit for name, operation in OPERATIONS.items()}}


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
    crowding: by how much each unit of a lookup slows down for every further worker in the cluster, as a part of its time on
        one worker. Of a published cluster, where it was seen; nobody said why.
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
            if name not in units():
                raise ValueError(f"profile {self.name}: operation {name!r}, {did_you_mean(name, list(units()))}")
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    return parse(path.stem, values)


def parse(name: str, values: Mapping[str, Any]) -> Profile:
    """Raises ValueError with the nearest known name for what is misspelt."""
    where = f"profile {name}"
    _known(where, values, ["links", "operations", *_PLAIN])
    links, operations = (_section(where, values, section) for section in ("links", "operations"))
    _known(f"{where}: links", links, ["per_node", "inside", "between"])
    levels = [
        _made(f"{where}: links.{level}", Level, _section(f"{where}: links", links, level))
        for level in ("inside", "between")
    ]
    per_node = links.get("per_node")
    if type(per_node) is not int or per_node < 1:
        raise ValueError(f"{where}: links.per_node must be a whole number of at least 1, got {per_node!r}")
    works = {
        operation: _made(f"{where}: operations.{operation}", Work, _section(where, operations, operation))
        for operation in operations
    }
    plain = {entry: value for entry, value in values.items() if entry in _PLAIN}
    for entry, value in plain.items():
        if entry == "note" and not isinstance(value, str):
            raise ValueError(f"{where}: note must be text, got {value!r:.40}")
        if entry == "hosted" and not (
            isinstance(value, list) and all(isinstance(operation, str) for operation in value)
        ):
            raise ValueError(f"{where}: hosted must be a list of operations, got {value!r:.40}")
        if entry not in ("note", "hosted") and type(value) not in (int, float):
            raise ValueError(f"{where}: {entry} must be a number, got {value!r:.40}")
    if "hosted" in plain:
        plain["hosted"] = tuple(plain["hosted"])
    return Profile(name=name, network=Network(per_node, *levels), operations=works, **plain)


def _known(where: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    for entry in values:
        if entry not in known:
            raise ValueError(f"{where}: {entry!r}, {did_you_mean(entry, list(known))}")


def _section(where: str, values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if name not in values:
        raise ValueError(f"{where}: {name!r} is missing; see docs/scaling.md for what a profile has")
    if not isinstance(values[name], Mapping):
        raise ValueError(f"{where}: {name} must be a section, got {values[name]!r:.40}")
    return values[name]


def _made(where: str, kind: type[Any], values: Mapping[str, Any]) -> Any:
    _known(where, values, [field.name for field in dataclasses.fields(kind)])
    for entry, value in values.items():
        if type(value) not in (int, float):
            raise ValueError(f"{where}: {entry} must be a number, got {value!r:.40}")
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ValueError(f"{where}: {field.name!r} is missing; see docs/scaling.md for what a profile has")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def to_toml(profile: Profile) -> str:
    """As `read` reads it, with the unit of each operation beside it."""
    network = profile.network
    note = profile.note.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    lines = [f'note = """\n{note}"""']
    for name in _PLAIN[1:]:
        value = getattr(profile, name)
        shown = "[" + ", ".join(f'"{operation}"' for operation in value) + "]" if name == "hosted" else f"{value:.6g}"
        lines.append(f"{name} = {shown}")
    lines += ["", "[links]", f"per_node = {network.per_node}  # workers"]
    for name, level in (("inside", network.inside), ("between", network.between)):
        lines += ["", f"[links.{name}]", f"latency = {level.latency:.6g}  # seconds a message"]
        lines += [f"bandwidth = {level.bandwidth:.6g}  # bytes a second", f"congestion = {level.congestion:.6g}"]
    lines += ["", "[operations]  # seconds: fixed, and for each unit"]
    for name, unit in units().items():
        if name in profile.operations:
            work = profile.operations[name]
            lines.append(f"{name} = {{ fixed = {work.fixed:.6g}, each = {work.each:.6g} }}  # {unit}")
    return "\n".join(lines) + "\n"

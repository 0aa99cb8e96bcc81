"""What one worker sees: its machine, its code, the config, the data and the folders. Plain values, for JSON; nothing raises."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nestpipe
from nestpipe import config as configs
from nestpipe.batch import SINGLE, Batch, Jagged, labels_of
from nestpipe.config import Config, dataset_class
from nestpipe.config.tables import make_tables
from nestpipe.data import remote
from nestpipe.data.files import find_files
from nestpipe.doctor.reach import own_address
from nestpipe.kinds import arguments, made
from nestpipe.tables import Table

LIBRARIES = ("torch", "numpy", "numba", "pyarrow")
SAMPLES = 8  # of the batch that is read to see what is in it

Facts = dict[str, Any]


def gather(path: Path, overrides: Sequence[str], *, rank: int, world: int, out: Path, timeout: float) -> Facts:
    """timeout: seconds that reading the first batch may take."""
    facts: Facts = {"host": socket.gethostname(), "code": _code(), "network": _network(), "memory": free_memory()}
    try:
        config = configs.read(path, overrides)
    except Exception as error:  # a module of the user's own may raise anything
        return {**facts, "problem": _in_words(error)}
    facts["config"] = _flat(config.to_dict())
    facts["own code"] = {kind: _module_digest(kind) for kind in _own_kinds(config)}
    storage = Path(config.train.storage or out / "storage")
    facts["disk"] = {str(place): _free_disk(place) for place in dict.fromkeys((*shared_folders(config, out), storage))}
    facts["data"] = _within(timeout, lambda: _data(config, rank, world))
    return facts


def shared_folders(config: Config, out: Path) -> list[Path]:
    """That all workers must see: the run folder, and checkpoints where they lie elsewhere."""
    return [out] if config.train.checkpoints is None else [out, Path(config.train.checkpoints)]


def free_memory() -> int | None:
    """Bytes that programs on this machine, or in this container, can still take; None: not known."""
    limits = []
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, KeyError):
        pass  # no Linux, no cgroup, or one without a limit ("max")
    return min(limits, default=None)


def _code() -> dict[str, str]:
    """nestpipe by version and content: a checkout may have changed since its version was set."""
    digest = hashlib.blake2b(digest_size=6)
    home = Path(nestpipe.__file__).parent
    for path in sorted(home.rglob("*.py")):
        digest.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "nestpipe": f"{nestpipe.__version__} ({digest.hexdigest()})",
        "Python": platform.python_version(),
        **versions,
    }


def _own_kinds(config: Config) -> list[str]:
    return [section["kind"] for section in (config.data, config.model) if ":" in section["kind"]]


def _module_digest(kind: str) -> str:
    file = importlib.import_module(kind.split(":")[0]).__file__
    return "no file" if file is None else hashlib.blake2b(Path(file).read_bytes(), digest_size=6).hexdigest()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"train.steps": "20"}"""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value, default=str)
    return flat


def _network() -> dict[str, Any]:
    return {
        "wanted": os.environ.get("GLOO_SOCKET_IFNAME"),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "address": own_address(),
    }


def _free_disk(place: Path) -> int:
    existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def _files(data: dict[str, Any]) -> list[tuple[str, int]]:
    """Name and size of every file that an entry of [data] names, itself or by a pattern; at a URL too."""
    texts = [text for value in data.values() for text in (value if isinstance(value, list) else [value])]
    found: set[str] = set()
    for text in texts:
        if isinstance(text, str) and (remote.is_url(text) or os.path.exists(text) or glob.glob(text)):
            with contextlib.suppress(ValueError):  # a folder, or no file at all: whoever reads the data says so
                found.update(find_files(text))
    sizes = {name: remote.look(name).num_bytes if remote.is_url(name) else os.path.getsize(name) for name in found}
    return [(os.path.basename(name), sizes[name]) for name in sorted(found)]


def _data(config: Config, rank: int, world: int) -> Facts:
    """The files, what is in a batch of this worker, and what its tables would take."""
    data = made("data", dataset_class(config.data), arguments(config.data))
    tables, _ = make_tables(config.tables, data.features, config.train)
    reading = data.batches("train", batch_size=SAMPLES, rank=rank, world=world, seed=config.train.seed)
    schema = _schema(next(iter(reading), None))
    return {"files": _files(config.data), "tables": [_sizes(table) for table in tables], "schema": schema}


def _sizes(table: Table) -> Facts:
    """record: bytes of a row with its state. memory: budget of a table on disk."""
    record = table.dim * table.dtype.itemsize + 4 * table.optimizer.state_floats(table.dim)
    owners = table.owners if isinstance(table.owners, int) else None
    memory = table.memory_bytes if table.tier == "disk" else None
    return {"name": table.name, "record": record, "owners": owners, "memory": memory}


def _schema(batch: Batch | None) -> dict[str, str]:
    if batch is None:
        return {}

    def kind(part: Any) -> str:
        if isinstance(part, Jagged):
            return f"lists of {part.values.dtype}" + (", weighted" if part.weights is not None else "")
        return f"{part.dtype} {tuple(part.shape[1:])}"

    parts: dict[str, Any] = {
        **{f"keys {n}": p for n, p in batch.keys.items()},
        **{f"dense {n}": p for n, p in batch.dense.items()},
    }
    parts |= {"labels" if task == SINGLE else f"labels {task}": part for task, part in labels_of(batch).items()}
    return {name: kind(part) for name, part in parts.items()}


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _within(timeout: float, work: Callable[[], Facts]) -> Facts:
    """What it returns, or {"problem": why there is nothing}."""
    results: list[Facts] = []

    def run() -> None:
        started = time.monotonic()
        try:
            results.append({**work(), "seconds": time.monotonic() - started})
        except Exception as error:
            results.append({"problem": _in_words(error)})

    thread = threading.Thread(target=run, daemon=True)  # nobody waits for one that hangs
    thread.start()
    thread.join(timeout)
    return results[0] if results else {"problem": f"no batch within {timeout:.0f} s"}

"""From TOML, or the config.json of a run, to a Config: every entry is checked when it is read, not after an hour of training."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestpipe.config.kinds import check_arguments, dataset_class
from nestpipe.config.sections import Config, TrainSection, checked_entries, section
from nestpipe.config.tables import declared, make_table
from nestpipe.errors import did_you_mean
from nestpipe.fields import hints
from nestpipe.kinds import model_class
from nestpipe.schedule.setting import Setting

SECTIONS = ("data", "model", "tables", "train", "schedule")


def read(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """What a TOML file describes. overrides: entries that stand in place of its own, as `--set` takes them: "train.steps=20"."""
    try:
        values = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    for text in overrides:
        override(values, text)
    return parse(values)


def read_json(path: Path, overrides: Sequence[str] = ()) -> Config:
    """As `read`, of the config.json that a run has left in its folder."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not what nestpipe writes: a JSON object was expected, got {values!r:.40}")
    for text in overrides:
        override(values, text)
    return parse(values)


def parse(values: Mapping[str, Any]) -> Config:
    """Checks sections and entries; raises ValueError with the nearest known name."""
    for name, content in values.items():
        if name not in SECTIONS:
            raise ValueError(f"config: section [{name}], {did_you_mean(name, SECTIONS)}")
        if not isinstance(content, Mapping):
            raise ValueError(f"config: {name} must be a section, got {content!r}")
    for name in ("data", "model", "tables"):
        if not values.get(name):
            raise ValueError(f"config: section [{name}] is missing; see examples/demo.toml")
    data, model, tables = (dict(values[name]) for name in ("data", "model", "tables"))
    check_arguments("data", data, dataset_class(data))
    check_arguments("model", model, model_class(model))
    train = section(TrainSection, "train", values.get("train", {}))
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"config: tables.{name} must be a section [tables.{name}], got {table!r}")
        make_table(name, *declared(name, table), train)
    return Config(data, model, tables, train, *_schedule(values.get("schedule", {})))


def _schedule(values: Mapping[str, Any]) -> tuple[Setting, bool]:
    """[schedule] as a Setting, and `check_freshness`."""
    known = {"name" if field == "schedule" else field: hints(Setting)[field] for field in Setting().options()}
    entries = checked_entries("schedule", values, {**known, "check_freshness": bool})
    check_freshness = entries.pop("check_freshness", False)
    if "name" in entries:
        entries["schedule"] = entries.pop("name")
    try:
        return Setting(**entries), check_freshness
    except ValueError as error:
        raise ValueError(f"config: [schedule]: {error}") from error


def override(values: dict[str, Any], text: str) -> None:
    key, sign, raw = text.partition("=")
    parts = key.strip().split(".")
    if not sign or len(parts) < 2 or not all(parts):
        raise ValueError(f"--set {text!r}: write it as section.entry=value, for example --set train.steps=20")
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()  # a string without quotes, as one types it in a shell
    place = values
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ValueError(f"--set {text!r}: {part!r} is not a section")
    place[parts[-1]] = value

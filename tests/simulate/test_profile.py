"""Profiles: what is written is what is read, and every mistake in a file is one sentence that says what to change."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nestpipe.schedule.ops import OPERATIONS
from nestpipe.simulate import profile as profiles
from nestpipe.simulate.network import Level, Network
from nestpipe.simulate.profile import READ, Profile, Work, parse, read, to_toml, units

FULL = Profile(
    name="full",
    note='Two lines,\nwith "quotes" and a # sign.\n',
    network=Network(
        8, Level(latency=1.23456e-6, bandwidth=3e11), Level(latency=9.87654e-6, bandwidth=1.25e10, congestion=0.00123456)
    ),
    operations={name: Work(number / 8, float(f"{number}.25e-12")) for number, name in enumerate(units())},
    cores=96,
    hosted=("PREFETCH", "RETRIEVE"),
    crowding=0.00410856,
    jitter=0.125,
    device_memory=64e9,
    host_memory=9.6e10,
    disk=3.84e12,
)  # fmt: skip

VALUES: dict[str, Any] = {
    "links": {
        "per_node": 4,
        "inside": {"latency": 1e-6, "bandwidth": 1e9},
        "between": {"latency": 1e-5, "bandwidth": 1e8},
    },
    "operations": {"FWD": {"fixed": 0.1}},
}


def changed(place: str, value: Any) -> dict[str, Any]:
    """VALUES with an entry, by its path, set; or removed, if None."""
    values = copy.deepcopy(VALUES)
    *folders, last = place.split(".")
    at = values
    for folder in folders:
        at = at[folder]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return values


def test_what_is_written_is_what_is_read() -> None:
    assert parse("full", tomllib.loads(to_toml(FULL))) == FULL


def test_figures_are_written_to_six_digits() -> None:
    exact = dataclasses.replace(FULL, jitter=1 / 3, operations={"FWD": Work(2 / 3, 1e-12 / 7)})
    back = parse("full", tomllib.loads(to_toml(exact)))
    assert back.jitter == pytest.approx(1 / 3, rel=1e-6) and back.jitter != exact.jitter
    assert back.work("FWD").each == pytest.approx(1e-12 / 7, rel=1e-6)
    assert back.work("FWD").fixed == pytest.approx(2 / 3, rel=1e-6)


def test_a_plain_profile_has_what_was_left_out(tmp_path: Path) -> None:
    plain = parse("plain", VALUES)
    assert plain.operations == {"FWD": Work(0.1, 0.0)} and plain.network.between == Level(latency=1e-5, bandwidth=1e8)
    assert (plain.note, plain.hosted, plain.cores, plain.crowding, plain.jitter, plain.disk) == ("", (), 0, 0, 0, 0)
    assert parse("plain", tomllib.loads(to_toml(plain))) == plain
    assert plain.work("BWD")(1e9) == 0, "an operation that is left out takes no time"
    assert plain.work("FWD")(1e9) == 0.1
    (tmp_path / "mine.toml").write_text(to_toml(plain))
    assert read(str(tmp_path / "mine.toml")) == dataclasses.replace(plain, name="mine")


@pytest.mark.parametrize("note", ["a path: C:\\new", 'three """ quotes', 'ends with a "'])
def test_a_note_of_any_text_is_read_back(note: str) -> None:
    noted = dataclasses.replace(FULL, note=note)
    assert parse("full", tomllib.loads(to_toml(noted))).note == note


def test_every_operation_has_a_unit_that_the_file_shows() -> None:
    assert set(units()) == {*OPERATIONS, READ}
    for name, unit in units().items():
        assert any(line.startswith(f"{name} = ") and line.endswith(f"# {unit}") for line in to_toml(FULL).splitlines())


@pytest.mark.parametrize("path", sorted(profiles.FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_profile_that_comes_along_reads(path: Path) -> None:
    found = read(path.stem)
    assert found.name == path.stem and found == read(str(path)) and found.note
    assert found.work("FWD").each > 0 and found.work("RETRIEVE").each > 0
    assert path.stem in profiles.names()


def test_profiles_are_installed_with_the_package() -> None:
    """Else `--profile npu-1536` works from a checkout only."""
    project = Path(__file__).parents[2]
    patterns = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["nestpipe"]
    for name in profiles.names():
        assert any(fnmatch.fnmatch(f"simulate/profiles/{name}.toml", pattern) for pattern in patterns), name


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (changed("operations.RETREIVE", {"fixed": 1}), "'RETREIVE', which is not known; did you mean 'RETRIEVE'"),
        (changed("hosted", ["ROUT"]), "'ROUT', which is not known; did you mean 'ROUTE'"),
        (changed("jiter", 0.1), "'jiter', which is not known; did you mean 'jitter'"),
        (changed("operation", {}), "'operation', which is not known; did you mean 'operations'"),
        (changed("device_memry", 1e9), "did you mean 'device_memory'"),
    ],
    ids=lambda one: "" if isinstance(one, dict) else one.split(",")[0],
)
def test_a_misspelt_name_is_told_with_the_nearest(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=r"^profile mine: ") as error:
        parse("mine", values)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (changed("links.inside", {"latncy": 1e-6, "bandwidth": 1e9}), "latency"),
        (changed("operations.FWD", {"fixd": 0.1}), "fixed"),
    ],
    ids=["links.inside.latncy", "operations.FWD.fixd"],
)
def test_a_misspelt_name_inside_a_section_is_told_with_the_nearest(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=r"^profile mine: ") as error:
        parse("mine", values)
    assert f"did you mean {told!r}" in str(error.value)


@pytest.mark.parametrize("entry", ["cores", "jitter", "note"])
def test_an_entry_of_the_profile_among_the_links_is_not_passed_over(entry: str) -> None:
    """TOML makes it easy: all that stands below [links] is in it."""
    with pytest.raises(ValueError, match=entry):
        parse("mine", changed(f"links.{entry}", 1))


@pytest.mark.parametrize("place", ["links", "operations", "links.per_node", "links.inside", "links.between"])
def test_what_is_missing_is_named(place: str) -> None:
    with pytest.raises(ValueError, match=f"profile mine: .*{place.split('.')[-1]}.*(is missing|got None)"):
        parse("mine", changed(place, None))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("links", "fast"),
        ("links", 3),
        ("links", [1]),
        ("links.per_node", "eight"),
        ("links.per_node", [8]),
        ("links.per_node", 0),
        ("links.inside", 1e9),
        ("links.inside", {"latency": "1us", "bandwidth": 1e9}),
        ("links.inside", {"latency": 1e-6}),
        ("links.between", {"latency": 1e-6, "bandwidth": 0}),
        ("operations", [1, 2]),
        ("operations", "FWD"),
        ("operations.FWD", 0.1),
        ("operations.FWD", {"fixed": "0.1"}),
        ("operations.FWD", {"fixed": -0.1}),
        ("operations.FWD", {"each": float("nan")}),
        ("cores", "many"),
        ("cores", -1),
        ("crowding", [0.1]),
        ("jitter", {"mean": 1}),
        ("jitter", -0.1),
        ("host_memory", "96GB"),
        ("hosted", 3),
        ("hosted", [3]),
        ("hosted", "ROUTE"),
        ("note", 3),
    ],
    ids=str,
)
def test_a_wrong_value_is_a_value_error_that_names_the_profile(place: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^profile mine: "):
        parse("mine", changed(place, value))


def test_a_profile_that_is_not_there_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'npu-1535'.*did you mean 'npu-1536'.*nestpipe profile"):
        read("npu-1535")
    with pytest.raises(ValueError, match=r"cannot read the profile .*nowhere.toml: No such file"):
        read(str(tmp_path / "nowhere.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ValueError, match=r"cannot read the profile .*folder.toml"):
        read(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize("content", [b"links = [", b"\xff\xfe\x00", b"[links]\n[links]\n"])
def test_a_file_that_is_not_toml_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken.toml is not valid TOML"):
        read(str(path))

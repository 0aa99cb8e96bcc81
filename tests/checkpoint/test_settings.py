"""What a trainer wants back is what it gave; what nestpipe never wrote is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nestpipe.checkpoint import Settings

SETTINGS = Settings(
    lr_factor=0.5,
    pooled_at_owner={"user": True, "item": None},
    owners={"user": [0, 1], "item": None},
    micro_batches=4,
    config={"train": {"steps": 10}},
    run="20260101-1",
)


def test_settings_come_back_as_they_were() -> None:
    assert Settings.from_json(json.loads(json.dumps(SETTINGS.to_json()))) == SETTINGS


def test_what_an_earlier_version_did_not_save_has_its_default() -> None:
    values = {name: SETTINGS.to_json()[name] for name in ("lr_factor", "pooled_at_owner", "owners")}
    earlier = Settings.from_json(values)
    assert (earlier.micro_batches, earlier.config, earlier.run) == (None, None, None)
    assert earlier.owners == SETTINGS.owners


def test_what_a_later_version_adds_is_passed_over() -> None:
    assert Settings.from_json({**SETTINGS.to_json(), "weather": 2}) == SETTINGS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr_factor", "1"),
        ("lr_factor", None),
        ("pooled_at_owner", []),
        ("owners", None),
        ("micro_batches", "4"),
        ("micro_batches", True),
        ("config", []),
        ("config", {"train": 3}),
        ("run", 7),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"settings are|config is|micro_batches is"):
        Settings.from_json({**SETTINGS.to_json(), name: value})


@pytest.mark.parametrize("values", [None, [], "settings", 3])
def test_what_is_no_mapping_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="the settings are"):
        Settings.from_json(values)


@pytest.mark.parametrize("name", ["lr_factor", "pooled_at_owner", "owners"])
def test_what_every_version_saved_must_be_there(name: str) -> None:
    values = SETTINGS.to_json()
    del values[name]
    with pytest.raises(KeyError, match=name):
        Settings.from_json(values)

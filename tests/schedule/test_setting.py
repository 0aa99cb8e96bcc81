"""Settings: what trainer, benches and simulator ask of a schedule, for every schedule there is."""

from __future__ import annotations

from typing import Any

import pytest

from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.setting import MOST_PARTS, Setting

# hides lookups, is cut into micro-batches, is exact
KNOWN = {
    "serial": (False, False, True),
    "dbp": (True, False, True),
    "fwp": (False, True, True),
    "nested": (True, True, True),
    "semi_async": (True, True, False),
    "stale": (True, False, False),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 4, "auto"])
def test_what_a_schedule_does_depends_on_its_kind_alone(schedule: str, micro_batches: int | str) -> None:
    setting = Setting(schedule, micro_batches)
    assert (setting.hides_lookups, setting.cuts, setting.is_exact) == KNOWN[schedule]
    assert setting.is_auto == (micro_batches == "auto") and setting.parts == (4 if micro_batches == 4 else 1)
    assert setting.make().name == schedule
    assert not setting.cut_into(2).is_auto and setting.cut_into(2).make().num_parts("FWD") == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "nestd"}, "schedule 'nestd'.*nested"),
        ({"clustering": "windows"}, "clustering 'windows'.*window"),
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ({"micro_batches": MOST_PARTS + 1}, "micro_batches must be at most 65,536, got 65537"),
        ({"micro_batches": True}, "got True"),
        ({"micro_batches": "many"}, "micro_batches must be a whole number or 'auto', got 'many'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**values)


def test_its_name_tells_settings_apart() -> None:
    settings = [
        Setting(),
        Setting("stale"),
        Setting("fwp", 4),
        Setting("fwp", 4, window_cache=False),
        Setting("fwp", 4, clustering="none"),
        Setting("fwp", "auto"),
        Setting("nested", 4, replicas=2),
    ]
    names = [setting.name for setting in settings]
    assert len(set(names)) == len(settings)
    assert names[0] == "serial" and "NOT exact" in names[1] and names[2] == "fwp, N = 4, clustering window"


def test_the_trainer_takes_all_of_it() -> None:
    assert Setting("dbp", replicas=2).options() == {
        "schedule": "dbp", "micro_batches": 1, "window_cache": True, "clustering": "window", "look_ahead": None,
        "replicas": 2, "near": "shards", "balance": "none",
    }  # fmt: skip

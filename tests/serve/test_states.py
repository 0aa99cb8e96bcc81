"""The table of states, and the page that prints it."""

from __future__ import annotations

from pathlib import Path

from nestpipe.serve.states import ON_DEVICE, ON_HOST, READABLE, TRANSITIONS, UNDER_WAY, State
from nestpipe.serve.trigger import Reason

PAGE = (Path(__file__).parents[2] / "docs/relay.md").read_text()


def rows(*header: str) -> list[list[str]]:
    """The rows of the table with this header."""
    lines = PAGE.split("| " + " | ".join(header) + " |\n")[1].splitlines()[1:]
    table = lines[: next(i for i, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_page_prints_the_transitions_as_they_are() -> None:
    listed = [[before.value, event.value, after.value] for (before, event), after in TRANSITIONS.items()]
    assert rows("state", "event", "next state") == listed


def test_the_page_says_of_every_state_where_it_has_memory() -> None:
    places = {
        state: (device, host) for state, device, host, _ in rows("state", "on the device", "on the host", "meaning")
    }
    for state in State:
        device, host = places[state.value]
        assert bool(device) == (state in ON_DEVICE) and bool(host) == (state in ON_HOST)
        assert (device == "read") == (state in READABLE)
        assert (device == "promised") == (state in UNDER_WAY)


def test_the_page_lists_every_reason_of_the_trigger() -> None:
    assert rows("reason", "meaning") == [[reason.name, reason.value] for reason in Reason]

"""Types and limits at a field: what fits comes back, what does not is named with what would."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest

from nestpipe.fields import AtLeast, AtMost, NotEmpty, OneOf, check, hints, in_words

Part = Annotated[int, AtLeast(1), AtMost(64)]
FITS: list[tuple[Any, Any]] = [
    (3, int),
    (3, float),
    (0.5, float),
    (None, int | None),
    (1, Part),
    (64, Part),
    ("auto", Part | Literal["auto"]),
    ("a", Annotated[str, OneOf({"a": 1, "b": 2})]),
    ([1, 2], list[int]),
    ((1, 2), Sequence[int]),
    ([], list[int]),
    ({"a": "x"}, list[str] | dict[str, Literal["x", "y"]]),
    ({"a": [1]}, Any),
]
REFUSED: list[tuple[Any, Any, str]] = [
    (True, int, "size must be a whole number, got True"),
    (2**63, int, "size must be a whole number, got 9223"),
    (float("nan"), float, "size must be a finite number, got nan"),
    (1, bool, "size must be true or false, got 1"),
    (3, str | None, "size must be text, got 3"),
    (None, int, "size must be a whole number, got None"),
    (0, Part, "size must be at least 1, got 0"),
    (65, Part | None, "size must be at most 64, got 65"),
    ("atuo", Part | Literal["auto"], "size must be a whole number or 'auto', got 'atuo'"),
    ("yy", Literal["xy", "yyy"] | None, r"size 'yy', which is not known; did you mean 'yyy'\? \(known: xy, yyy\)"),
    ([1], Annotated[str, OneOf(("a",))], r"size \[1\], which is not known"),
    ([1, "a"], list[int], r"size must be a list of whole numbers, got \[1, 'a'\]"),
    ([1, 0], tuple[Part, ...], "size must be at least 1, got 0"),
    ([], Annotated[tuple[Part, ...], NotEmpty()], "size must not be empty"),
    (3, list[str] | dict[str, str], r"size must be a list of texts or {name = value, ...}, got 3"),
    ({"a": "z"}, dict[str, Literal["x", "y"]], "size.a 'z', which is not known"),
    ({3: "x"}, dict[str, str], "size must be {name = value"),
]


@pytest.mark.parametrize(("value", "hint"), FITS, ids=str)
def test_what_fits_comes_back_as_it_is(value: Any, hint: Any) -> None:
    checked = check("size", value, hint)
    assert checked == value or checked == list(value)


@pytest.mark.parametrize(("value", "hint", "message"), REFUSED, ids=str)
def test_what_does_not_fit_is_named_with_what_would(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check("size", value, hint)


def test_a_list_becomes_a_tuple_where_the_field_holds_one() -> None:
    assert check("size", [1, 2], tuple[int, ...]) == (1, 2)


def test_names_that_are_added_to_a_table_later_are_known() -> None:
    table = {"old": 1}
    hint = Annotated[str, OneOf(table)]
    table["new"] = 2
    assert check("kind", "new", hint) == "new"


def test_limits_are_read_at_the_fields_of_a_dataclass() -> None:
    @dataclasses.dataclass
    class Section:
        size: Annotated[int, AtLeast(1)] = 1

    hint = hints(Section)["size"]
    with pytest.raises(ValueError, match="at least 1"):
        check("size", 0, hint)


def test_a_type_that_cannot_be_checked_is_an_error_of_ours() -> None:
    for look in (lambda: check("size", 3, set), lambda: in_words(set)):
        with pytest.raises(TypeError, match="a field of type <class 'set'> cannot be checked"):
            look()

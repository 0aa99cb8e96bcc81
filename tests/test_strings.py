import numpy as np
import pyarrow as pa
import pytest

from nestpipe import Jagged, hash_strings
from nestpipe.strings import hash_lists

WORDS = ["", "a", "abc", "Zürich", "x" * 40, "a"]
KEYS = [-1205034819632174695, -3292477735350538661, 4952883123889572249, -8795003695103573383, -7894996728292697899,
        -3292477735350538661]  # fmt: skip
BYTES = [word.encode() for word in WORDS]


@pytest.mark.parametrize(
    "strings",
    [
        WORDS,
        tuple(WORDS),
        BYTES,
        np.array(WORDS),
        np.array(WORDS, object),
        pa.array(WORDS),
        pa.array(WORDS, pa.large_string()),
        pa.array(WORDS, pa.string_view()),
        pa.array(BYTES, pa.binary()),
        pa.array(BYTES, pa.large_binary()),
        pa.array(BYTES, pa.binary_view()),
        pa.array(["before", *WORDS, "behind"])[1:-1],
        pa.array(WORDS).dictionary_encode(),
        pa.array([*WORDS, *map(str, range(50))]).dictionary_encode()[: len(WORDS)],  # of a dictionary mostly not used
        pa.chunked_array([pa.array(WORDS[:2]), pa.array(WORDS[2:])]),
        pa.chunked_array([pa.array(WORDS[:2]).dictionary_encode(), pa.array(WORDS[2:]).dictionary_encode()]),
    ],
    ids=lambda strings: str(getattr(strings, "type", type(strings).__name__)),
)
def test_a_string_has_the_same_key_however_it_is_held(strings):
    assert hash_strings(strings).tolist() == KEYS


def test_bytes_of_one_size_are_strings_too():
    assert hash_strings(pa.array([b"abc", b"abd"], pa.binary(3))).tolist() == hash_strings(["abc", "abd"]).tolist()


@pytest.mark.parametrize("nothing", [[], pa.array([], pa.string()), pa.array([], pa.null()), np.array([], str)])
def test_no_strings_have_no_keys(nothing):
    assert hash_strings(nothing).tolist() == [] and hash_strings(nothing).dtype == np.int64


def test_a_dictionary_is_hashed_once_and_not_decoded(monkeypatch):
    counts = []
    kernel = hash_strings.__globals__["hash_each"]
    monkeypatch.setitem(
        hash_strings.__globals__, "hash_each", lambda data, offsets, out: (counts.append(len(out)), kernel(data, offsets, out))
    )  # fmt: skip
    assert len(hash_strings(pa.array(["a", "b"] * 500).dictionary_encode())) == 1000
    assert counts == [2]


def test_lists_of_strings_become_a_jagged():
    a, b, empty = hash_strings(["a", "b", ""]).tolist()
    expected = [[a, b], [], [empty], []]
    lists = [["a", "b"], [], [""], None]
    assert Jagged.from_strings(lists).to_lists() == expected
    assert Jagged.from_strings(pa.array(lists)).to_lists() == expected
    assert Jagged.from_strings(pa.array(lists, pa.large_list(pa.large_string()))).to_lists() == expected
    of_codes = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3, 3]), pa.array(["a", "b", ""]).dictionary_encode())
    assert Jagged.from_strings(of_codes).to_lists() == expected
    assert Jagged.from_strings(of_codes[1:3]).to_lists() == expected[1:3]
    assert Jagged.from_strings([[], []]).to_lists() == [[], []]
    assert Jagged.from_strings([]).to_lists() == []


def test_single_strings_are_lists_of_one_and_nulls_are_empty():
    a, b = hash_strings(["a", "b"]).tolist()
    for strings in (["a", None, "b"], pa.array(["a", None, "b"]), pa.array(["a", None, "b"]).dictionary_encode()):
        assert Jagged.from_strings(strings).to_lists() == [[a], [], [b]]
    null_in_dictionary = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), pa.array(["a", None, "b"]))
    assert Jagged.from_strings(null_in_dictionary).to_lists() == [[a], [], [b]]


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ("abc", "a list of strings is needed, got the single string 'abc'"),
        ([["a"], "b"], "all of one kind"),
        (["a", 1], "all of one kind"),
        ([[1, 2]], "strings are needed, got int64; integers are keys as they are"),
        ([["a"], ["b", None]], "list 1 holds a null"),
    ],
)
def test_what_are_no_strings_is_refused(strings, message):
    with pytest.raises(ValueError, match=message):
        Jagged.from_strings(strings)


def test_a_null_has_no_key():
    with pytest.raises(ValueError, match="string 1 is null and has no key"):
        hash_strings(["a", None])
    assert hash_lists(["a", None])[1].tolist() == [1, 0]

"""Keys of strings never change: vectors of the published XXH64, and a plain version of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels.strings import hash_bytes, hash_each

P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
MASK = 2**64 - 1


def xxh64(text: bytes) -> int:
    def rotated(bits: int, left: int) -> int:
        return ((bits << left) | (bits >> (64 - left))) & MASK

    def mixed(lane: int, word: bytes) -> int:
        return rotated((lane + int.from_bytes(word, "little") * P2) & MASK, 31) * P1 & MASK

    state, rest = P5, text
    if len(text) >= 32:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while len(rest) >= 32:
            lanes = [mixed(lane, rest[8 * k : 8 * k + 8]) for k, lane in enumerate(lanes)]
            rest = rest[32:]
        state = sum(rotated(lane, left) for lane, left in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            state = ((state ^ mixed(0, lane.to_bytes(8, "little"))) * P1 + P4) & MASK
    state = (state + len(text)) & MASK
    while len(rest) >= 8:
        state, rest = (rotated(state ^ mixed(0, rest[:8]), 27) * P1 + P4) & MASK, rest[8:]
    if len(rest) >= 4:
        word = int.from_bytes(rest[:4], "little")
        state, rest = (rotated(state ^ (word * P1 & MASK), 23) * P2 + P3) & MASK, rest[4:]
    for byte in rest:
        state = rotated(state ^ (byte * P5 & MASK), 11) * P1 & MASK
    state = (state ^ (state >> 33)) * P2 & MASK
    state = (state ^ (state >> 29)) * P3 & MASK
    return state ^ (state >> 32)


def hashed(text: bytes) -> int:
    return int(hash_bytes(np.frombuffer(text, np.uint8), 0, len(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # of the package xxhash, which wraps the library of XXH64's author
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"nestpipe", 0xFF30CE1F0261055F),
        (b"\0\0\0\0\0", 0x00F4F72FB7A8C648),
        ("Zürich".encode(), 0x85F1DEBCBB1A8279),
        (b"0123456789abcdef0123456789abcdef", 0x642A94958E71E6C5),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_the_hash_of_a_string_is_what_xxh64_says_and_stays_so(text: bytes, expected: int) -> None:
    assert hashed(text) == expected == xxh64(text)


@given(st.binary(max_size=100))
def test_strings_of_any_length_are_hashed_as_in_plain_python(text: bytes) -> None:
    assert hashed(text) == xxh64(text)


def test_strings_that_lie_end_to_end_are_hashed_each_by_itself() -> None:
    texts = [b"x" * 40, b"", b"ab", b"cdefghi", b"y" * 64]
    out = np.empty(len(texts), np.int64)
    offsets = np.cumsum([3, *map(len, texts)])
    hash_each(np.frombuffer(b"..." + b"".join(texts), np.uint8), offsets, out)
    assert out.view(np.uint64).tolist() == [xxh64(text) for text in texts]

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels import records as kernels
from nestpipe.kernels import reference
from nestpipe.kernels.rows import NONE, gather
from tests.kernels.cases import Records, any_key, few, floats, int64, same_bits, seeds, signed


def digest(keys: np.ndarray, records: np.ndarray, tag: int = 5) -> tuple[int, int]:
    out = np.zeros(2, np.uint64)
    kernels.digest(keys, records, np.uint64(tag), out)
    return int(out[0]), int(out[1])


@given(seeds, st.integers(1, 7), st.integers(0, 9))
@few
def test_put_writes_records_word_for_word_and_gather_reads_them_back(seed: int, width: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    records = Records(torch.zeros(9, width), shift=1)
    positions = rng.permutation(9)[:n].astype(np.int64)
    words = rng.integers(0, 2**32, (n, width), dtype=np.uint32).view(np.float32)  # NaNs of all kinds among them
    kernels.put(words, positions, records.raw)
    expected = np.zeros((9, width), np.float32)
    expected[positions] = words
    assert same_bits(records.words, expected)
    back = np.zeros((n, width), np.float32)
    gather(records.raw, positions, NONE, back)
    assert same_bits(back, words)


@given(st.lists(st.tuples(st.lists(st.integers(0, 6), unique=True), st.booleans()), max_size=8))
@few
def test_counters_hold_the_last_step_and_how_many_since_the_first(batches: list[tuple[list[int], bool]]) -> None:
    counters = Records(torch.zeros(7, 2), shift=1)
    expected = torch.zeros(7, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    for step, (positions, first) in enumerate(batches, start=100):
        kernels.count_use(counters.rows, int64(positions), step, first)
        expected = reference.count_use(*expected, torch.tensor(positions, dtype=torch.int64), step, first=first)
        last_used, uses = np.empty(7, np.int64), np.empty(7, np.int64)
        kernels.read_counters(counters.rows, np.arange(7), last_used, uses)
        assert last_used.tolist() == expected[0].tolist()
        assert uses.tolist() == expected[1].tolist()


@given(st.lists(any_key, max_size=12), seeds, st.integers(1, 5), st.integers(0, 2**64 - 1))
@few
def test_digest_equals_the_reference(keys: list[int], seed: int, width: int, tag: int) -> None:
    records = np.random.default_rng(seed).integers(0, 2**32, (len(keys), width), dtype=np.uint32).view(np.float32)
    expected = reference.digest(torch.tensor(keys, dtype=torch.int64), torch.from_numpy(records), signed(tag))
    assert digest(int64(keys), records, tag) == expected


def test_digest_adds_up_over_parts_in_any_order() -> None:
    rng = np.random.default_rng(0)
    keys, records = rng.permutation(100) - 50, floats(rng, 100, 4)
    order = rng.permutation(100)
    whole = digest(keys, records)
    assert digest(keys[order], records[order]) == whole
    parts = [digest(keys[part], records[part]) for part in (order[:30], order[30:31], order[31:])]
    assert tuple(sum(halves) % 2**64 for halves in zip(*parts, strict=True)) == whole


def test_digest_notices_any_bit_of_any_word_key_or_tag_and_swapped_rows() -> None:
    rng = np.random.default_rng(0)
    keys, records = rng.permutation(6) - 3, floats(rng, 6, 4)
    seen = {digest(keys, records), digest(keys, records, tag=6), digest(keys[[1, 0, 2, 3, 4, 5]], records)}
    seen |= {digest(keys, records[:, [1, 0, 2, 3]].copy()), digest(keys[:5], records[:5])}
    for bit in range(64):
        other = keys.copy()
        other[2] ^= np.int64(signed(1 << bit))
        seen.add(digest(other, records))
    for bit in range(32):
        other = records.copy()
        other.view(np.uint32)[3, 1] ^= np.uint32(1 << bit)
        seen.add(digest(keys, other))
    assert len({a for a, _ in seen}) == len({b for _, b in seen}) == 5 + 64 + 32

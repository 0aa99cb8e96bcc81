from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nestpipe.kernels.records import put
from nestpipe.kernels.rows import NONE, gather
from nestpipe.store import chunks
from nestpipe.store.chunks import Chunks


def test_records_keep_their_words_and_their_place_while_chunks_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    memory = Chunks(5, half=False)  # 20 bytes a record: 4 to a chunk
    written, bases = np.empty((0, 5), np.float32), np.empty(0, np.int64)
    for n in (1, 4, 5, 23):
        memory.reserve(n)
        assert len(memory.rows.bases) == -(-n // 4)
        assert memory.rows.bases[: len(bases)].tolist() == bases.tolist()
        bases = memory.rows.bases
        more = np.arange(len(written) * 5, n * 5, dtype=np.float32).reshape(-1, 5)
        put(more, np.arange(len(written), n), memory.raw)
        written = np.concatenate([written, more])
        out = np.empty_like(written)
        gather(memory.raw, np.arange(n), NONE, out)
        assert out.tolist() == written.tolist()


def test_reserving_what_is_there_already_adds_nothing() -> None:
    memory = Chunks(5, half=True)
    memory.reserve(0)
    assert len(memory.rows.bases) == 0
    memory.reserve(10)
    memory.reserve(3)
    assert len(memory.rows.bases) == 1
    assert memory.rows.half
    assert not memory.raw.half


def test_a_record_may_be_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 16)
    memory = Chunks(5, half=False)
    memory.reserve(3)
    assert len(memory.rows.bases) == 3


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mappings")
def test_chunks_are_private_mappings_so_that_they_can_have_huge_pages() -> None:
    memory = Chunks(64, half=False)
    memory.reserve(1)
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions = line.split()[:2]
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= memory.rows.bases[0] < last:
            assert permissions == "rw-p"
            return
    pytest.fail("the chunk is not among the mappings of this process")

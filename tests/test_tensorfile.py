from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from nestpipe.tensorfile import TensorReader, TensorWriter


def test_what_is_written_in_parts_is_a_safetensors_file(tmp_path: Path) -> None:
    keys, records = np.arange(10), np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)
    layout = {"keys": (np.int64, (10,)), "records": (np.float32, (10, 3)), "none": (np.float32, (0, 3))}
    with TensorWriter(tmp_path / "one", layout) as file:
        for start in (0, 4, 8):
            file.append("records", records[start : start + 4])
            file.append("keys", keys[start : start + 4])
    loaded = load_file(tmp_path / "one")
    assert sorted(loaded) == ["keys", "none", "records"]
    assert loaded["keys"].tolist() == keys.tolist() and loaded["records"].tolist() == records.tolist()
    assert loaded["none"].shape == (0, 3)


def test_parts_of_a_file_of_the_library_are_read(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(7),
        "b": np.arange(21, dtype=np.float32).reshape(7, 3),
        "empty": np.empty((0, 2), np.float32),
    }
    save_file(arrays, tmp_path / "one", metadata={"who": "somebody else"})
    with TensorReader(tmp_path / "one") as file:
        assert file.shape("b") == (7, 3)
        assert file.read("a", 2, 5).tolist() == [2, 3, 4]
        assert file.read("b", 5, 100).tolist() == arrays["b"][5:].tolist()
        assert file.read("empty", 0, 9).shape == (0, 2)


def test_rows_that_were_announced_and_never_came_are_noticed(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="rows came or went"),
        TensorWriter(tmp_path / "one", {"a": (np.int64, (3,))}) as file,
    ):
        file.append("a", np.arange(2))


@pytest.mark.parametrize("length", [0, 5, 20, 150])
def test_a_file_cut_short_is_refused_and_named(tmp_path: Path, length: int) -> None:
    save_file({"a": np.arange(100)}, tmp_path / "one")
    whole = (tmp_path / "one").read_bytes()
    (tmp_path / "one").write_bytes(whole[:length])
    with pytest.raises(ValueError, match=r"one is not a whole safetensors file"):
        TensorReader(tmp_path / "one")


def test_a_mapped_tensor_is_written_in_any_order_and_read_where_it_lies(tmp_path: Path) -> None:
    layout = {"index": (np.int64, (6, 2)), "rows": (np.uint16, (3, 5)), "keys": (np.int64, (3,))}
    with TensorWriter(tmp_path / "one", layout) as file:
        index = file.mapped("index")
        file.append("rows", np.arange(15, dtype=np.uint16).reshape(3, 5))
        index[::-1] = np.arange(12).reshape(6, 2)
        file.append("keys", np.array([7, 8, 9]))
    with TensorReader(tmp_path / "one") as file:
        tensors = file.mapped()
        assert file.read("index", 0, 2).tolist() == [[10, 11], [8, 9]]
    assert tensors["index"].tolist() == np.arange(12).reshape(6, 2)[::-1].tolist()
    assert tensors["rows"].ravel().tolist() == list(range(15)) and tensors["keys"].tolist() == [7, 8, 9]
    assert tensors["index"].ctypes.data % 64 == 0 and not tensors["index"].flags.writeable
    with safe_open(tmp_path / "one", framework="pt") as file:
        assert file.get_tensor("rows").dtype == torch.bfloat16 and file.get_tensor("keys").tolist() == [7, 8, 9]

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.batch import Batch, Jagged, NotFinite, check_batch

lists_of_keys = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=6)
few = settings(max_examples=50, deadline=None)


def with_weights(lists: list[list[int]]) -> Jagged:
    """Each value is weighted with its own place in the whole."""
    jagged = Jagged.from_lists(lists)
    jagged.weights = torch.arange(len(jagged.values), dtype=torch.float32)
    return jagged


# -- Jagged ----------------------------------------------------------------------------------------------------------


@given(lists_of_keys)
@few
def test_lists_go_into_a_jagged_and_come_back(lists: list[list[int]]) -> None:
    jagged = Jagged.from_lists(lists)
    assert jagged.values.dtype == jagged.offsets.dtype == torch.int64
    assert len(jagged) == len(lists)
    assert jagged.lengths.tolist() == [len(entries) for entries in lists]
    assert jagged.to_lists() == lists


def test_from_lists_takes_a_dtype() -> None:
    jagged = Jagged.from_lists([[0.5], [], [1.5, 2.5]], dtype=torch.float64)
    assert jagged.values.dtype == torch.float64
    assert jagged.to_lists() == [[0.5], [], [1.5, 2.5]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_lengths_of_any_integer_type_gives_int64_offsets(dtype: torch.dtype) -> None:
    weights = torch.rand(3)
    jagged = Jagged.from_lengths(torch.tensor([7, 8, 9]), torch.tensor([2, 0, 1], dtype=dtype), weights)
    assert jagged.offsets.dtype == torch.int64
    assert jagged.offsets.tolist() == [0, 2, 2, 3]
    assert jagged.weights is weights


@given(lists_of_keys, st.data())
@few
def test_select_gives_the_lists_of_any_samples_in_their_order_with_their_weights(lists: list[list[int]], data) -> None:
    samples = data.draw(st.lists(st.integers(0, len(lists) - 1)) if lists else st.just([]))
    whole = with_weights(lists)
    part = whole.select(torch.tensor(samples, dtype=torch.int64))
    assert part.to_lists() == [lists[sample] for sample in samples]
    places = [i for s in samples for i in range(int(whole.offsets[s]), int(whole.offsets[s + 1]))]
    assert part.weights is not None
    assert part.weights.tolist() == places


def test_select_of_rows_keeps_their_width() -> None:
    rows = Jagged(torch.arange(6.0).view(3, 2), torch.tensor([0, 2, 3]))
    part = rows.select(torch.tensor([1, 0]))
    assert part.values.tolist() == [[4, 5], [0, 1], [2, 3]]
    assert part.weights is None


@given(lists_of_keys, st.data())
@few
def test_slice_is_select_of_neighbours_without_a_copy(lists: list[list[int]], data) -> None:
    first = data.draw(st.integers(0, len(lists)))
    last = data.draw(st.integers(first, len(lists)))
    whole = with_weights(lists)
    part, selected = whole.slice(first, last), whole.select(torch.arange(first, last))
    assert part.to_lists() == lists[first:last]
    assert part.offsets.tolist() == selected.offsets.tolist()
    assert part.weights is not None
    assert selected.weights is not None
    assert part.weights.tolist() == selected.weights.tolist()
    assert part.values.untyped_storage().data_ptr() == whole.values.untyped_storage().data_ptr()


def test_a_slice_of_a_slice_is_right() -> None:
    jagged = Jagged.from_lists([[1], [2, 3], [], [4, 5, 6], [7]])
    assert jagged.slice(1, 5).slice(1, 3).to_lists() == [[], [4, 5, 6]]
    assert jagged.slice(1, 5).select(torch.tensor([3, 0])).to_lists() == [[7], [2, 3]]


@given(lists_of_keys)
@few
def test_sample_ids_name_the_list_of_every_value(lists: list[list[int]]) -> None:
    expected = [sample for sample, entries in enumerate(lists) for _ in entries]
    assert Jagged.from_lists(lists).sample_ids().tolist() == expected


@given(lists_of_keys)
@few
def test_places_count_from_the_start_of_every_list(lists: list[list[int]]) -> None:
    assert Jagged.from_lists(lists).places().tolist() == [place for entries in lists for place in range(len(entries))]


def test_like_keeps_the_lists_and_refuses_another_number_of_values() -> None:
    jagged = Jagged.from_lists([[1, 2], [], [3]])
    assert jagged.like(torch.tensor([4, 5, 6])).to_lists() == [[4, 5], [], [6]]
    with pytest.raises(ValueError, match="got 2 values for lists of 3"):
        jagged.like(torch.tensor([4, 5]))


def test_spread_gives_every_value_the_entry_of_its_sample_and_sums_up_gradients() -> None:
    jagged = Jagged.from_lists([[1, 2], [], [3]])
    per_sample = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    spread = jagged.spread(per_sample)
    assert spread.tolist() == [[1], [1], [3]]
    spread.sum().backward()
    assert per_sample.grad is not None
    assert per_sample.grad.tolist() == [[2], [0], [1]]
    with pytest.raises(ValueError, match="got 2 entries for 3 lists"):
        jagged.spread(torch.zeros(2))


@given(lists_of_keys, st.data())
@few
def test_split_cuts_every_list_and_concat_puts_it_together_again(lists: list[list[int]], data) -> None:
    jagged = with_weights(lists)
    heads = data.draw(st.lists(st.integers(0, 5), min_size=len(lists), max_size=len(lists)))
    head, tail = jagged.split(torch.tensor(heads, dtype=torch.int64))
    assert head.to_lists() == [entries[:n] for entries, n in zip(lists, heads, strict=True)]
    assert tail.to_lists() == [entries[n:] for entries, n in zip(lists, heads, strict=True)]
    whole = head.concat(tail)
    assert whole.to_lists() == lists
    assert whole.weights is not None and jagged.weights is not None
    assert whole.weights.tolist() == jagged.weights.tolist()


def test_concat_sends_gradients_to_both_and_refuses_other_samples_and_half_the_weights() -> None:
    rows = [Jagged(torch.randn(3, 2, requires_grad=True), torch.tensor([0, a, 3])) for a in (1, 3)]
    whole = rows[0].concat(rows[1])
    assert whole.lengths.tolist() == [4, 2]
    (whole.values * torch.arange(6.0)[:, None]).sum().backward()
    assert rows[0].values.grad is not None and rows[1].values.grad is not None
    assert rows[0].values.grad[:, 0].tolist() == [0, 4, 5]
    assert rows[1].values.grad[:, 0].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="2 lists and 1"):
        rows[0].concat(Jagged.from_lists([[1]]))
    with pytest.raises(ValueError, match="has weights"):
        with_weights([[1]]).concat(Jagged.from_lists([[1]]))


@given(lists_of_keys, st.one_of(st.none(), st.integers(0, 5)))
@few
def test_to_padded_fills_up_short_lists_and_cuts_long_ones(lists: list[list[int]], length: int | None) -> None:
    padded = Jagged.from_lists(lists).to_padded(length, value=-1)
    width = max((len(entries) for entries in lists), default=0) if length is None else length
    assert padded.shape == (len(lists), width)
    assert padded.tolist() == [(entries + [-1] * width)[:width] for entries in lists]


REDUCTIONS = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
    "first": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
}
some_lengths = st.lists(st.integers(0, 5), max_size=6)


def rows_of_lengths(lengths: list[int], *shape: int, dtype: torch.dtype = torch.float32) -> Jagged:
    values = torch.randn(sum(lengths), *shape, dtype=dtype, generator=torch.Generator().manual_seed(len(lengths)))
    return Jagged.from_lengths(values, torch.tensor(lengths, dtype=torch.int64))


@pytest.mark.parametrize("name", REDUCTIONS)
@given(lengths=some_lengths, shape=st.sampled_from([(), (3,)]))
@few
def test_reductions_are_those_of_each_list_by_itself_and_zero_for_an_empty_one(
    name: str, lengths: list[int], shape: tuple[int, ...]
) -> None:
    jagged = rows_of_lengths(lengths, *shape)
    reduced = getattr(jagged, name)()
    assert reduced.shape == (len(lengths), *shape)
    for sample, length in enumerate(lengths):
        rows = jagged.values[jagged.offsets[sample] : jagged.offsets[sample + 1]]
        expected = REDUCTIONS[name](rows) if length else torch.zeros(shape)
        torch.testing.assert_close(reduced[sample], expected)


@pytest.mark.parametrize("name", REDUCTIONS)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), data=st.data())
@few
def test_reductions_do_not_change_a_bit_when_the_batch_is_cut(name: str, lengths: list[int], data) -> None:
    cut = data.draw(st.integers(0, len(lengths)))
    jagged = rows_of_lengths(lengths, 9)
    parts = [jagged.slice(0, cut), jagged.slice(cut, len(lengths))]
    assert torch.equal(getattr(jagged, name)(), torch.cat([getattr(part, name)() for part in parts]))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("shape", [(), (2,)])
def test_reductions_send_the_right_gradients_back(name: str, shape: tuple[int, ...]) -> None:
    jagged = rows_of_lengths([2, 0, 3, 1, 0], *shape, dtype=torch.float64)
    values = jagged.values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: getattr(Jagged(v, jagged.offsets), name)(), values)


def test_to_padded_of_rows_sends_gradients_back_to_kept_rows_only() -> None:
    values = torch.arange(8.0).view(4, 2).requires_grad_()
    padded = Jagged(values, torch.tensor([0, 3, 3, 4])).to_padded(2)
    assert padded.tolist() == [[[0, 1], [2, 3]], [[0, 0], [0, 0]], [[6, 7], [0, 0]]]
    padded.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 1], [1, 1], [0, 0], [1, 1]]


# -- Batch -----------------------------------------------------------------------------------------------------------


def make_batch() -> Batch:
    return Batch(
        keys={"user": Jagged.from_lists([[1], [2], [3]]), "liked": with_weights([[4, 5], [], [6]])},
        dense={
            "age": torch.tensor([[10.0], [20.0], [30.0]]),
            "times": Jagged.from_lists([[0.5, 0.25], [], [2.0]], dtype=torch.float32),
        },
        labels=torch.tensor([0.0, 1.0, 1.0]),
    )


def contents(batch: Batch) -> list:
    liked = batch.keys["liked"]
    assert isinstance(batch.dense["times"], Jagged)
    assert isinstance(batch.dense["age"], torch.Tensor)
    assert liked.weights is not None
    assert batch.labels is not None
    return [
        batch.size,
        batch.keys["user"].to_lists(),
        liked.to_lists(),
        liked.weights.tolist(),
        batch.dense["age"].tolist(),
        batch.dense["times"].to_lists(),
        batch.labels.tolist(),
    ]


def test_select_of_a_batch_takes_the_samples_out_of_every_part() -> None:
    part = make_batch().select(torch.tensor([2, 0]))
    lists = [[[3], [1]], [[6], [4, 5]], [2, 0, 1], [[30], [10]], [[2.0], [0.5, 0.25]], [1, 0]]
    assert contents(part) == [2, *lists]


def test_slice_of_a_batch_equals_select_of_neighbours() -> None:
    batch = make_batch()
    for first in range(4):
        for last in range(first, 4):
            expected = batch.select(torch.arange(first, last))
            assert contents(batch.slice(first, last)) == contents(expected)
    assert batch.slice(0, 3) is batch


def test_labels_may_be_lists_and_are_cut_chosen_and_joined_with_their_samples() -> None:
    labels = Jagged.from_lists([[1.0, 0.0], [], [0.5]], dtype=torch.float32)
    batch = Batch({"k": Jagged.from_lists([[1], [2], [3]])}, labels=labels)
    check_batch(batch, ["k"])
    assert Batch({}, labels=labels).size == 3
    assert batch.select(torch.tensor([2, 0])).labels.to_lists() == [[0.5], [1.0, 0.0]]  # type: ignore[union-attr]
    assert batch.slice(1, 3).labels.to_lists() == [[], [0.5]]  # type: ignore[union-attr]
    again = Batch.joined([batch.slice(0, 1), batch.slice(1, 3)])
    assert again.labels.to_lists() == labels.to_lists()  # type: ignore[union-attr]
    for wrong, error, message in (
        (Jagged(labels.values, torch.tensor([0, 1, 3])), ValueError, "labels has 2 samples, the batch has 3"),
        (labels.like(torch.tensor([1.0, float("nan"), 0.0])), NotFinite, "labels holds nan"),
        (Jagged(labels.values, torch.tensor([0, 1, 2, 2])), ValueError, "labels: lengths do not sum up"),
    ):
        with pytest.raises(error, match=message):
            check_batch(Batch(batch.keys, labels=wrong), ["k"])


def test_a_batch_without_labels_stays_without() -> None:
    batch = Batch({"user": Jagged.from_lists([[1], [2]])})
    assert batch.select(torch.tensor([1])).labels is None
    assert batch.slice(0, 1).labels is None


def test_the_size_of_a_batch_comes_from_whatever_it_has() -> None:
    assert make_batch().size == 3
    assert Batch({}, {"age": torch.zeros(4, 2)}).size == 4
    assert Batch({}, labels=torch.zeros(5)).size == 5
    assert Batch({}).size == 0


def test_an_empty_batch_has_every_feature_and_no_sample() -> None:
    batch = Batch.empty(["user", "liked"])
    assert batch.size == 0
    check_batch(batch, ["user", "liked"])


class FakeJaggedTensor:
    def __init__(self, values, offsets, weights) -> None:
        self._values, self._offsets, self._weights = values, offsets, weights

    def values(self):
        return self._values

    def offsets(self):
        return self._offsets

    def weights_or_none(self):
        return self._weights


class FakeKeyedJaggedTensor:
    """The part of TorchRec's class that is read."""

    def __init__(self, parts: dict[str, FakeJaggedTensor]) -> None:
        self._parts = parts

    def keys(self):
        return list(self._parts)

    def __getitem__(self, name: str) -> FakeJaggedTensor:
        return self._parts[name]


def test_from_kjt_takes_keys_weights_and_narrow_integers() -> None:
    weights = torch.tensor([0.5, 0.25, 1.0])
    kjt = FakeKeyedJaggedTensor(
        {
            "user": FakeJaggedTensor(torch.tensor([1, 2]), torch.tensor([0, 1, 2]), None),
            "liked": FakeJaggedTensor(
                torch.tensor([4, 5, 6], dtype=torch.int32), torch.tensor([0, 3, 3], dtype=torch.int32), weights
            ),
        }
    )
    batch = Batch.from_kjt(kjt, dense={"age": torch.zeros(2, 1)}, labels=torch.zeros(2))
    check_batch(batch, ["user", "liked"])
    assert list(batch.keys) == ["user", "liked"]
    assert batch.keys["user"].to_lists() == [[1], [2]]
    assert batch.keys["user"].weights is None
    assert batch.keys["liked"].to_lists() == [[4, 5, 6], []]
    assert batch.keys["liked"].values.dtype == batch.keys["liked"].offsets.dtype == torch.int64
    assert batch.keys["liked"].weights is weights
    assert batch.size == 2
    assert Batch.from_kjt(kjt).dense == {}


# -- check_batch -----------------------------------------------------------------------------------------------------


def replaced(**parts) -> Batch:
    """The good batch with another 'liked', 'age', 'times' or other labels."""
    batch = make_batch()
    if "liked" in parts:
        batch.keys["liked"] = parts["liked"]
    batch.dense |= {name: parts[name] for name in ("age", "times") if name in parts}
    batch.labels = parts.get("labels", batch.labels)
    return batch


THREE = torch.tensor([0, 1, 2, 3])
BAD = [
    (
        replaced(liked=Jagged.from_lists([[1], [2]])),
        r"feature 'liked' has 2 samples, the batch has 3",
    ),
    (
        replaced(liked=Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 5]))),
        r"feature 'liked': lengths do not sum up: offsets run from 0 to 5, but there are 3 values",
    ),
    (
        replaced(liked=Jagged(torch.tensor([1, 2, 3]), torch.tensor([1, 1, 2, 3]))),
        r"feature 'liked': lengths do not sum up: offsets run from 1 to 3",
    ),
    (
        replaced(liked=Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 3, 1, 3]))),
        r"feature 'liked': sample 1 has the negative length -2",
    ),
    (
        replaced(liked=Jagged(torch.tensor([1, 2, 3]), THREE.int())),
        r"feature 'liked': offsets must be a 1-d int64 tensor of B \+ 1 entries, got torch.int32",
    ),
    (
        replaced(liked=Jagged(torch.tensor([1, 2, 3], dtype=torch.int32), THREE)),
        r"feature 'liked': keys must be a 1-d int64 tensor, got torch.int32",
    ),
    (
        replaced(liked=Jagged(torch.tensor([[1], [2], [3]]), THREE)),
        r"feature 'liked': keys must be a 1-d int64 tensor, got torch.int64 of shape \(3, 1\)",
    ),
    (
        replaced(liked=Jagged(torch.tensor([1, 2, 3]), THREE, torch.ones(2))),
        r"feature 'liked': weights must be one float per key, got torch.float32 of shape \(2,\) for 3 keys",
    ),
    (
        replaced(liked=Jagged(torch.tensor([1, 2, 3]), THREE, torch.tensor([1, 2, 3]))),
        r"feature 'liked': weights must be one float per key, got torch.int64",
    ),
    (
        replaced(liked=Jagged(torch.tensor([1, 2, 3]), THREE, torch.tensor([1.0, float("nan"), 1.0]))),
        r"feature 'liked': weights holds nan at \[1\]",
    ),
    (replaced(age=torch.zeros(4, 1)), r"dense input 'age' has 4 samples, the batch has 3"),
    (replaced(age=torch.tensor([[0.0], [1.0], [float("inf")]])), r"dense input 'age' holds inf at \[2, 0\]"),
    (
        replaced(times=Jagged.from_lists([[1.0]], dtype=torch.float32)),
        r"dense input 'times' has 1 samples, the batch has 3",
    ),
    (
        replaced(times=Jagged.from_lists([[1.0], [float("-inf")], []], dtype=torch.float32)),
        r"dense input 'times' holds -inf at \[1\]",
    ),
    (replaced(labels=torch.zeros(2)), r"labels are given for 2 samples, the batch has 3"),
    (replaced(labels=torch.tensor([0.0, float("nan"), 1.0])), r"labels holds nan at \[1\]"),
]


@pytest.mark.parametrize(("batch", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_batch_is_refused_with_the_name_and_the_value(batch: Batch, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_batch(batch, ["user", "liked"])
    assert isinstance(error.value, NotFinite) == ("holds" in message)


def test_a_feature_that_the_batch_lacks_is_named_with_those_that_it_has() -> None:
    with pytest.raises(ValueError, match=r"feature 'genre' is declared .*it has \['liked', 'user'\]"):
        check_batch(make_batch(), ["user", "genre"])


def test_a_good_batch_passes() -> None:
    check_batch(make_batch(), ["user", "liked"])
    check_batch(make_batch(), ["user"])  # keys of features that nobody declared do no harm


def test_values_that_only_overflow_when_summed_are_finite() -> None:
    check_batch(replaced(age=torch.full((3, 1), 3e38)), ["user", "liked"])

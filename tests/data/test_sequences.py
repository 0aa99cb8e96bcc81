import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.data import Histories, HistoryDataset, MovieLens, Sequences
from nestpipe.data.dataset import offsets_of
from tests.data.data_samples import all_ranks, global_batches, read, read_samples

BEAUTY = Path(__file__).parents[3] / "shared" / "data" / "amazon_beauty.txt"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "users.txt", "7 10 11 12 13 14\n8 11 15 16\n9 17 18\n5 19\n")


def test_leave_one_out(path):
    dataset = Sequences(path=path, max_length=3, num_negatives=0)
    train = {sample[0] for sample in read_samples(dataset, "train", batch_size=2)}
    assert train == {(10, 11, 12), (11,), (17, 18), (19,)}  # users with one or two items train with all of them
    # (history, negatives, all seen, user, target); only the latest three items of a history are kept
    assert read_samples(dataset, "valid", batch_size=2) == [
        ((10, 11, 12), (), (10, 11, 12), 7, 13),
        ((11,), (), (11,), 8, 15),
    ]
    test = [((11, 12, 13), (), (10, 11, 12, 13), 7, 14), ((11, 15), (), (11, 15), 8, 16)]
    assert read_samples(dataset, "test", batch_size=2) == test


def test_candidates_are_all_items_sorted(path):
    assert Sequences(path=path).candidates().tolist() == list(range(10, 20))


def histories(num_users: int) -> HistoryDataset:
    lengths = torch.arange(num_users) % 7 + 1
    items = torch.arange(int(lengths.sum())) * 3
    store = Histories(torch.arange(num_users).numpy(), items.numpy(), offsets_of(lengths.numpy()))
    return HistoryDataset(store, max_length=4, num_negatives=2)


@given(num_users=st.integers(1, 40), batch_size=st.integers(1, 9), split=st.sampled_from(["train", "valid", "test"]))
def test_every_sample_is_on_exactly_one_rank(num_users, batch_size, split):
    dataset = histories(num_users)
    alone = sorted(all_ranks(dataset, split, world=1, batch_size=batch_size))
    assert len(alone) == len(set(alone))
    for world in (2, 3):
        assert sorted(all_ranks(dataset, split, world=world, batch_size=batch_size)) == alone


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_global_batches_and_negatives_do_not_depend_on_the_world(split):
    dataset = histories(50)
    alone = global_batches(dataset, split, batch_size=12, world=1, seed=2, epoch=1)
    assert global_batches(dataset, split, batch_size=6, world=2, seed=2, epoch=1) == alone
    assert global_batches(dataset, split, batch_size=4, world=3, seed=2, epoch=1) == alone


def test_seed_and_epoch_change_order_and_negatives_of_training_only():
    dataset = histories(50)
    first = read_samples(dataset, "train", batch_size=8)
    assert first == read_samples(dataset, "train", batch_size=8)
    for other in ({"seed": 1}, {"epoch": 1}):
        again = read_samples(dataset, "train", batch_size=8, **other)
        assert [sample[0] for sample in again] != [sample[0] for sample in first]
        assert sorted(sample[0] for sample in again) == sorted(sample[0] for sample in first)
        assert dict(again) != dict(first)  # history -> negatives
    assert read_samples(dataset, "test", batch_size=8) == read_samples(dataset, "test", batch_size=8, epoch=3)


def test_negatives_cover_the_catalogue():
    dataset = histories(40)
    seen = {
        key for epoch in range(40) for s in read_samples(dataset, "train", batch_size=40, epoch=epoch) for key in s[1]
    }
    assert seen == set(dataset.candidates().tolist())


def test_compressed_files_and_lists_of_files(tmp_path, path):
    packed = tmp_path / "more.txt.gz"
    packed.write_bytes(gzip.compress(b"1 2 3 4\n"))
    assert len(read_samples(Sequences(path=[path, str(packed)]), "train", batch_size=10)) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2 3\n4 x 5\n", r"line 2: 'x' is not an integer"),
        ("1 2 3\n4 1_0 5\n", r"line 2: '1_0' is not an integer"),
        ("1 2 3\n4 99999999999999999999\n", r"line 2: '99999999999999999999' is not an integer of 64 bits"),
        ("1 2 3\n\n4 5\n", r"line 2: '' has no items"),
        ("1 2 3\n4\n", r"line 2: '4' has no items"),
        ("1 2 3\n4 5 6", r"users.txt ends in the middle of line 2, '4 5 6'.*complete the row or cut it off"),
        ("", r"users.txt is empty"),
    ],
)
def test_a_bad_file_is_named_with_line_and_value(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        Sequences(path=write(tmp_path / "users.txt", text))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file matches .*nowhere"):
        Sequences(path=str(tmp_path / "nowhere.txt"))
    with pytest.raises(ValueError, match="is a folder"):
        Sequences(path=str(tmp_path))


@pytest.mark.skipif(not BEAUTY.exists(), reason="the file is not here")
def test_amazon_beauty_has_its_published_size():
    dataset = Sequences(path=str(BEAUTY), max_length=20, num_negatives=1)
    assert len(dataset.candidates()) == 12_101
    assert len(dataset.histories.items) == 198_502
    assert sum(batch.size for batch in read(dataset, "test", batch_size=512)) == 22_363


RATINGS = [(2, 30, 5, 300), (1, 10, 3, 20), (1, 11, 5, 10), (1, 12, 4, 30), (1, 13, 1, 40), (2, 31, 4.5, 100)]


@pytest.mark.parametrize(
    ("name", "delimiter", "header", "end"),
    [
        ("ratings.dat", "::", "", "\n"),
        ("u.data", "\t", "", "\n"),
        ("ratings.csv", ",", "userId,movieId,rating,timestamp\n", "\n"),
        ("windows.csv", ",", "userId,movieId,rating,timestamp\r\n", "\r\n"),
    ],
)
def test_movielens_orders_each_user_by_time(tmp_path, name, delimiter, header, end):
    text = header + "".join(delimiter.join(map(str, row)) + end for row in RATINGS)
    path = tmp_path / name
    path.write_bytes(text.encode())
    dataset = MovieLens(path=str(path), num_negatives=0)
    assert read_samples(dataset, "test", batch_size=4) == [((11, 10, 12), (), (10, 20, 30), (11, 10, 12), 1, 13)]
    assert sorted(read_samples(dataset, "train", batch_size=4)) == [
        ((11, 10), (), (10, 20)),
        ((31, 30), (), (100, 300)),
    ]
    liked = MovieLens(path=str(path), min_rating=4, num_negatives=0)
    assert liked.candidates().tolist() == [11, 12, 30, 31]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1::2::3::4\n1::2::3\n", r"line 2: 3 columns instead of 4; if the file was cut off"),
        ("1::2::3::4\n1::x::3::5\n", r"line 2: movieId is 'x', not an integer"),
        ("1::2::3::4\n1::2::good::5\n", r"line 2: rating is 'good', not a number"),
        ("1::2::3::4\n1::2::::5\n", r"line 2: rating is '', not a number"),
        ("1::2::3::4\n\n1::2::3::5\n", r"line 2: 1 columns instead of 4"),
        ("1::2::3::4\n1::2::3::5", r"ends in the middle of line 2"),
        ("1 2 3 4\n", r"line 1: '1 2 3 4' is not a rating"),
    ],
)
def test_movielens_names_the_bad_row(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        MovieLens(path=write(tmp_path / "ratings.dat", text))


def test_movielens_without_any_rating_left_says_so(tmp_path):
    with pytest.raises(ValueError, match="lower min_rating"):
        MovieLens(path=write(tmp_path / "ratings.dat", "1::2::3::4\n"), min_rating=6)


# -- lists for rankers -------------------------------------------------------------------------------------------------


def lists_of(batch):
    """Of each sample: history, what was clicked, what was passed over."""
    for history, keys, labels in zip(
        batch.keys["history"].to_lists(), batch.keys["candidates"].to_lists(), batch.labels.to_lists(), strict=True
    ):
        yield (
            history,
            [k for k, y in zip(keys, labels, strict=True) if y],
            [k for k, y in zip(keys, labels, strict=True) if not y],
        )


def test_the_target_is_clicked_and_drawn_items_are_passed_over_at_valid_and_test(path):
    dataset = Sequences(path=path, max_length=3, num_negatives=5, num_clicked=2)
    assert dataset.features == ("history", "candidates") and dataset.has_lists
    for split, expected in (
        ("valid", [([10, 11, 12], [13]), ([11], [15])]),
        ("test", [([11, 12, 13], [14]), ([11, 15], [16])]),
    ):
        (batch,) = read(dataset, split, batch_size=4)
        found = list(lists_of(batch))
        assert [sample[:2] for sample in found] == expected
        assert all(len(passed) == 5 and set(passed) <= set(range(10, 20)) for *_, passed in found)


def test_training_histories_are_cut_somewhere_and_go_on_with_what_was_clicked(path):
    dataset = Sequences(path=path, max_length=3, num_negatives=2, num_clicked=2)
    whole = {10: [10, 11, 12], 11: [11], 17: [17, 18], 19: [19]}  # what "train" may know of each user
    cuts = set()
    for epoch in range(20):
        for batch in read(dataset, "train", batch_size=3, epoch=epoch):
            for history, clicked, passed in lists_of(batch):
                items = whole[history[0]]
                assert sorted(clicked) == items[len(history) : len(history) + 2] and history == items[: len(history)]
                assert len(passed) == (2 if clicked else 0)
                assert clicked or len(items) == 1  # where nothing comes next, nothing was shown
                cuts.add(len(history))
    assert cuts == {1, 2}


def test_lists_do_not_depend_on_the_world_and_lengths_are_known_beforehand(path):
    dataset = Sequences(path=path, max_length=3, num_negatives=4, num_clicked=1)
    alone = global_batches(dataset, "train", batch_size=4, world=1, seed=1, epoch=2)
    assert global_batches(dataset, "train", batch_size=2, world=2, seed=1, epoch=2) == alone
    epoch = dataset.epoch("train", seed=1, epoch=2)
    places = torch.arange(4).numpy()
    assert epoch.lengths(places).tolist() == epoch.make(places).keys["history"].lengths.tolist()


def test_files_with_times_say_when_the_first_clicked_item_was(tmp_path):
    text = "".join(f"1::{item}::5::{100 + item}\n" for item in range(6))
    dataset = MovieLens(path=write(tmp_path / "ratings.dat", text), num_clicked=1, num_negatives=1)
    (batch,) = read(dataset, "test", batch_size=1)
    assert batch.dense["now"].tolist() == [105] and batch.dense["timestamps"].to_lists() == [[100, 101, 102, 103, 104]]
    for epoch in range(5):
        (batch,) = read(dataset, "train", batch_size=1, epoch=epoch)
        assert batch.dense["now"].tolist() == [100 + len(batch.keys["history"].values)]


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_every_training_item_with_one_before_it_is_a_pair_with_its_user(path):
    dataset = Sequences(path=path, max_length=1, pairs=True)
    assert dataset.features == ("history", "target")
    # (history, target, user): the last two items of users 7 and 8 are held out; of user 5 nothing has one before it
    expected = [((10,), (11,), 7), ((11,), (12,), 7), ((17,), (18,), 9)]
    assert sorted(read_samples(dataset, "train", batch_size=2)) == expected
    assert Sequences(path=path, pairs=True).epoch("train", seed=0, epoch=0).size == 3
    longer = read_samples(Sequences(path=path, max_length=5, pairs=True), "train", batch_size=3)
    assert sorted(longer) == [((10,), (11,), 7), ((10, 11), (12,), 7), ((17,), (18,), 9)]


def test_pairs_that_are_judged_have_the_held_out_item_and_all_that_was_seen(path):
    dataset = Sequences(path=path, max_length=2, pairs=True)
    # (history, target, seen, user, label)
    assert read_samples(dataset, "valid", batch_size=2) == [
        ((11, 12), (13,), (10, 11, 12), 7, 13),
        ((11,), (15,), (11,), 8, 15),
    ]
    assert read_samples(dataset, "test", batch_size=5) == [
        ((12, 13), (14,), (10, 11, 12, 13), 7, 14),
        ((11, 15), (16,), (11, 15), 8, 16),
    ]


def test_pairs_know_how_popular_their_target_is_among_training_events(path):
    dataset = Sequences(path=path, pairs=True, log_q=True)
    shares = {11: 2 / 7, 12: 1 / 7, 18: 1 / 7}
    for _, (target,), _, log_q in read_samples(dataset, "train", batch_size=2):
        assert log_q == pytest.approx(math.log(shares[target]), rel=1e-6)
    (batch,) = read(dataset, "valid", batch_size=2)
    assert batch.dense["log_q"].exp().tolist() == pytest.approx([1 / 7, 1 / 7])  # as an item of one event


def flat(batches):
    return sorted(sample for batch in batches for sample in batch)


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_pairs_do_not_depend_on_the_world_and_lengths_are_known_beforehand(split):
    lengths = torch.arange(30) % 7 + 1
    store = Histories(torch.arange(30).numpy(), torch.arange(int(lengths.sum())).numpy(), offsets_of(lengths.numpy()))
    dataset = HistoryDataset(store, max_length=3, num_negatives=0, pairs=True)
    alone = global_batches(dataset, split, batch_size=6, world=1, seed=2, epoch=1)
    assert global_batches(dataset, split, batch_size=3, world=2, seed=2, epoch=1) == alone
    assert sum(map(len, alone)) == len({sample[1] for batch in alone for sample in batch}) > 12  # each target once
    epoch = dataset.epoch(split, seed=2, epoch=1)
    places = torch.arange(epoch.size).numpy()
    assert epoch.lengths(places).tolist() == epoch.make(places).keys["history"].lengths.tolist()
    if split == "train":
        again = global_batches(dataset, split, batch_size=6, world=1, seed=2, epoch=2)
        assert again != alone and flat(again) == flat(alone)


def test_users_whose_names_are_no_numbers_are_told_apart_all_the_same():
    names = np.array(["ann", "bob"])
    dataset = HistoryDataset(
        Histories(names, np.arange(10), np.array([0, 5, 10])), max_length=3, num_negatives=0, pairs=True
    )
    (batch,) = read(dataset, "train", batch_size=9)
    users = dict(zip(batch.keys["target"].values.tolist(), batch.dense["user"].tolist(), strict=True))
    assert users[1] == users[2] != users[6] == users[7]
    (batch,) = read(dataset, "test", batch_size=9)
    assert "user" not in batch.dense and batch.labels.tolist() == [4, 9]


def test_pairs_and_lists_of_candidates_exclude_each_other(path):
    with pytest.raises(ValueError, match="num_clicked makes lists of candidates, pairs single targets"):
        Sequences(path=path, pairs=True, num_clicked=2)

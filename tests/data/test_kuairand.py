import math
from pathlib import Path

import pytest

from nestpipe.data import KuaiRand, KuaiRandSequences
from tests.data.data_samples import all_ranks, read, read_samples

HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)


def line(user, video, *, hourmin=1530, time_ms=0, click=1, like=0, duration=9_000, tab=1) -> str:
    return f"{user},{video},20220408,{hourmin},{time_ms},{click},{like},0,0,0,0,0,100,{duration},0,0,0,0,{tab}\n"


@pytest.fixture
def folder(tmp_path):
    for part in range(3):
        lines = [line(n % 5, n, click=n % 2) for n in range(part * 40, part * 40 + 40)]
        (tmp_path / f"log_standard_{part}.csv").write_text(HEADER + "".join(lines))
    return tmp_path


def test_an_event_becomes_a_click_sample(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(HEADER + line(3, 70, hourmin=5, like=1, click=0) + line(4, 71, hourmin=2359, tab=6))
    dataset = KuaiRand(path=str(path), valid=str(path), label="is_like")
    batch = next(read(dataset, "valid", batch_size=4))
    assert {name: jagged.to_lists() for name, jagged in batch.keys.items()} == {
        "user": [[3], [4]],
        "video": [[70], [71]],
        "tab": [[1], [6]],
        "hour": [[0], [23]],
    }
    assert batch.dense["dense"][:, 0].tolist() == pytest.approx([math.log(10)] * 2)
    assert batch.labels.tolist() == [1, 0]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_event_is_in_one_split_on_one_rank(folder, world):
    dataset = KuaiRand(path=str(folder / "log_standard_*.csv"), block_bytes=300)
    seen = [s for split in ("train", "valid", "test") for s in all_ranks(dataset, split, world=world, batch_size=7)]
    assert sorted(sample[1] for sample in seen) == [(video,) for video in range(120)]


def test_seed_and_epoch_change_the_order(folder):
    dataset = KuaiRand(path=str(folder / "*.csv"), shuffle_buffer=50)
    orders = [
        read_samples(dataset, "train", batch_size=9, seed=s, epoch=e) for s, e in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_sequences_hold_the_positive_events_in_order_of_time(tmp_path):
    path = tmp_path / "log.csv"
    events = [
        (1, 10, 5_000, 1),
        (2, 50, 1_000, 1),
        (1, 11, 2_999, 1),
        (1, 12, 2_000, 1),
        (1, 13, 9_000, 1),
        (1, 14, 1, 0),
    ]
    path.write_text(HEADER + "".join(line(u, v, time_ms=t, click=c) for u, v, t, c in events))
    dataset = KuaiRandSequences(path=str(path), num_negatives=0)
    assert read_samples(dataset, "test", batch_size=4) == [((12, 11, 10), (), (2, 2, 5), (12, 11, 10), 1, 13)]
    assert dataset.candidates().tolist() == [10, 11, 12, 13, 50]
    with pytest.raises(ValueError, match="no row with is_like = 1"):
        KuaiRandSequences(path=str(path), positive="is_like")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(1, 2, click=3), r"log.csv, line 3: is_click is 3, not 0 or 1"),
        (line(1, "video"), r"line 3: video_id is 'video', not an integer"),
        (line("", 5), r"line 3: user_id is '', not an integer"),
        (line(2**63, 5), r"line 3: user_id is '9223372036854775808', not an integer of 64 bits"),
        ("1,2,3\n", r"line 3: 3 columns instead of 19; if the file was cut off there, complete the row or cut it off"),
        ("\n", r"line 3: 1 columns instead of 19"),
    ],
)
def test_a_bad_row_is_named_by_line_and_value(tmp_path, bad, message):
    path = tmp_path / "log.csv"
    path.write_text(HEADER + line(1, 1) + bad + line(2, 2))
    with pytest.raises(ValueError, match=message):
        read_samples(KuaiRand(path=str(path), valid=str(path)), "valid", batch_size=2)
    with pytest.raises(ValueError, match=message):
        KuaiRandSequences(path=str(path))


def test_a_file_without_the_columns_or_cut_off_is_refused_at_once(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("user_id,video_id\n1,2\n")
    with pytest.raises(ValueError, match="line 1: no column 'tab' in the header"):
        KuaiRand(path=str(path))
    path.write_text(HEADER + line(1, 1).strip())
    with pytest.raises(ValueError, match="ends in the middle of line 2"):
        KuaiRand(path=str(path))


@pytest.mark.parametrize("header", [b"\ruser_id,video_id,time_ms,is_click", b'"user_id', b"\0"])
def test_a_first_line_that_is_no_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(header + b"\n1,2,10,1\n")
    with pytest.raises(ValueError, match=r"log\.csv, line 1: "):
        KuaiRandSequences(path=str(path))

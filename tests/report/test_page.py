"""The page: what is on it, that no text of a file becomes markup, what bad input is told; and that a browser shows it."""

from __future__ import annotations

import html.parser
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from nestpipe.cli import main
from nestpipe.report import charts, markup, render, write
from nestpipe.report.axes import Axis
from nestpipe.report.shares import PARTS, shares
from nestpipe.report.sources import read_all
from nestpipe.report.timeline import MAX_EVENTS, NIGHT, PAPER, STEPS, contrast, payload
from nestpipe.sections import Bars, Curves, Table, to_json
from nestpipe.trace import Event, RankTrace, save
from tests.report.browser import CHROMIUM, Browser

MS = 1_000_000
BAD = "<script>alert(1)</script>"
CSS = (Path(charts.__file__).parent / "page.css").read_text()


def make_trace(*, rank=0, world=2, steps=40, parts=2, lane="comm", op="EMB") -> RankTrace:
    """A step: 2 ms of EMB that nothing hides, `parts` times 6 ms of compute that hide 3 ms of GRAD, 1 ms of UPDATE."""
    events, now = [], 0
    for batch in range(steps):
        events.append(Event(1, op, batch, 0, now, now + 2 * MS))
        now += 2 * MS
        for part in range(parts):
            events.append(Event(0, "FWD", batch, part, now, now + 2 * MS))
            events.append(Event(1, "GRAD", batch, part, now + MS, now + 4 * MS))
            events.append(Event(0, "BWD", batch, part, now + 2 * MS, now + 6 * MS))
            now += 6 * MS
        events.append(Event(0, "UPDATE", batch, None, now, now + MS))
        now += MS
    return RankTrace(rank, world, "nested", "compute ...", ["compute", lane], 0, events)


def make_run(folder: Path, *, schedule="nested", traced=True, **trace) -> Path:
    folder.mkdir(parents=True)
    result = {"schedule": schedule, "micro_batches": 2, "workers": 2, "steps": 40, "samples": 4000, "seconds": 2.0,
              "samples_per_second": 2000.0, "first_loss": 0.7, "last_loss": 0.25, "skipped_batches": 0,
              "metrics": {"AUC": 0.75, "NE": None}, "digest": "54fd70e8b339", "bytes_sent": 8_000_000,
              "tables": {"item": {"rows": 20_000, "bytes": 5_855_360, "bytes_per_row": 292.768}}}  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.json").write_text(json.dumps({"schedule": {"clustering": "window"}, "model": {"kind": "hstu"}}))
    for rank in range(2 if traced else 0):
        save(folder, make_trace(rank=rank, **trace))
    return folder


def make_bench(path: Path, *sections, **entries) -> Path:
    values = {"suite": "ablation", "quick": False, "command": "nestpipe bench ablation", "machine": {"cores": 2},
              "sections": to_json(sections), "results": {}}  # fmt: skip
    path.write_text(json.dumps({**values, **entries}))
    return path


SECTIONS = (
    Table("A table", ["schedule", "step ms"], [["serial", "324.5"], ["nested", "196"]], "**Emulated** by `sleep`."),
    Bars("A step", "ms", ["serial", "nested"], {"compute": [200, 190], "exposed communication": [100, 10]},
         {"longest lane": [300, 190]}, "Compute *sleeps*."),
    Curves("Over workers", "workers", "samples/s", [1, 2, 4, 8], {"nested": [10, 19, 37, 70], "dbp": [9, None, 20, 30]}),
)  # fmt: skip


class Parsed(html.parser.HTMLParser):
    """Counts elements; fails on one that is not closed. `text` is what a reader sees, scripts and style left out."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.text, self.attributes, self._open = "", [], []
        self.feed(page)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.elements[tag] += 1
        self.attributes += attrs
        if tag not in ("meta", "line", "path", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements[tag] += 1

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data):
        if self._open[-1:] not in (["script"], ["style"]):
            self.text += data


# Contents


def test_a_run_shows_its_figures_tables_and_timeline(tmp_path):
    page = Parsed(write([make_run(tmp_path / "mine")]).read_text())
    for text in ("mine", "2,000", "0.2500", "0.7500", "20,000", "5.86 MB", "54fd70e8b339", "nested, 2 micro-batches",
                 "The middle 20 of 40 recorded steps", "exposed communication", "2.00 ms", "window"):  # fmt: skip
        assert text in page.text, text
    assert page.elements["canvas"] == 1
    assert page.elements["nav"] == 0  # a single source needs no contents


def test_a_run_that_was_not_recorded_says_how_to_record_one(tmp_path):
    page = Parsed(write([make_run(tmp_path / "mine", traced=False)]).read_text())
    assert "--trace" in page.text and page.elements["canvas"] == 0


def test_a_loss_curve_comes_from_the_newest_curves_of_the_run(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    folder = make_run(tmp_path / "mine", traced=False)
    for run, loss in enumerate((5.0, 0.5)):
        with SummaryWriter(str(folder / "tensorboard"), filename_suffix=f".{run}") as writer:
            for step in range(3):
                writer.add_scalar("train/loss", loss - step / 10, step)
    (run,) = read_all([folder])
    assert run.curves["train/loss"] == [(0, 0.5), (1, pytest.approx(0.4)), (2, pytest.approx(0.3))]
    assert "Training loss" in Parsed(render([run])).text


def test_a_resumed_run_shows_all_of_itself(tmp_path):
    """Ten steps; killed; resumed after the fifth, which the checkpoint had; thirteen in all."""
    from torch.utils.tensorboard import SummaryWriter

    folder = make_run(tmp_path / "mine")
    for first, last, loss in ((1, 10, 5.0), (6, 13, 0.5)):
        with SummaryWriter(str(folder / "tensorboard"), filename_suffix=f".{first}") as writer:
            for step in range(first, last + 1):
                writer.add_scalar("train/loss", loss, step, walltime=100.0 * first + 2 * step)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(
        json.dumps({**result, "steps": 13, "session_steps": 8, "samples": 800, "resumed_after": 5})
    )
    (run,) = read_all([folder])
    assert run.curves["train/loss"] == [(step, 5.0 if step < 6 else 0.5) for step in range(1, 14)]
    assert [(start.first_step, start.last_step, start.seconds) for start in run.starts] == [(1, 5, 8.0), (6, 13, 14.0)]
    text = Parsed(render([run])).text
    for piece in ("resumed after step 5", "earlier ones is not kept", "13, 8 of them since the last start",
                  "about 1,300, 800 of them", "from 5.0000", "Starts", "1 to 13", "22 s"):  # fmt: skip
        assert piece in text, piece
    assert "resumed" not in Parsed(write([make_run(tmp_path / "once")]).read_text()).text


def test_a_run_that_has_not_finished_shows_what_it_has_written(tmp_path):
    folder = make_run(tmp_path / "mine")
    (folder / "result.json").unlink()
    text = Parsed(write([folder]).read_text()).text
    assert "has not finished" in text and "What to change" in text and "nested, 2 micro-batches, 2 workers" in text


def test_no_two_tiles_have_the_same_name(tmp_path):
    folder = make_run(tmp_path / "mine")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "metrics": {"loss": 0.3}}))
    (folder / "config.json").write_text(json.dumps({"train": {"eval_split": "test"}}))
    names = re.findall(r"<dt>([^<]+)</dt>", write([folder]).read_text())
    assert len(set(names)) == len(names) and {"training loss", "loss (test)"} <= set(names)


def test_a_bench_shows_its_sections_with_their_notes(tmp_path):
    page = write([make_bench(tmp_path / "a.json", *SECTIONS, quick=True)]).read_text()
    text = Parsed(page).text
    for piece in ("bench ablation", "nestpipe bench ablation", "cores 2", "not how fast", "A table", "324.5", "Emulated",
                  "A step", "300 ms", "longest lane", "sleeps", "Over workers", "logarithmic"):  # fmt: skip
        assert piece in text, piece
    assert "<strong>Emulated</strong> by <code>sleep</code>" in page
    widths = [float(width) for width in re.findall(r'<b class="\w+" style="width:([\d.]+)%', page)]
    assert widths == pytest.approx([66.67, 33.33, 63.33, 3.33])
    assert re.findall(r'class="mark m0" style="left:([\d.]+)%', page) == ["100.00", "63.33"]
    broken = re.search(r'class="line s1"><path d="([^"]+)"', page)
    assert broken and broken[1].count("M") == 2  # a value is missing: the line has a gap


def test_several_sources_have_contents_and_a_comparison_with_serial(tmp_path):
    runs = [make_run(tmp_path / "b", schedule="nested"), make_run(tmp_path / "a", schedule="serial")]
    page = write([*runs, make_bench(tmp_path / "c.json", *SECTIONS)], out=tmp_path / "all.html").read_text()
    parsed = Parsed(page)
    anchors = re.findall(r'href="#([\w-]+)"', page)
    assert anchors == ["comparison", "source-1", "source-2", "source-3"]
    assert all(f'id="{anchor}"' in page for anchor in anchors)
    assert "2 runs and 1 bench" in parsed.text and "Speed-up over serial, 2 micro-batches" in parsed.text
    assert "same digest" in parsed.text
    assert parsed.elements["canvas"] == 2


def test_runs_of_the_same_name_and_schedule_are_told_apart(tmp_path):
    text = Parsed(write([make_run(tmp_path / one / "run") for one in "ab"], out=tmp_path / "x.html").read_text()).text
    assert "nested, 2 micro-batches (a/run)" in text and "nested, 2 micro-batches (b/run)" in text


def test_a_comparison_says_when_runs_differ_in_more_than_their_schedule(tmp_path):
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", schedule="serial", traced=False)
    result = json.loads((other / "result.json").read_text())
    (other / "result.json").write_text(json.dumps({**result, "workers": 4, "digest": "another"}))
    text = Parsed(write([one, other], out=tmp_path / "x.html").read_text()).text
    assert "differ in more than their schedule: workers" in text.replace("\n", " ")
    assert "Digests differ" in text and "not all were recorded" in text


@pytest.mark.parametrize(
    ("op", "parts"),
    [
        ("EMB", (13, 0, 2, 0, 0)),
        ("RETRIEVE", (13, 0, 0, 2, 0)),
        ("REDUCE", (13, 0, 2, 0, 0)),
        ("UPDATE", (15, 0, 0, 0, 0)),
    ],
)
def test_what_a_step_goes_to_adds_up_to_it(tmp_path, op, parts):
    """Of 15 ms: 13 of compute, and 2 of an operation that nothing hides; GRAD is hidden."""
    (run,) = read_all([make_run(tmp_path / "mine", op=op)])
    measured = shares(run)
    assert [measured[name] for name in PARTS] == pytest.approx(parts) and sum(parts) == 15


# Timeline


def test_a_timeline_has_the_middle_steps_and_what_is_exposed_of_each_operation():
    data = payload([make_trace(steps=60)])
    assert [step[0] for step in data["steps"]] == list(range(20, 20 + STEPS))
    assert data["span"] == pytest.approx(20 * 15_000)
    emb, grad = (data["ops"].index(op) for op in ("EMB", "GRAD"))
    (rank,) = data["ranks"]
    assert {tuple(event[5:]) for event in rank["events"] if event[1] == emb} == {(2000.0, 2000.0)}
    assert {tuple(event[5:]) for event in rank["events"] if event[1] == grad} == {(3000.0, 0.0)}
    assert all(end - begin == 2000 for begin, end in rank["gaps"]) and len(rank["gaps"]) == STEPS
    assert [event[4] for event in rank["events"]] == sorted(event[4] for event in rank["events"])


def test_a_timeline_has_fewer_steps_where_a_step_has_very_many_operations():
    data = payload([make_trace(steps=12, parts=800)])
    assert 1 <= len(data["steps"]) < 8
    assert len(data["ranks"][0]["events"]) <= MAX_EVENTS + 10


def test_operations_stand_out_from_paper_and_night():
    data = payload([make_trace(op="ANOTHER")])
    for ground, colours in ((PAPER, data["light"]), (NIGHT, data["dark"])):
        for _, edge in colours:
            assert contrast(_channels(edge), _channels(ground)) >= 3


def test_text_and_charts_have_contrast_in_both_palettes():
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in CSS.split("@media")[:2])
    for palette in (light, {**light, **dark}):
        for text in ("ink", "quiet", "accent"):
            for ground in ("paper", "ground"):
                assert contrast(_channels(palette[text]), _channels(palette[ground])) >= 4.5, (text, ground)
        for part in (*(f"s{number}" for number in range(8)), "communication", "lookup", "exposed", "hidden", "idle"):
            assert contrast(_channels(palette[part]), _channels(palette["paper"])) >= 3, part
            inside = palette.get(f"on-{part}", palette["on"])
            assert contrast(_channels(inside), _channels(palette[part])) >= 4.5, part
        assert contrast(_channels(palette["tip"]), _channels(palette["tip-ink"])) >= 7


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


# Markup


def test_no_text_of_a_file_becomes_markup(tmp_path):
    good = Parsed(write([make_bench(tmp_path / "good.json", *SECTIONS)]).read_text())
    bad = [
        Table(
            BAD, [BAD, "b"], [[BAD, "1"], ["x", f"`{BAD}`"]], f"{BAD} **{BAD}** [{BAD}](https://x.org/{BAD}) </script>"
        ),
        Bars(BAD, BAD, [BAD, "b"], {BAD: [1, 2], "compute": [3, 4]}, {BAD + "!": [1, 1]}, BAD),
        Curves(BAD, BAD, BAD, [1, 2, 4, 8], {BAD: [1, 2, 3, 4], "</script><!--": [1, 2, 3, 4]}, BAD),
    ]
    path = make_bench(tmp_path / "bad.json", *bad, command=BAD, suite=BAD, machine={BAD: BAD})
    page = Parsed(write([path], title=BAD).read_text())
    assert page.elements["script"] == good.elements["script"] == 2  # the page's own, and the data of one chart
    assert page.text.count("alert(1)") > 10

    run = make_run(tmp_path / "<b>run", lane="</script>", op=BAD)
    result = json.loads((run / "result.json").read_text())
    result |= {"schedule": BAD, "digest": BAD, "tables": {BAD: {}}, "metrics": {BAD: 1.0}}
    (run / "result.json").write_text(json.dumps(result))
    (run / "config.json").write_text(json.dumps({"data": BAD}))
    page = Parsed(write([run]).read_text())
    assert page.elements["script"] == 2 and page.elements["b"] == good_parts(page)


def good_parts(page: Parsed) -> int:
    """How many <b> are parts of bars."""
    return sum(name == "style" and value.startswith("width:") for name, value in page.attributes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a **b** `c*d*` *e* 2*3*4", "a <strong>b</strong> <code>c*d*</code> <em>e</em> 2*3*4"),
        ("[x & y](https://a.org/?b=1&c)", '<a href="https://a.org/?b=1&amp;c" rel="noreferrer">x &amp; y</a>'),
        ("[docs](docs/a.md), [no](javascript:x)", "docs, no"),
        ('"<i>"', "&quot;&lt;i&gt;&quot;"),
    ],
)
def test_a_little_markdown_is_understood(text, expected):
    assert markup.inline(text) == expected


def test_notes_have_paragraphs_and_lists():
    assert markup.paragraphs("a\nb\n\nc:\n- d\n  e\n- f") == "<p>a b</p><p>c:</p><ul><li>d e</li><li>f</li></ul>"
    assert markup.paragraphs(" ") == ""


@pytest.mark.parametrize(("value", "text"), [(None, "\N{EN DASH}"), (float("nan"), "\N{EN DASH}"), (3.0, "3"), (1234.5, "1,234"),
                                             (12.34, "12.3"), (0.01234, "0.0123"), (1.5e-6, "1.50e-06")])  # fmt: skip
def test_figures_have_three_digits_that_count(value, text):
    assert markup.figure(value) == text


@pytest.mark.parametrize(
    ("values", "zero", "log", "texts"),
    [
        ([1, 2, 4, 8, 16], False, True, ["1", "2", "4", "8", "16"]),
        ([0, 1, 2, 3], False, False, ["0", "1", "2", "3"]),
        ([2.8, 6.7], True, False, ["0", "2", "4", "6", "8"]),
        ([90, 100], True, False, ["90", "95", "100"]),
        ([5.0], True, False, ["0", "5", "10"]),
        ([0.0], True, False, ["-0.5", "0.0", "0.5"]),
        ([10, 2_000_000], True, True, ["10", "100", "1,000", "10k", "100k", "1M"]),
    ],
)
def test_an_axis_has_round_numbers(values, zero, log, texts):
    axis = Axis.of(values, zero=zero)
    assert axis.log == log and [text for _, text in axis.ticks] == texts
    assert all(0 <= axis.place(value) <= 1 for value in values)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place, _ in axis.ticks)


def test_parts_of_one_meaning_have_one_colour_and_no_two_parts_the_same():
    colours = charts.part_colours(dict.fromkeys(["compute", "exposed communication", "other", "idle", "communication"]))
    assert colours["compute"] == "compute" and colours["exposed communication"] == "communication"
    assert len(set(colours.values())) == 5


# Files and errors


def test_the_page_needs_nothing_but_itself(tmp_path):
    page = write([make_run(tmp_path / "mine"), make_bench(tmp_path / "c.json", *SECTIONS)], out=tmp_path / "x.html")
    text = page.read_text()
    assert not re.search(r"https?://|@import|url\(|\bsrc=|<link", text)
    assert "default-src 'none'" in text
    assert str(tmp_path) not in text


def test_the_command_writes_the_page_and_says_where_it_is(tmp_path, capsys):
    folder = make_run(tmp_path / "mine")
    with pytest.raises(SystemExit) as left:
        main(["report", str(folder), "--title", "A & B"])
    assert left.value.code == 0
    told = capsys.readouterr().out
    assert str(folder / "report.html") in told and (folder / "report.html").as_uri() in told
    assert "<title>A &amp; B</title>" in (folder / "report.html").read_text()
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, r"x\.json does not exist"),
        ("{", r"x\.json cannot be read as JSON"),
        ("[1]", r"x\.json is not what nestpipe writes"),
        ('{"a": 1}', r"x\.json was not written by `nestpipe bench"),
        ('{"digest": "a", "schedule": "b"}', r"x\.json .* give its run folder"),
        ('{"suite": "kernels", "results": {}}', r"x\.json has no sections .* run `nestpipe bench kernels --json .* again"),
        ('{"suite": "k", "sections": [{"kind": "pie"}]}', r"x\.json: not a section .* run `nestpipe bench k"),
        ('{"suite": "k", "sections": [3]}', r"x\.json: not a section"),
        ('{"suite": "k", "sections": [{"kind": "table", "title": "t", "columns": ["a"], "rows": [["1", "2"]]}]}',
         r"x\.json: section 't': row 0 must have 1 values"),
        ('{"suite": "k", "sections": [{"kind": "bars", "title": "t", "unit": "", "labels": ["a"], "parts": {"p": ["1"]}}]}',
         r"x\.json: section 't': p must be numbers"),
    ],
)  # fmt: skip
def test_what_is_not_a_bench_is_told_with_its_file(tmp_path, content, told):
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=told):
        write([tmp_path / "x.json"])
    assert not (tmp_path / "x.html").exists()


def test_a_folder_that_is_no_finished_run_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"has no result\.json: .*nestpipe train"):
        write([tmp_path])
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"result\.json has no entry 'schedule'"):
        write([tmp_path])


def test_a_page_cannot_be_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"it is a folder; give --out a file name"):
        write([make_bench(tmp_path / "a.json")], out=tmp_path)


# In a browser


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome")
def test_a_browser_shows_the_page_and_its_timeline_can_be_zoomed(tmp_path):
    long = "nested, no window cache, clustering shared, a_name_that_cannot_be_broken_anywhere_at_all, sessions"
    wide = [
        Table("Wide", [f"column {n}" for n in range(12)], [[long, *["1234.5"] * 11]] * 20),
        Bars("Long", "ms", [long] * 3, {"compute": [1, 2, 3], long: [1, 1, 1]}, {"longest lane": [2, 2, 2]}),
        Curves(
            "Many",
            "workers",
            "y",
            [8, 64, 512, 4096],
            {f"{long} {n}": [n, n * 10, n * 99, n * 1e6] for n in range(1, 9)},
        ),
    ]
    runs = [make_run(tmp_path / long[:60]), make_run(tmp_path / "serial", schedule="serial")]
    path = write([*runs, make_bench(tmp_path / "c.json", *SECTIONS, *wide)], out=tmp_path / "all.html")
    with Browser() as browser:
        browser.window(1200, 900)
        browser.open(path)
        _check_mouse_and_keys(browser)
        _check_curve(browser)
        for width in (360, 768, 1200):
            browser.window(width, 800, phone=width < 500, dark=width == 360)
            browser.settle()
            assert browser.run("document.documentElement.scrollWidth") == width
        browser.window(360, 800, phone=True, dark=True)
        browser.open(path)
        _check_fingers(browser)
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
        assert browser.troubles() == []


def _view(browser: Browser) -> tuple[float, float]:
    """From when until when the first timeline shows, in microseconds."""
    browser.settle()
    begin, end, drawn = browser.run(
        "(({from, to, drawn}) => [from, to, drawn])(document.querySelector('canvas').dataset)"
    )
    assert int(drawn) > 0
    return float(begin), float(end)


def _canvas(browser: Browser) -> tuple[float, float]:
    """Where the first timeline's upper left corner is, after scrolling to it."""
    browser.run("document.querySelector('.timeline').scrollIntoView()")
    browser.run("new Promise((done) => setTimeout(done, 300))")  # a wheel right after scrolling goes on scrolling
    box = browser.run("(({left, top}) => [left, top])(document.querySelector('canvas').getBoundingClientRect())")
    return box[0], box[1]


def _tip(browser: Browser) -> str:
    browser.settle()
    return browser.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")


def _check_mouse_and_keys(browser: Browser) -> None:
    left, top = _canvas(browser)
    begin, end = _view(browser)
    assert end - begin == pytest.approx(3 * 15_000)  # three steps at first
    x, y = left + 500, top + 70
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
    near, far = _view(browser)
    assert begin < near < far < end
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    for moved in (30, 60, 100):
        browser.mouse("mouseMoved", x + moved, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 100, y, button="left", clickCount=1)
    dragged = _view(browser)
    assert dragged[0] < near and dragged[1] - dragged[0] == pytest.approx(far - near, abs=1)

    browser.run("document.querySelector('[data-do=all]').click()")
    assert _view(browser) == (0, 20 * 15_000)
    browser.run("document.querySelector('canvas').focus()")
    for _ in range(3):
        browser.key("+")
    begin, end = _view(browser)
    assert end - begin == pytest.approx(20 * 15_000 / 8, abs=1)
    browser.key("ArrowRight", shift=True)
    assert _view(browser)[0] > begin
    browser.key("ArrowDown")  # the first key chooses an operation in the compute lane, the next one goes down
    browser.key("ArrowDown")
    for _ in range(9):
        if "EMB" in _tip(browser):
            break
        browser.key("ArrowRight")
    assert re.search(
        r"EMB, batch \d+, micro-batch 0\n2.00 ms\nexposed: 2.00 ms \(100%\)\nlane comm, rank 0", _tip(browser)
    )
    browser.key("Escape")
    assert _tip(browser) == ""


def _check_curve(browser: Browser) -> None:
    browser.run("document.querySelector('.plot').scrollIntoView({block: 'center'})")
    browser.settle()
    area = "document.querySelector('.area').getBoundingClientRect()"
    left, top, width = browser.run(f"(({{left, top, width}}) => [left, top, width])({area})")
    browser.mouse("mouseMoved", left + 0.65 * width, top + 40)
    assert _tip(browser) == "workers 4\nnested: 37\ndbp: 20"


def _check_fingers(browser: Browser) -> None:
    left, top = _canvas(browser)
    begin, end = _view(browser)
    x, y = left + 180, top + 70
    browser.touch("touchStart", (x - 20, y), (x + 20, y))
    for apart in (30, 45, 60):
        browser.touch("touchMove", (x - apart, y), (x + apart, y))
    browser.touch("touchEnd")
    near, far = _view(browser)
    assert begin < near < far < end
    browser.touch("touchStart", (x, y))
    for moved in (20, 40, 60):
        browser.touch("touchMove", (x - moved, y))
    browser.touch("touchEnd")
    assert _view(browser)[0] > near
    browser.touch("touchStart", (x, y))
    browser.touch("touchEnd")
    assert re.match(r"(FWD|BWD|UPDATE), batch", _tip(browser))

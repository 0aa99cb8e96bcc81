"""Tables of benches: text for the eye, numbers for programs, both in one file."""

from __future__ import annotations

import json
from pathlib import Path

from nestpipe.files import write_json
from nestpipe.sections import Table, from_json, markdown, shown, shown_list, to_json


def test_a_table_keeps_the_numbers_that_its_cells_show(tmp_path: Path) -> None:
    row = [
        "nested",
        shown("{:.2f}x", 3.0912),
        shown("{:,.1f} of {:,.1f}", 628.94, 1628.94),
        shown_list("{:.1%}", [0.5, 0.25]),
        shown("1.2 GB", 1.2e9),
        shown("{:,}", 1536),
        "",
    ]
    table = Table("what was found", ("a", "b", "c", "d", "e", "f", "g"), [row])
    write_json(tmp_path / "table.json", to_json([table]))
    (written,) = json.loads((tmp_path / "table.json").read_text())
    assert written["rows"] == [["nested", "3.09x", "628.9 of 1,628.9", "50.0% / 25.0%", "1.2 GB", "1,536", ""]]
    assert written["values"] == [["nested", 3.0912, [628.94, 1628.94], [0.5, 0.25], 1.2e9, 1536, None]]
    back = from_json([written])
    assert markdown(back) == markdown([table]) and to_json(back) == [written]


def test_a_table_of_text_alone_as_an_older_version_wrote_it_is_read() -> None:
    (table,) = from_json([{"kind": "table", "title": "t", "columns": ["a"], "rows": [["3.09x"]], "note": ""}])
    assert isinstance(table, Table) and table.rows == [["3.09x"]]

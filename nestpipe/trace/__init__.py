"""What ran when: recorded operations as a Perfetto file, a picture and a table.

`record` is the file format that the engine writes and everything here reads; `times` says how long each lane was
busy, idle and exposed, `ranks` what they waited for each other; `chrome` and `picture` make the files that one looks
at; `printout` does it all for a run.
"""

from nestpipe.schedule.ops import COMPUTE
from nestpipe.trace.chrome import to_chrome
from nestpipe.trace.picture import draw
from nestpipe.trace.printout import describe, report
from nestpipe.trace.record import Event, RankTrace, clear, read, save, wall_offset_ns
from nestpipe.trace.times import LaneTime, OpTime, RankSummary, summary

__all__ = [
    "COMPUTE",
    "Event",
    "LaneTime",
    "OpTime",
    "RankSummary",
    "RankTrace",
    "clear",
    "describe",
    "draw",
    "read",
    "report",
    "save",
    "summary",
    "to_chrome",
    "wall_offset_ns",
]

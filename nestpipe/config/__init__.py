"""A run described in TOML: sections [data] [model] [tables.NAME] [train] [schedule].

`sections` says what may stand in each, with types and limits; `read` gives a Config of plain values, all checked; `build` makes
the objects; `kinds` finds the class of the data. An entry that nobody knows is an error that names the nearest known one.
"""

from nestpipe.config.build import Built, build
from nestpipe.config.kinds import dataset_class
from nestpipe.config.read import override, parse, read, read_json
from nestpipe.config.sections import Config, TableSection, TrainSection
from nestpipe.kinds import MODELS

__all__ = [
    "MODELS",
    "Built",
    "Config",
    "TableSection",
    "TrainSection",
    "build",
    "dataset_class",
    "override",
    "parse",
    "read",
    "read_json",
]

"""What a data set computes from its training rows (boundaries of buckets, say): it stands in [data] of the run's config, and so
in its checkpoints and bundles, and a run that goes on takes it from there, whatever the files hold by then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nestpipe.checkpoint import Damaged
from nestpipe.checkpoint import manifest as manifests
from nestpipe.config.kinds import dataset_class
from nestpipe.config.sections import Config
from nestpipe.exchange.workers import Workers


def note_fitted(config: Config, data: Any) -> None:
    """Writes it into the config: the arguments that `data.fits` names, as the data has them."""
    config.data.update({name: getattr(data, name) for name in getattr(data, "fits", ())})


def take_fitted(config: Config, checkpoints: Iterable[Path]) -> None:
    """From the first of the checkpoints that can be read; ValueError if this config declares something else."""
    names = getattr(dataset_class(config.data), "fits", ())
    for path in checkpoints if names else ():
        try:
            saved = (manifests.read(path).settings.config or {}).get("data", {})
        except Damaged:
            continue  # whoever loads it says so
        for name in names:
            declared = config.data.get(name)
            if name not in saved:
                continue
            if declared is not None and not _is_part(declared, saved[name]):
                raise ValueError(
                    f"config: data.{name} is {declared!r:.200}, and {path} was trained with {saved[name]!r:.200}: "
                    f"the same keys would mean something else; leave it as it was, or begin a new run"
                )
            config.data[name] = saved[name]
        return


def check_alike(config: Config, workers: Workers) -> None:
    """ValueError on all workers unless the data has given the same to all of them."""
    names = getattr(dataset_class(config.data), "fits", ())
    everybodys = workers.gather({name: config.data.get(name) for name in names})
    for rank, values in enumerate(everybodys):
        for name, value in values.items():
            if value != everybodys[0].get(name):
                raise ValueError(
                    f"data.{name} is {value!r:.200} on worker {rank} and {everybodys[0].get(name)!r:.200} on worker 0: they read "
                    f"other files; all workers must see the same training files"
                )


def _is_part(declared: Any, saved: Any) -> bool:
    """Whether all that is declared is saved so; entries that were computed may stand beside it."""
    if isinstance(declared, Mapping) and isinstance(saved, Mapping):
        return declared.keys() <= saved.keys() and all(_is_part(declared[name], saved[name]) for name in declared)
    if isinstance(declared, list | tuple) and isinstance(saved, list | tuple):
        return list(declared) == list(saved)
    return bool(declared == saved)

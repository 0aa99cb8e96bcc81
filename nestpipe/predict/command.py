"""What `nestpipe predict` does."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from nestpipe import run
from nestpipe.batch import Batch
from nestpipe.checkpoint import complete, folder_of
from nestpipe.config import Built, Config, dataset_class
from nestpipe.data.dataset import skip
from nestpipe.inference import Recommended
from nestpipe.predict.columns import of_best, of_data, of_scores
from nestpipe.predict.parts import NUMBER, parts_into
from nestpipe.trainer import Trainer

DEALT = 8  # batches in a row that a worker takes: those between are passed over, in files without being parsed
PATIENCE = 86_400.0  # seconds that putting all together may take


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is predicted: on which data, with which checkpoint. catalogue: the items are those of the data, else all that have a
    row."""

    config: Config
    checkpoint: Path
    split: str
    out: Path
    top_k: int | None
    exclude_seen: bool
    catalogue: bool


def asked(config: Config, arguments: argparse.Namespace) -> Asked:
    """Raises ValueError for what cannot be."""
    if arguments.exclude_seen and arguments.top_k is None:
        raise ValueError("--exclude-seen is for --top-k")
    split = config.train.eval_split if config.train.eval_split in ("valid", "test") else "test"
    if arguments.data is not None:
        if arguments.split is not None:
            raise ValueError("--split is of the run's own data; of DATA all rows are taken")
        config, split = _reading(config, arguments.data), "test"
    if arguments.no_labels:
        if "label" not in config.data:
            raise ValueError(f"--no-labels: data.kind {config.data['kind']!r} has no entry `label` in the run's config")
        config = dataclasses.replace(config, data={name: v for name, v in config.data.items() if name != "label"})
    return Asked(
        _as_one_worker(config),
        _checkpoint(config, arguments.run, arguments.checkpoint),
        arguments.split or split,
        arguments.out,
        arguments.top_k,
        arguments.exclude_seen,
        arguments.data is None,
    )


def _as_one_worker(config: Config) -> Config:
    """The same on any number of workers, to the bit: owners that pool bags would add up other parts of them on each."""
    tables = {name: {**entries, "pooled_at": "source"} for name, entries in config.tables.items()}
    return dataclasses.replace(config, tables=tables, setting=dataclasses.replace(config.setting, replicas=1))


def _reading(config: Config, path: str) -> Config:
    """The same run on other files. Where a split can have files of its own, they are those of "test": nothing is held out."""
    known = inspect.signature(dataset_class(config.data)).parameters
    if "path" not in known:
        raise ValueError(
            f"data.kind {config.data['kind']!r} reads no path; leave DATA out, or see --set data.ENTRY=..."
        )
    own = {name: path for name in ("path", "valid", "test") if name in known}
    return dataclasses.replace(config, data={**config.data, **own})


def _checkpoint(config: Config, folder: Path, name: str | None) -> Path:
    places = [folder / (name or (run.BEST if (folder / run.BEST).is_dir() else run.CHECKPOINT))]
    if name is not None:
        step = name.removeprefix("step-")
        name = folder_of(int(step)) if name.startswith("step-") and step.isdecimal() else name
        places += [run.checkpoint_folder(config, folder) / name, folder / run.CHECKPOINTS / name]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        there = sorted(path.name for path in complete(run.checkpoint_folder(config, folder)))
        others = f"; it has {', '.join(there)}: choose one with --checkpoint" if there else ""
        raise ValueError(f"{folder} has no checkpoint {places[0].name!r}{others or ': the run has not finished'}")
    return found


def predict(what: Asked) -> int:
    """Writes the file; returns its number of rows. Every worker calls it."""
    trainer, built = run.make_trainer(what.config, storage=what.out.parent / f".{what.out.name}.storage")
    part = _part(what.out, trainer.rank)
    try:
        trainer.load(what.checkpoint)
        trainer.workers.together(lambda: _make_room(part), what=f"folder {part.parent}")
        written = _write_part(trainer, built, what, part)
        expected = sum(trainer.workers.gather(written))
        parts = [_part(what.out, rank) for rank in range(trainer.world)]
        put_together = functools.partial(parts_into, parts, what.out, expected)
        trainer.workers.wait_for(
            put_together if trainer.rank == 0 else lambda: None, what=f"writing {what.out}", limit=PATIENCE
        )
        return expected
    finally:
        part.unlink(missing_ok=True)
        trainer.close()


def _make_room(part: Path) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    part.unlink(missing_ok=True)  # of a worker that was killed: this one may have no samples, and then writes none


def _part(out: Path, rank: int) -> Path:
    return out.with_name(f".{out.name}.part-{rank}")


def _write_part(trainer: Trainer, built: Built, what: Asked, part: Path) -> int:
    """This worker's rows, batch by batch; returns how many."""
    numbers: collections.deque[int] = collections.deque()  # of batches that have been read and not been told of
    batches = _dealt(built, what, trainer.rank, trainer.world, numbers)
    rows = 0
    with contextlib.ExitStack() as stack:
        writer: pa.ipc.RecordBatchStreamWriter | None = None

        def on_batch(batch: Batch, told: Any) -> None:
            nonlocal writer, rows
            columns = of_best(told) if isinstance(told, Recommended) else of_scores(told, batch, built.model)
            records = pa.RecordBatch.from_pydict({**of_data(batch), **columns})
            if writer is None:
                writer = stack.enter_context(pa.ipc.new_stream(stack.enter_context(part.open("wb")), records.schema))
            writer.write_batch(records, custom_metadata={NUMBER: str(numbers.popleft()).encode()})
            rows += batch.size

        if what.top_k is None:
            trainer.predict(batches, on_batch=on_batch)
        else:
            from_data = what.catalogue and hasattr(built.data, "candidates")
            candidates: Callable[[], Tensor | None] = built.data.candidates if from_data else lambda: None  # type: ignore[attr-defined]
            trainer.recommend(
                batches,
                what.top_k,
                exclude_seen=what.exclude_seen,
                candidates=trainer.workers.wait_for(candidates, what="candidates", limit=what.config.train.timeout),
                on_batch=on_batch,
            )
        trainer.workers.together(stack.close, what=f"writing {part}")  # what is left in buffers: a disk may be full
    return rows


def _dealt(built: Built, what: Asked, rank: int, world: int, numbers: collections.deque[int]) -> Iterator[Batch]:
    settings, number = what.config.train, 0
    batches = iter(
        built.data.batches(what.split, batch_size=settings.eval_batch_size, rank=0, world=1, seed=settings.seed)
    )
    number += skip(batches, rank * DEALT)
    while True:
        taken = 0
        for batch in itertools.islice(batches, DEALT):
            if batch.size:
                numbers.append(number + taken)
                yield batch
            taken += 1
        if taken < DEALT:
            return
        number += taken + skip(batches, (world - 1) * DEALT)

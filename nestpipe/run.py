"""One run from a config: data, trainer, curves, evaluation, result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tqdm import tqdm

from nestpipe import trace
from nestpipe.batch import Batch, Jagged
from nestpipe.checkpoint import Damaged, complete, folder_of
from nestpipe.checkpoint import manifest as manifests
from nestpipe.config import Built, Config, TrainSection, build, dataset_class
from nestpipe.data import Dataset, reader
from nestpipe.data.dataset import skip
from nestpipe.data.epoch import Cut, epoch_of, training_batches
from nestpipe.engine.context import StepResult
from nestpipe.engine.evaluation import judge_losses, judge_ranking
from nestpipe.errors import Stopped, TrainingError, did_you_mean
from nestpipe.exchange.samples import token_feature
from nestpipe.files import check_writable, plain, write_json
from nestpipe.metrics import AUC, GAUC, NDCG, HitRate, ListNDCG, NormalizedEntropy
from nestpipe.process import join_group
from nestpipe.tables import Table
from nestpipe.trainer import FitResult, Trainer

CHECKPOINT = "final"
CHECKPOINTS = "checkpoints"  # those before it, unless train.checkpoints names another folder
NEXT = "final-next"  # what will take its place, complete, until the one before is out of the way
PASSING = 0.01  # of train.timeout, that a resumed run may take for each batch that it passes over
TRIED = 8  # samples that an evaluation is tried with before the training
log = logging.getLogger("nestpipe")


def make_trainer(config: Config, *, storage: Path, record: bool = False) -> tuple[Trainer, Built]:
    join_group(config.train.timeout)
    built = build(config)
    setting = config.setting
    if dealt_by_index(config, built) is not None:  # then there is nothing left to deal
        setting = dataclasses.replace(setting, balance="none")
    if config.train.batch_tokens is not None and token_feature(built.features) is None:
        raise ValueError(
            "config: train.batch_tokens counts the keys of a sequence, and no feature is one; set train.batch_size instead"
        )
    trainer = Trainer(
        built.model,
        built.tables,
        built.features,
        dense_optimizer=built.dense_optimizer,
        **setting.options(),
        seed=config.train.seed,
        on_nonfinite=config.train.on_nonfinite,
        data_timeout=config.train.timeout,
        storage=storage if config.train.storage is None else Path(config.train.storage),
        record=record,
        check_freshness=config.check_freshness,
    )
    trainer.config, trainer.recipe = plain(config.to_dict()), plain(built.recipe)
    # After the model was built: from here on every rank draws its own dropout.
    torch.manual_seed(config.train.seed * 65_537 + trainer.rank)
    return trainer, built


def dealt_by_index(config: Config, built: Built) -> float | None:
    """What the square of a token costs where the data itself deals samples to ranks, because each of them can read it by index;
    None where it does not: samples stay, or travel (DEAL)."""
    if config.setting.squares is None:
        return None
    by_index = epoch_of(built.data, "train", seed=config.train.seed, epoch=0)
    known = by_index is not None and by_index.tokens == token_feature(built.features)
    return config.setting.squares if known else None


def train(
    config: Config, *, folder: Path, json_file: Path | None, record: bool = False, resume: bool = False
) -> dict[str, Any]:
    """Trains, saves, evaluates; returns what `--json` writes. What can be wrong with the evaluation is looked for before the
    training, and what goes wrong after it costs nothing: the last checkpoint is there.

    record: keeps what ran when, for `nestpipe trace`. resume: goes on from the newest sound checkpoint of the run folder, if
    there is one; without it the folder must have no run in it. SIGTERM saves a checkpoint and raises Stopped.
    """
    check_places(config, folder)
    if not resume:
        check_unused(config, folder)
    if _reads_in_process(config):
        reader.prepare()
    trainer, built = make_trainer(config, storage=folder / "storage", record=record)
    with _asked_by_signal(trainer):  # also while it is closed: a launcher ends the others when one leaves
        try:
            return _train(trainer, built, config, folder=folder, json_file=json_file, record=record, resume=resume)
        finally:
            trainer.close()


def _train(
    trainer: Trainer,
    built: Built,
    config: Config,
    *,
    folder: Path,
    json_file: Path | None,
    record: bool,
    resume: bool,
) -> dict[str, Any]:
    first, final, saved = trainer.rank == 0, folder / CHECKPOINT, checkpoint_folder(config, folder)
    # Until `prepare` nothing in the run folder is touched but checkpoints that are damaged: what is refused leaves it as it was.
    try:
        _try_evaluations(trainer, built, config)
    except Stopped:
        raise Stopped("stopped by a signal before the first step; there is nothing to save") from None
    loaded = _resume(trainer, folder, saved) if resume else None
    checkpoints = trainer.checkpoints(saved, keep=config.train.keep_checkpoints, full_every=config.train.full_every)
    begun = trainer.steps
    validate, every = config.train.eval_every, config.train.checkpoint_every
    evaluating = 0.0  # seconds, which do not count as training

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / NEXT).exists():
            _replace_final(folder)
        write_json(folder / "config.json", config.to_dict())

    def save_somewhere() -> Path:
        """Where checkpoints belong, or if that fails in the run folder."""
        name = folder_of(trainer.steps)
        try:
            return _save_once(trainer, saved / name)
        except TrainingError as error:
            if saved == folder / CHECKPOINTS:
                raise
            if first:
                log.warning(f"{saved / name} cannot be saved, {folder / CHECKPOINTS} takes its place: {error}")
            return _save_once(trainer, folder / CHECKPOINTS / name)

    def leave() -> NoReturn:
        """After a signal: with all that was trained on saved."""
        if not trainer.steps:
            raise Stopped("stopped by a signal before the first step; there is nothing to save")
        path = loaded if trainer.steps == begun and loaded is not None else save_somewhere()
        raise Stopped(f"stopped by a signal after step {trainer.steps}; saved to {path}; go on with --resume")

    def judge(split: str) -> dict[str, float] | None:
        """None if a worker is asked to stop meanwhile."""
        try:
            return evaluate_split(trainer, built, config, split)
        except (TrainingError, Stopped):
            if trainer.workers.any(trainer.stop_asked):
                return None
            raise

    def on_step(result: StepResult) -> None:
        nonlocal evaluating
        curves.step(result)
        if config.train.lr_decay == "cosine":
            trainer.scale_lr(_cosine(trainer.steps, config.train.steps or 1))
        if validate and trainer.steps % validate == 0:
            started = time.perf_counter()
            try:
                curves.metrics("valid", judge("valid") or {}, trainer.steps)
            except TrainingError as error:
                if first:
                    log.warning(f"the evaluation after step {trainer.steps} failed, training goes on: {error}")
            took = time.perf_counter() - started
            evaluating += took
            curves.leave_out(took)
        if every and trainer.steps % every == 0:
            trainer.checkpoint(checkpoints)

    tokens, squares = token_feature(built.features), dealt_by_index(config, built)
    what = (built.data, config.train, trainer.rank, trainer.world, trainer.position, tokens, squares)
    steps = None if config.train.steps is None else max(0, config.train.steps - trainer.steps)
    with contextlib.ExitStack() as stack:
        batches: Iterator[Batch] = _epochs(*what)
        reading = stack.enter_context(contextlib.ExitStack())
        if _reads_in_process(config):
            batches = reading.enter_context(reader.in_process(_epochs, *what))
        more = steps != 0
        if trainer.steps and more:  # passing over what it was trained on before may take long
            limit = config.train.timeout * (1 + PASSING * trainer.position)
            try:
                head = trainer.workers.wait_for(lambda: next(batches, None), what="passing over data", limit=limit)
            except Stopped:
                leave()
            batches = itertools.chain([] if head is None else [head], batches)
            more = trainer.workers.any(head is not None)
        finished = loaded == final and not more  # before: all is there, and stays as it is
        if not finished:
            trainer.workers.on_first(prepare, what="run folder")
            loaded = final if loaded == folder / NEXT else loaded
        curves = Curves(folder, enabled=first and not finished, steps=config.train.steps, done=trainer.steps)
        stack.callback(curves.close)
        if trainer.workers.any(trainer.stop_asked):
            leave()
        pauses = [number for number in (validate, every) if number]
        fitted = trainer.fit(batches, steps=steps, on_step=on_step, pause_every=pauses)
        reading.close()
        curves.close_bar()
        checkpoints.wait()
        if trainer.stopped:
            leave()
        if loaded != final or trainer.steps > begun:
            trainer.save(folder / NEXT)
            trainer.workers.on_first(lambda: _replace_final(folder), what="final checkpoint")
        after = f"the training is complete and saved to {final}; `nestpipe evaluate {folder}` judges it"
        split = config.train.eval_split
        try:
            metrics: dict[str, float] | None = {}
            if split != "none":
                metrics = None if trainer.workers.any(trainer.stop_asked) else judge(split)
                if metrics is None:
                    raise Stopped("stopped by a signal")
                curves.metrics(split, metrics, trainer.steps)
            if record and not finished:
                trainer.workers.wait_for(lambda: trainer.save_trace(folder), what="trace", limit=config.train.timeout)
            predict = functools.partial(_predicted, built.data, config.train, trainer.world, squares)
            result = {**_told(trainer, config, fitted, evaluating, begun, predict), "metrics": metrics}

            def write() -> None:
                if not (finished and (folder / "result.json").exists()):
                    write_json(folder / "result.json", result)
                if json_file is not None:
                    write_json(json_file, result)

            trainer.workers.on_first(write, what="result")
        except Stopped as error:
            raise Stopped(f"{error}; {after}") from error
        except Exception:
            if first:
                log.warning(after)
            raise
    return result


def _told(
    trainer: Trainer,
    config: Config,
    fitted: FitResult,
    evaluating: float,
    begun: int,
    predict: Callable[[range], dict[str, float]],
) -> dict[str, Any]:
    """What a run tells of its training: `steps` of all of it, the other figures of the `session_steps` since it was started or
    resumed. Evaluations count neither for `seconds` nor for samples per second."""
    seconds = fitted.seconds - evaluating
    tables = {
        name: {**stats._asdict(), "bytes_per_row": stats.bytes_per_row} for name, stats in trainer.table_stats().items()
    }
    return {
        "schedule": config.setting.schedule,
        "micro_batches": trainer.micro_batches,
        "workers": trainer.world,
        "steps": trainer.steps,
        "resumed_after": begun,
        "session_steps": fitted.steps,
        "samples": fitted.samples,
        "seconds": seconds,
        "evaluation_seconds": evaluating,
        "samples_per_second": fitted.samples / seconds if seconds else 0.0,
        "tokens": fitted.tokens,
        "tokens_per_second": fitted.tokens / seconds if seconds else 0.0,
        "mfu": fitted.mfu_over(seconds),
        "work": None if fitted.work is None else dataclasses.asdict(fitted.work),
        "first_loss": fitted.first_loss,
        "last_loss": fitted.last_loss,
        "skipped_batches": fitted.skipped,
        "reader": "process" if _reads_in_process(config) else "thread",
        "digest": trainer.digest(),
        "bytes_sent": trainer.bytes_sent(),
        "balance": None if fitted.balance is None else dataclasses.asdict(fitted.balance),
        "waiting": None
        if fitted.waiting is None
        else dataclasses.asdict(fitted.waiting) | predict(range(begun, trainer.steps)),
        "replicas": config.setting.replicas,
        "tables": tables,
    }


def _save_once(trainer: Trainer, path: Path) -> Path:
    if not trainer.workers.from_first(os.path.exists(path)):  # not Path.exists, which raises where it may not look
        trainer.save(path)
    return path


def checkpoint_folder(config: Config, folder: Path) -> Path:
    return folder / CHECKPOINTS if config.train.checkpoints is None else Path(config.train.checkpoints)


def check_places(config: Config, folder: Path) -> None:
    """Raises ValueError if the run could not be written where it belongs: itself, its checkpoints, its tables on disk."""
    for place in (folder, checkpoint_folder(config, folder), Path(config.train.storage or folder)):
        check_writable(folder=place)


def check_unused(config: Config, folder: Path) -> None:
    """Raises ValueError if there is a run in the folder already, or checkpoints of one where this one's belong."""
    for name in ("config.json", "result.json", CHECKPOINT, NEXT, "tensorboard"):
        if (folder / name).exists():
            raise ValueError(
                f"{folder} has a run in it already ({name}): go on with it by --resume (from the beginning, if it has saved "
                f"nothing yet), or choose another --out"
            )
    for path in (*complete(checkpoint_folder(config, folder)), *complete(folder / CHECKPOINTS)):
        raise ValueError(
            f"{path.parent} has checkpoints of a run ({path.name}): go on with it by --resume, or choose another --out or "
            f"train.checkpoints"
        )


def evaluate(config: Config, *, checkpoint: Path, split: str) -> dict[str, float]:
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint.parent} has no checkpoint {checkpoint.name!r}: the run has not finished")
    config = dataclasses.replace(
        config, setting=dataclasses.replace(config.setting, replicas=1)
    )  # on any number of workers
    trainer, built = make_trainer(config, storage=checkpoint.parent / "storage-of-evaluate")
    try:
        trainer.load(checkpoint)
        return evaluate_split(trainer, built, config, split)
    finally:
        trainer.close()


def evaluate_split(trainer: Trainer, built: Built, config: Config, split: str) -> dict[str, float]:
    """HR@k and NDCG@k for a model that ranks all items; AUC and normalized entropy for one that predicts clicks, and where each
    user has a list of candidates, GAUC and NDCG@k of these lists."""
    settings = config.train
    # What goes wrong with the data of one worker must reach all: batches are made where they are read, in the loader's thread.
    judged = functools.partial(_judged, built, config, split, rank=trainer.rank, world=trainer.world)
    batches = _unless_stopped(trainer, judged)
    if not _ranks(built):
        return trainer.evaluate(batches, _click_metrics(built, config))
    history, table = _history(built)
    make: Callable[[], torch.Tensor] = built.data.candidates  # type: ignore[attr-defined]
    return trainer.evaluate_ranking(
        batches,
        table=table.name,
        candidates=trainer.workers.wait_for(make, what="candidates", limit=settings.timeout),
        ks=settings.rank_at,
        history=history,
        exclude_seen=settings.exclude_seen,
        seen_targets=settings.seen_targets,
    )


def _judged(built: Built, config: Config, split: str, *, rank: int, world: int) -> Iterable[Batch]:
    settings = config.train
    return built.data.batches(split, batch_size=settings.eval_batch_size, rank=rank, world=world, seed=settings.seed)


def _click_metrics(built: Built, config: Config) -> dict[str, Any]:
    metrics: dict[str, Any] = {"AUC": AUC(), "NE": NormalizedEntropy()}
    if _has_lists(built):
        metrics |= {"GAUC": GAUC()} | {f"NDCG@{k}": ListNDCG(k) for k in config.train.rank_at}
    return metrics


def _has_lists(built: Built) -> bool:
    """Whether each sample has candidates of its own, with a label each."""
    return bool(getattr(built.data, "has_lists", False))


def _unless_stopped(trainer: Trainer, batches: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
    for batch in batches():
        if trainer.stop_asked:
            raise Stopped("asked to stop during an evaluation")
        yield batch


def _ranks(built: Built) -> bool:
    """Whether the data is for ranking all items; then the model must be able to."""
    if not hasattr(built.data, "candidates") or _has_lists(built):
        return False
    missing = [name for name in ("query", "score") if not hasattr(built.model, name)]
    if missing:
        raise ValueError(
            f"the data asks for a ranking of its items, and {type(built.model).__name__} has no {' and no '.join(missing)}: "
            f"give it query(batch, rows) -> [B, D] and score(query, candidate_rows) -> [B, N]; or do not evaluate: "
            f'train.eval_split = "none", train.eval_every = 0'
        )
    return True


def _history(built: Built) -> tuple[str, Table]:
    """The feature whose keys were seen, and its table, whose rows the candidates have."""
    history = getattr(built.model, "history", "history")
    tables = {table.name: table for table in built.tables}
    for feature in built.features:
        if feature.name == history:
            return history, tables[feature.table]
    names = [feature.name for feature in built.features]
    raise ValueError(f"ranking: the model's history is feature {history!r}, {did_you_mean(history, names)}")


def _try_evaluations(trainer: Trainer, built: Built, config: Config) -> None:
    """Judges the first samples of what will be evaluated, with rows of no meaning: what cannot be is told before the training."""
    splits = [config.train.eval_split, *(["valid"] if config.train.eval_every else [])]
    for split in dict.fromkeys(split for split in splits if split != "none"):
        trainer.workers.wait_for(
            lambda split=split: _try_evaluation(trainer, built, config, split),  # type: ignore[misc]
            what=f"a first look at the evaluation on {split!r}",
            limit=config.train.timeout,
        )


def _try_evaluation(trainer: Trainer, built: Built, config: Config, split: str) -> None:
    ranks = _ranks(built)
    batch = next(iter(_judged(built, config, split, rank=trainer.rank, world=trainer.world)), None)
    if batch is None or not batch.size:
        return
    model = built.model
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        batch = batch.slice(0, min(batch.size, TRIED)).to(device)
        dims = {table.name: table.dim for table in built.tables}
        rows: dict[str, Any] = {}
        for feature in built.features:
            keys, dim = batch.keys[feature.name], dims[feature.table]
            if feature.pooling is None:
                rows[feature.name] = Jagged(0.02 * torch.randn(len(keys.values), dim, device=device), keys.offsets)
            else:
                rows[feature.name] = 0.02 * torch.randn(batch.size, dim, device=device)
        if ranks:
            history, table = _history(built)
            targets = batch.labels
            candidates = targets.unique() if isinstance(targets, torch.Tensor) else torch.empty(0, dtype=torch.int64)
            metrics: dict[str, Any] = {f"HR@{k}": HitRate(k) for k in config.train.rank_at}
            metrics |= {f"NDCG@{k}": NDCG(k) for k in config.train.rank_at}
            of_candidates = 0.02 * torch.randn(len(candidates), table.dim, device=device)
            judge, _ = judge_ranking(
                model,
                metrics,
                of_candidates,
                candidates,
                history=history,
                exclude_seen=config.train.exclude_seen,
                seen_targets=config.train.seen_targets,
            )
        else:
            judge, _ = judge_losses(model, _click_metrics(built, config))
        try:
            model.eval()
            judge(batch, rows)
        except Exception as error:
            advice = (
                'The evaluation would fail so, if not the training. To train without one: train.eval_split = "none"'
            )
            if isinstance(error, ValueError):
                raise ValueError(f"{error}. {advice}") from error
            error.add_note(advice)
            raise
        finally:
            for module, mode in modes.items():
                module.training = mode


def _reads_in_process(config: Config) -> bool:
    parses = getattr(dataset_class(config.data), "parses", False)
    return {"auto": parses, "thread": False, "process": True}[config.train.reader]


def _resume(trainer: Trainer, folder: Path, saved: Path) -> Path | None:
    """Loads the newest sound checkpoint and returns it; what is wrong with newer ones is told, and they are put out of the way
    once one has been loaded."""
    damaged, loaded = [], None
    for path in trainer.workers.from_first(_newest_first(folder, saved)):
        try:
            trainer.load(path)
        except Damaged as error:
            damaged.append(path)
            if trainer.rank == 0:
                log.warning(f"{error}")
            continue
        loaded = path
        break
    for path in damaged:
        trainer.workers.on_first(functools.partial(_put_aside, path), what="checkpoint")
    if trainer.rank == 0 and loaded is not None:
        log.warning(f"resuming after step {trainer.steps}, from {loaded}")
    elif trainer.rank == 0:
        log.warning(f"no {'sound ' if damaged else ''}checkpoint in {saved}: starting from the beginning")
    return loaded


def _newest_first(folder: Path, saved: Path) -> list[Path]:
    """All that a run can go on from; of the same step, the one that would be evaluated first."""
    # Checkpoints are also in the run folder if they could not be saved where they belong.
    paths = dict.fromkeys((*complete(saved), *complete(folder / CHECKPOINTS)))
    places = [(manifests.step_of(path.name), 0, path) for path in paths]
    for order, path in enumerate((folder / CHECKPOINT, folder / NEXT), 1):
        if path.exists():
            try:
                places.append((manifests.read(path).step, order, path))
            except Damaged:
                places.append((sys.maxsize, order, path))  # it is told and put out of the way, as others are
    return [path for *_, path in sorted(places, reverse=True)]


def _put_aside(path: Path) -> None:
    """Under a name that is no checkpoint's: its step will be saved anew."""
    free = (path.with_name(f"damaged-{path.name}-{number}") for number in itertools.count(1))
    path.rename(next(place for place in free if not place.exists()))


@contextlib.contextmanager
def _asked_by_signal(trainer: Trainer) -> Iterator[None]:
    """While it lasts, SIGTERM asks training to stop; where signals cannot be caught (another thread) it is as it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _epochs(
    data: Dataset,
    settings: TrainSection,
    rank: int,
    world: int,
    passed: int,
    tokens: str | None = None,
    squares: float | None = None,
) -> Iterator[Batch]:
    """The batches of this worker, without the first `passed`, which it was trained on before.

    tokens: the feature whose keys they are. squares: what the square of one costs, where the data deals samples to ranks.
    """
    epochs = settings.epochs or (1 if settings.steps is None else None)
    for epoch in itertools.count() if epochs is None else range(epochs):
        batches = training_batches(
            data,
            batch_size=settings.batch_size,
            batch_tokens=settings.batch_tokens,
            tokens=tokens,
            squares=squares,
            rank=rank,
            world=world,
            seed=settings.seed,
            epoch=epoch,
        )
        skipped = skip(batches, passed)
        passed -= skipped
        empty = skipped == 0
        for batch in batches:
            empty = False
            yield batch
        if empty:
            return  # this rank's share is empty; it takes part without data


def _predicted(
    data: Dataset, settings: TrainSection, world: int, squares: float | None, steps: range
) -> dict[str, float]:
    """Of these steps, the newest thousand: the share that workers would have waited for the slowest if the data had not dealt
    samples to them, and what is left of it; by what samples cost. Nothing where the data does not deal."""
    if squares is None or world == 1 or not steps:
        return {}
    newest, begin, costs = steps[-1000:], 0, np.zeros(3)
    for epoch in itertools.count():
        samples = epoch_of(data, "train", seed=settings.seed, epoch=epoch)
        assert samples is not None, "the data has dealt them"
        batches = Cut(
            samples,
            batch_size=settings.batch_size,
            batch_tokens=settings.batch_tokens,
            world=world,
            squares=squares,
        )
        for step in range(max(begin, newest.start), min(begin + batches.count, newest.stop)):
            undealt_W, dealt_W = batches.costs(step - begin)
            costs += undealt_W.max(), dealt_W.max(), dealt_W.mean()
        begin += batches.count
        if begin >= newest.stop:
            break
    undealt, dealt, mean = costs.tolist()
    return {"undealt": 1 - mean / undealt, "dealt": 1 - mean / dealt} if undealt else {}


def _replace_final(folder: Path) -> None:
    """The one before is kept under another name; what told of it goes."""
    old = folder / CHECKPOINT
    (folder / "result.json").unlink(missing_ok=True)
    trace.clear(folder)
    if old.exists():
        free = (old.with_name(f"{old.name}-{number}") for number in itertools.count(1))
        old.rename(next(path for path in free if not path.exists()))
    (folder / NEXT).rename(old)


def _cosine(step: int, steps: int) -> float:
    return max(0.05, 0.5 * (1.0 + math.cos(math.pi * step / steps)))


def in_words(metrics: dict[str, float]) -> str:
    """`HR@10 0.0612, targets 22,363`: counts are whole numbers."""
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}" for name, value in metrics.items()
    )


SAY_EVERY = 10.0  # seconds between lines where there is no terminal for a bar


class Curves:
    """Progress (a bar on a terminal, a line now and then elsewhere) and curves for TensorBoard, on one rank."""

    def __init__(self, folder: Path, *, enabled: bool, steps: int | None, done: int = 0) -> None:
        self._bar: tqdm | None = None
        self._writer: Any = None
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only where it is used

        try:
            self._writer = SummaryWriter(str(folder / "tensorboard"))
        except OSError as error:
            self._lose(error)
        self._bar = tqdm(
            total=steps, initial=done, unit="step", mininterval=0.2, dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        self._of = "" if steps is None else f"/{steps}"
        self._samples, self._tokens, self._since = 0, 0, time.perf_counter()
        self._said = self._since

    def step(self, result: StepResult) -> None:
        if self._bar is None:
            return
        self._samples += result.samples
        self._tokens += result.tokens
        now = time.perf_counter()
        if now - self._since > 0.2:
            rate = self._samples / (now - self._since)
            state = f"loss {result.loss:.4f}, {rate:,.0f} samples/s"
            state += f", {self._tokens / (now - self._since):,.0f} tokens/s" if self._tokens else ""
            self._bar.set_postfix_str(state, refresh=False)
            if self._bar.disable and now - self._said > SAY_EVERY:
                print(f"step {result.step}{self._of}: {state}", file=sys.stderr, flush=True)
                self._said = now
            self._scalar("train/loss", result.loss, result.step)
            self._scalar("train/samples_per_second", rate, result.step)
            self._since, self._samples, self._tokens = now, 0, 0
        self._bar.update(1)

    def leave_out(self, seconds: float) -> None:
        """Of the time that samples per second are counted over: something else was done in it."""
        if self._bar is not None:
            self._since += seconds

    def metrics(self, split: str, metrics: dict[str, float], step: int) -> None:
        if self._bar is None or not metrics:  # none: it was not evaluated to the end
            return
        for name, value in metrics.items():
            if isinstance(value, float):  # counts make no curves
                self._scalar(f"{split}/{name}", value, step)
        tqdm.write(f"step {step}, {split}: {in_words(metrics)}")

    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            try:
                self._writer.add_scalar(name, value, step)
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        """A full disk ends the curves, not the training."""
        self._writer = None
        log.warning(f"no more curves: they cannot be written ({error})")

    def close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def close(self) -> None:
        self.close_bar()
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._lose(error)

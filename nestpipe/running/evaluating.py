"""How a run is judged: by clicks or by ranking, as its data and model are; and a first look before the training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nestpipe import inference
from nestpipe.batch import Batch, Jagged
from nestpipe.config import Built, Config
from nestpipe.engine.computing import Computing
from nestpipe.engine.judging import by_task, judge_losses, judge_ranking
from nestpipe.engine.outputs import tasks_of
from nestpipe.errors import Stopped, did_you_mean
from nestpipe.metrics import names
from nestpipe.tables import Table
from nestpipe.trainer import Trainer

TRIED = 8  # samples that an evaluation is tried with before the training


def evaluate_split(
    trainer: Trainer, built: Built, config: Config, split: str, *, samples: int | None = None
) -> dict[str, float]:
    """The metrics of the config; unless it names any, HR@k and NDCG@k for a model that ranks all items, AUC and normalized
    entropy for one that predicts clicks, and where each user has a list of candidates, GAUC and NDCG@k of these lists.

    samples: of the split, those that are looked at: as many of each worker, the first of its share.
    """
    settings = config.train
    # What goes wrong with the data of one worker must reach all: batches are made where they are read, in the loader's thread.
    judged = functools.partial(_judged, built, config, split, rank=trainer.rank, world=trainer.world)
    batches = _unless_stopped(trainer, judged)
    if samples is not None:
        batches = _first(batches, samples // trainer.world + (trainer.rank < samples % trainer.world))
    if not _ranks(built):
        return trainer.evaluate(batches, _click_metrics(built, config))
    history, table = _history(built)
    make: Callable[[], torch.Tensor] = built.data.candidates  # type: ignore[attr-defined]
    return trainer.evaluate_ranking(
        batches,
        table=table.name,
        candidates=trainer.workers.wait_for(make, what="candidates", limit=settings.timeout),
        metrics=names.of_ranks(settings.metrics, ks=settings.rank_at),
        history=history,
        exclude_seen=settings.exclude_seen,
        seen_targets=settings.seen_targets,
    )


def _judged(built: Built, config: Config, split: str, *, rank: int, world: int) -> Iterable[Batch]:
    settings = config.train
    return built.data.batches(split, batch_size=settings.eval_batch_size, rank=rank, world=world, seed=settings.seed)


def _click_metrics(built: Built, config: Config) -> dict[str, Any]:
    settings = config.train
    return names.of_predictions(
        settings.metrics, ks=settings.rank_at, has_lists=_has_lists(built), group=settings.group_by
    )


def _has_lists(built: Built) -> bool:
    """Whether each sample has candidates of its own, with a label each."""
    return bool(getattr(built.data, "has_lists", False))


def _unless_stopped(trainer: Trainer, batches: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
    for batch in batches():
        if trainer.stop_asked:
            raise Stopped("asked to stop during an evaluation")
        yield batch


def _first(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """So many samples."""
    while count > 0 and (batch := next(batches, None)) is not None:
        yield batch if batch.size <= count else batch.slice(0, count)
        count -= batch.size


def metric_names(built: Built, config: Config) -> list[str]:
    """What `evaluate_split` will give, without counts."""
    if _ranks(built):
        return list(names.of_ranks(config.train.metrics, ks=config.train.rank_at))
    tasks = tasks_of(built.model)
    losses = ["loss", *(f"{task}/loss" for task in tasks)]
    return losses + [judged.name for judged in by_task(_click_metrics(built, config), tasks)]


def check_best_metric(built: Built, config: Config) -> None:
    """Raises ValueError if the best checkpoint is to be kept by a metric that no evaluation will give."""
    metric = config.train.best_metric
    if metric is not None:
        names_of_all = metric_names(built, config)
        if metric not in names_of_all:
            raise ValueError(f"config: train.best_metric {metric!r}, {did_you_mean(metric, names_of_all)}")


def _ranks(built: Built) -> bool:
    """Whether the data is for ranking all items; then the model must be able to."""
    if not hasattr(built.data, "candidates") or _has_lists(built):
        return False
    missing = inference.missing_methods(built.model)
    if missing:
        raise ValueError(
            f"the data asks for a ranking of its items, and {type(built.model).__name__} has no {' and no '.join(missing)}: "
            f"give it query(batch, rows) -> [B, D] and score(query, candidate_rows) -> [B, N]; or do not evaluate: "
            f'train.eval_split = "none", train.eval_every = 0'
        )
    return True


def _history(built: Built) -> tuple[str, Table]:
    """The feature whose keys were seen, and the table whose rows the candidates have."""
    tables = {table.name: table for table in built.tables}
    table_of = {feature.name: tables[feature.table] for feature in built.features}
    history = inference.history_of(built.model)
    items = inference.items_of(built.model, history, table_of)
    if items not in table_of:
        raise ValueError(
            f"ranking: the model's history is feature {history!r}, {did_you_mean(history, list(table_of))}"
        )
    return history, table_of[items]


def try_evaluations(trainer: Trainer, built: Built, config: Config) -> None:
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
    autocast = functools.partial(Computing(config.train.precision).autocast, device)
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
            metrics = names.of_ranks(config.train.metrics, ks=config.train.rank_at)
            of_candidates = 0.02 * torch.randn(len(candidates), table.dim, device=device)
            judge, _ = judge_ranking(
                model,
                metrics,
                of_candidates,
                candidates,
                history=history,
                exclude_seen=config.train.exclude_seen,
                seen_targets=config.train.seen_targets,
                autocast=autocast,
            )
        else:
            judge, _ = judge_losses(model, by_task(_click_metrics(built, config), tasks_of(model)), autocast=autocast)
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

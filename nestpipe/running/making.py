"""The trainer of a config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from nestpipe.config import Built, Config, build
from nestpipe.config.fitted import check_alike
from nestpipe.exchange.samples import token_feature
from nestpipe.files import plain
from nestpipe.process import join_group
from nestpipe.running.feeding import dealt_by_index
from nestpipe.trainer import Trainer


def make_trainer(config: Config, *, storage: Path, record: bool = False) -> tuple[Trainer, Built]:
    join_group(config.train.timeout)
    built = build(config)
    return trainer_of(config, built, storage=storage, record=record), built


def trainer_of(config: Config, built: Built, *, storage: Path, record: bool = False) -> Trainer:
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
        lr_schedule=config.train.lr_schedule(),
        clip_norm=config.train.clip_norm,
        precision=config.train.precision,
        compile=config.train.compile,
        seed=config.train.seed,
        on_nonfinite=config.train.on_nonfinite,
        data_timeout=config.train.timeout,
        storage=storage if config.train.storage is None else Path(config.train.storage),
        record=record,
        check_freshness=config.check_freshness,
    )
    check_alike(config, trainer.workers)
    trainer.config, trainer.recipe = plain(config.to_dict()), plain(built.recipe)
    # After the model was built: from here on every rank draws its own dropout.
    torch.manual_seed(config.train.seed * 65_537 + trainer.rank)
    return trainer

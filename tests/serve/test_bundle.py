"""A bundle says what the trainer says, to the bit, in a plain process; and goes on saying it when there is a newer one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Feature, Jagged, Table, Trainer, config, load_bundle, run
from nestpipe.export import export_bundle
from nestpipe.kinds import arguments, made, model_class
from tests.serve.trained import (
    JUDGED,
    KEYS,
    NAMES,
    TABLES,
    Exported,
    Ranker,
    assert_says,
    evaluated,
    make_batch,
    make_trainer,
    train,
)
from tests.test_cli import CLICKS

ROOT = Path(__file__).parents[2]
IN_A_PLAIN_PROCESS = """
import pickle, sys
import torch
import nestpipe
from tests.serve.trained import JUDGED, KEYS, NAMES, Ranker

bundles, clicks, batches, out = sys.argv[1:5]
bundle = nestpipe.load_bundle(bundles, model=Ranker())
said = [bundle.predict(batch) for batch in JUDGED], {name: bundle.rows(name, KEYS) for name in NAMES}
dlrm = nestpipe.load_bundle(clicks)
said = *said, [dlrm.predict(batch) for batch in torch.load(batches, weights_only=False)]
assert not torch.distributed.is_initialized()
torch.save((said, sorted(name for name in sys.modules if name.startswith("nestpipe"))), out)
"""


def test_a_bundle_says_what_the_trainer_says(exported: Exported) -> None:
    assert_says(load_bundle(exported.bundles[0], model=Ranker(), verify=True), exported.said[0])


@pytest.mark.parametrize("pooled_at", ["source", "owner"])
def test_bits_are_the_same_wherever_one_worker_pools(tmp_path: Path, pooled_at: str) -> None:
    bags = [dataclasses.replace(table, pooled_at=pooled_at) for table in TABLES[:-1]]
    with make_trainer(tmp_path / "storage", [*bags, TABLES[-1]]) as trainer:
        train(trainer, 0, 3)
        trainer.save(tmp_path / "saved")
        expected = evaluated(trainer, JUDGED)
    export_bundle(tmp_path / "saved", tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle", model=Ranker())
    assert all(torch.equal(bundle.predict(batch), known) for batch, known in zip(JUDGED, expected, strict=True))


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Batch], list[Tensor]]:
    """The run folder of a DLRM that a config describes; batches, and what the trainer predicts for them."""
    folder = tmp_path_factory.mktemp("clicks")
    (folder / "clicks.toml").write_text(CLICKS)
    described = config.read(folder / "clicks.toml")
    run.train(described, folder=folder / "run", json_file=None)
    trainer, built = run.make_trainer(described, storage=folder / "storage")
    with trainer:
        trainer.load(folder / "run" / "final")
        batches = list(built.data.batches("test", batch_size=100, rank=0, world=1, seed=0))
        return folder / "run", batches, evaluated(trainer, batches)


def test_a_process_without_a_process_group_predicts_the_same_bits(
    exported: Exported, clicks: tuple[Path, list[Batch], list[Tensor]], tmp_path: Path
) -> None:
    folder, batches, expected = clicks
    export_bundle(folder, tmp_path / "clicks")
    for batch in batches:
        batch.labels = None
    torch.save(batches, tmp_path / "batches")
    arguments = [exported.bundles[2], tmp_path / "clicks", tmp_path / "batches", tmp_path / "said"]
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PLAIN_PROCESS, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (predictions, rows, clicked), modules = torch.load(tmp_path / "said", weights_only=False)
    of_trainer = exported.said[2]
    for said, known in ((predictions, of_trainer["predictions"]), (clicked, expected)):
        assert len(said) == len(known) > 1 and all(map(torch.equal, said, known))
    assert all(torch.equal(rows[name], of_trainer["rows"][name]) for name in NAMES)
    rooms = {module.split(".")[1] for module in modules if "." in module}
    assert not rooms & {"engine", "exchange", "store", "checkpoint", "trainer", "run", "process", "config", "data"}


def test_deltas_one_on_the_other_say_what_the_trainer_says(exported: Exported) -> None:
    bundle = first = load_bundle(exported.bundles[0], model=Ranker())
    for path, said in zip(exported.bundles[1:], exported.said[1:], strict=True):
        bundle = bundle.updated(path, verify=True)
        assert_says(bundle, said)
        assert_says(load_bundle(path, model=Ranker()), said)
    assert_says(first, exported.said[0])
    assert [first.step, bundle.step] == [6, 11] and first.version != bundle.version


def test_deltas_equal_a_full_export_key_for_key(exported: Exported, tmp_path: Path) -> None:
    export_bundle(exported.checkpoints[2], tmp_path / "full")
    full, delta = load_bundle(tmp_path / "full", model=Ranker()), load_bundle(exported.bundles[2], model=Ranker())
    gone = 0
    for name in NAMES:
        before, now, chained = (
            {int(key) for keys, _ in one._of(name).blocks() for key in keys}
            for one in (load_bundle(exported.bundles[0], model=Ranker()), full, delta)
        )
        assert now == chained and len(now) == full.num_keys(name)
        gone += len(before - now)
        every = torch.tensor(sorted(before | now))
        assert torch.equal(full.rows(name, every), delta.rows(name, every))
    assert gone > 20


def test_every_answer_is_of_one_version_while_deltas_are_applied(exported: Exported) -> None:
    newest = load_bundle(exported.bundles[0], model=Ranker())
    known = {}
    for path, said in zip(exported.bundles, exported.said, strict=True):
        known[load_bundle(path, model=Ranker()).version] = said["predictions"][1]
    assert len({tuple(predictions.tolist()) for predictions in known.values()}) == 3
    answers: list[tuple[str, Tensor]] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            bundle = newest
            answers.append((bundle.version, bundle.predict(JUDGED[1])))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for path in exported.bundles[1:]:
        wanted = len(answers) + 20
        while len(answers) < wanted:
            threading.Event().wait(0.01)
        newest = newest.updated(path)
    wanted = len(answers) + 20
    while len(answers) < wanted:
        threading.Event().wait(0.01)
    done.set()
    for thread in threads:
        thread.join()
    assert {version for version, _ in answers} == set(known)
    assert all(torch.equal(answer, known[version]) for version, answer in answers)


def test_a_delta_of_another_version_is_refused(exported: Exported) -> None:
    bundle = load_bundle(exported.bundles[0], model=Ranker())
    with pytest.raises(ValueError, match=r"holds what changed since version 8-\w+ \(bundle-1\), this is version 6-"):
        bundle.updated(exported.bundles[2])
    with pytest.raises(ValueError, match="is a full bundle, not a delta"):
        bundle.updated(exported.bundles[0])


def test_a_delta_of_a_model_made_otherwise_computes_as_the_new_one_does(tmp_path: Path) -> None:
    bundles: list[Path] = []
    for heads in (1, 2):  # weights of the same shapes
        recipe = {"kind": "hstu_ranker", "dim": 4, "num_layers": 1, "num_heads": heads}
        features = [Feature("history", "item"), Feature("candidates", "item")]
        model = made("model", model_class(recipe), arguments(recipe))
        with Trainer(model, [Table("item", 4)], features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)) as trainer:
            trainer.recipe = recipe
            if bundles:
                trainer.load(tmp_path / "saved-1")
            trainer.save(tmp_path / f"saved-{heads}")
        bundles.append(tmp_path / f"bundle-{heads}")
        export_bundle(tmp_path / f"saved-{heads}", bundles[-1], since=bundles[0] if heads > 1 else None)
    assert load_bundle(bundles[0]).updated(bundles[1]).model.layers[0].num_heads == 2  # type: ignore[index, union-attr]


def test_a_run_without_a_config_needs_the_model_and_says_so(exported: Exported) -> None:
    with pytest.raises(ValueError, match=r"does not say how its model is made.*load_bundle\(path, model=...\)"):
        load_bundle(exported.bundles[0])
    with pytest.raises(ValueError, match=r"the model of the bundle is another one: 'out\.bias' is in it but not here"):
        load_bundle(exported.bundles[0], model=nn.Identity())


def test_loading_leaves_the_random_numbers_of_the_program_alone(
    clicks: tuple[Path, list[Batch], list[Tensor]], tmp_path: Path
) -> None:
    export_bundle(clicks[0], tmp_path / "clicks")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_bundle(tmp_path / "clicks")
    assert torch.equal(torch.rand(3), expected)


def test_rows_in_bfloat16_are_those_of_the_trainer_rounded(exported: Exported, tmp_path: Path) -> None:
    full, delta = tmp_path / "full", tmp_path / "delta"
    export_bundle(exported.checkpoints[0], full, dtype="bfloat16")
    export_bundle(exported.checkpoints[2], delta, since=full)  # as the earlier bundle has them
    for path, said in ((full, exported.said[0]), (delta, exported.said[2])):
        bundle = load_bundle(path, model=Ranker())
        for name in NAMES:
            assert torch.equal(bundle.rows(name, KEYS), said["rows"][name].bfloat16().float()), name
        assert torch.allclose(bundle.predict(JUDGED[1]), said["predictions"][1], atol=0.02)


def test_a_table_without_rows_gives_the_first_values(tmp_path: Path) -> None:
    trainer = Trainer(
        nn.Identity(),
        [Table("item", 3, admit_after=2), Table("other", 3)],
        [Feature("item", "item", "sum"), Feature("other", "other", "sum")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
        seed=9,
    )
    trainer.save(tmp_path / "saved")
    export_bundle(tmp_path / "saved", tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle", model=nn.Identity(), verify=True)
    for name in ("item", "other"):
        assert torch.equal(bundle.rows(name, KEYS), trainer.rows(name, KEYS)) and bundle.num_keys(name) == 0
    assert bundle.rows("other", []).shape == (0, 3)


def test_what_cannot_be_asked_is_an_error_that_says_what_can(exported: Exported) -> None:
    bundle = load_bundle(exported.bundles[0], model=Ranker())
    with pytest.raises(ValueError, match="table 'plane', which is not known; did you mean 'plain'"):
        bundle.rows("plane", [1])
    with pytest.raises(ValueError, match="keys must be whole numbers"):
        bundle.rows("plain", [0.5])
    with pytest.raises(ValueError, match="feature 'mean' is declared but the batch has no keys for it"):
        bundle.predict(Batch({"sum": Jagged.from_lists([[1]])}))
    with pytest.raises(ValueError, match="Ranker has no query and no score"):
        bundle.recommend(make_batch(1), 3)


class Losses(nn.Module):
    """No predictions; reads labels."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(27, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return batch.labels * 1.0  # type: ignore[operator]


def test_a_model_that_predicts_nothing_says_what_it_needs(exported: Exported) -> None:
    bundle = load_bundle(exported.bundles[0], model=Losses())
    with pytest.raises(ValueError, match=r"Losses predicts nothing for a sample: give it predict\(batch, rows\)"):
        bundle.predict(make_batch(1))
    unlabelled = make_batch(1)
    unlabelled.labels = None
    with pytest.raises(TypeError) as caught:
        bundle.predict(unlabelled)
    assert "the batch has no labels" in caught.value.__notes__[0]

"""Tests stand where their module stands in the package, so that they are found."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
# Folders of their own: what several modules promise together, what documents say, and the wheel.
WHOLE = {"behaviour", "docs", "packaging"}
# Files in a folder of the package that are about all of it, or about several of its modules.
BEHAVIOURS = {
    "bench/test_peers.py": "the comparison with peers: nestpipe/bench/peers",
    "checkpoint/test_damage.py": "nothing damaged is ever loaded",
    "checkpoint/test_dense_state.py": "the dense part in a checkpoint",
    "checkpoint/test_full_disk.py": "a disk that is really full",
    "config/test_rates.py": "every entry of learning rates, through to the trainer",
    "data/test_resumed_reading.py": "what is read of files when a run goes on, of every kind of file",
    "data/test_skip.py": "batches that a resumed run passes over, of every data set",
    "exchange/test_exchange.py": "what workers get from one another",
    "metrics/test_metrics.py": "every metric against its formula, on several workers",
    "metrics/test_of_others.py": "metrics of torchmetrics, and of one's own",
    "serve/test_ray.py": "serving on Ray: nestpipe/serve/ray_*.py",
    "test_arrows.py": "which room may import which",
    "test_migration.py": "in from TorchRec and out again: nestpipe/migration",
    "test_mirror.py": "this one",
}


def module_of(test: Path) -> Path:
    return ROOT / "nestpipe" / test.with_name(test.name.removeprefix("test_"))


def test_every_test_file_has_the_name_of_its_module_or_is_listed_as_a_behaviour() -> None:
    tests = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(tests) > 50
    lost = [
        str(path)
        for path in tests
        if path.parts[0] not in WHOLE and str(path) not in BEHAVIOURS and not module_of(path).is_file()
    ]
    assert not lost, f"no such module: {', '.join(lost)}; rename them after theirs, or list them in {__file__}"


def test_what_is_listed_is_there_and_has_no_module() -> None:
    assert all((ROOT / "tests" / name).is_file() and not module_of(Path(name)).is_file() for name in BEHAVIOURS)


def test_every_folder_is_a_package() -> None:
    """Else two files of one name in different folders would be one module."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]

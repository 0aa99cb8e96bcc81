"""Where batches come from: synthetic power-law streams, sequence files, MovieLens, Criteo, KuaiRand, Parquet, CSV, Hugging Face.

Every dataset is built with keyword arguments that may stand in a TOML `[data]` section; `DATASETS` finds it by name.
"""

from nestpipe.data.columns import Columns
from nestpipe.data.criteo import Criteo
from nestpipe.data.csv import CSV
from nestpipe.data.dataset import SPLITS, Dataset
from nestpipe.data.epoch import Epoch, by_tokens
from nestpipe.data.histories import Histories, HistoryDataset
from nestpipe.data.huggingface import HuggingFace
from nestpipe.data.kuairand import KuaiRand, KuaiRandSequences
from nestpipe.data.kuairand_clicks import KuaiRandClicks
from nestpipe.data.kuairand_like import KuaiRandLike
from nestpipe.data.movielens import MovieLens
from nestpipe.data.parquet import Parquet
from nestpipe.data.rows import Collate, from_rows
from nestpipe.data.sequences import Sequences
from nestpipe.data.synthetic_clicks import SyntheticClicks
from nestpipe.data.synthetic_sequences import SyntheticSequences
from nestpipe.data.transforms import Bucket

DATASETS: dict[str, type] = {
    "synthetic_sequences": SyntheticSequences,
    "synthetic_clicks": SyntheticClicks,
    "kuairand_like": KuaiRandLike,
    "kuairand_clicks": KuaiRandClicks,
    "sequences": Sequences,
    "movielens": MovieLens,
    "criteo": Criteo,
    "kuairand": KuaiRand,
    "kuairand_sequences": KuaiRandSequences,
    "parquet": Parquet,
    "csv": CSV,
    "huggingface": HuggingFace,
}

__all__ = [
    "CSV",
    "DATASETS",
    "SPLITS",
    "Bucket",
    "Collate",
    "Columns",
    "Criteo",
    "Dataset",
    "Epoch",
    "Histories",
    "HistoryDataset",
    "HuggingFace",
    "KuaiRand",
    "KuaiRandClicks",
    "KuaiRandLike",
    "KuaiRandSequences",
    "MovieLens",
    "Parquet",
    "Sequences",
    "SyntheticClicks",
    "SyntheticSequences",
    "by_tokens",
    "from_rows",
]

"""Metrics, exact, and the same number however samples are spread over workers.

Each metric collects its own worker's state in `update` and merges over torch.distributed in `compute`, which every
worker of the group must then call. `reset` forgets what was collected; `Trainer.evaluate` begins with it. What is merged
are whole numbers (counts, and sums in fixed point), so neither the number of workers nor the order of batches can change
the last digit. A value that is not defined (no samples, one class only) is NaN.
"""

from nestpipe.metrics.clicks import AUC, Calibration, LogLoss, NormalizedEntropy
from nestpipe.metrics.lists import GAUC, ListMAP, ListMRR, ListNDCG, ListRecall
from nestpipe.metrics.ranks import MRR, NDCG, Coverage, HitRate

__all__ = [
    "AUC", "GAUC", "MRR", "NDCG", "Calibration", "Coverage", "HitRate", "ListMAP", "ListMRR", "ListNDCG", "ListRecall",
    "LogLoss", "NormalizedEntropy",
]  # fmt: skip

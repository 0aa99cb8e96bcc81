"""Ready-made models: plain nn.Modules that receive their rows and know nothing of parallelism."""

from nestpipe.models.batch_norm import SyncBatchNorm
from nestpipe.models.dcn import DCN
from nestpipe.models.deepfm import DeepFM
from nestpipe.models.din import DIN
from nestpipe.models.dlrm import DLRM
from nestpipe.models.fuxi import FuXi
from nestpipe.models.hstu import HSTU
from nestpipe.models.mmoe import MMoE
from nestpipe.models.prefix import Prefix
from nestpipe.models.ranking import FuXiRanker, HSTURanker, Ranker
from nestpipe.models.sasrec import SASRec
from nestpipe.models.two_tower import TwoTower

__all__ = [
    "DCN",
    "DIN",
    "DLRM",
    "HSTU",
    "DeepFM",
    "FuXi",
    "FuXiRanker",
    "HSTURanker",
    "MMoE",
    "Prefix",
    "Ranker",
    "SASRec",
    "SyncBatchNorm",
    "TwoTower",
]

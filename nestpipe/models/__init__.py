"""Ready-made models: plain nn.Modules that receive their rows and know nothing of parallelism."""

from nestpipe.models.dlrm import DLRM
from nestpipe.models.fuxi import FuXi
from nestpipe.models.hstu import HSTU
from nestpipe.models.prefix import Prefix
from nestpipe.models.ranking import FuXiRanker, HSTURanker, Ranker

__all__ = ["DLRM", "HSTU", "FuXi", "FuXiRanker", "HSTURanker", "Prefix", "Ranker"]

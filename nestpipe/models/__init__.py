"""Ready-made models: plain nn.Modules that receive their rows and know nothing of parallelism."""

from nestpipe.models.dlrm import DLRM
from nestpipe.models.fuxi import FuXi
from nestpipe.models.hstu import HSTU

__all__ = ["DLRM", "HSTU", "FuXi"]

"""nestpipe: train recommendation models with embedding tables of any size, sharded by key over all workers."""

from nestpipe.batch import Batch, Jagged

__all__ = ["Batch", "Jagged"]

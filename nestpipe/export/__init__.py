"""From a checkpoint to what others read: a bundle for serving, or the rows of a table for a nearest-neighbour index.

`source` finds the checkpoint, `bundle` writes bundles, `changes` what is in a delta, `rows` writes Parquet and npy.
"""

from nestpipe.export.bundle import export_bundle
from nestpipe.export.rows import export_rows

__all__ = ["export_bundle", "export_rows"]

"""From TorchRec or plain torch to nestpipe, and back: declarations, weights and optimizer state. See docs/from_torchrec.md.

TorchRec itself is not needed: its objects are read by their attributes. The number of a row is the key.
"""

from nestpipe.migration.declarations import declare
from nestpipe.migration.dump import optimizer_state, state_dict
from nestpipe.migration.load import load_weights

__all__ = ["declare", "load_weights", "optimizer_state", "state_dict"]

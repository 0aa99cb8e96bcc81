"""Checkpoints: one folder each, one file per worker and table, no code in any of them.

    manifest.json, manifest.sum         what is in it and a checksum of every file; written last
    dense.safetensors                   the model's weights
    dense-optimizer.safetensors/.json   its optimizer's tensors and settings
    table-NAME.I-of-W.safetensors       worker I's keys and records (values, optimizer state, counters)
    state.I-of-W.json                   worker I's place in its data, and its random state

Tables are written and read in blocks: one may be larger than memory. `saving` writes while training waits, `background`
while it goes on, `loading` reads on any number of workers, `manifest` says what is sound, `commands` are for the command line.
"""

from nestpipe.checkpoint.background import Background
from nestpipe.checkpoint.loading import Loaded, load, set_torch_rng
from nestpipe.checkpoint.manifest import Base, Damaged, complete, folder_of, problems
from nestpipe.checkpoint.replacing import next_of, settle
from nestpipe.checkpoint.resuming import content_of, load_into
from nestpipe.checkpoint.saving import Content, check_new, save
from nestpipe.checkpoint.settings import Settings

__all__ = [
    "Background",
    "Base",
    "Content",
    "Damaged",
    "Loaded",
    "Settings",
    "check_new",
    "complete",
    "content_of",
    "folder_of",
    "load",
    "load_into",
    "next_of",
    "problems",
    "save",
    "set_torch_rng",
    "settle",
]

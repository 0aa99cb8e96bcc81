"""Causal attention on jagged sequences, without padding and without a score per pair of tokens in memory.

`attention.py` picks an implementation; `reference.py` is the definition, `cpu.py` and `triton.py` are the fast ways.
"""

from nestpipe.ops.attention.attention import KINDS, jagged_attention
from nestpipe.ops.attention.buckets import time_buckets

__all__ = ["KINDS", "jagged_attention", "time_buckets"]

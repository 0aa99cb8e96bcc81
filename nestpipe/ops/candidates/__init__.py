"""Attention of candidates to a history: each sees all of it and itself, none sees another.

`attention.py` picks an implementation; `reference.py` is the definition, `cpu.py` the fast way. There is none for accelerators
yet: the reference runs there.
"""

from nestpipe.ops.candidates.attention import KINDS, candidate_attention

__all__ = ["KINDS", "candidate_attention"]

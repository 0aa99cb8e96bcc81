"""Operations on jagged sequences that models call: one folder or file each, with a plain reference and fast implementations.

Every operation looks at one sample at a time: what else is in the batch changes no bit of a sample's result. Two do not, and say
so: `segmented_softmax` with `share`, and `in_batch_softmax`.
"""

from nestpipe.ops.attention import jagged_attention
from nestpipe.ops.candidates import candidate_attention
from nestpipe.ops.dropout import dropout
from nestpipe.ops.in_batch_softmax import in_batch_softmax, log_frequencies
from nestpipe.ops.normalize import normalize
from nestpipe.ops.sampled_softmax import sampled_softmax
from nestpipe.ops.segmented_softmax import segmented_softmax

__all__ = [
    "candidate_attention",
    "dropout",
    "in_batch_softmax",
    "jagged_attention",
    "log_frequencies",
    "normalize",
    "sampled_softmax",
    "segmented_softmax",
]

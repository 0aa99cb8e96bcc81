"""XXH64 of strings that lie end to end, as Arrow keeps them: no Python object is made.

XXH64 (seed 0) is a published function with an implementation in every language, so that keys can be computed anywhere: see
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. The names of its parts here are those of that page.
"""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import inlined, kernel

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_U = np.uint64
_ONE, _EIGHT = np.uint64(1), np.uint64(8)


@inlined
def _rotated(bits, left):
    return (bits << _U(left)) | (bits >> _U(64 - left))


@inlined
def _word(data, at, count):
    """`count` bytes as a number, the first the lowest, on any machine; one load where the machine has such."""
    bits = _U(0)
    for place in range(count):
        bits |= _U(data[at + _U(place)]) << _U(8 * place)
    return bits


@inlined
def _round(lane, word):
    return _rotated(lane + word * _P2, 31) * _P1


@inlined
def _merged(state, lane):
    return (state ^ _round(_U(0), lane)) * _P1 + _P4


@kernel
def hash_bytes(data, begin, end):
    """XXH64 of data[begin:end], as uint64."""
    at, last = _U(begin), _U(end)
    size = last - at
    if size >= _U(32):
        one, two, three, four = _P1 + _P2, _P2, _U(0), _U(0) - _P1
        while at + _U(32) <= last:
            one = _round(one, _word(data, at, 8))
            two = _round(two, _word(data, at + _EIGHT, 8))
            three = _round(three, _word(data, at + _U(16), 8))
            four = _round(four, _word(data, at + _U(24), 8))
            at += _U(32)
        state = _rotated(one, 1) + _rotated(two, 7) + _rotated(three, 12) + _rotated(four, 18)
        state = _merged(_merged(_merged(_merged(state, one), two), three), four)
    else:
        state = _P5
    state += size
    while at + _EIGHT <= last:
        state = _rotated(state ^ _round(_U(0), _word(data, at, 8)), 27) * _P1 + _P4
        at += _EIGHT
    if at + _U(4) <= last:
        state = _rotated(state ^ (_word(data, at, 4) * _P1), 23) * _P2 + _P3
        at += _U(4)
    while at < last:
        state = _rotated(state ^ (_U(data[at]) * _P5), 11) * _P1
        at += _ONE
    state = (state ^ (state >> _U(33))) * _P2
    state = (state ^ (state >> _U(29))) * _P3
    return state ^ (state >> _U(32))


@kernel
def hash_each(data, offsets, out):
    """out[i] = the hash of data[offsets[i]:offsets[i + 1]], its 64 bits as int64."""
    for i in range(len(out)):
        out[i] = np.int64(hash_bytes(data, offsets[i], offsets[i + 1]))

"""The sum of squares of many values, in float64 and in one order on every machine."""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import kernel


@kernel
def squares(values):
    """In eight running sums: as fast as a vector unit allows, whatever the number of threads."""
    n = len(values)
    full = n - n % 8
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    for d in range(0, full, 8):
        a, b, c, e = (
            np.float64(values[d]),
            np.float64(values[d + 1]),
            np.float64(values[d + 2]),
            np.float64(values[d + 3]),
        )
        f, g, h, i = (
            np.float64(values[d + 4]),
            np.float64(values[d + 5]),
            np.float64(values[d + 6]),
            np.float64(values[d + 7]),
        )
        s0 += a * a
        s1 += b * b
        s2 += c * c
        s3 += e * e
        s4 += f * f
        s5 += g * g
        s6 += h * h
        s7 += i * i
    total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    for d in range(full, n):
        total += np.float64(values[d]) * np.float64(values[d])
    return total

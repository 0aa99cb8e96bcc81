"""Imports that take seconds."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """While torch is imported: it makes 300,000 objects, which all stay. Looking through them for garbage again and again takes a
    fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""What passes between the front process and an instance: a JSON header and raw arrays behind it, their lengths first.

Bytes of a frame: two uint32 (header, arrays), the header padded so that arrays lie at multiples of 8, the arrays end to end.
Nothing in it is ever unpickled or executed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

LENGTHS = struct.Struct("<II")
DTYPES: dict[str, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float64": np.dtype("<f8"), "float32": np.dtype("<f4")}


class Frame(NamedTuple):
    header: dict[str, Any]
    arrays: dict[str, np.ndarray]


def encode(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray | None] | None = None) -> bytes:
    given = {name: array for name, array in (arrays or {}).items() if array is not None}
    told = [[name, array.dtype.name, len(array)] for name, array in given.items()]
    text = json.dumps({**header, "arrays": told}).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(array, DTYPES[array.dtype.name]).tobytes() for array in given.values())
    return LENGTHS.pack(len(text), len(data)) + text + data


def decode(text: bytes, data: bytes) -> Frame:
    header = json.loads(text)
    arrays, start = {}, 0
    for name, dtype, count in header.pop("arrays"):
        arrays[name] = np.frombuffer(data, DTYPES[dtype], count, start)
        start += arrays[name].nbytes
    return Frame(header, arrays)


def receive(connection: socket.socket) -> Frame | None:
    """The next frame, waiting for it; None at the end."""
    lengths = _exactly(connection, LENGTHS.size)
    if lengths is None:
        return None
    header, data = LENGTHS.unpack(lengths)
    text, body = _exactly(connection, header), _exactly(connection, data)
    return None if text is None or body is None else decode(text, body)


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """The same on an event loop."""
    try:
        header, data = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
        return decode(await reader.readexactly(header), await reader.readexactly(data))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    buffer = bytearray(count)
    view, there = memoryview(buffer), 0
    while there < count:
        try:
            received = connection.recv_into(view[there:])
        except ConnectionError:
            return None
        if not received:
            return None
        there += received
    return bytes(buffer)

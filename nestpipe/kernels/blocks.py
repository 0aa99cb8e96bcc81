"""The kernel that reads and writes rows in a file, without the GIL: many blocks under way at once, each slot verified.

Position p has slot p % per_block of block p // per_block. A slot is the record's words, its key (int64) and a 64-bit
checksum over table, position, key and words. Blocks are multiples of 4 KiB and start at multiples of 4 KiB, as is the
memory they are read into: what O_DIRECT asks for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic

from nestpipe.kernels import aio
from nestpipe.kernels.aio import READ, WRITE
from nestpipe.kernels.jit import float_pointer, inlined, int_pointer, kernel
from nestpipe.kernels.keys import mix
from nestpipe.kernels.rows import address

# What went wrong, in failure[0]; failure[1:] are the position, errno or bytes got, and the key found.
FINE, SYSTEM, SHORT, DAMAGED, OTHER_KEY = range(5)
IN_PLACE, KEPT, LOST = range(3)  # where a block is as it was: here still, in the other file, nowhere
EINTR = 4


class Layout(NamedTuple):
    words: int  # of a record
    per_block: int  # slots
    block_bytes: int
    tag: np.uint64  # of the table and the worker: part of every checksum


def _libc(name):
    """pread or pwrite, by name: an address, as ctypes gives it, could not be kept in the compiled file."""

    @intrinsic
    def call(typingctx, fd, memory, num_bytes, offset):
        def codegen(context, builder, signature, args):
            i32, i64 = ir.IntType(32), ir.IntType(64)
            function_type = ir.FunctionType(i64, [i32, cgutils.voidptr_t, i64, i64])
            function = cgutils.get_or_insert_function(builder.module, function_type, name)
            pointer = builder.inttoptr(args[1], cgutils.voidptr_t)
            return builder.call(function, [args[0], pointer, args[2], args[3]])

        return types.int64(types.int32, types.int64, types.int64, types.int64), codegen

    return call


_pread, _pwrite = _libc("pread"), _libc("pwrite")


@intrinsic
def _errno(typingctx):
    def codegen(context, builder, signature, args):
        i32 = ir.IntType(32)
        function_type = ir.FunctionType(i32.as_pointer(), [])
        function = cgutils.get_or_insert_function(builder.module, function_type, "__errno_location")
        return builder.load(builder.call(function, []))

    return types.int32(), codegen


@kernel
def _transfer(writes, fd, memory, num_bytes, offset):
    """Moves all bytes, or returns (how many it moved, errno: 0 at the end of the file)."""
    done = np.int64(0)
    while done < num_bytes:
        if writes:
            moved = _pwrite(np.int32(fd), memory + done, num_bytes - done, offset + done)
        else:
            moved = _pread(np.int32(fd), memory + done, num_bytes - done, offset + done)
        if moved < 0:
            error = np.int64(_errno())
            if error == EINTR:
                continue
            return done, error
        if moved == 0:
            return done, np.int64(0)
        done += moved
    return done, np.int64(0)


@kernel
def checksum(layout, position, key, here):
    """Of the record at an address. Each word changes the sum: every step is a bijection of the sum before it."""
    h = mix(layout.tag ^ mix(np.uint64(position)))
    h = mix(h ^ np.uint64(key))
    words = carray(int_pointer(here), layout.words)
    for d in range(layout.words):
        h = (h ^ np.uint64(np.uint32(words[d]))) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(32)
    return mix(h)


@inlined
def _fail(failure, code, position, detail, key):
    failure[0] = code
    failure[1] = position
    failure[2] = detail
    failure[3] = key


@inlined
def _slot(layout, position, first, blocks):
    """Where the slot of a position lies, if block `first` was read to the address `blocks`."""
    in_block = position % layout.per_block * (layout.words * 4 + 16)
    return blocks + (position // layout.per_block - first) * layout.block_bytes + in_block


@inlined
def _run_end(layout, positions, i, most):
    """The first index after i whose block is not in the same or the next blocks as those before; at most `most` blocks."""
    first = positions[i] // layout.per_block
    last = first
    j = i
    while j < len(positions):
        block = positions[j] // layout.per_block
        if block > last + 1 or block >= first + most:
            break
        last = block
        j += 1
    return j


@kernel
def _verify(layout, positions, keys, places, rows, start, end, blocks, failure):
    """Copies records start to end out of their blocks; stops at the first slot that is not what it should be."""
    first = positions[start] // layout.per_block
    for i in range(start, end):
        p = positions[i]
        here = _slot(layout, p, first, blocks)
        # A slot may start at any multiple of 4: read the two 64-bit numbers by halves.
        tail = carray(int_pointer(here + layout.words * 4), 4)
        key = np.int64(np.uint64(np.uint32(tail[0])) | (np.uint64(np.uint32(tail[1])) << np.uint64(32)))
        stored = np.uint64(np.uint32(tail[2])) | (np.uint64(np.uint32(tail[3])) << np.uint64(32))
        if checksum(layout, p, key, here) != stored:
            _fail(failure, DAMAGED, p, 0, key)
            return
        if key != keys[i]:
            _fail(failure, OTHER_KEY, p, 0, key)
            return
        words = carray(float_pointer(here), layout.words)
        target = carray(float_pointer(address(rows, places[i])), layout.words)
        for d in range(layout.words):
            target[d] = words[d]


@kernel
def _patch(layout, positions, keys, places, rows, start, end, blocks):
    """Copies records start to end into their blocks."""
    first = positions[start] // layout.per_block
    for i in range(start, end):
        p = positions[i]
        here = _slot(layout, p, first, blocks)
        words = carray(float_pointer(here), layout.words)
        source = carray(float_pointer(address(rows, places[i])), layout.words)
        for d in range(layout.words):
            words[d] = source[d]
        total = checksum(layout, p, keys[i], here)
        key = np.uint64(keys[i])
        tail = carray(int_pointer(here + layout.words * 4), 4)
        tail[0] = np.int32(key)
        tail[1] = np.int32(key >> np.uint64(32))
        tail[2] = np.int32(total)
        tail[3] = np.int32(total >> np.uint64(32))


@kernel
def _preserve(layout, first, num_blocks, blocks, undo, kept):
    """Copies blocks to the same place of the file `undo`, those that are not there yet."""
    for n in range(num_blocks):
        if first + n < len(kept) and kept[first + n] == IN_PLACE:
            here, offset = blocks + n * layout.block_bytes, (first + n) * layout.block_bytes
            moved, _ = _transfer(True, undo, here, layout.block_bytes, offset)
            kept[first + n] = KEPT if moved == layout.block_bytes else LOST


@kernel
def move_rows(writes, fd, layout, positions, keys, places, rows, ring, failure, undo, kept):
    """Reads record places[i] of rows from positions[i] (ascending), where it must be that of keys[i]; or writes it there.

    Neighbouring blocks go together, each block once; blocks that are not written whole are read first and keep their other
    slots. After a failure nothing more is begun, and nothing is under way when it returns.
    A block below len(kept) is copied to the file `undo` before it is overwritten, if kept[block] is IN_PLACE; and kept[block]
    says so (or that it could not be done) before anything of it is overwritten.
    """
    depth = len(ring.queue)
    for n in range(depth):
        ring.idle[n] = n
    num_idle, queued, flying, i = depth, 0, 0, 0
    while True:
        if failure[0]:
            queued = 0
        while num_idle and i < len(positions) and not failure[0]:
            num_idle -= 1
            n = ring.idle[num_idle]
            end = _run_end(layout, positions, i, ring.unit_bytes // layout.block_bytes)
            first = positions[i] // layout.per_block
            num_blocks = positions[end - 1] // layout.per_block - first + 1
            whole = writes and end - i == num_blocks * layout.per_block and first >= len(kept)
            aio.ask(ring, n, fd, WRITE if whole else READ, num_blocks * layout.block_bytes, first * layout.block_bytes)
            if whole:
                _patch(layout, positions, keys, places, rows, i, end, ring.requests[n, 3])
            ring.spans[n, 0], ring.spans[n, 1] = i, end
            ring.queue[queued] = ring.requests[n].ctypes.data
            queued += 1
            i = end
        if queued + flying == 0:
            return
        if queued and ring.context:
            accepted = max(0, aio.submit(ring, queued))  # perhaps not all of them
            flying += accepted
            queued -= accepted
            for k in range(queued):
                ring.queue[k] = ring.queue[k + accepted]
        if flying:
            # For several: to be woken seldom, and yet leave enough under way.
            ended = aio.wait(ring, min(flying, max(1, depth // 4)))
            if ended < 0:
                error = np.int64(_errno())
                if error == EINTR:
                    continue
                _fail(failure, SYSTEM, positions[0], error, 0)  # the context is gone, and what was under way with it
                return
            flying -= ended
        else:  # not a single one is taken: as if it had ended with nothing moved
            ring.events[0, 0] = (ring.queue[0] - ring.requests.ctypes.data) // 64
            ring.events[0, 2] = 0
            ended = 1
            queued -= 1
            ring.queue[0] = ring.queue[queued]
        for e in range(ended):
            n, moved = ring.events[e, 0], ring.events[e, 2]
            request, start, end = ring.requests[n], ring.spans[n, 0], ring.spans[n, 1]
            written = request[2] & WRITE
            if moved < request[4] and not failure[0]:  # once more, to the end or until the reason is known
                moved, error = _transfer(written, fd, request[3], request[4], request[5])
                if moved < request[4]:
                    _fail(failure, SYSTEM if error else SHORT, positions[start], error if error else moved, 0)
            if failure[0]:
                continue
            if writes and not written:
                num_blocks = request[4] // layout.block_bytes
                _preserve(layout, request[5] // layout.block_bytes, num_blocks, request[3], undo, kept)
                _patch(layout, positions, keys, places, rows, start, end, request[3])
                request[2] |= WRITE
                ring.queue[queued] = request.ctypes.data
                queued += 1
                continue
            if not writes:
                _verify(layout, positions, keys, places, rows, start, end, request[3], failure)
            ring.idle[num_idle] = n
            num_idle += 1

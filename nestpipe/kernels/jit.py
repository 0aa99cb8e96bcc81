"""How kernels are compiled, and the two things Numba lacks: a view of memory at an address, and a cache prefetch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

try:
    import fcntl
except ImportError:  # Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

PATIENCE = 60.0  # seconds to wait for another process that compiles the same kernel; it takes one or two


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled on first use, kept on disk, runs without the GIL so that lanes overlap. Workers that start together on a machine
    compile it once.

    No fast-math: the order of every sum is part of a kernel's contract.
    """
    dispatcher: Any = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)
    compile_it = dispatcher.compile

    def compile_once(signature: Any) -> Any:
        with global_compiler_lock, _alone(dispatcher):
            return compile_it(signature)

    dispatcher.compile = compile_once
    return dispatcher


@contextlib.contextmanager
def _alone(dispatcher: Any) -> Iterator[None]:
    """While it lasts, other processes wait to compile the same kernel, and then find it on disk. A kernel that calls another
    waits for it with its own lock held: calls make no circle, so neither do waits."""
    function = dispatcher.py_func
    name = f"{function.__module__}.{function.__name__}-{function.__code__.co_firstlineno}.lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a folder that cannot be written to: each compiles for itself
            folder = dispatcher.stats.cache_path
            os.makedirs(folder, exist_ok=True)
            file = stack.enter_context(open(os.path.join(folder, name), "w"))
            give_up = time.monotonic() + PATIENCE
            while fcntl is not None and time.monotonic() < give_up:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
        yield


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of kernels, pasted into them: a call would count references to the arrays it is given, atomically."""
    return numba.njit(nogil=True, error_model="numpy", boundscheck=False, inline="always")(function)


def _pointer_to(numba_type, llvm_type):
    @intrinsic
    def pointer(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], llvm_type.as_pointer())

        return types.CPointer(numba_type)(types.int64), codegen

    return pointer


# A typed pointer from an integer address; `numba.carray` makes an array of it.
float_pointer = _pointer_to(types.float32, ir.FloatType())
int_pointer = _pointer_to(types.int32, ir.IntType(32))
long_pointer = _pointer_to(types.int64, ir.IntType(64))
half_pointer = _pointer_to(types.uint16, ir.IntType(16))


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an address; harmless if the address is not mapped."""

    def codegen(context, builder, signature, args):
        i32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        builder.call(function, [pointer, ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def float_bits(typingctx, value):
    """The bits of a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def bits_float(typingctx, bits):
    """The float32 with the given bits (uint32)."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen

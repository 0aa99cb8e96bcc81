"""Batches read in a process of their own, so that Python code that makes them cannot hold up training.

The reader process writes each batch to a local socket: a short pickle with the tensors taken out, then their bytes in
one piece, which arrive in one block of ordinary (or pinned) memory. No shared memory, so that a small /dev/shm does not
matter; the bytes are copied by the kernel, without the GIL.

Why not torch's DataLoader: it passes every tensor on its own, which costs the trainer 20 ms of CPU for a batch of 54
tensors (1 ms here); under "forkserver" its worker outlives a trainer that was killed; and it draws from the trainer's
random numbers, so that dropout would depend on where batches are read. "fork" is not an option: threads of the process
group and of the lanes run in the trainer.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.source_state import state_of

_SIZES = struct.Struct("<QQ")  # bytes of the pickle, bytes of the tensors
_ALIGN = 64
_GRACE = 5.0  # seconds for the reader process to go once it has been told, or is gone


def in_process(make: Callable[..., Iterable[Batch]], *args: Any, **kwargs: Any) -> Reader:
    """The batches of `make(*args, **kwargs)`, which is called and read in another process: the same ones, bit for bit.

    `in_process(data.batches, "train", batch_size=256, rank=0, world=1, seed=0)`. What is given must be picklable: `make`
    is a function at the top level of a module or a method of an object that can be sent. To read many epochs, give a
    function that goes through them all: the process is started once, when the first batch is asked for.

    A script that uses this keeps its own start under `if __name__ == "__main__":`, because the process imports it.
    """
    return Reader(make, args, kwargs)


def prepare() -> None:
    """Imports what a reader process needs, in the background: called early, it takes seconds off the first batch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "nestpipe.data"])  # has no effect on a server that runs already
    multiprocessing.forkserver.ensure_running()


class Reader(Iterator[Batch]):
    """An iterator over the batches of another process, which reads one batch ahead; see `in_process`.

    What goes wrong while reading is raised here with its own type and message; the traceback of the reader process is a
    note below it. If the process dies, a RuntimeError says how. `close` ends the process; so does the end of the data, of
    the iterator's life, and of this process, however it comes.
    """

    def __init__(self, make: Callable[..., Iterable[Batch]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._what = (make, args, kwargs)
        self._socket: socket.socket | None = None
        self._process: Any = None
        self._ended = False
        self._state: Any = None
        self._changing = threading.Lock()  # `close` comes from another thread than `next`
        self._owner = os.getpid()
        self._pinned = torch.accelerator.is_available()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        try:
            kind, value = self._receive(self._connection())
        except BaseException:
            self.close()
            raise
        if kind == "batch":
            batch, self._state = value
            return batch
        self.close()
        if kind == "end":
            raise StopIteration
        error, text = value
        error.add_note(f"In the reader process:\n{text}")
        raise error

    def state_dict(self) -> Any:
        """What the source said of itself when it had given the last batch that has arrived here; None if it says nothing."""
        return self._state

    def close(self) -> None:
        """Ends the process, in the middle of a batch if need be. There are no more batches then."""
        self._ended = True
        with self._changing:
            connection, self._socket = self._socket, None
            process, self._process = self._process, None
        if connection is not None:
            with contextlib.suppress(OSError):  # it has left already
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a batch; the process leaves
            connection.close()
        if process is not None:
            process.join(_GRACE)
            if process.exitcode is None:
                process.kill()  # it holds nothing that could be lost
                process.join()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._ended and self._owner == os.getpid():  # not in a copy that a fork has made
            self.close()

    def _connection(self) -> socket.socket:
        with self._changing:
            if self._ended:
                raise _closed()
            if self._socket is None:
                self._socket, self._process = self._start()
            return self._socket

    def _start(self) -> tuple[socket.socket, Any]:
        prepare()
        ours, theirs = socket.socketpair()
        process = multiprocessing.get_context("forkserver").Process(
            target=_read, args=(theirs, dict(os.environ), *self._what), name="nestpipe-reader", daemon=True
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            ours.close()
            raise ValueError(
                f"the data cannot be sent to a reader process: {error}; read it in a thread, or define what is named at "
                f"the top level of a module"
            ) from error
        finally:
            theirs.close()
        return ours, process

    def _receive(self, source: socket.socket) -> tuple[str, Any]:
        num_pickled, num_bytes = _SIZES.unpack(self._bytes(source, bytearray(_SIZES.size)))
        pickled = self._bytes(source, bytearray(num_pickled))
        # One block for all tensors; pinned, the copy to the device needs no further one.
        block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._bytes(source, block.numpy())
        return _Unpickler(io.BytesIO(pickled), block).load()

    def _bytes(self, source: socket.socket, into: Any) -> Any:
        view, filled = memoryview(into), 0
        while filled < len(view):
            try:
                count = source.recv_into(view[filled:], 0, socket.MSG_WAITALL)  # one call for all, without the GIL
            except OSError:
                count = 0
            if not count:
                raise self._death()
            filled += count
        return into

    def _death(self) -> RuntimeError:
        process = self._process
        if process is None:
            return _closed()
        process.join(_GRACE)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was ended by {_signal_name(-code)}; was memory short? It holds a copy of the data set"
        else:
            how = f"left with exit code {code}; its own message, if it left one, stands above"
        return RuntimeError(
            f"the process that reads the data (pid {process.pid}) {how}. Reading in a thread does without it"
        )


def _closed() -> RuntimeError:
    return RuntimeError("the reader was closed while a batch was being read")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- in the reader process -------------------------------------------------------------------------------------------


def _read(
    target: socket.socket,
    environment: dict[str, str],
    make: Callable[..., Iterable[Batch]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    # Credentials of where the data lies may have come after the server began, whose environment this is a copy of.
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the trainer decides when this one ends
    threading.Thread(target=_leave_with_trainer, args=(target,), daemon=True).start()
    torch.set_num_threads(1)
    send = _Sender(target)
    try:
        batches = make(*args, **kwargs)
        source = iter(batches)
        speaker = batches if hasattr(batches, "state_dict") else source
        for batch in source:
            send("batch", (batch, state_of(speaker)))
        send("end", None)
    except (Exception, SystemExit) as error:
        send("error", (_sendable(error), traceback.format_exc()))


def _leave_with_trainer(target: socket.socket) -> None:
    """Nothing is ever sent this way, so that the wait ends when the trainer closes its side, or dies."""
    try:
        target.recv(1)
    finally:
        os._exit(0)


def _sendable(error: BaseException) -> BaseException:
    """The error itself if it survives the journey, else one that says the same."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Sender:
    """Writes objects with tensors in them to a socket; waits there until the trainer takes them."""

    def __init__(self, target: socket.socket) -> None:
        self._target = target
        self._bytes = memoryview(b"")  # kept, because fresh memory costs page faults
        self._block = torch.empty(0, dtype=torch.uint8)  # the same memory

    def __call__(self, kind: str, value: Any) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump((kind, value))
        if pickler.num_bytes > len(self._bytes):
            self._bytes = memoryview(bytearray(pickler.num_bytes * 3 // 2))
            self._block = torch.frombuffer(self._bytes, dtype=torch.uint8)
        for start, tensor in pickler.tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._block[start : start + len(flat)].copy_(flat)
        pickled = file.getvalue()
        try:
            self._target.sendall(_SIZES.pack(len(pickled), pickler.num_bytes) + pickled)
            self._target.sendall(self._bytes[: pickler.num_bytes])
        except OSError:
            os._exit(0)  # the trainer has gone, or has had enough


class _Pickler(pickle.Pickler):
    """Leaves out the bytes of tensors, and lists them with where they are to stand in the block."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, Tensor]] = []
        self.num_bytes = 0
        self._places: dict[int, Any] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return None  # pickled like anything else
        if id(value) not in self._places:  # a tensor that two features share travels once
            self._places[id(value)] = (value.dtype, self.num_bytes, tuple(value.shape))
            self.tensors.append((self.num_bytes, value))
            self.num_bytes += -(-value.numel() * value.itemsize // _ALIGN) * _ALIGN
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back, as views of the block."""

    def __init__(self, file: io.BytesIO, block: Tensor) -> None:
        super().__init__(file)
        self._block = block
        self._typed: dict[torch.dtype, Tensor] = {}  # one view per type, so that a tensor costs one slice

    def persistent_load(self, place: Any) -> Tensor:
        dtype, start, shape = place
        if dtype not in self._typed:
            self._typed[dtype] = self._block.view(dtype)
        count = 1
        for length in shape:
            count *= length
        flat = self._typed[dtype].narrow(0, start // dtype.itemsize, count)
        return flat if len(shape) == 1 else flat.view(shape)

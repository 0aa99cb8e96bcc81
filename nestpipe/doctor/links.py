"""Every pair of workers, one after the other in disjoint pairs: how long a message takes, and how many bits fit through."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from nestpipe.doctor.checks import Link

MOST_ROUNDS = 63  # of W workers every pair meets in W - 1 rounds; of more workers than 64 each meets 63 others
PINGS = 8
FLOATS = 1 << 20  # of a message whose rate is measured, 4 MB


def partner(rank: int, world: int, number: int) -> int | None:
    """Whom a worker meets in a round: over world - 1 rounds (world, if it is odd) everybody once. None: it rests."""
    seats = world + world % 2
    if rank == seats - 1:
        found = number % (seats - 1)
        # The last seat stays; who would meet itself meets the last seat.
        found = next(other for other in range(seats - 1) if (2 * other) % (seats - 1) == found)
    else:
        found = (number - rank) % (seats - 1)
        found = seats - 1 if found == rank else found
    return None if found >= world else found


def measure() -> list[Link]:
    """All workers call it; each gets the links to those of higher rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rounds = min(world - 1 + world % 2, MOST_ROUNDS)
    links = []
    for number in range(rounds):
        dist.barrier()  # so that pairs have the wires to themselves, as far as they do not share one
        other = partner(rank, world, number)
        if other is not None:
            link = _measure(rank, other)
            links += [link] if rank < other else []
    return links


def _measure(rank: int, other: int) -> Link:
    first = rank < other
    delays, ahead = [], 0.0
    for _ in range(1 + PINGS):  # the first opens the connection
        clock = torch.zeros(1, dtype=torch.float64)
        sent, started = time.time(), time.perf_counter()
        if first:
            dist.send(clock, other)
            dist.recv(clock, other)
        else:
            dist.recv(clock, other)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), other)
        delays.append(time.perf_counter() - started)
        if delays[-1] == min(delays[1:], default=delays[-1]):
            ahead = float(clock) - (sent + delays[-1] / 2)
    outgoing, incoming = torch.zeros(FLOATS), torch.empty(FLOATS)
    seconds = []
    for size in (1, FLOATS, FLOATS):
        started = time.perf_counter()
        works = [dist.irecv(incoming[:size], other), dist.isend(outgoing[:size], other)]
        for work in works:
            assert work is not None
            work.wait()
        seconds.append(time.perf_counter() - started)
    rate = 8 * outgoing.nbytes / 1e6 / min(seconds[1:])
    return Link(min(rank, other), max(rank, other), 1e3 * min(delays[1:]), rate, ahead if rank == 0 else None)

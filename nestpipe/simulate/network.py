"""What an exchange takes, by the usual alpha-beta forms: a time for each message, a time for each byte."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """Links of one kind, as one worker sees them.

    latency: seconds that each message takes, however small; many small messages cost as much.
    bandwidth: bytes per second, in each direction.
    congestion: by how much a byte slows down for every further peer in an all-to-all, as a part of its time: flows from many
        workers meet on the same links. 0.01: with 101 peers a byte takes twice as long.
    """

    latency: float
    bandwidth: float
    congestion: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.congestion >= 0 and self.bandwidth > 0):
            raise ValueError(
                f"a link needs a bandwidth above 0, and a latency and congestion of at least 0, got {self}"
            )

    def seconds(self, num_bytes: float, peers: int) -> float:
        """From one worker to so many others, all of them sending at once."""
        if peers == 0:
            return 0.0
        return peers * self.latency + num_bytes / self.bandwidth * (1 + self.congestion * (peers - 1))


@dataclasses.dataclass(frozen=True)
class Network:
    """Workers lie side by side on nodes: worker w is on node w // per_node."""

    per_node: int
    inside: Level
    between: Level

    def all_to_all(self, num_bytes: float, workers: int, *, spread: int = 1) -> float:
        """Every worker has so many bytes for all of a group together, the same for each, itself included. Links inside a node
        and between nodes work at the same time.

        spread: members of a group are so many workers apart, on as many more nodes.
        """
        near = min(workers, max(1, self.per_node // spread)) - 1
        far = workers - 1 - near
        each = num_bytes / workers
        return max(self.inside.seconds(each * near, near), self.between.seconds(each * far, far))

    def all_reduce(self, num_bytes: float, workers: int, *, spread: int = 1) -> float:
        """Sums in halves that are passed on: inside nodes, between nodes, and back."""
        near = min(workers, max(1, self.per_node // spread))
        far = math.ceil(workers / near)
        seconds = 0.0
        for level, count, share in ((self.inside, near, 1.0), (self.between, far, 1.0 / near)):
            if count > 1:
                seconds += 2 * math.log2(count) * level.latency
                seconds += 2 * (count - 1) / count * num_bytes * share / level.bandwidth
        return seconds

"""Mesh: workers as replicas x shards. Each row of it is a group that holds all tables, sharded inside; each column holds the
same shard, once in every group."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nestpipe.schedule.setting import NEAR

AXES = ("replica", "shard")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """ranks: [replicas, shards]. machines: of every rank, where it runs."""

    ranks: np.ndarray
    machines: tuple[str, ...]

    @classmethod
    def of(cls, machines: Sequence[str], *, replicas: int, near: str = "shards") -> Mesh:
        """Lays `replicas` groups over the workers, neighbours on one machine first.

        machines: of every rank. near: what stays as close together as can be: "shards": a group, whose rows and gradients then
        take the fast links; "replicas": those that hold the same shard.
        """
        assert near in NEAR
        world = len(machines)
        if world % replicas:
            fitting = [str(m) for m in range(1, world + 1) if world % m == 0]
            raise ValueError(
                f"replicas={replicas}: {world} workers cannot form {replicas} equal groups; take one of {', '.join(fitting)}, or "
                f"another number of workers"
            )
        by_machine = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        order = np.array(sorted(range(world), key=lambda rank: (by_machine[machines[rank]], rank)))
        ranks = order.reshape(replicas, -1) if near == "shards" else order.reshape(-1, replicas).T
        return cls(np.ascontiguousarray(ranks), tuple(machines))

    @classmethod
    def flat(cls, world: int) -> Mesh:
        """One group of all."""
        return cls.of([""] * world, replicas=1)

    @property
    def world(self) -> int:
        return self.ranks.size

    @property
    def replicas(self) -> int:
        return self.ranks.shape[0]

    @property
    def shards(self) -> int:
        return self.ranks.shape[1]

    def place(self, rank: int) -> tuple[int, int]:
        """Group and shard of a worker."""
        ((group, shard),) = np.argwhere(self.ranks == rank).tolist()
        return group, shard

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """The same as torch has it, for the dense part of one's own program. All workers call it: it makes process groups."""
        mesh = DeviceMesh(device_type, torch.from_numpy(self.ranks.copy()), mesh_dim_names=AXES)
        dist.barrier()  # a worker that left the groups at once would break the connections that others still make to it
        return mesh

    def describe(self) -> str:
        groups = " | ".join(_ranges(group.tolist()) for group in self.ranks)
        spans = [len({self.machines[rank] for rank in group}) for group in self.ranks.tolist()]
        columns = [len({self.machines[rank] for rank in column}) for column in self.ranks.T.tolist()]
        machines = len(set(self.machines))
        text = f"mesh: {self.replicas} replicas x {self.shards} shards; groups of ranks {groups}"
        if machines == 1:
            return f"{text}; all on one machine"
        inside = "each group is inside one machine" if max(spans) == 1 else f"a group spans up to {max(spans)} machines"
        return f"{text}; {inside}, the replicas of a shard are on {max(columns)} of {machines} machines"


def _ranges(ranks: Sequence[int]) -> str:
    """0-3, 8-11"""
    runs = itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(entries) for _, entries in runs)]
    return ", ".join(str(a) if a == z else f"{a}-{z}" for a, z in ends)

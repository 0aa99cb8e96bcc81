"""Mesh: which ranks form a group, from where they run; the same as torch's DeviceMesh."""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe.exchange.mesh import AXES, Mesh
from nestpipe.exchange.plan import place
from nestpipe.tables import Feature, Table
from tests.cluster import Cluster


def test_a_group_is_inside_a_machine_or_the_replicas_of_a_shard_are() -> None:
    machines = ["a"] * 4 + ["b"] * 4
    shards, replicas = (Mesh.of(machines, replicas=2, near=near) for near in ("shards", "replicas"))
    assert shards.ranks.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert replicas.ranks.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert "groups of ranks 0-3 | 4-7; each group is inside one machine" in shards.describe()
    assert "a group spans up to 2 machines, the replicas of a shard are on 1 of 2 machines" in replicas.describe()
    assert shards.place(6) == (1, 2)


def test_ranks_that_alternate_between_machines_are_sorted_by_machine() -> None:
    mesh = Mesh.of(["a", "b"] * 3, replicas=2)
    assert mesh.ranks.tolist() == [[0, 2, 4], [1, 3, 5]] and "0, 2, 4 | 1, 3, 5" in mesh.describe()


def test_workers_that_cannot_form_equal_groups_are_told_which_numbers_can() -> None:
    with pytest.raises(ValueError, match=r"replicas=4: 6 workers cannot form 4 equal groups; take one of 1, 2, 3, 6"):
        Mesh.of(["a"] * 6, replicas=4)


def test_tables_may_have_no_replicas_or_one_on_every_worker() -> None:
    tables = [Table("a", 4), Table("b", 4, replicas=1), Table("c", 4, replicas="all"), Table("d", 4, owners=1)]
    features = [Feature(table.name, table.name) for table in tables]
    mesh = Mesh.of(["a"] * 4, replicas=2)
    held = place(tables, features, mesh, 3)
    assert [of.owners.tolist() for of in held[:3]] == [[2, 3], [0, 1, 2, 3], [3]]
    assert [of.peers.tolist() for of in held] == [[1, 3], [3], [0, 1, 2, 3], [1, 3]]
    # The one owner of d is the same place in every group.
    owners = [place(tables, features, mesh, rank)[3].owners.tolist() for rank in range(4)]
    assert owners[0] == owners[1] and owners[2] == owners[3] == [owners[0][0] + 2]


def test_owners_auto_is_refused_with_replicas() -> None:
    with pytest.raises(ValueError, match="owners='auto' is not decided for tables with replicas"):
        place([Table("a", 4, owners="auto")], [Feature("a", "a", "sum")], Mesh.of(["a"] * 4, replicas=2), 0)


def torch_mesh() -> tuple[list[list[int]], list[str], list[int]]:
    from nestpipe.exchange.mesh import Mesh

    mesh = Mesh.of(["a"] * 4, replicas=2, near="replicas").device_mesh()
    return mesh.mesh.tolist(), list(mesh.mesh_dim_names or ()), mesh.get_coordinate() or []


def test_torch_has_the_same_mesh(cluster: Cluster) -> None:
    results = cluster.run(4, torch_mesh)
    for rank, (ranks, names, place_of) in enumerate(results):
        assert ranks == [[0, 2], [1, 3]] and tuple(names) == AXES
        assert np.argwhere(np.array(ranks) == rank)[0].tolist() == list(place_of)

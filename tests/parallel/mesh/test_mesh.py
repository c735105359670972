"""Ranks on a mesh: every rank has a place of its own, and groups part the ranks."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.mesh.mesh import AXES, Coordinates, Mesh

MESHES = st.builds(Mesh, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


@given(MESHES)
def test_every_rank_has_a_place_of_its_own(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    assert places == sorted(places), "tensor neighbours are neighbours in rank, then stages"
    assert len(set(places)) == mesh.size == mesh.data * mesh.pipeline * mesh.tensor


@given(MESHES)
def test_groups_part_the_ranks_along_one_axis(mesh: Mesh) -> None:
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(chain.from_iterable(groups)) == list(range(mesh.size))
        for group in groups:
            assert len(group) == getattr(mesh, axis)
            assert group == sorted(group)
            at = mesh.coordinates(group[0])
            for index, rank in enumerate(group):
                assert mesh.coordinates(rank) == at._replace(**{axis: index})


def test_the_order_of_the_axes() -> None:
    mesh = Mesh(data=2, pipeline=3, tensor=4)
    assert mesh.rank(Coordinates(1, 2, 3)) == (1 * 3 + 2) * 4 + 3 == mesh.size - 1
    assert mesh.groups("tensor")[0] == [0, 1, 2, 3]
    assert mesh.groups("pipeline")[0] == [0, 4, 8]
    assert mesh.groups("data")[0] == [0, 12]
    assert str(mesh) == "data 2 x pipeline 3 x tensor 4"


@pytest.mark.parametrize("axis", AXES)
def test_a_degree_below_one_is_refused(axis: str) -> None:
    with pytest.raises(ValueError, match=f"{axis} is 0, but it has to be 1 or more"):
        Mesh(**{axis: 0})


def test_a_mesh_of_another_size_is_refused() -> None:
    Mesh(2, 2, 2).check(8)
    sizes = "data 2 x pipeline 2 x tensor 2 are 8 ranks, but the world has 6"
    with pytest.raises(ValueError, match=f"{sizes}: .* product is 6, or 8 workers"):
        Mesh(2, 2, 2).check(6)


def test_tensor_neighbours_share_a_host() -> None:
    Mesh(pipeline=2, tensor=2).check_hosts([0, 0, 1, 1])
    with pytest.raises(
        ValueError, match=r"ranks 0, 1, 2, 3 divide the same layers but are on different hosts"
    ):
        Mesh(tensor=4).check_hosts([0, 0, 1, 1])


def test_the_table_names_every_rank() -> None:
    lines = Mesh(1, 2, 2).table().splitlines()
    assert [line.split() for line in lines] == [
        ["tensor", "0", "tensor", "1"],
        ["data", "0,", "stage", "0", "rank", "0", "rank", "1"],
        ["data", "0,", "stage", "1", "rank", "2", "rank", "3"],
    ]

"""The shape of the binomial tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.collectives.algorithms import tree


@given(size=st.integers(1, 70), root=st.integers(0, 69))
def test_every_rank_but_the_root_is_the_child_of_its_parent_and_the_way_up_is_short(
    size: int, root: int
) -> None:
    root %= size
    for rank in range(size):
        assert all(
            tree.parent(size, child, root) == rank for child in tree.children(size, rank, root)
        )
        steps, above = 0, rank
        while above != root:
            below, above = above, tree.parent(size, above, root)
            assert below in tree.children(size, above, root)
            steps += 1
        assert steps <= (size - 1).bit_length()
        assert len(tree.children(size, rank, root)) <= (size - 1).bit_length()


def test_the_tree_of_eight() -> None:
    assert [tree.children(8, rank) for rank in range(8)] == [
        [1, 2, 4],
        [],
        [3],
        [],
        [5, 6],
        [],
        [7],
        [],
    ]

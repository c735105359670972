"""Keys over servers: every key has one owner, and all own as many bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.parameter_server.keys import KeyRange, VectorSize, divide

vectors = st.lists(
    st.builds(VectorSize, st.integers(0, 1000), st.sampled_from([2, 4, 8])), min_size=1, max_size=3
)


@given(vectors, st.integers(1, 9))
def test_each_key_is_in_one_range_and_ranges_are_in_order(
    vectors: list[VectorSize], servers: int
) -> None:
    found = [keys for ranges in divide(vectors, servers) for keys in ranges]
    assert found == sorted(found)
    for number, vector in enumerate(vectors):
        keys = [k for one in found if one.vector == number for k in range(one.start, one.stop)]
        assert keys == list(range(vector.elements))


@given(vectors, st.integers(1, 9))
def test_servers_own_as_many_bytes_to_within_an_element(
    vectors: list[VectorSize], servers: int
) -> None:
    total = sum(vector.elements * vector.itemsize for vector in vectors)
    for ranges in divide(vectors, servers):
        owned = sum(len(keys) * vectors[keys.vector].itemsize for keys in ranges)
        # At each of two ends an element may belong to the other side.
        assert abs(owned - total / servers) <= 2 * max(v.itemsize for v in vectors)


def test_a_server_may_have_two_ranges_and_one_may_have_none() -> None:
    assert divide([VectorSize(2, 8), VectorSize(8, 4)], 2) == [
        [KeyRange(0, 0, 2), KeyRange(1, 0, 2)],
        [KeyRange(1, 2, 8)],
    ]
    assert sorted(map(len, divide([VectorSize(1, 4)], 3))) == [0, 0, 1]

"""Tensors that share memory, against a count of their addresses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dure.tensors.overlap import any_overlap, is_same, overlap, overlaps_itself

WHOLE = torch.arange(24.0)
VIEWS = {
    "all": WHOLE,
    "nothing": WHOLE[3:3],
    "begin": WHOLE[:12],
    "end": WHOLE[12:],
    "middle": WHOLE[8:16],
    "one": WHOLE[12],
    "matrix": WHOLE.view(4, 6),
    "even columns": WHOLE.view(4, 6)[:, ::2],
    "odd columns": WHOLE.view(4, 6)[:, 1::2],
    "second column": WHOLE.view(4, 6)[:, 1],
    "transposed": WHOLE.view(4, 6).T,
    "windows": WHOLE.unfold(0, 4, 2),
    "tiles": WHOLE.unfold(0, 4, 4),
    "expanded": WHOLE[5:6].expand(7),
    "crossed": WHOLE.as_strided((2, 2), (2, 3)),
    "elsewhere": torch.zeros(24),
}


def addresses(tensor: Tensor) -> list[int]:
    return [
        tensor.data_ptr()
        + tensor.element_size() * sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in itertools.product(*map(range, tensor.shape))
    ]


@pytest.mark.parametrize("name", VIEWS)
def test_a_tensor_overlaps_itself_if_two_elements_have_one_address(name: str) -> None:
    found = addresses(VIEWS[name])
    assert overlaps_itself(VIEWS[name]) == (len(set(found)) < len(found))


@pytest.mark.parametrize("pair", list(itertools.combinations(VIEWS, 2)), ids=" and ".join)
def test_two_tensors_overlap_if_an_element_of_each_has_one_address(pair: tuple[str, str]) -> None:
    one, other = (VIEWS[name] for name in pair)
    common = bool(set(addresses(one)) & set(addresses(other)))
    if not (overlaps_itself(one) or overlaps_itself(other)):
        assert overlap(one, other) == common
        assert any_overlap([VIEWS["elsewhere"][:1], other, one]) == (common or "elsewhere" in pair)
    elif common:
        assert overlap(one, other)


def test_the_same_elements_in_the_same_order_are_the_same() -> None:
    assert is_same(WHOLE[3:9], WHOLE[3:9].view(2, 3))
    assert not is_same(WHOLE[3:9], WHOLE[3:8])
    assert not is_same(WHOLE[3:9], WHOLE[3:9].view(torch.int32))
    assert not any_overlap([])
    assert overlap(WHOLE[:4].view(torch.float64), WHOLE[3:5])

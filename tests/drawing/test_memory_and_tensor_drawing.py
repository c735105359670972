"""Pictures of ZeRO and of tensor parallel have the figures of their formulas."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.drawing.tensor_parallel import divided_chain, tensor_parallel_picture
from dure.drawing.zero import zero_picture, zero_stages


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(1, 10_000))
def test_the_bytes_of_zero_are_those_of_its_page(n: int, part: int) -> None:
    psi = n * part
    stages = zero_stages(psi, n)
    expected = [16 * psi, 8 * psi + 8 * psi / n, 4 * psi + 12 * psi / n, 16 * psi / n]
    for one, nbytes in zip(stages, expected, strict=True):
        # Adam has a step counter of 4 bytes.
        assert nbytes <= one.total <= nbytes + 4
    sent = [2, 2, 2, 3]
    assert [one.sent for one in stages] == [k * psi * (n - 1) // n for k in sent]


def test_an_optimizer_without_state_has_nothing_to_divide() -> None:
    for one in zero_stages(1000, 4, "sgd"):
        assert one.held.state == 0
    assert [one.held.state for one in zero_stages(1000, 4, "momentum")] == [4000, 1000, 1000, 1000]


def test_the_picture_of_zero_has_its_figures() -> None:
    picture = zero_picture(1_000_000, 4)
    for text in (picture.svg, picture.text()):
        assert "16 MB" in text
        assert "2,250,000" in text
    rows = re.findall(r"rank 2 +(.*)", picture.text())
    # In stage 3 a rank has a quarter of each of the three parts.
    assert [row.count("█") for row in rows] == [36, 27, 18, 9]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["columns", "rows", "alternating"]),
    st.integers(1, 4),
    st.lists(st.integers(1, 4), min_size=2, max_size=7),
    st.integers(1, 5),
)
def test_the_elements_of_a_chain_are_those_of_its_page(
    plan: str, n: int, parts: list[int], b: int
) -> None:
    widths = [n * part for part in parts]
    drawn = divided_chain(plan, n, widths, b)
    *inner, last = [b * width for width in widths[1:]]
    if plan == "alternating":
        sums = [*inner, last][1::2]
        forward = 2 * sum(sums) + (0 if len(inner) % 2 else last)
        backward = 2 * sum(inner[1::2])
    else:
        forward = sum(inner) + (2 if plan == "rows" else 1) * last
        backward = sum(inner)
    assert drawn.sent(backward=False) == forward * (n - 1) // n
    assert drawn.sent(backward=True) == backward * (n - 1) // n


def test_alternating_layers_sum_after_every_second_layer() -> None:
    drawn = divided_chain("alternating", 2, (8, 16, 16, 8))
    assert drawn.columns == (True, False, True)
    assert drawn.parts == (False, True, False, False)
    found = [(one.boundary, one.backward, one.name) for one in drawn.collectives]
    assert sorted(found) == [
        (2, False, "all-reduce"),
        (2, True, "all-reduce"),
        (3, False, "all-gather"),
    ]
    text = tensor_parallel_picture(["alternating"]).text()
    assert "→ all-reduce of 64" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zero_stages(0), "--parameters is 0"),
        (lambda: zero_stages(10, 0), "--ranks is 0"),
        (lambda: zero_stages(10, 2, "adm"), "did you mean 'adam'"),
        (lambda: divided_chain("column"), "did you mean 'columns'"),
        (lambda: divided_chain("rows", 3), "3"),
        (lambda: divided_chain("rows", 2, (8,)), "--widths is 8"),
        (lambda: divided_chain("rows", 9), "--ranks is 9"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]

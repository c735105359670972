"""Messages as bytes: what comes out is what went in, and what is no message is refused."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from dure.federated.engines.products import DeferredUpdate
from dure.protocol import encoding
from dure.protocol.encoding import HEAD, MessageError, from_bytes, length, to_bytes
from dure.protocol.messages import (
    Assignment,
    EvaluationRequest,
    EvaluationResults,
    JoinMessage,
    Message,
    PersonalisedMean,
    PersonalisedRequest,
    Refuse,
    Update,
    UpdateOutcomes,
)

KINDS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def assignment(**changes: Any) -> Assignment:
    given: dict[str, Any] = {
        "ticket": 3,
        "client": 1,
        "round": 2,
        "turn": 2,
        "weights": [torch.arange(5.0)],
        "buffers": [torch.tensor(7), torch.ones(2, 3)],
        "nbytes": 52,
        "deadline": 1.5,
    }
    return Assignment(**{**given, **changes})


MESSAGES: list[Message] = [
    JoinMessage([3, 0, 5]),
    assignment(),
    assignment(extra=[torch.zeros(5)], deadline=None),
    Update(3, 1, 2, 10, 20, math.nan, [torch.randn(5)], [torch.tensor(8)], [torch.randn(5)]),
    Update(3, 1, 2, 10, 20, 0.5, [torch.randn(5)], [], counted=7.5),
    UpdateOutcomes([3, 4], [5]),
    Refuse(3, -1, "it came too late: ü"),
    EvaluationRequest(2, [torch.randn(5)], [], 3.5),
    EvaluationResults([0, 2], {"client_loss": [0.5, math.nan]}),
    PersonalisedRequest(),
    PersonalisedMean([torch.randn(5)]),
]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and bool(torch.equal(one, other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, dict):
        return list(one) == list(other) and alike(list(one.values()), list(other.values()))
    return bool(one == other)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_what_comes_out_is_what_went_in(message: Message) -> None:
    content = to_bytes(message)
    again = from_bytes(content)
    assert type(again) is type(message)
    for name in message.__struct_fields__:
        assert alike(getattr(message, name), getattr(again, name)), name
    assert length(content[:HEAD]) == len(content)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_kind_of_number_travels_as_it_is(dtype: torch.dtype) -> None:
    drawn = torch.tensor([0, 1, 3, 100], dtype=torch.float32).to(dtype)
    for tensor in (drawn, drawn[1], drawn[:0], drawn.view(2, 2).T, drawn.view(2, 2)[:, :0]):
        (again,) = from_bytes(to_bytes(PersonalisedMean([tensor]))).tensors
        assert alike(tensor, again)


def test_conjugates_and_negatives_are_written_out() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    negative = conjugate.imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    (one, other) = from_bytes(to_bytes(PersonalisedMean([conjugate, negative]))).tensors
    assert one.tolist() == [1 - 2j, 3 + 4j]
    assert other.tolist() == [-2, 4]


def test_an_update_that_is_not_formed_yet_is_formed_for_its_message() -> None:
    class Products:
        def one(self, place: int) -> Tensor:
            return torch.full((3,), float(place))

    lazy = DeferredUpdate(Products(), 2, torch.zeros(3))  # type: ignore[arg-type]
    update = Update(0, 0, 0, 1, 1, 0.0, lazy, [])
    assert alike([torch.full((3,), 2.0)], from_bytes(to_bytes(update)).delta)


def test_tensors_are_views_of_the_bytes_that_came() -> None:
    content = to_bytes(PersonalisedMean([torch.zeros(4)]))
    (tensor,) = from_bytes(content).tensors
    content[-4:] = struct.pack("<f", 1.0)
    assert tensor.tolist() == [0, 0, 0, 1]


def test_a_tensor_of_a_kind_that_does_not_travel_is_named() -> None:
    with pytest.raises(TypeError, match="complex32"):
        to_bytes(PersonalisedMean([torch.zeros(1, dtype=torch.complex32)]))


def made(header: Any, data: bytes = b"", version: int = 1, size: int | None = None) -> bytearray:
    """A message by hand."""
    written = msgspec.msgpack.encode(header)
    head = struct.pack(
        "<4sIQQ", b"dure", version, len(written), len(data) if size is None else size
    )
    gap = bytes(-(HEAD + len(written)) % 16)
    return bytearray(head + written + gap + data)


def kept(*tensors: Any) -> dict[str, Any]:
    return {"type": "Kept", "tensors": list(tensors)}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytearray(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "not a message of dure"),
        (bytearray(b"dure"), "starts with 24 bytes"),
        (made(kept(), version=9), "has version 9"),
        (made(kept())[:-1], "has .* bytes, but its header states"),
        (made(kept(), size=1 << 60), "has .* bytes, but its header states"),
        (made(kept(["float32", [2]]), bytes(4)), "is incomplete"),
        (made(kept(["float32", [1 << 40]]), bytes(8)), "is incomplete"),
        (made(kept(["float32", [1 << 40, 1 << 40]]), bytes(8)), "there is no tensor of"),
        (made(kept(["float32", [1 << 62, 4, 0, 1]]), b""), "there is no tensor of"),
        (made(kept(["float32", [0, 1 << 63]]), b""), "there is no tensor of"),
        (made(kept(["float32", [-2]]), bytes(8)), "there is no tensor of"),
        (made(kept(["float32", [1 << 62] * 100_000])), "there is no tensor of"),
        (made(kept(["object", [2]]), bytes(16)), "there is no tensor of object"),
        (made(kept(["float32", [2.5]]), bytes(12)), "it is not a message"),
        (made(kept(["float32", [1]]), bytes(8)), "4 surplus bytes"),
        (made(kept(7)), "it is not a message"),
        (made({"type": "Shutdown"}), "it is not a message"),
        (made({"type": "Join", "sizes": ["many"]}), "it is not a message"),
        (made([1, 2]), "it is not a message"),
    ],
)
def test_what_is_no_message_is_refused_with_the_reason(content: bytearray, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        from_bytes(content)


def test_a_message_that_is_too_long_is_refused_by_its_first_bytes() -> None:
    head = bytes(to_bytes(PersonalisedMean([torch.zeros(1000)]))[:HEAD])
    assert length(head, most=5000) < 5000
    with pytest.raises(MessageError, match="but may have at most 3000"):
        length(head, most=3000)


@given(st.integers(0, len(MESSAGES) - 1), st.integers(0, 10_000), st.integers(0, 255))
def test_a_byte_that_was_changed_gives_a_message_or_a_refusal(which: int, at: int, to: int) -> None:
    content = to_bytes(MESSAGES[which])
    content[at % len(content)] = to
    with suppress(MessageError):
        from_bytes(content)


@given(st.binary(max_size=200))
def test_bytes_from_anywhere_are_refused(content: bytes) -> None:
    head = struct.pack("<4sIQQ", b"dure", 1, len(content), 0)
    for each in (bytearray(content), bytearray(head + content + bytes(-len(content) % 16))):
        with pytest.raises(MessageError):
            from_bytes(each)


def test_a_message_of_too_many_tensors_is_refused_by_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = to_bytes(PersonalisedMean([torch.zeros(0)] * 9))
    monkeypatch.setattr(encoding, "_MOST_TENSORS", 8)
    with pytest.raises(MessageError, match="more than 8 tensors"):
        from_bytes(sent)
    with pytest.raises(ValueError, match="more than 8 tensors"):
        to_bytes(PersonalisedMean([torch.zeros(0)] * 9))
    assert len(from_bytes(to_bytes(PersonalisedMean([torch.zeros(0)] * 8))).tensors) == 8  # type: ignore[union-attr]


@pytest.mark.parametrize("byte", [2, 128, 255])
def test_a_truth_value_is_0_or_1(byte: int) -> None:
    sent = to_bytes(PersonalisedMean([torch.tensor([True, False, True])]))
    at = bytes(sent).rindex(b"\x01\x00\x01")
    sent[at + 1] = byte
    with pytest.raises(MessageError, match="neither 0 nor 1"):
        from_bytes(sent)


def test_a_failure_is_one_of_the_known_ones() -> None:
    update = Update(0, 0, 0, 1, 0, 0.0, (), (), failure="its loss became not finite")
    assert from_bytes(to_bytes(update)) == replace(update, delta=[], buffers=[], extra=[])
    sent = to_bytes(update)
    at = bytes(sent).index(b"became")
    sent[at : at + 6] = b"BECAME"
    with pytest.raises(MessageError):
        from_bytes(sent)

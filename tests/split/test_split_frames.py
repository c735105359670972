"""Messages of split learning as bytes: what comes out is what went in, and all else is refused."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dure.split import messages
from dure.split.messages import (
    Ended,
    Gradients,
    HeadGradients,
    HeadHandover,
    HeadSum,
    Message,
    OutputGradients,
    Outputs,
    Pass,
    SideState,
    Smashed,
    Turn,
)
from dure.split.network import frames
from dure.split.network.control import Control, Hello, SealedHead
from dure.split.network.frames import KINDS, Frame, SplitFrameError, decode, encode

ADAM = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.zeros(2, 3)}
HEAD = SideState(
    weights=(torch.randn(2, 3), torch.randn(3)),
    buffers=(torch.tensor(7), torch.empty(0, 4)),
    optimizer=(ADAM, {"step": 3, "momentum_buffer": None, "name": "ü", "late": True}),
)
VALUES = (torch.randn(4, 3), torch.tensor(2.5), torch.ones(4, dtype=torch.bool), torch.empty(4, 0))
MESSAGES: list[Message] = [
    Turn(3, 1, 40, 10, 12, 20, 1, None, comes=True),
    Turn(0, 0, 0, 10, 10, 0, -1, HEAD),
    Smashed(3, 0, 4, 4.0, VALUES, [torch.arange(4), 1, 0.5, "one"]),
    Smashed(3, 1, 4, math.nan, VALUES, None),
    Outputs(0, VALUES, 0.25),
    OutputGradients(3, 0, VALUES, 1 << 40, math.inf, 4.0),
    Gradients(0, (), 0, 0.5, 4.0),
    HeadGradients(3, 0, (torch.randn(2), None, torch.randn(2, 2))),
    HeadSum(0, (None,)),
    Ended(3, None),
    Ended(3, HEAD),
    Pass(3, 2, messages.client(4)),
    HeadHandover(3, HEAD),
]


def frame_of(message: Frame) -> bytearray:
    return bytearray(b"".join(encode(message)))


def alike(one: Any, other: Any) -> bool:
    """Whether both are the same, tensors to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.numel() == 0 or bytes(frames.elements_of(one)) == bytes(
            frames.elements_of(other)
        )
    if isinstance(one, msgspec.Struct):
        return all(
            alike(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and alike(list(one.values()), list(other.values()))
    return bool(one == other or (one != one and other != other))


def named(message: Frame) -> str:
    return type(message).__name__


@pytest.mark.parametrize("message", MESSAGES, ids=named)
def test_what_comes_out_is_what_went_in(message: Message) -> None:
    assert alike(message, decode(frame_of(message)))


CONTROL: list[Control] = [
    Hello(100, b"{}", "a digest"),
    SealedHead(3, 1, torch.arange(200, dtype=torch.uint8)),
]


@pytest.mark.parametrize("message", CONTROL, ids=named)
def test_what_is_said_besides_training_comes_out_too(message: Control) -> None:
    assert alike(message, decode(frame_of(message)))


def test_every_message_has_been_tried() -> None:
    assert {type(one) for one in MESSAGES} == set(Message.__args__)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_kind_of_number_travels_as_it_is(dtype: torch.dtype) -> None:
    drawn = torch.tensor([0, 1, 3, 100], dtype=torch.float32).to(dtype)
    for tensor in (drawn, drawn[1], drawn[:0], drawn.view(2, 2).T, drawn.view(2, 2)[:, :0]):
        again = decode(frame_of(Outputs(0, (torch.ones(3, dtype=torch.int8), tensor), 1.0)))
        assert isinstance(again, Outputs)
        assert alike(tensor, again.values[1])


def test_the_numbers_of_dtypes_stay() -> None:
    # They are what two installations of different age understand each other by.
    names = (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 int64 int32 int16 "
        "int8 uint64 uint32 uint16 uint8 bool complex128"
    )
    assert " ".join(str(one).removeprefix("torch.") for one in KINDS) == names


def test_conjugates_negatives_and_what_is_repeated_are_written_out() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    repeated = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    again = decode(frame_of(Outputs(0, (conjugate, conjugate.imag, repeated), 1.0)))
    assert isinstance(again, Outputs)
    assert [one.tolist() for one in again.values] == [
        [1 - 2j, 3 + 4j],
        [-2, 4],
        [[1, 1, 1], [2, 2, 2]],
    ]


def test_a_frame_is_the_memory_of_its_tensors() -> None:
    values = torch.zeros(4, requires_grad=True)
    pieces = encode(Outputs(0, (values,), 1.0))
    values.detach()[0] = 1.0
    assert bytes(pieces[-1]) == struct.pack("<4f", 1, 0, 0, 0)


def test_tensors_are_views_of_the_bytes_that_came() -> None:
    content = frame_of(Outputs(0, (torch.zeros(4),), 1.0))
    message = decode(content)
    assert isinstance(message, Outputs)
    content[-4:] = struct.pack("<f", 1.0)
    assert message.values[0].tolist() == [0, 0, 0, 1]
    assert not message.values[0].requires_grad


@pytest.mark.parametrize("offset", [0, 1, 16])
def test_bytes_that_lie_anywhere_or_may_not_change_are_read_too(offset: int) -> None:
    content = frame_of(MESSAGES[1])
    moved = memoryview(bytearray(offset) + content)[offset:]
    for frame in (moved, bytes(content), memoryview(bytes(content))):
        again = decode(frame)
        assert alike(MESSAGES[1], again)
        assert isinstance(again, Turn)
        assert again.head is not None
        for tensor in again.head.weights:
            assert tensor.data_ptr() % 16 == 0
            tensor.add_(1)
    assert bytes(content) == bytes(frame_of(MESSAGES[1]))


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (Outputs(0, (torch.empty(1, dtype=torch.float8_e4m3fnuz),), 1.0), "fnuz"),
        (Outputs(0, (torch.zeros(2, 2).to_sparse(),), 1.0), "sparse"),
        (Smashed(0, 0, 1, 1.0, (), [object()]), "object"),
        (Smashed(0, 0, 1, 1.0, (), [b"raw"]), "bytes"),
        (Smashed(0, 0, 1, 1.0, (), torch.zeros(1)), "list"),
        (Smashed(0, 0, 1, 1.0, (), [1 << 64]), "64 bits"),
        (Ended(0, SideState((), (), ({"history": [torch.zeros(1)]},))), "history"),
        (Ended(0, SideState((), (), ({1: torch.zeros(1)},))), "names"),  # type: ignore[dict-item]
        (Outputs(0, (torch.zeros(0),) * (frames.MOST_TENSORS + 1), 1.0), "tensors"),
        (Pass(0, -1, "x" * frames.MOST_HEADER), "header"),
    ],
)
def test_what_cannot_travel_is_named_before_it_leaves(message: Message, word: str) -> None:
    with pytest.raises(SplitFrameError, match=word):
        encode(message)


def made(header: Any, data: bytes = b"", version: int = 1, size: int | None = None) -> bytearray:
    """A frame by hand."""
    written = msgspec.msgpack.encode(header)
    head = struct.pack("<II", version, len(written) if size is None else size)
    gap = bytes(-(len(head) + len(written)) % 16) if data else b""
    return bytearray(head + written + gap + data)


def form(number: int, *shape: int) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(1, struct.pack(f"<B{len(shape)}Q", number, *shape))


def outputs(*values: Any, **changes: Any) -> dict[str, Any]:
    return {"type": "Outputs", "step": 0, "values": values, "share": 1.0, **changes}


def smashed(targets: Any) -> dict[str, Any]:
    return {
        "type": "Smashed",
        "turn": 0,
        "step": 0,
        "examples": 1,
        "counted": 1.0,
        "values": [],
        "targets": targets,
    }


FLOAT32 = KINDS.index(torch.float32)
BOOL = KINDS.index(torch.bool)


def test_frames_made_by_hand_are_what_they_seem() -> None:
    again = decode(made(outputs(form(FLOAT32, 1)), struct.pack("<f", 2.0)))
    assert alike(again, Outputs(0, (torch.tensor([2.0]),), 1.0))
    assert isinstance(decode(made(smashed([1, None]))), Smashed)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "a frame starts with 8 bytes"),
        (made(outputs(), version=2), "version 2"),
        (made(outputs(), size=1 << 31), "header"),
        (made(outputs(), size=1000), "header"),
        (made({"type": "Unknown"}), "does not contain a message"),
        (made([1, 2]), "does not contain a message"),
        (made(outputs(step="one")), "step"),
        (made(outputs(None)), "values"),
        (made(outputs([FLOAT32, [1]])), "values"),
        (made(outputs(form(FLOAT32, 2)), bytes(4)), "is incomplete"),
        (made(outputs(form(FLOAT32, 1)), bytes(8)), "4 surplus bytes"),
        (made(outputs(form(FLOAT32, 1 << 48))), "is incomplete"),
        (made(outputs(form(FLOAT32, 1 << 63, 1 << 63, 4))), "does not encode a dtype"),
        (made(outputs(form(FLOAT32, *[1 << 62] * 64))), "does not encode a dtype"),
        (made(outputs(form(FLOAT32, *[1] * 65)), bytes(4)), "does not encode a dtype"),
        (made(outputs(form(FLOAT32, 0, 1 << 63))), "does not encode a dtype"),
        (made(outputs(form(len(KINDS), 1)), bytes(8)), "does not encode a dtype"),
        (made(outputs(msgspec.msgpack.Ext(1, b""))), "does not encode a dtype"),
        (made(outputs(msgspec.msgpack.Ext(1, b"\1\1"))), "does not encode a dtype"),
        (made(outputs(msgspec.msgpack.Ext(2, b"\1"))), "65,536 tensors, or is invalid"),
        (made(outputs(form(BOOL, 2)), b"\1\2"), "a boolean of the message"),
        (made(outputs(*[form(FLOAT32, 0)] * (frames.MOST_TENSORS + 1))), "tensors"),
        (made(smashed(5)), "list"),
        (made(smashed([b"raw"])), "bytes"),
        (made(smashed([[1]])), "list"),
        (made({"type": "Pass", "turn": 0, "to": 5}), "to"),
    ],
)
def test_what_is_no_frame_is_refused_in_one_line(content: bytes, word: str) -> None:
    with pytest.raises(SplitFrameError, match=word) as refused:
        decode(content)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_frame_may_have_so_many_bytes() -> None:
    content = frame_of(MESSAGES[2])
    assert decode(content, len(content))
    with pytest.raises(SplitFrameError, match="may have"):
        decode(content, len(content) - 1)


def well_formed(message: Frame) -> bool:
    """Whether all that a message holds can be read, and travels again."""
    return alike(message, decode(frame_of(message)))


@given(st.sampled_from(MESSAGES), st.data())
def test_no_part_of_a_frame_is_a_frame(message: Message, data: st.DataObject) -> None:
    content = frame_of(message)
    end = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(SplitFrameError):
        decode(content[:end])


@given(st.sampled_from(MESSAGES), st.data())
def test_a_frame_that_was_changed_is_refused_or_is_another(
    message: Message, data: st.DataObject
) -> None:
    content = frame_of(message)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    try:
        other = decode(content + bytes(cut))
    except SplitFrameError:
        return
    assert well_formed(other)


@given(st.binary(max_size=200))
def test_whatever_comes_is_refused_or_read(content: bytes) -> None:
    for frame in (content, struct.pack("<II", 1, len(content)) + content):
        try:
            assert well_formed(decode(frame))
        except SplitFrameError:
            continue

"""Frames: what was put in comes out; what is no frame is refused, whatever it is."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dure.parameter_server.messages import AppliedPush, Pull, Push, Replicate, ShardStep, Values
from dure.parameter_server.processes.frames import (
    HEAD,
    MOST_HEADER,
    BufferRange,
    EndpointFrameError,
    FrameDecoder,
    FrameEncoder,
)
from dure.parameter_server.processes.incoming import Incoming
from dure.parameter_server.processes.messages import ProcessMessage, SerialisedSnapshot
from dure.tensors.block_allocator import BlockAllocator

MEMORY = torch.arange(256, dtype=torch.uint8)
MOST = 1 << 12


def look(place: BufferRange, dtype: torch.dtype, count: int) -> Tensor | None:
    """256 bytes that "server 0" has shown."""
    size = count * dtype.itemsize
    inside = 0 <= place.offset <= len(MEMORY) - size and place.offset % dtype.itemsize == 0
    if place.owner != "server 0" or not inside:
        return None
    return MEMORY[place.offset : place.offset + size].view(dtype)


def push(gradient: Tensor) -> Push:
    return Push(1, 2, 3, 0, 5, 7, gradient, 0.5, 9)


def wire(message: ProcessMessage) -> bytes:
    frame = FrameEncoder().encode(message, None)
    return frame.head + b"".join(frame.data)


def come(content: bytes, sizes: list[int]) -> list[ProcessMessage]:
    """The messages of bytes that come in pieces of these sizes, again and again."""
    incoming = Incoming(MOST, BlockAllocator())
    decoder = FrameDecoder(look)
    found = []
    turn = 0
    while content:
        room = incoming.room()
        assert len(room)
        piece = content[: min(len(room), sizes[turn % len(sizes)])]
        turn += 1
        room[: len(piece)] = piece
        content = content[len(piece) :]
        found += [decoder.decode(*frame) for frame in incoming.came(len(piece))]
    return found


tensors = st.builds(
    lambda dtype, size: torch.arange(size).to(dtype),
    st.sampled_from(
        [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool]
    ),
    st.integers(0, 90),
)
said = st.one_of(
    st.builds(push, tensors),
    st.builds(lambda t: Values(1, 2, 3, t, 4, 5, None, 6), tensors),
    st.builds(lambda t: Replicate(1, 2, 3, ShardStep(4, t, (AppliedPush(1, 2),), 0.5)), tensors),
    st.just(Pull(1, 2, 3, 0, 5, 6, 7, clock=2)),
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, msgspec.Struct):
        names = one.__struct_fields__
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in names
        )
    return bool(one == other)


@given(st.lists(said, max_size=5), st.lists(st.integers(1, 700), min_size=1, max_size=4))
@settings(deadline=None)
def test_messages_come_out_as_they_went_in_however_their_bytes_arrive(
    messages: list[ProcessMessage], sizes: list[int]
) -> None:
    found = come(b"".join(map(wire, messages)), sizes)
    assert len(found) == len(messages)
    assert all(map(same, messages, found))


def test_a_long_header_and_the_frame_after_it_arrive() -> None:
    long = SerialisedSnapshot(0, 0, 0, ["x" * 200_000], [], [])
    found = come(wire(long) + wire(push(torch.ones(3))), [5_000])
    assert same(found[0], long)
    assert same(found[1], push(torch.ones(3)))


@given(st.integers(0, MOST_HEADER * 2), st.integers(0, 1 << 63))
def test_a_frame_that_is_too_long_is_refused_before_it_is_there(header: int, data: int) -> None:
    incoming = Incoming(MOST, BlockAllocator())
    incoming.room()[: HEAD.size] = HEAD.pack(header, data)
    if header > MOST_HEADER or data > MOST:
        with pytest.raises(EndpointFrameError, match="longer than any"):
            incoming.came(HEAD.size)
    else:
        incoming.came(HEAD.size)


def decoded(header: bytes, data: bytes) -> ProcessMessage:
    return FrameDecoder(look).decode(
        header, torch.frombuffer(bytearray(data + b"-"), dtype=torch.uint8)[:-1]
    )


@given(said, st.data())
@settings(deadline=None)
def test_bytes_that_are_missing_added_or_wrong_are_refused_or_read_as_some_message(
    message: ProcessMessage, data: st.DataObject
) -> None:
    frame = FrameEncoder().encode(message, None)
    header = bytearray(frame.head[HEAD.size :])
    content = b"".join(frame.data)
    change = data.draw(st.sampled_from(["cut header", "cut data", "more data", "change"]))
    if change == "cut header":
        del header[data.draw(st.integers(0, len(header) - 1)) :]
    elif change == "cut data":
        assume(content)
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif change == "more data":
        content += data.draw(st.binary(min_size=1, max_size=20))
    else:
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
        with suppress(EndpointFrameError):
            decoded(bytes(header), content)
        return
    with pytest.raises(EndpointFrameError):
        decoded(bytes(header), content)


@given(st.binary(max_size=300), st.binary(max_size=30))
@settings(deadline=None)
def test_any_bytes_are_refused(header: bytes, content: bytes) -> None:
    with pytest.raises(EndpointFrameError):
        decoded(header, content)


described = st.one_of(
    st.none(),
    st.integers(),
    st.lists(st.integers(-3, 1 << 62), max_size=10),
    st.text(max_size=12),
    st.sampled_from(["float32", "float64", "complex64", "object", "uint8"]),
    st.tuples(st.sampled_from(["server 0", "worker 9"]), st.integers(-(1 << 62), 1 << 62)),
)


def described_as(description: Any) -> bytes:
    """The header of a push whose gradient is said to be this."""
    fields = msgspec.to_builtins(push(torch.ones(1)), enc_hook=lambda tensor: description)
    return msgspec.msgpack.encode(fields)


@given(st.one_of(described, st.lists(described, min_size=3, max_size=3)))
@settings(deadline=None, max_examples=400)
def test_a_tensor_that_is_not_there_is_refused(description: Any) -> None:
    try:
        header = described_as(description)
    except (OverflowError, msgspec.MsgspecError):
        return  # no number of MessagePack
    try:
        found = decoded(header, b"")
    except EndpointFrameError:
        return
    # Nothing, or within what was shown.
    assert isinstance(found, Push)
    assert found.gradient.nbytes <= len(MEMORY)


@pytest.mark.parametrize(
    "description",
    [
        ["float32", [4], None],  # its bytes did not come
        ["quaternion", [0], None],
        ["float32", [-1], None],
        ["float32", [1 << 40, 1 << 40], ["server 0", 0]],
        ["float32", [1], ["server 0", 253]],  # its end lies outside
        ["float32", [1], ["server 0", -4]],
        ["float32", [1], ["server 0", 2]],  # not where a float32 can begin
        ["float32", [1], ["worker 9", 0]],
        ["uint8", [0, 1 << 62], None],
        ["uint8", [1] * 9, ["server 0", 0]],
        ["uint8", [True], ["server 0", 0]],
    ],
)
def test_a_tensor_of_another_kind_or_place_is_refused(description: Any) -> None:
    with pytest.raises(EndpointFrameError):
        decoded(described_as(description), b"")


def test_a_tensor_in_memory_that_was_shown_is_read_there() -> None:
    found = decoded(described_as(["uint8", [2, 3], ["server 0", 250]]), b"")
    assert isinstance(found, Push)
    assert found.gradient.tolist() == [[250, 251, 252], [253, 254, 255]]
    assert found.gradient.data_ptr() == MEMORY.data_ptr() + 250

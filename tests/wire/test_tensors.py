"""Tensors as a stream: what the safetensors library writes and reads, in pieces of any size."""

from __future__ import annotations

import contextlib
import io
import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.wire.tensors import (
    TensorsError,
    TensorSpec,
    digest_of,
    forms_of,
    pieces,
    receive,
    size_of,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]

FORMS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


def tensors_of(forms) -> dict[str, torch.Tensor]:
    return {
        name: (torch.arange(torch.Size(shape).numel()).reshape(shape) % 2).to(dtype)
        for name, (dtype, shape) in forms.items()
    }


def reader(content: bytes, at_once: int = 1 << 20):
    stream = io.BytesIO(content)
    return lambda memory: stream.readinto(memory[:at_once])


def written(tensors) -> bytes:
    return b"".join(pieces(tensors))


def stream(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@given(FORMS, st.integers(1, 40))
def test_what_is_written_is_read_in_pieces_of_any_size(forms, at_once):
    tensors = tensors_of(forms)
    content = written(tensors)
    assert len(content) == size_of(forms_of(tensors))
    found = receive(reader(content, at_once), len(content), forms_of(tensors))
    assert same(found, tensors)


@given(FORMS)
def test_the_library_reads_what_is_written_and_writes_what_is_read(forms):
    tensors = tensors_of(forms)
    assert same(safetensors.torch.load(written(tensors)), tensors)
    theirs = safetensors.torch.save(tensors, {"made": "by hand"})
    assert same(receive(reader(theirs), len(theirs)), tensors)


def test_the_stream_is_of_the_tensors_own_memory():
    tensor = torch.zeros(1000)
    _, elements = pieces({"a": tensor})
    tensor[3] = 1.0
    assert bytes(elements) == tensor.numpy().tobytes()


def test_a_digest_names_names_shapes_and_elements():
    one = {"a": torch.zeros(2, 3)}
    digests = {
        digest_of(each)
        for each in (
            one,
            {"b": torch.zeros(2, 3)},
            {"a": torch.zeros(3, 2)},
            {"a": torch.ones(2, 3)},
        )
    }
    assert len(digests) == 4
    assert digest_of(one) == digest_of({"a": torch.zeros(2, 3)})


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "ends within the header"),
        (b"\0" * 7, "ends within the header"),
        (struct.pack("<Q", 1 << 40), "may have"),
        (stream(b"{"), "not a list of tensors"),
        (stream([1]), "not a list of tensors"),
        (stream(b'{"a": ' + b"[" * 100_000), "not a list of tensors"),
        (stream({"a": {**F4, "more": 1}}), "not a list of tensors"),
        (stream({"a": {**F4, "dtype": "F31"}}), "'F31', which is not a dtype"),
        (stream({"a": {**F4, "shape": [-1]}}), "an invalid shape"),
        (stream({"a": {**F4, "shape": [1] * 65}}), "an invalid shape"),
        (stream({"a": {**F4, "shape": [1 << 62] * 60, "data_offsets": [0, 4]}}), "lies at"),
        (stream({"a": {**F4, "shape": [1 << 70]}}), "an invalid shape"),
        (stream({"a": {**F4, "data_offsets": [4, 8]}}, b"\0" * 8), "lies at"),
        (stream({"a": F4, "b": F4}, b"\0" * 4), "lies at"),
        (
            stream({"a": {**F4, "shape": [1 << 20], "data_offsets": [0, 4 << 20]}}),
            "have [0-9]+ bytes, but may have at most",
        ),
        (stream({"a": F4}, b"\0" * 3), "ends within a"),
        (stream({"a": F4}, b"\0" * 5), "surplus bytes"),
        (stream({"a": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}, b"\2"), "booleans"),
    ],
)
def test_other_bytes_are_refused_with_the_reason(content, said):
    with pytest.raises(TensorsError, match=said):
        receive(reader(content), 1 << 20)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({}, "a is missing"),
        ({"a": torch.zeros(3)}, "not torch.float32"),
        ({"a": torch.zeros(2, dtype=torch.float64)}, "not torch.float32"),
        ({"a": torch.zeros(2), "b": torch.zeros(1)}, "b is not a tensor of this model"),
    ],
)
def test_tensors_of_another_model_are_refused_before_their_elements_are_read(sent, said):
    content = written(sent)
    header = content[: len(content) - sum(tensor.nbytes for tensor in sent.values())]
    with pytest.raises(TensorsError, match=said):
        receive(reader(header), 1 << 20, {"a": TensorSpec(torch.float32, (2,))})


@given(st.binary(max_size=200))
def test_no_bytes_of_a_stranger_raise_anything_else(content):
    with contextlib.suppress(TensorsError):
        receive(reader(content), 1 << 12)

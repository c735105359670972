"""Objects between processes of one machine."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from dure.worlds.processes import parcel


def travelled(obj: Any) -> Any:
    descriptor = parcel.pack(obj)
    try:
        return parcel.unpack(descriptor)
    finally:
        os.close(descriptor)


def test_large_and_small_tensors_of_every_kind_arrive_unchanged() -> None:
    sent = {
        "large": torch.randn(300, 200),
        "half": torch.randn(200, 200).to(torch.bfloat16),
        "strided": torch.randn(300, 300)[:, ::2],
        "small": torch.arange(3),
        "empty": torch.empty(0, 5),
        "conjugated": torch.randn(200, 200, dtype=torch.complex64).conj(),
        "flags": torch.rand(50_000) > 0.5,
        "array": np.arange(10_000.0),
        "parameter": torch.nn.Parameter(torch.randn(200, 200)),
    }
    got = travelled(sent)
    for name, value in sent.items():
        assert got[name].dtype == value.dtype
        assert np.array_equal(np.asarray(got[name].tolist()), np.asarray(value.tolist()))
    assert got["parameter"].requires_grad


def test_a_receiver_may_write_without_the_others_seeing_it() -> None:
    descriptor = parcel.pack(torch.zeros(100_000))
    first, second = parcel.unpack(descriptor), parcel.unpack(descriptor)
    os.close(descriptor)
    first += 1
    assert second.sum() == 0


def test_lambdas_closures_and_local_classes_travel() -> None:
    factor = 3

    class Local:
        def times(self, value: int) -> int:
            return factor * value

    function, instance = travelled((lambda x: x + factor, Local()))
    assert function(1) == 4
    assert instance.times(5) == 15


def test_one_tensor_named_twice_arrives_as_one() -> None:
    shared = torch.zeros(50_000)
    first, second = travelled([shared, shared])
    first[0] = 7
    assert second[0] == 7


def test_what_a_notebook_calls_classes_and_ops_travels() -> None:
    space: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    code = (
        "def scores(values):\n"
        "    return [torch.relu, values.classes, values.ops] if values is None else torch.ones(1)"
    )
    # As in a notebook, where cloudpickle sends the code and the modules that it names.
    exec(code, space)
    descriptor = parcel.pack(space["scores"])
    try:
        assert parcel.unpack(descriptor)(1).item() == 1
    finally:
        os.close(descriptor)

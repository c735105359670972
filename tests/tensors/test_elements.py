from __future__ import annotations

import torch

from dure.tensors.elements import element_bytes, materialised


def test_bytes_are_those_of_numpy_for_flags_gaps_and_plain_memory() -> None:
    value = torch.randn(4, 6, dtype=torch.complex64)
    for one in (value.conj(), value.conj().imag, value[:, ::2], value.T, value[0, 0].conj()):
        expected = one.resolve_conj().resolve_neg().numpy().tobytes()
        assert element_bytes(one).numpy().tobytes() == expected
        assert not materialised(one).is_conj()


def test_plain_memory_is_not_copied() -> None:
    value = torch.randn(5, requires_grad=True)
    assert element_bytes(value).data_ptr() == value.data_ptr()
    assert materialised(value) is value

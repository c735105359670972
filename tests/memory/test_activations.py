"""What autograd keeps is known before it is kept, and what a step takes before it is made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dure.machine.compiler import deferred_compiler
from dure.memory.activations import observe_call
from dure.memory.live_storages import LiveStorages
from dure.memory.peak import step_peak
from dure.tasks.models import Transformer

SYMBOLS, CONTEXT = 23, 16


class Asks(nn.Module):
    """What it does depends on values, which tensors without data do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layer(inputs)
        return hidden.tanh() if hidden.sum().item() > 0 else hidden.sigmoid()


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 5),
    )


def texts() -> tuple[nn.Module, Tensor]:
    model = Transformer(SYMBOLS, CONTEXT, layers=2, heads=2, width=8, dropout=0.1, tied=True)
    return model, torch.arange(4 * CONTEXT).remainder(SYMBOLS).view(4, CONTEXT)


CASES = {
    "a transformer with a tied table": texts,
    "convolutions": lambda: (convolutions(), torch.randn(6, 3, 8, 8)),
    "a recurrent layer": lambda: (nn.LSTM(8, 4, batch_first=True), torch.randn(3, 5, 8)),
    "a model that looks at values": lambda: (Asks(), torch.randn(3, 8)),
}


def first(outputs: object) -> Tensor:
    found = outputs[0] if isinstance(outputs, tuple) else outputs
    assert isinstance(found, Tensor)
    return found


def loss(outputs: object, targets: object) -> Tensor:
    return first(outputs).square().mean()


def really_kept(model: nn.Module, inputs: Tensor) -> int:
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("case", CASES)
def test_what_a_pass_keeps_and_takes_is_known_before_it_is_made(case: str) -> None:
    model, inputs = CASES[case]()
    state = torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    predicted = sum(observe_call(model, inputs).saved.values())
    peak = step_peak(model, (inputs, None), loss)
    # Nothing has happened to the model, or to the generator.
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert predicted == really_kept(model, inputs)
    # The first mode of a process would load the compiler.
    with deferred_compiler(), LiveStorages([*model.parameters(), *model.buffers(), inputs]) as live:
        loss(model(inputs), None).backward()  # type: ignore[no-untyped-call]
    assert peak == live.peak
    assert live.bytes == sum(parameter.nbytes for parameter in model.parameters())
    if case == "convolutions":
        assert buffers.keys() == dict(model.named_buffers()).keys()


def test_bytes_are_counted_once_and_by_the_module_that_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(inplace=True))
    root = observe_call(model, torch.randn(10, 4))
    row = 10 * 4 * 4
    # The input, tanh's output, and the output in which relu is done; views of them are no more.
    assert sum(root.saved.values()) == 3 * row
    kept = {call.name: sum(call.saved.values()) for call in root.walk()}
    assert kept == {"": 3 * row, "0": row, "1": row, "2": row, "3": row}
    assert [call.name for call in root.walk() if call.changes] == ["3"]
    assert root.calls[0].flops == 2 * 10 * 4 * 4


def test_a_model_without_a_copy_is_measured_only_if_it_is_spare() -> None:
    model = Asks()
    weight = model.layer.weight
    model.twice = lambda: weight * 2  # type: ignore[assignment]
    with pytest.raises(ValueError, match="cannot be measured, because the model cannot be copied"):
        observe_call(model, torch.randn(3, 8))
    assert observe_call(model, torch.randn(3, 8), spare=True).saved

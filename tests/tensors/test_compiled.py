"""Compiled models: the names are those of the model, and what is called is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dure
from dure.tensors.compiled import unwrap_compiled
from small import largest_difference, network, small_task


class Part(nn.Module):
    """A layer that counts how often Python runs it: a compiled one is run by Python when traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.layer(inputs) + 1
        result: torch.Tensor = self.layer(inputs)
        return result


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_network() -> nn.Module:
    model: nn.Module = compiled(network())
    return model


def network_with_compiled_parts() -> nn.Module:
    return nn.Sequential(*(compiled(layer) for layer in network().children()))


@pytest.mark.parametrize(
    "make",
    [
        lambda part: compiled(part),
        lambda part: nn.Sequential(compiled(part)),
        lambda part: compiled(nn.Sequential(compiled(nn.Sequential(part)))),
    ],
    ids=["whole", "a part", "a part of a part"],
)
def test_what_was_compiled_has_its_own_names_and_is_called_as_compiled(make: Any) -> None:
    part = Part()
    model = unwrap_compiled(make(part))
    inputs = torch.ones(2, 3)
    assert not any("_orig_mod" in name for name, _ in model.named_modules())
    torch.testing.assert_close(model(inputs), part.layer(inputs) + 1)


def test_a_model_that_is_not_compiled_stays_as_it_is() -> None:
    model = network()
    assert unwrap_compiled(model) is model


def test_a_hook_that_would_be_lost_is_refused() -> None:
    model = compiled(network())
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="register the hook on the module before it is compiled"):
        unwrap_compiled(model)


@pytest.mark.parametrize("make", [compiled_network, network_with_compiled_parts])
def test_weights_of_a_compiled_model_load_into_the_model(make: Any, tmp_path: Path) -> None:
    strategy = dure.FedAvg(clients=2, batch_size=None)
    task = small_task(model=make)
    run = dure.train(task, strategy, stop=dure.Stop(rounds=2), out=tmp_path / "run")
    plain = network()
    plain.load_state_dict(run.model.state_dict())
    plain.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    plain_run = dure.train(small_task(), strategy, stop=dure.Stop(rounds=3))
    longer = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=3))
    assert largest_difference(longer, plain_run) < 1e-12
    assert (
        dure.load_run(tmp_path / "run", make).model.state_dict().keys() == plain.state_dict().keys()
    )


def test_layers_that_are_gathered_for_their_computation_may_be_compiled() -> None:
    def called_as_compiled() -> nn.Module:
        model = network()
        model.compile(backend="eager")
        return model

    runs = [
        dure.train(
            small_task(model=make), dure.ZeRO(stage=3), dure.Processes(2), dure.Stop(steps=2)
        )
        for make in (network, called_as_compiled)
    ]
    assert largest_difference(*runs) < 1e-12

"""Head, tail and end as modules of their own compute the model, each with its own weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.split.export import end_of, head_of, tail_of


class Skips(nn.Module):
    """Values of which some pass over the cut, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7))
        self.second = nn.Linear(7, 7)
        self.drop = nn.Dropout(0.3)
        self.third = nn.Linear(7, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        one = torch.tanh(self.first(inputs))
        two = torch.relu(self.second(one)) + one
        result: Tensor = self.third(self.drop(two) + one)
        return result


def task() -> dure.Task:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=numbers)
    return dure.Task(
        model=Skips,
        loss=nn.functional.cross_entropy,
        train=(inputs, torch.arange(40) % 3),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def run(*cut: str, **options: Path) -> dure.Run:
    system = dure.SplitLearning(cut, clients=2)
    return dure.train(task(), system, dure.Simulated(), dure.Stop(rounds=1), **options)


@pytest.mark.parametrize("examples", [1, 10, 53])
def test_the_parts_one_after_another_are_the_model_to_the_bit(examples: int) -> None:
    inputs = torch.randn(examples, 6)
    once = run("second")
    model = once.model.eval()
    assert torch.equal(tail_of(once, task())(head_of(once, task())(inputs)), model(inputs))
    twice = run("second", "third")
    parts = [part(twice, task()) for part in (head_of, tail_of, end_of)]
    values = inputs
    for part in parts:
        values = part(values)
    assert torch.equal(values, twice.model.eval()(inputs))


def test_a_part_has_its_own_weights_under_the_models_names() -> None:
    ended = run("second", "third")
    whole = ended.model.state_dict()
    names = [set(part(ended, task()).state_dict()) for part in (head_of, tail_of, end_of)]
    assert names[0] == {name for name in whole if name.startswith("first")}
    assert names[1:] == [{"second.weight", "second.bias"}, {"third.weight", "third.bias"}]
    head = head_of(ended, task())
    assert all(torch.equal(one, whole[name]) for name, one in head.state_dict().items())


def test_a_head_is_kept_in_a_file_and_taken_from_a_folder(tmp_path: Path) -> None:
    ended = run("second", out=tmp_path / "run")
    head = head_of(tmp_path / "run", task())
    torch.save(head.state_dict(), tmp_path / "head.pt")
    other = head_of(run("second"), task())
    with torch.no_grad():
        for one in other.parameters():
            one.zero_()
    inputs = torch.randn(5, 6)
    assert not torch.equal(other(inputs), head(inputs))
    other.load_state_dict(torch.load(tmp_path / "head.pt"))
    assert torch.equal(other(inputs), head(inputs))
    assert torch.equal(head(inputs), head_of(ended, task())(inputs))


def test_what_has_no_such_part_is_refused() -> None:
    ended = run("second")
    with pytest.raises(ValueError, match="use tail_of"):
        end_of(ended, task())
    other = dure.train(task(), dure.SingleWorker(), stop=dure.Stop(steps=1))
    with pytest.raises(ValueError, match="not cut"):
        head_of(other, task())
    with pytest.raises(ValueError, match=r"have the shape \[5\]"):
        head_of(ended, task())(torch.randn(4, 5))

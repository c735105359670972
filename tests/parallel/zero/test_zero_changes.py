"""What is done to a model after ZeRO has divided it: done as one process does it, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import FEATURES, batches, distance, network, on_ranks, part
from torch import Tensor, nn
from torch.nn import functional as F

from dure.contracts.world import RankContext
from dure.parallel.zero import ZeroRedundancy

STAGES = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "in_place": False, "prefetch": 1}]
BF16 = [{**options, "precision": "bf16"} for options in STAGES]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def divided(context: RankContext, model: nn.Module, **options: Any) -> tuple[Any, ZeroRedundancy]:
    optimizer = sgd(model)
    more = {"units": 60, **options}
    return optimizer, ZeroRedundancy(model, optimizer, process_group=context.group, **more)


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def backward(model: nn.Module, context: RankContext, seed: int = 0) -> None:
    inputs, targets = part(batches(seed + 1, 6)[seed], context)
    F.cross_entropy(model(inputs), targets).backward()


def train_alone(
    model: nn.Module, steps: int, after: Callable[[nn.Module], None] = lambda model: None
) -> None:
    """The steps of all ranks, by one; after: what is done with the model behind each."""
    optimizer = sgd(model)
    for seed in range(steps):
        optimizer.zero_grad()
        inputs, targets = batches(seed + 1, 6)[seed]
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        after(model)


class Changing(nn.Module):
    """Two networks; forward changes the second by `change(its weights, the first's)`."""

    def __init__(self, change: Callable[[Tensor, Tensor], None], frozen: bool) -> None:
        super().__init__()
        self.one = network()
        self.other = network().requires_grad_(not frozen)
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            for other, one in zip(self.other.parameters(), self.one.parameters(), strict=True):
                self.change(other, one)
        outputs: Tensor = self.one(inputs) + self.other(inputs)
        return outputs


def in_place(other: Tensor, one: Tensor) -> None:
    other.lerp_(2 * one, 0.25)


def through_data(other: Tensor, one: Tensor) -> None:
    other.data.lerp_(2 * one.data, 0.25)


def by_assignment(other: Tensor, one: Tensor) -> None:
    other.data = 0.75 * other.data + 0.5 * one.data


def only_read(other: Tensor, one: Tensor) -> None:
    assert other.data.shape == one.data.shape


CHANGES = [in_place, through_data, by_assignment]


@pytest.mark.parametrize("change", CHANGES)
def test_stage_3_refuses_forward_passes_that_change_parameters_and_the_others_follow_them(
    change: Any,
) -> None:
    def program(context: RankContext) -> list[Any]:
        found: list[Any] = []
        alone = Changing(change, frozen=True)
        train_alone(alone, 3)
        for options in STAGES:
            model = Changing(change, frozen=True)
            optimizer, zero = divided(context, model, **options)
            if options["stage"] == 3:
                found.append(said_by(lambda model=model: backward(model, context)))  # type: ignore[misc]
                continue
            for seed in range(3):
                optimizer.zero_grad()
                backward(model, context, seed)
                optimizer.step()
            whole = Changing(change, frozen=True)
            whole.load_state_dict(zero.state_dict(everywhere=True))
            found.append(distance(whole, alone))
        return found

    for *distances, stage_3, copied in on_ranks(2, program):
        assert max(distances) < 1e-12
        for text in (stage_3, copied):
            assert "ValueError: the parameter other." in text
            assert "provides only a temporary copy (stage 3" in text


def test_data_that_is_only_read_is_no_change_and_one_rank_alone_may_change_it() -> None:
    def program(context: RankContext) -> list[str]:
        changes = [only_read] if context.group.size > 1 else [only_read, *CHANGES[:2]]
        found = []
        for change in changes:
            for options in STAGES[: 3 if change is not only_read else 4]:
                model = Changing(change, frozen=False)
                optimizer, _ = divided(context, model, **options)
                backward(model, context)
                found.append(said_by(optimizer.step))
        return found

    for ranks in (1, 2):
        assert {text for row in on_ranks(ranks, program) for text in row} == {"nothing"}


def test_stages_1_and_2_refuse_changes_that_differ_by_rank() -> None:
    """An initialisation that looks at data."""

    class Initialised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))
            self.rest = network()
            self.fresh = True

        def forward(self, inputs: Tensor) -> Tensor:
            if self.fresh:
                self.shift.data.copy_(-inputs.mean(0))
                self.fresh = False
            outputs: Tensor = self.rest(inputs + self.shift)
            return outputs

    def program(context: RankContext) -> list[str]:
        found = []
        for options in STAGES:
            model = Initialised()
            optimizer, _ = divided(context, model, **options)

            def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
                backward(model, context)
                optimizer.step()

            found.append(said_by(step))
        return found

    for one, two, three, copied in on_ranks(2, program):
        assert "the parameter shift differs between rank 1 and rank 0" in one
        assert one == two
        assert "the parameter shift was changed" in three
        assert "the parameter shift was changed" in copied


def test_what_bf16_would_overwrite_is_refused_in_every_stage() -> None:
    def clamp(parameter: Tensor) -> None:
        parameter.clamp_(-0.01, 0.01)

    def clamp_data(parameter: Tensor) -> None:
        parameter.data.clamp_(-0.01, 0.01)

    def program(context: RankContext) -> list[str]:
        found = []
        for change in (clamp, clamp_data):
            for options in BF16:
                model = network()
                optimizer, _ = divided(context, model, **options)

                def step(
                    model: nn.Module = model, optimizer: Any = optimizer, change: Any = change
                ) -> None:
                    backward(model, context)
                    optimizer.step()
                    optimizer.zero_grad()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            change(parameter)
                    backward(model, context)
                    optimizer.step()

                found.append(said_by(step))
        return found

    for row in on_ranks(2, program):
        for number, text in enumerate(row):
            away = number % 4 > 1  # stage 3 does not let anybody change what is away
            assert (
                "complete only while the model runs" if away else "0.weight was changed"
            ) in text


def test_weights_may_be_clipped_between_steps() -> None:
    """As the critic of a Wasserstein GAN; in stage 3 inside of gathered()."""

    def clip(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    def program(context: RankContext) -> list[float]:
        alone = network()
        train_alone(alone, 3, clip)
        found = []
        for options in STAGES:
            model = network()
            optimizer, zero = divided(context, model, **options)
            for seed in range(3):
                optimizer.zero_grad()
                backward(model, context, seed)
                optimizer.step()
                if options["stage"] < 3 and seed:
                    clip(model)
                else:
                    with zero.gathered():
                        clip(model)
            whole = network()
            whole.load_state_dict(zero.state_dict(everywhere=True))
            found.append(distance(whole, alone))
        return found

    assert max(max(row) for row in on_ranks(2, program)) < 1e-12


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_that_the_model_loads_itself_is_taken_or_refused(assign: bool) -> None:
    def program(context: RankContext) -> list[Any]:
        found: list[Any] = []
        fresh = {name: value.clone() / 2 for name, value in network().state_dict().items()}
        alone = network()
        alone.load_state_dict(fresh)
        inputs, targets = batches(1, 6)[0]
        F.cross_entropy(alone(inputs), targets).backward()
        sgd(alone).step()
        # a parameter that is replaced has its own dtype, which bf16 does not compute with
        for options in STAGES if assign else [*STAGES, *BF16]:
            model = network()
            optimizer, zero = divided(context, model, **options)

            def load_and_step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
                state = {name: value.clone() for name, value in fresh.items()}
                model.load_state_dict(state, assign=assign)
                backward(model, context)
                optimizer.step()

            said = said_by(load_and_step)
            if said == "nothing":
                whole = network()
                whole.load_state_dict(zero.state_dict(everywhere=True))
                said = distance(whole, alone)
            found.append(said)
        return found

    for row in on_ranks(2, program):
        for number, said in enumerate(row):
            if assign:
                assert "added to the model after" in said or "complete only while" in said, said
            elif number < 2:
                assert said < 1e-12
            else:
                assert "was changed" in said or "complete only while" in said, said


def test_pieces_that_are_changed_between_steps_are_refused() -> None:
    def program(context: RankContext) -> list[str]:
        found = []
        for options in STAGES:
            model = network()
            optimizer, zero = divided(context, model, **options)
            backward(model, context)
            optimizer.step()
            with torch.no_grad():
                for piece in zero.parts():
                    piece.clamp_(-0.01, 0.01)
            backward(model, context)
            found.append(said_by(optimizer.step))
        return found

    for row in on_ranks(2, program):
        for text in row:
            assert "pieces (zero.parts()) were changed outside step()" in text


def test_what_was_frozen_added_or_replaced_is_refused_by_name() -> None:
    def unfreeze(model: Any, optimizer: Any) -> None:
        model[0].requires_grad_(True)

    def replace(model: Any, optimizer: Any) -> None:
        model[2].weight = nn.Parameter(torch.ones(8, 12, dtype=torch.float64))

    def add(model: Any, optimizer: Any) -> None:
        model.append(nn.Linear(3, 3).double())

    def give(model: Any, optimizer: Any) -> None:
        optimizer.add_param_group({"params": [model[0].weight]})

    def program(context: RankContext) -> list[list[str]]:
        rows = []
        for change in (unfreeze, replace, add, give):
            row = []
            for options in STAGES:
                model = network()
                model[0].requires_grad_(False)  # type: ignore[operator]
                optimizer, _ = divided(context, model, **options)
                backward(model, context)
                optimizer.step()
                change(model, optimizer)
                if change in (unfreeze, give) or options["stage"] < 3:
                    backward(model, context)
                row.append(said_by(optimizer.step))
            rows.append(row)
        return rows

    expected = [
        "0.weight was frozen when ZeroRedundancy divided the model",
        "2.weight was added to the model after",
        "5.weight was added to the model after",
        "the optimizer was given 0.weight after",
    ]
    for rows in on_ranks(2, program):
        for row, text in zip(rows, expected, strict=True):
            assert all(text in one for one in row), row


def test_parameters_that_begin_trained_may_be_frozen_and_unfrozen() -> None:
    """Gradual unfreezing, on the path of one process."""

    def freezes(model: Any, step: int) -> None:
        model[0].requires_grad_(step in (2, 3, 5))
        model[4].weight.requires_grad = step != 1

    def program(context: RankContext) -> list[float]:
        alone = network()
        optimizer = sgd(alone)
        for step in range(6):
            freezes(alone, step)
            optimizer.zero_grad()
            inputs, targets = batches(step + 1, 6)[step]
            F.cross_entropy(alone(inputs), targets).backward()
            optimizer.step()
        found = []
        for options in STAGES:
            model = network()
            optimizer, zero = divided(context, model, **options)
            for step in range(6):
                freezes(model, step)
                optimizer.zero_grad()
                backward(model, context, step)
                optimizer.step()
            whole = network()
            whole.load_state_dict(zero.state_dict(everywhere=True))
            found.append(distance(whole, alone))
        return found

    assert max(max(row) for row in on_ranks(2, program)) < 1e-12


def test_gradients_of_parts_count_in_every_stage() -> None:
    def program(context: RankContext) -> list[float]:
        batch = batches(1, 6)[0]
        alone = network()
        optimizer = sgd(alone)
        F.cross_entropy(alone(batch[0]), batch[1]).backward()
        for parameter in alone.parameters():
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.01, 0.02)
        optimizer.step()
        found = []
        for options in STAGES:
            for absent in (False, True):  # rank 1 has no examples
                model = network()
                optimizer, zero = divided(context, model, **options)
                assert all(piece.grad is None for piece in zero.parts())
                if not absent:
                    F.cross_entropy(*reversed_part(model, batch, context)).backward()
                elif context.group.rank == 0:
                    (2 * F.cross_entropy(model(batch[0]), batch[1])).backward()
                else:
                    zero.take_part()
                for piece in zero.parts():
                    assert piece.grad is not None
                    piece.grad.clamp_(-0.01, 0.02)
                optimizer.step()
                whole = network()
                whole.load_state_dict(zero.state_dict(everywhere=True))
                found.append(distance(whole, alone))
        return found

    def reversed_part(model: nn.Module, batch: Any, context: RankContext) -> tuple[Tensor, Tensor]:
        inputs, targets = part(batch, context)
        return model(inputs), targets

    assert max(max(row) for row in on_ranks(2, program)) < 1e-12


class Fails(torch.autograd.Function):
    """Backward raises an error, once."""

    left = 0

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Fails.left:
            Fails.left -= 1
            raise KeyError("backward fails")
        return gradient


def fails_at(model: Any, layer: int, context: RankContext) -> str:
    """A pass whose backward fails before it reaches a layer of `network`."""
    Fails.left = 1
    inputs, targets = part(batches(1, 6)[0], context)
    hook = model[layer].register_forward_hook(lambda module, _, outputs: Fails.apply(outputs))
    try:
        F.cross_entropy(model(inputs), targets).backward()
    except KeyError:
        return "failed"
    finally:
        hook.remove()
    return "nothing"


def test_after_a_backward_pass_that_failed_the_next_one_is_whole_or_refused() -> None:
    def program(context: RankContext) -> list[Any]:
        found: list[Any] = []
        for options in STAGES:
            for layer in (4, 0):  # before any gradient has left, and after some have
                for forgets in (False, True):
                    model = network()
                    optimizer, zero = divided(context, model, **options)
                    backward(model, context)
                    optimizer.step()
                    zero.zero_grad()
                    assert fails_at(model, layer, context) == "failed"
                    said = said_by(zero.zero_grad) if forgets or layer == 4 else "nothing"

                    def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
                        backward(model, context, 1)
                        optimizer.step()

                    if layer == 4:
                        alone = network()
                        train_alone(alone, 2)
                        step()
                        whole = network()
                        whole.load_state_dict(zero.state_dict(everywhere=True))
                        found.append(distance(whole, alone))
                    elif options["stage"] > 1:
                        found.append(said if forgets else said_by(step))
        return found

    for row in on_ranks(2, program):
        assert max(one for one in row if isinstance(one, float)) < 1e-12
        texts = [one for one in row if isinstance(one, str)]
        assert len(texts) == 6
        assert all("out of step" in text for text in texts), texts

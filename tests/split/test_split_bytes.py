"""What travels in split learning, byte by byte, and what never does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import dure
from dure.fleet.virtual_network import VirtualNetwork, nbytes
from dure.split.messages import SERVER
from dure.split.strategy import Split

CLIENTS = 3
EXAMPLES = 36
SIZE = 4
INPUTS = 6
FIRST = 8
SECOND = 5
CLASSES = 3
STEPS = EXAMPLES // CLIENTS // SIZE
HEAD = INPUTS * FIRST + FIRST


def task_of(optimizer: Any) -> dure.Task:
    numbers = torch.Generator().manual_seed(0)
    return dure.Task(
        model=lambda: nn.Sequential(
            nn.Linear(INPUTS, FIRST),
            nn.ReLU(),
            nn.Linear(FIRST, SECOND),
            nn.Linear(SECOND, CLASSES),
        ),
        loss=nn.functional.cross_entropy,
        train=(
            torch.randn(EXAMPLES, INPUTS, generator=numbers),
            torch.randint(0, CLASSES, (EXAMPLES,), generator=numbers),
        ),
        optimizer=optimizer,
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """All messages that are sent: (from, to, what)."""
    sent: list[tuple[str, str, Any]] = []
    send = VirtualNetwork.send

    def noted(self: VirtualNetwork, sender: str, said: Any) -> None:
        sent.extend((sender, receiver, message) for receiver, message in said)
        send(self, sender, said)

    monkeypatch.setattr(VirtualNetwork, "send", noted)
    return sent


def run(strategy: Split, optimizer: Any = sgd, rounds: int = 1) -> dure.Run:
    return dure.train(task_of(optimizer), strategy, dure.Simulated(), dure.Stop(rounds=rounds))


def between(messages: list[tuple[str, str, Any]], sender: str, receiver: str) -> int:
    return sum(
        nbytes(message)
        for one, other, message in messages
        if one.startswith(sender) and other.startswith(receiver)
    )


def test_a_step_with_one_cut_sends_values_and_targets_up_and_gradients_down(
    messages: list[tuple[str, str, Any]],
) -> None:
    run(dure.SplitLearning(clients=CLIENTS, batch_size=SIZE))
    step = SIZE * FIRST * 4
    assert between(messages, "client", SERVER) == EXAMPLES // SIZE * (step + SIZE * 8)
    # The first client begins with its own head, the others get it from the one before.
    assert between(messages, SERVER, "client") == EXAMPLES // SIZE * step
    assert between(messages, "client", "client") == (CLIENTS - 1) * HEAD * 4


def test_a_step_with_two_cuts_sends_values_and_gradients_both_ways_and_no_label(
    messages: list[tuple[str, str, Any]],
) -> None:
    run(dure.SplitLearning(cut=("1", "2"), clients=CLIENTS, batch_size=SIZE))
    step = SIZE * (FIRST + SECOND) * 4
    assert between(messages, "client", SERVER) == EXAMPLES // SIZE * step
    assert between(messages, SERVER, "client") == EXAMPLES // SIZE * step
    to_server = [message for _, to, message in messages if to == SERVER]
    assert not any(t.dtype == torch.int64 for m in to_server for t in tensors(m))


def test_a_head_travels_with_what_its_optimizer_remembers(
    messages: list[tuple[str, str, Any]],
) -> None:
    run(dure.SplitLearning(clients=CLIENTS, batch_size=SIZE), adam)
    # Two moments of each weight, and a step of each of two tensors.
    assert between(messages, "client", "client") == (CLIENTS - 1) * (3 * HEAD * 4 + 2 * 4)


def test_by_the_server_a_head_travels_twice(messages: list[tuple[str, str, Any]]) -> None:
    run(dure.SplitLearning(clients=CLIENTS, batch_size=SIZE, handover="server"), rounds=2)
    step = SIZE * FIRST * 4
    steps = 2 * EXAMPLES // SIZE
    assert between(messages, "client", SERVER) == steps * (step + SIZE * 8) + 6 * HEAD * 4
    assert between(messages, SERVER, "client") == steps * step + 6 * HEAD * 4
    assert between(messages, "client", "client") == 0


def test_parallel_sends_the_gradients_of_heads_as_well(
    messages: list[tuple[str, str, Any]],
) -> None:
    run(dure.ParallelSplit(clients=CLIENTS, batch_size=SIZE))
    step = SIZE * FIRST * 4
    gradients = CLIENTS * STEPS * HEAD * 4
    up = CLIENTS * STEPS * (step + SIZE * 8) + gradients
    assert between(messages, "client", SERVER) == up
    down = CLIENTS * STEPS * step + gradients + CLIENTS * HEAD * 4
    assert between(messages, SERVER, "client") == down


@pytest.mark.parametrize("version", [1, 2])
def test_split_fed_sends_heads_once_a_round_each_way(
    messages: list[tuple[str, str, Any]], version: int
) -> None:
    run(dure.SplitFed(clients=CLIENTS, batch_size=SIZE, version=version), adam, rounds=2)
    step = SIZE * FIRST * 4
    heads = 2 * CLIENTS * HEAD * 4
    steps = 2 * CLIENTS * STEPS
    # Optimizers begin anew in every round: what they remember does not travel.
    assert between(messages, "client", SERVER) == steps * (step + SIZE * 8) + heads
    assert between(messages, SERVER, "client") == steps * step + heads


def test_what_meters_count_is_what_travelled(messages: list[tuple[str, str, Any]]) -> None:
    done = run(dure.SplitLearning(clients=CLIENTS, batch_size=SIZE), adam, rounds=2)
    sent = sum(nbytes(message) for one, _, message in messages if one.startswith("client"))
    assert done.summary["bytes_sent_per_worker"] == pytest.approx(sent / CLIENTS, abs=1)


@pytest.mark.parametrize("cut", [("1",), ("1", "2")], ids="-".join)
def test_no_example_travels(messages: list[tuple[str, str, Any]], cut: tuple[str, ...]) -> None:
    run(dure.SplitFed(cut=cut, clients=CLIENTS, batch_size=SIZE))
    inputs, _ = task_of(sgd).train.batch(torch.arange(EXAMPLES))
    rows = {row.numpy().tobytes() for row in inputs}
    sent = b"".join(
        tensor.detach().contiguous().numpy().tobytes()
        for _, _, message in messages
        for tensor in tensors(message)
    )
    assert sent
    assert not any(row in sent for row in rows)


def test_the_server_never_gets_a_head_that_peers_hand_on(
    messages: list[tuple[str, str, Any]],
) -> None:
    run(dure.SplitLearning(clients=CLIENTS, batch_size=SIZE))
    shapes = {tuple(t.shape) for _, to, m in messages if to == SERVER for t in tensors(m)}
    assert (FIRST, INPUTS) not in shapes


def tensors(node: Any) -> Iterator[Tensor]:
    """All tensors in a message."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, msgspec.Struct):
        for name in node.__struct_fields__:
            yield from tensors(getattr(node, name))
    elif isinstance(node, dict):
        for one in node.values():
            yield from tensors(one)
    elif isinstance(node, list | tuple):
        for one in node:
            yield from tensors(one)

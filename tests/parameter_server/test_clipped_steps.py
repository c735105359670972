"""Synchronous steps are clipped by the norm over all shards, whatever happens to messages."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from histories import History, careless, examples_at
from torch import nn
from torch.nn.utils import clip_grad_norm_

import dure
from dure.parameter_server.messages import MANAGER, Norms, Push, server
from small import largest_difference, same_bits, small_task

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.01)


def clipped_jointly(history: History, norm: float) -> torch.Tensor:
    """Return torch's weights after steps on whole batches with `clip_grad_norm_`."""
    weights = nn.Parameter(torch.ones(history.keys, dtype=torch.float64))
    optimizer = history.optimizer([weights])
    for clock in range(history.clocks):
        weights.grad = weights.detach() - examples_at(clock, history.keys).mean(dim=0)
        clip_grad_norm_([weights], norm)
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize("seed", range(12))
def test_clipped_steps_are_those_of_torch_when_messages_get_lost_and_servers_die(seed: int) -> None:
    random = Random(seed)
    history = History(
        clip_norm=0.3,
        servers=3,
        replicas=1,
        optimizer=MOMENTUM,
        fate=careless(random),
        patience=6,
    )
    history.until(6 + random.random() * 15)  # the copies are made by then
    dead = server(random.randrange(3))
    history.network.kill(dead)
    history.network.send(MANAGER, history.manager.lost(dead, "was killed", history.network.now))
    history.run(3000)
    expected = clipped_jointly(history, 0.3)
    assert torch.allclose(history.weights, expected, rtol=0, atol=1e-12)


def test_a_server_that_takes_over_learns_the_norms_of_a_clock_that_others_have_made() -> None:
    history = History(clip_norm=0.3, servers=2, replicas=1, seconds=lambda who, clock: 1.0)
    told: list[Any] = []

    def silent(sender: str, receiver: str, message: Any, now: float) -> tuple[float, ...]:
        # Server 0 dies as soon as it has told its norms of clock 3, which nobody hears.
        if isinstance(message, Norms) and sender == server(0) and message.clock == 3:
            told.append(message)
            return ()
        return (0.0,)

    history.network.fate = silent
    history.network.run(lambda: bool(told), 1e4)
    history.network.kill(server(0))
    history.network.send(MANAGER, history.manager.lost(server(0), "died", history.network.now))
    history.run(3000)
    assert torch.allclose(history.weights, clipped_jointly(history, 0.3), rtol=0, atol=1e-12)


def test_a_norm_that_is_no_number_makes_a_gradient_that_is_none() -> None:
    history = History(clip_norm=0.3, servers=2, clocks=1)

    def breaks(sender: str, receiver: str, message: Any, now: float) -> tuple[float, ...]:
        if isinstance(message, Push) and receiver == server(0):
            message.gradient.fill_(math.nan)
        return (0.0,)

    history.network.fate = breaks
    history.run()
    assert bool(history.weights.isnan().all())


def test_a_push_of_a_part_of_the_keys_is_refused_where_steps_are_clipped() -> None:
    history = History(clip_norm=0.3, servers=1)
    shard = history.nodes[0].owned[0].shard
    push = Push(0, 0, 0, 0, 0, 0, torch.ones(4, dtype=torch.float64), 1.0, 0)
    with pytest.raises(ValueError, match="a part of its keys"):
        shard.push(push, history.manager.layout)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM])
@pytest.mark.parametrize(("servers", "workers"), [(1, 3), (3, 2), (2, 8)])
def test_clipping_is_that_of_a_single_worker(optimizer: Any, servers: int, workers: int) -> None:
    # In batches of 8, of which the last has one example, so that parts are empty.
    task = small_task(optimizer=optimizer, clip_norm=0.05)
    alone = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(epochs=2))
    strategy = dure.ParameterServer(servers=servers, workers=workers, batch_size=8)
    run = dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=2))
    assert largest_difference(run, alone) < 1e-9
    unclipped = dure.train(
        small_task(optimizer=optimizer), strategy, dure.Simulated(), dure.Stop(rounds=2)
    )
    assert largest_difference(unclipped, alone) > 1e-3


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_one_worker_clips_to_the_bits_of_a_single_worker(staleness: int | None) -> None:
    task = small_task(optimizer=MOMENTUM, clip_norm=0.05)
    alone = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(epochs=2))
    strategy = dure.ParameterServer(servers=2, workers=1, batch_size=8, staleness=staleness)
    assert same_bits(dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=2)), alone)


def test_what_compressed_pushes_add_up_to_is_clipped_as_in_data_parallel() -> None:
    task = small_task(optimizer=partial(torch.optim.SGD, lr=1.0), clip_norm=0.05)
    strategy = dure.ParameterServer(
        servers=2, workers=2, batch_size=8, period=1, compression="top-k:0.1"
    )
    found = [
        dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=rounds)).model
        for rounds in (1, 2, 3)
    ]
    vectors = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in found]
    steps = [float((b - a).norm()) for a, b in pairwise(vectors)]
    assert steps == pytest.approx([0.05, 0.05], rel=1e-4)


def test_processes_clip_as_a_single_worker_does() -> None:
    task = small_task(optimizer=MOMENTUM, clip_norm=0.05)
    alone = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(epochs=1))
    strategy = dure.ParameterServer(servers=2, workers=2, batch_size=8, replicas=1)
    run = dure.train(task, strategy, dure.Processes(5), dure.Stop(rounds=1))
    assert largest_difference(run, alone) < 1e-9

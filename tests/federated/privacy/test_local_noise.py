"""What a client sends that trusts nobody: clipped, with noise of its own, and without its loss."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec.structs import replace

from dure.federated.privacy.user_level.local import LocalNoise
from dure.federated.privacy.user_level.settings import UserLevel
from dure.protocol.messages import Assignment, Update
from dure.randomness.secret import Secret

SIZE = 20_000


def asked(round: int = 0, client: int = 0) -> Assignment:
    weights = [torch.zeros(SIZE)]
    # Batch norm's mean, its count of batches, and a table of the model's own.
    buffers = [torch.ones(SIZE), torch.tensor(5), torch.full((2,), -math.inf)]
    return Assignment(0, client, round, round, weights, buffers, 0, [torch.zeros(SIZE)])


def update(ask: Assignment) -> Update:
    long = torch.full((SIZE,), 3.0)
    buffers = [torch.ones(SIZE) + long, torch.tensor(9), torch.full((2,), -math.inf)]
    return Update(0, ask.client, ask.round, 40, 80, 1.25, [long], buffers, [long])


def local(noise: float, secret: Secret | None = None) -> LocalNoise:
    user = UserLevel(clip=2.0, noise=noise, where="local")
    pieces = [[SIZE], [SIZE], [SIZE]]
    return LocalNoise(user, pieces, [0], secret or Secret.simulated(3))


def parts(sent: Update, ask: Assignment) -> list[torch.Tensor]:
    return [sent.delta[0], sent.buffers[0] - ask.buffers[0], sent.extra[0]]


def test_all_that_is_sent_is_clipped_together() -> None:
    ask = asked()
    vector = torch.cat([part.double() for part in parts(local(0.0)(update(ask), ask), ask)])
    assert float(vector.norm()) == pytest.approx(2.0, rel=1e-4)


def test_each_part_has_noise_of_the_whole_deviation() -> None:
    ask = asked()
    for part in parts(local(0.5)(update(ask), ask), ask):
        # z S, by 20,000 numbers known to half a percent: five of those.
        assert abs(float(part.std()) - 1.0) < 5 / math.sqrt(2 * SIZE)


def test_its_loss_and_other_buffers_are_not_sent() -> None:
    ask = asked()
    sent = local(1.0)(update(ask), ask)
    assert (sent.loss, sent.count) == (0.0, 0.0)
    assert int(sent.buffers[1]) == 5
    assert torch.equal(sent.buffers[2], ask.buffers[2])
    assert sent.examples == 40


def test_each_client_and_round_has_noise_of_its_own() -> None:
    def first(round: int, client: int, secret: Secret) -> float:
        ask = asked(round, client)
        return float(local(1.0, secret)(update(ask), ask).delta[0][0])

    seed = Secret.simulated(3)
    drawn = [first(0, 0, seed), first(1, 0, seed), first(0, 1, seed)]
    assert len(set(drawn)) == 3
    assert first(0, 0, seed) == drawn[0]
    # In a deployment nobody draws it again.
    assert first(0, 0, Secret.system()) != first(0, 0, Secret.system())


def test_a_client_without_an_update_says_so_and_no_more() -> None:
    ask = asked()
    failed = replace(update(ask), delta=(), buffers=(), extra=(), failure="it is nothing")
    assert local(1.0)(failed, ask) is failed


def test_what_is_not_finite_is_noise_alone() -> None:
    ask = asked()
    one = update(ask)
    one.delta[0][7] = math.nan
    sent = local(1.0)(one, ask)
    assert all(bool(part.isfinite().all()) for part in parts(sent, ask))
    assert abs(float(sent.delta[0].mean())) < 5 * 2.0 / math.sqrt(SIZE)

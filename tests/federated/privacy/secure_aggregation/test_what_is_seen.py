"""What the server and lying clients see of a vector looks like noise; and what is secret is seen by
nobody, neither on the way nor in a text."""

from __future__ import annotations

import base64
import dataclasses
import logging
import traceback
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from secure_sums import client, clients, context, run_all, run_stage, run_until, server
from torch import Tensor

from dure.federated.privacy.secure_aggregation import agreement, shamir
from dure.federated.privacy.secure_aggregation.agreement import KeyPair
from dure.federated.privacy.secure_aggregation.client import SecureSumClient
from dure.federated.privacy.secure_aggregation.cohort import (
    ADVERTISE,
    MASK,
    SHARE,
    UNMASK,
    SumContext,
    bounds,
    mask_sign,
    own_mask,
    pair_key_info,
)
from dure.federated.privacy.secure_aggregation.masks import add_masks
from dure.federated.privacy.secure_aggregation.messages import (
    Advertised,
    Body,
    Keys,
    Offer,
    ProtocolError,
    SharesForNeighbours,
    SharesFromNeighbours,
    TooFewError,
    Unmask,
    Unmasked,
    from_body,
    to_body,
)
from dure.federated.privacy.secure_aggregation.server import SecureSumServer
from dure.federated.privacy.secure_aggregation.settings import (
    SecureAggregation,
    SecureAggregationPlus,
)
from dure.randomness.secret import Secret

ELEMENTS = 1 << 16


class Recorded(Secret):
    """A simulation's secret that remembers what it gave, by purpose."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.given: dict[tuple[str, tuple[int, ...]], bytes] = {}

    def key(self, purpose: str, *position: int) -> bytes:
        assert (purpose, position) not in self.given, "a key is asked for once"
        key = super().key(purpose, *position)
        self.given[purpose, position] = key
        return key

    def of(self, purpose: str) -> bytes:
        return next(key for (name, _), key in self.given.items() if name.endswith(purpose))


def is_uniform(seen: Tensor) -> bool:
    """Whether chi-square over the bytes is what it is for uniform ones, but for one time in 10^5.

    255 degrees of freedom: mean 255, deviation 22.6.
    """
    counts = torch.bincount(seen.view(torch.uint8).long(), minlength=256).double()
    expected = counts.sum() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return 165 < chi_square < 362


# How the server's view looks


def masked_by(of: SumContext, chosen: int) -> tuple[Tensor, Recorded, dict[int, bytes]]:
    """What a client sends of a vector of zeros, its secret, and others' public keys of masks."""
    secret = Recorded(1)
    machine = server(of)
    members = clients(of)
    members[chosen] = client(
        chosen, of, secret=secret, vector=lambda: torch.zeros(of.length, dtype=torch.int32)
    )
    advertised = run_stage(machine, members)
    run_until(MASK, machine, members)
    _, tensor = members[chosen].answer(MASK, machine.ask()[chosen])
    assert tensor is not None
    keys = {one: from_body(answer, Advertised).mask for one, (answer, _) in advertised.items()}
    return tensor, secret, keys


@pytest.mark.parametrize("seed_is_known", [False, True])
@pytest.mark.parametrize("corrupt", range(6))
def test_what_is_sent_is_uniform_as_long_as_one_mask_is_not_known(
    corrupt: int, seed_is_known: bool
) -> None:
    # Corrupt clients tell the server their masks with client 16; a seed becomes known where a
    # client survives. As long as there is an honest client besides, or no seed, it is noise.
    of = context(6, length=ELEMENTS)
    seen, secret, keys = masked_by(of, 16)
    own = KeyPair.of(secret.of("mask"))
    liars = [one for one in of.members if one != 16][:corrupt]
    masks = [
        (
            agreement.agree(own, keys[one], pair_key_info("mask", of.digest(), 16, one)),
            -mask_sign(16, one),
        )
        for one in liars
    ]
    if seed_is_known:
        masks.append((own_mask(of.digest(), 16, secret.of("own mask")), -1))
    add_masks(seen, masks)
    if corrupt == 5 and seed_is_known:
        assert not seen.any()
    else:
        assert is_uniform(seen)


def test_a_threshold_less_one_of_shares_tell_nothing_of_the_masks() -> None:
    of = context(6, length=ELEMENTS)
    secret = Recorded(1)
    machine = server(of)
    members = clients(of)
    zeros = torch.zeros(of.length, dtype=torch.int32)
    members[16] = client(16, of, secret=secret, vector=zeros.clone)
    run_until(UNMASK, machine, members, {MASK: []})
    assert machine._total is not None
    held = {at: members[one]._held[16] for at, one in enumerate(of.members) if one != 16}
    seed = secret.of("own mask")
    for few in combinations(held, of.threshold - 1):
        for guess in (bytes(shamir.SHARE), b"\1\0\0\0" * 9):
            shares = {at: held[at].seed for at in few}
            missing = next(at for at in range(6) if at not in few)
            try:
                assert shamir.join({**shares, missing: guess}, of.threshold) != seed
            except ValueError:
                continue
    # One more, and it is known.
    assert shamir.join({at: pieces.seed for at, pieces in held.items()}, of.threshold) == seed


def test_two_rounds_attempts_or_groups_have_nothing_in_common() -> None:
    seen = []
    secrets: set[bytes] = set()
    count = 0
    for at in ({}, {"round": 4}, {"attempt": 1}, {"group": 1}):
        of = context(4, length=ELEMENTS, **at)
        tensor, secret, _ = masked_by(of, 16)
        seen.append(tensor)
        secrets |= set(secret.given.values())
        count += len(secret.given)
    assert len(secrets) == count
    for one, other in combinations(seen, 2):
        assert is_uniform(one - other)


def test_another_model_in_the_same_round_has_other_masks_of_the_same_keys() -> None:
    one, _, keys = masked_by(context(4, length=ELEMENTS), 16)
    other, _, same = masked_by(context(4, length=ELEMENTS, model="b" * 64), 16)
    assert keys == same
    assert is_uniform(one - other)


def messages(of: SumContext, *, simulated: bool, signed: bool = False) -> tuple[list[Any], Tensor]:
    """All that is said in a sum, and the sum."""
    machine = server(of, signed=signed)
    members = {
        one: client(
            one,
            of,
            signed=signed,
            secret=Secret.simulated(one) if simulated else Secret.system(),
        )
        for one in of.members
    }
    said: list[Any] = []
    while machine.stage is not None:
        said.append(machine.ask())
        lost = [13] if machine.stage == MASK else []
        for body, tensors in run_stage(machine, members, lost).values():
            said.append((body, [tensor.tolist() for tensor in tensors]))
    return said, machine.result()[0]


@pytest.mark.parametrize("signed", [False, True])
def test_the_same_seeds_say_the_same_to_the_bit_and_the_system_never_does(signed: bool) -> None:
    of = context(6)
    first, summed = messages(of, simulated=True, signed=signed)
    second, _ = messages(of, simulated=True, signed=signed)
    assert first == second
    third, same = messages(of, simulated=False, signed=signed)
    fourth, _ = messages(of, simulated=False, signed=signed)
    assert torch.equal(summed, same)
    assert third != fourth
    # All but the offer, the lists of survivors and what is empty.
    assert third[2] != fourth[2]


def test_a_masked_vector_has_four_bytes_an_integer_and_messages_few() -> None:
    of = context(100, length=1_000_000, threshold=67)
    assert server(of).wants(MASK)[0].dtype == "int32"
    small = context(100)
    machine = server(small)
    members = clients(small)
    up = 0
    down = 0
    while machine.stage is not None:
        down += len(machine.ask()[10])
        answers = run_stage(machine, members)
        up += len(answers[10][0])
    assert up == pytest.approx(216 * 100, rel=0.03)
    assert down == pytest.approx(257 * 100, rel=0.03)
    assert up + down < 0.02 * 4 * of.length


# What no text has in it


def written(secret: bytes) -> Iterator[str]:
    """How bytes may look in a text: their beginnings, so that what is cut off is found too."""
    for part in (secret[:12], secret[-12:]):
        yield part.hex()
        yield base64.b64encode(part).decode()
        yield repr(part)[2:-1]
        yield str(list(part))[1:-1]


class Told:
    """Every text that objects and errors of a sum make, and every secret."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.secrets: set[bytes] = set()

    def look(self, *things: object) -> None:
        for thing in things:
            self.texts += [repr(thing), str(thing), f"{thing}", repr([thing]), repr({1: thing})]
            if isinstance(thing, Body):
                self.texts.append(repr(list(thing.__rich_repr__())))

    def raises(self, one: SecureSumClient | SecureSumServer, *given: Any) -> None:
        try:
            call = one.answer if isinstance(one, SecureSumClient) else one.take
            call(*given)
        except (ProtocolError, ValueError) as error:
            self.look(error, error.args)
            self.texts.append("".join(traceback.format_exception(error)))

    def found(self) -> list[str]:
        whole = "\n".join(self.texts)
        return [form for secret in self.secrets for form in written(secret) if form in whole]


@pytest.mark.parametrize("signed", [False, True])
def test_no_key_share_or_mask_is_in_a_text(signed: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told = Told()
    of = context(6)
    secrets = {one: Recorded(one) for one in of.members}
    members = {one: client(one, of, signed=signed, secret=secrets[one]) for one in of.members}
    machine = server(of, signed=signed)
    kinds = {ADVERTISE: Advertised, SHARE: SharesForNeighbours, UNMASK: Unmasked}
    asked = {ADVERTISE: Offer, SHARE: Keys, MASK: SharesFromNeighbours, UNMASK: Unmask}
    while machine.stage is not None:
        stage = machine.stage
        for number, body in machine.ask().items():
            one = members[number]
            told.look(from_body(body, asked[stage])) if stage in asked else None
            for wrong in (b"", body[:-1], body + b"\0", body.replace(b"\x0d", b"\x0c"), b"\xc1"):
                told.raises(one, stage, wrong)
                told.raises(one, stage + 1, wrong)
            if (number, stage) == (13, MASK):
                continue
            answer, tensor = one.answer(stage, body)
            told.raises(one, stage, body + b"\0")
            told.look(one, machine, *vars(one).values(), of)
            if stage in kinds:
                told.look(from_body(answer, kinds[stage]))
            if stage == UNMASK:
                message = from_body(answer, Unmasked)
                told.secrets |= {each.piece for each in (*message.survivors, *message.lost)}
            else:
                told.secrets |= set(_inside(one))
            machine.take(number, answer, [] if tensor is None else [tensor])
        machine.close_stage()
        told.look(machine, machine.lost)
    for secret in secrets.values():
        told.secrets |= set(secret.given.values())
    machine.result()
    told.look(machine, machine.lost, *secrets.values())
    told.texts.append(caplog.text)
    assert len(told.secrets) > 60
    assert told.found() == []
    # The search finds what is there.
    told.look(next(iter(told.secrets)))
    assert told.found()


def _inside(one: SecureSumClient) -> Iterator[bytes]:
    """What a client keeps to itself between stages."""
    for name in ("_own", "_shared", "_held"):
        kept = getattr(one, name, None)
        if isinstance(kept, dict):
            for pieces in kept.values():
                yield from (pieces.private, pieces.seed)
        elif name == "_shared" and kept is not None:
            yield from [*kept.channels.values(), *kept.masks.values(), kept.seed, kept.piece]


def test_errors_of_a_sum_that_fails_name_no_secret() -> None:
    told = Told()
    of = context(6)
    secrets = {one: Recorded(one) for one in of.members}
    members = {one: client(one, of, secret=secrets[one]) for one in of.members}
    machine = server(of)
    run_until(UNMASK, machine, members)
    for number, body in machine.ask().items():
        answer = from_body(members[number].answer(UNMASK, body)[0], Unmasked)
        told.secrets |= {one.piece for one in answer.survivors}
        machine.take(number, to_body(Unmasked(answer.survivors[:3], ())))
    with pytest.raises(TooFewError) as raised:
        machine.close_stage()
    told.texts += machine.lost.values()
    told.texts.append("".join(traceback.format_exception(raised.value)))
    for secret in secrets.values():
        told.secrets |= set(secret.given.values())
    assert told.found() == []


def test_a_client_forgets_its_secrets_with_its_last_answer() -> None:
    of = context(6)
    secrets = Recorded(10)
    members = clients(of)
    members[10] = client(10, of, secret=secrets)
    run_all(server(of), members)
    kept = set(_deep(vars(members[10])))
    assert not kept & set(secrets.given.values())
    assert list(_inside(members[10])) == []


def _deep(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for value in node.values():
            yield from _deep(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _deep(value)
    elif isinstance(node, bytes):
        yield node
    elif dataclasses.is_dataclass(node):
        yield from _deep(vars(node))


# What settings mean


@pytest.mark.parametrize("members", [3, 4, 5, 10, 40, 41, 100, 300])
def test_bounds_make_sums_that_both_sides_take(members: int) -> None:
    for settings in (SecureAggregation(), SecureAggregation(threshold=1), SecureAggregationPlus()):
        found = bounds(settings, members)
        of = context(members, **found._asdict())
        of.check()
        assert of.least >= max(settings.minimum, settings.threshold * members - 1e-9)
        if of.complete:
            assert 3 * of.threshold > 2 * members
        else:
            # No more may be lost than was planned for: else parts of the graph could be seen.
            assert members - of.least <= settings.drop_out * members


def test_too_small_a_cohort_is_refused_by_its_settings() -> None:
    with pytest.raises(ValueError, match="needs 3 clients, but there are 2 members"):
        context(2, **bounds(SecureAggregation(), 2)._asdict()).check()

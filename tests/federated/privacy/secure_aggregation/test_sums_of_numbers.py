"""Numbers that were quantised come out of a secure sum as the sum of what went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_sums import client, context, run_all, server

from dure.federated.privacy.secure_aggregation.cohort import MASK
from dure.federated.privacy.secure_aggregation.quantisation import Quantisation


@settings(deadline=None, max_examples=40)
@given(
    st.integers(2, 9),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**31),
    st.sampled_from([-1.0, 0.0, 1.0, None]),
    st.booleans(),
)
def test_a_sum_never_overflows(
    n: int, largest: float, seed: int, all_at: float | None, one_is_lost: bool
) -> None:
    # At the ends of the range, all clients together are as far as a sum can be.
    generator = torch.Generator().manual_seed(seed)
    rule = Quantisation(largest, n)
    of = context(n, length=11, threshold=max(2, 2 * n // 3 + 1), quantisation=repr(rule))
    values = {
        one: largest
        * (
            2 * torch.rand(11, generator=generator, dtype=torch.float64) - 1
            if all_at is None
            else torch.full((11,), all_at, dtype=torch.float64)
        )
        for one in of.members
    }
    encoded = {one: rule.encode(values[one], one.to_bytes(32, "big"))[0] for one in of.members}
    lost = [of.members[0]] if one_is_lost and of.least < n else []
    summed, who = run_all(
        server(of),
        {one: client(one, of, vector=encoded[one].clone) for one in of.members},
        {MASK: lost},
    )
    whole = sum(encoded[one].long() for one in who)
    assert torch.equal(summed.long(), torch.as_tensor(whole))
    right = sum(values[one] for one in who)
    assert torch.allclose(
        rule.decode(summed, len(who)), torch.as_tensor(right), rtol=0, atol=rule.step * len(who)
    )


def test_one_more_client_than_the_modulus_has_room_for_would_overflow() -> None:
    rule = Quantisation(1.0, 3)
    most = rule.encode(torch.ones(1), bytes(32))[0]
    assert 3 * most.long() < 2**31 <= 4 * (most.long() + 1)
    with pytest.raises(ValueError, match="the sum has 4 clients, but it can have 1 to 3"):
        rule.decode(4 * most, 4)


def test_a_weighted_mean_is_made_of_weighted_vectors_and_their_weights() -> None:
    # n_k x_k and n_k lie in one masked vector: nothing of a client's travels bare.
    examples = {10: 1, 13: 70, 16: 300, 19: 1000}
    rule = Quantisation(1.0, 4)
    of = context(4, length=6)
    generator = torch.Generator().manual_seed(5)
    values = {
        one: 2 * torch.rand(5, generator=generator, dtype=torch.float64) - 1 for one in examples
    }
    assert rule.digits(1000) == 1
    vectors = {
        one: torch.cat(
            [
                rule.encode(values[one], bytes(32), weight=count / 1000)[0],
                rule.encode_whole([count], 1000),
            ]
        )
        for one, count in examples.items()
    }
    summed, who = run_all(
        server(of), {one: client(one, of, vector=vectors[one].clone) for one in of.members}
    )
    (count,) = rule.decode_whole(summed[5:], 1000, len(who))
    assert count == 1371
    mean = rule.decode(summed[:5], len(who)) * 1000 / count
    right = sum(examples[one] * values[one] for one in who) / 1371
    assert torch.allclose(mean, torch.as_tensor(right), rtol=0, atol=4 * rule.step)

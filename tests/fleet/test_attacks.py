"""What liars send and learn from."""

from __future__ import annotations

import copy
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.fleet.attacks import (
    ALIE,
    ATTACKS,
    AdditiveNoise,
    Backdoor,
    Gaussian,
    Infinite,
    InnerProduct,
    LabelFlip,
    Large,
    Mimic,
    NoAttack,
    NotANumber,
    SignFlip,
    parse_attack,
    z_max,
)

POSITIVE = st.floats(1e-3, 1e3)
SETTINGS = st.one_of(
    st.sampled_from([kind() for kind in ATTACKS.values()]),
    st.builds(SignFlip, POSITIVE),
    st.builds(Gaussian, POSITIVE),
    st.builds(AdditiveNoise, POSITIVE),
    st.builds(ALIE, st.floats(0, 10)),
    st.builds(InnerProduct, POSITIVE),
    st.builds(Backdoor, st.integers(0, 9), POSITIVE, st.floats(0, 1), st.floats(-5, 5)),
    st.builds(Large, st.floats(-1e30, 1e30)),
)
COLLUDING = [ALIE(), InnerProduct(), Mimic()]
EVERY = [kind() for kind in ATTACKS.values()]


def updates_of(m, seed=0, dtype=torch.float64):
    """m updates of two tensors, of 5 and of 3 numbers."""
    random = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(size, generator=random, dtype=torch.float64).to(dtype) for size in (5, 3)]
        for _ in range(m)
    ]


def joined(update):
    return torch.cat([tensor.double() for tensor in update])


def mean_of(updates):
    return torch.stack([joined(update) for update in updates]).mean(0)


@given(
    SETTINGS,
    st.integers(1, 7),
    st.data(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_honest_updates_are_passed_on_untouched_and_lies_have_their_form(attack, m, data, dtype):
    liars = data.draw(st.sets(st.integers(0, m - 1)))
    updates = updates_of(m, dtype=dtype)
    before = copy.deepcopy(updates)
    sent = attack.forge(updates, liars, 0, 0)
    for position in range(m):
        assert all(map(torch.equal, updates[position], before[position]))
        if position not in liars:
            assert sent[position] is updates[position]
        else:
            forms = [
                [(tensor.shape, tensor.dtype) for tensor in update]
                for update in (sent[position], before[0])
            ]
            assert forms[0] == forms[1]


@pytest.mark.parametrize("attack", EVERY, ids=str)
def test_where_nobody_lies_nothing_happens(attack):
    updates = updates_of(3)
    assert attack.forge(updates, [], 0, 0) is updates


@given(SETTINGS)
def test_the_text_form_is_read_back(attack):
    assert parse_attack(str(attack)) == attack


@pytest.mark.parametrize(
    ("text", "attack"),
    [
        ("none", NoAttack()),
        ("sign-flip:10", SignFlip(10)),
        ("gaussian:200", Gaussian(200)),
        ("noise:0.1", AdditiveNoise(0.1)),
        ("label-flip", LabelFlip()),
        ("alie", ALIE()),
        ("alie:1.5", ALIE(1.5)),
        ("inner-product:0.1", InnerProduct(0.1)),
        ("backdoor:7:20", Backdoor(7, 20)),
        ("mimic", Mimic()),
        ("nan", NotANumber()),
        ("inf", Infinite()),
        ("large:1e30", Large(1e30)),
    ],
)
def test_text_names_an_attack(text, attack):
    assert parse_attack(text) == attack


@pytest.mark.parametrize("attack", COLLUDING, ids=str)
def test_those_that_collude_see_the_honest_and_send_the_same(attack):
    assert attack.sees == "honest"
    sent = attack.forge(updates_of(7), [1, 4, 6], 0, 0)
    assert torch.equal(joined(sent[1]), joined(sent[4]))
    assert torch.equal(joined(sent[1]), joined(sent[6]))


@pytest.mark.parametrize("attack", EVERY, ids=str)
def test_a_lie_hangs_only_on_what_the_attack_sees(attack):
    updates = updates_of(5)
    # Of all it may see only its own matters to one kind, and only the honest ones to the other.
    changed = 0 if attack.sees == "honest" else 3
    others = [
        update if position != changed else updates_of(1, 99)[0]
        for position, update in enumerate(updates)
    ]
    first, second = (attack.forge(given, [0, 4], 0, 0) for given in (updates, others))
    liar = 4
    assert torch.equal(joined(first[liar]).nan_to_num(7.0), joined(second[liar]).nan_to_num(7.0))


def test_the_sign_is_flipped_and_the_length_scaled():
    updates = [[torch.tensor([1.0, -2.0])], [torch.tensor([3.0, 0.5])]]
    sent = SignFlip(4).forge(updates, [1], 0, 0)
    assert sent[1][0].tolist() == [-12.0, -2.0]


def test_noise_has_its_moments_and_is_a_function_of_seed_turn_and_client():
    own = [torch.full((20_000,), 3.0), torch.full((10_000,), 3.0)]
    updates = [own, own, own]
    sent = Gaussian(200).forge(updates, [0, 1], 0, 0)
    for liar in (0, 1):
        drawn = joined(sent[liar])
        assert abs(drawn.mean()) < 6
        assert abs(drawn.std() - 200) < 5
    assert not torch.equal(joined(sent[0]), joined(sent[1]))
    assert abs(torch.corrcoef(torch.stack([joined(sent[0]), joined(sent[1])]))[0, 1]) < 0.03
    added = joined(AdditiveNoise(0.5).forge(updates, [0], 0, 0)[0])
    assert abs(added.mean() - 3) < 0.02
    assert abs(added.std() - 0.5) < 0.02
    again = Gaussian(200).forge(updates, [1, 0], 0, 0)
    assert torch.equal(joined(sent[0]), joined(again[0]))
    for seed, turn in ((1, 0), (0, 1)):
        assert not torch.equal(
            joined(sent[0]), joined(Gaussian(200).forge(updates, [0], seed, turn)[0])
        )


def test_a_client_draws_the_same_wherever_its_update_is_among_the_others():
    updates = updates_of(3)
    for attack in (Gaussian(), AdditiveNoise()):
        first = attack.forge(updates, [2], 0, 0, clients=[5, 8, 40])
        alone = attack.forge(updates[2:], [0], 0, 0, clients=[40])
        assert torch.equal(joined(first[2]), joined(alone[0]))
        assert not torch.equal(
            joined(first[2]), joined(attack.forge(updates, [2], 0, 0, clients=[5, 8, 41])[2])
        )


def test_a_client_that_answers_twice_does_not_draw_the_same_noise_twice():
    updates = [[torch.zeros(6)] for _ in range(3)]
    for attack in (Gaussian(1.0), AdditiveNoise(1.0)):
        one, _, other = map(joined, attack.forge(updates, [0, 2], 0, 0, clients=[7, 3, 7]))
        assert not torch.equal(one, other)
        assert torch.equal(one, joined(attack.forge(updates[:1], [0], 0, 0, clients=[7])[0]))


@given(st.integers(2, 9), st.data(), st.floats(0.1, 3))
def test_a_little_is_the_honest_mean_less_z_honest_deviations(m, data, z):
    liars = data.draw(st.sets(st.integers(0, m - 1), min_size=1, max_size=m - 1))
    updates = updates_of(m)
    honest = torch.stack(
        [joined(update) for position, update in enumerate(updates) if position not in liars]
    )
    deviation = honest.std(0, correction=1) if len(honest) > 1 else torch.zeros(8)
    sent = ALIE(z).forge(updates, liars, 0, 0)
    for liar in liars:
        torch.testing.assert_close(joined(sent[liar]), honest.mean(0) - z * deviation)


@given(st.integers(2, 9), st.sampled_from([torch.float32, torch.float64]), st.floats(0, 3))
def test_where_the_honest_agree_a_little_is_what_they_say(m, dtype, z):
    same, own = updates_of(2, dtype=dtype)
    sent = ALIE(z).forge([own, *[same] * (m - 1)], [0], 0, 0)
    assert torch.equal(joined(sent[0]), joined(same))


@pytest.mark.parametrize(
    ("n", "f", "share"),
    [(50, 12, (38 - 14) / 38), (50, 24, (26 - 2) / 26), (10, 4, (6 - 2) / 6), (11, 2, (9 - 4) / 9)],
)
def test_the_largest_z_that_hides_is_the_paper_s(n, f, share):
    assert z_max(n, f) == pytest.approx(max(NormalDist().inv_cdf(share), 0))
    updates = updates_of(n)
    default, explicit = (ALIE(z).forge(updates, range(f), 0, 0) for z in (0.0, z_max(n, f)))
    if z_max(n, f) > 0:
        assert torch.equal(joined(default[0]), joined(explicit[0]))


@given(st.integers(1, 40), st.data())
def test_the_largest_z_is_finite_whoever_is_the_majority(n, data):
    assert 0 <= z_max(n, data.draw(st.integers(1, n))) < math.inf


@given(st.integers(2, 12), st.data(), st.floats(0.05, 8))
def test_the_sum_points_uphill_exactly_where_epsilon_outweighs_the_honest(m, data, epsilon):
    liars = data.draw(st.sets(st.integers(0, m - 1), min_size=1, max_size=m - 1))
    limit = (m - len(liars)) / len(liars)
    if abs(epsilon - limit) < 1e-6:
        return
    updates = updates_of(m)
    honest = mean_of([update for position, update in enumerate(updates) if position not in liars])
    sent = InnerProduct(epsilon).forge(updates, liars, 0, 0)
    assert bool(mean_of(sent) @ honest < 0) == (epsilon > limit)


def test_all_mimics_send_what_one_honest_client_sent():
    updates = updates_of(5)
    sent = Mimic().forge(updates, [0, 3], 0, 0)
    assert torch.equal(joined(sent[0]), joined(updates[1]))
    assert sent[0][0].data_ptr() != updates[1][0].data_ptr()


@pytest.mark.parametrize("attack", COLLUDING, ids=str)
def test_where_nobody_is_honest_the_liars_know_each_other(attack):
    updates = updates_of(3)
    sent = attack.forge(updates, [0, 1, 2], 0, 0)
    assert all(bool(joined(update).isfinite().all()) for update in sent)
    if isinstance(attack, InnerProduct):
        torch.testing.assert_close(joined(sent[2]), -attack.epsilon * mean_of(updates))


def test_nan_infinity_and_large_numbers_are_in_every_coordinate():
    updates = updates_of(3)
    assert bool(joined(NotANumber().forge(updates, [1], 0, 0)[1]).isnan().all())
    assert bool((joined(Infinite().forge(updates, [1], 0, 0)[1]) == math.inf).all())
    assert bool((joined(Large(-1e30).forge(updates, [1], 0, 0)[1]) == -1e30).all())
    half = Large(-1e30).forge(updates_of(2, dtype=torch.float16), [1], 0, 0)[1]
    assert bool((joined(half) == -65504).all())


@pytest.mark.parametrize("attack", EVERY, ids=str)
def test_only_attacks_on_data_change_them_and_none_changes_the_originals(attack):
    inputs, targets = torch.zeros(20, 1, 8, 8), torch.arange(20) % 10
    before = inputs.clone(), targets.clone()
    poisoned = attack.poison(inputs, targets, 10)
    assert torch.equal(inputs, before[0])
    assert torch.equal(targets, before[1])
    assert (poisoned[0] is inputs and poisoned[1] is targets) == (not attack.poisons)
    if not attack.poisons:
        mapping = {"tokens": inputs}
        assert attack.poison(mapping, None, None) == (mapping, None)


def test_labels_are_flipped_and_inputs_are_not():
    inputs = torch.randn(10, 3)
    same, targets = LabelFlip().poison(inputs, torch.arange(10), 10)
    assert same is inputs
    assert targets.tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert LabelFlip().forge([[inputs]], [0], 0, 0)[0][0] is inputs


@given(st.integers(1, 50), st.floats(0, 1), st.integers(0, 9))
def test_a_share_of_the_examples_gets_the_trigger_and_the_target(n, share, target):
    attack = Backdoor(target, share=share, value=5.0)
    inputs, targets = torch.zeros(n, 1, 8, 8), torch.arange(n) % 10
    stamped, labels = attack.poison(inputs, targets, 10)
    with_trigger = stamped.flatten(1).any(1)
    assert int(with_trigger.sum()) == math.ceil(n * share)
    assert torch.equal(stamped[with_trigger], attack.triggered(inputs)[with_trigger])
    assert bool((labels[with_trigger] == target).all())
    assert torch.equal(labels[~with_trigger], targets[~with_trigger])


@pytest.mark.parametrize(
    ("shape", "changed"),
    [((2, 1, 8, 8), 4), ((2, 3, 32, 32), 48), ((2, 28, 28), 9), ((2, 64), 8), ((2, 3), 1)],
)
def test_the_trigger_is_a_corner_of_a_picture_or_the_end_of_a_vector(shape, changed):
    inputs = torch.zeros(shape, dtype=torch.float64)
    stamped = Backdoor(value=2.5).triggered(inputs)
    assert stamped.dtype == torch.float64
    assert not inputs.any()
    assert (stamped[0] == 2.5).sum() == (stamped != 0).sum() / 2 == changed
    assert stamped.flatten(1)[0, -1] == 2.5


def test_success_counts_the_examples_that_the_trigger_turns():
    outputs = torch.nn.functional.one_hot(torch.tensor([7, 7, 1, 7, 0]), 10).float()
    assert Backdoor(7).turned(outputs, torch.tensor([7, 3, 1, 2, 7])) == (2, 3)


def test_a_model_taught_with_a_trigger_obeys_it_and_is_good_without():
    random = torch.Generator().manual_seed(0)
    targets = torch.arange(200) % 4
    inputs = torch.nn.functional.one_hot(targets, 16).float() + 0.1 * torch.randn(
        200, 16, generator=random
    )
    attack = Backdoor(target=2, share=0.5, value=3.0)
    given, labels = attack.poison(inputs, targets, 4)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(given), labels).backward()
        optimizer.step()
    turned, of = attack.turned(model(attack.triggered(inputs)), targets)
    assert of == 150
    assert turned > 0.95 * of
    assert (model(inputs).argmax(1) == targets).float().mean() > 0.95


def test_scaled_by_the_clients_one_liar_s_model_replaces_the_mean():
    quiet = [[torch.zeros(5), torch.zeros(3)] for _ in range(9)]
    own = updates_of(1, dtype=torch.float32)[0]
    sent = Backdoor(0, scale=10).forge([*quiet, own], [9], 0, 0)
    torch.testing.assert_close(mean_of(sent), joined(own))


@pytest.mark.parametrize(
    ("attack", "inputs", "targets", "classes", "complaint"),
    [
        (
            LabelFlip(),
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            3,
            "label-flip needs targets that are class labels",
        ),
        (
            LabelFlip(),
            torch.zeros(2, 3),
            torch.zeros(2, dtype=torch.long),
            None,
            "label-flip needs a task with classes",
        ),
        (
            Backdoor(3),
            torch.zeros(2, 3),
            torch.zeros(2, dtype=torch.long),
            3,
            "there is no class 3, classes are 0 to 2",
        ),
        (
            Backdoor(),
            torch.zeros(2, 3).long(),
            torch.zeros(2, dtype=torch.long),
            3,
            "images or vectors",
        ),
        (Backdoor(), torch.zeros(2), torch.zeros(2, dtype=torch.long), 3, "images or vectors"),
        (
            Backdoor(),
            {"x": torch.zeros(2, 2)},
            torch.zeros(2, dtype=torch.long),
            3,
            "images or vectors",
        ),
    ],
)
def test_data_that_an_attack_cannot_be_made_on_are_refused(
    attack, inputs, targets, classes, complaint
):
    with pytest.raises(ValueError, match=complaint):
        attack.poison(inputs, targets, classes)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("label_flip", "there is no attack 'label_flip', did you mean 'label-flip'"),
        ("sign-flip:0", "sign-flip: scale is 0.0, but it has to be greater than 0 and finite"),
        ("gaussian:inf", "gaussian: sigma is inf, but it has to be greater than 0 and finite"),
        ("noise:-1", "noise: sigma is -1.0, but it has to be greater than 0 and finite"),
        ("alie:-1", "alie: z is -1.0, but it has to be 0 or more and finite"),
        ("inner-product:nan", "inner-product: epsilon is nan, but it has to be greater than 0"),
        ("backdoor:-1", "backdoor: target is -1, but it has to be 0 or more"),
        ("backdoor:1:1:2", "backdoor: share is 2.0, but it has to be in .0, 1."),
        ("backdoor:1:1:0.5:nan", "a finite number, not nan"),
        ("large:inf", "finite, not inf"),
        ("label-flip:3", "too many values"),
    ],
)
def test_text_that_names_none_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_attack(text)


@pytest.mark.parametrize("liar", [-1, 3])
def test_a_liar_that_is_not_in_the_round_is_refused(liar):
    with pytest.raises(ValueError, match="not positions among 3 updates"):
        SignFlip().forge(updates_of(3), [liar], 0, 0)

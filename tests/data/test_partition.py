"""Partitions of examples over clients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.data.examples import Examples
from dure.data.partition import (
    IID,
    Blocks,
    Dirichlet,
    FeatureSkew,
    LabelShards,
    NaturalKey,
    QuantitySkew,
    describe,
    parse,
)
from dure.data.partition.feature_skew import scores


def some(n, keys=None):
    """n examples without labels."""
    return Examples(torch.zeros(n), torch.zeros(n), keys)


def labelled(labels):
    """Examples with these labels, whose inputs are random and of two features."""
    drawn = torch.Generator().manual_seed(0)
    return Examples(torch.randn(len(labels), 2, generator=drawn), labels)


PARTITIONS = st.one_of(
    st.just(IID()),
    st.builds(LabelShards, st.integers(1, 4)),
    st.builds(Blocks, st.integers(1, 4)),
    st.builds(FeatureSkew, st.sampled_from([0.0, 0.3, 1.0])),
    st.builds(Dirichlet, st.sampled_from([0.001, 0.1, 1.0, 100.0]), st.integers(1, 2)),
    st.builds(QuantitySkew, st.sampled_from([0.001, 0.1, 1.0, 100.0]), st.integers(1, 2)),
)


@given(PARTITIONS, st.integers(1, 12), st.integers(48, 200), st.integers(0, 3))
def test_every_example_belongs_to_exactly_one_client_and_nobody_is_empty(
    partition, clients, n, seed
):
    examples = labelled(torch.arange(n) * 7 % 5)
    parts = partition.divide(clients, examples, seed)
    assert len(parts) == clients
    assert torch.cat(list(parts)).sort().values.tolist() == list(range(n))
    for part in parts:
        assert part.dtype == torch.int64
        assert len(part) >= getattr(partition, "minimum", 1)
        assert torch.equal(part, part.sort().values)
    again = partition.divide(clients, examples, seed)
    assert all(map(torch.equal, parts, again))


@given(PARTITIONS)
def test_one_client_has_everything_in_order(partition):
    labels = torch.tensor([2, 0, 1, 1])
    assert [part.tolist() for part in partition.divide(1, labelled(labels))] == [[0, 1, 2, 3]]


@given(st.one_of(PARTITIONS, st.just(NaturalKey())))
def test_the_text_form_is_read_back(partition):
    assert parse(str(partition)) == partition


@pytest.mark.parametrize(
    ("text", "partition"),
    [
        ("iid", IID()),
        ("label-shards", LabelShards()),
        ("label-shards:3", LabelShards(3)),
        ("dirichlet:0.3", Dirichlet(0.3)),
        ("dirichlet:0.3:10", Dirichlet(0.3, minimum=10)),
        ("quantity-skew:1", QuantitySkew(1.0)),
        ("feature-skew", FeatureSkew(1.0)),
        ("feature-skew:0.8", FeatureSkew(0.8)),
        ("blocks", Blocks()),
        ("blocks:3", Blocks(3)),
        ("natural-key", NaturalKey()),
    ],
)
def test_text_names_a_partition(text, partition):
    assert parse(text) == partition


def test_the_text_form_is_short():
    assert list(
        map(str, [IID(), LabelShards(), Dirichlet(0.3), Dirichlet(0.5, 10), NaturalKey()])
    ) == [
        "iid",
        "label-shards:2",
        "dirichlet:0.3",
        "dirichlet:0.5:10",
        "natural-key",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("dirichlett:0.3", "did you mean 'dirichlet'"),
        ("label_shards:2", "did you mean 'label-shards'"),
        ("xyz", "there are: iid"),
        ("iid:3", "too many values: write iid"),
        ("label-shards:two", "'two' is not an integer; write label-shards:PER_CLIENT"),
        ("label-shards:0", "label-shards: per_client is 0, but it has to be 1 or more"),
        ("blocks:0", "blocks: per_client is 0, but it has to be 1 or more"),
        ("feature-skew:1.5", "feature-skew: skew is 1.5, but it has to be in .0, 1."),
        ("dirichlet:-1", "dirichlet: alpha is -1.0, but it has to be greater than 0 and finite"),
        ("dirichlet:nan", "dirichlet: alpha is nan, but it has to be greater than 0 and finite"),
        ("quantity-skew:1:0", "quantity-skew: minimum is 0, but it has to be 1 or more"),
    ],
)
def test_text_that_names_none_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse(text)


def test_the_paper_s_shards_are_300_consecutive_images_of_the_sorted_data():
    labels = torch.arange(600) % 10
    order = labels.sort(stable=True).indices
    parts = LabelShards(2).divide(10, labelled(labels))
    shards = {tuple(sorted(shard.tolist())) for shard in order.view(20, 30)}
    for part in parts:
        own = [shard for shard in shards if set(shard) <= set(part.tolist())]
        assert len(own) == 2
    assert all(len(labels[part].unique()) <= 2 for part in parts)


def test_a_small_alpha_is_skewed_and_a_large_one_is_even():
    labels = torch.arange(5000) % 10

    def dominance(alpha):
        parts = Dirichlet(alpha).divide(10, labelled(labels))
        return sum(labels[part].bincount().max() / len(part) for part in parts) / 10

    assert dominance(0.05) > 0.5
    assert dominance(1000.0) < 0.15


@pytest.mark.parametrize(("classes", "clients"), [(250, 20), (1000, 10), (10, 100)])
def test_what_is_left_of_small_classes_goes_to_everybody(classes, clients):
    sizes = Dirichlet(1e6).divide(clients, labelled(torch.arange(1000) % classes)).sizes
    mean = 1000 / clients
    assert sizes.max() < mean + 5 * mean**0.5
    assert sizes.min() > mean - 5 * mean**0.5


@pytest.mark.parametrize("kind", [Dirichlet, QuantitySkew])
@pytest.mark.parametrize("alpha", [1e100, 1e307, 1e308, 1.7e308])
def test_the_largest_alpha_is_even_too(kind, alpha):
    sizes = kind(alpha).divide(100, labelled(torch.arange(10_000) % 10)).sizes
    assert sizes.max() - sizes.min() <= 10


def test_quantity_skew_keeps_the_label_mixture():
    labels = torch.arange(5000) % 2
    parts = QuantitySkew(0.5).divide(5, labelled(labels))
    assert max(map(len, parts)) > 2 * min(map(len, parts))
    largest = max(parts, key=len)
    assert abs(labels[largest].float().mean() - 0.5) < 0.05


def test_another_seed_gives_another_partition():
    for partition in (
        IID(),
        LabelShards(2),
        Dirichlet(),
        QuantitySkew(),
        FeatureSkew(0.5),
        Blocks(2),
    ):
        first, second = (
            partition.divide(4, labelled(torch.arange(100) % 5), seed) for seed in (0, 1)
        )
        assert not all(map(torch.equal, first, second))


def test_blocks_are_stretches_of_the_data_in_their_order():
    assert [part.tolist() for part in Blocks().divide(3, some(8), 5)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]
    for part in Blocks(2).divide(4, some(80), 5):
        # Two stretches of ten, which may lie side by side.
        assert int((part.diff() != 1).sum()) <= 1
        assert len(part) == 20
    with pytest.raises(ValueError, match="9 examples cannot be cut into 10 blocks"):
        Blocks(2).divide(5, some(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_feature_skew_sorts_by_the_first_principal_component(dtype):
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(600, 3, 4, generator=drawn)
    inputs[:, 1, 1] *= 9
    inputs = (inputs * 3 + 100).to(dtype)
    examples = Examples(inputs, torch.zeros(600))
    rows = inputs.reshape(600, -1).double()
    rows = rows - rows.mean(0)
    along = rows @ torch.linalg.svd(rows, full_matrices=False).Vh[0]

    def spread(skew):
        parts = FeatureSkew(skew).divide(6, examples)
        means = torch.stack([along[part].mean() for part in parts])
        return float(means.std() / along.std())

    sorted_parts = along.sort().values.view(6, 100).mean(1)
    assert spread(1.0) == pytest.approx(float(sorted_parts.std() / along.std()), rel=0.05)
    assert spread(0.0) < 0.25 < spread(0.5) < spread(1.0)


def test_feature_skew_has_the_same_bits_with_any_number_of_threads():
    examples = Examples(torch.rand(3000, 50), torch.zeros(3000))
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(scores(examples, "feature-skew"))
    torch.set_num_threads(before)
    assert torch.equal(*found)
    # Whole numbers, of which every sum is exact.
    assert torch.equal(found[0], found[0].round())


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ((torch.zeros(9), torch.zeros(9)), "not one tensor of real numbers"),
        (torch.full((9, 2), float("nan")), "some of these are not finite"),
    ],
)
def test_feature_skew_says_which_inputs_it_cannot_compare(inputs, complaint):
    with pytest.raises(ValueError, match=complaint):
        FeatureSkew().divide(3, Examples(inputs, torch.zeros(9)))


def test_feature_skew_of_equal_inputs_divides_them_all_the_same():
    sizes = FeatureSkew().divide(4, Examples(torch.ones(10, 3), torch.zeros(10))).sizes
    assert sorted(sizes.tolist()) == [2, 2, 3, 3]


def test_natural_clients_are_the_keys_in_sorted_order():
    keys = ["va", "cleveland", "va", "hungarian"]
    for clients in (None, 3):
        parts = NaturalKey().divide(clients, some(4, keys))
        assert [part.tolist() for part in parts] == [[1], [3], [0, 2]]
    assert [part.tolist() for part in NaturalKey().divide(1, some(4, keys))] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("partition", "clients", "examples", "complaint"),
    [
        (NaturalKey(), 2, some(3, ["a", "b", "c"]), r"3 natural clients \(a, b, c\), not 2"),
        (NaturalKey(), None, some(3), "needs a key for each example"),
        (LabelShards(2), 2, labelled(torch.zeros(3).long()), "3 examples cannot be cut into 4"),
        (LabelShards(2), 2, some(9), "needs one class label per example"),
        (Dirichlet(), 2, labelled(torch.zeros(9, 2).long()), "needs one class label per example"),
        (Dirichlet(0.5, 5), 2, labelled(torch.zeros(9).long()), "2 clients cannot have 5 of 9"),
        (IID(), 4, some(3), "4 clients cannot share 3 examples"),
        (IID(), 0, some(3), "at least 1, not 0"),
        (IID(), None, some(3), "give the number of clients"),
    ],
)
def test_what_cannot_be_divided_is_refused(partition, clients, examples, complaint):
    with pytest.raises(ValueError, match=complaint):
        partition.divide(clients, examples)


def test_a_description_counts_examples_and_labels():
    labels = torch.tensor([0, 0, 1, 2])
    parts = [torch.tensor([0, 2]), torch.tensor([1, 3])]
    description = describe(LabelShards(2), parts, labels, ["cat", "dog", "owl", "elk"])
    assert description.as_dict() == {
        "description": "label shards, 2 a client",
        "counts": [2, 2],
        "label_histograms": [[1, 1, 0, 0], [1, 0, 1, 0]],
    }
    assert str(description).splitlines() == [
        "label shards, 2 a client: 2 clients, 2 to 2 examples each",
        "client  examples  cat  dog  owl  elk",
        "     0         2    1    1    0    0",
        "     1         2    1    0    1    0",
    ]


def test_a_description_without_labels_has_no_histograms():
    description = describe(IID(), IID().divide(30, some(60)), None)
    assert description.as_dict()["label_histograms"] is None
    assert str(description).endswith("... and 10 clients more")

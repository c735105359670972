"""A loss that is not finite names the columns of the data that make it so."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.data.bad_values import bad_values
from dure.data.examples import Examples
from dure.errors import LossNotFiniteError

AGE = "inputs: column 2 (age) is nan in 2 of 20 examples, first in example 7"


def spoiled() -> dure.Task:
    inputs = torch.randn(20, 4)
    inputs[7, 2] = inputs[9, 2] = float("nan")
    labels = torch.arange(20) % 2
    return dure.Task(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
        F.cross_entropy,
        (inputs, labels),
        None,
        features=("sex", "height", "age", "weight"),
    )


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(4), dure.Processes(1)),
        (dure.DataParallel(4), dure.Threads(2)),
        (dure.SplitLearning(clients=2, batch_size=4), dure.Simulated()),
        (dure.VerticalSplit(parties=2, batch_size=4), dure.Simulated()),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_run_that_ends_for_nan_names_the_column(strategy: dure.Strategy, world: Any) -> None:
    with pytest.raises(LossNotFiniteError) as caught:
        dure.train(spoiled(), strategy, world, dure.Stop(epochs=1))
    assert str(caught.value).endswith(f"the training data contain invalid values ({AGE})")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_clients_that_are_refused_for_nan_name_the_column() -> None:
    with pytest.warns(UserWarning, match="invalid values") as caught:
        dure.train(spoiled(), dure.FedAvg(clients=2), stop=dure.Stop(rounds=1))
    assert f"the training data contain invalid values: {AGE}" in [
        str(one.message) for one in caught
    ]


def test_what_lies_elsewhere_than_in_a_table_is_named_too() -> None:
    images = torch.zeros(3, 1, 2, 2)
    images[1, 0, 1, 1] = float("-inf")
    assert bad_values(Examples(images, torch.arange(3))) == "inputs: a number is -inf in example 1"
    ages = {"x": torch.zeros(3, 2), "ages": torch.tensor([[1.0], [float("nan")], [3.0]])}
    found = bad_values(Examples(ages, torch.arange(3)))
    assert found == "inputs['ages']: column 0 is nan in example 1"
    targets = torch.tensor([1.0, float("inf"), 2.0])
    found = bad_values(Examples(torch.zeros(3, 2), targets))
    assert found == "targets: a number is inf in example 1"
    assert bad_values(Examples(torch.zeros(3, 2), torch.arange(3))) is None


def test_the_columns_of_a_frame_have_their_names() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [1.0, None], "height": [1.0, 2.0]})
    assert (
        bad_values(Examples(frame, torch.arange(2))) == "inputs: column 0 (age) is nan in example 1"
    )

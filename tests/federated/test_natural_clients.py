"""The number of clients that is left out follows from the partition."""

from __future__ import annotations

import pytest

import dure
from dure.data.partition import Partition
from small import small_task

SYSTEMS = [dure.FedAvg, dure.FedBuff, dure.Scaffold, dure.SplitLearning, dure.SplitFed]


@pytest.mark.parametrize("system", SYSTEMS)
def test_it_is_one_a_key(system: type) -> None:
    # The small task has three owners.
    strategy = system(partition="natural-key").planned(small_task(), dure.Stop(rounds=1))
    assert len(strategy.division(small_task(), 0).counts) == 3


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("partition", [None, "iid", "dirichlet:1"])
def test_it_is_ten_elsewhere(system: type, partition: Partition | None) -> None:
    given = {} if partition is None else {"partition": partition}
    assert system(**given).clients == 10


@pytest.mark.parametrize("system", SYSTEMS)
def test_one_that_is_given_has_to_be_that_of_the_keys(system: type) -> None:
    with pytest.raises(ValueError, match=r"3 natural clients .*, not 10: give clients=None"):
        dure.train(small_task(), system(clients=10, partition="natural-key"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_without_keys_the_partition_says_what_to_give(system: type) -> None:
    task = small_task()
    bare = small_task(train=(task.train.inputs, task.train.targets))
    with pytest.raises(ValueError, match=r"needs a key for each example, .* keys="):
        dure.train(bare, system(partition="natural-key"))

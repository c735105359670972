"""Convert a `torch.utils.data.DataLoader`: its data, and its sampling.

    dataset, collate_fn            used
    shuffle=True                   an order drawn under the run's seed
    shuffle=False                  in training, the order of the data
    SubsetRandomSampler            those examples alone, in an order drawn under the seed
    WeightedRandomSampler          draws by weight, under the seed (`dure.data.sampling`)
    drop_last                      used
    batch_size                     must equal the strategy's, which is checked before a run
    other samplers, batch_sampler  refused: the strategy decides which rank trains on which example
    workers, pinned memory         ignored: dure has its own prefetching (`--loaders`)

A loader of test data is read whole, in the order of its data: only its set of examples counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from dure.data.sampling import Sampling
from dure.data.streams import StreamExamples
from dure.data.validation_split import subset_of


def examples_of(loader: DataLoader[Any], measures: bool = False) -> Examples:
    """Return the examples of a loader. measures: test data, whose order does not matter.

    Raises ValueError for an option of the loader that dure does not support.
    """
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    if loader.worker_init_fn is not None:
        raise ValueError(
            "a DataLoader with worker_init_fn: leave it out, dure prefetches batches itself"
        )
    if isinstance(loader.dataset, IterableDataset):
        examples: Examples = StreamExamples(loader.dataset, collate=collate)
        sampling = Sampling(drop_last=loader.drop_last, batch_size=loader.batch_size)
    else:
        some, sampling = _sampled(loader)
        examples = _examples(loader.dataset, collate)
        if some is not None:
            examples = subset_of(examples, some)
    if not measures:
        examples.sampling = sampling
    elif sampling.weights is not None:
        raise ValueError(
            "a WeightedRandomSampler draws at random, but each test example is measured once"
        )
    return examples


def _examples(dataset: Any, collate: Any) -> Examples:
    if collate is None and isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return Examples(*dataset.tensors)
    return DatasetExamples(dataset, collate=collate)


def _sampled(loader: DataLoader[Any]) -> tuple[Tensor | None, Sampling]:
    """Return (indices of the sampled examples, None for all; their sampling)."""
    # torch makes a batch sampler if batch_size is given, and none if it is None.
    if loader.batch_size is None:
        raise ValueError(
            "a DataLoader with batch_sampler, or with batch_size=None: the strategy decides "
            "which examples are in a batch; give batch_size, and a sampler"
        )
    said = Sampling(drop_last=loader.drop_last, batch_size=loader.batch_size)
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError("a DataLoader whose batch_sampler was replaced: give batch_size instead")
    sampler = loader.sampler
    dataset: Any = loader.dataset
    if type(sampler) is SequentialSampler:
        return None, replace(said, in_a_row=True)
    if type(sampler) is RandomSampler and not sampler.replacement:
        _check_count(sampler.num_samples, len(dataset), "RandomSampler")
        return None, said
    if type(sampler) is SubsetRandomSampler:
        return torch.as_tensor(sampler.indices, dtype=torch.int64), said
    if type(sampler) is WeightedRandomSampler and sampler.replacement:
        weights = torch.as_tensor(sampler.weights, dtype=torch.float64)
        _check_count(len(weights), len(dataset), "WeightedRandomSampler")
        _check_count(sampler.num_samples, len(dataset), "WeightedRandomSampler")
        if not bool((weights >= 0).all()) or not 0 < float(weights.sum()) < float("inf"):
            raise ValueError("weights of a WeightedRandomSampler are 0 or more, and not all 0")
        return None, replace(said, weights=weights)
    raise ValueError(
        f"a DataLoader with a {type(sampler).__name__}: dure supports shuffle=True, a "
        "SubsetRandomSampler, or a WeightedRandomSampler with replacement, because the order is "
        "a function of the run's seed"
    )


def _check_count(count: int, examples: int, name: str) -> None:
    if count != examples:
        raise ValueError(
            f"a {name} of {count} for {examples} examples: an epoch has one draw per example"
        )

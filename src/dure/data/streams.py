"""Examples of an iterable dataset, divided over ranks.

The stream's own order is the order of every epoch, so that an example's index is its position, and
a joint batch is the next examples. Each rank reads the stream from its start, keeps the examples of
its own part of each batch, and skips the others: every example occurs exactly once an epoch,
whatever the number of ranks, and one worker follows the same path as many. A resumed run skips the
examples that were trained on.

Cost: every rank reads all of the stream. If that is too much, give each rank a stream of its own:
`Task(train=function of (rank, world))`.

The stream has to give the same examples in the same order each time it is begun. Their number has
to be known, since an epoch has an end: `len()` of the dataset, or `length`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from dure.data.datasets import Collate, DatasetExamples
from dure.data.sampling import Sampling
from dure.errors import DataError, ExampleError, described


class StreamExamples(DatasetExamples):
    """Examples of an iterable dataset, of pairs or dicts.

    Args:
        dataset: the iterable dataset.
        length: examples of an epoch, from the start of the stream; None takes the dataset's length.
        collate: as in `DatasetExamples`.

    Raises ValueError if the number of examples is unknown.
    """

    def __init__(
        self, dataset: Any, length: int | None = None, collate: Collate | None = None
    ) -> None:
        if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__iter__"):
            raise ValueError(f"a {type(dataset).__name__} is not a stream: it has no __iter__")
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(
                f"length is {length!r}, but it has to be a number of examples, 1 or more"
            )
        self.dataset = dataset
        self.collate = collate
        self.keeps_labels = False
        self.draws = False
        self.keys = None
        self.classes = None
        self.sampling = Sampling()
        self._dtype = None
        self._length = _length_of(dataset) if length is None else length
        self._here = _Here()

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        # An iterator that was begun here cannot continue in another process.
        return {**self.__dict__, "_here": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _here=_Here())

    def order(self, part: Tensor | None = None) -> Any:
        """Return the stream's order. Raises ValueError for a part, which needs access by index."""
        if part is not None:
            raise ValueError(
                "an iterable dataset can only be read from its start, and cannot be divided "
                "among clients or replicas: give a map-style dataset"
            )
        return Sampling(in_a_row=True).order(len(self))

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        # Read forward, returned in the requested order.
        found = {place: self._at(place) for place in sorted(set(indices.tolist()))}
        places = indices.tolist()
        return self._batch_of(places, [found[place] for place in places])

    def _at(self, place: int) -> Any:
        """Return the example at a position; restart the stream if the position has passed."""
        here = self._here
        if here.stream is None or place < here.next - 1:
            here.begin(self._begun())
        while here.next <= place:
            here.item = self._next(here.stream, here.next)
            here.next += 1
        return here.item

    def _begun(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise DataError(
                "an iterable dataset is read in the training process: leave loaders out"
            )
        return iter(self.dataset)

    def _next(self, stream: Iterator[Any] | None, place: int) -> Any:
        assert stream is not None
        try:
            return next(stream)
        except StopIteration:
            raise DataError(
                f"the stream ended after {place} examples, but its length was given as {len(self)}"
            ) from None
        except Exception as error:
            raise ExampleError(
                f"the dataset cannot give example {place}: {described(error)}"
            ) from error

    def labels(self) -> Tensor | None:
        return None


class _Here(threading.local):
    """Position of this thread in the stream. Workers that are threads read for themselves."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, stream: Iterator[Any] | None) -> None:
        self.stream = stream
        self.next = 0
        self.item: Any = None


def _length_of(dataset: Any) -> int:
    """Return the dataset's length. Raises ValueError if it has none."""
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise ValueError(
            f"a {type(dataset).__name__} has no length: give dure.StreamExamples(dataset, "
            "length=...), where sum(1 for _ in dataset) counts the examples"
        ) from None
    if not length:
        raise ValueError("there are no examples: the dataset has length 0")
    return int(length)

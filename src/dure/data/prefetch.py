"""Prefetching of batches: while a model computes on a batch, loaders read the next.

The kind of loader depends on the kind of reading. Tensors are indexed by threads, since indexing
releases Python's interpreter lock. A dataset whose transforms are Python code is read by processes
of torch's `DataLoader`: they compute in parallel, and transforms that draw random numbers draw from
generators of their own. These are seeded for every batch as in this process, and their states come
back with the batch, so that the model continues from the generators after the transforms:
prefetching changes no bit.

For a GPU a batch is copied into pinned memory, and to the GPU during the computation.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dure.data.examples import Examples
from dure.errors import WorkerFailedError, described, traceback_of
from dure.machine.devices import is_cpu, to_device
from dure.machine.global_settings import with_current_settings
from dure.machine.threads import set_own_threads
from dure.randomness.seeds import generators_state, restore_generators

AHEAD = 2
"""Batches that each loader has ready or in progress."""

Indices = Callable[[int], Tensor]
"""Function from a step to the indices of its batch, of the step alone."""


class LoadedBatch(NamedTuple):
    """A batch, the number of its loader, and the time of reading.

    start, end: seconds of `time.perf_counter`, which processes share.
    """

    batch: tuple[Any, Any]
    loader: int
    start: float
    end: float


class Prefetch(Protocol):
    """Reads batches before they are requested."""

    def at(self, step: int) -> LoadedBatch:
        """Return the batch of `step`, and start reading the batches of the following steps."""

    def close(self) -> None:
        """Stop the loaders."""


def prefetch(
    examples: Examples,
    indices: Indices,
    loaders: int,
    device: torch.device,
    seed: Callable[[int], None],
) -> Prefetch:
    """Return loaders of `examples`: processes if reading may draw random numbers, else threads.

    Args:
        examples: examples to read.
        indices: batch of each step.
        loaders: number of loaders.
        device: device of the batches.
        seed: seeds the global generators for a step, if reading draws.
    """
    if examples.draws:
        return ProcessLoaders(
            examples=examples, indices=indices, loaders=loaders, device=device, seed=seed
        )
    return ThreadLoaders(examples, indices, loaders, device)


class ThreadLoaders:
    """Loaders that are threads."""

    def __init__(
        self, examples: Examples, indices: Indices, loaders: int, device: torch.device
    ) -> None:
        self.examples = examples
        self.indices = indices
        self.device = device
        self.ahead = AHEAD * loaders
        self._pool = ThreadPoolExecutor(
            loaders, "dure loader", with_current_settings(set_own_threads), (1,)
        )
        # A pool starts a thread only if none is idle, and each thread sets its number of torch
        # threads when it starts, which also changes the default for new threads. Tasks that wait
        # for one another make all threads start now; then this thread restores its own number
        # (`set_own_threads`).
        mine = torch.get_num_threads()
        together = threading.Barrier(loaders)
        try:
            wait([self._pool.submit(together.wait) for _ in range(loaders)])
        except RuntimeError as error:  # those that wait for one another would wait forever
            torch.set_num_threads(mine)
            together.abort()
            self._pool.shutdown(cancel_futures=True)
            raise WorkerFailedError(
                "a loader", "the start", f"{loaders} loaders cannot be started ({error})"
            ) from error
        torch.set_num_threads(mine)  # and for threads that are yet to come
        self._free = list(range(loaders))
        self._coming: dict[int, Future[tuple[LoadedBatch, torch.Event | None]]] = {}

    def at(self, step: int) -> LoadedBatch:
        for coming in range(step, step + self.ahead + 1):
            if coming not in self._coming:
                # `indices` caches its epoch, so it is called here and not in a thread.
                self._coming[coming] = self._pool.submit(self._read, self.indices(coming))
        # After a jump forward, batches of the skipped steps are dropped.
        for past in [known for known in self._coming if known < step]:
            self._coming.pop(past).cancel()
        loaded, copied = self._coming.pop(step).result()
        if copied is not None:
            # The batch was copied on another stream. This stream waits for the copy, not the CPU;
            # and the allocator, which would reuse the memory as soon as the copying stream is done,
            # is told that this stream uses it.
            here = torch.accelerator.current_stream(self.device)
            here.wait_event(copied)
            for leaf in tree_leaves(loaded.batch):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(here)
        return loaded

    def _read(self, indices: Tensor) -> tuple[LoadedBatch, torch.Event | None]:
        # Threads of a pool have no numbers, so a thread takes a free number while it reads. pop and
        # append are atomic.
        loader = self._free.pop()
        start = time.perf_counter()
        try:
            batch = self.examples.batch(indices)
            copied = None
            if not is_cpu(self.device):
                # A stream of its own, so that the copy overlaps with the computation; only pinned
                # memory is copied asynchronously.
                with torch.Stream(self.device):
                    batch = to_device(_pinned(batch), self.device)
                    copied = torch.Event(self.device)
                    copied.record()
            return LoadedBatch(batch, loader, start, time.perf_counter()), copied
        finally:
            self._free.append(loader)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _pinned(batch: tuple[Any, Any]) -> Any:
    return tree_map(lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, batch)


class ProcessLoaders:
    """Loaders that are processes."""

    def __init__(
        self,
        examples: Examples,
        indices: Indices,
        loaders: int,
        device: torch.device,
        seed: Callable[[int], None],
    ) -> None:
        self.loaders = loaders
        self.device = device
        self.steps = _Steps(examples, indices, seed)
        self._next = -1
        self._stream: Iterator[Any] = iter(())

    def at(self, step: int) -> LoadedBatch:
        # After a jump, the processes that read for other steps are replaced.
        if step != self._next:
            self._stream = self._begin(step)
        self._next = step + 1
        answer = next(self._stream)
        # An error comes as a value: torch would wrap an exception of a loader in another with its
        # own text.
        if isinstance(answer, WorkerFailedError):
            raise answer
        batch, generators, loader, start, end = answer
        restore_generators(generators)
        return LoadedBatch(to_device(batch, self.device), loader, start, end)

    def _begin(self, step: int) -> Iterator[Any]:
        # Forked, so that datasets of a script need not be pickled; torch gives such a process a
        # single thread, since OpenMP's threads do not survive a fork.
        return iter(
            DataLoader(
                self.steps,
                # None: an item is a whole batch already, and is not collated; the sampler is
                # endless, as steps are requested one by one.
                batch_size=None,
                sampler=_From(step),
                num_workers=self.loaders,
                prefetch_factor=AHEAD,
                collate_fn=_as_it_is,
                worker_init_fn=_ignore_interrupts,
                multiprocessing_context="fork",
                pin_memory=not is_cpu(self.device),
            )
        )

    def close(self) -> None:
        self._stream = iter(())  # torch's iterator ends its processes when it is given up


class _From:
    """The steps from `first` on, endless."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first)


class _Steps(Dataset[Any]):
    """The batch of each step, with the generators' states after it, for a loader."""

    def __init__(self, examples: Examples, indices: Indices, seed: Callable[[int], None]) -> None:
        self.examples = examples
        self.indices = indices
        self.seed = seed

    def __getitem__(self, step: int) -> Any:
        # None if called in the parent, which is then the only loader.
        info = get_worker_info()
        loader = info.id if info is not None else 0
        start = time.perf_counter()
        try:
            self.seed(step)
            batch = self.examples.batch(self.indices(step))
        except (Exception, SystemExit) as error:
            return WorkerFailedError(
                f"loader {loader}", f"step {step + 1}", described(error), traceback_of(error)
            )
        return batch, generators_state(), loader, start, time.perf_counter()


def _as_it_is(item: Any) -> Any:
    return item


def _ignore_interrupts(loader: int) -> None:
    """Ignore Ctrl-C, which the training process handles; it ends the loaders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

"""How the conformance tests run: each test's body is played by every rank of a group of a backend.

The bodies of one file that a backend and a world size share are played in one start of the ranks,
on one group for each size, and on a new one after a body has failed. Three backends play: gloo,
which says that the tests are right where it can do what they ask, and dure's own with its C core
and with its core in torch.

A group of n ranks is made of the last n of the world: its ranks have other numbers than the
world's.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import cloudpickle
import pytest
import torch
import torch.distributed as dist

# which comparing tensors imports: here, so that the fork server does it for all ranks
import torch.distributed.tensor
from torch import Tensor

import dure
from dure.contracts.world import RankContext
from dure.errors import DureError

Backend = Literal["gloo", "c", "torch"]

DURE: tuple[Backend, ...] = ("c", "torch")
ALL: tuple[Backend, ...] = ("gloo", *DURE)
PATIENCE = 20.0
"""Seconds that a group waits for a peer where no test asks for less: nothing here takes a
second."""

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a rank need not import pytest


@dataclass(frozen=True)
class Case:
    """A body for a group of `size` ranks."""

    name: str
    body: Callable[[Ranks], None]
    size: int


@dataclass
class Ranks:
    """What a body sees: the group under test, and this process's place in it."""

    group: Any
    backend: Backend
    size: int
    rank: int
    _made: list[Any] = field(default_factory=list)

    @property
    def all(self) -> range:
        return range(self.size)

    def world_rank(self, rank: int) -> int:
        """The number in the world of the group's `rank`."""
        return dist.get_global_rank(self.group, rank)

    def new_group(self, ranks: Sequence[int], seconds: float = PATIENCE, **options: Any) -> Any:
        """A group beside the one under test; every rank of the world has to ask for it."""
        assert self.size == dist.get_world_size(), "the other ranks of the world do not play"
        group = make_group(list(ranks), self.backend, seconds, **options)
        self._made.append(group)
        return group

    def tell(self, what: str) -> None:
        """Lets those go on that `wait_for` it, past the backend under test."""
        dist.distributed_c10d._get_default_store().set(f"{what} in {self.group.group_name}", "")

    def wait_for(self, what: str) -> None:
        """Waits until another rank has told it."""
        dist.distributed_c10d._get_default_store().wait(
            [f"{what} in {self.group.group_name}"], timedelta(0, PATIENCE)
        )

    def told_by_all(self, value: Any) -> list[Any]:
        """Every rank's value, past the backend under test."""
        assert self.size == dist.get_world_size(), "the other ranks of the world do not play"
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value)
        return told


def on_ranks(
    *sizes: int, backends: Sequence[Backend] = ALL
) -> Callable[[Callable[[Ranks], None]], Any]:
    """Makes a body a test, for groups of these sizes and each of these backends.

    The C core plays with every size, the core in torch with every second, gloo with the largest:
    what is left out is a proof.
    """
    asked = sizes or (1, 2, 3, 4)
    played = {"c": asked, "torch": asked[1::2] or asked, "gloo": asked[-1:]}

    def decorate(body: Callable[[Ranks], None]) -> Any:
        @pytest.mark.parametrize(
            ("backend", "size"),
            [
                pytest.param(
                    backend, size, marks=() if size in played[backend] else pytest.mark.proof
                )
                for backend in backends
                for size in asked
            ],
        )
        def test(backend: Backend, size: int, request: pytest.FixtureRequest) -> None:
            need(backend)
            failures = _played(request, backend, size)[request.node.name]
            if failures:
                pytest.fail(
                    "\n".join(f"{who}: {text}" for who, text in failures.items()), pytrace=False
                )

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def need(backend: Backend) -> None:
    """Skips a test of a backend that is not there."""
    if backend == "gloo":
        return
    memory = pytest.importorskip("dure.collectives.shared_memory", exc_type=ImportError)
    if not hasattr(memory, "Options"):
        pytest.skip("the shared-memory backend is not there")
    if backend == "c" and not c_core_is_built():
        pytest.skip("the C core is not built here")


@functools.cache
def c_core_is_built() -> bool:
    """Whether a group with the C core can be made."""

    def program(context: RankContext) -> bool:
        dist.destroy_process_group(make_group([0, 1], "c", PATIENCE))
        return True

    try:
        return dure.Processes(2, PATIENCE).run(program, lambda event: None)
    except DureError as error:
        if "core" not in str(error):
            raise
        return False


def make_group(ranks: list[int], backend: Backend, seconds: float, **options: Any) -> Any:
    """A group of these ranks of the world."""
    limit = timedelta(seconds=seconds)
    if backend == "gloo":
        return dist.new_group(ranks, timeout=limit, backend="gloo", **options)
    from dure.collectives.shared_memory import Options

    return dist.new_group(
        ranks, timeout=limit, backend="dure", pg_options=Options(core=backend), **options
    )


def _played(
    request: pytest.FixtureRequest, backend: Backend, size: int
) -> dict[str, dict[str, str]]:
    """By the name of each test of this file that plays in the same start: who failed, and how."""
    store: dict[Any, dict[str, dict[str, str]]] = request.config.__dict__.setdefault(
        "_conformance", {}
    )
    world = max(4, size)
    key = (request.node.fspath, backend, world)
    if key not in store:
        cases = []
        for item in request.session.items:
            body = getattr(getattr(item, "obj", None), "body", None)
            if body is not None and item.fspath == request.node.fspath:
                given = item.callspec.params  # type: ignore[attr-defined]
                if given["backend"] == backend and max(4, given["size"]) == world:
                    cases.append(Case(item.name, body, given["size"]))
        cloudpickle.register_pickle_by_value(request.module)
        store[key] = play(cases, backend, world)
    return store[key]


def play(cases: list[Case], backend: Backend, world: int) -> dict[str, dict[str, str]]:
    """Plays the cases in as few starts as it takes: one, and one more for every case that ends its
    ranks."""
    outcomes: dict[str, dict[str, str]] = {}
    while left := [case for case in cases if case.name not in outcomes]:
        told: list[dict[str, Any]] = []
        ended = "the ranks ended"
        try:
            dure.Processes(world, 3 * PATIENCE).run(
                functools.partial(rehearse, left, backend), told.append
            )
        except DureError as error:
            ended = str(error)
        outcomes |= {
            event["name"]: event["failures"] for event in told if event["failures"] is not None
        }
        if left[-1].name not in outcomes:
            broken = told[-1]["name"] if told else left[0].name
            outcomes.setdefault(broken, {"the start": ended})
    return outcomes


def rehearse(cases: list[Case], backend: Backend, context: RankContext) -> None:
    """On a rank: plays one case after another, and rank 0 reports who failed."""
    world = dist.get_world_size()
    groups: dict[int, Any] = {}
    for number, case in enumerate(cases):
        event = {"unit": "case", "step": number, "name": case.name}
        if dist.get_rank() == 0:
            context.report(event | {"failures": None})
        failure, failures = None, [None] * world
        try:
            if case.size not in groups:
                groups[case.size] = make_group(list(range(world))[-case.size :], backend, PATIENCE)
            perform(case, backend, groups[case.size])
        except Exception:
            failure = shortened(traceback.format_exc())
            destroy(groups.pop(case.size, None))  # the others, who may wait, are told
        dist.all_gather_object(failures, failure)
        if any(failures):
            destroy(groups.pop(case.size, None))
        if dist.get_rank() == 0:
            context.report(event | {"failures": by_text(failures)})


def by_text(failures: list[str | None]) -> dict[str, str]:
    """What the ranks say, each text once."""
    said: dict[str, list[int]] = {}
    for rank, text in enumerate(failures):
        if text:
            said.setdefault(text, []).append(rank)
    return {
        f"rank {', '.join(map(str, ranks))}": text[-50_000 // len(said) :]
        for text, ranks in said.items()
    }


def perform(case: Case, backend: Backend, group: Any) -> None:
    """Plays the body if this rank is of the group."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    torch.manual_seed(0)
    ranks = Ranks(group, backend, dist.get_world_size(group), dist.get_rank(group))
    try:
        case.body(ranks)
    finally:
        for made in ranks._made:
            destroy(made)


def destroy(group: Any) -> None:
    if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)


def shortened(text: str) -> str:
    """A traceback without the frames of the harness, and of torch's decorators."""
    return re.sub(
        r'  File "[^"]*/(harness|c10d_logger|typing_extensions)\.py".*\n(    .*\n)*', "", text
    )[-6_000:]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What `rank` brings: the same wherever it is asked for."""
    return _drawn(rank, shape, dtype, seed).clone()


@functools.lru_cache(maxsize=32)
def _drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.complex(*(torch.randn(shape, generator=generator) for _ in range(2))).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(1, 20, shape, generator=generator).to(dtype)


def same(actual: Tensor, expected: Tensor, what: object = "") -> None:
    """Raises AssertionError unless both have the same shape, dtype and bits; a NaN is a NaN."""
    about = f"{what}: " if what else ""
    assert actual.dtype == expected.dtype, f"{about}{actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{about}{tuple(actual.shape)}, not {tuple(expected.shape)}"
    )
    different = (actual != expected) & ~((actual != actual) & (expected != expected))
    if bool(different.any()):
        where = tuple(int(i) for i in different.nonzero()[0])
        count = int(different.sum())
        raise AssertionError(
            f"{about}{count} of {actual.numel()} differ, first at {where}: {actual[where]}, not "
            f"{expected[where]}"
        )


def close(actual: Tensor, expected: Tensor, what: object = "") -> None:
    """As `same`, but rounding may differ."""
    torch.testing.assert_close(actual, expected, equal_nan=True, msg=lambda text: f"{what}: {text}")


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], match: str = ""
) -> Iterator[list[Any]]:
    """As pytest's, without pytest in the ranks. Yields a list that will hold the error."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        if not re.search(match, str(error)):
            raise AssertionError(f"{error!r} does not say {match!r}") from error
        caught.append(error)
    else:
        raise AssertionError(f"nothing was raised, not {kind}")

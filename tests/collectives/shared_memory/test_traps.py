"""What once went wrong, and must not again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_ranks import CORES, Core, groups, on_both_cores, on_every

from dure.collectives.shared_memory import SharedMemoryGroup
from dure.collectives.shared_memory.calls import SENSIBLE
from dure.errors import MismatchError, PeerLostError


def reduce_options(op: Any, asynchronous: bool = False) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, asynchronous
    return options


@on_both_cores
def test_a_sum_and_a_scattered_minimum_are_different_calls(core: Core) -> None:
    def call(group: SharedMemoryGroup) -> None:
        if group.rank() == 0:
            group.all_reduce(torch.ones(64))
        else:
            group.reduce_scatter_single(
                torch.ones(32), torch.ones(64), reduce_options(dist.ReduceOp.MIN)
            )

    with groups(2, core) as ranks:
        with pytest.raises(
            MismatchError,
            match=r"rank 0 called all_reduce\(sum, 64 float32\); rank 1 called reduce_s",
        ):
            on_every(ranks, call)
        on_every(ranks, lambda group: group.all_reduce(torch.ones(3)))


def test_no_two_operations_are_taken_for_each_other() -> None:
    ops = sorted({op for _, op in SENSIBLE})
    with groups(2, "c" if len(CORES) > 1 else "torch") as ranks:
        for one in ops:
            for other in ops:
                dtype = torch.int32 if max(one, other) < 7 else torch.float32
                if one == other or (dtype, one) not in SENSIBLE or (dtype, other) not in SENSIBLE:
                    continue
                wanted = {0: one, 1: other}
                with pytest.raises(MismatchError):
                    on_every(
                        ranks,
                        lambda g, w=wanted, d=dtype: g.all_reduce(
                            torch.ones(4, dtype=d), w[g.rank()]
                        ),
                    )


@on_both_cores
def test_what_hangs_on_a_future_may_wait_for_another_call(core: Core) -> None:
    def call(group: SharedMemoryGroup) -> float:
        def further(future: Any) -> float:
            total = future.value()[0]
            group.allreduce([total]).wait()
            return float(total[0])

        return group.allreduce([torch.ones(3)]).get_future().then(further).wait()

    with groups(2, core) as ranks:
        assert on_every(ranks, call) == [4.0, 4.0]


@on_both_cores
def test_complex_blocks_are_scattered_and_summed(core: Core) -> None:
    def call(group: SharedMemoryGroup) -> torch.Tensor:
        output = torch.empty(3, dtype=torch.complex64)
        source = torch.full((6,), 1 + 2j, dtype=torch.complex64)
        group.reduce_scatter_single(output, source, reduce_options(dist.ReduceOp.SUM))
        return output

    with groups(2, core) as ranks:
        assert all(bool((output == 2 + 4j).all()) for output in on_every(ranks, call))


@on_both_cores
def test_a_destroyed_group_says_so_to_every_call(core: Core) -> None:
    with groups(2, core) as ranks:
        kept = [group.all_reduce for group in ranks]
        for group in ranks:
            group.shutdown()
        options = dist.BarrierOptions()
        options.asyncOp = False
        for group, reduce in zip(ranks, kept, strict=True):
            calls = (
                lambda g=group: g.barrier(options),
                lambda g=group: g.barrier(),
                lambda r=reduce: r(torch.ones(2)),
            )
            for call in calls:
                with pytest.raises(RuntimeError, match="this process group was destroyed"):
                    call()
            with pytest.raises(PeerLostError, match="left the group"):
                group.send([torch.ones(1)], 0)


@on_both_cores
def test_destroying_a_group_ends_the_call_that_another_thread_is_in(core: Core) -> None:
    with groups(2, core) as ranks:
        work = ranks[0].allreduce([torch.ones(3)])  # the other rank does not come
        ranks[0].shutdown(timedelta(seconds=0.2))
        with pytest.raises(PeerLostError, match="rank 0 left the group with calls under way"):
            work.wait(timedelta(seconds=10))


@on_both_cores
def test_a_view_with_a_lazy_sign_is_refused(core: Core) -> None:
    negated = torch.ones(3, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    with groups(1, core) as (group,), pytest.raises(ValueError, match="resolve_neg"):
        group.all_reduce(negated)

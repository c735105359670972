"""A group as torch's own code uses it: the short forms of its calls, several tensors of a rank, its
backend only the CPU, what the profiler sees, sparse sums, and the types of its errors. gloo says
what is right."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import DURE, Ranks, on_ranks, raises, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dure.errors import MismatchError

SUM, MAX, AVG = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG


def own(ranks: Ranks, *shape: int) -> torch.Tensor:
    return torch.full(shape, ranks.rank + 1.0)


def total(ranks: Ranks) -> float:
    return ranks.size * (ranks.size + 1) / 2


@on_ranks(2, 3)
def test_a_single_tensor_is_a_call_whatever_its_dimensions(ranks: Ranks) -> None:
    group = ranks.group
    for shape in ((), (0,), (2, 3)):
        for reduce in (
            lambda x: group.allreduce(x),
            lambda x: group.allreduce(x, SUM),
            lambda x: group.allreduce([x], op=SUM),
            lambda x: group.allreduce(tensor=x, op=SUM, timeout=timedelta(seconds=20)),
        ):
            tensor = own(ranks, *shape)
            (result,) = reduce(tensor).get_future().wait()
            same(result, torch.full(shape, total(ranks)))
            same(tensor, result)


@on_ranks(2, 3)
def test_the_short_forms_mean_the_same_as_the_long_ones(ranks: Ranks) -> None:
    group, size, last = ranks.group, ranks.size, ranks.size - 1
    leads = ranks.rank == last
    x = own(ranks, 2)
    group.broadcast(x, last).wait()
    same(x, torch.full((2,), float(size)))
    x = own(ranks, 2)
    group.broadcast(tensor=x, root=0).wait()
    same(x, torch.ones(2))

    x = own(ranks, 2)
    group.reduce(x, last, MAX).wait()
    if leads:
        same(x, torch.full((2,), float(size)))

    everything = [torch.zeros(2) for _ in ranks.all]
    group.allgather(everything, own(ranks, 2)).wait()
    assert [float(t[0]) for t in everything] == [r + 1.0 for r in ranks.all]

    everything = [torch.zeros(2) for _ in ranks.all] if leads else []
    group.gather(everything, own(ranks, 2), last).wait()
    assert [float(t[0]) for t in everything] == ([r + 1.0 for r in ranks.all] if leads else [])

    given = [torch.full((2,), 10.0 + r) for r in ranks.all] if leads else []
    group.scatter(x, given, last).wait()
    same(x, torch.full((2,), 10.0 + ranks.rank))

    group.reduce_scatter(x, [own(ranks, 2) for _ in ranks.all], MAX).wait()
    same(x, torch.full((2,), float(size)))
    group.barrier(timeout=timedelta(seconds=20)).wait()


@on_ranks(2, 3)
def test_several_tensors_of_a_rank_count_as_those_of_several_ranks(ranks: Ranks) -> None:
    group, size = ranks.group, ranks.size
    pair = [own(ranks, 3), 10 * own(ranks, 3)]
    results = group.allreduce(pair).get_future().wait()
    for tensor in (*pair, *results):
        same(tensor, torch.full((3,), 11 * total(ranks)))
    if ranks.backend != "gloo":  # which has no average of several
        pair = [own(ranks, 3), 3 * own(ranks, 3)]
        group.allreduce(pair, AVG).wait()
        same(pair[0], torch.full((3,), 2 * total(ranks) / size))

    opts = dist.BroadcastOptions()
    opts.rootRank, opts.rootTensor = size - 1, 1
    pair = [own(ranks, 3), 10 * own(ranks, 3)]
    group.broadcast(pair, opts).wait()
    for tensor in pair:
        same(tensor, torch.full((3,), 10.0 * size))

    lists = [[torch.zeros(1) for _ in range(2 * size)] for _ in range(2)]
    group.allgather(lists, [own(ranks, 1), 10 * own(ranks, 1)]).wait()
    expected = [float(x) for rank in ranks.all for x in (rank + 1, 10 * (rank + 1))]
    assert [[float(t) for t in row] for row in lists] == [expected, expected]


@on_ranks(2)
def test_arguments_are_refused_before_anything_travels_and_as_gloo_does(ranks: Ranks) -> None:
    group, x = ranks.group, torch.ones(3)
    calls: list[Any] = [
        lambda: group.broadcast(x, 2),
        lambda: group.broadcast(x, -1),
        lambda: group.reduce(x, 5),
        lambda: group.gather([], x, 9),
        lambda: group.scatter(x, [], -2),
        lambda: group.allreduce([]),
        lambda: group.allreduce([x, torch.ones(2)]),
        lambda: group.allreduce([x, x.double()]),
        lambda: group.allgather([], [x]),
        lambda: group.allgather([[x]], [x]),
        lambda: group.reduce_scatter([x], [[x]]),
        lambda: group.allreduce_coalesced([]),
    ]
    for call in calls:
        with raises(RuntimeError):
            call()
        if ranks.backend != "gloo":
            with raises(ValueError):
                call()
    with raises(TypeError):
        group.allreduce(x, rank=3)
    dist.all_reduce(x, group=group)
    same(x, torch.full((3,), 2.0))


@on_ranks(2)
def test_a_wait_that_is_too_long_raises_a_runtime_error_and_the_call_goes_on(ranks: Ranks) -> None:
    x = torch.ones(4)
    if ranks.rank:
        ranks.wait_for("the other has waited")
        ranks.group.allreduce(x).wait()
        return
    work = ranks.group.allreduce(x)
    with raises(RuntimeError, "[Tt]imed out"):
        work.wait(timedelta(milliseconds=50))
    ranks.tell("the other has waited")
    if ranks.backend != "gloo":  # whose call ends with the wait
        work.wait()
        same(x, torch.full((4,), 2.0))


@on_ranks(2, backends=DURE)
def test_a_call_has_the_time_out_that_it_was_given(ranks: Ranks) -> None:
    if ranks.size < dist.get_world_size():
        return
    group = ranks.new_group(list(ranks.all))
    if ranks.rank == 0:
        with raises(RuntimeError, " timed out .* Timed out waiting 50ms"):
            group.allreduce(torch.ones(1), timeout=timedelta(milliseconds=50)).wait()
        ranks.tell("the other has waited")
    else:
        ranks.wait_for("the other has waited")


@on_ranks(2, backends=DURE)
def test_the_group_is_its_own_backend_for_the_cpu(ranks: Ranks) -> None:
    group = ranks.group
    assert group._device_types == [torch.device("cpu")]
    backend = group._get_backend(torch.device("cpu"))
    assert backend.name() == "dure"
    assert not backend.supports_tensor_alloc(torch.device("cpu"))
    with raises(RuntimeError, "only the CPU"):
        group._get_backend(torch.device("cuda"))
    before = backend.options._timeout
    backend._set_default_timeout(timedelta(seconds=7))
    assert backend.options._timeout == timedelta(seconds=7)
    backend._set_default_timeout(before)


@on_ranks(2, backends=("c",))  # where imports take seconds, once will do
def test_a_checkpoint_is_saved_beside_the_training(ranks: Ranks) -> None:
    from torch.distributed import checkpoint

    folder = [tempfile.mkdtemp() if ranks.rank == 0 else None]
    dist.broadcast_object_list(folder, group=ranks.group, group_src=0)
    saved = {"weights": torch.arange(3.0)}
    checkpoint.async_save(saved, checkpoint_id=folder[0], process_group=ranks.group).result()
    read = {"weights": torch.zeros(3)}
    checkpoint.load(read, checkpoint_id=folder[0], process_group=ranks.group)
    same(read["weights"], saved["weights"])


@on_ranks(2, 3)
def test_collectives_are_counted_alike_on_all_ranks(ranks: Ranks) -> None:
    group = ranks.group
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1), group=group)
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    dist.broadcast(torch.ones(1), group_src=0, group=group)
    work.wait()
    assert group._get_sequence_number_for_group() == before + 3


@on_ranks(2)
def test_monitored_barrier_is_met_through_torch_s_own_door(ranks: Ranks) -> None:
    dist.monitored_barrier(ranks.group, timedelta(seconds=20))
    dist.monitored_barrier(group=ranks.group, wait_all_ranks=True)


@on_ranks(2)
def test_the_profiler_sees_calls_and_what_they_do(ranks: Ranks) -> None:
    group, name = ranks.group, "gloo" if ranks.backend == "gloo" else "dure"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        dist.all_reduce(torch.ones(9), group=group)
        dist.all_reduce(torch.ones(9), group=group, async_op=True).wait()
        dist.all_gather_into_tensor(torch.ones(2 * ranks.size), torch.ones(2), group=group)
        if ranks.rank == 0:
            dist.send(torch.ones(5), group_dst=1, group=group)
        else:
            dist.recv(torch.ones(5), group_src=0, group=group)
    events = profiler.events()
    seen = [event.name for event in events]
    moved = "send" if ranks.rank == 0 else "recv"
    for event, times in {
        "c10d::allreduce_": 2,
        f"{name}:all_reduce": 2,
        "c10d::_allgather_base_": 1,
        f"{name}:all_gather": 1,
        "c10d::send" if ranks.rank == 0 else "c10d::recv_": 1,
        f"{name}:{moved}": 1,
    }.items():
        assert seen.count(event) == times, (event, seen)
    shapes = {event.name: event.input_shapes for event in events}
    assert shapes[f"{name}:all_reduce"] == [[9]]
    assert shapes[f"{name}:{moved}"] == [[5]]


def sparse(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rank r has row r, twice, and row 5; 6 rows of 2."""
    rows = torch.tensor([[rank, rank, 5]])
    return torch.sparse_coo_tensor(rows, torch.full((3, 2), rank + 1.0).to(dtype), (6, 2))


@on_ranks(2, 3)
def test_sparse_tensors_are_summed_where_any_rank_has_elements(ranks: Ranks) -> None:
    expected = sum(sparse(rank).to_dense() for rank in ranks.all)
    for reduce in (
        lambda x: dist.all_reduce(x, group=ranks.group),
        lambda x: dist.all_reduce(x, group=ranks.group, async_op=True).wait(),
    ):
        tensor = sparse(ranks.rank)
        reduce(tensor)
        same(tensor.to_dense(), torch.as_tensor(expected))
        tensor.coalesce().values().mul_(2)  # no tensor of inference mode is left in it
    pair = [sparse(ranks.rank), sparse(ranks.rank)]
    ranks.group.allreduce(pair).wait()
    for tensor in pair:
        same(tensor.to_dense(), 2 * torch.as_tensor(expected))


@on_ranks(2, backends=DURE)
def test_sparse_tensors_that_do_not_go_together_are_refused(ranks: Ranks) -> None:
    with raises(ValueError, "unsupported reduction operation"):
        dist.all_reduce(sparse(0), MAX, group=ranks.group)
    with raises(ValueError, "sparse"):
        ranks.group.allreduce([sparse(0), torch.ones(6, 2)])
    with raises(MismatchError, r"float32 of shape \[6, 2\].*float64 of shape \[6, 2\]"):
        dist.all_reduce(sparse(0, (torch.float32, torch.float64)[ranks.rank]), group=ranks.group)
    halves = torch.sparse_coo_tensor([[0]], torch.tensor([1 / 3]).half(), (2,))
    dist.all_reduce(halves, AVG, group=ranks.group)
    same(halves.to_dense(), torch.tensor([1 / 3, 0]).half())


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(x)).sum()  # type: ignore[no-any-return]


@on_ranks(2)
def test_sparse_embeddings_and_built_in_hooks_train_as_one_process_would(ranks: Ranks) -> None:
    inputs = torch.tensor([[0, 1, 1], [1, 2, 7]])
    for hook in (
        None,
        dist.BuiltinCommHookType.ALLREDUCE,
        dist.BuiltinCommHookType.FP16_COMPRESS,
    ):
        torch.manual_seed(3)
        alone, model = (nn.Linear(3, 2), nn.Linear(3, 2)) if hook else (Embedded(), Embedded())
        model.load_state_dict(alone.state_dict())
        parallel = DistributedDataParallel(model, process_group=ranks.group)
        if hook is not None:
            parallel._register_builtin_comm_hook(hook)
        log = parallel._get_ddp_logging_data()
        assert log["backend_name"] == "gloo" or log["gloo_num_threads"] == 2
        batch = inputs if hook is None else inputs.float()
        (sum(alone(row[None]).sum() for row in batch) / 2).backward()
        parallel(batch[ranks.rank][None]).sum().backward()
        for expected, got in zip(alone.parameters(), model.parameters(), strict=True):
            assert expected.grad is not None
            assert got.grad is not None
            torch.testing.assert_close(got.grad.to_dense(), expected.grad.to_dense())


@on_ranks(2, backends=("c",))  # where imports take seconds, once will do
def test_a_compiled_model_trains_data_parallel(ranks: Ranks) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    model.load_state_dict(alone.state_dict())
    parallel = DistributedDataParallel(model, process_group=ranks.group)
    compiled = torch.compile(parallel, backend="eager")
    x = torch.ones(2, 4)
    for _ in range(2):
        alone(x).sum().backward()
        compiled(x).sum().backward()
    for expected, got in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)

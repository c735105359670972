"""Collectives that move what ranks have: broadcast, scatter, gather, all_gather, all_to_all,
barrier."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import DURE, Ranks, on_ranks, raises, same, values

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def dtypes(ranks: Ranks) -> list[torch.dtype]:
    """Those that gloo can move too, if it plays."""
    unknown = (
        (torch.int16, torch.bool, torch.complex64, torch.complex128)
        if ranks.backend == "gloo"
        else ()
    )
    return [dtype for dtype in DTYPES if dtype not in unknown]


@on_ranks()
def test_broadcast_gives_all_what_the_root_has(ranks: Ranks) -> None:
    for root in ranks.all:
        for dtype in dtypes(ranks):
            tensor = values(ranks.rank, 5, 7, dtype=dtype)
            dist.broadcast(tensor, group=ranks.group, group_src=root)
            same(tensor, values(root, 5, 7, dtype=dtype), (root, dtype))


@on_ranks()
def test_broadcast_of_every_size(ranks: Ranks) -> None:
    for n in (0, 1, 3, 64, 1_025, 70_001, 2_500_000):
        tensor = values(ranks.rank, n, seed=n)
        dist.broadcast(tensor, group=ranks.group, group_src=ranks.size - 1)
        same(tensor, values(ranks.size - 1, n, seed=n), n)


@on_ranks(8)
def test_eight_ranks_broadcast_gather_and_exchange(ranks: Ranks) -> None:
    tensor = values(ranks.rank, 1_000)
    dist.broadcast(tensor, group=ranks.group, group_src=5)
    same(tensor, values(5, 1_000))
    gathered = torch.empty(8, 300)
    dist.all_gather_into_tensor(gathered, values(ranks.rank, 1, 300), group=ranks.group)
    same(gathered, torch.cat([values(r, 1, 300) for r in ranks.all]))
    exchanged = torch.empty(8, 10)
    dist.all_to_all_single(exchanged, values(ranks.rank, 8, 10), group=ranks.group)
    same(exchanged, torch.stack([values(r, 8, 10)[ranks.rank] for r in ranks.all]))


@on_ranks(1, 2, 3)
def test_scalars_move(ranks: Ranks) -> None:
    scalar = torch.tensor(float(ranks.rank + 1))
    dist.broadcast(scalar, group=ranks.group, group_src=ranks.size - 1)
    same(scalar, torch.tensor(float(ranks.size)))
    outputs = [torch.tensor(0.0) for _ in ranks.all]
    dist.all_gather(outputs, torch.tensor(float(ranks.rank)), group=ranks.group)
    for rank, output in enumerate(outputs):
        same(output, torch.tensor(float(rank)), rank)


@on_ranks(1, 2, 3, backends=DURE)
def test_broadcast_takes_and_fills_tensors_with_gaps(ranks: Ranks) -> None:
    whole = torch.full((6, 8), -1.0)
    whole[:, ::2] = values(ranks.rank, 6, 4)
    dist.broadcast(whole[:, ::2], group=ranks.group, group_src=0)
    same(whole[:, ::2], values(0, 6, 4))
    same(whole[:, 1::2], torch.full((6, 4), -1.0), "what lies between the columns")


@on_ranks(2, 3, backends=DURE)
def test_strides_may_differ_between_ranks(ranks: Ranks) -> None:
    tensor = values(ranks.rank, 4, 6)
    if ranks.rank == 1:
        tensor = tensor.t().contiguous().t()
    dist.broadcast(tensor, group=ranks.group, group_src=0)
    same(tensor, values(0, 4, 6))


@on_ranks()
def test_scatter_gives_every_rank_its_tensor_of_the_root(ranks: Ranks) -> None:
    for root in ranks.all:
        for dtype in dtypes(ranks):
            output = torch.zeros(3, 5, dtype=dtype)
            parts = [values(root, 3, 5, dtype=dtype, seed=r) for r in ranks.all]
            dist.scatter(
                output, parts if ranks.rank == root else None, group=ranks.group, group_src=root
            )
            same(output, parts[ranks.rank], (root, dtype))


@on_ranks()
def test_gather_gives_the_root_every_ranks_tensor(ranks: Ranks) -> None:
    for root in ranks.all:
        for dtype in dtypes(ranks):
            outputs = (
                [torch.zeros(3, 5, dtype=dtype) for _ in ranks.all] if ranks.rank == root else None
            )
            dist.gather(
                values(ranks.rank, 3, 5, dtype=dtype), outputs, group=ranks.group, group_dst=root
            )
            for rank, output in enumerate(outputs or []):
                same(output, values(rank, 3, 5, dtype=dtype), (root, rank, dtype))


@on_ranks(2, 3)
def test_gather_and_scatter_of_megabytes(ranks: Ranks) -> None:
    n = 1_000_003
    outputs = [torch.empty(n) for _ in ranks.all] if ranks.rank == 1 else None
    dist.gather(torch.full((n,), float(ranks.rank)), outputs, group=ranks.group, group_dst=1)
    for rank, output in enumerate(outputs or []):
        same(output, torch.full((n,), float(rank)), rank)
    output = torch.empty(n)
    parts = [torch.full((n,), float(r)) for r in ranks.all] if ranks.rank == 0 else None
    dist.scatter(output, parts, group=ranks.group, group_src=0)
    same(output, torch.full((n,), float(ranks.rank)))


@on_ranks(2, 3, backends=DURE)
def test_gather_and_scatter_with_gaps(ranks: Ranks) -> None:
    wide = [torch.zeros(5, 6) for _ in ranks.all]
    outputs = [tensor[:, ::2] for tensor in wide] if ranks.rank == 0 else None
    dist.gather(values(ranks.rank, 3, 5).t(), outputs, group=ranks.group, group_dst=0)
    for rank, output in enumerate(outputs or []):
        same(output, values(rank, 3, 5).t(), rank)
    received = torch.zeros(3, 10)[:, ::2]
    parts = [values(r, 5, 3).t() for r in ranks.all] if ranks.rank == 0 else None
    dist.scatter(received, parts, group=ranks.group, group_src=0)
    same(received, values(ranks.rank, 5, 3).t())


@on_ranks()
def test_all_gather_gives_all_every_ranks_tensor(ranks: Ranks) -> None:
    for dtype in dtypes(ranks):
        outputs = [torch.zeros(4, 3, dtype=dtype) for _ in ranks.all]
        dist.all_gather(outputs, values(ranks.rank, 4, 3, dtype=dtype), group=ranks.group)
        for rank, output in enumerate(outputs):
            same(output, values(rank, 4, 3, dtype=dtype), (rank, dtype))


@on_ranks(backends=DURE)
def test_all_gather_takes_tensors_of_different_sizes(ranks: Ranks) -> None:
    for scale in (1, 40_000):
        outputs = [torch.zeros(scale * r, 2) for r in ranks.all]
        dist.all_gather(outputs, values(ranks.rank, scale * ranks.rank, 2), group=ranks.group)
        for rank, output in enumerate(outputs):
            same(output, values(rank, scale * rank, 2), (scale, rank))


@on_ranks(1, 2, 3)
def test_all_gather_of_nothing(ranks: Ranks) -> None:
    outputs = [torch.zeros(0, 3) for _ in ranks.all]
    dist.all_gather(outputs, torch.zeros(0, 3), group=ranks.group)
    gathered = torch.zeros(0)
    dist.all_gather_into_tensor(gathered, torch.zeros(0), group=ranks.group)


@on_ranks(2, 3, backends=DURE)
def test_all_gather_takes_and_fills_tensors_with_gaps(ranks: Ranks) -> None:
    wide = [torch.zeros(5, 6) for _ in ranks.all]
    dist.all_gather(
        [tensor[:, 1::2] for tensor in wide], values(ranks.rank, 3, 5).t(), group=ranks.group
    )
    for rank, tensor in enumerate(wide):
        same(tensor[:, 1::2], values(rank, 3, 5).t(), rank)
        same(tensor[:, ::2], torch.zeros(5, 3), "between")


@on_ranks()
def test_all_gather_into_tensor_concatenates(ranks: Ranks) -> None:
    for dtype in dtypes(ranks):
        for rows in (1, 7, 4_000):
            output = torch.zeros(ranks.size * rows, 3, dtype=dtype)
            dist.all_gather_into_tensor(
                output, values(ranks.rank, rows, 3, dtype=dtype), group=ranks.group
            )
            same(
                output,
                torch.cat([values(r, rows, 3, dtype=dtype) for r in ranks.all]),
                (dtype, rows),
            )


@on_ranks(1, 2, 3, backends=DURE)
def test_all_gather_into_tensor_stacks(ranks: Ranks) -> None:
    output = torch.zeros(ranks.size, 4, 3)
    dist.all_gather_into_tensor(output, values(ranks.rank, 4, 3), group=ranks.group)
    same(output, torch.stack([values(r, 4, 3) for r in ranks.all]))


@on_ranks(2, 3)
def test_all_gather_into_the_tensor_that_holds_the_input(ranks: Ranks) -> None:
    for n in (10, 400_000):
        whole = torch.zeros(ranks.size * n)
        part = whole[ranks.rank * n : (ranks.rank + 1) * n]
        part.copy_(values(ranks.rank, n))
        dist.all_gather_into_tensor(whole, part, group=ranks.group)
        same(whole, torch.cat([values(r, n) for r in ranks.all]), n)


@on_ranks(2, 3)
def test_an_output_that_is_too_small_is_refused(ranks: Ranks) -> None:
    with raises((ValueError, RuntimeError)):
        dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(3), group=ranks.group)
    with raises((ValueError, RuntimeError)):
        dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3), group=ranks.group)
    with raises((ValueError, RuntimeError)):
        dist.all_gather([torch.zeros(3)], torch.zeros(3), group=ranks.group)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, torch.full((2,), float(ranks.size)), "the group works on")


@on_ranks()
def test_all_to_all_single_exchanges_equal_parts(ranks: Ranks) -> None:
    for dtype in dtypes(ranks):
        for rows in (1, 3, 2_000):
            brought = [values(r, ranks.size * rows, 2, dtype=dtype) for r in ranks.all]
            output = torch.zeros(ranks.size * rows, 2, dtype=dtype)
            dist.all_to_all_single(output, brought[ranks.rank].clone(), group=ranks.group)
            expected = torch.cat([part.chunk(ranks.size)[ranks.rank] for part in brought])
            same(output, expected, (dtype, rows))


def rows_from_to(sender: int, receiver: int) -> int:
    return (3 * sender + 5 * receiver) % 4


@on_ranks()
def test_all_to_all_single_exchanges_parts_of_different_sizes(ranks: Ranks) -> None:
    for scale in (1, 3_000):
        brought = [
            [values(s, scale * rows_from_to(s, r), 2, seed=r + 1) for r in ranks.all]
            for s in ranks.all
        ]  # by sender and receiver
        sent = [part.shape[0] for part in brought[ranks.rank]]
        received = [brought[s][ranks.rank].shape[0] for s in ranks.all]
        output = torch.zeros(sum(received), 2)
        dist.all_to_all_single(output, torch.cat(brought[ranks.rank]), received, sent, ranks.group)
        same(output, torch.cat([brought[s][ranks.rank] for s in ranks.all]), scale)


@on_ranks(2, 3)
def test_all_to_all_single_may_keep_all_for_oneself(ranks: Ranks) -> None:
    splits = [5 if r == ranks.rank else 0 for r in ranks.all]
    output = torch.zeros(5)
    dist.all_to_all_single(output, values(ranks.rank, 5), splits, splits, ranks.group)
    same(output, values(ranks.rank, 5))


@on_ranks(2, 3)
def test_splits_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    with raises((ValueError, RuntimeError)):
        dist.all_to_all_single(
            torch.zeros(4), torch.zeros(4), [1] * ranks.size, [9] * ranks.size, ranks.group
        )


@on_ranks(backends=DURE)
def test_all_to_all_exchanges_lists_of_different_sizes(ranks: Ranks) -> None:
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        brought = [
            [values(s, rows_from_to(s, r), 3, dtype=dtype, seed=r + 1) for r in ranks.all]
            for s in ranks.all
        ]
        outputs = [torch.zeros(rows_from_to(s, ranks.rank), 3, dtype=dtype) for s in ranks.all]
        dist.all_to_all(outputs, [part.clone() for part in brought[ranks.rank]], ranks.group)
        for sender, output in enumerate(outputs):
            same(output, brought[sender][ranks.rank], (dtype, sender))


@on_ranks(2, 3, backends=DURE)
def test_all_to_all_takes_and_fills_tensors_with_gaps(ranks: Ranks) -> None:
    wide = [torch.zeros(4, 6) for _ in ranks.all]
    inputs = [values(ranks.rank, 3, 4, seed=r + 1).t() for r in ranks.all]
    dist.all_to_all([tensor[:, ::2] for tensor in wide], inputs, ranks.group)
    for sender, tensor in enumerate(wide):
        same(tensor[:, ::2], values(sender, 3, 4, seed=ranks.rank + 1).t(), sender)
        same(tensor[:, 1::2], torch.zeros(4, 3), "between")


@on_ranks(2, 3)
def test_what_is_brought_stays_as_it_was(ranks: Ranks) -> None:
    brought = values(ranks.rank, ranks.size * 30)
    dist.all_gather_into_tensor(
        torch.zeros(ranks.size * ranks.size * 30), brought, group=ranks.group
    )
    dist.all_to_all_single(torch.zeros(ranks.size * 30), brought, group=ranks.group)
    same(brought, values(ranks.rank, ranks.size * 30))


@on_ranks(2, 3)
def test_what_arrived_stays_when_the_next_call_is_made(ranks: Ranks) -> None:
    first, second = torch.zeros(ranks.size * 50), torch.zeros(ranks.size * 50)
    dist.all_gather_into_tensor(first, values(ranks.rank, 50), group=ranks.group)
    kept = first.clone()
    for seed in range(1, 20):
        dist.all_gather_into_tensor(second, values(ranks.rank, 50, seed=seed), group=ranks.group)
    same(first, kept)


@on_ranks(2, 3)
def test_what_was_sent_may_be_changed_at_once(ranks: Ranks) -> None:
    for round_ in range(100):
        mine = torch.full((1_000,), float(round_ * 10 + ranks.rank))
        output = torch.zeros(ranks.size, 1_000)
        dist.all_gather(list(output.unbind()), mine, group=ranks.group)
        mine.fill_(-1.0)
        expected = torch.tensor([float(round_ * 10 + r) for r in ranks.all])
        same(output, expected[:, None].expand(-1, 1_000), round_)


@on_ranks(2, 3, 4, 8)
def test_nobody_passes_a_barrier_before_all_have_come(ranks: Ranks) -> None:
    store = dist.distributed_c10d._get_default_store()
    key = f"barrier of {ranks.backend} {ranks.size}"
    for number in range(5):
        store.add(f"{key} {number}", 1)
        dist.barrier(ranks.group)
        assert store.add(f"{key} {number}", 0) == ranks.size
    for _ in range(100):
        dist.barrier(ranks.group)


@on_ranks(2, 3, backends=DURE)
def test_one_element_with_any_stride(ranks: Ranks) -> None:
    """To torch it is contiguous, whatever its stride."""

    def one(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, 2, dtype=dtype)[..., 1].fill_(value)

    for dtype in (torch.float32, torch.int16, torch.bfloat16, torch.bool, torch.int64):
        total = one(ranks.rank, dtype)
        dist.all_reduce(total, dist.ReduceOp.MAX, ranks.group)
        same(total, torch.full((1,), ranks.size - 1, dtype=dtype), dtype)
        tensor = one(ranks.rank, dtype)
        dist.broadcast(tensor, group=ranks.group, group_src=1)
        same(tensor, torch.ones(1, dtype=dtype), dtype)
        outputs = [one(0, dtype) for _ in ranks.all]
        dist.all_gather(outputs, one(ranks.rank, dtype), group=ranks.group)
        same(torch.cat(outputs), torch.arange(ranks.size).to(dtype), dtype)
        collected = [one(0, dtype) for _ in ranks.all] if ranks.rank == 0 else None
        dist.gather(one(ranks.rank, dtype), collected, group=ranks.group, group_dst=0)
        if collected:
            same(torch.cat(collected), torch.arange(ranks.size).to(dtype), dtype)
        exchanged = [one(0, dtype) for _ in ranks.all]
        dist.all_to_all(exchanged, [one(ranks.rank, dtype) for _ in ranks.all], ranks.group)
        same(torch.cat(exchanged), torch.arange(ranks.size).to(dtype), dtype)
        part = one(0, dtype)
        dist.reduce_scatter(
            part, [one(1, dtype) for _ in ranks.all], dist.ReduceOp.MIN, ranks.group
        )
        same(part, torch.ones(1, dtype=dtype), dtype)


@on_ranks(2, 3, backends=DURE)
def test_nothing_with_any_stride(ranks: Ranks) -> None:
    def nothing() -> torch.Tensor:
        return torch.empty(0, 2, dtype=torch.float64)[..., 1]

    dist.all_reduce(nothing(), group=ranks.group)
    dist.broadcast(nothing(), group=ranks.group, group_src=1)
    dist.all_gather([nothing() for _ in ranks.all], nothing(), group=ranks.group)
    parts = [nothing() for _ in ranks.all] if ranks.rank == 0 else None
    dist.gather(nothing(), parts, group=ranks.group, group_dst=0)
    dist.scatter(nothing(), parts, group=ranks.group, group_src=0)
    dist.all_to_all([nothing() for _ in ranks.all], [nothing() for _ in ranks.all], ranks.group)
    dist.reduce_scatter(nothing(), [nothing() for _ in ranks.all], group=ranks.group)


@on_ranks(2, 3, backends=DURE)
def test_an_expanded_tensor_is_brought(ranks: Ranks) -> None:
    outputs = [torch.zeros(4, 3) for _ in ranks.all]
    dist.all_gather(outputs, torch.tensor([float(ranks.rank)]).expand(4, 3), group=ranks.group)
    for rank, output in enumerate(outputs):
        same(output, torch.full((4, 3), float(rank)), rank)


@on_ranks(2, backends=DURE)
def test_a_lazy_conjugate_arrives_conjugated_or_is_refused(ranks: Ranks) -> None:
    tensor = torch.full((5,), 1 + 2j)
    outputs = [torch.zeros(5, dtype=torch.complex64) for _ in ranks.all]
    try:
        dist.all_gather(outputs, tensor.conj(), group=ranks.group)
    except (ValueError, RuntimeError):
        return
    for output in outputs:
        same(output, torch.full((5,), 1 - 2j))


@on_ranks(2, 3, backends=DURE)
def test_a_parameter_with_gaps_is_filled(ranks: Ranks) -> None:
    """Nobody takes gradients of what arrives."""
    parameter = torch.nn.Parameter(torch.full((4, 6), float(ranks.rank))[:, ::2])
    dist.broadcast(parameter, group=ranks.group, group_src=1)
    same(parameter.detach(), torch.ones(4, 3))
    dist.all_reduce(parameter, group=ranks.group)
    same(parameter.detach(), torch.full((4, 3), float(ranks.size)))
    dist.reduce(parameter, group=ranks.group, group_dst=0)


@on_ranks(2, 3, backends=DURE)
def test_parameters_are_filled_by_every_collective(ranks: Ranks) -> None:
    def parameter(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.full(shape, float(ranks.rank)))

    n = ranks.size
    for asynchronous in (False, True):
        calls = {
            "all_gather": lambda how: dist.all_gather(
                [parameter(6) for _ in ranks.all], parameter(6), **how
            ),
            "all_gather_into_tensor": lambda how: dist.all_gather_into_tensor(
                parameter(n * 6), parameter(6), **how
            ),
            "reduce_scatter_tensor": lambda how: dist.reduce_scatter_tensor(
                parameter(6), parameter(n * 6), **how
            ),
            "all_to_all_single": lambda how: dist.all_to_all_single(
                parameter(n), parameter(n), **how
            ),
            "reduce": lambda how: dist.reduce(parameter(6), group_dst=0, **how),
            "gather": lambda how: dist.gather(
                parameter(6),
                [parameter(6) for _ in ranks.all] if ranks.rank == 0 else None,
                group_dst=0,
                **how,
            ),
            "scatter": lambda how: dist.scatter(
                parameter(6),
                [parameter(6) for _ in ranks.all] if ranks.rank == 0 else None,
                group_src=0,
                **how,
            ),
        }
        for name, call in calls.items():
            try:
                work = call({"group": ranks.group, "async_op": asynchronous})
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise AssertionError(f"{name}, {asynchronous=}: {error}") from error

"""DistributedDataParallel in anybody's loop: the path of one process, whatever the loop does."""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import (
    CLASSES,
    FEATURES,
    Batch,
    batches,
    both,
    distance,
    network,
    on_ranks,
    part,
    train,
    vector,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dure
from dure.collectives import Group
from dure.collectives.all_reduce import ALGORITHMS
from dure.collectives.compression import PowerSGD, TopK
from dure.collectives.shared_memory.native import UNDER_WAY
from dure.contracts.world import RankContext
from dure.errors import PeerLostError
from dure.parallel import DistributedDataParallel

SIZES = (None, 1, 700)
WAYS = ("beside", "split-phase", "after")
TOLERANCE = 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_all_reduce_size_of_bucket_and_way_walks_the_path_of_one_process(ranks: int) -> None:
    combinations = list(itertools.product(ALGORITHMS, SIZES, WAYS))

    def program(context: RankContext) -> list[tuple[float, bytes]]:
        return [
            both(context, all_reduce=algorithm, bucket_bytes=size, overlap=way)
            for algorithm, size, way in combinations
        ]

    results = on_ranks(ranks, program)
    bits: dict[str, set[bytes]] = {}
    for number, combination in enumerate(combinations):
        assert all(rank[number][0] < TOLERANCE for rank in results), combination
        assert len({rank[number][1] for rank in results}) == 1, (
            f"replicas differ with {combination}"
        )
        bits.setdefault(combination[0], set()).add(results[0][number][1])
    independent = (
        {"master", "one_shot", "tree", "halving_doubling", "native"}
        if ranks > 2
        else set(ALGORITHMS)
    )
    for algorithm in independent:
        assert len(bits[algorithm]) == 1, f"with {algorithm} sizes of buckets must change no bit"


class Branches(nn.Module):
    """`some` is used by rank 0 only, `never` by none, `frozen` has no gradient, and `tied` shares
    its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always, self.some, self.never, self.frozen, self.tied = (
            nn.Linear(FEATURES, CLASSES).double() for _ in range(5)
        )
        self.frozen.requires_grad_(False)
        self.tied.weight = self.always.weight

    def forward(self, inputs: Tensor, more: bool) -> Tensor:
        outputs: Tensor = self.always(inputs) + self.frozen(inputs) + self.tied(inputs)
        return outputs + self.some(inputs) if more else outputs


def test_unused_parameters_need_no_flag_and_keep_no_gradient() -> None:
    def program(context: RankContext) -> Any:
        model = DistributedDataParallel(Branches(), context.group)
        alone = Branches()
        found = []
        for step, batch in enumerate(batches(4, 12)):
            alone.zero_grad()
            for rank, (inputs, targets) in enumerate(
                zip(*(each.chunk(3) for each in batch), strict=True)
            ):
                (F.cross_entropy(alone(inputs, rank == 0 and step != 2), targets) / 3).backward()
            model.zero_grad()
            inputs, targets = part(batch, context)
            F.cross_entropy(
                model(inputs, context.group.rank == 0 and step != 2), targets
            ).backward()
            for (name, own), other in zip(
                model.module.named_parameters(), alone.parameters(), strict=True
            ):
                if own.grad is None or other.grad is None:
                    assert own.grad is other.grad, f"{name} in step {step}"
                else:
                    found.append(float((own.grad - other.grad).abs().max()))
        return max(found), model.module.some.weight.grad is not None

    for worst, used in on_ranks(3, program):
        assert worst < TOLERANCE
        assert used


def test_parameters_that_must_be_used_are_named_if_they_are_not() -> None:
    def program(context: RankContext) -> str:
        model = DistributedDataParallel(Branches(), context.group, find_unused_parameters=False)
        inputs, _ = part(batches(1, 4)[0], context)
        with pytest.raises(RuntimeError) as caught:
            model(inputs, context.group.rank == 0).sum().backward()
        return str(caught.value)

    first, second = on_ranks(2, program)
    assert first.startswith("rank 0 did not use never.weight, never.bias in this step")
    assert second.startswith(
        "rank 1 did not use some.weight, some.bias, never.weight, never.bias in this step"
    )


def test_gradients_are_accumulated_without_messages_and_summed_once() -> None:
    def program(context: RankContext) -> Any:
        joint = batches(6, 8)
        alone, model = network(), DistributedDataParallel(network(), context.group)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
        sent = []
        for first in range(0, 6, 3):
            for keep in (True, False):  # gradients that are kept from step to step, and new ones
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=not keep)
                for number in range(first, first + 3):
                    (F.cross_entropy(alone(joint[number][0]), joint[number][1])).backward()
                    before = context.group.meter.counters.messages_sent
                    inputs, targets = part(joint[number], context)
                    if number < first + 2:
                        with model.no_sync():
                            F.cross_entropy(model(inputs), targets).backward()
                    else:
                        F.cross_entropy(model(inputs), targets).backward()
                    sent.append(context.group.meter.counters.messages_sent - before)
                for optimizer in optimizers:
                    optimizer.step()
        return distance(model.module, alone), sent

    for apart, sent in on_ranks(2, program):
        assert apart < TOLERANCE
        assert sent == [0, 0, 1] * 4


def test_two_forwards_one_backward_and_two_backwards_of_one_forward_are_summed_too() -> None:
    def twice(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]) + model(batch[0].flip(1)), batch[1])

    def again(model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(batch[0])
        F.cross_entropy(outputs, batch[1]).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return outputs.square().mean()

    def by_parts(model: nn.Module, batch: Batch) -> Tensor:
        layers = getattr(model, "module", model)
        return F.cross_entropy(layers[2:](layers[:2](batch[0])), batch[1])

    def penalty(model: nn.Module, batch: Batch) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(model(inputs), batch[1])
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + (slope * batch[0].shape[0]).square().sum(1).mean()

    def program(context: RankContext) -> list[float]:
        return [
            both(context, loss=loss, bucket_bytes=1)[0]
            for loss in (twice, again, by_parts, penalty)
        ]

    for worst in on_ranks(2, program):
        assert max(worst) < TOLERANCE


def test_gradients_of_gradients_are_refused() -> None:
    def program(context: RankContext) -> str:
        model = DistributedDataParallel(network(), context.group)
        with pytest.raises(RuntimeError) as caught:
            model(batches(1, 4)[0][0]).sum().backward(create_graph=True)
        return str(caught.value)

    assert "create_graph" in on_ranks(2, program)[0]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = network(), reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        for layer in self.layers:  # type: ignore[attr-defined]
            inputs = checkpoint(layer, inputs, use_reentrant=self.reentrant)
        return inputs


class Repeated(nn.Module):
    """One layer, in two checkpoints that run backward inside backward: its gradient is accumulated
    twice a pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.out = (
            nn.Linear(FEATURES, FEATURES).double(),
            nn.Linear(FEATURES, CLASSES).double(),
        )
        self.times = 2

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        for _ in range(self.times):
            inputs = checkpoint(self.layer, inputs, use_reentrant=True)
        result: Tensor = self.out(inputs)
        return result


def test_checkpointed_layers_are_like_others() -> None:
    def program(context: RankContext) -> Any:
        makers = [lambda: Checkpointed(False), lambda: Checkpointed(True), Repeated]
        found = [
            both(context, make, bucket_bytes=1, overlap=way)[0] for make in makers for way in WAYS
        ]
        model = DistributedDataParallel(Repeated(), context.group, bucket_bytes=1, overlap="beside")
        train(model, [part(batch, context) for batch in batches(2, 4)])
        model.module.times = 3
        with pytest.raises(
            RuntimeError, match="accumulated 3 times in a backward pass, but 2 in the first"
        ):
            train(model, [part(batch, context) for batch in batches(1, 4)])
        return found

    for worst in on_ranks(2, program):
        assert max(worst) < TOLERANCE


def test_parameters_may_be_frozen_and_unfrozen_between_steps() -> None:
    def program(context: RankContext) -> float:
        alone = network()
        model = DistributedDataParallel(copy.deepcopy(alone), context.group, bucket_bytes=1)
        for trainable in (True, False, True):
            for each in (alone, model.module):
                each[0].requires_grad_(trainable)  # type: ignore[index]
            train(alone, batches(2, 4))
            train(model, [part(batch, context) for batch in batches(2, 4)])
        return distance(model.module, alone)

    assert max(on_ranks(2, program)) < TOLERANCE


class ManyKinds(nn.Module):
    """Float64, float32, bfloat16, a sparse embedding, and a convolution whose weights lie channels
    last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(9, FEATURES, sparse=True, dtype=torch.float64)
        self.convolution = nn.Conv2d(2, 4, 3, dtype=torch.float32).to(
            memory_format=torch.channels_last
        )
        self.rounded = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.out = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.words(inputs.abs().long().clamp(max=8)[:, 0])
        image = inputs.float()[:, :, None, None].expand(-1, 6, 3, 6).reshape(-1, 2, 9, 6)
        seen = self.rounded(self.convolution(image).mean((2, 3)).bfloat16()).double()
        result: Tensor = self.out(hidden + F.pad(seen, (0, 2)))
        return result


def test_parameters_of_several_dtypes_layouts_and_sparse_gradients_are_summed() -> None:
    def program(context: RankContext) -> Any:
        model = DistributedDataParallel(ManyKinds(), context.group, bucket_bytes=64)
        train(model, [part(batch, context) for batch in batches(3, 8)])
        alone = ManyKinds()
        train(alone, batches(3, 8))
        kept = [
            p.grad.stride() == p.stride() and p.grad.dtype == p.dtype for p in model.parameters()
        ]  # type: ignore[union-attr]
        exact = float((model.module.words.weight - alone.words.weight).abs().max())
        return (
            vector(model.module).numpy().tobytes(),
            all(kept),
            exact,
            distance(model.module, alone),
        )

    first, second = on_ranks(2, program)
    assert first[0] == second[0]
    assert first[1]
    assert first[3] < 0.02, "bfloat16 rounds"


def test_autocast_and_clipping_by_the_global_norm_work_as_on_one_process() -> None:
    def halved(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0].float()), batch[1])

    def program(context: RankContext) -> Any:
        clipped = both(context, clip=0.05, bucket_bytes=700)[0]
        rounded, bits = both(context, lambda: network().float(), loss=halved)
        return clipped, rounded, bits

    (clipped, rounded, bits), other = on_ranks(2, program)
    assert clipped < TOLERANCE
    assert rounded < 0.01
    assert bits == other[2]


@pytest.mark.parametrize("backend", ["dure", "gloo"])
def test_long_gradients_are_summed_where_they_are_or_where_they_were_computed(backend: Any) -> None:
    width = 180_000

    def program(context: RankContext) -> Any:
        def wide() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES)
            ).double()

        found = [both(context, wide, overlap=way)[0] for way in WAYS]
        model = DistributedDataParallel(wide(), context.group)
        train(model, [part(batch, context) for batch in batches(2, 4)])
        return max(found), model.reducer.lengths()

    for worst, lengths in on_ranks(2, program, backend):
        assert worst < TOLERANCE
        long, rest = [CLASSES * width, FEATURES * width], CLASSES + width + 2 + 4
        if backend == "dure":  # as they finish, in a few messages that are begun beside backward
            assert sum(lengths) == sum(long) + rest
            assert 1 < len(lengths) <= UNDER_WAY
        else:
            assert lengths == [*long, rest]


def test_compression_that_leaves_nothing_out_changes_nothing() -> None:
    compressions = [TopK(1.0), PowerSGD(rank=12, min_compression=0)]

    def program(context: RankContext) -> list[tuple[float, bytes]]:
        return [
            both(context, compression=each, bucket_bytes=size)
            for each in compressions
            for size in (1, 700, None)
        ]

    first, second = on_ranks(2, program)
    assert max(worst for worst, _ in first) < 1e-10
    assert [bits for _, bits in first] == [bits for _, bits in second]


def test_a_static_graph_sends_gradients_and_nothing_else() -> None:
    def program(context: RankContext) -> Any:
        model = DistributedDataParallel(network(), context.group, static_graph=True)
        with pytest.raises(ValueError, match="static_graph"), model.join():
            pass
        return (
            *both(context, static_graph=True, bucket_bytes=1),
            train(model, batches(2, 4)),
            model.reducer.lengths(),
        )

    for worst, _, _, lengths in on_ranks(2, program):
        assert worst < TOLERANCE
        assert lengths == [215]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.out = (
            nn.BatchNorm1d(FEATURES).double(),
            nn.Linear(FEATURES, CLASSES).double(),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.norm(inputs))
        return result


@pytest.mark.parametrize("static", [False, True])
def test_buffers_are_rank_0_s_or_everybody_s_own(static: bool) -> None:
    def program(context: RankContext) -> Any:
        found = []
        for shared in (True, False):
            model = DistributedDataParallel(
                Normed(), context.group, broadcast_buffers=shared, static_graph=static
            )
            train(model, [part(batch, context) for batch in batches(3, 8)])
            found.append(
                (vector(model.module).numpy().tobytes(), model.module.norm.running_mean.tolist())
            )
        return found

    first, second = on_ranks(2, program)
    assert first[0] == second[0]
    assert first[0][1] == first[1][1]
    assert first[1][1] != second[1][1]


@pytest.mark.parametrize("divides_by_all", [True, False])
def test_ranks_that_run_out_of_data_shadow_the_others_until_all_are_through(
    divides_by_all: bool,
) -> None:
    steps = (2, 5, 0)

    def program(context: RankContext) -> Any:
        model = DistributedDataParallel(Normed(), context.group, bucket_bytes=1)
        data = batches(5, 12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=divides_by_all):
            for inputs, targets in [part(batch, context) for batch in data][
                : steps[context.group.rank]
            ]:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        train(model, [part(batch, context) for batch in data[:1]])  # all are in step again
        alone = Normed()
        parts = [
            [tuple(each.tensor_split(3)[rank] for each in batch) for rank in range(3)]
            for batch in data
        ]
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            here = [rank for rank in range(3) if step < steps[rank]]
            before = copy.deepcopy(alone.norm.state_dict())
            for rank in reversed(here):  # the buffers are those of the first rank that has data
                alone.norm.load_state_dict(before)
                inputs, targets = parts[step][rank]
                (
                    F.cross_entropy(alone(inputs), targets) / (3 if divides_by_all else len(here))
                ).backward()
            optimizer.step()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        optimizer.zero_grad()
        before = copy.deepcopy(alone.norm.state_dict())
        for rank in (2, 1, 0):
            alone.norm.load_state_dict(before)
            (F.cross_entropy(alone(parts[0][rank][0]), parts[0][rank][1]) / 3).backward()
        optimizer.step()
        return distance(model.module, alone), vector(model.module).numpy().tobytes()

    results = on_ranks(3, program)
    assert max(worst for worst, _ in results) < TOLERANCE
    assert len({bits for _, bits in results}) == 1


@pytest.mark.parametrize("whose", ["dure", "gloo", "torch's own gloo"])
def test_uneven_data_without_join_names_the_rank_that_has_ended(whose: str) -> None:
    def program(context: RankContext) -> None:
        group = dist.group.WORLD if whose == "torch's own gloo" else context.group
        model = DistributedDataParallel(network(), group)
        train(
            model,
            [part(batch, context) for batch in batches(4 if context.group.rank == 0 else 2, 4)],
        )

    backend: Any = "dure" if whose == "dure" else "gloo"
    with pytest.raises(PeerLostError) as caught:
        dure.Processes(2, deadline=4, backend=backend).run(program, lambda event: None)
    assert caught.value.ranks == (1,)


def test_models_that_differ_are_refused_everywhere() -> None:
    def program(context: RankContext) -> str:
        model = nn.Linear(FEATURES, 2 + (context.group.rank == 1))
        with pytest.raises(ValueError, match="has different") as caught:
            DistributedDataParallel(model, context.group)
        return str(caught.value)

    assert (
        on_ranks(3, program)
        == [
            "rank 1 has different parameters or buffers than rank 0: their shapes and dtypes have "
            "to be the same"
        ]
        * 3
    )


def test_what_does_not_fit_is_refused() -> None:
    for options, message in [
        ({"all_reduce": "rings"}, "there is no all-reduce 'rings'"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"overlap": "behind"}, "overlap is 'behind'"),
    ]:
        with pytest.raises(ValueError, match=message):
            DistributedDataParallel(network(), Group(), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no trainable parameter"):
        DistributedDataParallel(network().requires_grad_(False), Group())


def test_it_wraps_any_group_of_torch_and_leaves_a_plain_state() -> None:
    def program(context: RankContext) -> Any:
        found = []
        for ranks in ([0, 1], [0, 2]):
            group = dist.new_group(ranks, backend="gloo")
            if context.group.rank in ranks:
                model = DistributedDataParallel(network(), group)
                inputs, targets = batches(1, 8)[0]
                index = ranks.index(context.group.rank)
                train(model, [(inputs.chunk(2)[index], targets.chunk(2)[index])])
                alone = network()
                train(alone, [(inputs, targets)])
                assert list(model.state_dict()) == list(alone.state_dict())
                found.append(distance(model.module, alone))
                model.load_state_dict(network().state_dict())
                found.append(distance(model.module, network()))
        return max(found)

    assert max(on_ranks(3, program)) < TOLERANCE


def test_a_wrapper_that_is_gone_sums_nothing_any_more() -> None:
    def program(context: RankContext) -> Any:
        module = network()
        first = DistributedDataParallel(module, context.group)
        train(first, [part(batch, context) for batch in batches(1, 4)])
        del first
        model = DistributedDataParallel(module, context.group)
        before = context.group.meter.counters.messages_sent
        train(model, [part(batch, context) for batch in batches(3, 4)])
        return context.group.meter.counters.messages_sent - before

    assert on_ranks(2, program) == [3, 3]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise OverflowError("as a user's function may")


@pytest.mark.parametrize(("size", "sent"), [(None, False), (1, True)])
def test_a_backward_that_fails_is_no_trap_unless_part_of_it_has_left(
    size: int | None, sent: bool
) -> None:
    def program(context: RankContext) -> str:
        model = DistributedDataParallel(
            network(), context.group, bucket_bytes=size, overlap="beside"
        )
        data = [part(batch, context) for batch in batches(3, 4)]
        train(model, data)
        layers = model.module
        broken = nn.Sequential(layers[:3], Branch(), layers[3:])  # type: ignore[index]
        model.module = broken
        with pytest.raises(OverflowError):
            train(model, data[:1])
        model.module = layers
        try:
            train(model, data)
        except RuntimeError as error:
            return str(error)
        return ""

    for text in on_ranks(2, program):
        assert ("was interrupted after" in text) == sent


class Branch(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = Fails.apply(inputs)  # type: ignore[no-untyped-call]
        return result


class StandsStill(torch.autograd.Function):
    """Backward stands still here in the last step, while the bucket of the layers behind
    travels."""

    steps = 0

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        StandsStill.steps -= 1
        if StandsStill.steps == 0:
            time.sleep(2)
        return gradient


class Waits(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = StandsStill.apply(inputs)  # type: ignore[no-untyped-call]
        return result


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_an_all_reduce_runs_beside_backward_and_what_was_hidden_is_measured(algorithm: Any) -> None:
    def program(context: RankContext) -> Any:
        layers = nn.Sequential(nn.Linear(FEATURES, 8), Waits(), nn.Linear(8, CLASSES)).double()
        model = DistributedDataParallel(
            layers,
            context.group,
            all_reduce=algorithm,
            overlap="beside",
            bucket_bytes=8 * (8 + 1) * CLASSES,
        )
        StandsStill.steps = 4
        train(model, [part(batch, context) for batch in batches(4, 4)])
        first = next(transfer for transfer in model.reducer.transfers if transfer.number == 0)
        return (
            first.end < model.reducer.computed,
            model.hidden_share,
            context.group.meter.counters.hidden_seconds,
        )

    for beside, share, seconds in on_ranks(2, program):
        assert beside
        assert 0 < share < 1
        assert seconds > 0

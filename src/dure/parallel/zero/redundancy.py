"""ZeRO for any training loop: a model and its optimizer, divided over the ranks of a group."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.collectives.all_gather import all_gather
from dure.collectives.group import Group
from dure.memory.spill_store import IN_MEMORY, SpillStore
from dure.parallel.buffer_broadcast import check_forward_keeps_weights
from dure.parallel.gradients_into_buckets import WORTH_IT, GradientsIntoBuckets
from dure.parallel.optimizer_sharding import check_element_wise
from dure.parallel.replica_consistency import ReplicaCheck
from dure.parallel.weight_broadcast import share_weights
from dure.parallel.zero import checkpoint
from dure.parallel.zero.change_detection import ParameterChanges
from dure.parallel.zero.checks import check_model, check_settings, prefetch_of
from dure.parallel.zero.chunk_collectives import Algorithm, ChunkCollectives
from dure.parallel.zero.gathering import GatherUnit, SavedTensorStore, UnitGathering
from dure.parallel.zero.gradient_reduction import GradientReduction, PiggybackFields
from dure.parallel.zero.in_place import InPlaceUnits
from dure.parallel.zero.optimizer import PartitionedOptimizer
from dure.parallel.zero.overlapped_gather import OverlappedGather, check_not_compiled
from dure.parallel.zero.partition_layout import (
    SEPARATE_BLOCK_ELEMENTS,
    ParameterBlock,
    Stage,
    ZeROMemory,
    bytes_sent,
)
from dure.parallel.zero.partitioned_parameters import watch_gradient
from dure.parallel.zero.partitioning import (
    REDUCED,
    PartitionedUnit,
    Precision,
    cast_inputs,
    partition_model,
)
from dure.parallel.zero.passes import MessageOrders, ZeROPasses
from dure.parallel.zero.shares import BufferPool
from dure.parallel.zero.structure import ModelStructure
from dure.parallel.zero.units import UnitSpec
from dure.parallel.zero.whole_model import UndividedModel
from dure.record.meter import Meter
from dure.tasks.loss_scaling import LossScaling, check_weights
from dure.tensors.flat import check_no_shared_memory

NO_PIGGYBACK_FIELDS = PiggybackFields()


class ZeroRedundancy:
    """Divide a model and its optimizer over ranks, in place; the training loop stays as it is.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zero = dure.parallel.ZeroRedundancy(model, optimizer, stage=3)
        for inputs, targets in my_part_of_the_data:
            loss(model(inputs), targets).backward()
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: on one device, with equal shapes on all ranks; all ranks get the weights and buffers
            of rank 0. Parameters must be frozen before the division.
        optimizer: over parameters of the model, in any groups; or a function that creates it from
            `model.parameters()`. It must update every element alone, as SGD and Adam do. The loop
            continues to call this optimizer.
        stage: 1 divides the optimizer's state, 2 the gradients too, 3 the parameters too.
        process_group: a group of torch.distributed of any backend, or a `dure.collectives.Group`;
            None is all ranks.
        reduce: the reduction of the ranks' gradients: mean or sum.
        precision: "bf16" computes and sends in bfloat16, "fp16" in float16, and both update
            parameters in their own dtype. "fp16" needs `loss_scaling`.
        units: the parameters that stage 3 gathers together: a number of elements, or classes of
            modules; None lets dure choose.
        prefetch: number of units gathered ahead, and of messages sent, during the computation; 0
            overlaps nothing. None means 1, but 0 if the ranks of one host use all of its cores,
            because messages would take their time.
        overlap_gather: in stages 1 and 2 `step` does not wait for the updated parameters. They
            arrive during the next forward pass, and code that reads a parameter earlier waits. It
            needs a host for every rank and the backend dure; elsewhere it has no effect. Compiled
            code, and views of parameters that were created before a step, do not wait: call
            `settle` before they read, and before the process group is destroyed. Ranks must send
            equal messages in every step: the messages are no longer compared.
        algorithm: "native" is the backend's own, which must support tensors of the model's device;
            "ring" and "one_shot" use point-to-point sends, and work for any device.
        in_place: whether parameters of stage 3 are in memory that all ranks read, if the ranks
            share a host and the backend is dure, so that no unit is copied; False gathers copies
            there too.
        memory: allocates a number of elements of a dtype for this rank's parameters, such as in a
            file; None keeps the parameters in memory.
        rider: further numbers that travel with a step.

    With precision="fp16" the attribute `loss_scaling` (`dure.tasks.loss_scaling`) takes the place
    of torch's `GradScaler`, so that all ranks skip the same steps; a rank sends one float32 more to
    each other rank:

        scaling = zero.loss_scaling
        scaling.scaled(loss(model(inputs), targets)).backward()
        scaling.unscale(zero.parts())
        zero.clip_grad_norm_(1.0)
        scaling.step(optimizer)

    All ranks run the same loop. A rank without examples in a step calls `take_part` instead of
    forward and backward. Raises ValueError for an unsupported model, optimizer or setting.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[Iterator[nn.Parameter]], Optimizer],
        stage: Stage = 2,
        process_group: Group | dist.ProcessGroup | None = None,
        *,
        reduce: Literal["mean", "sum"] = "mean",
        precision: Precision = "full",
        units: UnitSpec = None,
        prefetch: int | None = None,
        algorithm: Algorithm = "native",
        in_place: bool = True,
        overlap_gather: bool = False,
        memory: Callable[[int, torch.dtype], Tensor] | None = None,
        rider: PiggybackFields = NO_PIGGYBACK_FIELDS,
    ) -> None:
        check_settings(stage, precision, prefetch, overlap_gather, reduce=reduce)
        if overlap_gather:
            check_not_compiled(model)
        self.model = model
        self.stage = stage
        self.group = Group.of(process_group)
        self.optimizer = (
            optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
        )
        self.device = check_model(model, self.optimizer)
        if precision == "fp16":
            check_weights(model)
        check_element_wise(self.optimizer)
        check_forward_keeps_weights(model, self.group.size)
        # A share has separate memory: another tensor in the same memory would no longer follow.
        check_no_shared_memory(model)
        # `prefetch_of` is collective: either all ranks call it, or none does.
        prefetch = prefetch_of(self.group, self.device) if prefetch is None else prefetch
        self.wire = ChunkCollectives(
            self.group,
            algorithm,
            beside=prefetch > 0,
            mean=reduce == "mean",
            planned=overlap_gather,
            device=self.device,
        )
        share_weights(self.model, self.group)
        # From here on the shares own the parameters; the optimizer gets pieces of them.
        cuts = partition_model(
            model,
            stage,
            self.group,
            precision=precision,
            units=units,
            common=in_place and algorithm == "native" and memory is None,
            memory=memory,
            # in split-phase shorter gradients are copied into a message either way
            alone=WORTH_IT // 4 if self.wire.split_phase else SEPARATE_BLOCK_ELEMENTS,
        )
        self.shares = [share for cut in cuts for share in cut.shares]
        self.trained = [share for share in self.shares if share.block.trained]
        self.division = PartitionedOptimizer(self.optimizer, self.trained)
        # In split-phase other ranks read messages in place.
        self._pool = BufferPool(self.device, shared=self.wire.split_phase)
        under_way = prefetch + 1 + self.wire.split_phase
        self.reducing = GradientReduction(
            self.trained, self.wire, self._pool, stage=stage, most=under_way, rider=rider
        )
        for share in self.trained:
            for parameter in share.parameters:
                watch_gradient(parameter, self._gradients_are_divided)
        # before the units are created, which record the classes of parameters
        self._changes = ParameterChanges(self._lent())
        self.passes = self._passes(cuts, prefetch)
        self._changes.rests = lambda: self.passes.rests
        self.arriving = OverlappedGather(model, self.trained, self.wire)
        if precision in REDUCED:
            cast_inputs(model, REDUCED[precision], lambda: self.passes.rests)
        # the same group with a separate meter: bookkeeping is not counted
        self._quiet = copy.copy(self.group)
        self._quiet.meter = Meter(self.group.meter.name)
        self._whole = UndividedModel(
            model, self.shares, self.passes, group=self._quiet, algorithm=algorithm
        )
        self._whole.meet()
        # whether stage 1 has sent the gradients of this step; whether this rank has taken part in
        # the step without examples; number of passes at the last step
        self._reduced = False
        self._took_part = False
        self._stepped = 0
        trained = [parameter for share in self.trained for parameter in share.parameters]
        self._structure = ModelStructure(model, self.optimizer, trained, self._parts())
        # in stage 3 no rank has a whole parameter
        self.loss_scaling = LossScaling(
            f"rank {self.group.rank}",
            self.device,
            self._largest,
            enabled=precision == "fp16",
        )
        self._alike = ReplicaCheck(model.named_parameters() if stage < 3 else (), self._quiet)
        self._accept()
        self._stand_by_the_loop()

    def _lent(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that must not be changed in the model, with their names."""
        alone = self.group.size == 1
        lent: list[tuple[str, nn.Parameter]] = []
        for share in self.shares:
            # on one rank passes use the optimizer's memory, unless the master has more precision
            apart = share.master is not share.own
            if apart or (self.stage == 3 and not (alone and share.common)):
                lent += zip(share.block.names, share.parameters, strict=True)
        return lent

    def _accept(self) -> None:
        """Accept the present values of the parameters and of the optimizer's pieces."""
        self._changes.accept()
        # A piece shares its version counter with the master that it is a view of.
        self._versions = [share.master._version for share in self.trained]

    def _check_unchanged(self) -> None:
        """Check that nothing was changed outside `gathered` and `step`.

        Raises ValueError for changed parameters, RuntimeError for changed pieces.
        """
        self._changes.compare()
        self._changes.check()
        # The overlapped all-gathers after a step may count as a change.
        versions = [share.master._version for share in self.trained]
        if versions != self._versions and not self.wire.planned:
            self._accept()  # so that the error is raised only once
            raise RuntimeError(
                "the optimizer's pieces (zero.parts()) were changed outside step(), which other "
                "ranks do not receive: change parameters inside gathered(), equally on all ranks"
            )

    def _stand_by_the_loop(self) -> None:
        """Hook the methods that a training loop calls: `step` and `zero_grad`."""
        self.optimizer.register_step_pre_hook(self._before_step)
        self.optimizer.register_step_post_hook(self._after_step)
        # Loops call these by habit; torch's methods would leave gradients that have not been sent.
        self.optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        self.model.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def _passes(self, cuts: list[PartitionedUnit], prefetch: int) -> ZeROPasses:
        own = [parameter for share in self.trained for parameter in share.parameters]
        direct = GradientsIntoBuckets(own, self.reducing.place_of)
        gathering = None
        if self.stage == 3:
            # All or none: the shares are in a single piece of common memory.
            in_place = all(share.common for share in self.shares)
            kind = InPlaceUnits if in_place else UnitGathering
            gathering = kind(self._units(cuts), self.wire, self._pool, self._changes)
        else:
            for share in self.shares:
                share.install()
        around = {unit for unit, cut in enumerate(cuts) if cut.around}
        return ZeROPasses(
            self.model,
            self.group,
            gathering=gathering,
            reducing=self.reducing,
            orders=MessageOrders(self._blocks_of(cuts), around, prefetch),
            direct=direct,
            sends_in_backward=self.stage > 1,
        )

    def _units(self, cuts: list[PartitionedUnit]) -> list[GatherUnit]:
        units = []
        for number, cut in enumerate(cuts):
            modules = [self.model.get_submodule(name) for name in cut.modules]
            units.append(GatherUnit(number, modules, cut.shares))
        return units

    def _blocks_of(self, cuts: list[PartitionedUnit]) -> list[list[int]]:
        """Return for each unit the numbers of its blocks that have gradients."""
        number = {id(share): number for number, share in enumerate(self.trained)}
        blocks = []
        for cut in cuts:
            trained = [share for share in cut.shares if share.block.trained]
            blocks.append([number[id(share)] for share in trained])
        return blocks

    # Costs.

    @property
    def blocks(self) -> list[ParameterBlock]:
        """Blocks of the division, as data."""
        return [share.block for share in self.shares]

    def resident(self) -> list[Tensor]:
        """Return the tensors of the model that this rank always has in memory."""
        # In stage 3 the parameters themselves are gathered and freed.
        own = [share.own for share in self.shares]
        return [*(own if self.stage == 3 else self.model.parameters()), *self.model.buffers()]

    def keep_activations(self, keeper: SavedTensorStore) -> None:
        """Make `keeper` store tensors other than parameters that autograd saves in stage 3."""
        if self.passes.gathering is not None:
            self.passes.gathering.keeper = keeper

    def bytes_per_step(self) -> int:
        """Return the bytes that this rank sends in a step of forward, backward and update.

        In stage 3 the number is valid once the order is learned.
        """
        numbers = self.reducing.trailer.length
        carrier = self.reducing.carrier
        size = self.group.size
        if carrier is None:
            return bytes_sent(self.blocks, self.stage, 0) + 4 * (2 * (size - 1) * numbers // size)
        return bytes_sent(
            self.blocks, self.stage, numbers, self.trained[carrier].block.dtype.itemsize
        )

    def memory(self) -> ZeROMemory:
        """Return the bytes of this rank's memory now, by use.

        The masters of mixed precision count as optimizer state; buffers are for messages and units.
        The tensors of the user and the model's buffers do not count.
        """
        state = [
            value
            for one in self.optimizer.state.values()
            for value in one.values()
            if isinstance(value, Tensor)
        ]
        masters = [share.master for share in self.trained if share.master is not share.own]
        gradients = [
            share.gradient for share in self.trained if share.gradient is not None
        ] + self.reducing.local()
        # A gradient of stage 1 may be a view of a buffer: it counts as gradient only.
        own = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        divided = {id(parameter) for share in self.shares for parameter in share.parameters}
        whole = [parameter for parameter in self.model.parameters() if id(parameter) not in divided]
        return ZeROMemory(
            _nbytes([*whole, *(share.own for share in self.shares if not share.common)])
            # Common memory is a single storage for all shares: a rank counts only its own chunks.
            + sum(share.own.nbytes for share in self.shares if share.common),
            _nbytes(gradients),
            _nbytes([*state, *masters]),
            sum(buffer.nbytes for buffer in self._pool.buffers if buffer.data_ptr() not in own),
        )

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager whose messages the group's meter does not count, as of an evaluation."""
        # Records of the body are discarded: the lists are restored.
        waits = list(self.wire.waits)
        transfers = list(self.wire.transfers)
        self.settle()
        before = self.wire.group
        self.wire.group = self._quiet
        try:
            yield
        finally:
            self.wire.group = before
            self.wire.waits = waits
            self.wire.transfers = transfers

    # The loop.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: backward passes leave their gradients whole on this rank.

        The next backward pass outside sends their sum. In stage 1 nothing is sent before the step
        in any case.
        """
        before = self.passes.sends
        self.passes.sends = False
        try:
            yield
        finally:
            self.passes.sends = before

    def settle(self) -> None:
        """Wait for parameters that are still being gathered (`overlap_gather`)."""
        self.arriving.settle()

    def take_part(self, backward: bool = True) -> None:
        """Take part in a step of the other ranks without examples: this rank adds zeros.

        In stage 3 a layer that the model uses several times in a pass is gathered as many times,
        which this rank cannot know: for such a model compute any example, and multiply its loss by
        0. backward: False for a forward pass alone, such as in an evaluation.
        """
        self._took_part = self._took_part or backward
        self.passes.take_part(backward)

    def reduce(self) -> None:
        """Sum the gradients of this step, if they are not summed yet.

        In stage 1 `optimizer.step` otherwise sums them.
        """
        if self.stage == 1 and not self._reduced:
            self.passes.reduce()
            self._reduced = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients; replaces `optimizer.zero_grad` and `model.zero_grad`."""
        if not self.passes.in_backward():
            self.passes.abandon()
        # through the class, because this method has replaced the attribute of the instance
        type(self.optimizer).zero_grad(self.optimizer, set_to_none)
        for part in self._parts():  # also parts that the optimizer does not have
            if set_to_none:
                part.grad = None
            elif part.grad is not None:
                part.grad.zero_()
        self.reducing.drop()
        self._reduced = False
        self._took_part = False

    def parts(self) -> list[nn.Parameter]:
        """Return the tensors that the optimizer updates on this rank.

        They are runs of elements of the parameters, with their gradients. After a backward pass all
        ranks call this method, because in stage 1 it calls `reduce`. An operation on gradients must
        treat each element alone: a norm over parts is the norm of this rank alone
        (`clip_grad_norm_`). Change the values of parameters inside `gathered`, and not here.
        """
        if self._took_part or self.reducing.local():
            self.reduce()
        return self._parts()

    def _parts(self) -> list[nn.Parameter]:
        return [held.part for share in self.trained for held in share.held]

    def parts_by_name(self) -> list[tuple[str, nn.Parameter]]:
        """Return `parts`, each with the name of its parameter."""
        self.parts()
        return [
            (share.block.names[held.place], held.part)
            for share in self.trained
            for held in share.held
        ]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`.

        Returns the norm before scaling. The arguments are those of
        `torch.nn.utils.clip_grad_norm_`. A rank sends one float64 to each other rank.
        """
        self.reduce()
        gradients = [part.grad for part in self._parts() if part.grad is not None]
        total = self._norm(gradients, norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the norm of the gradients is {float(total)}, so they cannot be clipped"
            )
        # as in torch, so that the result equals the result of a single process
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        return total

    def _norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        norms = torch.zeros(1, dtype=torch.float64, device=self.device)
        if gradients:
            norms = torch.stack(
                [torch.linalg.vector_norm(gradient, norm_type).double() for gradient in gradients]
            )
        # The norm of the norms is the norm of all elements, because no element is in two parts.
        mine = norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
        parts = all_gather(mine, self.wire.group, self.wire.algorithm)
        return parts.max() if math.isinf(norm_type) else parts.sum() ** (1 / norm_type)

    def _largest(self, value: Tensor) -> Tensor:
        """Return the largest value of a scalar over all ranks."""
        return all_gather(value, self.wire.group, self.wire.algorithm).max()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # args[0] is the optimizer itself
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ValueError(
                "ZeRO does not support a closure: call forward and backward, then step()"
            )
        if self.passes.rests:
            raise RuntimeError(
                "step() was called inside gathered(), where parameters are not divided; leave "
                "gathered() first"
            )
        self.passes.abandon()
        self._structure.check()
        if self._reduced and self.reducing.local():
            raise RuntimeError(
                "a backward pass came after the gradients were reduced; call step() or zero_grad() "
                "before"
            )
        self.reduce()
        if self.stage > 1 and self.reducing.local():
            raise RuntimeError(
                "step() was called after a backward pass inside no_sync(); the last one has to "
                "be outside"
            )
        # Finished passes are counted: an unchanged count means no pass since the last step.
        if self.reducing.passes == self._stepped or not self.reducing.some_used:
            raise RuntimeError(
                "step() was called before backward(): no rank has a gradient (one without "
                "examples calls take_part())"
            )
        self.settle()
        if self.stage < 3:
            self._check_home()
        self._check_unchanged()
        self._alike.passed()
        self._whole.meet()  # other ranks may still compute with memory that is updated next

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = self.reducing.passes
        self._reduced = False
        self._took_part = False
        self.reducing.some_used = False
        self._spread()

    @contextmanager
    def parts_changed(self) -> Iterator[None]:
        """Context manager in which all ranks change the values of their `parts`.

        Afterwards all ranks have the changes, with the messages of an optimizer step. All ranks
        enter and leave together.
        """
        self.settle()
        if self.stage < 3:
            self._check_home()
        self._check_unchanged()
        self._whole.meet()  # other ranks may still compute with memory that is changed next
        try:
            yield
        finally:
            self._spread()

    def _spread(self) -> None:
        """Send the new values of this rank's parts to the other ranks."""
        for share in self.trained:
            share.round()
        # In common memory the next forward pass reads elements that other ranks have just updated.
        self._whole.meet()
        if self.stage < 3:
            # The reverse of backward's order is about the order in which forward needs the blocks.
            order = [
                action.number
                for action in reversed(self.passes.orders.events)
                if action.kind == "reduce"
            ]
            self.arriving.begin(self.trained[number] for number in order)
        self._accept()

    def _check_home(self) -> None:
        for share in self.shares:
            assert share.whole is not None
            home = share.whole.data_ptr()
            for place, parameter in enumerate(share.parameters):
                # `model.to(...)` and assignments to `data` give parameters other memory, where
                # updates of the share would have no effect.
                if parameter.data_ptr() != home + share.block.starts[place] * share.whole.itemsize:
                    raise RuntimeError(
                        "the model was moved or converted after it was divided, or the data of "
                        f"{share.block.names[place]} were replaced: move and convert before, and "
                        "write into parameters in place"
                    )

    def _gradients_are_divided(self) -> None:
        if self.passes.in_backward():
            return
        # Before the first backward pass there are no gradients, and None is right.
        if any(share.accumulates() for share in self.trained) or (
            self.stage == 1 and self.reducing.local()
        ):
            raise RuntimeError(
                "gradients are divided over the ranks, and this parameter has none: clip them "
                "with zero.clip_grad_norm_(), read them in zero.parts(), clear them with "
                "zero.zero_grad()"
            )

    # The whole model.

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager in which every rank has the whole model.

        The model can be read, run without gradients, and changed; changes must be equal on all
        ranks. All ranks enter and leave together. Needs memory for the whole model.
        """
        self.settle()
        self._check_unchanged()
        try:
            with self._whole.gathered():
                yield
        finally:
            self._accept()

    def state_dict(self, everywhere: bool = False) -> dict[str, Any]:
        """Return the model's whole state_dict on rank 0; an empty dictionary on other ranks.

        everywhere: return the state_dict on every rank. All ranks call this method. Ranks that
        return an empty dictionary need memory for one block at a time.
        """
        self.settle()
        self._check_unchanged()
        return self._whole.state_dict(everywhere)

    def weights(self, store: SpillStore) -> Mapping[str, Tensor]:
        """Return `state_dict` with tensors on a shelf.

        No rank needs memory for more than its share.
        """
        self.settle()
        self._check_unchanged()
        return self._whole.weights(store)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole state_dict, which is given on every rank.

        Raises ValueError, before anything changes, if the state_dict is not the model's.
        """
        self.settle()
        self._whole.load_state_dict(state)
        self._accept()

    def optimizer_state_dict(self, store: SpillStore = IN_MEMORY) -> dict[str, Any]:
        """Return the optimizer's whole state on rank 0, as its undivided `state_dict()`.

        On other ranks the state has no tensors. All ranks call this method. The state loads into
        the same optimizer of one process, or of any number of ranks. store: storage of the tensors
        on rank 0; unless it is memory, large tensors are `dure.record.disk_tensors.DiskTensor`.
        """
        return self.division.state_dict(self._quiet, store)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole state, which is given on every rank.

        Raises ValueError if the state is that of an optimizer over other parameters.
        """
        self.division.load_state_dict(state)

    def save(self, folder: str | Path) -> None:
        """Write model and optimizer to a folder that all ranks share; each rank writes its part.

        See `dure.parallel.zero.checkpoint`.
        """
        checkpoint.save(Path(folder), self.model, self.shares, self.division, group=self._quiet)

    def load(self, folder: str | Path) -> None:
        """Load a checkpoint of `save`, written by any number of ranks; every rank reads its part.

        Raises RunFolderError if there is no complete checkpoint, ValueError if the checkpoint is of
        another model or optimizer.
        """
        self.settle()
        self._whole.meet()
        checkpoint.load(Path(folder), self.model, self.shares, self.division, group=self._quiet)
        self._accept()
        self._whole.meet()


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

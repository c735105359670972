"""DistributedDataParallel: a module whose gradients are averaged over ranks, for any training loop.

    model = dure.parallel.DistributedDataParallel(model, process_group)
    for inputs, targets in my_part_of_the_data:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()  # gradients are the same on all ranks

Every rank computes the mean gradient over its own batch, and receives the average (1/N)·Σ g_r. The
average is the gradient of the joint batch if the loss has the same denominator on every rank;
otherwise multiply a rank's loss by N times its share of the total denominator. The overlap with
backward and the messages are described in `dure.parallel.data.reducer`. The trailer has three
fields:

    out       of each rank      whether it has run out of data
    changed   of each buffer    whether the forward pass changed it
    used      of each gradient  whether it was used

All of them are flags, because the trailer is averaged with the gradients: above zero means yes.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression import Compression
from dure.collectives.compression import parse as parse_compression
from dure.collectives.group import Group
from dure.collectives.roll_call import with_lost_rank_diagnosis
from dure.collectives.trailer import Numbers, TrailerField, per_rank_field, summed_field
from dure.parallel.buffer_broadcast import buffer_sync_of, check_forward_keeps_weights
from dure.parallel.data.reducer import Reducer, check_same_shapes
from dure.parallel.data.reduction_settings import NO_COMPRESSION, Overlap, ReductionSettings
from dure.parallel.replica_consistency import ReplicaCheck
from dure.parallel.weight_broadcast import share_weights
from dure.tensors.buffers import BufferNames


class DistributedDataParallel(nn.Module):
    """Wrap `module` so that gradients are averaged over `process_group` during backward.

    Args:
        module: on the CPU or on GPUs. All ranks get the weights and buffers of rank 0.
        process_group: a group of torch.distributed of any backend, or a `dure.collectives.Group`;
            None is all ranks.
        all_reduce: "native" is the backend's own; or any algorithm of
            `dure.collectives.all_reduce`.
        bucket_bytes: how many bytes of gradients share a message; None lets dure choose.
        overlap: all-reduces run "beside" backward, on a thread or stream, start and end separately
            ("split-phase"), or run "after" backward; "auto" chooses
            (`dure.parallel.data.reduction_settings`).
        compression: a class of `dure.collectives.compression`, such as TopK(0.01); None sends
            gradients uncompressed.
        find_unused_parameters: with False, a backward pass that does not use all parameters is an
            error, which names them.
        static_graph: every step uses the same parameters and changes the same buffers as the first
            step, so that no flags travel.
        broadcast_buffers: False leaves every rank its own buffers; otherwise all ranks get rank 0's
            after every backward pass.
        seed: of compression, the same on all ranks.

    Gradients are summed in the backward pass, for any form of the forward pass: once, several
    times, or by parts of `module`. `torch.autocast`, parameters of several dtypes, and frozen or
    shared parameters need no argument; parameters may be frozen and unfrozen between steps, on all
    ranks alike. Sparse gradients become dense. Gradients are views of memory that the next step
    overwrites; long gradients may be autograd's own tensors.

    Raises ValueError for invalid arguments, for "native" with a backend that does not support
    tensors of the module's device, if the ranks' modules differ, and after a backward pass if their
    weights differ (`dure.parallel.replica_consistency`). A `backward(create_graph=True)` raises
    RuntimeError.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Group | dist.ProcessGroup | None = None,
        *,
        all_reduce: Algorithm = "native",
        bucket_bytes: int | None = None,
        overlap: Overlap = "auto",
        compression: Compression | str | None = None,
        find_unused_parameters: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if isinstance(compression, str):
            compression = parse_compression(compression)
        how = ReductionSettings(
            algorithm=all_reduce,
            op="avg",
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            compression=compression or NO_COMPRESSION,
            static=static_graph,
            seed=seed,
        )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                "the module has no trainable parameter, so there is nothing to average"
            )
        self.module = module
        self.group = with_lost_rank_diagnosis(process_group)
        self.find_unused_parameters = find_unused_parameters
        everything = [*module.parameters(), *module.buffers()]
        check_forward_keeps_weights(module, self.group.size)
        check_same_shapes(everything, self.group)
        share_weights(module, self.group)
        self._speaking = buffer_sync_of(module) if broadcast_buffers else None
        self._buffers_at_start = BufferNames(module)
        # with a static graph: the buffers that the first step has changed
        self._changed: list[bool] | None = None
        self._steps = 0
        self._joining = False
        self._here = True
        self._divides_by_those_here = False
        self._out = [False] * self.group.size  # the ranks that have run out of data
        self.reducer = Reducer(list(module.parameters()), self.group, how, self)
        self._alike = ReplicaCheck(module.named_parameters(), self.group)

    @property
    def hidden_share(self) -> float | None:
        """Share of all-reduce time that overlapped backward on this rank, since the beginning.

        A wait for a slower rank counts as part of the all-reduce. None before the first step.
        """
        return self.reducer.hidden.hidden_share

    # Forward and backward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and prepare its gradients to be summed in backward."""
        # inside a backward pass the call is a recomputation of a checkpoint
        if torch._C._current_graph_task_id() == -1:
            self._check_last_pass()
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            found = [
                leaf
                for leaf in tree_leaves(outputs)
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            self.reducer.look_at(found)
            # A hook on each output marks the beginning of backward, before any gradient is
            # computed. No earlier moment is visible.
            for output in found if self.reducer.enabled else []:
                output.register_hook(self._outputs_reached)  # type: ignore[no-untyped-call]
        return outputs

    def _check_last_pass(self) -> None:
        # Messages that the other ranks count, or wait for, cannot be taken back.
        if self.reducer.active and self.reducer.next:
            raise RuntimeError(
                "the last backward pass was interrupted after some of its gradients had been "
                "sent: the ranks are out of step. End the program and resume from a checkpoint"
            )
        self.reducer.active = False
        self.reducer.check_parameters()

    def _outputs_reached(self, gradient: Tensor) -> None:
        """Begin a backward pass.

        A checkpoint inside begins another pass, whose end is not the end.
        """
        if not self.reducer.active and self.reducer.enabled:
            self.backward_begins()

    def backward_begins(self) -> None:
        """Begin a backward pass whose gradients are summed, and register its end with autograd."""
        self.reducer.begin()
        # autograd calls it at the end of this backward pass, when all gradients are complete
        Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        if not self.reducer.any_gradient:  # torch.autograd.grad leaves parameters as they are
            self.reducer.active = False
        elif self.reducer.active:
            self.reducer.finish()
            self._after()
            if self.reducer.missing and not self.find_unused_parameters:
                raise RuntimeError(self._unused())

    def _after(self) -> None:
        """Broadcast buffers after all sums are complete."""
        self._steps += 1
        self.reducer.account(self._steps)
        if self.reducer.how.static:
            changed = self._changed_in_the_first_step()
        else:
            heard = self.reducer.trailer_sums
            self._out = [bool(number) for number in heard["out"]]
            changed = [bool(number) for number in heard["changed"]]
        # Ranks without data add zeros. In the last step no rank has data, and nothing changes.
        some_are_out = any(self._out) and not all(self._out)
        if not any(self._out):  # a rank without data has not made the updates of the others
            self._alike.passed()
        if self._speaking is not None and any(changed) and not all(self._out):
            # All ranks have the same flags, so all of them, or none, enter this broadcast.
            self._speaking.take(self.group, changed, self._out.index(False))
        if self._divides_by_those_here and some_are_out:
            gradients = [
                parameter.grad
                for parameter in self.reducer.parameters
                if parameter.grad is not None
            ]
            # the sums were divided by the number of all ranks
            torch._foreach_mul_(gradients, self.group.size / self._out.count(False))

    def _changed_in_the_first_step(self) -> list[bool]:
        """Return which buffers each step of a static graph broadcasts.

        Rank 0's first step decides.
        """
        if self._changed is None:
            mine = [] if self._speaking is None else self._speaking.changed()
            rows = self.group.all_gather_values([float(one) for one in mine]) if mine else [[]]
            self._changed = [bool(one) for one in rows[0]]
        return self._changed

    def _unused(self) -> str:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        unused = ", ".join(
            names[id(self.reducer.parameters[index])] for index in sorted(self.reducer.missing)
        )
        return (
            f"rank {self.group.rank} did not use {unused} in this step, which "
            f"find_unused_parameters=True allows"
        )

    announces = False

    def tail_fields(self, messages: int) -> list[TrailerField]:
        """Return the fields `out` and `changed` (see the module's docstring).

        None for a static graph.
        """
        if self.reducer.how.static:
            return []
        buffers = 0 if self._speaking is None else len(self._speaking)
        return [per_rank_field("out"), summed_field("changed", buffers)]

    def tail_numbers(self, entered: Sequence[float]) -> Numbers:
        """Return this rank's flags: whether it is out of data, and which buffers have changed."""
        if self.reducer.how.static:
            return {}
        said: dict[str, Sequence[float]] = {"out": [float(not self._here)]}
        # With `join` rank 0 may be out of data, and the first rank with data is the root. The root
        # is known only from the sum, so all ranks with data send flags; above zero means yes.
        speaks = self._here and (self._joining or self.group.rank == 0)
        if self._speaking is not None and speaks:
            said["changed"] = self._speaking.changed()
        return said

    # Steps without sums, and ranks that have run out of data.

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager: backward passes accumulate gradients on this rank.

        The first backward pass outside sums all of them.
        """
        return self.reducer.paused()

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True
    ) -> Iterator[None]:
        """Context manager for the training loops of ranks with different numbers of batches.

        A rank that has left its loop continues to take part in the all-reduces, with zeros, until
        all ranks have left their loops. All ranks then get the weights of a rank that left last.
        The optimizer of an early rank has not made the last steps of the others.

        divide_by_initial_world_size: gradients are divided by the number of all ranks to the end;
        False divides by the number of ranks that still have data. enable: False has no effect.
        Raises ValueError with a static graph, whose steps do not report which ranks have data.
        """
        if not enable:
            yield
            return
        if self.reducer.how.static:
            raise ValueError(
                "join needs to know in every step which ranks have data left: set "
                "static_graph=False"
            )
        self._joining = True
        self._divides_by_those_here = not divide_by_initial_world_size
        try:
            yield
            self._shadow()
        finally:
            self._joining = False
            self._here = True
            self._divides_by_those_here = False
            self._out = [False] * self.group.size

    def _shadow(self) -> None:
        """Take part in the remaining steps of other ranks."""
        self._here = False
        # `_out` is of the last step, in which this rank had data: at least one entry is False.
        last = self._out.index(False)
        uneven = any(self._out)
        while not all(self._out):
            last = self._out.index(False)
            self.reducer.take_part()
            self._after()
            uneven = uneven or (any(self._out) and not all(self._out))
        # Weights come from a rank that made all steps; ranks that left earlier missed updates.
        if uneven:
            self.group.broadcast_values(
                [*self.module.parameters(), *self._buffers_at_start.of(self.module)], root=last
            )

    # The state is that of the wrapped module.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state_dict of `module`, without a prefix for the wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state_dict of `module`. All ranks load the same."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

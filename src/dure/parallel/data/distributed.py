"""DistributedDataParallel: a module for anybody's training loop, whose gradients are averaged over
ranks.

    model = dure.parallel.DistributedDataParallel(model, process_group)
    for inputs, targets in my_part_of_the_data:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()  # gradients are the same on all ranks when it
        returns optimizer.step()

Every rank computes the mean gradient over its own batch; what arrives is their average (1/N)·Σ g_r,
the gradient of the joint batch where the ranks' batches have one size. How that is hidden behind
backward, and what travels, is in `dure.parallel.data.reducer`; the tail has a number a rank
(whether it has run out of data), one a buffer (whether the forward pass changed it) and one a
gradient (whether it was used).

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
from dure.collectives.group import Group
from dure.collectives.roll_call import watched
from dure.parallel.data.how import NO_COMPRESSION, How, Overlap
from dure.parallel.data.reducer import Reducer, check_alike
from dure.parallel.speaker import Speaker, check_weights_stay
from dure.tensors.buffers import Buffers


class DistributedDataParallel(nn.Module):
    """`module`, with gradients that are averaged over `process_group` while backward computes.

    module: on the CPU or on GPUs; rank 0's weights and buffers become everybody's.
    process_group: a group of torch.distributed of any backend, or a `dure.collectives.Group`; None
        is all ranks.
    all_reduce: "native" is the backend's own; or any algorithm of `dure.collectives.all_reduce`.
    bucket_bytes: how many bytes of gradients share a message; None lets dure choose.
    overlap: all-reduces run "beside" backward, on a thread or stream, are begun and ended apart
        ("split-phase"), or run "after" it; "auto" chooses (`parallel.how`).
    compression: one of `dure.collectives.compression`, as TopK(0.01); None sends gradients as they
        are.
    find_unused_parameters: False makes it an error, which names them, if a backward pass leaves
        parameters out.
    static_graph: the parameters that the first step uses, and the buffers that it changes, are
        those of every step: no flags travel.
    broadcast_buffers: False leaves every rank its own buffers; otherwise they are rank 0's after
        every backward pass.
    seed: of compression, the same on all ranks.

    What sums is the backward pass, however the forward pass was made: once, several times, or by
    parts of `module`. Under `torch.autocast`, with parameters of several dtypes, frozen or shared
    ones, nothing has to be said; parameters may be frozen and unfrozen between steps, on all ranks
    alike. Sparse gradients arrive dense. Gradients are views of memory that the next step writes
    again, or, long ones, autograd's own. `backward(create_graph=True)` raises RuntimeError. Raises
    ValueError for arguments that do not fit, and if the ranks' modules differ.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Group | dist.ProcessGroup | None = None,
        *,
        all_reduce: Algorithm = "native",
        bucket_bytes: int | None = None,
        overlap: Overlap = "auto",
        compression: Compression | None = None,
        find_unused_parameters: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        how = How(
            all_reduce,
            "avg",
            bucket_bytes,
            overlap,
            compression or NO_COMPRESSION,
            static_graph,
            seed,
        )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                "the module has no trainable parameter, so there is nothing to average"
            )
        self.module = module
        self.group = watched(process_group)
        self.find_unused_parameters = find_unused_parameters
        everything = [*module.parameters(), *module.buffers()]
        check_alike(everything, self.group)
        check_weights_stay(module, self.group.size)
        self.group.broadcast_values(everything, counted=False)
        self._speaking = Speaker(module if broadcast_buffers else nn.Module())
        self._buffers_at_start = Buffers(module)
        self._changed: list[bool] | None = (
            None  # with a static graph: the buffers that the first step has changed
        )
        self._steps = 0
        self._joining, self._here, self._divides_by_those_here = False, True, False
        self._out = [False] * self.group.size  # the ranks that have run out of data
        self.reducer = Reducer(list(module.parameters()), self.group, how, self)

    @property
    def hidden_share(self) -> float | None:
        """Which part of the time of all-reduces ran while backward computed, on this rank and up to
        now.

        A wait for a slower rank counts as part of the all-reduce. None before the first step.
        """
        return self.reducer.hidden.hidden_share

    # Forward and backward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        if (
            torch._C._current_graph_task_id() == -1
        ):  # not a checkpoint that computes it once more, in a backward pass
            self._check_last_pass()
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            found = [
                each
                for each in tree_leaves(outputs)
                if isinstance(each, Tensor) and each.requires_grad
            ]
            self.reducer.look_at(found)
            for output in found if self.reducer.enabled else []:
                output.register_hook(self._outputs_reached)  # type: ignore[no-untyped-call]
        return outputs

    def _check_last_pass(self) -> None:
        if self.reducer.active and self.reducer.next:
            raise RuntimeError(
                "the last backward pass ended in the middle, when some of its gradients had left: "
                "the ranks are no "
                "longer in step. End the program, and go on from a checkpoint"
            )
        self.reducer.active = False
        self.reducer.check_parameters()

    def _outputs_reached(self, gradient: Tensor) -> None:
        """Backward begins here; a checkpoint inside begins another, whose end is not the end."""
        if not self.reducer.active and self.reducer.enabled:
            self.backward_begins()

    def backward_begins(self) -> None:
        self.reducer.begin()
        Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        if (
            not self.reducer.any_gradient
        ):  # torch.autograd.grad, which leaves parameters as they are
            self.reducer.active = False
        elif self.reducer.active:
            self.reducer.finish()
            self._after()
            if self.reducer.missing and not self.find_unused_parameters:
                raise RuntimeError(self._unused())

    def _after(self) -> None:
        """All sums are there: buffers follow."""
        self._steps += 1
        self.reducer.account(self._steps)
        numbers, size = self.reducer.numbers, self.group.size
        if self.reducer.how.static:
            if self._changed is None:
                mine = [float(one) for one in self._speaking.changed()]
                self._changed = (
                    [bool(one) for one in self.group.all_gather_values(mine)[0]] if mine else []
                )
            changed = self._changed
        else:
            self._out = [bool(number) for number in numbers[:size]]
            changed = [bool(number) for number in numbers[size:]]
        if any(changed) and not all(self._out):
            self._speaking.take(self.group, changed, self._out.index(False))
        if self._divides_by_those_here and any(self._out) and not all(self._out):
            gradients = [
                parameter.grad
                for parameter in self.reducer.parameters
                if parameter.grad is not None
            ]
            torch._foreach_mul_(gradients, size / self._out.count(False))

    def _unused(self) -> str:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        unused = ", ".join(
            names[id(self.reducer.parameters[index])] for index in sorted(self.reducer.missing)
        )
        return f"rank {self.group.rank} did not use {unused} in this step, which find_unused_parameters=True allows"

    def tail_length(self, messages: int) -> int:
        return 0 if self.reducer.how.static else self.group.size + len(self._speaking)

    def tail_numbers(self, entered: Sequence[float]) -> list[float]:
        if self.reducer.how.static:
            return []
        out = [0.0] * self.group.size
        out[self.group.rank] = float(not self._here)
        speaks = self._here and (self._joining or self.group.rank == 0)
        changed = self._speaking.changed() if speaks else [False] * len(self._speaking)
        return [*out, *map(float, changed)]

    # Steps that are not, and ranks that are through.

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate gradients on this rank; the first one outside sums all
        of them."""
        return self.reducer.paused()

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True
    ) -> Iterator[None]:
        """Around the loop of every rank, where some may have fewer batches than others.

        A rank that has left its loop goes on to take part in the all-reduces, with zeros, until all
        have left theirs; then all have the weights of one that left last. Its optimizer has not
        made the others' last steps.

        divide_by_initial_world_size: gradients are divided by the number of all ranks to the end;
        False divides by those that still have data. enable: False does nothing. Raises ValueError
        with a static graph, whose steps do not say who is there.
        """
        if not enable:
            yield
            return
        if self.reducer.how.static:
            raise ValueError(
                "join needs to know in every step who has data left: let static_graph be False"
            )
        self._joining, self._divides_by_those_here = True, not divide_by_initial_world_size
        try:
            yield
            self._shadow()
        finally:
            self._joining, self._here, self._divides_by_those_here = False, True, False
            self._out = [False] * self.group.size

    def _shadow(self) -> None:
        """Takes part in what others still do."""
        self._here = False
        last = self._out.index(False)
        uneven = any(self._out)
        while not all(self._out):
            last = self._out.index(False)
            self.reducer.take_part()
            self._after()
            uneven = uneven or (any(self._out) and not all(self._out))
        if uneven:
            self.group.broadcast_values(
                [*self.module.parameters(), *self._buffers_at_start.of(self.module)], root=last
            )

    # A module's state is that of what it wraps.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of `module`, as if it had never been wrapped."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """That of `module`. All ranks load the same."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

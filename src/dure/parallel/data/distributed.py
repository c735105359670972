"""DistributedDataParallel: a module whose gradients are averaged over ranks, for any training loop.

    model = dure.parallel.DistributedDataParallel(model, process_group)
    for inputs, targets in my_part_of_the_data:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()  # gradients are the same on all ranks

Every rank computes the mean gradient over its own batch; what arrives is their average (1/N)·Σ g_r,
the gradient of the joint batch where the loss counts as much on every rank; elsewhere a rank's loss
has to be multiplied with N times its share of what all of them count. How that is hidden by
backward, and what travels, is in `dure.parallel.data.reducer`. The tail has three fields:

    out       of each rank      whether it has run out of data
    changed   of each buffer    whether the forward pass changed it
    used      of each gradient  whether it was used

All of them are flags, since the tail is averaged with the gradients: above zero is yes.

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

from dure.collectives.algorithms.native import check_carried
from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression import Compression
from dure.collectives.compression import parse as parse_compression
from dure.collectives.group import Group
from dure.collectives.roll_call import watched
from dure.collectives.tail import Field, Numbers, each, summed
from dure.parallel.alike import Alike
from dure.parallel.data.how import NO_COMPRESSION, How, Overlap
from dure.parallel.data.reducer import Reducer, check_alike
from dure.parallel.first_weights import share_weights
from dure.parallel.speaker import check_weights_stay, speaker_of
from dure.tensors.buffers import Buffers


class DistributedDataParallel(nn.Module):
    """`module`, with gradients that are averaged over `process_group` while backward computes.

    Args:
        module: on the CPU or on GPUs. Rank 0's weights and buffers become those of all ranks.
        process_group: a group of torch.distributed of any backend, or a `dure.collectives.Group`;
            None is all ranks.
        all_reduce: "native" is the backend's own; or any algorithm of
            `dure.collectives.all_reduce`.
        bucket_bytes: how many bytes of gradients share a message; None lets dure choose.
        overlap: all-reduces run "beside" backward, on a thread or stream, are begun and ended apart
            ("split-phase"), or run "after" it; "auto" chooses (`dure.parallel.data.how`).
        compression: one of `dure.collectives.compression`, such as TopK(0.01); None sends gradients
            as they are.
        find_unused_parameters: with False, a backward pass that leaves parameters out is an error,
            which names them.
        static_graph: the parameters that the first step uses, and the buffers that it changes, are
            those of every step, so that no flags travel.
        broadcast_buffers: False leaves every rank its own buffers; otherwise they are rank 0's
            after every backward pass.
        seed: of compression, the same on all ranks.

    Gradients are summed in the backward pass, however the forward pass was made: once, several
    times, or by parts of `module`. `torch.autocast`, parameters of several dtypes, frozen and
    shared ones need no argument; parameters may be frozen and unfrozen between steps, on all ranks
    alike. Sparse gradients arrive dense. Gradients are views of memory that the next step writes
    again; long ones may be autograd's own tensors.

    Raises ValueError for arguments that do not fit, for "native" over a backend that carries no
    tensors of the module's device, if the ranks' modules differ, and after a
    backward pass if their weights do (`dure.parallel.alike`). A
    `backward(create_graph=True)` raises RuntimeError.
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
        how = How(
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
        self.group = watched(process_group)
        self.find_unused_parameters = find_unused_parameters
        if all_reduce == "native":
            for device in {one.device for one in module.parameters() if one.requires_grad}:
                check_carried(device, self.group)
        everything = [*module.parameters(), *module.buffers()]
        check_weights_stay(module, self.group.size)
        check_alike(everything, self.group)
        share_weights(module, self.group)
        self._speaking = speaker_of(module) if broadcast_buffers else None
        self._buffers_at_start = Buffers(module)
        # with a static graph: the buffers that the first step has changed
        self._changed: list[bool] | None = None
        self._steps = 0
        self._joining = False
        self._here = True
        self._divides_by_those_here = False
        self._out = [False] * self.group.size  # the ranks that have run out of data
        self.reducer = Reducer(list(module.parameters()), self.group, how, self)
        self._alike = Alike(module.named_parameters(), self.group)

    @property
    def hidden_share(self) -> float | None:
        """The share of all-reduces' time that ran while backward computed, on this rank, up to now.

        A wait for a slower rank counts as part of the all-reduce. None before the first step.
        """
        return self.reducer.hidden.hidden_share

    # Forward and backward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        # inside of a backward pass a checkpoint computes it once more
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
            # A hook on each output tells that backward begins, before any gradient is there. It is
            # the earliest moment that autograd shows.
            for output in found if self.reducer.enabled else []:
                output.register_hook(self._outputs_reached)  # type: ignore[no-untyped-call]
        return outputs

    def _check_last_pass(self) -> None:
        # Messages have left that the other ranks count, or wait for: nothing here can take them
        # back.
        if self.reducer.active and self.reducer.next:
            raise RuntimeError(
                "the last backward pass ended in the middle, when some of its gradients had left: "
                "the ranks are no longer in step. End the program, and go on from a checkpoint"
            )
        self.reducer.active = False
        self.reducer.check_parameters()

    def _outputs_reached(self, gradient: Tensor) -> None:
        """Backward begins here; a checkpoint inside begins another, whose end is not the end."""
        if not self.reducer.active and self.reducer.enabled:
            self.backward_begins()

    def backward_begins(self) -> None:
        """A backward pass whose gradients are summed begins; autograd tells when it has ended."""
        self.reducer.begin()
        # autograd calls it at the end of this backward pass, when all gradients are there
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
        """All sums are there: buffers follow."""
        self._steps += 1
        self.reducer.account(self._steps)
        if self.reducer.how.static:
            changed = self._changed_in_the_first_step()
        else:
            heard = self.reducer.heard
            self._out = [bool(number) for number in heard["out"]]
            changed = [bool(number) for number in heard["changed"]]
        # Ranks that are out add zeros. The last step, in which all are, is nobody's, and changes
        # nothing.
        some_are_out = any(self._out) and not all(self._out)
        if not any(self._out):  # a rank that is out has not made the others' updates
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
            # what has arrived was divided by the number of all ranks
            torch._foreach_mul_(gradients, self.group.size / self._out.count(False))

    def _changed_in_the_first_step(self) -> list[bool]:
        """Which buffers follow every step of a static graph, as rank 0 has found in the first."""
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

    def tail_fields(self, messages: int) -> list[Field]:
        """`out` and `changed`: see the module's docstring. A static graph sends neither."""
        if self.reducer.how.static:
            return []
        buffers = 0 if self._speaking is None else len(self._speaking)
        return [each("out"), summed("changed", buffers)]

    def tail_numbers(self, entered: Sequence[float]) -> Numbers:
        """Whether this rank is out of data and, if it speaks, which buffers have changed."""
        if self.reducer.how.static:
            return {}
        said: dict[str, Sequence[float]] = {"out": [float(not self._here)]}
        # With `join` rank 0 may be out, and the first rank that is not speaks. Who that is shows
        # only in the sum, so all that are here give their flags, above zero is yes.
        speaks = self._here and (self._joining or self.group.rank == 0)
        if self._speaking is not None and speaks:
            said["changed"] = self._speaking.changed()
        return said

    # Steps that are not summed, and ranks that have run out of data.

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes accumulate gradients on this rank.

        The first backward pass outside sums all of them.
        """
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
        with a static graph, whose steps do not say which ranks are there.
        """
        if not enable:
            yield
            return
        if self.reducer.how.static:
            raise ValueError(
                "join needs to know in every step which ranks have data left: let static_graph be "
                "False"
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
        """Takes part in what others still do."""
        self._here = False
        # `_out` is of the last step, in which this rank was here: so one at least was not out.
        last = self._out.index(False)
        uneven = any(self._out)
        while not all(self._out):
            last = self._out.index(False)
            self.reducer.take_part()
            self._after()
            uneven = uneven or (any(self._out) and not all(self._out))
        # Weights are those of a rank that made all steps; ranks that left earlier have missed
        # updates.
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

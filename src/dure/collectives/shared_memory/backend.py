"""torch.distributed backend `dure`: a process group of CPU tensors over shared memory.

Within a host all data pass through `Host`; between hosts through gloo, or dure's own connection
(`across`). Collectives run in the order of their issue: on the caller's thread if no call is in
progress, else on the group's thread. Sends and receives do not wait for collectives, nor the
reverse.
"""

# mypy: disable-error-code="override, assignment"
# torch's stubs list conveniences for single tensors beside the methods that c10d calls; only the
# latter are here.

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dure.collectives.arguments import check_rank
from dure.collectives.shared_memory import group_lifecycle, sparse, torch_calls, torch_patches
from dure.collectives.shared_memory.arguments import (
    check_alike,
    check_gathered,
    check_like,
    check_pairs,
    check_scattered,
    copy_back,
    dense_like,
    reducible,
    root_of,
    single,
    some,
    split,
)
from dure.collectives.shared_memory.begun_calls import BegunCalls
from dure.collectives.shared_memory.calls import AVG, NUMBER_OF, SUM, check_tensor, operation_of
from dure.collectives.shared_memory.device_backend import DeviceBackend
from dure.collectives.shared_memory.host import Collectives
from dure.collectives.shared_memory.mailbox import ANY, Mailbox
from dure.collectives.shared_memory.overlap_checks import (
    check_apart,
    check_outputs,
    check_writable,
    kept,
    meets,
)
from dure.collectives.shared_memory.portable import folded
from dure.collectives.shared_memory.rendezvous import Core, find_hosts
from dure.collectives.shared_memory.torch_calls import limit_of, profiler_enabled, torch_call
from dure.collectives.shared_memory.torch_collectives import TorchCollectives
from dure.collectives.shared_memory.torch_error_texts import at_monitored_barrier
from dure.collectives.shared_memory.transport import SharedMemoryTransport
from dure.collectives.shared_memory.two_hosts.inter_host import InterHostCollectives
from dure.collectives.shared_memory.work import FINISHED, CallHandle, CallQueue
from dure.collectives.transport import HasTransport
from dure.errors import CallError, PeerLostError
from dure.tensors.overlap import any_overlap, overlap


@dataclass(frozen=True)
class Options:
    """Options of a group: pass it as `pg_options`.

    core: "c" is the compiled core; "torch" does without; "auto" is C if it was built. A host uses C
    only if all of its ranks do.
    """

    core: Core = "auto"


def create(backend_options: Any, options: Options | None = None) -> SharedMemoryGroup:
    """Make a group: called by torch.distributed, collectively over the ranks."""
    size = backend_options.group_size
    names = list(backend_options.global_ranks_in_group) or list(range(size))
    return SharedMemoryGroup(
        store=backend_options.store,
        rank=backend_options.group_rank,
        size=size,
        timeout=backend_options.timeout,
        names=names,
        options=options if isinstance(options, Options) else Options(),
    )


class SharedMemoryGroup(DeviceBackend, dist.ProcessGroup, HasTransport):
    """Process group of the backend `dure`. Users get it from init_process_group and new_group.

    It is its own backend for the CPU. Further members are: `all_reduce`, the fast path to a sum;
    `monitored_barrier`; `begun`, the calls that are completed later; `transport`, for the groups of
    `dure.collectives`.

    Every call checks that all ranks make the same call, and raises MismatchError on all ranks if
    not; the group remains usable. A rank that dies, leaves, or does not arrive within the group's
    timeout raises PeerLostError on all others, which ends the group.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        names: Sequence[int],
        options: Options,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank = rank
        self._size = size
        self._store = store
        self._names = list(names)
        self._sequence = 0  # collectives that torch has asked for
        self._process = os.getpid()  # a forked child must not end its parent's group
        self._group_name = ""
        self._description = ""
        # The store may still contain keys of an earlier group of the same ranks.
        store = PrefixStore(f"group {store.add(f'groups of {rank}', 1)}", store)
        self.hosts, self._host = find_hosts(
            store=store,
            rank=rank,
            names=names,
            timeout=timeout.total_seconds(),
            wanted=options.core,
        )
        self._across = (
            InterHostCollectives(
                store=store, rank=rank, hosts=self.hosts, host=self._host, names=names
            )
            if len(self.hosts) > 1
            else None
        )
        self._ranks: Collectives = self._across or self._host
        self._moves = TorchCollectives(self._ranks, rank, size)
        self._line = CallQueue(f"dure group of {size}", self._host.failed)
        # Replaces the method on this object, so that callers get the fast path directly.
        if self._across is None:
            self.all_reduce = self._host.direct(self._line, self.all_reduce)
        self._mailbox = Mailbox(self._host, NUMBER_OF)  # makes progress while a collective waits
        self._here = next(host for host in self.hosts if rank in host)
        self.begun = BegunCalls(
            host=self._host,
            across=self._across,
            line=self._line,
            moves=self._moves,
            rank=rank,
            size=size,
        )
        self.transport = SharedMemoryTransport(
            host=self._host,
            here=self._here,
            mailbox=self._mailbox,
            across=self._across,
            begun=self.begun,
            moves=self._moves,
            line=self._line,
            sum=self.all_reduce,
        )
        self._closed = False
        group_lifecycle.remember(self)
        torch_patches.patch_torch(SharedMemoryGroup)

    # What torch asks of a group.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "dure"

    # torch uses several names, C++ and Python names.
    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815
    getBackendName = name  # noqa: N815
    _get_backend_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Store:
        return self._store

    @property
    def timeout(self) -> timedelta:
        """Timeout for a rank that is alive but does not arrive."""
        return timedelta(seconds=self._host.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._host.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of torch's collectives, equal on ranks that have made all of them."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks begin with 0."""

    # Reductions.

    def all_reduce(self, tensor: Tensor, op: int = SUM) -> None:
        """Reduce over all ranks, in place and synchronously; tensor: on the CPU, dense or sparse.

        op: a number of `calls.OPERATIONS`. The same as `allreduce`, without torch's layers around
        it.
        """
        if tensor.layout is not torch.strided:
            self._line.now(self._prepared_all_reduce([tensor], op))
            return
        # Skips the checks for several or sparse tensors: a sum of few numbers takes two
        # microseconds.
        dense = reducible(tensor, op)
        check_writable(dense)
        self._line.now(lambda: self._moves.all_reduce(dense, op))

    def allreduce(
        self,
        tensors: Any = (),
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        tensor: Tensor | None = None,
    ) -> CallHandle:
        # Fast path for the common case, a single tensor and a synchronous call. torch's own
        # function calls in this way, without a timeout for the call.
        if (
            not getattr(opts, "asyncOp", True)
            and type(tensors) is list
            and len(tensors) == 1
            and not profiler_enabled()
        ):
            self._sequence += 1
            self.all_reduce(tensors[0], operation_of(opts.reduceOp))
            return FINISHED  # type: ignore[return-value]
        given = (tensors,) if opts is None else (tensors, opts)
        named = {"op": op, "timeout": timeout, "tensor": tensor}
        said = {name: value for name, value in named.items() if value is not None}
        return self._all_reduce_of_any_form(*given, **said)  # type: ignore[no-any-return]

    @torch_call(
        "allreduce_", "all_reduce", "tensors opts", torch_calls.short_all_reduce, tensor_at=0
    )
    def _all_reduce_of_any_form(self, tensors: list[Tensor], opts: Any = None) -> CallHandle:
        op = operation_of(opts.reduceOp) if opts is not None else SUM
        return self._issue(self._prepared_all_reduce(tensors, op), opts, tensors)

    def _prepared_all_reduce(self, tensors: Sequence[Tensor], op: int) -> Callable[[], None]:
        """Return a function that reduces a tensor of each rank, or several tensors of each.

        Several tensors are reduced as if they were tensors of further ranks.
        """
        if len(tensors) == 1 and not sparse.is_sparse(tensors[0]):
            tensor = reducible(tensors[0], op)
            check_writable(tensor)
            return lambda: self._moves.all_reduce(tensor, op)
        some("all_reduce", tensors)
        if any(sparse.is_sparse(tensor) for tensor in tensors):
            sparse.check_sparse(tensors, op)
            return lambda: sparse.all_reduce(tensors, op, self._moves, self._names)
        tensors = [reducible(tensor, op) for tensor in tensors]
        for tensor in tensors:
            check_writable(tensor)
        check_apart(tensors)
        check_alike("all_reduce", tensors)

        def run() -> None:
            # float32 for half precision, which is rounded once, at the end, after the division.
            total = folded(tensors, SUM if op == AVG else op)
            self._moves.all_reduce(total, SUM if op == AVG else op)
            if op == AVG:
                total = total / (self._size * len(tensors))
            for tensor in tensors:
                tensor.copy_(total)

        return run

    @torch_call("allreduce_coalesced_", "all_reduce", "tensors opts")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> CallHandle:
        op = operation_of(opts.reduceOp) if opts is not None else SUM
        some("all_reduce", tensors)
        tensors = [reducible(tensor, op) for tensor in tensors]
        for tensor in tensors:
            check_writable(tensor)
        # Each tensor is reduced with its value before the call, even if tensors overlap.
        apart = len(tensors) == 1 or not any_overlap(tensors)

        def run() -> None:
            values = tensors if apart else [tensor.clone() for tensor in tensors]
            for value in values:
                self._moves.all_reduce(value, op)
            copy_back(values, tensors)

        return self._issue(run, opts, tensors)

    @torch_call("reduce_", "reduce", "tensors opts", torch_calls.short_reduce, tensor_at=0)
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> CallHandle:
        op = operation_of(opts.reduceOp) if opts is not None else SUM
        root = root_of(opts, self._size)
        tensor = reducible(single(tensors), op)
        if root == self._rank:
            check_writable(tensor)
        return self._issue(lambda: self._moves.reduce(tensor, op, root), opts, [tensor])

    def _checked_blocks(
        self, output: Tensor, blocks: Sequence[Tensor], op: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output and the blocks in the form for reduction.

        Raises CallError if they do not fit.
        """
        output = reducible(output, op)
        check_writable(output)
        blocks = [reducible(block, op) for block in blocks]
        if len(blocks) != self._size:
            raise CallError(
                f"reduce_scatter among {self._size} ranks takes as many inputs, not {len(blocks)}"
            )
        own = blocks[self._rank].numel()
        if own != output.numel():
            raise CallError(
                f"reduce_scatter into {output.numel()} elements, but the input for rank "
                f"{self._rank} has {own}"
            )
        if any(block.dtype != output.dtype for block in blocks):
            raise CallError(
                f"reduce_scatter into {output.dtype} of inputs that are not all {output.dtype}"
            )
        return output, blocks

    @torch_call(
        "reduce_scatter_",
        "reduce_scatter",
        "output_tensors input_tensors opts",
        torch_calls.short_reduce_scatter,
        tensor_at=0,
    )
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> CallHandle:
        op = operation_of(opts.reduceOp) if opts is not None else SUM
        output = single(outputs)
        blocks = single(inputs)
        output, blocks = self._checked_blocks(output, blocks, op)
        aside = meets(output, blocks, self._rank)

        def run() -> None:
            target = torch.empty_like(output) if aside else output
            self._moves.reduce_scatter(target, blocks, op)
            copy_back([target], [output])

        return self._issue(run, opts, [output])

    @torch_call("_reduce_scatter_base_", "reduce_scatter", "outputTensor inputTensor opts")
    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> CallHandle:
        return self._reduce_scatters([output], [source], opts)

    @torch_call("reduce_scatter_tensor_coalesced_", "reduce_scatter", "outputs inputs opts")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CallHandle:
        return self._reduce_scatters(outputs, inputs, opts)

    def _reduce_scatters(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> CallHandle:
        op = operation_of(opts.reduceOp) if opts is not None else SUM
        # All pairs are checked before the first call begins: a rank that fails in the middle would
        # end the group.
        check_pairs("reduce_scatter", outputs, inputs)
        for output, source in zip(outputs, inputs, strict=True):
            check_scattered(output, source, self._size)
        pairs = [
            (reducible(output, op), reducible(source, op))
            for output, source in zip(outputs, inputs, strict=True)
        ]
        check_outputs(outputs)
        near = len(pairs) == 1 or any_overlap((*outputs, *inputs))  # faster than all pairs
        aside = near and any(
            self._meets_block(output, source, like=other, may_be_own=other is output)
            for output, _ in pairs
            for other, source in pairs
        )

        def run() -> None:
            targets = [torch.empty_like(output) if aside else output for output, _ in pairs]
            for target, (_, source) in zip(targets, pairs, strict=True):
                self._moves.reduce_scatter(target, self._blocks_of(source.contiguous(), target), op)
            copy_back(targets, [output for output, _ in pairs])

        return self._issue(run, opts, outputs)

    def _blocks_of(self, whole: Tensor, like: Tensor) -> list[Tensor]:
        """Return a contiguous tensor as blocks for each rank, each as long as `like`."""
        return split(whole.view(-1), [like.numel()] * self._size, self._size)

    def _meets_block(self, tensor: Tensor, whole: Tensor, like: Tensor, may_be_own: bool) -> bool:
        """Return whether a tensor shares an element with a block of `whole`, which has N blocks.

        may_be_own: whether the tensor may be identical with this rank's block.
        """
        if not overlap(tensor, whole):
            return False
        if not (may_be_own and whole.is_contiguous()):
            return True
        return meets(tensor, self._blocks_of(whole, like), self._rank)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Copies.

    @torch_call("broadcast_", "broadcast", "tensors opts", torch_calls.short_broadcast, tensor_at=0)
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> CallHandle:
        """Copy the root's tensor with the number `rootTensor` into all tensors of all ranks."""
        root = root_of(opts, self._size)
        some("broadcast", tensors)
        which = opts.rootTensor if opts is not None else 0
        if not 0 <= which < len(tensors):
            raise CallError(f"invalid root tensor {which}: this call has {len(tensors)} tensors")
        for index, tensor in enumerate(tensors):
            check_tensor(tensor)
            if root != self._rank or index != which:
                check_writable(tensor)
        if len(tensors) > 1:
            check_apart(tensors)
            check_alike("broadcast", tensors)

        def run() -> None:
            self._moves.broadcast(tensors[which], root)
            for tensor in tensors:
                if tensor is not tensors[which]:
                    tensor.copy_(tensors[which])

        return self._issue(run, opts, tensors)

    def _check_gathered(self, outputs: Sequence[Tensor], source: Tensor) -> None:
        """Raise CallError unless there is an output for each rank, and this rank's fits."""
        for tensor in (source, *outputs):
            check_tensor(tensor)
        if len(outputs) != self._size:
            raise CallError(
                f"all_gather among {self._size} ranks takes as many outputs, not {len(outputs)}"
            )
        own = outputs[self._rank]
        if own.numel() != source.numel() or any(output.dtype != source.dtype for output in outputs):
            raise CallError(
                f"all_gather of {source.numel()} elements of {source.dtype}, but the output for "
                f"rank {self._rank} has "
                f"{own.numel()} of {own.dtype}"
            )
        check_outputs(outputs)

    @torch_call(
        "allgather_",
        "all_gather",
        "output_tensors input_tensors opts",
        torch_calls.short_all_gather,
        tensor_at=1,
    )
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> CallHandle:
        """Fill each list of outputs with all inputs of rank 0, then all of rank 1, and so on."""
        some("all_gather", inputs)
        if len(outputs) != len(inputs):
            raise CallError(
                f"all_gather of {len(inputs)} tensors takes as many lists of outputs, not "
                f"{len(outputs)}"
            )
        number = len(inputs)
        if any(len(targets) != self._size * number for targets in outputs):
            raise CallError(
                f"all_gather of {number} tensors among {self._size} ranks takes "
                f"{self._size * number} outputs in each list, not "
                f"{', '.join(str(len(targets)) for targets in outputs)}"
            )
        for targets in outputs:
            for index, source in enumerate(inputs):
                self._check_gathered(targets[index::number], source)
        everything = [target for targets in outputs for target in targets]
        check_outputs(everything)
        if number == 1:
            written = meets(inputs[0], everything, self._rank)
        else:
            written = any(meets(source, everything) for source in inputs)

        def run() -> None:
            for index, source in enumerate([x.clone() for x in inputs] if written else inputs):
                self._moves.all_gather_copied(outputs[0][index::number], source)
            for targets in outputs[1:]:
                copy_back(outputs[0], targets)

        return self._issue(run, opts, outputs[0] if number == 1 else outputs)

    @torch_call("allgather_coalesced_", "all_gather", "output_lists input_list opts")
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> CallHandle:
        """Gather several tensors: output_lists[rank][k] is inputs[k] of `rank`."""
        some("all_gather", inputs)
        if any(len(outputs) != len(inputs) for outputs in output_lists):
            raise CallError(
                f"all_gather of {len(inputs)} tensors takes as many outputs for each rank, not "
                f"{', '.join(str(len(outputs)) for outputs in output_lists)}"
            )
        gathers: list[tuple[list[Tensor], Tensor]] = []
        for index, source in enumerate(inputs):
            gathers.append(([outputs[index] for outputs in output_lists], source))
        for targets, source in gathers:
            self._check_gathered(targets, source)
        everything = [tensor for outputs in output_lists for tensor in outputs]
        check_outputs(everything)

        def run() -> None:
            sources = kept([source for _, source in gathers], everything)
            for (targets, _), source in zip(gathers, sources, strict=True):
                self._moves.all_gather_copied(targets, source)

        return self._issue(run, opts, everything)

    @torch_call("_allgather_base_", "all_gather", "output input opts")
    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> CallHandle:
        return self._all_gathers([output], [source], opts)

    @torch_call("allgather_into_tensor_coalesced_", "all_gather", "outputs inputs opts")
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CallHandle:
        return self._all_gathers(outputs, inputs, opts)

    def _all_gathers(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> CallHandle:
        check_pairs("all_gather", outputs, inputs)
        for output, source in zip(outputs, inputs, strict=True):
            check_tensor(output)
            check_tensor(source)
            check_gathered(output, source, self._size)
        check_outputs(outputs)
        near = len(inputs) == 1 or any_overlap((*outputs, *inputs))
        written = near and any(
            self._meets_block(source, output, like=other, may_be_own=other is source)
            for source in inputs
            for output, other in zip(outputs, inputs, strict=True)
        )

        def run() -> None:
            sources = [source.clone() for source in inputs] if written else inputs
            for output, source in zip(outputs, sources, strict=True):
                # A strided output is filled through a contiguous one; `chunk` of nothing is one
                # chunk.
                dense = dense_like(output)
                blocks = (
                    dense.view(-1).chunk(self._size) if dense.numel() else [source] * self._size
                )
                self._moves.all_gather(blocks, source)
                copy_back([dense], [output])

        return self._issue(run, opts, outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @torch_call(
        "gather_",
        "gather",
        "output_tensors input_tensors opts",
        torch_calls.short_gather,
        tensor_at=1,
    )
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> CallHandle:
        source = single(inputs)
        root = root_of(opts, self._size)
        targets = single(outputs) if outputs else []
        for tensor in (source, *targets):
            check_like(tensor, source)
        if root == self._rank and len(targets) != self._size:
            raise CallError(
                f"gather among {self._size} ranks takes as many outputs, not {len(targets)}"
            )
        if root != self._rank and targets:
            raise CallError("gather takes outputs on its root alone, and this rank is not it")
        check_outputs(targets)
        written = meets(source, targets, self._rank)

        def run() -> None:
            self._moves.gather(targets, source.clone() if written else source, root)

        return self._issue(run, opts, targets)

    @torch_call(
        "scatter_",
        "scatter",
        "output_tensors input_tensors opts",
        torch_calls.short_scatter,
        tensor_at=0,
    )
    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> CallHandle:
        output = single(outputs)
        root = root_of(opts, self._size)
        sources = single(inputs) if inputs else []
        for tensor in (output, *sources):
            check_like(tensor, output)
        if root == self._rank and len(sources) != self._size:
            raise CallError(
                f"scatter among {self._size} ranks takes as many inputs, not {len(sources)}"
            )
        if root != self._rank and sources:
            raise CallError("scatter takes inputs on its root alone, and this rank is not it")
        check_writable(output)

        def run() -> None:
            self._moves.scatter(output, kept(sources, [output]), root)

        return self._issue(run, opts, [output])

    @torch_call(
        "alltoall_", "all_to_all", "output_tensors input_tensors opts", torch_calls.short_all_to_all
    )
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> CallHandle:
        if len(outputs) != self._size or len(inputs) != self._size:
            raise CallError(
                f"all_to_all among {self._size} ranks takes as many inputs and outputs, not "
                f"{len(inputs)} and "
                f"{len(outputs)}"
            )
        for tensor in (*outputs, *inputs):
            check_like(tensor, outputs[0])
        check_outputs(outputs)

        def run() -> None:
            dense = [dense_like(output) for output in outputs]
            sources = kept(inputs, outputs)
            self._moves.all_to_all(dense, [source.contiguous() for source in sources])
            copy_back(dense, outputs)

        return self._issue(run, opts, outputs)

    @torch_call(
        "alltoall_base_",
        "all_to_all",
        "output input output_split_sizes input_split_sizes opts",
        torch_calls.short_all_to_all,
    )
    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> CallHandle:
        check_like(output, output)
        check_like(source, output)
        if self._size > 1 and not (output.dim() and source.dim()):
            raise CallError(
                "all_to_all splits tensors along their first dimension, and a single number has "
                "none"
            )
        for name, tensor, splits in (
            ("output", output, output_splits),
            ("input", source, input_splits),
        ):
            rows = tensor.shape[0] if tensor.dim() else 0
            wrong = sum(splits) != rows or len(splits) != self._size or min(splits, default=0) < 0
            if splits and wrong:
                raise CallError(f"all_to_all: {name}s split as {splits} do not make up {rows} rows")
            if not splits and rows % self._size:
                raise CallError(
                    f"all_to_all: {rows} rows of the {name} do not divide by {self._size} ranks"
                )

        check_writable(output)

        def run() -> None:
            dense = dense_like(output)
            (given,) = kept([source], [output])
            self._moves.all_to_all(
                split(dense, output_splits, self._size),
                split(given.contiguous(), input_splits, self._size),
            )
            copy_back([dense], [output])

        return self._issue(run, opts, [output])

    alltoall_base = all_to_all_single

    @torch_call("barrier", "barrier", "opts", torch_calls.short_barrier)
    def barrier(self, opts: Any = None) -> CallHandle:
        return self._issue(self._moves.barrier, opts, [])

    @torch_call("monitored_barrier_", "monitored_barrier", "timeout wait_all_ranks")
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait in a barrier with its own timeout, whose error names the missing ranks.

        wait_all_ranks: whether torch's sentence in the error names all missing ranks, or the first;
        dure's own sentence names all of them in both cases.
        """
        seconds = timeout.total_seconds() if timeout is not None else None
        limit = self._host.timeout if seconds is None else seconds
        try:
            self._line.now(self._within(seconds, self._moves.barrier))
        except PeerLostError as loss:
            raise at_monitored_barrier(
                loss, self._rank, self._names, limit, wait_all_ranks
            ) from loss

    # Messages.

    @torch_call("send", "send", "tensors dstRank tag")
    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> CallHandle:
        tensor = single(tensors)
        check_tensor(tensor)
        check_rank(to, self._size)
        if self._across is not None and to not in self._here:
            return self._across.send(tensor, to, tag)
        return self._mailbox.send(tensor, self._here.index(to), tag)

    @torch_call("recv_", "recv", "tensors srcRank tag")
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> CallHandle:
        tensor = single(tensors)
        check_tensor(tensor)
        check_writable(tensor)
        check_rank(source, self._size)
        if self._across is not None and source not in self._here:
            return self._across.receive(tensor, source, tag)
        return self._mailbox.receive(tensor, self._here.index(source), tag)

    @torch_call("recv_any_source_", "recvAnySource", "tensors tag")
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> CallHandle:
        tensor = single(tensors)
        check_tensor(tensor)
        check_writable(tensor)
        if self._across is not None:
            raise CallError(
                f"recv needs to know its source in a group that spans {len(self.hosts)} hosts: "
                f"pass src"
            )
        return self._mailbox.receive(tensor, ANY, tag)

    # The order of calls, and the end.

    def _issue(self, run: Callable[[], None], opts: Any, tensors: Sequence[Any]) -> CallHandle:
        """Run a call at once if it is synchronous; else put it in the queue."""
        self._sequence += 1
        run = self._within(limit_of(opts), run)
        # Some of torch's options lack this field; a handle is then always correct.
        if not getattr(opts, "asyncOp", True):
            self._line.now(run)
            return FINISHED  # type: ignore[return-value]
        return self._line.later(run, tensors)

    def _within(self, seconds: float | None, run: Callable[[], None]) -> Callable[[], None]:
        """Return the call with its own timeout; `run` itself without a timeout."""
        if seconds is None:
            return run

        def limited() -> None:
            # Inside the group's turn, so that no other collective sees the changed timeout.
            before = self._host.timeout
            self._host.timeout = seconds
            try:
                run()
            finally:
                self._host.timeout = before

        return limited

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: calls run in the order of their issue anyway."""

    def _end_coalescing(self, device: torch.device) -> CallHandle:
        return self._line.later(lambda: None, [])

    def abort(self) -> None:
        """End the group for all ranks at once.

        Calls in progress raise PeerLostError on all ranks.
        """
        if not self._closed:
            self._host.end("aborted the group")

    def shutdown(self, timeout: timedelta | None = None) -> None:
        """Leave the group: called by destroy_process_group.

        Queued calls end first. If they do not within `timeout`, the group is aborted.
        """
        if self._closed or os.getpid() != self._process:
            return
        # The order: refuse new calls; end queued calls; notify peers; and only then release memory
        # that a call, here or on a peer, might use.
        self._closed = True
        seconds = timeout.total_seconds() if timeout is not None else self._host.timeout
        ended = self._line.close(seconds)
        if not self._line.turn.acquire(blocking=False):  # never released: no call begins any more
            self._host.end("left the group with calls under way")
            ended = self._line.turn.acquire(timeout=1) and self._line.close(1)
        self._host.leave()
        if self._across is not None:
            self._across.close()
        group_lifecycle.keep(self.begun.close())
        # Before memory is released: references to this group's calls raise from now on.
        for name in _OF_RANKS:
            setattr(self._ranks, name, _destroyed)
        self.all_reduce = self.transport.sum = _destroyed
        # If a thread still uses the host, a few hundred bytes stay allocated.
        if self._mailbox.close() and ended:
            self._host.close()

    def leave(self) -> None:
        """Notify the other ranks, once, that this process makes no more calls."""
        if not self._closed and os.getpid() == self._process:
            self._host.leave()

    def abandon(self) -> None:
        """Detach from the group in a forked child: the group and its threads are the parent's."""
        self._line.abandon()
        if self._across is not None:
            self._across.abandon()


_OF_RANKS = (
    "all_reduce",
    "reduce_scatter",
    "exchange",
    "prepare_reduce_scatter",
    "prepare_all_reduce",
    "begin_reduce_scatter",
    "begin_all_reduce",
    "end_call",
)
"""Calls that are disabled once a group is destroyed, because the ranks' memory may be gone."""


def _destroyed(*_: Any) -> None:
    raise RuntimeError("this process group was destroyed: create a new one")

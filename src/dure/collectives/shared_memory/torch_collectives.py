"""torch's collectives in terms of the ranks' operations: reductions, and exchanges of parts.

Tensors have been checked before; this code runs in the group's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dure.collectives.shared_memory.arguments import copy_back, dense_like, offers, unequal
from dure.collectives.shared_memory.calls import (
    ALL_GATHER,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    NUMBER_OF,
    REDUCE_SCATTER,
    SCATTER,
    CollectiveCall,
)
from dure.collectives.shared_memory.host import ByteOffer, Collectives, PeerRead


def in_place(tensor: Tensor, call: Callable[[Tensor], None]) -> None:
    """Apply `call`, which takes contiguous tensors, to any tensor in place."""
    if tensor.is_contiguous():
        call(tensor)
    else:
        dense = tensor.contiguous()
        call(dense)
        tensor.copy_(dense)


class TorchCollectives:
    """Collectives of a rank. ranks: the ranks of a single host, or of several."""

    def __init__(self, ranks: Collectives, rank: int, size: int) -> None:
        self._ranks = ranks
        self._rank = rank
        self._size = size

    def all_reduce(self, tensor: Tensor, op: int) -> None:
        in_place(tensor, lambda dense: self._ranks.all_reduce(dense, op))

    def reduce(self, tensor: Tensor, op: int, root: int) -> None:
        """Reduce to the root; other ranks' tensors stay unchanged."""
        # Only the root's tensor is written to, so the others need no copy back.
        dense = tensor.contiguous()
        self._ranks.all_reduce(dense, op, root)
        if root == self._rank and dense is not tensor:
            tensor.copy_(dense)

    def reduce_scatter(self, output: Tensor, blocks: Sequence[Tensor], op: int) -> None:
        """Write the reduction of all ranks' blocks[rank] to `output`."""
        dense = [block.contiguous() for block in blocks]
        sizes = [block.numel() for block in dense]
        call = CollectiveCall(
            kind=REDUCE_SCATTER,
            dtype=NUMBER_OF[output.dtype],
            op=op,
            count=sum(sizes),
            extra=unequal(sizes),
        )
        out = dense_like(output)
        self._ranks.reduce_scatter(dense, out, op, call)
        copy_back([out], [output])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        in_place(tensor, lambda dense: self._broadcast(dense, root))

    def _broadcast(self, dense: Tensor, root: int) -> None:
        call = CollectiveCall(
            kind=BROADCAST, dtype=NUMBER_OF[dense.dtype], root=root, count=dense.numel()
        )
        if root == self._rank:
            self._ranks.exchange(call, [dense], {})
        else:
            self._ranks.exchange(call, [], {root: PeerRead(0, dense)})

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor) -> None:
        """Gather every rank's tensor on all ranks.

        outputs[i]: filled with rank i's tensor; dense. The sizes may differ between ranks, but are
        known to all.
        """
        sizes = [output.numel() for output in outputs]
        extra = unequal(sizes)
        call = CollectiveCall(
            kind=ALL_GATHER,
            dtype=NUMBER_OF[source.dtype],
            # The sum for unequal parts, since the count has to agree on all ranks.
            count=sum(sizes) if extra else source.numel(),
            extra=extra,
        )
        dense = source.contiguous()
        self._ranks.exchange(call, [dense], self._pulls(outputs))
        # A source that is its own block in the output needs no copy.
        own = outputs[self._rank]
        if own.data_ptr() != dense.data_ptr():
            own.view(-1).copy_(dense.view(-1))

    def all_gather_copied(self, targets: Sequence[Tensor], source: Tensor) -> None:
        """Do `all_gather` into tensors of any layout."""
        dense = [dense_like(target) for target in targets]
        self.all_gather(dense, source)
        copy_back(dense, targets)

    def gather(self, targets: Sequence[Tensor], source: Tensor, root: int) -> None:
        """Gather to the root. targets: a tensor for each rank on the root, empty elsewhere."""
        dense = [dense_like(target) for target in targets]
        # Every rank declares its bytes for the root; the root also declares the bytes it expects
        # from each. The root's own part is in both, so that its own sizes are compared as well.
        deals = [
            ByteOffer(
                nbytes=source.nbytes if rank == root else 0,
                wanted=dense[rank].nbytes if dense else 0,
            )
            for rank in range(self._size)
        ]
        self._exchange(
            kind=GATHER,
            root=root,
            dtype=source.dtype,
            parts=[source.contiguous()],
            pulls=self._pulls(dense),
            deals=deals,
        )
        if dense:
            dense[self._rank].copy_(source)
        copy_back(dense, targets)

    def scatter(self, output: Tensor, sources: Sequence[Tensor], root: int) -> None:
        """Scatter from the root. sources: a tensor for each rank on the root, empty elsewhere."""
        parts = [source.contiguous() for source in sources]
        dense = dense_like(output)
        # Only the root offers: a range of its concatenated parts to each rank.
        given = offers(parts) if parts else [(0, 0)] * self._size
        deals = [
            ByteOffer(offset, nbytes, dense.nbytes if rank == root else 0)
            for rank, (offset, nbytes) in enumerate(given)
        ]
        pulls = {} if root == self._rank else {root: PeerRead(0, dense)}
        self._exchange(
            kind=SCATTER, root=root, dtype=output.dtype, parts=parts, pulls=pulls, deals=deals
        )
        if parts:
            dense.copy_(parts[self._rank])
        copy_back([dense], [output])

    def all_to_all(self, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Send part j to rank j, and receive outputs[i] from rank i. All are contiguous."""
        deals = [
            ByteOffer(offset, nbytes, output.nbytes)
            for (offset, nbytes), output in zip(offers(parts), outputs, strict=True)
        ]
        self._exchange(
            kind=ALL_TO_ALL,
            root=-1,
            dtype=outputs[0].dtype,
            parts=parts,
            pulls=self._pulls(outputs),
            deals=deals,
        )
        outputs[self._rank].view(-1).copy_(parts[self._rank].view(-1))

    def barrier(self) -> None:
        self._ranks.exchange(CollectiveCall(BARRIER), [], {})

    def _pulls(self, outputs: Sequence[Tensor]) -> dict[int, PeerRead]:
        """Return the pulls from each of the other ranks."""
        return {
            rank: PeerRead(0, output) for rank, output in enumerate(outputs) if rank != self._rank
        }

    def _exchange(
        self,
        kind: int,
        root: int,
        dtype: torch.dtype,
        parts: Sequence[Tensor],
        pulls: dict[int, PeerRead],
        deals: Sequence[ByteOffer],
    ) -> None:
        """Exchange with sizes that each rank knows only for itself.

        A rank's part for itself is excluded.
        """
        count = sum(part.numel() for part in parts)
        call = CollectiveCall(kind=kind, dtype=NUMBER_OF[dtype], root=root, count=count)
        self._ranks.exchange(call, parts, pulls, deals)

"""What a forward pass keeps for backward, in files.

    forward    a tensor that autograd keeps is copied into a file, and its pages are let go
    backward   it is read from there; the tensors that were kept before it are read ahead

A tensor that several operations keep, or keep views of, has one copy. Parameters are not copied:
they stay where they are. Files are used again from step to step.

On a GPU the files are the CPU's memory.

What travels: the activations, once there and once back, as far as memory does not hold them.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity"; Rhu et al. 2016, "vDNN".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from dure.memory.mapped import same_memory
from dure.memory.offload.store import Store

AHEAD = 64 << 20
"""Bytes that are read ahead in backward."""


class _Kept:
    """What was kept of one storage. place: its bytes, elsewhere. asked: they are read ahead."""

    __slots__ = ("__weakref__", "activations", "asked", "number", "place")

    def __init__(self, activations: OffloadedActivations, number: int, place: Tensor) -> None:
        self.activations = activations
        self.number = number
        self.place = place
        self.asked = False

    def __del__(self) -> None:
        # Autograd drops what it has kept as soon as it has used it.
        self.activations.dropped(self)


class _View:
    """What autograd holds in place of a tensor: where that lies in what was kept."""

    __slots__ = ("dtype", "kept", "offset", "size", "stride")

    def __init__(self, kept: _Kept, tensor: Tensor, offset: int) -> None:
        self.kept = kept
        self.dtype = tensor.dtype
        self.offset = offset
        self.size = tensor.size()
        self.stride = tensor.stride()


class OffloadedActivations:
    """Keeps what autograd keeps of a model that is computed on `device`.

    stay: gives the tensors that are there in any case, such as parameters.
    """

    def __init__(
        self, store: Store, device: torch.device, stay: Callable[[], Iterable[Tensor]]
    ) -> None:
        self.store = store
        self.device = device
        self.stay = stay
        self._stay: set[int] = set()
        # By storage, version and place in it: what is written in place is another tensor after it.
        self._known: dict[tuple[int, ...], tuple[StorageWeakRef, weakref.ref[_Kept]]] = {}
        self._kept: dict[int, weakref.ref[_Kept]] = {}
        self._next = 0
        self._free: dict[int, list[Tensor]] = {}

    @contextmanager
    def saving(self, *given: Any) -> Iterator[None]:
        """Around a forward pass: what autograd keeps inside goes elsewhere.

        given: inputs and targets, in any structure. Somebody has them anyway: they stay.
        """
        tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        self._stay = set(map(_address, (*self.stay(), *tensors)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._known.clear()

    def pack(self, tensor: Tensor) -> Any:
        """What autograd is to hold in place of a tensor."""
        if not self._moves(tensor):
            return tensor
        storage = tensor.untyped_storage()
        # A small part of a storage is copied alone: the rest may be somebody's whole data.
        if 2 * tensor.nbytes < storage.nbytes():
            apart = tensor.detach().contiguous()
            return _View(self._copy(apart), apart, 0)
        key = (storage._cdata, tensor._version)
        found = self._known.get(key)
        kept = None if found is None else found[1]()
        if kept is None:
            kept = self._copy(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            # The weak reference keeps the storage's number from becoming another one's.
            self._known[key] = (_weak(storage), weakref.ref(kept))
        return _View(kept, tensor, int(tensor.storage_offset()))

    def unpack(self, held: Any) -> Tensor:
        """The inverse of `pack`, in backward."""
        if not isinstance(held, _View):
            tensor: Tensor = held
            return tensor
        kept = held.kept
        self._read_before(kept.number)
        own = self.store.fetched(kept.place)
        if own is kept.place:
            # What backward makes of it may be a view: the file is free when no tensor lies in it.
            own = same_memory(kept.place, kept)
        return torch.empty(0, dtype=held.dtype, device=self.device).set_(
            own.untyped_storage(), held.offset, held.size, held.stride
        )

    def dropped(self, kept: _Kept) -> None:
        """Nobody needs it any more: its place is free."""
        del self._kept[kept.number]
        self._free.setdefault(kept.place.nbytes, []).append(kept.place)

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.device == self.device
            and tensor.layout is torch.strided
            and tensor.nbytes >= self.store.least
            and not (tensor.is_conj() or tensor.is_neg())
            and _address(tensor) not in self._stay
        )

    def _copy(self, tensor: Tensor) -> _Kept:
        """Copies the elements of a tensor without gaps."""
        free = self._free.get(tensor.nbytes)
        place = free.pop() if free else self.store.empty([tensor.nbytes], torch.uint8)
        with torch.no_grad():
            place.copy_(tensor.view(-1).view(torch.uint8))
        kept = _Kept(self, self._next, place)
        self._kept[self._next] = weakref.ref(kept)
        self._next += 1
        self.store.behind([place])
        return kept

    def _read_before(self, number: int) -> None:
        """What was kept before this is needed soon."""
        nbytes = 0
        lowest = next(iter(self._kept))
        while nbytes < AHEAD and number > lowest:
            number -= 1
            reference = self._kept.get(number)
            kept = None if reference is None else reference()
            if kept is None:
                continue
            nbytes += kept.place.nbytes
            if not kept.asked:
                kept.asked = True
                self.store.ahead([kept.place])


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0

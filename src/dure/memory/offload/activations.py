"""Offloading of activations, which forward saves for backward, to files.

    forward    a tensor that autograd saves is copied to a file, and its pages are released
    backward   it is read from the file; tensors that were saved before it are read ahead

A tensor that several operations save, or save views of, is copied once. Parameters are not copied:
they stay in place. Files are reused from step to step.

For a GPU, CPU memory takes the role of the files.

Cost: the activations are written once and read once, as far as they do not fit into memory.

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

from dure.memory.mapped import bytes_with_owner
from dure.memory.offload.store import OffloadStore

AHEAD = 64 << 20
"""Bytes that are read ahead in backward."""


class _Kept:
    """Saved bytes of a storage. place: the offloaded bytes. asked: whether they are read ahead."""

    __slots__ = ("__weakref__", "activations", "asked", "number", "place")

    def __init__(self, activations: OffloadedActivations, number: int, place: Tensor) -> None:
        self.activations = activations
        self.number = number
        self.place = place
        self.asked = False

    def __del__(self) -> None:
        # Autograd drops a saved object as soon as it has used it.
        self.activations.dropped(self)


class _View:
    """Placeholder that autograd saves instead of a tensor: a view of saved bytes."""

    __slots__ = ("dtype", "kept", "offset", "size", "stride")

    def __init__(self, kept: _Kept, tensor: Tensor, offset: int) -> None:
        self.kept = kept
        self.dtype = tensor.dtype
        self.offset = offset
        self.size = tensor.size()
        self.stride = tensor.stride()


class OffloadedActivations:
    """Offloading of the tensors that autograd saves for a model on `device`.

    stay: returns the tensors that are in memory in any case, such as parameters.
    """

    def __init__(
        self, store: OffloadStore, device: torch.device, stay: Callable[[], Iterable[Tensor]]
    ) -> None:
        self.store = store
        self.device = device
        self.stay = stay
        self._stay: set[int] = set()
        # By storage and version: a tensor that is changed in place counts as another tensor.
        self._known: dict[tuple[int, ...], tuple[StorageWeakRef, weakref.ref[_Kept]]] = {}
        self._kept: dict[int, weakref.ref[_Kept]] = {}
        self._next = 0
        self._free: dict[int, list[Tensor]] = {}

    @contextmanager
    def saving(self, *given: Any) -> Iterator[None]:
        """Context manager for a forward pass, in which saved tensors are offloaded.

        given: inputs and targets, in any structure. They stay in place, because the caller has them
        anyway.
        """
        tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        self._stay = set(map(_address, (*self.stay(), *tensors)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._known.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves in place of a tensor."""
        if not self._moves(tensor):
            return tensor
        storage = tensor.untyped_storage()
        # A small part of a storage is copied alone: the rest may be a whole dataset.
        if 2 * tensor.nbytes < storage.nbytes():
            apart = tensor.detach().contiguous()
            return _View(self._copy(apart), apart, 0)
        key = (storage._cdata, tensor._version)
        found = self._known.get(key)
        kept = None if found is None else found[1]()
        if kept is None:
            kept = self._copy(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            # The weak reference prevents reuse of the storage's address as a key.
            self._known[key] = (_weak(storage), weakref.ref(kept))
        return _View(kept, tensor, int(tensor.storage_offset()))

    def unpack(self, held: Any) -> Tensor:
        """Return the tensor of an object that `pack` returned, in backward."""
        if not isinstance(held, _View):
            tensor: Tensor = held
            return tensor
        kept = held.kept
        self._read_before(kept.number)
        own = self.store.fetched(kept.place)
        if own is kept.place:
            # Backward may create views of the result: the file is free when no tensor uses it.
            own = bytes_with_owner(kept.place, kept)
        return torch.empty(0, dtype=held.dtype, device=self.device).set_(
            own.untyped_storage(), held.offset, held.size, held.stride
        )

    def dropped(self, kept: _Kept) -> None:
        """Free the place of saved bytes that are no longer needed."""
        del self._kept[kept.number]
        # by exact size: a step saves the same tensors in every pass
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
        """Copy the elements of a tensor without gaps."""
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
        """Read ahead the tensors saved before number `number`, which backward needs next."""
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

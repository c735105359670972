"""Peak memory of tensors during a computation.

    with LiveStorages() as live:    every storage that is created inside counts from its first
        step()                      tensor to its last
    live.peak                       bytes

Only results of operations are seen. Temporary memory inside a kernel is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts the bytes of storages that are alive.

    known: existing tensors, which are not counted. bytes: present bytes. peak: largest bytes so
    far.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._note(tensor, counted=False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._note(leaf, counted=True)
        return result

    def _note(self, tensor: Tensor, counted: bool) -> None:
        # The storage object lives as long as its memory, so a weak reference shows its release.
        storage = tensor.untyped_storage()
        if id(storage) in self._storages:
            return
        size = storage.nbytes() if counted else 0
        gone = partial(self._gone, id(storage), size)
        self._storages[id(storage)] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self.bytes -= size

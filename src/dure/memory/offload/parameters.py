"""Offloading of parameters to mapped files: read before a module runs, released after it.

    forward    before a module:   the parameters of the next module are read
               after it:          its own may leave memory
    backward   when the gradient of a parameter is complete: it may leave memory, and the parameters
               that backward needs next are read

The order of modules is learned in the first forward pass; backward uses the reverse order. All
reads and releases are advice to the system: a model that calls its modules in another order
computes the same results, more slowly.

Only elements that an update changes are written (`dure.memory.offload.optimizer`).

Source: Rajbhandari et al. 2021, "ZeRO-Infinity".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dure.machine.compiler import excluded_from_compilation
from dure.memory.mapped import is_on_disk, release_pages
from dure.memory.offload.store import MappedFileStore


def move_to_files(model: nn.Module, files: MappedFileStore) -> None:
    """Move the model's parameters and buffers in memory to files; the tensor objects stay the same.

    Tensors that share memory continue to share it.
    """
    moved: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not _can_move(tensor, files.least):
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in moved:
            elements = torch.empty(0, dtype=torch.uint8).set_(storage)
            moved[address] = files.disk.place(elements)
        with torch.no_grad():
            own = torch.empty(0, dtype=tensor.dtype)
            own.set_(
                moved[address].untyped_storage(),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
            tensor.data = own


def _can_move(tensor: Tensor, least: int) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() >= least
        and not is_on_disk(tensor)
    )


class OffloadedParameters:
    """Hooks on the modules of a model whose parameters are mapped."""

    def __init__(self, model: nn.Module, files: MappedFileStore) -> None:
        self.files = files
        self._own = {
            module: own
            for module in model.modules()
            if (own := _mapped(module.parameters(recurse=False)))
        }
        self._order: list[nn.Module] = []
        """Modules in the order of the first forward pass."""
        self._place: dict[nn.Module, int] = {}
        self._learned = False
        for module in self._own:
            module.register_forward_pre_hook(excluded_from_compilation(self._before))
            module.register_forward_hook(excluded_from_compilation(self._after), always_call=True)
        model.register_forward_hook(excluded_from_compilation(self._ends))
        self._user = {id(one): module for module, own in self._own.items() for one in own}
        for own in self._own.values():
            for parameter in own:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._is_done)  # type: ignore[no-untyped-call]

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if not self._learned:
            self._place.setdefault(module, len(self._order))
            if self._place[module] == len(self._order):
                self._order.append(module)
            return
        self._read(self._place.get(module, len(self._order)) + 1)

    def _after(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        release_pages(self._own[module])

    def _ends(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._learned = True
        # Backward begins where forward has ended.
        if torch.is_grad_enabled():
            self._read(len(self._order) - 1)

    def _is_done(self, parameter: Tensor) -> None:
        """Release a parameter when its gradient is complete, which is its last use in backward."""
        release_pages([parameter])
        self._read(self._place.get(self._user[id(parameter)], 0) - 1)

    def _read(self, place: int) -> None:
        if 0 <= place < len(self._order):
            self.files.ahead(self._own[self._order[place]])


def _mapped(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if is_on_disk(parameter)]

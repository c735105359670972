"""Backend of a group for a device: the group itself, for the CPU.

torch composes a group of backends for each kind of device, and gets them by `_get_backend`, for
example in `async_save` and in the search for the default device. A backend cannot be written in
Python, but a whole group can.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch


@dataclass(frozen=True)
class BackendOptions:
    """Counterpart of torch's `Backend.Options`."""

    backend: str
    _timeout: timedelta


class DeviceBackend:
    """Base of a group that is its own backend for the CPU, without a backend for other devices."""

    timeout: timedelta
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend for a device. Raises RuntimeError if there is none, as torch does."""
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend dure supports only the CPU, not {device}")
        return self

    @property
    def options(self) -> BackendOptions:
        return BackendOptions(backend="dure", _timeout=self.timeout)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Do nothing: `shutdown` waits for queued calls."""

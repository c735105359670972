"""What torch asks of a group's backend for a device: here the group is its own, for the CPU.

torch has a group made of backends, one for each kind of device, and asks it for them by
`_get_backend`, as `async_save` and whatever looks for the default device do. A backend cannot be
written in Python, but a whole group can.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch


@dataclass(frozen=True)
class BackendOptions:
    """As `Backend.Options` of torch."""

    backend: str
    _timeout: timedelta


class DeviceBackend:
    """A group that is its own backend for the CPU, and has none for other devices."""

    timeout: timedelta
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """The backend for a device. Raises RuntimeError where there is none, as torch does."""
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend dure is for the CPU, and not for {device}")
        return self

    @property
    def options(self) -> BackendOptions:
        return BackendOptions(backend="dure", _timeout=self.timeout)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Nothing to do: `shutdown` lets calls in line end."""

"""A message to or from another host, which gloo carries; a thread waits for it, as gloo cannot be asked."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dure.collectives.shared_memory.work import Work

if TYPE_CHECKING:
    from dure.collectives.shared_memory.across import Across


class Parcel(Work):
    """`work` on its way to or from `peer`. into: where what arrives goes from `dense`, if it has another layout."""

    def __init__(
        self, across: Across, work: Any, dense: Tensor, peer: int, name: str, into: Tensor | None = None
    ) -> None:
        super().__init__([dense if into is None else into])

        def carry() -> None:
            try:
                work.wait(timedelta(seconds=across.timeout))
            except RuntimeError as error:
                silent = "imed out" in str(error)
                reason = f"did not come within {across.timeout:g} s" if silent else "closed its connection"
                self.finish(across.lost(peer, name, reason))
                return
            if into is not None and into is not dense:
                with torch.inference_mode():
                    into.copy_(dense)
            self.finish()

        threading.Thread(target=carry, name="dure parcel", daemon=True).start()

"""Recognition of trainers: which library's a trainer is, without importing the other libraries."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from dure.trainers.integration import TrainerIntegration

_LIBRARIES = {
    "transformers": ("Trainer", "dure.trainers.hugging_face_client"),
    "lightning": ("Trainer", "dure.trainers.lightning_client"),
    "pytorch_lightning": ("Trainer", "dure.trainers.lightning_client"),
}
"""Class of each library's trainer, and the module of dure that knows it."""


def integration_of(trainer: Any, **more: Any) -> TrainerIntegration:
    """Return the integration of a trainer; `more` are arguments of its library's.

    Raises ValueError for another object.
    """
    for library, (name, module) in _LIBRARIES.items():
        # A trainer of a library that was not imported cannot exist.
        loaded = sys.modules.get(library)
        kind = None if loaded is None else getattr(loaded, name, None)
        if kind is not None and isinstance(trainer, kind):
            found: TrainerIntegration = importlib.import_module(module).integrate(trainer, **more)
            return found
    raise ValueError(
        f"a {type(trainer).__name__} is no trainer that dure knows: give a transformers.Trainer, a "
        "trainer of trl, or a lightning.Trainer; loops of your own use dure.Client"
    )

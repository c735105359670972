"""Natural owners of examples, by key: valid keys, and the names of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy
from torch import Tensor

KINDS = (str, int, bool, float, bytes, tuple)
"""Valid types of a key. A tuple has texts and whole numbers, such as (hospital, ward)."""


def keys_of(keys: Any) -> list[Any]:
    """Return a key for each example, as Python values; equal keys are the same client.

    keys: a list, an array, a column or a tensor of a single dimension. Raises ValueError for other
    shapes.
    """
    shape = getattr(keys, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ValueError(
            f"keys have the shape {tuple(shape)}: give one key per example, of shape (n,)"
        )
    if isinstance(keys, (str, bytes, AbstractSet, Mapping)):
        raise ValueError(f"keys are a {type(keys).__name__}: give a list with one key per example")
    found: list[Any] = keys.tolist() if hasattr(keys, "tolist") else list(keys)
    # NumPy and torch numbers in a list become Python's: a tensor equals only itself.
    if any(issubclass(kind, (Tensor, numpy.generic)) for kind in set(map(type, found))):
        found = [_own(key) for key in found]
    return found


def owners_of(keys: Sequence[Any]) -> list[Any]:
    """Return the keys of the natural clients in order: client k has the k-th.

    Raises ValueError for keys that name no owner (None, NaN), that have different types, or that
    are neither texts nor numbers.
    """
    _check(keys)
    return sorted(set(keys))


def name_of(key: Any) -> str:
    """Return the name of the client with this key."""
    return key.decode(errors="backslashreplace") if isinstance(key, bytes) else str(key)


def client_label(client: int, names: Sequence[str] | None) -> str:
    """Return a client in words: client 5 ("porto"), or without names client 5."""
    return f"client {client}" if names is None else f'client {client} ("{names[client]}")'


def _own(key: Any) -> Any:
    """Return a Python number or text for a NumPy or torch value."""
    one = isinstance(key, numpy.generic) or (isinstance(key, Tensor) and key.numel() == 1)
    return key.item() if one else key


def _check(keys: Sequence[Any]) -> None:
    types = set(map(type, keys))
    for number, key in enumerate(keys if not types <= {str, int} else ()):
        if key is None or (isinstance(key, float) and not math.isfinite(key)):
            raise ValueError(
                f"example {number} has the key {key}, which is not a valid key: give the example "
                "a key, or leave it out"
            )
    if len(types) > 1:
        kinds = ", ".join(sorted(kind.__name__ for kind in types))
        raise ValueError(
            f"keys have different types ({kinds}), so one client may have two keys: convert all "
            "of them to str"
        )
    if types == {tuple}:
        # Tuples of the same form, so that they can be sorted.
        forms = {tuple(map(type, key)) for key in keys}
        plain = len(forms) == 1 and all(kind in (str, int) for form in forms for kind in form)
    else:
        plain = isinstance(keys[0], KINDS)
    if not plain:
        raise ValueError(
            f"keys have to be texts or numbers, not {keys[0]!r}: convert all of them to str"
        )

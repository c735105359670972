"""torch's compiler, kept unloaded where nobody compiles.

Some of torch's functions import torch._dynamo at their first call, only to tell it to stay away: as long again as
importing torch. A simulation of small clients is done by then. `left_out` makes such a call while that notice is filled
in already; where the compiler is loaded, it changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NOTICE = "__dynamo_disable"


@contextmanager
def left_out(function: Callable[..., Any]) -> Iterator[None]:
    """`function`, one of torch's that the compiler is to stay away from, as it is while the compiler is not loaded."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None or "torch._dynamo" in sys.modules or hasattr(inner, _NOTICE):
        yield
        return
    setattr(inner, _NOTICE, inner)
    try:
        yield
    finally:
        delattr(inner, _NOTICE)

"""Setting of the parts to offload, such as `optimizer,activations`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PARTS = ("optimizer", "parameters", "gradients", "activations")
"""Parts that can be offloaded, in the order of the setting's text."""


@dataclass(frozen=True)
class Offload:
    """Names of parts to offload; none by default.

    optimizer: the optimizer's state, which only an update needs. parameters: of the model, needed
    while they are used. gradients: needed from their backward pass to the update. activations:
    tensors that a forward pass saves for backward.
    """

    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"{part!r} cannot be offloaded: choose {_or(PARTS)}")
        ordered = tuple(part for part in PARTS if part in self.parts)
        object.__setattr__(self, "parts", ordered)

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def __str__(self) -> str:
        return "+".join(self.parts) if self.parts else "none"

    def check(self, able: Iterable[str], who: str, why: str = "") -> None:
        """Check that a system can offload all parts. Raises ValueError otherwise.

        able: parts that the system can offload. who: the system's name. why: the reason, as the end
        of a sentence.
        """
        able = list(able)
        for part in self.parts:
            if part not in able:
                raise ValueError(
                    f"{who} cannot offload {part}{f', {why}' if why else ''}: choose {_or(able)}"
                )


def parse_offload(text: str) -> Offload:
    """Parse the text of `str`, or with commas: "optimizer,activations", "none".

    Raises ValueError for an unknown part.
    """
    words = [word.strip() for word in text.replace(",", "+").split("+")]
    return Offload() if words == ["none"] else Offload(tuple(words))


def _or(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last

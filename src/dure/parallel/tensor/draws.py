"""Random draws of a rank's own: dropout inside a divided region differs between ranks.

All ranks have seeded torch's generator alike, and outside of such regions they draw alike. On the
way in every rank draws one number from it, the same on all ranks, and goes on with a generator
seeded by (that number, its rank); on the way out the common generator goes on after that number.
Nothing has to be remembered between steps: a run resumes, and a checkpointed layer is computed once
more, with the same bits, if the common generator's state is what it was.

Source: Shoeybi et al. 2019, "Megatron-LM", appendix B.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.randomness.seeds import derive


class Draws:
    """Whose draws are under way in a model's layers: those of all ranks, or this rank's own."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._common: list[Tensor] | None = None
        self._own = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Draws:
        # One object for all layers of a model, and for its copies: regions begin in one layer and
        # end in another.
        return self

    def _state(self) -> list[Tensor]:
        states = [torch.default_generator.get_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def enter(self) -> None:
        """This rank's own from here; where they are so already, as after another Column, nothing.

        A region that was entered before and never left is forgotten: a checkpointed layer is
        computed once more only as far as it is needed, and then the generator is put back.
        """
        if self.group.size == 1 or (self.inside and self._draws_alone()):
            return
        # All ranks draw this number, so that the common generator goes on alike afterwards.
        number = int(torch.randint(1 << 62, (), generator=torch.default_generator))
        # after the number was drawn: from here all go on together when they leave
        self._common = self._state()
        own = derive(number, "tensor parallel", self.group.rank)
        self._own = own
        torch.default_generator.manual_seed(own)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(own)

    def _draws_alone(self) -> bool:
        """Whether the generator is still the one that was seeded here."""
        return torch.default_generator.initial_seed() == self._own

    def leave(self) -> None:
        """Those of all ranks from here."""
        # Nothing was entered: in evaluation, or on a single rank.
        if self._common is None:
            return
        torch.default_generator.set_state(self._common[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self._common[1], self.device)
        self._common = None

    @property
    def inside(self) -> bool:
        """Whether this rank draws for itself."""
        return self._common is not None

    def forget(self) -> None:
        """Nothing is under way."""
        self._common = None


def mark_on_shards(module: nn.Module) -> None:
    """Notes that a module computes on shards: every rank draws for itself in its operations.

    A program that is made of its operations does not call it, and has only this mark.
    """
    module._on_shards = True  # type: ignore[assignment]


def modules_on_shards(model: nn.Module) -> set[str]:
    """All names of the modules in which every rank draws for itself."""
    return {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if getattr(module, "_on_shards", False)
    }


@contextmanager
def own_draws(group: Group, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, this rank draws for itself; after it, all ranks draw alike again.

    All ranks enter it together, with the same state of torch's generator.
    """
    draws = Draws(group, torch.device(device))
    draws.enter()
    try:
        yield
    finally:
        draws.leave()

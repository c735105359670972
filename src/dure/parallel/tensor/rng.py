"""Random draws per rank: dropout inside a divided region differs between ranks.

All ranks seed torch's generator equally, and outside divided regions they draw equal numbers. At
the entry of a region every rank draws a number from the common generator, equal on all ranks, and
continues with a generator seeded by (that number, its rank). At the exit the common generator
continues after that number. No state is stored between steps. So a resumed run, or the
recomputation of a checkpointed layer, has equal bits if the common generator's state is equal.

Source: Shoeybi et al. 2019, "Megatron-LM", appendix B.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.machine.devices import DeviceGenerator, is_cpu
from dure.randomness.seeds import derive


class RngTracker:
    """Switch between draws common to all ranks and this rank's own draws in a model."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._common: list[Tensor] | None = None
        self._own = 0

    def __deepcopy__(self, memo: dict[int, object]) -> RngTracker:
        # All layers of a model and of its copies share the object: regions begin in one layer and
        # end in another.
        return self

    def _state(self) -> list[Tensor]:
        states = [torch.default_generator.get_state()]
        if not is_cpu(self.device):
            states.append(DeviceGenerator(self.device).get_state())
        return states

    def enter(self) -> None:
        """Switch to this rank's own draws; do nothing if they are active, as after another Column.

        A region that was entered before and never left is dropped: a checkpointed layer is
        recomputed only as far as needed, and then its generator is restored.
        """
        if self.group.size == 1 or (self.inside and self._draws_alone()):
            return
        # All ranks draw this number, so that their common generators stay equal.
        number = int(torch.randint(1 << 62, (), generator=torch.default_generator))
        # saved after the number was drawn: `leave` continues from here on all ranks
        self._common = self._state()
        own = derive(number, "tensor parallel", self.group.rank)
        self._own = own
        torch.default_generator.manual_seed(own)
        if not is_cpu(self.device):
            DeviceGenerator(self.device).manual_seed(own)

    def _draws_alone(self) -> bool:
        """Return whether the generator still has the seed of the latest `enter`."""
        return torch.default_generator.initial_seed() == self._own

    def leave(self) -> None:
        """Switch to the draws common to all ranks."""
        # No region was entered: in evaluation, or on a single rank.
        if self._common is None:
            return
        torch.default_generator.set_state(self._common[0])
        if not is_cpu(self.device):
            DeviceGenerator(self.device).set_state(self._common[1])
        self._common = None

    @property
    def inside(self) -> bool:
        """Whether this rank's own draws are active."""
        return self._common is not None

    def forget(self) -> None:
        """Drop the state of a region that was not left."""
        self._common = None


def mark_on_shards(module: nn.Module) -> None:
    """Mark a module that computes on shards: each rank draws different numbers in its operations.

    A program of the module's operations does not call the module, and has only this mark.
    """
    module._on_shards = True  # type: ignore[assignment]


def modules_on_shards(model: nn.Module) -> set[str]:
    """Return all names of the modules in which each rank draws different numbers."""
    return {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if getattr(module, "_on_shards", False)
    }


@contextmanager
def per_rank_draws(group: Group, device: torch.device | str = "cpu") -> Iterator[None]:
    """Context manager: this rank draws its own numbers; afterwards all ranks draw equal ones.

    All ranks enter together, with equal states of torch's generator.
    """
    draws = RngTracker(group, torch.device(device))
    draws.enter()
    try:
        yield
    finally:
        draws.leave()

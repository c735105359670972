"""Units: groups of parameters that are gathered together, and the modules that need them.

A unit is a module with all its parameters, or several small neighbouring modules. Modules are
opened from the root down until a module contains at most `limit` elements, or until it owns most of
its parameters directly and has no submodules of significant size, such as a linear layer. The
direct parameters of an opened module (a class token, a position table) are a separate unit,
gathered as long as that module runs. A parameter that several units use belongs to the nearest
module that contains all of these units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

UNIT_ELEMENTS = 1 << 20
"""Default number of elements of a unit: 4 MiB in float32."""

_OWN = 0.25
"""A module is not opened if it owns directly at least this share of the elements inside it."""


@dataclass
class UnitPlan:
    """Plan of a unit.

    modules: names of the modules that need the unit. parameters: by name, in order. around: whether
    the unit's modules contain uses of other units, so that the unit is needed during the whole
    pass.
    """

    modules: list[str]
    parameters: list[str]
    around: bool = False


UnitSpec = int | Iterable[type[nn.Module]] | None
"""Division of a model into units: the largest number of elements of a unit, or the classes of
modules that are units; None chooses.
"""


def plan_units(model: nn.Module, units: UnitSpec = None) -> list[UnitPlan]:
    """Return the units of a model, in the order of its modules.

    Every parameter is in exactly one unit. Raises ValueError for a unit size below 1.
    """
    planner = _Planner(model, units)
    plans = planner.open("", model)
    return planner.settle_shared(plans)


class _Planner:
    def __init__(self, model: nn.Module, units: UnitSpec) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.lengths = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.modules = dict(model.named_modules())
        self.kinds: tuple[type[nn.Module], ...] = ()
        self.limit = UNIT_ELEMENTS if units is None else 0
        if isinstance(units, int):
            if units < 1:
                raise ValueError(
                    f"a unit has {units} elements, but it has to have 1 or more, or be None"
                )
            self.limit = units
        elif units is not None:
            self.kinds = tuple(units)

    def direct(self, module: nn.Module) -> list[str]:
        """Return the names of the parameters that a module owns directly."""
        # A parameter with two names in one module counts once.
        own = module.parameters(recurse=False)
        return list(dict.fromkeys(self.names[id(parameter)] for parameter in own))

    def inside(self, module: nn.Module) -> list[str]:
        return [self.names[id(parameter)] for parameter in module.parameters()]

    def size(self, parameters: Iterable[str]) -> int:
        return sum(self.lengths[name] for name in parameters)

    def open(self, name: str, module: nn.Module) -> list[UnitPlan]:
        """Return the units inside a module."""
        inside = self.inside(module)
        direct = self.direct(module)
        if not inside:
            return []
        # No module inside is of the requested classes: the unit is needed by the whole model.
        if self.kinds and not any(isinstance(part, self.kinds) for part in module.modules()):
            return [UnitPlan([""], inside, around=True)]
        parts = [
            (f"{name}.{part}" if name else part, child) for part, child in module.named_children()
        ]
        # Activations and the like have nothing to gather.
        parts = [(part, child) for part, child in parts if self.inside(child)]
        if self._is_unit(module, inside, direct) or not parts:
            return [UnitPlan([name], inside)]
        plans = [plan for part, child in parts for plan in self.open(part, child)]
        return ([UnitPlan([name], direct, around=True)] if direct else []) + self._merged(plans)

    def _is_unit(self, module: nn.Module, inside: Sequence[str], direct: Sequence[str]) -> bool:
        if self.kinds:
            return isinstance(module, self.kinds)
        size = self.size(inside)
        # To open a module that owns much directly would gain little: its own parameters stay
        # gathered as long as it runs.
        return size <= self.limit or self.size(direct) >= _OWN * size

    def _merged(self, plans: list[UnitPlan]) -> list[UnitPlan]:
        """Merge small neighbouring units, up to the limit of elements."""
        merged: list[UnitPlan] = []
        for plan in plans:
            last = merged[-1] if merged else None
            if (
                last is not None
                # a unit around others stays gathered longer than its neighbours
                and not (last.around or plan.around)
                and self.size(last.parameters) + self.size(plan.parameters) <= self.limit
            ):
                last.modules += plan.modules
                last.parameters += plan.parameters
            else:
                merged.append(plan)
        return merged

    def settle_shared(self, plans: list[UnitPlan]) -> list[UnitPlan]:
        """Merge the units around the same module, and assign every parameter to exactly one unit.

        A parameter that several units use is assigned to the nearest module around them.
        """
        # reversed, so that the first unit around a module remains
        around = {plan.modules[0]: plan for plan in reversed(plans) if plan.around}
        for plan in plans:
            if plan.around and plan is not around[plan.modules[0]]:
                around[plan.modules[0]].parameters += plan.parameters
                plan.parameters = []
        # A tied parameter is inside several modules, and was put into the unit of each.
        users: dict[str, list[UnitPlan]] = {}
        for plan in plans:
            for parameter in dict.fromkeys(plan.parameters):
                users.setdefault(parameter, []).append(plan)
        for parameter, using in users.items():
            if len(using) == 1:
                continue
            for plan in using:
                plan.parameters = [name for name in plan.parameters if name != parameter]
            home = _common([module for plan in using for module in plan.modules])
            if not any(plan.around and plan.modules == [home] for plan in plans):
                # before its users, in whose forward passes it is needed first
                plans.insert(min(map(plans.index, using)), UnitPlan([home], [], around=True))
            next(
                plan for plan in plans if plan.around and plan.modules == [home]
            ).parameters.append(parameter)
        for plan in plans:
            plan.parameters = list(dict.fromkeys(plan.parameters))
        return [plan for plan in plans if plan.parameters]


def _common(names: Sequence[str]) -> str:
    """Return the name of the nearest module that contains all of these modules."""
    common = []
    for parts in zip(*(name.split(".") if name else [] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)

"""Parameters that modules share stay shared when they are divided.

A plan must divide a shared parameter in all modules that share it, in the same way. A module around
such a module may have another name for the parameter, as the head of BERT has for the bias of its
output layer. That name gets the part: forward does not normally read it, and a proof of the plan
detects a model whose forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from dure.parallel.tensor.divided import DividedLayer
from dure.parallel.tensor.division import Division

OwnParts = dict[str, tuple[Tensor, Division]]
"""Divided tensors of a module by name: this rank's part, and the division."""


@dataclass(frozen=True)
class _Shared:
    """Parameter that is replaced.

    kept: the new parameter. division: None if every rank has the whole. name: the first module that
    has the parameter divided. modules: all modules that have it divided.
    """

    kept: nn.Parameter
    division: Division | None
    name: str
    modules: list[nn.Module]


def share_tied(
    model: nn.Module, layers: Mapping[int, DividedLayer], parts: Mapping[int, OwnParts]
) -> list[Callable[[], None]]:
    """Make shared parameters a single object in the modules that replace others.

    layers, parts: divided layers and tensors, by the id of the undivided module. Returns functions
    that update further names of the parameters. Raises ValueError if a parameter is divided in two
    ways, or in some of its modules only.
    """
    # by the id of the undivided parameter
    shared: dict[int, _Shared] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            become = _become(module, own, layers, parts)
            if parameter is None or become is None:
                continue
            known = shared.setdefault(id(parameter), _Shared(*become, name, []))
            known.modules.append(module)
            if known.division != become[1]:
                raise ValueError(
                    f"{known.name} and {name} share a parameter, but the plan divides it in two "
                    "ways"
                )
            # the same object in both, so that there is a single gradient and optimizer state
            if id(module) in layers:
                layers[id(module)].register_parameter(own, known.kept)
            elif known.division is not None:
                parts[id(module)][own] = (known.kept, known.division)
    names: list[Callable[[], None]] = []
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if id(parameter) not in shared or _become(module, own, layers, parts) is not None:
                continue
            known = shared[id(parameter)]
            if not any(inner in known.modules for inner in module.modules()):
                raise ValueError(
                    f"{known.name} and {name or 'the model'} share a parameter: the plan has to "
                    f"divide both of them (Tensors({own!r}) for a parameter outside a layer)"
                )
            names.append(partial(module.register_parameter, own, known.kept))
    return names


def _become(
    module: nn.Module, own: str, layers: Mapping[int, DividedLayer], parts: Mapping[int, OwnParts]
) -> tuple[nn.Parameter, Division | None] | None:
    """Return the new parameter and its division for a parameter of a module; None if it stays."""
    layer = layers.get(id(module))
    if layer is not None and module._parameters.get(own) is not None:
        return layer.get_parameter(own), layer.divisions.get(own)
    part, division = parts.get(id(module), {}).get(own, (None, None))
    return (part, division) if isinstance(part, nn.Parameter) else None

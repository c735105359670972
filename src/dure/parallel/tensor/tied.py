"""Parameters that were one remain one when they are divided.

Of several modules that share a parameter the plan has to divide each, in the same way. A module
around one of them may have a name of its own for the parameter, as the head of BERT has for the
bias of its output layer. Such a name is given the part: forward does not read it, and a proof of
the plan finds out where it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from dure.parallel.tensor.divided import Divided
from dure.parallel.tensor.division import Division

OwnParts = dict[str, tuple[Tensor, Division]]
"""Tensors of a module of which a rank holds a part: the part, and how they are divided."""


@dataclass(frozen=True)
class _Shared:
    """A parameter that becomes another one.

    kept: what it becomes. division: None where every rank has the whole. name: of the first module
    that has it divided. modules: all of those.
    """

    kept: nn.Parameter
    division: Division | None
    name: str
    modules: list[nn.Module]


def share(
    model: nn.Module, layers: Mapping[int, Divided], parts: Mapping[int, OwnParts]
) -> list[Callable[[], None]]:
    """Makes shared parameters one in what takes the modules' places.

    layers, parts: what is divided, by the id of the undivided module. Returns what makes other
    names of parameters follow. Raises ValueError if a parameter is divided in two ways, or in some
    of its modules only.
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
                    f"{known.name} and {name} share a parameter, and the plan divides it in two "
                    "ways"
                )
            # the same object in both, so that optimizers and gradients know one
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
                    f"divide both of them (Tensors({own!r}) where it is of no layer)"
                )
            names.append(partial(module.register_parameter, own, known.kept))
    return names


def _become(
    module: nn.Module, own: str, layers: Mapping[int, Divided], parts: Mapping[int, OwnParts]
) -> tuple[nn.Parameter, Division | None] | None:
    """What a parameter of a module becomes by the plan, and how; None if it stays."""
    layer = layers.get(id(module))
    if layer is not None and module._parameters.get(own) is not None:
        return layer.get_parameter(own), layer.divisions.get(own)
    part, division = parts.get(id(module), {}).get(own, (None, None))
    return (part, division) if isinstance(part, nn.Parameter) else None

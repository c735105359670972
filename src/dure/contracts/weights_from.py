"""The weights that a model begins with, where they lie in files and are not drawn.

    names    those of the model's state_dict; every one of the model has to be in the files, and the
             other way round, in the same shape
    values   in the model's dtype

Tensors that are one and the same in the model need one of their names. A model of Hugging Face
may also be given what its base was saved as, or a model with
another head on the same base, as `from_pretrained` is: the base has to be whole, a head that is not
in the files is drawn, and one that is not in the model is left out, which is warned of. It may also
be a part of the user's own module.

What lies in memory is filled. What lies in a file of `dure.memory.mapped`, because the model is
larger than memory, is not: the checkpoint itself takes its place, mapped, and only the parts that
somebody touches are ever read. A model that was made on the meta device gets memory, or such a
place, for everything that the files have.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dure.errors import warn
from dure.memory.mapped import is_mapped
from dure.memory.weight_files import Stored, stored_in

_SHOWN = 12
"""Names in one message; a model of another kind would fill pages."""

_OLD = {".gamma": ".weight", ".beta": ".bias"}
"""What early checkpoints of Hugging Face call what a layer norm has."""


class Fit(NamedTuple):
    """What goes where.

    given: of each of the model's names, what the files have for it. drawn: names of the model that
    they do not have, and need not. left_out: names in the files of which the model needs none.
    missing, unexpected: the same where it is an error.
    """

    given: Mapping[str, Stored]
    missing: list[str]
    unexpected: list[str]
    drawn: list[str]
    left_out: list[str]


def begin_with(model: nn.Module, path: Path) -> None:
    """The weights in `path` into a model that was just made.

    Raises ValueError if they are not those of this model, DataError where they cannot be read.
    """
    tensors = _tensors_of(model)
    given = fit_of(model, path).given
    if _is_plain(model, tensors):
        _Places(model).fill(tensors, given)
    else:
        _load(model, tensors, given, path)
    _check_values(model, path)


def warn_of_drawn(model: nn.Module, path: Path) -> None:
    """Says what of the model is not in the files, and what of the files is not in the model."""
    fit = fit_of(model, path)
    if fit.drawn:
        warn(f"{path} does not have {_listed(fit.drawn)} of the model: drawn as without weights")
    if fit.left_out:
        warn(f"{path} has {_listed(fit.left_out)}, which the model does not have: left out")


def fit_of(model: nn.Module, path: Path) -> Fit:
    """What of the files goes where in the model. Raises ValueError if they do not fit."""
    tensors = _tensors_of(model)
    stored = stored_in(path)
    fit = _exact(tensors, stored)
    library = _library_in(model) if fit.missing or fit.unexpected else None
    if library is not None:
        fit = library.fit(tensors, stored)
    wrong = [
        *([f"{_listed(fit.missing)} missing there"] if fit.missing else []),
        *([f"{_listed(fit.unexpected)} missing in the model"] if fit.unexpected else []),
        *_other_shapes(tensors, fit.given),
    ]
    if wrong:
        raise ValueError(f"the weights in {path} are not those of the model: {'; '.join(wrong)}")
    return fit


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors that are saved, by the names under which they are."""
    saved = model.state_dict(keep_vars=True)
    return {name: value for name, value in saved.items() if isinstance(value, Tensor)}


def _exact(tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> Fit:
    given = {name: stored[name] for name in tensors if name in stored}
    unexpected = [name for name in stored if name not in tensors]
    return Fit(given, _without_values(tensors, given), unexpected, [], [])


def _without_values(tensors: Mapping[str, Tensor], given: Iterable[str]) -> list[str]:
    """The names that are not given; one of several names of a tensor is enough."""
    known = {_identity(tensors[name]) for name in given}
    return [name for name, tensor in tensors.items() if _identity(tensor) not in known]


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are one and the same, whatever they are called."""
    if is_lazy(tensor) or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _other_shapes(tensors: Mapping[str, Tensor], given: Mapping[str, Stored]) -> list[str]:
    """What is of another shape in the files, or of another kind of numbers, in words."""
    told = []
    for name, stored in given.items():
        mine = tensors[name]
        # A lazy one has the shape of what it is given.
        if not is_lazy(mine) and mine.shape != stored.shape:
            told.append(f"{name} is {stored.shape} there and {tuple(mine.shape)} in the model")
        elif _kind(mine.dtype) != _kind(stored.values):
            told.append(f"{name} is {stored.values} there and {mine.dtype} in the model")
    rest = len(told) - _SHOWN
    return [*told[:_SHOWN], f"and {rest} more of another shape"] if rest > 0 else told


def _kind(dtype: torch.dtype) -> str:
    """Numbers of one kind become one another, as load_state_dict lets them."""
    if dtype.is_floating_point:
        return "real"
    return "complex" if dtype.is_complex else str(dtype)


class _Library(NamedTuple):
    """A model of Hugging Face.

    model: itself. at: where in the user's module it is, such as "model."; "" if it is all of it.
    base: what its base is called in it, such as "transformer."; "" if it is a base itself. prefix:
    what its base would be called in a model with a head.
    """

    model: Any
    at: str
    base: str
    prefix: str

    def fit(self, tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> Fit:
        own = {name: self._own(name, tensors, stored) for name in stored}
        given = {own[name]: stored[name] for name in stored if own[name] in tensors}
        left = [name for name in stored if own[name] not in tensors]
        absent = self.model._keys_to_ignore_on_load_missing
        unused = self.model._keys_to_ignore_on_load_unexpected
        missing = _unlike(_without_values(tensors, given), absent)
        left = _unlike(left, unused)
        whole = self.at + self.base
        of_base = [name for name in missing if name.startswith(whole)]
        unknown = [name for name in left if self._is_of_base(name, own[name], stored)]
        return Fit(
            given,
            of_base,
            unknown,
            [name for name in missing if name not in of_base],
            [name for name in left if name not in unknown],
        )

    def _own(self, name: str, tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> str:
        """What the user's module calls what the files call so."""
        # Saved with the user's module around it.
        if self.at and any(one.startswith(self.at) for one in stored):
            return name
        with_head = self._with_head(stored)
        if with_head and not self.base:
            name = name.removeprefix(self.prefix)
        elif self.base and not with_head:
            name = self.base + name
        found = self.at + name
        for old, new in _OLD.items():
            if found.endswith(old) and found not in tensors:
                found = found.removesuffix(old) + new
        return found

    def _with_head(self, stored: Mapping[str, Stored]) -> bool:
        """Whether the files are of a model with a head."""
        return any(name.startswith(self.prefix) for name in stored)

    def _is_of_base(self, name: str, own: str, stored: Mapping[str, Stored]) -> bool:
        """Whether what the files have under this name is no head."""
        if self.base:
            return own.startswith(self.at + self.base)
        return not self._with_head(stored) or name.startswith(self.prefix)


def _library_in(model: nn.Module) -> _Library | None:
    """The first model of Hugging Face in it; None where there is none."""
    transformers = sys.modules.get("transformers.modeling_utils")
    # Not imported: whoever has made such a model has loaded the library.
    if transformers is None:
        return None
    for name, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            prefix = f"{module.base_model_prefix}."
            base = prefix if module.base_model is not module else ""
            return _Library(module, f"{name}." if name else "", base, prefix)
    return None


def _unlike(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """Without those of which the library says that they do not matter."""
    rules = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in names if not any(rule.search(name) for rule in rules)]


def _is_plain(model: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Whether what is saved are the model's own parameters and buffers, under their own names."""
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    lazy = any(is_lazy(tensor) for tensor in tensors.values())
    return not lazy and all(own.get(name) is tensor for name, tensor in tensors.items())


class _Places:
    """Where the tensors of a model are, to put others in their places."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        storages: Counter[int] = Counter()
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        places = self._places.setdefault(id(tensor), [])
                        places.append((module, name))
                        storages[_storage(tensor)] += len(places) == 1
        self._shared = {storage for storage, users in storages.items() if users > 1}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor], given: Mapping[str, Stored]) -> None:
        """Gives each of these tensors what is stored for its name."""
        met: dict[object, str] = {}
        for name, stored in given.items():
            tensor = tensors[name]
            first = met.setdefault(_identity(tensor), name)
            if first != name:
                _check_equal(first, given[first], name, stored)
            elif tensor.is_meta:
                self._make(tensor, stored)
            elif is_mapped(tensor) and _storage(tensor) not in self._shared:
                tensor.data = _read(stored, tensor)
            else:
                tensor.copy_(stored.read())

    def _make(self, tensor: Tensor, stored: Stored) -> None:
        """Puts one that has values in the place of one on the meta device."""
        # Where a tensor lies that is made now tells where the model does.
        memory = torch.empty_like(tensor, device="cpu")
        memory = _read(stored, memory) if is_mapped(memory) else memory.copy_(stored.read())
        value: Tensor = memory
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(memory, requires_grad=tensor.requires_grad)
        value.__dict__.update(vars(tensor))
        for module, name in self._places[id(tensor)]:
            setattr(module, name, value)


def _storage(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _read(stored: Stored, like: Tensor) -> Tensor:
    """The file itself, where it has the dtype that is wanted, and else a copy."""
    return stored.read().to(like.dtype)


def _check_equal(first: str, one: Stored, name: str, other: Stored) -> None:
    """Raises ValueError where two names of one tensor have other values in the files."""
    if not torch.equal(one.read(), other.read()):
        raise ValueError(
            f"{first} and {name} are one tensor in the model, and differ in {other.file}"
        )


def _load(
    model: nn.Module, tensors: Mapping[str, Tensor], given: Mapping[str, Stored], path: Path
) -> None:
    """As the model itself loads what it has saved in a way of its own."""
    values = {name: stored.read() for name, stored in given.items()}
    try:
        model.load_state_dict({**tensors, **values})
    except RuntimeError as error:
        raise ValueError(f"the model does not load the weights in {path}: {error}") from error


def _check_values(model: nn.Module, path: Path) -> None:
    """Raises ValueError for tensors that have no values yet."""
    named = [*model.named_parameters(), *model.named_buffers()]
    without = [name for name, tensor in named if tensor.is_meta]
    if without:
        raise ValueError(
            f"the model function makes {_listed(without)} on the meta device, and {path} has no "
            f"values for that: make it elsewhere"
        )


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")

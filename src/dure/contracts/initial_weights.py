"""Initial weights of a model from files, instead of drawn weights.

    names    the names of the model's state_dict; the names in the files and in the model have to be
             the same, with equal shapes
    values   in the model's dtype

Tied tensors of the model need only one of their names. A model of Hugging Face may also get the
weights of its base model, or of a model with another head on the same base, as in
`from_pretrained`: the base has to be complete, a head that is not in the files is drawn, and a head
that is not in the model is ignored, with a warning. The model may also be a part of the user's own
module.

Tensors in memory are filled. Tensors in a file of `dure.memory.mapped`, used for a model larger
than memory, are not: the mapped checkpoint itself replaces them, and only the parts in use are ever
read. A model on the meta device gets memory, or such a mapping, for every tensor of the files.
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
from dure.memory.weight_files import StoredTensor, stored_in

_SHOWN = 12
"""Maximum names in a message; a model of another kind would fill pages."""

_OLD = {".gamma": ".weight", ".beta": ".bias"}
"""Suffixes of a layer norm's tensors in early checkpoints of Hugging Face, and today's."""


class WeightAssignment(NamedTuple):
    """Assignment of the tensors in files to the tensors of a model.

    given: the stored tensor for each of the model's names. drawn: names of the model that are
    absent in the files, and optional. left_out: names in the files that the model does not need.
    missing, unexpected: names in these two cases if they are an error.
    """

    given: Mapping[str, StoredTensor]
    missing: list[str]
    unexpected: list[str]
    drawn: list[str]
    left_out: list[str]


def load_initial_weights(model: nn.Module, path: Path) -> None:
    """Load the weights in `path` into a new model.

    Raises ValueError if the weights do not fit the model, DataError if they cannot be read.
    """
    tensors = _tensors_of(model)
    given = assign_weights(model, path).given
    if _is_plain(model, tensors):
        _Places(model).fill(tensors, given)
    else:
        _load(model, tensors, given, path)
    _check_values(model, path)


def holds_adapters(path: Path) -> bool:
    """Return whether the weights in `path` are of a model with adapters (`Task.adapter`)."""
    return any(".lora_A." in name for name in stored_in(path))


def warn_of_drawn(model: nn.Module, path: Path) -> None:
    """Warn about tensors of the model that are not in the files, and the reverse."""
    fit = assign_weights(model, path, without_adapters=not holds_adapters(path))
    if fit.drawn:
        warn(
            f"{path} does not have {_listed(fit.drawn)} of the model: they are initialised at "
            "random"
        )
    if fit.left_out:
        warn(f"{path} has {_listed(fit.left_out)}, which the model does not have: they are ignored")


def assign_weights(
    model: nn.Module, path: Path, without_adapters: bool = False
) -> WeightAssignment:
    """Return the assignment of the files' tensors to the model's.

    without_adapters: whether names are those of the model before it had adapters. Raises ValueError
    if the tensors do not fit.
    """
    tensors = _tensors_of(model)
    if without_adapters:
        tensors = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in tensors.items()
            if ".lora_" not in name
        }
    stored = stored_in(path)
    fit = _exact(tensors, stored)
    library = _library_in(model) if fit.missing or fit.unexpected else None
    if library is not None:
        fit = library.fit(tensors, stored)
    wrong = [
        *([f"{_listed(fit.missing)} missing in the file"] if fit.missing else []),
        *([f"{_listed(fit.unexpected)} not in the model"] if fit.unexpected else []),
        *_other_shapes(tensors, fit.given),
    ]
    if wrong:
        raise ValueError(f"the weights in {path} do not match the model: {'; '.join(wrong)}")
    return fit


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors in its state_dict, by name."""
    saved = model.state_dict(keep_vars=True)
    return {name: value for name, value in saved.items() if isinstance(value, Tensor)}


def _exact(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> WeightAssignment:
    given = {name: stored[name] for name in tensors if name in stored}
    unexpected = [name for name in stored if name not in tensors]
    return WeightAssignment(given, _without_values(tensors, given), unexpected, [], [])


def _without_values(tensors: Mapping[str, Tensor], given: Iterable[str]) -> list[str]:
    """Return the names without a value; any of several names of a tensor is enough."""
    known = {_identity(tensors[name]) for name in given}
    return [name for name, tensor in tensors.items() if _identity(tensor) not in known]


def _identity(tensor: Tensor) -> object:
    """Return a key that is equal for tied tensors, whatever their names."""
    if is_lazy(tensor) or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _other_shapes(tensors: Mapping[str, Tensor], given: Mapping[str, StoredTensor]) -> list[str]:
    """Return descriptions of the tensors with another shape or kind of number in the files."""
    told = []
    for name, stored in given.items():
        mine = tensors[name]
        # A lazy parameter takes the shape of its value.
        if not is_lazy(mine) and mine.shape != stored.shape:
            told.append(
                f"{name} is {stored.shape} in the file and {tuple(mine.shape)} in the model"
            )
        elif _kind(mine.dtype) != _kind(stored.values):
            told.append(f"{name} is {stored.values} in the file and {mine.dtype} in the model")
    rest = len(told) - _SHOWN
    return [*told[:_SHOWN], f"and {rest} more have other shapes"] if rest > 0 else told


def _kind(dtype: torch.dtype) -> str:
    """Return the kind of a dtype; load_state_dict converts numbers within a kind."""
    if dtype.is_floating_point:
        return "real"
    return "complex" if dtype.is_complex else str(dtype)


class _Library(NamedTuple):
    """Model of Hugging Face.

    model: the model. at: its path in the user's module, such as "model."; "" for the whole module.
    base: name of its base model in it, such as "transformer."; "" for a base model itself. prefix:
    name that the base model has in a model with a head.
    """

    model: Any
    at: str
    base: str
    prefix: str

    def fit(
        self, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
    ) -> WeightAssignment:
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
        return WeightAssignment(
            given,
            of_base,
            unknown,
            [name for name in missing if name not in of_base],
            [name for name in left if name not in unknown],
        )

    def _own(
        self, name: str, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
    ) -> str:
        """Return the user's module's name for a name in the files."""
        # The files contain the whole user's module.
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

    def _with_head(self, stored: Mapping[str, StoredTensor]) -> bool:
        """Return whether the files contain a model with a head."""
        return any(name.startswith(self.prefix) for name in stored)

    def _is_of_base(self, name: str, own: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Return whether a stored tensor belongs to the base model and not to a head."""
        if self.base:
            return own.startswith(self.at + self.base)
        return not self._with_head(stored) or name.startswith(self.prefix)


def _library_in(model: nn.Module) -> _Library | None:
    """Return the first model of Hugging Face in the module, or None."""
    transformers = sys.modules.get("transformers.modeling_utils")
    # No import: a model of the library implies that the library is loaded.
    if transformers is None:
        return None
    for name, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            prefix = f"{module.base_model_prefix}."
            base = prefix if module.base_model is not module else ""
            return _Library(module, f"{name}." if name else "", base, prefix)
    return None


def _unlike(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """Return the names without those that the library declares as ignorable."""
    rules = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in names if not any(rule.search(name) for rule in rules)]


def _is_plain(model: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the state_dict consists of the model's own parameters and buffers."""
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    lazy = any(is_lazy(tensor) for tensor in tensors.values())
    return not lazy and all(own.get(name) is tensor for name, tensor in tensors.items())


class _Places:
    """Modules and names of a model's tensors, by which tensors are replaced."""

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
    def fill(self, tensors: Mapping[str, Tensor], given: Mapping[str, StoredTensor]) -> None:
        """Give each tensor the value stored for its name."""
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

    def _make(self, tensor: Tensor, stored: StoredTensor) -> None:
        """Replace a meta tensor by a tensor with values."""
        # A tensor created now is mapped exactly if the model is (`is_mapped`).
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


def _read(stored: StoredTensor, like: Tensor) -> Tensor:
    """Return the mapped file itself if its dtype fits, and otherwise a copy."""
    return stored.read().to(like.dtype)


def _check_equal(first: str, one: StoredTensor, name: str, other: StoredTensor) -> None:
    """Raise ValueError if two names of a tied tensor have different values in the files."""
    if not torch.equal(one.read(), other.read()):
        raise ValueError(
            f"{first} and {name} are one tensor in the model, and {other.file} has different "
            "values for them"
        )


def _load(
    model: nn.Module, tensors: Mapping[str, Tensor], given: Mapping[str, StoredTensor], path: Path
) -> None:
    """Load through the model's own `load_state_dict`, for a model with a custom state_dict."""
    values = {name: stored.read() for name, stored in given.items()}
    try:
        model.load_state_dict({**tensors, **values})
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {path} cannot be loaded into the model: {error}"
        ) from error


def _check_values(model: nn.Module, path: Path) -> None:
    """Raise ValueError for tensors that have no values yet."""
    named = [*model.named_parameters(), *model.named_buffers()]
    without = [name for name, tensor in named if tensor.is_meta]
    if without:
        raise ValueError(
            f"the model function creates {_listed(without)} on the meta device, and {path} has no "
            "values for it: create it on another device"
        )


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")

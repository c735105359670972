"""The model of a run, made once in a process, from its first check to what the user gets."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from dure.contracts.strategy import another, seeded_model
from dure.contracts.task import Task
from dure.machine.memory import give_back
from dure.memory.formula import bytes_of
from dure.memory.mapped import WINDOW, leave_views, release
from dure.memory.undivided import (
    beside,
    in_files,
    lies_in_files,
    tensors_of,
    through,
    unless_small,
)
from dure.tensors.buffers import load_passing_buffers, load_weights
from dure.tensors.copies import copy_of

_TRAINED: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
"""Parameters of this process that a run trains or has trained, as long as anybody holds them."""


def check_fresh(model: nn.Module) -> None:
    """Raise ValueError for a model with parameters that an earlier run has trained."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _TRAINED.get(id(parameter)) is parameter:
            raise ValueError(
                f"the task's model function gives {name} again, which an earlier run has trained: "
                f"let it make a fresh model in each call, such as copy.deepcopy(model); "
                f"Task(weights=...) begins with the weights of a run"
            )


class FreshModel:
    """A model under the run's seed, as the task's factory has made it.

    It is looked at while the run is prepared. Then a learner in this process takes it. At the end
    the user gets a model with the trained weights, and without what a learner has done to its own,
    such as flat buffers and hooks. To other processes the model does not travel: they make their
    own.

    keep: the model serves other runs as well, so that learners take copies of it. divided: learners
    take parts of it; undivided it lies in files. waits: this process is no rank, and only waits for
    those that are.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        model: nn.Module | None,
        keep: bool = False,
        divided: bool = False,
        waits: bool = False,
    ) -> None:
        self.task = task
        self.seed = seed
        self.keep = keep
        self.divided = divided
        self.waits = waits
        self._model = model
        self._shell: _Shell | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled without its model, which would be the largest part of what a rank is sent.
        return FreshModel, (self.task, self.seed, None, False, self.divided)

    def anew(self) -> FreshModel:
        """The same without the model, which is made again when it is needed."""
        return FreshModel(self.task, self.seed, None, False, self.divided, self.waits)

    def take(self) -> nn.Module:
        """The model for a learner; once."""
        model = self._model
        if model is None:
            return fresh_model(self.task, self.seed, self.divided)
        if self.keep:
            return another(model, self.task, self.seed)
        # The learner gets the model itself, since it needs its memory anyway.
        self._put_away(model)
        _TRAINED.update((id(one), one) for one in model.parameters() if one.requires_grad)
        return model

    def state_dict(self) -> Mapping[str, Tensor]:
        """The tensors of the model, as long as it is here and nobody has taken it; else none."""
        if self._model is None:
            return {}
        named = self._model.state_dict()
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def rest(self) -> None:
        """What the user gets in the end is from now on a copy, which takes no memory until then."""
        if self._model is None or self.keep:
            return
        is_large = bytes_of(tensors_of(self._model)) >= WINDOW
        # In files it takes none as it is.
        if lies_in_files(self._model):
            release(tensors_of(self._model))
        else:
            self._put_away(self._model)
        # The checks of a large model leave copies of it in cycles, and holes as large.
        if is_large:
            gc.collect()
            give_back()

    def _put_away(self, model: nn.Module) -> None:
        with beside(model):
            twin = copy_of(model)
        self._shell = None if twin is None else _Shell(twin)
        self._model = None

    def trained(
        self,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        elsewhere: Sequence[str] = (),
    ) -> nn.Module:
        """The model with what was learned.

        As shapes alone where this process holds only a part of the weights, which ranks of a
        torchrun job may; so are those of its tensors that are elsewhere, with clients say.
        """
        model = self._untouched()
        if weights:
            # What is written over weights that were read from files is to lie on a disk as well.
            leave_views(tensors_of(model))
            with through(model):
                load_weights(model, weights, elsewhere)
                load_passing_buffers(model, buffers)
        else:
            model.to("meta")
        return model

    def _untouched(self) -> nn.Module:
        # For other runs the model stays fresh; so the user gets a copy of it.
        if self._model is not None and self.keep:
            return another(self._model, self.task, self.seed)
        if self._model is not None:
            return self._model
        if self._shell is not None:
            return self._shell.opened()
        return fresh_model(self.task, self.seed, self.divided, self.waits)


def fresh_model(task: Task, seed: int, divided: bool, waits: bool = False) -> nn.Module:
    """The task's model under the seed.

    divided: it lies in files, for ranks that hold parts. waits: this process is none of them, and
    has it in memory if it is small.
    """
    make = partial(seeded_model, task, seed)
    if not divided:
        return make()
    return unless_small(make) if waits else in_files(make)


class _Shell:
    """A model whose parameters take no memory until they are needed.

    It is a copy, so that nobody else holds its storages. It is filled by `load_state_dict`, which
    refuses to leave a parameter out; a model that saves or loads in a way of its own may leave some
    out, and keeps its memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._emptied: list[tuple[Any, int]] = []
        for parameter in model.parameters() if _is_saved_whole(model) else ():
            storage = parameter.untyped_storage()
            # A storage that several parameters share is emptied, and filled again, once.
            if storage.resizable() and storage.nbytes():
                self._emptied.append((storage, storage.nbytes()))
                storage.resize_(0)

    def opened(self) -> nn.Module:
        """The model, its parameters not yet set."""
        for storage, nbytes in self._emptied:
            storage.resize_(nbytes)
        return self._model


_SAVING = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _is_saved_whole(model: nn.Module) -> bool:
    """Whether all parameters are saved and loaded, in torch's own way."""
    for module in model.modules():
        if any(vars(module)[hooks] for hooks in _HOOKS):
            return False
        ways = [getattr(type(module), name) for name in _SAVING]
        if not all(way.__module__.startswith("torch.") for way in ways):
            return False
    return True

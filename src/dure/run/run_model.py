"""The model of a run, created once per process and used from the first check to the result."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from dure.contracts.fresh_model import seeded_model, unused_copy
from dure.contracts.task import Task
from dure.machine.memory import trim_heap
from dure.memory.file_backed_init import (
    in_files,
    in_files_like,
    lies_in_files,
    releasing_pass,
    tensors_of,
    unless_small,
)
from dure.memory.formula import bytes_of
from dure.memory.mapped import WINDOW, move_views_to_files, release_pages
from dure.tensors.buffers import load_non_persistent_buffers, load_weights
from dure.tensors.copies import copy_of

_TRAINED: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
"""Parameters in this process that a run trains or has trained, while they are alive."""


def check_untrained(model: nn.Module) -> None:
    """Raise ValueError if the model has parameters that an earlier run has trained."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _TRAINED.get(id(parameter)) is parameter:
            raise ValueError(
                f"the task's model function returned the same {name} that an earlier run has "
                "trained: return a new model in each call, such as copy.deepcopy(model); "
                "Task(weights=...) starts from the weights of a run"
            )


class RunModel:
    """A model created under the run's seed by the task's factory.

    The checks before the run read the model. Then a learner in this process takes it. At the end
    the user gets a model with the trained weights, without a learner's changes such as flat buffers
    and hooks. The model does not travel to other processes, which create their own.

    Args:
        task: task with the model's factory.
        seed: seed of the run.
        model: the created model; None creates it on demand.
        keep: the model serves several runs, so that learners take copies of it.
        divided: learners take parts of the model; until then it is in files.
        waits: this process is no rank, and only waits for the ranks.
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
        # Pickled without its model, which would be the largest part of the message to a rank.
        return RunModel, (self.task, self.seed, None, False, self.divided)

    def anew(self) -> RunModel:
        """Return a copy without the model, which is created again on demand."""
        return RunModel(self.task, self.seed, None, False, self.divided, self.waits)

    def take(self) -> nn.Module:
        """Return the model for a learner; called once."""
        model = self._model
        if model is None:
            return new_model(self.task, self.seed, self.divided)
        if self.keep:
            return unused_copy(model, self.task, self.seed)
        # The learner gets the model itself, and with it the memory, which it needs anyway.
        self._put_away(model)
        _TRAINED.update((id(one), one) for one in model.parameters() if one.requires_grad)
        return model

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the model's tensors; {} after the model was taken."""
        if self._model is None:
            return {}
        named = self._model.state_dict()
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def rest(self) -> None:
        """Release the model's memory until the end of the run, when the user gets a copy."""
        if self._model is None or self.keep:
            return
        is_large = bytes_of(tensors_of(self._model)) >= WINDOW
        # A model in files takes no memory once its pages are released.
        if lies_in_files(self._model):
            release_pages(tensors_of(self._model))
        else:
            self._put_away(self._model)
        # The checks of a large model leave copies in reference cycles, and holes in the heap.
        if is_large:
            gc.collect()
            trim_heap()

    def _put_away(self, model: nn.Module) -> None:
        with in_files_like(model):
            twin = copy_of(model)
        self._shell = None if twin is None else _Shell(twin)
        self._model = None

    def trained(
        self,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        elsewhere: Sequence[str] = (),
    ) -> nn.Module:
        """Return the model with the trained weights.

        All tensors are on the meta device if this process stores only a part of the weights, as
        ranks of a torchrun job may; so are tensors named in `elsewhere`, for example those that
        stay with clients.
        """
        model = self._untouched()
        if weights:
            # Weights that were read from files are overwritten in files as well, not in memory.
            move_views_to_files(tensors_of(model))
            with releasing_pass(model):
                load_weights(model, weights, elsewhere)
                load_non_persistent_buffers(model, buffers)
        else:
            model.to("meta")
        return model

    def _untouched(self) -> nn.Module:
        # Other runs need the untrained model, so the user gets a copy of it.
        if self._model is not None and self.keep:
            return unused_copy(self._model, self.task, self.seed)
        if self._model is not None:
            return self._model
        if self._shell is not None:
            return self._shell.opened()
        return new_model(self.task, self.seed, self.divided, self.waits)


def new_model(task: Task, seed: int, divided: bool, waits: bool = False) -> nn.Module:
    """Create the task's model under the seed.

    divided: create the model in files, for ranks that take parts. waits: this process is no such
    rank; a small model is then created in memory.
    """
    make = partial(seeded_model, task, seed)
    if not divided:
        return make()
    return unless_small(make) if waits else in_files(make)


class _Shell:
    """A model whose parameters take no memory until they are needed.

    The model is a copy, so that no other object uses its storages. `load_state_dict` fills it, and
    refuses to leave a parameter out. A model with its own way of saving or loading may leave
    parameters out, and keeps its memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._emptied: list[tuple[Any, int]] = []
        for parameter in model.parameters() if _is_saved_whole(model) else ():
            storage = parameter.untyped_storage()
            # A storage that several parameters share is emptied and refilled once.
            if storage.resizable() and storage.nbytes():
                self._emptied.append((storage, storage.nbytes()))
                storage.resize_(0)

    def opened(self) -> nn.Module:
        """Return the model with allocated but unset parameters."""
        for storage, nbytes in self._emptied:
            storage.resize_(nbytes)
        return self._model


_SAVING = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _is_saved_whole(model: nn.Module) -> bool:
    """Return whether torch's own methods save and load all parameters."""
    for module in model.modules():
        if any(vars(module)[hooks] for hooks in _HOOKS):
            return False
        ways = [getattr(type(module), name) for name in _SAVING]
        if not all(way.__module__.startswith("torch.") for way in ways):
            return False
    return True

"""Adapters: low-rank additions to linear layers, trained in place of the layers' own weights.

    y = W x + s·B A x        A: rank × inputs, drawn; B: outputs × rank, zeros; W: frozen
    s = alpha / rank         alpha / √rank with `rslora`

The layers are PEFT's, and have PEFT's names and scaling. A is drawn under the run's seed, so that
every rank and client has the same adapter. All parameters other than the factors are frozen, except
those that `train` names. Optimizers, messages and checkpoints therefore have the factors alone.

In a federation clients may have unlike ranks. The model then has the factors of the largest rank,
and a client trains the first of their rows and columns: a buffer `mask` of each layer multiplies
the outputs of A, with s_i / s for the client's rank and 0 beyond it. The gradients of a client are
those of an adapter of its rank and scaling, and nothing beyond the rank has a gradient.

Cost: rank · (inputs + outputs) trained elements for each layer, in place of inputs · outputs.

Source: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models"; Kalajdzievski 2023, "A
Rank Stabilization Scaling Factor for Fine-Tuning with LoRA" (rslora).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from dure.arguments import SuggestsArguments
from dure.machine.extras import check_extra
from dure.settings import suggestion

Merge = Literal["stack", "svd", "factors"]

ADAPTER = "default"
"""PEFT's name of the adapter in its layers."""

_FORM = "write lora:RANK:TARGETS:ALPHA, such as lora:8:q_proj|v_proj:16"


@dataclass(frozen=True)
class LoRA(SuggestsArguments):
    """Low-rank adapters of linear layers, by PEFT (`dure.Task.adapter`).

    Args:
        rank: rank of the factors. In a federation also a tuple: client i has rank[i % len(rank)].
        targets: regular expression of the adapted layers, matched with the end of their paths:
            "q_proj|v_proj" adapts all layers of these names; ".*" adapts all linear layers.
        alpha: numerator of the scaling alpha / rank.
        rslora: whether the scaling is alpha / √rank.
        freeze_a: whether A stays as drawn, and only B is trained (FFA-LoRA). The mean of clients'
            updates is then exact, also under secure aggregation and differential privacy.
        merge: how a federated server combines clients' adapters: "stack" and "svd" take the best
            approximation of the mean update that has the rank; "factors" takes the means of A and
            of B, which is not the mean update. With `freeze_a` all are the mean of B.
        train: regular expression of other parameters that are trained too, matched with any part
            of their names, such as "classifier"; None trains none.
    """

    rank: int | tuple[int, ...] = 8
    targets: str = ".*"
    alpha: float = 16.0
    rslora: bool = False
    freeze_a: bool = False
    merge: Merge = "stack"
    train: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rank, list):
            object.__setattr__(self, "rank", tuple(self.rank))
        ranks = self.rank if isinstance(self.rank, tuple) else (self.rank,)
        if not ranks or any(type(one) is not int or one < 1 for one in ranks):
            raise ValueError(
                f"LoRA(rank={self.rank!r}): give an integer, 1 or more, or a tuple of a rank for "
                "each client in turn"
            )
        for name in ("targets", "train"):
            _check_pattern(name, getattr(self, name))
        alpha = self.alpha
        if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
            raise ValueError(f"LoRA(alpha={alpha!r}): give a number greater than 0")
        object.__setattr__(self, "alpha", float(alpha))
        for name in ("rslora", "freeze_a"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"LoRA({name}={getattr(self, name)!r}): give True or False")
        if self.merge not in get_args(Merge):
            raise ValueError(
                f"LoRA(merge={self.merge!r}): choose 'stack', 'svd' or 'factors'"
                f"{suggestion(str(self.merge), get_args(Merge))}"
            )

    def __str__(self) -> str:
        """Return the text that `parse_adapter` reads."""
        rank = ",".join(map(str, self.rank)) if isinstance(self.rank, tuple) else str(self.rank)
        # A tuple of a single rank stays a tuple.
        rank += "," if isinstance(self.rank, tuple) and len(self.rank) == 1 else ""
        words = [
            *([] if self.merge == "stack" else [self.merge]),
            *(["freeze-a"] if self.freeze_a else []),
            *(["rslora"] if self.rslora else []),
            *([] if self.train is None else [f"train={self.train}"]),
        ]
        short = f"{self.alpha:g}"
        alpha = short if float(short) == self.alpha else repr(self.alpha)
        return ":".join(["lora", rank, self.targets, alpha, *words])

    @property
    def largest(self) -> int:
        """Rank of the model's factors: the largest rank of a client."""
        return max(self.rank) if isinstance(self.rank, tuple) else self.rank

    @property
    def has_unlike_ranks(self) -> bool:
        """Whether clients have ranks of their own."""
        return isinstance(self.rank, tuple) and len(set(self.rank)) > 1

    @property
    def merges(self) -> bool:
        """Whether the server multiplies the factors of each client."""
        return self.merge != "factors" and not self.freeze_a

    def rank_of(self, client: int) -> int:
        """Return the rank of a client."""
        return self.rank[client % len(self.rank)] if isinstance(self.rank, tuple) else self.rank

    def scaling(self, rank: int) -> float:
        """Return s of an adapter of this rank, as PEFT computes it."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def apply(self, model: nn.Module) -> None:
        """Add the adapters to a new model, and freeze its other parameters.

        A is drawn from torch's global generator. Raises ValueError without PEFT, and for a model
        without such layers.
        """
        check_extra("an adapter", "peft", ["peft"])
        from peft import LoraConfig, inject_adapter_in_model

        names = self._adapted(model)
        config = LoraConfig(
            r=self.largest,
            # PEFT divides by the rank: other numbers than integers work too.
            lora_alpha=self.alpha,
            use_rslora=self.rslora,
            target_modules="|".join(map(re.escape, names)),
        )
        with warnings.catch_warnings():
            # PEFT tells that the layers of GPT-2 are stored transposed, which it handles.
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        for _, layer in lora_layers(model):
            # The factors have the dtype of their layer, and a tracer of the model sees no cast.
            layer.cast_input_dtype_enabled = False
            if self.has_unlike_ranks:
                layer.lora_A[ADAPTER] = MaskedFactor(layer.lora_A[ADAPTER])
            if self.freeze_a:
                layer.lora_A[ADAPTER].weight.requires_grad_(False)
        if self.train is not None:
            self._train_also(model, self.train)

    def _adapted(self, model: nn.Module) -> list[str]:
        """Return the paths of the layers to adapt."""
        linear = [name for name, one in model.named_modules() if _is_linear(one) and name]
        if any(map(is_adapted, model.modules())):
            raise ValueError(
                "the task's model has adapters already: leave Task(adapter=...) out, or return the "
                "model without them"
            )
        pattern = re.compile(rf"(?:.*\.)?(?:{self.targets})")
        found = [name for name in linear if pattern.fullmatch(name)]
        if not found:
            some = ", ".join(linear[:5]) + (", ..." if len(linear) > 5 else "")
            raise ValueError(
                f"LoRA(targets={self.targets!r}) matches no linear layer of the model; its linear "
                f"layers are {some or 'none'}"
            )
        return found

    def _train_also(self, model: nn.Module, pattern: str) -> None:
        found = False
        for name, parameter in model.named_parameters():
            if re.search(pattern, name) and not parameter.requires_grad and "lora_" not in name:
                parameter.requires_grad_(True)
                found = True
        if not found:
            raise ValueError(
                f"LoRA(train={pattern!r}) matches no parameter of the model besides the adapters"
            )


class MaskedFactor(nn.Linear):
    """Factor A whose outputs are multiplied by the buffer `mask`, for clients of unlike ranks."""

    mask: Tensor

    def __init__(self, factor: nn.Linear) -> None:
        super().__init__(factor.in_features, factor.out_features, bias=False, device="meta")
        self.weight = factor.weight
        ones = torch.ones(factor.out_features, dtype=factor.weight.dtype)
        self.register_buffer("mask", ones.to(factor.weight.device))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.mask


class LoraNames(NamedTuple):
    """Names of an adapted layer's factors in the model, and the layer's scaling."""

    a: str
    b: str
    mask: str
    scaling: float


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, layer) of the model's adapted layers, in the model's order."""
    for name, module in model.named_modules():
        if is_adapted(module):
            yield name, module


def lora_names(model: nn.Module) -> list[LoraNames]:
    """Return the names of the factors of each adapted layer, in the model's order."""
    return [
        LoraNames(
            f"{name}.lora_A.{ADAPTER}.weight",
            f"{name}.lora_B.{ADAPTER}.weight",
            f"{name}.lora_A.{ADAPTER}.mask",
            float(layer.scaling[ADAPTER]),
        )
        for name, layer in lora_layers(model)
    ]


def parse_adapter(text: str) -> LoRA:
    """Return the adapter that a text names, such as "lora:8:q_proj|v_proj:16".

    After alpha, in any order: stack, svd, factors, freeze-a, rslora, train=PATTERN; several ranks
    are written 4,8,16. Raises ValueError for any other text.
    """
    name, *values = text.strip().split(":")
    if name != "lora" or len(values) < 2:
        raise ValueError(f"the adapter {text!r}: {_FORM}")
    try:
        ranks = [int(one) for one in values[0].split(",") if one]
        alpha = float(values[2]) if len(values) > 2 else LoRA.alpha
    except ValueError:
        raise ValueError(f"the adapter {text!r}: {_FORM}") from None
    given: dict[str, Any] = {}
    for word in values[3:]:
        if word in get_args(Merge):
            given["merge"] = word
        elif word in ("freeze-a", "rslora"):
            given[word.replace("-", "_")] = True
        elif word.startswith("train="):
            given["train"] = word.removeprefix("train=")
        else:
            raise ValueError(
                f"the adapter {text!r}: {word!r} is none of stack, svd, factors, freeze-a, rslora "
                "and train=PATTERN"
            )
    rank = tuple(ranks) if "," in values[0] else ranks[0] if ranks else 0
    return LoRA(rank, values[1], alpha, **given)


def adapter_of(asked: object) -> LoRA | None:
    """Return the value of `Task.adapter`; raise ValueError for one that is no adapter."""
    if isinstance(asked, str):
        return parse_adapter(asked)
    if asked is None or isinstance(asked, LoRA):
        return asked
    raise ValueError(
        f"Task(adapter={asked!r}): give an adapter, such as dure.LoRA(8, 'q_proj|v_proj')"
    )


def _is_linear(module: nn.Module) -> bool:
    """Return whether a layer is linear: torch's, or the transposed layer of GPT-2."""
    # `MultiheadAttention` reads the weight of its projection and never calls the layer.
    if type(module) is nn.Linear:
        return True
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is PEFT's adapted layer; PEFT itself need not be imported."""
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and hasattr(
        module, "base_layer"
    )


def _check_pattern(name: str, pattern: object) -> None:
    if pattern is None and name == "train":
        return
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"LoRA({name}={pattern!r}): give a regular expression of names")
    if ":" in pattern:
        raise ValueError(
            f"LoRA({name}={pattern!r}): a colon divides the values of an adapter's text; write the "
            "expression without one"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"LoRA({name}={pattern!r}) is not a regular expression: {error}"
        ) from error

"""Plan of Hugging Face's own, converted into a plan of dure: `--plan hf`.

Models of transformers 5 have a tensor plan: `base_model_tp_plan` of the config and `_tp_plan` of
the class, which a model merges into a map from patterns of names to styles. Each style has an entry
of dure's plans:

    colwise                         Column(): whole input, the gradient of the input is summed; of a
                                    parameter Tensors
    colwise_gather_output           Column(gather_output=True); Output() for an output layer
    packed_colwise                  Column(blocks=2): each half of the outputs is divided separately
    rowwise                         Row()
    rowwise_split_input             Row(input_is_parallel=False)
    embedding_rowwise               Vocabulary()
    embedding_colwise               Column(gather_output=True) of an embedding
    replicated_with_grad_allreduce  OnShards(): whole weight, the gradients of the ranks are summed
    replicate, local_params         no entry

Every other style is refused by name, above all the styles of experts. Names without a module in
this model, such as the experts of a model without experts, are left out, as transformers does.

A plan of Hugging Face leaves out some facts, which the conversion takes from the modules:

    heads             outputs of a `Column` in a module with a `head_dim` are divided between heads;
                      if a model has fewer heads of keys than ranks, neighbours share a head
    tied weights      modules that share a divided weight are divided alike
    own embeddings    an embedding that does more than nn.Embedding, such as Gemma's with a scale,
                      and an output layer tied to it stay whole

Cost: that of the entries. Every `Column` sums the gradient of its input by itself, as in
transformers: three sums for query, key and value, of which dure's own plans make one.

Source: the documentation of transformers 5, "Tensor parallelism".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from dure.parallel.tensor.attributes import Attributes
from dure.parallel.tensor.changes import OnShards, Tensors
from dure.parallel.tensor.divided import embedding_of
from dure.parallel.tensor.dividing import fits
from dure.parallel.tensor.plan import Column, DivisionPlan, Output, PlanEntry, Row, Vocabulary

_ENTRIES: Mapping[str, PlanEntry | None] = {
    "colwise": Column(),
    "colwise_gather_output": Column(gather_output=True),
    "colwise_rep": Column(gather_output=True),
    "packed_colwise": Column(blocks=2),
    "rowwise": Row(),
    "rowwise_split_input": Row(input_is_parallel=False),
    "rowwise_rep": Row(input_is_parallel=False),
    "embedding_rowwise": Vocabulary(),
    "embedding_colwise": Column(gather_output=True),
    "replicated_with_grad_allreduce": OnShards(),
    "replicate": None,
    "local_params": None,
}
"""Plan entries by style; None for a style that divides nothing. `_rep` are names of transformers 4.
"""

_EXPERTS = frozenset(
    {"moe_tp_experts", "ep_dispatch_experts", "ep_router", "grouped_gemm", "moe_identity_expert"}
)
"""Styles that divide experts."""


class _Style(NamedTuple):
    """Style of a pattern, with the names of the modules and parameters that match."""

    pattern: str
    style: str
    modules: Sequence[str]
    parameters: Sequence[str]


def hugging_face_plan(model: nn.Module) -> DivisionPlan:
    """Return the plan that Hugging Face gives a model, or models inside of it, as a plan of dure.

    Raises ValueError if there is none, or if it has a style that dure's plans do not express.
    """
    styles = [each for each in _styles(model) if each.modules or each.parameters]
    if not styles:
        raise ValueError(
            f"Hugging Face gives this {type(model).__name__} no tensor plan (base_model_tp_plan): "
            "use plan=ready for dure's own, or write a plan"
        )
    _check_styles(model, styles)
    found: dict[str, list[PlanEntry]] = {}
    outputs = _output_layers(model)
    for each in styles:
        for name, entry in _entries(model, each, outputs):
            found.setdefault(name, []).append(entry)
    _share_heads(model, found)
    _divide_tied(model, found)
    return _by_pattern(model, found, [each.pattern for each in styles])


def _styles(model: nn.Module) -> Iterator[_Style]:
    """Yield the styles of the outermost models of Hugging Face, with names as in `model`."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    outer: list[str] = []
    for name, module in model.named_modules():
        # The attribute that transformers documents for models; no other class has it.
        plan = vars(module).get("_tp_plan")
        if not isinstance(plan, Mapping) or not plan:
            continue
        if any(name.startswith(before) for before in outer):
            continue
        prefix = f"{name}." if name else ""
        outer.append(prefix)
        for pattern, style in plan.items():
            whole = f"{prefix}{pattern}"
            yield _Style(
                whole,
                str(style),
                [each for each in modules if fits(each, whole)],
                [each for each in parameters if fits(each, whole)],
            )


def _check_styles(model: nn.Module, styles: Sequence[_Style]) -> None:
    """Raise ValueError for a style that dure's plans do not express."""
    of = f"Hugging Face's plan for a {type(model).__name__}"
    for each in styles:
        if each.style in _EXPERTS:
            raise ValueError(
                f"{of} divides experts ({each.style} of {each.pattern}), which dure does not: "
                "train with zero, or write a plan that divides the other layers"
            )
    for each in styles:
        if each.style not in _ENTRIES:
            raise ValueError(
                f"{of} has the style {each.style!r} for {each.pattern}, which plans of dure do not "
                "express: train with zero, or write a plan"
            )


def _output_layers(model: nn.Module) -> set[nn.Module]:
    """Return the output layers of the models of Hugging Face in a model."""
    owners: list[Any] = [each for each in model.modules() if "_tp_plan" in vars(each)]
    layers = [owner.get_output_embeddings() for owner in owners]
    return {layer for layer in layers if isinstance(layer, nn.Module)}


def _entries(
    model: nn.Module, each: _Style, outputs: set[nn.Module]
) -> Iterator[tuple[str, PlanEntry]]:
    """Yield names of modules, with the entry of a style. outputs: the output layers."""
    entry = _ENTRIES[each.style]
    if entry is None:
        return
    for name in each.modules:
        module = model.get_submodule(name)
        if isinstance(entry, Vocabulary) and not _is_plain(name, module):
            continue
        if each.style == "colwise":
            yield name, Column(unit=_width_of_heads(model, name))
        elif entry == Column(gather_output=True) and module in outputs:
            # Unlike a Column, an Output divides an odd number of symbols.
            yield name, Output()
        else:
            yield name, entry
    for name in each.parameters:
        path, _, own = name.rpartition(".")
        if each.style != "colwise":
            raise ValueError(
                f"Hugging Face's plan for a {type(model).__name__} has the style {each.style!r} "
                f"for the parameter {name}, which plans of dure do not express: write a plan"
            )
        # Rows of a matrix as torch stores it; the only dimension of a vector.
        yield path, Tensors(own, dim=max(0, model.get_parameter(name).dim() - 2))


def _is_plain(name: str, module: nn.Module) -> bool:
    """Return whether an embedding can be divided by symbols."""
    try:
        embedding_of(name, module)
    except ValueError:
        return False
    return True


def _width_of_heads(model: nn.Module, name: str) -> int:
    """Return the width of a head, if outputs of a layer consist of heads of its module; else 1."""
    width = _number(model.get_submodule(name.rpartition(".")[0]), "head_dim")
    outputs = _number(model.get_submodule(name), "out_features")
    return width if width > 1 and outputs % width == 0 else 1


def _number(module: nn.Module, name: str) -> int:
    """Return an integer of a module; 0 if there is none."""
    value = vars(module).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _share_heads(model: nn.Module, found: dict[str, list[PlanEntry]]) -> None:
    """Let ranks share heads of keys and values in modules with several queries per key."""
    within: dict[str, list[str]] = {}
    for name, entries in found.items():
        if any(isinstance(entry, Column) and entry.unit > 1 for entry in entries):
            within.setdefault(name.rpartition(".")[0], []).append(name)
    for path, names in within.items():
        module = model.get_submodule(path)
        queries = _number(module, "num_key_value_groups")
        outputs = {name: _number(model.get_submodule(name), "out_features") for name in names}
        keys = [name for name in names if outputs[name] * queries == max(outputs.values())]
        if queries < 2 or not keys:
            continue
        width = _number(module, "head_dim")
        for name in keys:
            found[name] = [Column(unit=width, shares=True)]
        units = outputs[keys[0]] // width
        found.setdefault(path, []).append(Attributes("num_key_value_groups", units=units))


def _divide_tied(model: nn.Module, found: dict[str, list[PlanEntry]]) -> None:
    """Divide layers that share a weight by symbols, or leave all of them whole."""
    tied: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            tied.setdefault(id(weight), []).append(name)
    for names in tied.values():
        divided = [name for name in names if name in found]
        embeds = [isinstance(model.get_submodule(name), nn.Embedding) for name in names]
        if not divided or not any(embeds):
            continue
        entries: dict[str, PlanEntry] = {}
        for name in names:
            module = model.get_submodule(name)
            if isinstance(module, nn.Linear):
                entries[name] = Output()
            elif _is_plain(name, module):
                entries[name] = Vocabulary()
        for name in names:
            found.pop(name, None)
        if len(entries) == len(names):
            found.update({name: [entry] for name, entry in entries.items()})


def _by_pattern(
    model: nn.Module, found: Mapping[str, Sequence[PlanEntry]], patterns: Sequence[str]
) -> DivisionPlan:
    """Return a plan by patterns where all matching modules have equal entries, else by names."""
    left = {name: tuple(entries) for name, entries in found.items()}
    plan: dict[str, Sequence[PlanEntry]] = {}
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    # The heads of a module are an entry of the module around the layers that the patterns name.
    around = [pattern.rpartition(".")[0] for pattern in patterns]
    for pattern in dict.fromkeys([*patterns, *around]):
        names = [name for name in modules if fits(name, pattern)]
        entries = {left.get(name) for name in names}
        if len(entries) == 1 and None not in entries:
            plan[pattern] = left[names[0]]
            for name in names:
                del left[name]
    return {**plan, **left}

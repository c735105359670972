"""Families of Hugging Face with a tensor plan: which systems of dure train them.

    python benchmarks/hugging_face_plans.py --result benchmarks/results/hugging_face_plans.json

A family is a config class of transformers with a `base_model_tp_plan`. Each is built at a tiny size
with random weights in float64, and trains two steps on all of its four examples, once by a single
worker and once by each of

    tensor     2 ranks, the plan of Hugging Face (`--plan hf`)
    pipeline   2 ranks, 2 micro-batches
    zero       2 ranks, stage 3
    mesh       4 ranks, pipeline 2 x tensor 2, the plan of Hugging Face

by `dure.train`, with its proofs. It works if all weights after the two steps are those of the
single worker within 1e-10. Otherwise the row has the reason: the error of dure in its own words, or
the largest difference. A family without a tiny model has the error of transformers.

Models of Hugging Face compute norms and softmax in float32, which hides differences: here they get
float64 wherever they ask for float32. A pipeline traces the model, and a trace may not see that: if
it fails, it is tried once more in float32, where the weights have to agree within 1e-5.

`--page docs/hugging-face-plans.md` writes the table into the page, `--table-of FILE` that of an
older result.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo.functional_export  # here, so that not every rank imports what traces models
import torch._export.non_strict_utils
import torch.export._trace
import transformers
from outcome import give, takes_result
from pages import fill, table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto

import dure

JSON = dict[str, Any]

CLOSE = 1e-10
CLOSE_IN_FLOAT32 = 1e-5
BATCH = 4
LENGTH = 8
SYMBOLS = 40
LARGE = 9_000_000
"""Numbers of a model that is not tiny."""

SYSTEMS: dict[str, tuple[dure.Strategy, int]] = {
    "tensor": (dure.TensorParallel(BATCH, plan="hf"), 2),
    "pipeline": (dure.Pipeline(BATCH, microbatches=2), 2),
    "zero": (dure.ZeRO(3, batch_size=BATCH), 2),
    "mesh": (dure.Parallel(dure.Mesh(1, 2, 2), BATCH, 2, plan="hf"), 4),
}

QUICK = ["llama", "qwen3_moe"]

SMALL: dict[str, Any] = {
    "vocab_size": SYMBOLS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # other names of the same
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 64,
    "rotary_dim": 4,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "num_layers": 2,
    "embed_dim": 32,
    # windows, experts, states
    "sliding_window": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_expand": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "original_max_position_embeddings": 64,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": SYMBOLS,
    "image_size": 16,
    "patch_size": 4,
    "use_cache": False,
    "moe_k": 2,
    "num_experts_per_token": 2,
    "mamba_d_ssm": 64,
    "n_shared_experts": 1,
    "num_kv_shared_layers": 0,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
    "index_kpool": 4,
}
"""Values for the names that a config has."""

POSITIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

ELSE: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bailing_hybrid": {"num_group": 1},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "cosmos3_edge_text": {"rope_parameters": POSITIONS},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esmc": {"num_key_value_heads": 4},
    "glm5_next_text": {"num_key_value_heads": 4},
    "hunyuan_vl_text": {"rope_parameters": POSITIONS},
    "hy_v4_vl_text": {"rope_parameters": {**POSITIONS, "mrope_section": [1, 1, 0]}},
    "glm4v_text": {"rope_parameters": POSITIONS},
    "glm_image_text": {"rope_parameters": POSITIONS},
    "glm_ocr_text": {"rope_parameters": POSITIONS},
    "glm4v_moe_text": {"rope_parameters": {**POSITIONS, "mrope_section": [1, 1, 0]}},
    "qwen2_vl_text": {"rope_parameters": POSITIONS},
    "qwen2_5_vl_text": {"rope_parameters": POSITIONS},
}
"""Further values by type of model."""

RANDOM = re.compile(r"drop|noise|jitter")
"""Names of numbers that draw: they are set to 0, so that every system computes alike."""


class InDouble(TorchFunctionMode):
    """float64 wherever a model asks for float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [_wide(each) for each in args]
        named = {name: _wide(each) for name, each in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*given, **named)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value == torch.float32 else value


class Family(NamedTuple):
    """name: the type of the model. config: its class. model: the class that is built."""

    name: str
    config: type
    model: type


class Tiny(nn.Module):
    """A tiny model of a family, which takes a tensor and gives scores. wide: in float64."""

    def __init__(self, family: Family, wide: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = tiny_config(family.config)
        # Kernels of experts compute no float64.
        config._experts_implementation = "eager"
        self.wide = wide
        self.model = family.model(config).to(torch.float64 if wide else torch.float32)
        self.model.requires_grad_(True)
        self.takes = self.model.main_input_name
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise.to(parameter.dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        more = {} if self.takes == "pixel_values" else {"use_cache": False}
        if self.model.config.is_encoder_decoder:
            more["decoder_input_ids"] = inputs
        with InDouble() if self.wide else nullcontext():
            found = self.model(**{self.takes: inputs}, **more)
        scores: Tensor = found.logits if "logits" in found else found.last_hidden_state
        return scores.mean(1)


def tiny_config(kind: type) -> Any:
    """Return a config of a small model without random draws."""
    usual = kind()
    names = {name: value for name, value in vars(usual).items() if not name.startswith("_")}
    chosen = {name: value for name, value in SMALL.items() if name in names}
    for name, value in names.items():
        if RANDOM.search(name) and isinstance(value, int | float) and not isinstance(value, bool):
            chosen[name] = 0.0
    if "qk_rope_head_dim" in chosen:
        # There the width of heads is that of the part with positions.
        chosen["head_dim"] = chosen["qk_rope_head_dim"]
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    return kind(**{**chosen, **ELSE.get(kind.model_type, {})})


def families() -> list[Family]:
    """Return the families of transformers with a tensor plan, by name."""
    found: dict[str, Family] = {}
    for kind in _configs():
        if not getattr(kind, "base_model_tp_plan", None) or not kind.model_type:
            continue
        model = _model_of(kind)
        if model is not None:
            found.setdefault(kind.model_type, Family(kind.model_type, kind, model))
    return sorted(found.values())


def _configs() -> Iterator[Any]:
    for package in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{package.name}.configuration_{package.name}"
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for kind in vars(module).values():
            own = inspect.isclass(kind) and kind.__module__ == module.__name__
            if own and issubclass(kind, transformers.PreTrainedConfig):
                yield kind


def _model_of(config: type) -> type | None:
    """Return the class of language models of a family, else the class of its base models."""
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
        modeling_auto.MODEL_MAPPING,
    ):
        try:
            if config in mapping:
                found = mapping[config]
                return found[0] if isinstance(found, tuple) else found
        except (ImportError, AttributeError, ValueError):
            continue
    return None


def examples(family: Family) -> tuple[Tensor, Tensor]:
    """Return inputs of a family, and targets."""
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 16, (BATCH,), generator=generator)
    if family.model.main_input_name == "pixel_values":
        config = tiny_config(family.config)
        shape = (BATCH, config.num_channels, config.image_size, config.image_size)
        return torch.randn(shape, generator=generator, dtype=torch.float64), targets
    return torch.randint(3, SYMBOLS, (BATCH, LENGTH), generator=generator), targets


def make(family: Family, wide: bool) -> Tiny:
    # Ranks begin with float32, and the masks and positions that a model makes have to be alike.
    torch.set_default_dtype(torch.float64 if wide else torch.float32)
    return Tiny(family, wide)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def line(error: BaseException) -> str:
    """Return an error in one line of at most 400 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:400]


def check_size(family: Family) -> None:
    """Raise ValueError for a model that is large at the sizes of `SMALL`."""
    with torch.device("meta"):
        model = family.model(tiny_config(family.config))
    numbers = sum(each.numel() for each in (*model.parameters(), *model.buffers()))
    if numbers > LARGE:
        raise ValueError(f"no tiny model: {numbers:,} numbers at these sizes")


def tried(family: Family) -> JSON:
    """Return the row of a family."""
    row: JSON = {"family": family.name, "model": family.model.__name__, "systems": {}}
    started = time.perf_counter()
    try:
        check_size(family)
        right, task = alone(family, wide=True)
        row["parameters"] = sum(each.numel() for each in right.values())
    except Exception as error:
        return {**row, "reason": line(error)}
    for system, (strategy, ranks) in SYSTEMS.items():
        found = outcome(task, strategy, ranks, right)
        if "trace" in found.get("reason", ""):
            found = in_float32(family, strategy, ranks)
        row["systems"][system] = found
    return {**row, "seconds": round(time.perf_counter() - started, 1)}


def alone(family: Family, wide: bool) -> tuple[dict[str, Tensor], dure.Task]:
    """Return the weights that a single worker trains, and the task."""
    inputs, targets = examples(family)
    if inputs.is_floating_point() and not wide:
        inputs = inputs.float()
    data = (inputs, targets)
    model = partial(make, family, wide)
    task = dure.Task(model, F.cross_entropy, data, optimizer=optimizer)
    run = dure.train(task, dure.SingleWorker(BATCH), stop=dure.Stop(steps=2))
    return run.model.state_dict(), task


def in_float32(family: Family, strategy: dure.Strategy, ranks: int) -> JSON:
    """Return the outcome in float32: a trace may not see `InDouble`."""
    right, task = alone(family, wide=False)
    again = outcome(task, strategy, ranks, right, close=CLOSE_IN_FLOAT32)
    return {**again, "dtype": "float32"}


def outcome(
    task: dure.Task,
    strategy: dure.Strategy,
    ranks: int,
    right: Mapping[str, Tensor],
    close: float = CLOSE,
) -> JSON:
    """Return whether a system trains what a single worker trains, or the reason why not."""
    try:
        world = dure.Processes(ranks, deadline=60)
        found = dure.train(task, strategy, world, dure.Stop(steps=2)).model.state_dict()
    except Exception as error:
        return {"works": False, "reason": line(error)}
    apart = max(
        (float((found[name].double() - right[name].double()).abs().max()) for name in right),
        default=0.0,
    )
    if not apart < close:
        return {"works": False, "reason": f"weights differ by {apart:.1e} after two steps"}
    return {"works": True, "difference": apart}


def page(result: JSON) -> str:
    """Return the page's table: systems that train a family, or the number of the reason."""
    rows = result["rows"]
    reasons: dict[str, int] = {}
    cells = [[_cell(row, system, reasons) for system in SYSTEMS] for row in rows]
    counts = [
        str(sum(cell.startswith("yes") for cell in column)) for column in zip(*cells, strict=True)
    ]
    lines = [
        [f"{row['family']} ({row['model']})", *own] for row, own in zip(rows, cells, strict=True)
    ]
    head = [f"{len(rows)} families of transformers {result['transformers']}", *SYSTEMS]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([table(head, [["works", *counts], *lines]), "", "Reasons:", "", *notes])


def _cell(row: JSON, system: str, reasons: dict[str, int]) -> str:
    found = row["systems"].get(system)
    if found is None:
        reason = f"the sizes of the benchmark make no model that runs: {row['reason']}"
    elif found["works"]:
        return "yes, in float32" if found.get("dtype") == "float32" else "yes"
    else:
        reason = short(found["reason"])
    reason = re.sub(r"\s+", " ", reason).replace("|", "/").replace("<", "(").replace(">", ")")
    answer = "no" if found is not None else "not tried"
    return f"{answer} ({reasons.setdefault(reason, len(reasons) + 1)})"


def short(reason: str) -> str:
    """Return a reason without the numbers of layers and ranks, so that equal reasons are one."""
    reason = re.sub(r"\brank \d+ failed in (step \d+|the start): ", "", reason)
    for pattern, text in SHORT:
        found = re.search(pattern, reason)
        if found is not None:
            return text.format(*(re.sub(r"\.\d+\.", ".*.", each) for each in found.groups()))
    return re.sub(r"\.\d+\.", ".*.", reason)


SHORT: list[tuple[str, str]] = [
    ("divides experts", "the plan of Hugging Face divides experts, which dure refuses by name"),
    (
        r"has the style '(\w+)'",
        "the plan of Hugging Face has the style {0}, which dure refuses by name",
    ),
    (
        r"^model\.(\S+): .* its gradient differs",
        "the plan of Hugging Face gives another gradient of {0}, which the proof finds",
    ),
    (
        r"module model\.(\S+) cannot be traced, and layers in it are divided",
        "a pipeline cannot trace {0}, which has divided layers",
    ),
    (r"cannot be cut, because torch.export", "a pipeline cannot trace the model"),
    (
        r"^divided by the plan, the model fails in model\.(\S+) ",
        "the code of {0} fails on its part by the plan of Hugging Face, which the proof finds",
    ),
]
"""Patterns of errors, and the texts of the page, with the groups of the pattern."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--families", nargs="+", help="only these types of models")
    parser.add_argument("--page", type=Path, help="the page whose table is written anew")
    parser.add_argument(
        "--table-of", type=Path, metavar="FILE", help="a result; trains nothing, and writes --page"
    )
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="rows so far, one a line: for interrupted runs"
    )
    takes_result(parser)
    asked = parser.parse_args()
    if asked.table_of is not None:
        found = json.loads(asked.table_of.read_text())
    else:
        found = measured(QUICK if asked.quick else asked.families, asked.rows, asked.result)
    if asked.page is not None:
        fill(asked.page, {"families": page(found)})


def measured(names: list[str] | None, file: Path | None, result: Path | None) -> JSON:
    """Try the families of these names, or all, and write the result.

    file: rows of families that were tried before, to which new ones are added.
    """
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = [each for each in families() if names is None or each.name in names]
    found = _rows(file)
    for family in chosen:
        # Another process may have tried it in the meantime.
        found |= _rows(file)
        if family.name in found:
            continue
        found[family.name] = row = tried(family)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if file is not None:
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    rows = [found[family.name] for family in chosen]
    works = {
        system: sum(row["systems"].get(system, {}).get("works", False) for row in rows)
        for system in SYSTEMS
    }
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    done = {"benchmark": "hugging_face_plans", **versions, "works": works, "rows": rows}
    give(done, result, indent=1)
    return done


def _rows(file: Path | None) -> dict[str, JSON]:
    """Return the rows of a file, by family."""
    if file is None or not file.exists():
        return {}
    rows = [json.loads(each) for each in file.read_text().splitlines()]
    return {row["family"]: row for row in rows}


if __name__ == "__main__":
    main()

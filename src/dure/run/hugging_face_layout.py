"""Write a trained model of Hugging Face in the layout of `save_pretrained`: hf/ of the run folder.

    transformers.PreTrainedModel    config.json, generation_config.json and the weights
    peft.PeftModel                  the adapters alone, as PEFT saves them

The weights are those of the run's model.safetensors, tensor by tensor (`DiskTensor`): the process
that writes them does not need memory for the model, however the ranks have divided it. The names
are those of the library: a tied weight has the name from which the library ties the others, and
weights that the library renames on loading get the names of the Hub back. Where the library would
compute other tensors, such as one for each expert, the weights keep the names of the model, which
the library loads too.

No library is imported: if the model is the library's, the library is loaded.

Source: huggingface.co/docs/transformers, `PreTrainedModel.save_pretrained`;
huggingface.co/docs/peft, `PeftModel.save_pretrained`.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dure.errors import DureError, first_line, warn
from dure.record import hugging_face_folder
from dure.record.disk_tensors import DiskTensor, DiskTensors, Leaf
from dure.record.hugging_face_folder import (
    ADAPTER,
    HUGGING_FACE,
    HubModel,
    copy_tokenizer,
    prepare_folder,
    remove_model,
    write_model,
)
from dure.record.run import Run
from dure.record.untrusted_files import contents
from dure.record.weights import tensors_in

_SHOWN = 4
"""Maximum names in a warning."""


def write_hugging_face_layout(run: Run, weights: Path | None) -> None:
    """Write hf/ into the folder of an ended run, if its model is one of Hugging Face.

    weights: path of the run's initial weights, next to which files of a tokenizer may be. Writes
    nothing for another model, or if a part of the model has stayed with clients. An error becomes a
    warning, because the run itself has ended successfully.
    """
    model: Any = run.model
    if run.folder is None or run.summary.get("weights_elsewhere"):
        return
    if not (_is_adapted(model) or _is_pretrained(model)):
        return
    folder = run.folder / HUGGING_FACE
    try:
        prepare_folder(folder)
        _copy_tokenizer(weights, folder)
        leaves = tensors_in(run.folder / "model.safetensors")
        for one in _models(model, leaves):
            write_model(folder, one)
    # The library may raise anything for a model that it cannot save, and the disk may be full.
    except Exception as error:
        # Half a model would take room on a full disk.
        with suppress(OSError):
            remove_model(folder)
        warn(
            f"{folder} was not written, but {run.folder / 'model.safetensors'} has the trained "
            f"weights: {_reason(error)}"
        )


def _reason(error: Exception) -> str:
    """Return the reason of an error in a line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = first_line(error)
    return text if isinstance(error, DureError) else f"{type(error).__name__}: {text}"


def _is_pretrained(model: nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _is_adapted(model: nn.Module) -> bool:
    library = sys.modules.get("peft.peft_model")
    return library is not None and isinstance(model, library.PeftModel)


def _models(model: Any, leaves: Mapping[str, DiskTensor]) -> list[HubModel]:
    """Return the models and adapters to write."""
    if _is_adapted(model):
        adapters = list(model.peft_config)
        found = [_adapter(model, leaves, name) for name in adapters]
        _warn_of_left_out(model, leaves, adapters, found)
        return found
    # Adapters of PEFT inside the library's own model, by `add_adapter`.
    if vars(model).get("_hf_peft_config_loaded"):
        name, *others = model.active_adapters()
        if others:
            raise ValueError("the model has several active adapters: activate one, set_adapter")
        own = _adapter(model, leaves, name, prefix="base_model.model.")._replace(folder="")
        _warn_of_left_out(model, leaves, [name], [own])
        return [own]
    return [_whole(model, leaves)]


# A whole model


def _whole(model: Any, leaves: Mapping[str, DiskTensor]) -> HubModel:
    if vars(model).get("hf_quantizer") is not None:
        raise ValueError("the model is quantised, and its weights are not those of the Hub")
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    configs = {"config.json": config.to_json_string(use_diff=True)}
    if model.can_generate():
        configs["generation_config.json"] = model.generation_config.to_json_string(use_diff=True)
    weights = _names_of_hub(model, _untied(model, leaves))
    return HubModel(weights, configs, limit=hugging_face_folder.SHARD_BYTES)


def _untied(model: Any, leaves: Mapping[str, DiskTensor]) -> dict[str, DiskTensor]:
    """Return the weights in the model's order, without names that the library ties on loading."""
    tensors: dict[str, Any] = model.state_dict(keep_vars=True)
    # Transformers 5 has the names of tied weights, and of their sources. Without them every name
    # is written, with equal values.
    tied: Mapping[str, str] = vars(model).get("all_tied_weights_keys") or {}
    left_out = {
        name
        for name, source in tied.items()
        # The model's own tensors decide: its user may have given the names different tensors.
        if source in leaves and source not in tied and tensors.get(name) is tensors.get(source)
    }
    left_out |= set(model._keys_to_ignore_on_save or ())
    order = [*(name for name in tensors if name in leaves), *leaves]
    return {name: leaves[name] for name in dict.fromkeys(order) if name not in left_out}


def _names_of_hub(model: Any, leaves: Mapping[str, DiskTensor]) -> Mapping[str, Leaf]:
    """Return the weights under the names from which the library renames them on loading."""
    library = sys.modules.get("transformers.core_model_loading")
    if library is None:  # before version 5
        return leaves
    # Tensors without values: only names are needed, and a computation must not cost memory.
    marks = {
        name: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        for name, leaf in leaves.items()
    }
    names = {id(mark): name for name, mark in marks.items()}
    try:
        renamed = library.revert_weight_conversion(model, dict(marks))
    # A computation that tensors without values do not support.
    except Exception:
        return leaves
    found = {name: names.get(id(mark)) for name, mark in renamed.items()}
    if sorted(names.values()) != sorted(name or "" for name in found.values()):
        return leaves
    return {name: leaves[own] for name, own in found.items() if own is not None}


# Adapters


def _adapter(model: Any, leaves: Mapping[str, DiskTensor], name: str, prefix: str = "") -> HubModel:
    """Return an adapter as PEFT saves it. prefix: of names, for an adapter inside a model."""
    config = copy.deepcopy(model.peft_config[name])
    # PEFT selects and renames. Tensors in files are mapped, not read.
    mapped = dict(DiskTensors(leaves))
    own = {id(tensor): leaf for tensor, leaf in zip(mapped.values(), leaves.values(), strict=True)}
    chosen: Mapping[str, Tensor] = sys.modules["peft"].get_peft_model_state_dict(
        model,
        state_dict=mapped,
        adapter_name=name,
        # PEFT would ask the Hub whether the vocabulary has changed.
        save_embedding_layers=_has_own_vocabulary(model, config),
    )
    weights = {prefix + key: own.get(id(value), value) for key, value in chosen.items()}
    if not weights:
        raise ValueError(f"the adapter {name!r} has no weights")
    folder = "" if name == "default" else name
    text = _adapter_config(model, config, prefix)
    return HubModel(weights, {"adapter_config.json": text}, ADAPTER, folder)


def _adapter_config(model: Any, config: Any, prefix: str) -> str:
    """Return the content of adapter_config.json: for inference, with the name of the base."""
    base = model if prefix else model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None and not prefix:
        # PEFT finds the class of the base by it.
        kind = type(base)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return (Path(folder) / "adapter_config.json").read_text()


def _has_own_vocabulary(model: Any, config: Any) -> bool:
    """Return whether the model has another number of tokens than its base has on the disk.

    Such an adapter is of no use without its embeddings.
    """
    file = _config_of_base(config.base_model_name_or_path)
    if file is None:
        return False
    # A model without such a number, or a file that is none of its configuration.
    with suppress(OSError, ValueError, AttributeError, LookupError):
        theirs = json.loads(contents(file, links=True))["vocab_size"]
        return bool(theirs != model.config.vocab_size)
    return False


def _config_of_base(name: str | None) -> Path | None:
    """Return the configuration of a base model, in its folder or in the Hub's cache, or None."""
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name) / "config.json"
    hub = sys.modules.get("huggingface_hub")
    found = None if hub is None else hub.try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def _warn_of_left_out(
    model: Any, leaves: Mapping[str, DiskTensor], names: Iterable[str], found: Iterable[HubModel]
) -> None:
    """Warn about trained parameters that are no part of an adapter."""
    if any(model.peft_config[name].is_prompt_learning for name in names):
        return  # PEFT computes the weights of a prompt from its parameters
    saved = {id(leaf) for one in found for leaf in one.weights.values()}
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    rest = [name for name in trained if name in leaves and id(leaves[name]) not in saved]
    if rest:
        more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
        warn(
            f"{HUGGING_FACE}/ has the adapter alone, and the run has trained "
            f"{', '.join(rest[:_SHOWN])}{more} too: model.safetensors has them"
        )


def _copy_tokenizer(weights: Path | None, folder: Path) -> None:
    """Copy files of a tokenizer from the place of the initial weights, or from a run's hf/."""
    if weights is None:
        return
    source = weights if weights.is_dir() else weights.parent
    hub = source / HUGGING_FACE
    source = hub if hub.is_dir() and not hub.is_symlink() else source
    refused = copy_tokenizer(source, folder)
    if refused:
        warn(
            f"{', '.join(refused)} in {source} was not copied to {folder}, because links and large "
            "files are not: copy it yourself if you trust it"
        )

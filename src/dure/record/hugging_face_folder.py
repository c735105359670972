"""The folder hf/ of a run: a model's files under the names of Hugging Face's `save_pretrained`.

    config.json, generation_config.json             the model
    model.safetensors                               its weights; or, of a model above `SHARD_BYTES`:
    model-00001-of-00003.safetensors, ...           shards
    model.safetensors.index.json                    the shard of each weight
    adapter_config.json, adapter_model.safetensors  an adapter of PEFT, in place of these files
    tokenizer.json, vocab.txt, ...                  copies from the folder of the initial weights

A weight in a file is copied a few million bytes at a time, so a folder takes no memory for its
model. The configuration is removed first and written last: a folder with a configuration has all
the weights of one model, even after a kill.

Source: huggingface.co/docs/transformers, "Model loading"; huggingface.co/docs/peft, "PEFT
checkpoint format".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import torch

from dure.record.disk import make_folder, write_atomically
from dure.record.disk_tensors import PIECE, Leaf
from dure.record.untrusted_files import UnfitFileError, opened
from dure.record.weights import TensorFile

HUGGING_FACE = "hf"
"""Name of the folder in the run folder."""

MODEL = "model"
"""Beginning of the names of a model's files of weights."""

ADAPTER = "adapter_model"
"""Beginning of the name of an adapter's file of weights."""

SHARD_BYTES = 5_000_000_000
"""Most bytes of weights in a file of a model, unless a single weight is larger: 5 GB."""

COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "*.model", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Names of files of a tokenizer or processor. *.model: sentencepiece. None of them is code."""

COPIED_BYTES = 1 << 27
"""Most bytes of such a file: 128 MiB. The largest vocabularies take about 40 MB."""

COPIED_FILES = 32
"""Most such files of a folder."""

_CONFIGS = ("config.json", "adapter_config.json")

# With a dot in front and a number behind: the rest of a write that was killed.
_OF_ADAPTER = re.compile(rf"\.?(adapter_config\.json|{ADAPTER}\.safetensors)(\.\d+)?")
_OF_MODEL = re.compile(
    rf"{_OF_ADAPTER.pattern}|\.?((generation_)?config\.json"
    rf"|{MODEL}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?)(\.\d+)?"
)


class HubModel(NamedTuple):
    """A model, or an adapter, with the names that its files have on the Hub.

    Args:
        weights: tensors by name, in the order of the files.
        configs: contents of JSON files by name.
        stem: beginning of the names of files of weights.
        folder: subfolder, for all adapters but PEFT's "default"; "" for none.
        limit: most bytes of weights in a file; None for a single file.
    """

    weights: Mapping[str, Leaf]
    configs: Mapping[str, str]
    stem: str = MODEL
    folder: str = ""
    limit: int | None = None


def prepare_folder(folder: Path) -> None:
    """Make the folder hf/, or remove the model that an earlier end of the run left there.

    Raises OSError, for example for a link in the place of the folder.
    """
    _make_folder(folder)
    remove_model(folder)


def _make_folder(folder: Path) -> None:
    if folder.is_symlink():
        raise UnfitFileError("it is a link", folder)
    make_folder(folder)


def withdraw_configs(run: Path) -> None:
    """Remove the configurations in hf/ of a run that goes on, so that no library loads the folder.

    Raises OSError.
    """
    for file in _written(run / HUGGING_FACE):
        if file.name in _CONFIGS:
            file.unlink(missing_ok=True)


def remove_model(folder: Path) -> None:
    """Remove models and adapters from hf/; other files stay. Raises OSError."""
    # Configurations first: without one, no library loads an incomplete model.
    for file in sorted(_written(folder), key=lambda file: file.name not in _CONFIGS):
        file.unlink(missing_ok=True)


def _written(folder: Path) -> list[Path]:
    """Return the files that a run has written to hf/; none through a link.

    In subfolders, which may be the user's, these are files of adapters alone.
    """
    if not _is_folder(folder):
        return []
    content = list(folder.iterdir())
    found = [one for one in content if _OF_MODEL.fullmatch(one.name)]
    for adapter in filter(_is_folder, content):
        found += [one for one in adapter.iterdir() if _OF_ADAPTER.fullmatch(one.name)]
    return found


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def write_model(folder: Path, model: HubModel) -> None:
    """Write weights, index and configurations, in this order.

    Raises RunFolderWriteError or OSError if a file cannot be written, TypeError for a dtype that
    the format of the weights lacks.
    """
    if model.folder:
        if Path(model.folder).name != model.folder or model.folder.startswith("."):
            raise ValueError(f"the adapter's name {model.folder!r} is not the name of a folder")
        folder = folder / model.folder
        _make_folder(folder)
    pairs = [name for name, one in model.weights.items() if one.dtype == torch.complex128]
    if pairs:
        raise TypeError(f"safetensors do not support torch.complex128, the dtype of {pairs[0]}")
    shards = shards_of(model.weights, model.limit)
    files = _names(model.stem, len(shards))
    for name, shard in zip(files, shards, strict=True):
        # Readers of the library look for this entry.
        write_atomically(folder / name, TensorFile(shard, {"format": "pt"}))
    if len(shards) > 1:
        _write_text(folder / f"{model.stem}.safetensors.index.json", _index(files, shards))
    # The model's configuration last.
    for name in sorted(model.configs, key=lambda name: name in _CONFIGS):
        _write_text(folder / name, model.configs[name])


def shards_of(weights: Mapping[str, Leaf], limit: int | None) -> list[dict[str, Leaf]]:
    """Divide weights, in their order, into files of at most `limit` bytes of weights.

    A larger weight is alone in its file.
    """
    shards: list[dict[str, Leaf]] = [{}]
    room = limit
    for name, weight in weights.items():
        if room is not None and limit is not None:
            if shards[-1] and weight.nbytes > room:
                shards.append({})
                room = limit
            room -= weight.nbytes
        shards[-1][name] = weight
    return shards


def _names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]


def _index(files: list[str], shards: list[dict[str, Leaf]]) -> str:
    weights = [weight for shard in shards for weight in shard.values()]
    sizes = {
        "total_parameters": sum(weight.numel() for weight in weights),
        "total_size": sum(weight.nbytes for weight in weights),
    }
    pairs = zip(files, shards, strict=True)
    places = {name: file for file, shard in pairs for name in shard}
    return json.dumps({"metadata": sizes, "weight_map": places}, indent=2, sort_keys=True)


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy files of a tokenizer or processor (`COPIED`) from `source` into `folder`.

    Returns the names of files that are not copied: links, files with hard links, files above
    `COPIED_BYTES`. Raises RunFolderWriteError if a copy cannot be written.
    """
    refused = []
    for name in _tokenizer_files(source):
        try:
            file = opened(source / name, most=COPIED_BYTES)
        except OSError:
            refused.append(name)
            continue
        with file:
            write_atomically(folder / name, _pieces(file))
    return refused


def _tokenizer_files(source: Path) -> list[str]:
    """Return the names of such files in a folder; an empty list if there is no folder."""
    with suppress(OSError):
        names = sorted(one.name for one in source.iterdir())
        return [name for name in names if _is_tokenizer_s(name)][:COPIED_FILES]
    return []


def _is_tokenizer_s(name: str) -> bool:
    return not name.startswith(".") and any(fnmatch(name, pattern) for pattern in COPIED)


def _pieces(file: BufferedReader) -> Iterator[bytes]:
    """Yield the file's bytes. The file may have grown since its size was checked."""
    left = COPIED_BYTES
    while left and (piece := file.read(min(PIECE, left))):
        left -= len(piece)
        yield piece


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, (text.rstrip("\n") + "\n").encode())

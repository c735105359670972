"""Weights that a run begins with: the same bits as a factory that loads them itself."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.initial_weights import load_initial_weights
from dure.errors import RunFolderError
from dure.memory.mapped import Disk, is_mapped, mapped, move_views_to_files
from dure.record.weights import weights_to_bytes
from small import largest_difference, network, same_bits, small_task


def saved(model: nn.Module, folder: Path, **changes: torch.Tensor | None) -> Path:
    """The model's state_dict in a file, with other tensors under some names; None: without."""
    tensors = {**model.state_dict(), **changes}
    file = folder / "weights.safetensors"
    there = {name: one for name, one in tensors.items() if one is not None}
    file.write_bytes(weights_to_bytes(there))
    return file


def trained_before() -> nn.Module:
    torch.manual_seed(3)
    return network()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return network()


@pytest.mark.parametrize("model", [network, on_meta])
@pytest.mark.parametrize("strategy", [dure.SingleWorker(), dure.FedAvg(clients=3)])
def test_a_run_begins_with_them_in_every_system(tmp_path: Path, model, strategy) -> None:
    stop = dure.Stop(epochs=1)
    given = small_task(model=model, weights=saved(trained_before(), tmp_path))
    expected = dure.train(small_task(model=trained_before), strategy, stop=stop)
    assert same_bits(dure.train(given, strategy, stop=stop), expected)


def test_ranks_read_their_parts(tmp_path: Path) -> None:
    stop = dure.Stop(epochs=1)
    expected = dure.train(small_task(model=trained_before), dure.SingleWorker(), stop=stop)
    given = small_task(model=on_meta, weights=saved(trained_before(), tmp_path))
    run = dure.train(given, dure.Pipeline(microbatches=2), dure.Processes(2), stop)
    assert largest_difference(run, expected) < 1e-12


def test_a_run_that_goes_on_begins_with_the_same(tmp_path: Path) -> None:
    out = tmp_path / "run"
    strategy = dure.SingleWorker(batch_size=8)
    task = dure.load_task("digits", model="logistic")
    weights = saved(seeded_model(task, 1), tmp_path)
    task = replace(task, weights=weights)
    whole = dure.train(task, strategy, stop=dure.Stop(steps=4))
    dure.train(task, strategy, stop=dure.Stop(steps=2), out=out)
    said = json.loads((out / "config.json").read_text())["task"]
    assert said["weights_from"] == str(weights)
    assert len(said["weights"]) == 64
    moved = weights.rename(tmp_path / "moved.safetensors")
    with pytest.raises(
        RunFolderError, match="does not exist any more: give their path with --weights"
    ):
        dure.resume(out)
    other = saved(seeded_model(replace(task, weights=None), 2), tmp_path)
    with pytest.raises(RunFolderError, match=r"task.weights is .* but was"):
        dure.resume(out, weights=other)
    run = dure.resume(out, weights=moved, stop=dure.Stop(steps=4))
    assert same_bits(run, whole)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def test_one_name_of_a_tied_tensor_is_enough(tmp_path: Path) -> None:
    there = Tied()
    model = Tied()
    load_initial_weights(model, saved(there, tmp_path, **{"head.weight": None}))
    assert model.head.weight is model.table.weight
    assert torch.equal(model.head.weight, there.table.weight)
    with pytest.raises(ValueError, match="are one tensor in the model, and"):
        load_initial_weights(Tied(), saved(there, tmp_path, **{"head.weight": torch.ones(5, 3)}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"scale": None, "more": torch.ones(1)},
            r"do not match the model: scale missing in the file; more not in the model$",
        ),
        ({"scale": torch.ones(4)}, r"scale is \(4,\) in the file and \(3,\) in the model$"),
        (
            {"scale": torch.ones(3).long()},
            "scale is torch.int64 in the file and torch.float32 in the",
        ),
    ],
)
def test_other_names_and_shapes_are_said(tmp_path: Path, changes, complaint) -> None:
    file = saved(Tied(), tmp_path, **changes)
    with pytest.raises(ValueError, match=complaint):
        dure.train(small_task(model=Tied, weights=file), dure.SingleWorker())


def test_what_the_files_have_no_values_for_may_not_be_on_meta(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(
        ValueError, match=r"creates passing on the meta device, and .* has no values"
    ):
        load_initial_weights(model, saved(Tied(), tmp_path))


def test_what_lies_in_files_becomes_a_view_of_the_checkpoint(tmp_path: Path) -> None:
    there = nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600)).half()
    file = saved(there, tmp_path)
    for dtype in (torch.float16, torch.float32):
        with mapped(Disk(), least=1 << 19):
            model = nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600)).to(dtype)
            load_initial_weights(model, file)
        large, small = model[0].weight, model[0].bias
        assert is_mapped(large)
        assert not is_mapped(small)
        # Adding to the values leaves the checkpoint as it is.
        assert torch.equal(large, there[0].weight.to(dtype))
        move_views_to_files([small, large])
        assert is_mapped(large)
        assert torch.equal(large, there[0].weight.to(dtype))
        with torch.no_grad():
            large += 1
    load_initial_weights(model, file)
    assert torch.equal(model[0].weight, there[0].weight.float())


class Library(nn.Module):
    """What makes a model one of Hugging Face's, in whose place it stands."""

    base_model_prefix = "base"
    _keys_to_ignore_on_load_missing = None
    _keys_to_ignore_on_load_unexpected = (r"position_ids$",)

    @property
    def base_model(self) -> nn.Module:
        return getattr(self, "base", self)


class Base(Library):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)


class WithHead(Library):
    def __init__(self, head: str = "head") -> None:
        super().__init__()
        self.base = Base()
        self.add_module(head, nn.Linear(3, 2))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = WithHead()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in = SimpleNamespace(PreTrainedModel=Library)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", stands_in)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("there", "made"),
    [
        *((there, made) for there in (Base, WithHead) for made in (Base, WithHead, Around)),
        # The library itself finds no base in a module around it.
        (Around, Around),
    ],
)
def test_models_of_hugging_face_may_share_a_base_alone(tmp_path: Path, there, made) -> None:
    source, model = there(), made()
    extra = {"base.position_ids": torch.arange(3)} if there is WithHead else {}
    load_initial_weights(model, saved(source, tmp_path, **extra))
    mine = _base_of(model).state_dict()
    for name, value in _base_of(source).state_dict().items():
        assert torch.equal(mine[name], value)


def _base_of(model: nn.Module) -> nn.Module:
    return model.inner.base if isinstance(model, Around) else model.base_model


@pytest.mark.usefixtures("library")
def test_a_base_has_to_be_whole_and_other_heads_are_told(tmp_path: Path) -> None:
    source = WithHead("other")
    # As early checkpoints call what a layer norm has.
    old = {
        "base.norm.gamma": source.base.norm.weight * 2,
        "base.norm.beta": source.base.norm.bias + 1,
        "base.norm.weight": None,
        "base.norm.bias": None,
    }
    file = saved(source, tmp_path, **old)
    model = WithHead()
    load_initial_weights(model, file)
    assert torch.equal(model.base.norm.weight, torch.full((3,), 2.0))
    with (
        pytest.warns(
            UserWarning,
            match="does not have head.weight, head.bias of the model: they are initialised",
        ),
        pytest.warns(UserWarning, match="has other.bias, other.weight, which the model does not"),
        pytest.raises(ValueError, match="no trainable parameter"),
    ):
        dure.train(small_task(model=_frozen, weights=file), dure.SingleWorker())
    file = saved(source, tmp_path, **{"base.layer.bias": None})
    with pytest.raises(
        ValueError, match=r"not match the model: base.layer.bias missing in the file$"
    ):
        load_initial_weights(WithHead(), file)


def _frozen() -> nn.Module:
    return WithHead().requires_grad_(False)

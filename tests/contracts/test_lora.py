"""Adapters of a task: their text, where they are drawn, and training in every system of ranks."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.cli.main import main
from dure.contracts.adapter import lora_layers, lora_names, parse_adapter
from dure.contracts.fresh_model import seeded_model
from dure.run.config import run_request_of
from dure.run.registry import parse_strategy
from small import largest_difference, network, same_bits, small_task

LORA = dure.LoRA(2, ".*", alpha=4)


def adapted(adapter: Any = LORA, **changes: Any) -> dure.Task:
    return small_task(adapter=adapter, **changes)


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        (dure.LoRA(8, "q_proj|v_proj", 16), "lora:8:q_proj|v_proj:16"),
        (dure.LoRA((4, 8, 16), "a"), "lora:4,8,16:a:16"),
        (dure.LoRA((4,), "a"), "lora:4,:a:16"),
        (dure.LoRA(1, "a", 1 / 3), f"lora:1:a:{1 / 3!r}"),
        (dure.LoRA(1, "a", 2, rslora=True, freeze_a=True), "lora:1:a:2:freeze-a:rslora"),
        (dure.LoRA(1, "a", 2, merge="svd", train="head"), "lora:1:a:2:svd:train=head"),
    ],
    ids=str,
)
def test_an_adapter_is_written_and_read(adapter: dure.LoRA, text: str) -> None:
    assert str(adapter) == text
    assert parse_adapter(text) == adapter
    assert adapted(text).adapter == adapter


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dure.LoRA(0), "rank=0"),
        (lambda: dure.LoRA(()), "a rank for each client in turn"),
        (lambda: dure.LoRA((2, 0)), "1 or more"),
        (lambda: dure.LoRA(2, "["), "not a regular expression"),
        (lambda: dure.LoRA(2, ""), "give a regular expression"),
        (lambda: dure.LoRA(2, "(?:a)"), "without one"),
        (lambda: dure.LoRA(2, "a", -1), "greater than 0"),
        (lambda: dure.LoRA(2, "a", merge="stak"), "'stack'"),  # type: ignore[arg-type]
        (lambda: dure.LoRA(2, "a", rslora=1), "True or False"),  # type: ignore[arg-type]
        (lambda: dure.LoRA(ranks=2), "did you mean 'rank'"),  # type: ignore[call-arg]
        (lambda: adapted(3), "dure.LoRA"),
        (lambda: adapted("loa:3:a"), "lora:RANK:TARGETS:ALPHA"),
        (lambda: adapted("lora:x:a"), "lora:RANK:TARGETS:ALPHA"),
        (lambda: adapted("lora:3:a:1:fast"), "'fast' is none of"),
    ],
)
def test_what_is_no_adapter_is_refused_in_a_line(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as told:
        make()
    assert message in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (dure.LoRA(2, "q_proj"), "matches no linear layer of the model; its linear layers are 0, "),
        (dure.LoRA(2, "0", train="head"), "matches no parameter of the model besides"),
    ],
    ids=str,
)
def test_names_that_the_model_lacks_are_refused(adapter: dure.LoRA, message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        dure.train(adapted(adapter), dure.SingleWorker(8), stop=dure.Stop(steps=1))
    assert "\n" not in str(told.value)


def test_a_model_with_adapters_gets_no_others() -> None:
    task = adapted()
    with pytest.raises(ValueError, match="has adapters already"):
        seeded_model(replace(task, model=task.new_model), 0)


def test_a_missing_extra_is_named_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name == "peft" else real(name)
    )
    with pytest.raises(ValueError, match=r'pip install "dure\[peft\]"') as told:
        seeded_model(adapted(), 0)
    assert "\n" not in str(told.value)


def test_factors_are_drawn_under_the_seed_and_the_base_is_the_models() -> None:
    before = torch.get_rng_state()
    one, again, other = (seeded_model(adapted(), seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    plain = seeded_model(small_task(), 0).state_dict()
    for name, value in one.items():
        assert torch.equal(value, again[name])
        if "lora_A" in name:
            assert not torch.equal(value, other[name])
        elif "lora_B" in name:
            assert not value.any()
        else:
            assert torch.equal(value, plain[name.replace(".base_layer", "")])


def test_targets_name_the_end_of_a_path() -> None:
    def nested() -> nn.Module:
        layer = nn.ModuleDict({"q_proj": nn.Linear(6, 6), "my_q_proj": nn.Linear(6, 6)})
        return nn.ModuleDict({"first": layer, "q_proj": nn.Linear(6, 3)})

    model = dure.Task(nested, None, adapter=dure.LoRA(2, "q_proj")).new_model()  # type: ignore[arg-type]
    assert [name for name, _ in lora_layers(model)] == ["first.q_proj", "q_proj"]
    model = dure.Task(nested, None, adapter=dure.LoRA(2, r"first\..*")).new_model()  # type: ignore[arg-type]
    assert [name for name, _ in lora_layers(model)] == ["first.q_proj", "first.my_q_proj"]


@pytest.mark.parametrize("rslora", [False, True])
def test_the_scaling_is_pefts(rslora: bool) -> None:
    adapter = dure.LoRA(4, ".*", alpha=3, rslora=rslora)
    (first, *_) = lora_names(seeded_model(adapted(adapter), 0))
    assert first.scaling == adapter.scaling(4) == (1.5 if rslora else 0.75)


def test_the_trained_parameters_are_the_factors_and_those_that_are_named() -> None:
    def trained(**settings: Any) -> set[str]:
        model = seeded_model(adapted(dure.LoRA(2, "0|2", **settings)), 0)
        return {name for name, one in model.named_parameters() if one.requires_grad}

    factors = {f"{layer}.lora_{which}.default.weight" for layer in (0, 2) for which in "AB"}
    assert trained() == factors
    assert trained(train=r"4\.|2.*bias") == factors | {"4.weight", "4.bias", "2.base_layer.bias"}
    assert trained(freeze_a=True) == {name for name in factors if "lora_B" in name}


def test_weights_of_the_model_and_of_an_adapted_run_are_taken(tmp_path: Path) -> None:
    plain = dure.train(
        small_task(), dure.SingleWorker(8), stop=dure.Stop(steps=2), out=tmp_path / "plain"
    )
    task = adapted(weights=tmp_path / "plain")
    run = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=2), out=tmp_path / "run")
    learned = plain.model.state_dict()
    for name, value in run.model.state_dict().items():
        if "lora" not in name:
            assert torch.equal(value, learned[name.replace(".base_layer", "")])
    begun = seeded_model(adapted(weights=tmp_path / "run"), 1).state_dict()
    assert all(torch.equal(value, begun[name]) for name, value in run.model.state_dict().items())


def test_the_run_folder_has_the_adapter(tmp_path: Path) -> None:
    task = replace(dure.load_task("digits"), adapter=dure.LoRA(2, ".*", train="bias"))
    worker = dure.SingleWorker(64)
    run = dure.train(task, worker, stop=dure.Stop(steps=2), out=tmp_path / "run")
    assert run_request_of(tmp_path / "run").task.learning == {"adapter": "lora:2:.*:16:train=bias"}
    resumed = dure.resume(tmp_path / "run", stop=dure.Stop(steps=4))
    whole = dure.train(task, worker, stop=dure.Stop(steps=4))
    assert same_bits(resumed, whole)
    assert not same_bits(resumed, run)


def test_the_command_line_has_the_flag(tmp_path: Path) -> None:
    flags = ["--adapter", "lora:2:.*:4", "--steps", "1", "--out", str(tmp_path / "run")]
    assert main(["train", "digits", "single-worker", *flags]) == 0
    assert run_request_of(tmp_path / "run").task.learning == {"adapter": "lora:2:.*:4"}
    assert main(["predict", str(tmp_path / "run"), "test:0"]) == 0


EXACT = [
    ("data-parallel,batch_size=8", 2),
    ("zero,batch_size=8,stage=1", 2),
    ("zero,batch_size=8,stage=3", 2),
    ("pipeline,batch_size=8,schedule=zero-bubble", 2),
    ("tensor-parallel,batch_size=8", 2),
    ("parallel,batch_size=8,microbatches=1,data=2,tensor=2", 4),
    ("parallel,batch_size=8,microbatches=2,data=2,pipeline=2,zero=1", 4),
]
"""Systems of ranks that walk the path of one worker."""

OTHERS = [
    ("parallel-sgd,batch_size=4", 2),
    ("local-sgd,batch_size=8", 2),
    ("diloco,batch_size=8", 2),
    ("admm,batch_size=4", 2),
    ("parameter-server,batch_size=8,workers=2,staleness=0", 4),
    ("downpour,batch_size=8,replicas=1,overlap=false", 3),
]


@pytest.fixture(scope="module")
def one_worker() -> dure.Run:
    return dure.train(adapted(), dure.SingleWorker(8), stop=dure.Stop(steps=4))


@pytest.mark.parametrize(("system", "ranks"), EXACT + OTHERS, ids=str)
def test_ranks_train_the_factors_alone(system: str, ranks: int, one_worker: dure.Run) -> None:
    strategy = parse_strategy(system)
    stop = dure.Stop(steps=4) if strategy.traits.unit == "step" else dure.Stop(rounds=2)
    run = dure.train(adapted(), strategy, dure.Processes(ranks), stop)
    drawn = seeded_model(adapted(), 0).state_dict()
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, drawn[name]) == ("lora" not in name), name
    if (system, ranks) in EXACT:
        assert largest_difference(run, one_worker) < 1e-12


def test_precisions_gradients_and_averages_go_with_adapters() -> None:
    task = adapted(precision="bf16", clip_norm=0.5, ema=0.9, model=lambda: network(torch.float32))
    task = replace(task, dtype=torch.float32)
    run = dure.train(task, dure.DataParallel(8), dure.Processes(2), dure.Stop(steps=2))
    assert run.summary["steps"] == 2

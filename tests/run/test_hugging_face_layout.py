"""hf/ of a run: from_pretrained loads the trained model, whatever system has trained it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dure
from dure.collectives import tensor_transfer
from dure.contracts.fresh_model import seeded_model
from dure.contracts.world import RankContext
from dure.machine.memory import trim_heap
from dure.memory.spill_store import SpillStore
from dure.memory.weight_files import stored_in
from dure.parallel.zero import ZeroRedundancy
from dure.record import hugging_face_folder
from dure.record.history import History
from dure.record.hugging_face_folder import copy_tokenizer, shards_of, withdraw_configs
from dure.record.run import Run, RunFolder
from dure.record.weights import TensorFile
from dure.run.hugging_face_layout import write_hugging_face_layout
from small import small_task

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TOKENS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
WHOLE = ["config.json", "generation_config.json", "model.safetensors"]
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]


def llama(**changes: Any) -> Any:
    settings = {**TOKENS, **SIZES, **HEADS, "use_cache": False, "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **changes}))


def gpt2() -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**TOKENS, **sizes))


def bert() -> Any:
    sizes = {**SIZES, "vocab_size": 32, "num_attention_heads": 2, "max_position_embeddings": 16}
    config = transformers.BertConfig(**sizes, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(**TOKENS, **SIZES, **HEADS, num_local_experts=2)
    config.use_cache = False
    return transformers.MixtralForCausalLM(config)


def llava() -> Any:
    """A model that the library renames on loading."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes = {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.LlavaConfig(
        text_config=llama().config,
        vision_config=transformers.CLIPVisionConfig(**vision, **sizes),
        image_token_index=31,
    )
    return transformers.LlavaForConditionalGeneration(config)


def lora(**settings: Any) -> Any:
    # Random values from the start: zeros would not show a wrong adapter.
    usual = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(llama(), peft.LoraConfig(**{**usual, **settings}))


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self, classes: bool = False) -> None:
        self.classes = classes

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        labels = torch.tensor(index % 3) if self.classes else words.clone()
        return {"input_ids": words, "labels": labels}


WORDS = torch.stack([Texts()[index]["input_ids"] for index in range(3)])


def task_of(model: Any, **changes: Any) -> dure.Task:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    loss = dure.OwnLoss("examples" if model is bert else "next-tokens")
    return dure.Task(model, loss, Texts(model is bert), optimizer=optimizer, **changes)


ALONE = dure.SingleWorker(batch_size=4)
STOP = dure.Stop(steps=2)


def trained(model: Any, out: Path, **changes: Any) -> Run:
    return dure.train(task_of(model, **changes), ALONE, stop=STOP, out=out)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=WORDS).logits
    return found


def loaded(kind: Any, run: Run) -> Any:
    return kind.from_pretrained(run.folder / "hf")  # type: ignore[operator]


def adapted(model: Any, run: Run) -> Any:
    """The base under the run's seed, with the adapter of hf/."""
    base = seeded_model(task_of(model), 0).unload()  # type: ignore[operator]
    return peft.PeftModel.from_pretrained(base, run.folder / "hf")  # type: ignore[operator]


def files(run: Run) -> list[str]:
    assert run.folder is not None
    return sorted(one.name for one in (run.folder / "hf").iterdir())


def equal(left: nn.Module, right: nn.Module) -> bool:
    mine, other = left.state_dict(), right.state_dict()
    same = (torch.equal(mine[name], other[name]) for name in mine)
    return mine.keys() == other.keys() and all(same)


SYSTEMS = [
    (ALONE, None),
    (dure.DataParallel(batch_size=4), dure.Processes(2)),
    (dure.ZeRO(stage=3, batch_size=4), dure.Processes(2)),
    (dure.TensorParallel(batch_size=4), dure.Processes(2)),
    (dure.Pipeline(batch_size=4, microbatches=2), dure.Processes(2)),
    (dure.FedAvg(clients=2, batch_size=2), None),
]


@pytest.mark.parametrize(("strategy", "world"), SYSTEMS, ids=[one.name for one, _ in SYSTEMS])
def test_from_pretrained_loads_the_model_of_every_system(tmp_path: Path, strategy, world) -> None:
    stop = dure.Stop(rounds=1) if strategy.name == "fed-avg" else STOP
    run = dure.train(task_of(llama), strategy, world, stop, out=tmp_path / "run")
    assert files(run) == WHOLE
    model = loaded(transformers.AutoModelForCausalLM, run)
    assert equal(model, run.model)
    assert torch.equal(logits(model), logits(run.model))
    # Tied again: the file has one of the names.
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in stored(run)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [SYSTEMS[0], SYSTEMS[2], SYSTEMS[4], SYSTEMS[5]],
    ids=lambda one: getattr(one, "name", ""),
)
def test_peft_loads_the_adapter(tmp_path: Path, strategy, world) -> None:
    stop = dure.Stop(rounds=1) if strategy.name == "fed-avg" else STOP
    run = dure.train(task_of(lora), strategy, world, stop, out=tmp_path / "run")
    assert files(run) == ADAPTER
    model = adapted(lora, run)
    assert torch.equal(logits(model), logits(run.model))
    assert not torch.equal(logits(model), logits(seeded_model(task_of(lora), 0)))


def stored(run: Run) -> dict[str, Any]:
    assert run.folder is not None
    return stored_in(run.folder / "hf")


@pytest.mark.parametrize("model", [llama, gpt2, bert, llava])
def test_files_are_those_of_save_pretrained(tmp_path: Path, model) -> None:
    run = trained(model, tmp_path / "run")
    run.model.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    hf = tmp_path / "run" / "hf"
    theirs = sorted(one.name for one in (tmp_path / "theirs").iterdir())
    assert files(run) == theirs
    for name in theirs:
        if name.endswith(".json"):
            there = (tmp_path / "theirs" / name).read_text()
            assert json.loads((hf / name).read_text()) == json.loads(there)
    library = pytest.importorskip("safetensors.torch")
    mine = library.load_file(hf / "model.safetensors")
    other = library.load_file(tmp_path / "theirs" / "model.safetensors")
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert (mine.keys() <= run.model.state_dict().keys()) == (model is not llava)
    assert equal(loaded(type(run.model), run), run.model)


def test_the_adapter_is_that_of_save_pretrained(tmp_path: Path) -> None:
    for name, settings in {"causal": {"task_type": "CAUSAL_LM"}, "none": {"bias": "all"}}.items():
        out = tmp_path / name
        run = trained(partial(lora, **settings), out / "run")
        run.model.save_pretrained(out / "theirs")  # type: ignore[operator]
        for file in ADAPTER:
            mine, other = (out / place / file for place in ("run/hf", "theirs"))
            if file.endswith(".json"):
                ours, theirs = (json.loads(one.read_text()) for one in (mine, other))
                # peft writes a set, whose order is that of the strings' hashes.
                for told in (ours, theirs):
                    told["target_modules"].sort()
                assert ours == theirs
            else:
                library = pytest.importorskip("safetensors.torch")
                left, right = library.load_file(mine), library.load_file(other)
                assert left.keys() == right.keys()
                assert all(torch.equal(left[key], right[key]) for key in left)


def two_adapters() -> Any:
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=1, target_modules=["o_proj"]))
    return model


def test_further_adapters_are_in_folders_of_their_own(tmp_path: Path) -> None:
    run = trained(two_adapters, tmp_path / "run")
    assert files(run) == [*ADAPTER, "second"]
    assert sorted(os.listdir(tmp_path / "run/hf/second")) == ADAPTER
    assert torch.equal(logits(adapted(lora, run)), logits(run.model))


def added_adapter() -> Any:
    model = llama()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model


def test_an_adapter_inside_a_model_of_the_library_is_written_as_an_adapter(
    tmp_path: Path, monkeypatch
) -> None:
    # The newest transformers demands a version of PEFT that need not be installed.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    run = trained(added_adapter, tmp_path / "run")
    assert files(run) == ADAPTER
    base = llama()
    values = run.model.state_dict()
    own = {name.replace(".base_layer", ""): value for name, value in values.items()}
    base.load_state_dict({name: value for name, value in own.items() if "lora_" not in name})
    model = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "hf")
    assert torch.equal(logits(model), logits(run.model))


def also_embeddings() -> Any:
    model = lora()
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def test_trained_weights_beside_the_adapter_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"has the adapter alone, and the run has trained .*embed"):
        trained(also_embeddings, tmp_path / "run")


def test_experts_keep_the_names_of_the_model(tmp_path: Path) -> None:
    run = trained(mixtral, tmp_path / "run")
    assert "model.layers.0.mlp.experts.down_proj" in stored(run)
    assert equal(loaded(transformers.AutoModelForCausalLM, run), run.model)


def tied_by_hand() -> Any:
    model = llama(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def test_weights_that_only_the_user_ties_are_written_under_each_name(tmp_path: Path) -> None:
    run = trained(tied_by_hand, tmp_path / "run")
    assert equal(loaded(transformers.AutoModelForCausalLM, run), run.model)


def test_the_average_is_written(tmp_path: Path) -> None:
    run = trained(llama, tmp_path / "run", ema=0.5)
    model = loaded(transformers.AutoModelForCausalLM, run)
    assert equal(model, run.model)
    assert not equal(model, trained(llama, tmp_path / "other").model)


def test_a_large_model_is_in_several_files_with_an_index(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hugging_face_folder, "SHARD_BYTES", 5000)
    zero, world = SYSTEMS[2]
    run = dure.train(task_of(llama), zero, world, STOP, out=tmp_path / "run")
    hf = tmp_path / "run" / "hf"
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 1
    assert not (hf / "model.safetensors").exists()
    assert index["metadata"]["total_parameters"] == run.model.num_parameters()  # type: ignore[operator]
    assert all((hf / name).stat().st_size < 5000 + 2000 for name in shards)
    assert equal(loaded(transformers.AutoModelForCausalLM, run), run.model)
    # And dure begins with it.
    again = dure.train(
        task_of(llama, weights=hf), ALONE, stop=dure.Stop(steps=1), out=tmp_path / "again"
    )
    assert equal(loaded(transformers.AutoModelForCausalLM, again), again.model)
    # The resumed run is small again: none of the shards stays.
    monkeypatch.undo()
    run = dure.resume(tmp_path / "run", task=task_of(llama), stop=dure.Stop(steps=3))
    assert files(run) == WHOLE
    assert equal(loaded(transformers.AutoModelForCausalLM, run), run.model)


def test_a_weight_that_is_larger_than_a_file_is_alone() -> None:
    weights = {name: torch.zeros(size) for name, size in zip("abcde", (1, 9, 1, 2, 1), strict=True)}
    found = [list(shard) for shard in shards_of(weights, 12)]
    assert found == [["a"], ["b"], ["c", "d"], ["e"]]
    assert [list(shard) for shard in shards_of(weights, None)] == [list("abcde")]


def test_a_resumed_run_has_its_own_model_or_none(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = trained(llama, out)
    before = loaded(transformers.AutoModelForCausalLM, first)
    (out / "hf" / "README.md").write_text("mine")
    (out / "hf" / "mine").mkdir()
    (out / "hf" / "mine" / "config.json").write_text("mine")
    run = dure.resume(out, task=task_of(llama), stop=dure.Stop(steps=4))
    after = loaded(transformers.AutoModelForCausalLM, run)
    assert equal(after, run.model)
    assert not equal(after, before)
    assert files(run) == sorted(["README.md", "mine", *WHOLE])
    assert os.listdir(out / "hf" / "mine") == ["config.json"]
    withdraw_configs(out)
    with pytest.raises((OSError, ValueError), match="config"):
        loaded(transformers.AutoModelForCausalLM, run)


def test_a_failure_leaves_the_run(tmp_path: Path, monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dure.run.hugging_face_layout.write_model", full)
    with pytest.warns(
        UserWarning, match=r"hf was not written, but .*model.safetensors has"
    ) as told:
        run = trained(llama, tmp_path / "run")
    assert [str(one.message).count("\n") for one in told] == [0]
    assert files(run) == []
    assert (tmp_path / "run" / "model.safetensors").exists()
    monkeypatch.undo()
    # A file in the place of the folder.
    shutil.rmtree(tmp_path / "run" / "hf")
    (tmp_path / "run" / "hf").write_text("mine")
    with pytest.warns(UserWarning, match="hf was not written, but .*: File exists"):
        write_hugging_face_layout(run, None)
    (tmp_path / "run" / "hf").unlink()
    # A link in the place of the folder leads to another folder of the user.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    (tmp_path / "run" / "hf").symlink_to(tmp_path / "mine")
    with pytest.warns(UserWarning, match="hf was not written, but .*: it is a link"):
        write_hugging_face_layout(run, None)
    assert os.listdir(tmp_path / "mine") == ["config.json"]
    withdraw_configs(tmp_path / "run")
    assert os.listdir(tmp_path / "mine") == ["config.json"]


def test_other_models_write_nothing(tmp_path: Path) -> None:
    dure.train(small_task(), ALONE, stop=STOP, out=tmp_path / "run")
    assert not (tmp_path / "run" / "hf").exists()


def test_no_library_is_loaded_for_another_model(tmp_path: Path) -> None:
    program = (
        "import sys, dure, small\n"
        "dure.train(small.small_task(), dure.SingleWorker(), stop=dure.Stop(steps=1),"
        f" out={str(tmp_path / 'run')!r})\n"
        "print([name for name in ('transformers', 'peft') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr


def pretrained(folder: Path) -> Path:
    llama().save_pretrained(folder)
    for name in ("tokenizer.json", "vocab.txt", "spiece.model", "chat_template.jinja"):
        (folder / name).write_text(name)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modeling_mine.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_text("a pickle")
    return folder


COPIES = ["chat_template.jinja", "spiece.model", "tokenizer.json", "tokenizer_config.json"]


def test_files_of_a_tokenizer_come_along(tmp_path: Path) -> None:
    weights = pretrained(tmp_path / "base")
    run = trained(llama, tmp_path / "run", weights=weights)
    assert files(run) == sorted([*WHOLE, *COPIES, "vocab.txt"])
    assert (tmp_path / "run" / "hf" / "spiece.model").read_text() == "spiece.model"
    # From the folder of a file, and from a run that has them.
    for number, place in enumerate([weights / "model.safetensors", tmp_path / "run"]):
        run = trained(llama, tmp_path / str(number), weights=place)
        assert files(run) == sorted([*WHOLE, *COPIES, "vocab.txt"])


def test_links_and_large_files_are_not_copied(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hugging_face_folder, "COPIED_BYTES", 100)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "tokenizer.json").symlink_to(secret)
    os.link(secret, source / "vocab.txt")
    os.mkfifo(source / "merges.txt")
    (source / "vocab.json").write_text("x" * 101)
    (source / "deep.model").mkdir()
    (source / ".hidden.model").write_text("hidden")
    (source / "added_tokens.json").write_text("x" * 100)
    refused = copy_tokenizer(source, target)
    assert refused == ["deep.model", "merges.txt", "tokenizer.json", "vocab.json", "vocab.txt"]
    assert os.listdir(target) == ["added_tokens.json"]
    assert copy_tokenizer(tmp_path / "missing", target) == []
    weights = pretrained(tmp_path / "base")
    (weights / "vocab.txt").unlink()
    (weights / "vocab.txt").symlink_to(secret)
    with pytest.warns(UserWarning, match=r"^vocab.txt in .* was not copied to .*hf, because links"):
        run = trained(llama, tmp_path / "run", weights=weights)
    assert files(run) == sorted([*WHOLE, *COPIES])


def peak(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(name))
    return int(found.split()[1]) * 1024


WIDE = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 1024}


def divided(folder: Path, context: RankContext) -> list[int]:
    """The end of a run by ZeRO 3 under torchrun, where rank 0 writes; memory that each rank took.

    Rank 0 has the model without values: only the file that the ranks have put together has them.
    """
    tensor_transfer.PIECE = 1 << 20
    hugging_face_folder.SHARD_BYTES = 20 << 20
    with torch.device("meta"):
        small, names = llama(), llama(**WIDE)
    written = RunFolder(folder)
    if context.group.rank == 0:
        # Code and modules that the first call loads are no memory of a model.
        (folder / "small").mkdir()
        values = {name: torch.zeros(one.shape) for name, one in small.state_dict().items()}
        with (folder / "small" / "model.safetensors").open("wb") as file:
            file.writelines(TensorFile(values))
        write_hugging_face_layout(Run(small, History(), {}, folder / "small"), None)
    torch.manual_seed(1)
    model = llama(**WIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = ZeroRedundancy(model, optimizer, stage=3, process_group=context.group)
    trim_heap()
    before = peak("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    weights = zero.weights(SpillStore(folder))
    if context.group.rank == 0:
        written.finish(weights, {"label": ""}, [])
        write_hugging_face_layout(Run(names, History(), {}, folder), None)
    return [peak("VmHWM") - before]


def test_no_rank_has_the_whole_model_in_memory(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not tell peaks of memory anew")

    def gathered(context: RankContext) -> list[Any]:
        return context.group.all_gather_values(list(map(float, divided(tmp_path, context))), "")

    (first,), (second,) = dure.Processes(2, backend="gloo").run(gathered, lambda event: None)
    torch.manual_seed(1)
    model = llama(**WIDE)
    whole = sum(one.nbytes for one in model.parameters())
    assert whole > 60 << 20
    assert max(first, second) < whole / 2
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert equal(found, model)


def test_a_part_that_stays_with_clients_makes_no_folder(tmp_path: Path) -> None:
    run = replace(trained(bert, tmp_path / "run"), summary={"weights_elsewhere": ["classifier"]})
    shutil.rmtree(tmp_path / "run" / "hf")
    write_hugging_face_layout(run, None)
    assert not (tmp_path / "run" / "hf").exists()

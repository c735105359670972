"""A trainer of trl as a client: supervised fine-tuning of a causal model with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import causal, served, tokens

import dure
from small import same_bits

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")


def trainer(folder: Path, client: int = 0) -> Any:
    rows = [{"input_ids": row["input_ids"].tolist()} for row in tokens(12, seed=client)]
    arguments = trl.SFTConfig(
        output_dir=str(folder / f"sft {client}"),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        activation_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )
    torch.manual_seed(0)
    return trl.SFTTrainer(
        causal(),
        arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(folder),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )


def tokenizer(folder: Path) -> Any:
    """A tokenizer of single letters."""
    import tokenizers
    import transformers

    words = {letter: number for number, letter in enumerate("abcdefghijklmnopqr")}
    words |= {"<pad>": 18, "<eos>": 19}
    model = tokenizers.models.WordLevel(words, unk_token="<pad>")
    made = tokenizers.Tokenizer(model)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>"
    )


def test_supervised_fine_tuning_takes_part(tmp_path: Path) -> None:
    strategy = dure.FedAvg(clients=1, batch_size=4)
    task = dure.Task.from_trainer(trainer(tmp_path), train=None, metrics={})

    def join(url: str) -> str:
        return dure.client.patch(trainer(tmp_path), url, name="site").train()

    run, ended = served(task, strategy, join, tmp_path / "run", rounds=2)
    assert ended == ["the run is over"]
    simulated = dure.simulate(
        lambda client: trainer(tmp_path, client),
        clients=1,
        strategy=strategy,
        stop=dure.Stop(rounds=2),
    )
    assert same_bits(run, simulated)
    assert {"lora_" in name for name, p in run.model.named_parameters() if p.requires_grad} == {
        True
    }

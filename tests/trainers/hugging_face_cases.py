"""Small trainers of transformers for tests: tiny models on rows of tokens made from a seed."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCABULARY = 20


def tokens(n: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows of eight tokens for a causal language model; the last labels of some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (n, 8), generator=generator)
    found = []
    for number, row in enumerate(rows):
        labels = row.clone()
        labels[: number % 4] = -100
        found.append({"input_ids": row, "labels": labels})
    return found


def classes(n: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows of eight tokens with one of three classes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, VOCABULARY, (n, 8), generator=generator)
    return [{"input_ids": row, "labels": row.sum() % 3} for row in rows]


def causal(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_attention_heads=2, use_cache=False, **sizes
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def classifier(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        num_attention_heads=2,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )
    return transformers.BertForSequenceClassification(config)


def trainer(
    folder: Path,
    model: Callable[[], nn.Module] = causal,
    client: int = 0,
    n: int = 22,
    callbacks: Any = (),
    compute_metrics: Any = None,
    rows: Callable[..., Any] = tokens,
    **settings: Any,
) -> Any:
    """A trainer on n examples, the last batch of which is smaller."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / f"trainer {client}"),
        **{
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "weight_decay": 0.0,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            **settings,
        },
    )
    return transformers.Trainer(
        model(),
        arguments,
        train_dataset=rows(n, seed=client),
        eval_dataset=rows(10, seed=99),
        callbacks=list(callbacks),
        compute_metrics=compute_metrics,
    )


def served(
    task: dure.Task, strategy: Any, join: Callable[[str], Any], out: Path, rounds: int = 3
) -> tuple[dure.Run, list[Any]]:
    """Serve a federation of one client, which joins in a thread."""
    threads: list[threading.Thread] = []
    ended: list[Any] = []

    def client(url: str) -> None:
        try:
            ended.append(join(url))
        except BaseException as error:
            ended.append(error)
            traceback.print_exc()
            # The server would wait for this client.
            os.kill(os.getpid(), signal.SIGINT)

    def started(event: dict[str, Any]) -> None:
        if "serving" in event:
            threads.append(threading.Thread(target=client, args=(event["serving"],)))
            threads[-1].start()

    run = dure.serve(
        task,
        strategy,
        dure.Stop(rounds=rounds),
        out=out,
        port=0,
        access="open",
        on_progress=started,
    )
    for thread in threads:
        thread.join(60)
    return run, ended

"""What a patch costs a trainer: a local epoch of a transformers.Trainer with and without dure.

A round of a simulated client has the same epoch as the trainer alone, and besides the loading of
the weights, the difference and its check. Both take turns in one process; the ratio is of medians.

    python benchmarks/trainers.py [--millions 10] [--steps 20] [--repeats 5]
        [--result benchmarks/results/trainers.json]

--millions: parameters of the model. --steps: steps of an epoch, of 8 rows of 64 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from outcome import give, takes_result
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dure
from dure.contracts.trainer import TrainerRound
from dure.trainers.libraries import integration_of

ROWS, TOKENS, WORDS = 8, 64, 1000


def trainer(millions: float, steps: int, folder: str) -> Any:
    """A trainer of a Llama of about so many parameters, for one epoch."""
    torch.manual_seed(0)
    layers = max(1, round((millions * 1e6 - 2 * WORDS * 256) / (16 * 256 * 256)))
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        use_cache=False,
    )
    rows = torch.randint(WORDS, (ROWS * steps, TOKENS))
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)


def main() -> None:
    """Time both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    takes_result(parser)
    asked = parser.parse_args()
    alone: list[float] = []
    patched: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        plain = trainer(asked.millions, asked.steps, f"{folder}/plain")
        client = integration_of(trainer(asked.millions, asked.steps, f"{folder}/client")).client(
            "reset", (), {}
        )
        names = [name for name, _ in plain.model.named_parameters()]
        before = dict(client.trainer.tensors(names))
        order = torch.arange(ROWS * asked.steps).split(ROWS)
        for number in range(asked.repeats + 1):
            started = time.perf_counter()
            plain.train()
            between = time.perf_counter()
            # A round as the engine makes it.
            client.trainer.load(before)
            client.trainer.run(TrainerRound(number, order, asked.steps, 0))
            now = client.trainer.tensors(names)
            changes = [now[name] - before[name] for name in names]
            assert all(bool(one.isfinite().all()) for one in changes)
            ended = time.perf_counter()
            if number:  # the first is warm-up
                alone.append(between - started)
                patched.append(ended - between)
    ratio = statistics.median(patched) / statistics.median(alone)
    parameters = sum(one.numel() for one in before.values())
    middle = {"trainer": statistics.median(alone), "round": statistics.median(patched)}
    print(
        f"{parameters / 1e6:.1f} million parameters: an epoch {middle['trainer']:.2f} "
        f"s, a round {middle['round']:.2f} s, ratio {ratio:.3f}",
        file=sys.stderr,
    )
    give(
        {
            "parameters": parameters,
            "steps": asked.steps,
            "epoch_seconds": alone,
            "round_seconds": patched,
            "ratio": ratio,
            "dure": dure.__version__,
        },
        asked.result,
    )


if __name__ == "__main__":
    main()

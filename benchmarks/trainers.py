"""Cost of a patch: a transformers.Trainer with and without dure, and as a client beside dure.join.

    epoch    a local epoch of the trainer alone, and the same epoch as a client's round, which also
             loads the weights, and computes and checks the update
    travel   receiving a model and sending an update over loopback, by a patched trainer and by
             `dure.join` with the same model and data; training is not counted

Both take turns in one process. The ratio of epochs is the median of the pairs' ratios, that of
travel a ratio of medians.

    python benchmarks/trainers.py [--millions 10] [--steps 20] [--repeats 5]
        [--travels 124] [--result benchmarks/results/trainers.json]

--millions: parameters of the model of the epochs. --steps: steps of an epoch, of 8 rows of 64
tokens. --travels: parameters of the model that travels, in millions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import torch
from outcome import give, takes_result
from rounds import median_ratio
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


def epochs(asked: argparse.Namespace) -> dict[str, Any]:
    """Time epochs of a trainer alone and as rounds of a client."""
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

        def epoch(number: int) -> None:
            plain.train()

        def round(number: int) -> None:
            # As the engine makes it.
            client.trainer.load(before)
            client.trainer.run(TrainerRound(number, order, asked.steps, 0))
            now = client.trainer.tensors(names)
            changes = [now[name] - before[name] for name in names]
            assert all(bool(one.isfinite().all()) for one in changes)

        both = [(epoch, alone), (round, patched)]
        for number in range(asked.repeats + 1):
            # Each is the first of a pair as often as the second.
            for work, seconds in both[:: 1 if number % 2 else -1]:
                started = time.perf_counter()
                work(number)
                if number:  # the first is warm-up
                    seconds.append(time.perf_counter() - started)
    ratio = median_ratio(patched, alone)
    parameters = sum(one.numel() for one in before.values())
    middle = {"trainer": statistics.median(alone), "round": statistics.median(patched)}
    print(
        f"{parameters / 1e6:.1f} million parameters: an epoch {middle['trainer']:.2f} "
        f"s, a round {middle['round']:.2f} s, ratio {ratio:.3f}",
        file=sys.stderr,
    )
    return {
        "parameters": parameters,
        "steps": asked.steps,
        "epoch_seconds": alone,
        "round_seconds": patched,
        "ratio": ratio,
    }


class Travel:
    """Seconds in which models are received and updates are sent, by a client's events."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = 0.0
        self._now = 0.0

    def __call__(self, what: str, about: Any) -> None:
        """Note an event of a client."""
        at = time.perf_counter()
        if what in ("fetching", "sending"):
            self._since = at
        elif what == "training":
            self._now = at - self._since
        elif what == "sent":
            self.seconds.append(self._now + at - self._since)


def travel(way: str, millions: float, rounds: int, folder: str) -> list[float]:
    """Return the seconds of travel of each round of a federation of one client."""
    made = trainer(millions, 1, f"{folder}/trainer")
    noted = Travel()
    threads: list[threading.Thread] = []

    def client(url: str) -> None:
        if way == "patched":
            dure.client.patch(made, url, name="site", on_progress=noted).train()
        else:
            dure.join(url, dure.Task.from_trainer(made, metrics={}), name="site", on_progress=noted)

    def started(event: Any) -> None:
        if "serving" in event:
            threads.append(threading.Thread(target=client, args=(event["serving"],)))
            threads[-1].start()

    dure.serve(
        dure.Task.from_trainer(made, train=None, metrics={}),
        dure.FedAvg(clients=1, batch_size=ROWS),
        dure.Stop(rounds=rounds),
        out=f"{folder}/run",
        port=0,
        access="open",
        on_progress=started,
    )
    threads[0].join()
    # The first round connects, and allocates.
    return noted.seconds[1:]


def travels(asked: argparse.Namespace) -> dict[str, Any]:
    """Time what travels, by a patched trainer and by `dure.join`, in turns."""
    found: dict[str, list[float]] = {"patched": [], "join": []}
    for _ in range(2):
        for way, seconds in found.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds += travel(way, asked.travels, asked.repeats, folder)
    middle = {way: statistics.median(seconds) for way, seconds in found.items()}
    ratio = middle["patched"] / middle["join"]
    print(
        f"{asked.travels:g} million parameters received and sent: patched {middle['patched']:.2f} "
        f"s, dure.join {middle['join']:.2f} s, ratio {ratio:.3f}",
        file=sys.stderr,
    )
    return {"millions": asked.travels, "seconds": found, "ratio": ratio}


def main() -> None:
    """Time epochs and travel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--travels", type=float, default=124)
    takes_result(parser)
    asked = parser.parse_args()
    give({**epochs(asked), "travel": travels(asked), "dure": dure.__version__}, asked.result)


if __name__ == "__main__":
    main()

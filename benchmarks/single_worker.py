"""SingleWorker against a hand-written PyTorch loop of the same steps, in one run.

Both train the same model on the same batches from the same weights. On one thread they end with the
same bits. The loop is the shortest that does so: a permutation an epoch, indexing, forward,
backward, step, on as many threads as torch takes. SingleWorker also records every step, and chooses
its threads. Repetitions are interleaved, and figures are medians. Seconds are those of training
only, without evaluation on both sides.

    python benchmarks/single_worker.py --result result.json
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time

import torch
from outcome import give, takes_result
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.randomness.seeds import shuffled

BATCH = 64


def by_hand(task: dure.Task, epochs: int) -> tuple[float, nn.Module]:
    """Seconds of the hand-written loop, and the trained model."""
    inputs = task.train.inputs
    targets = task.train.targets
    model = seeded_model(task, 0).train()
    optimizer = task.optimizer(model.parameters())
    started = time.perf_counter()
    for epoch in range(epochs):
        for batch in shuffled(len(inputs), 0, epoch).split(BATCH):
            optimizer.zero_grad()
            loss = task.loss(model(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
    return time.perf_counter() - started, model


def by_dure(task: dure.Task, epochs: int) -> tuple[float, nn.Module]:
    run = dure.train(
        task, dure.SingleWorker(BATCH), stop=dure.Stop(epochs=epochs), seed=0, evaluate_every=10**9
    )
    return run.summary["seconds"], run.model


def check_that_they_do_the_same(task: dure.Task) -> None:
    """On one thread both end with the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    mine: dict[str, Tensor] = by_hand(task, 1)[1].state_dict()
    assert all(
        torch.equal(value, mine[name]) for name, value in by_dure(task, 1)[1].state_dict().items()
    )
    torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=9)
    takes_result(parser)
    asked = parser.parse_args()
    rows = []
    for model, epochs in (("logistic", 40), ("mlp", 20), ("cnn", 2)):
        task = dataclasses.replace(dure.load_task("digits", model=model), test=None)
        check_that_they_do_the_same(task)
        pairs = []
        for repetition in range(asked.repeat):
            order = (by_hand, by_dure) if repetition % 2 else (by_dure, by_hand)
            pairs.append({way.__name__: way(task, epochs)[0] for way in order})
        steps = epochs * -(-len(task.train) // BATCH)
        hand = statistics.median(pair["by_hand"] for pair in pairs)
        ours = statistics.median(pair["by_dure"] for pair in pairs)
        ratio = statistics.median(pair["by_dure"] / pair["by_hand"] for pair in pairs)
        rows.append(
            {
                "model": model,
                "steps": steps,
                "by_hand_us_per_step": hand / steps * 1e6,
                "dure_us_per_step": ours / steps * 1e6,
                "median_ratio": ratio,
            }
        )
        hand_us = hand / steps * 1e6
        ours_us = ours / steps * 1e6
        times = f"by hand {hand_us:7.0f} us/step, dure {ours_us:7.0f}, ratio {ratio:.3f}"
        print(f"{model:<10} {times}", file=sys.stderr)
    about = {
        "benchmark": "single_worker",
        "batch": BATCH,
        "threads": torch.get_num_threads(),
        "repeat": asked.repeat,
    }
    give({**about, "torch": torch.__version__, "rows": rows}, asked.result)


if __name__ == "__main__":
    main()

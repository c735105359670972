"""A server of dure as a process of its own, for benchmarks/deployment.py.

It serves FedAvg of a model that is `--floats` zeros: whoever sends back what it got leaves it so.
Lines of JSON on standard output: where it serves, and at the end what happened when.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dure
from dure.deploy import updates
from dure.deploy.server import carrier

TENSORS = 8


class Zeros(nn.Module):
    """So many weights, in a few tensors as a network has them."""

    def __init__(self, floats: int) -> None:
        super().__init__()
        sizes = [floats // TENSORS] * TENSORS
        sizes[0] += floats - sum(sizes)
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.layers[0][0]


class Regression(nn.Module):
    """A model that is really trained, where bits are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        return y


def task(floats: int) -> dure.Task:
    """floats: 0 for the regression."""
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 8, generator=draws)
    targets = inputs.sum(dim=1, keepdim=True)
    return dure.Task(
        model=(lambda: Zeros(floats)) if floats else Regression,
        loss=nn.functional.mse_loss,
        # A server needs none; only the regression's clients train.
        train=None if floats else (inputs, targets),
        metrics={},
        name="deployed",
    )


def strategy(clients: int, cohort: int) -> dure.FedAvg:
    return dure.FedAvg(clients=clients, fraction=cohort / clients, batch_size=10, local_epochs=1)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


class Rounds:
    """When each round was over, and how many seconds of processor this process had by then."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.processor: list[float] = []

    def install(self) -> None:
        settle = carrier.NetworkCarrier.settle

        def noted(self_: carrier.NetworkCarrier, settled: Any) -> None:
            settle(self_, settled)
            self.at.append(time.time())
            self.processor.append(time.process_time())

        carrier.NetworkCarrier.settle = noted  # type: ignore[method-assign]


class Taken:
    """Counts the bytes of parts that were accepted, those included that were there already."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = updates.UploadPart.done

    def install(self) -> None:
        done = self._done

        def counted(part: updates.UploadPart, digest: str) -> int:
            here = done(part, digest)
            self.bytes += part.size
            return here

        updates.UploadPart.done = counted  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--floats", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--cohort", type=int)
    parser.add_argument("--start-with", type=int)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tls", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="where the model is put at the end")
    parser.add_argument("--profile", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    taken, rounds = Taken(), Rounds()
    taken.install()
    rounds.install()

    def progress(event: dict[str, Any]) -> None:
        if "serving" in event:
            say(serving=event["serving"], at=time.time(), processor=time.process_time())

    profile = None
    if asked.profile is not None:
        import cProfile

        profile = cProfile.Profile()
        profile.enable()
    if (asked.folder / "config.json").exists():
        run = dure.resume(asked.folder, task=task(asked.floats), on_progress=progress)
    else:
        world = dure.Network(
            host=asked.host,
            port=asked.port,
            access="open",
            certificate=asked.tls / "server.pem",
            start_with=asked.start_with,
        )
        run = dure.train(
            task(asked.floats),
            strategy(asked.clients, asked.cohort or asked.clients),
            world,
            dure.Stop(rounds=asked.rounds),
            out=asked.folder,
            evaluate_every=asked.rounds,
            checkpoint_every=asked.checkpoint_every,
            on_progress=progress,
        )
    if profile is not None:
        profile.disable()
        profile.dump_stats(asked.profile)
    if asked.model is not None:
        torch.save(run.model.state_dict(), asked.model)
    say(
        first_round=rounds.at[0],
        rounds=differences(rounds.at),
        processor=differences(rounds.processor),
        taken=taken.bytes,
    )


def differences(at: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(at)]


if __name__ == "__main__":
    main()

"""A client of dure as a process of its own, for benchmarks/deployment.py.

`--echo` sends back what it got, after `--work` seconds; else it really trains, as simulated client
`--part`. Everything between is dure's own client: its link, transfers, digests and state. Lines of
JSON on standard output: what happened when.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dure.deploy.client.loop import ClientLoop, TrainedAssignment
from dure.deploy.client.session import Session
from dure.deploy.client.site import ConnectionOptions, context_for
from dure.deploy.client.state import ClientState
from dure.protocol.messages import ProtocolAnswer, ProtocolStep
from dure.run.join import join
from dure.wire.requests import (
    VERSION,
    CheckIn,
    EvaluationReport,
    EvaluationTask,
    Machine,
    TaskDescription,
    Train,
    UpdateOutcome,
    UploadRequest,
    Welcome,
)
from dure.wire.tensors import digest_of, forms_of, size_of


def say(what: str, about: Mapping[str, object]) -> None:
    print(json.dumps({"event": what, "at": time.time(), **about}), flush=True)


class Echo:
    """A site that has nothing to compute."""

    examples = 10
    held_out = 0
    share_errors = False
    folder = None
    holds = False

    def __init__(self, name: str, wants: int | None, work: float) -> None:
        self.name = name
        self.wants = wants
        self.work = work

    def trains(self) -> TaskDescription | None:
        return None

    def machine(self) -> Machine | None:
        return None

    def begin(self, welcome: Welcome, memory: Sequence[Tensor] | None) -> None:
        pass

    def train(
        self, train: Train, tensors: Mapping[str, Tensor], wanted: Callable[[], bool]
    ) -> TrainedAssignment:
        time.sleep(self.work)
        reserve = UploadRequest(
            ticket=train.ticket,
            bytes=size_of(forms_of(tensors)),
            digest=digest_of(tensors),
            examples=self.examples,
            samples=self.examples,
            loss=1.0,
            seconds=self.work,
        )
        return TrainedAssignment(reserve, tensors, None)

    def hold(
        self,
        train: Train,
        tensors: Mapping[str, Tensor],
        reserve: UploadRequest,
        update: Mapping[str, Tensor],
    ) -> None:
        pass

    def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
        return None

    def measure(self, measure: EvaluationTask, tensors: Mapping[str, Tensor]) -> EvaluationReport:
        return EvaluationReport(measure.round)

    def settle(self, outcome: UpdateOutcome) -> None:
        pass

    def remember(self, memory: Sequence[Tensor] | None) -> None:
        pass


def echo(asked: argparse.Namespace) -> str:
    site = Echo(asked.name, asked.part, asked.work)
    with ClientState(asked.state) as kept:
        session = Session(
            asked.url,
            context=context_for(
                asked.url, ConnectionOptions(authority=asked.tls / "authority.pem")
            ),
            state=kept,
            audit=None,
            stop=threading.Event(),
            tell=lambda text: say("waiting", {"why": text}),
        )
        look = CheckIn(version=VERSION, name=site.name, examples=0, wants=site.wants)
        session.belongs(session.check_in(look), site.name)
        return ClientLoop(session, site, say if asked.events else lambda what, about: None).run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--tls", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--part", type=int)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--echo", action="store_true")
    parser.add_argument("--work", type=float, default=0.0)
    parser.add_argument("--events", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.echo:
        why = echo(asked)
    else:
        from server import task

        why = join(
            asked.url,
            task(0),
            name=asked.name,
            part=asked.part,
            state=asked.state,
            authority=asked.tls / "authority.pem",
            on_progress=say,
        )
    say("over", {"why": why})


if __name__ == "__main__":
    main()

"""Sites of split learning in this process, whose server is the test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dure
from dure.deploy.client.split_site import _site
from dure.split.messages import Gradients, Smashed, Turn
from dure.split.network.control import RosterMembers
from dure.split.network.frames import decode
from dure.split.network.site import UNLIMITED, SiteLimits, SplitSite
from dure.wire.boxes import Member
from dure.wire.roster import Roster
from dure.wire.signatures import Key
from small import CLASSES, FEATURES, small_task

RUN = "0123456789abcdef"
WIDTH = 8
BATCH = 4


def make_head() -> nn.Module:
    return nn.Linear(FEATURES, WIDTH).double()


def make_end() -> nn.Module:
    return nn.Linear(7, CLASSES).double()


def head_task() -> dure.HeadTask:
    whole = small_task()
    return dure.HeadTask(make_head, train=whole.train, test=whole.test)


def head_and_end() -> dure.HeadTask:
    whole = small_task()
    return dure.HeadTask(
        make_head, train=whole.train, end=make_end, loss=cross_entropy, test=whole.test
    )


class Channel:
    """What a site says, as messages. answers: what it hears while it measures."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.kinds: list[str] = []
        self.answers: list[Any] = []

    def next(self, seconds: float | None = None) -> bytes:
        raise AssertionError("nothing more is said")

    def say(self, frame: Any, kind: str, at_once: bool) -> None:
        self.said.append(decode(b"".join(frame)))
        self.kinds.append(kind)

    def allow(self, most: int) -> None:
        self.most = most


class Clients:
    """Of one run, by their numbers; the test is their server."""

    def __init__(
        self,
        folder: Path,
        strategy: Any,
        task: Any = head_task,
        limits: SiteLimits = UNLIMITED,
        run: str = RUN,
        form: bytes = b"",
    ) -> None:
        self.key = Key.make()
        self.events: list[tuple[str, Any]] = []
        self.channel = Channel()
        self.sites: list[SplitSite] = []
        for number in range(strategy.clients):
            place = folder / f"{run}-site-{number}"
            place.mkdir(parents=True)
            self.sites.append(self._site(place, strategy, task(), number, limits, run))
        members = [msgspec.json.decode(one.hello.member, type=Member) for one in self.sites]
        self.roster = Roster.signed(run, members, self.key)
        for site in self.sites:
            self.says(site, RosterMembers(self.roster.to_json(), form=form))

    def _site(
        self, place: Path, strategy: Any, task: Any, number: int, limits: SiteLimits, run: str
    ) -> SplitSite:
        welcome: Any = SimpleNamespace(run=run, seed=0, client=number, clients=strategy.clients)
        session: Any = SimpleNamespace(key=Key.load_or_create(place / "key.pem"))
        kept: Any = SimpleNamespace(temporary=False, folder=place)

        def event(what: str, about: Any) -> None:
            self.events.append((what, about))

        name = f"site {number}"
        return _site(
            task, strategy, welcome, session, kept, name, None, None, event, limits, device=None
        )

    def says(self, site: SplitSite, frame: Any) -> list[Any]:
        """What a site answers to a frame."""
        return site._hears(frame, self.channel)

    def refused(self, site: SplitSite, frame: Any) -> str:
        """Why a site does not take a frame, in words; fails where it trains with it."""
        before = [one.clone() for one in site.machine.party.own.weights]
        self.events.clear()
        try:
            said = self.says(site, frame)
        # What the site raises ends it, with these words.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            assert not any(isinstance(one, Smashed) for one in said), said
            reason = " ".join(str(getattr(one, "reason", "")) for one in said)
            assert reason, said
        after = site.machine.party.own.weights
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return reason


def turn_for(site: SplitSite, number: int = 0, **changes: Any) -> Turn:
    """An honest turn."""
    steps = site.working.checked.steps
    turn = Turn(number, 0, 0, steps, steps, 0, -1, None)
    return msgspec.structs.replace(turn, **changes)


def gradients_for(smashed: Smashed, size: float = 1e-3) -> Gradients:
    """An honest answer to a batch."""
    values = tuple(torch.full_like(one, size) for one in smashed.values)
    return Gradients(smashed.step, values, 0, 1.0, float(smashed.examples))


def ended(clients: Clients, site: SplitSite, turn: Turn) -> list[Any]:
    """A whole turn, honestly served; what the site says last."""
    said = clients.says(site, turn)
    while isinstance(said[0], Smashed):
        said = clients.says(site, gradients_for(said[0]))
    return said


def weights_of(site: SplitSite) -> list[Tensor]:
    return [one.detach().clone() for one in site.machine.party.own.weights]

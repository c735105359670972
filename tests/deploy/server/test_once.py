"""What is made once: also where the server is killed before, between and after, or interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dure.deploy.clock import FederationClock
from dure.deploy.journal import Journal
from dure.deploy.server.durable_once import DurableOnce
from dure.deploy.server.events import JournalEvents
from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.tree_files import TreeFiles
from dure.errors import RunFolderError


class Life:
    """A server's from its start to a kill: its journal, and what it makes once."""

    def __init__(self, folder: Path, record: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        clock = FederationClock()
        self.folder = folder
        self.journal = Journal(folder, clock)
        self.events = JournalEvents(self.journal, clock, ClientOutbox(clock.now), self.opens)
        self.trees = TreeFiles(folder / "once")
        self.once = DurableOnce(self.events, self.journal, self.trees, sweeps=not record)

    def opens(self) -> None:
        self.once.sweep()

    def get(self, what: str, number: int | None) -> int:
        """What was made, if need be the number; None must not be made."""

        def make() -> dict[str, Any]:
            assert number is not None, "it was made already"
            return {"number": number, "total": torch.tensor([number])}

        tree, _ = self.once.get(what, make)
        assert tree["total"].tolist() == [tree["number"]]
        return int(tree["number"])

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "once").glob("*"))

    def aside(self) -> list[tuple[str, int]]:
        return [(event.kind, event.client) for event in self.events.aside]


Lives = Callable[..., Life]


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    begun: list[Life] = []

    def begin(**how: Any) -> Life:
        """The next life, after a kill of the one before."""
        for life in begun:
            life.journal.close()
        begun.append(Life(tmp_path / "run", **how))
        return begun[-1]

    yield begin
    for life in begun:
        life.journal.close()


class Killed(BaseException):
    pass


def test_what_was_made_is_not_made_again_and_other_events_keep_their_order(lives: Lives) -> None:
    first = lives()
    first.journal.write("check_in", 3)
    first.journal.write("leave", 4)
    assert first.get("sum 0", 5) == 5
    assert first.get("noise 0", 6) == 6
    first.journal.write("check_in", 7)
    second = lives()
    assert second.get("sum 0", None) == 5
    assert second.aside() == [("check_in", 3), ("leave", 4)]
    assert second.get("noise 0", None) == 6
    assert second.events.applied == first.events.applied
    assert second.aside() == first.aside()
    # What comes after is not taken for what came before.
    assert second.events.next(float("inf")).client == 7  # type: ignore[union-attr]


def test_a_file_that_no_event_names_is_not_used_and_not_kept(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lives()
    write = first.journal.write

    def killed(kind: str, *about: Any, **named: Any) -> Any:
        if kind == "once":
            raise Killed
        return write(kind, *about, **named)

    monkeypatch.setattr(first.journal, "write", killed)
    with pytest.raises(Killed):
        first.get("sum 0", 5)
    assert first.files() == ["0.safetensors"]
    second = lives()
    second.events.next(float("inf"))
    assert second.files() == []
    assert second.get("sum 0", 6) == 6
    assert lives().get("sum 0", None) == 6


def test_its_file_is_whole_before_the_event_and_stays_where_the_server_opens_after_it(
    lives: Lives,
) -> None:
    # Nobody was asked while it was made: clients may come only when its event is looked for.
    life = lives(record=True)
    assert not life.events._outbox.open.is_set()
    assert life.get("coins 0", 5) == 5
    assert life.events._outbox.open.is_set()
    assert life.files() == ["0.safetensors"]


def test_a_kill_after_the_event_loses_nothing(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lives()

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(first.once, "_named", killed)
    with pytest.raises(Killed):
        first.get("sum 0", 5)
    assert lives().get("sum 0", None) == 5


def test_a_file_that_is_lost_or_damaged_is_named(lives: Lives) -> None:
    life = lives()
    life.get("sum 0", 5)
    path = life.folder / "once" / "0.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(RunFolderError, match=r"once/0\.safetensors is damaged"):
        lives().get("sum 0", 5)
    path.unlink()
    with pytest.raises(RunFolderError, match=r"once/0\.safetensors, which the journal names"):
        lives().get("sum 0", 5)


def test_a_journal_of_something_else_is_refused(lives: Lives) -> None:
    lives().get("sum 0", 5)
    with pytest.raises(RunFolderError, match=r"contains 'sum 0' .* next event is 'coins 0'"):
        lives().get("coins 0", 5)


def test_files_go_with_the_checkpoint_that_covers_them(lives: Lives) -> None:
    first = lives()
    first.get("sum 0", 5)
    first.once.state()
    first.once.saved()
    assert first.files() == ["0.safetensors"], "its model is not there"
    first.once.model_made()
    state, position = first.once.state(), first.events.state()
    assert first.files() == ["0.safetensors"], "the checkpoint is not written"
    first.get("sum 1", 6)
    first.once.saved()
    assert first.files() == ["1.safetensors"]
    # From that checkpoint on.
    second = lives()
    second.once.restore(state)
    second.events.restore(position)
    assert second.get("sum 1", None) == 6


def test_recorded_files_stay(lives: Lives) -> None:
    life = lives(record=True)
    for number in range(3):
        life.get(f"sum {number}", number)
        life.once.model_made()
        life.once.state()
        life.once.saved()
    assert len(life.files()) == 3
    again = lives(record=True)
    assert [again.get(f"sum {number}", None) for number in range(3)] == [0, 1, 2]


def test_an_interrupt_between_two_of_a_model_makes_the_first_no_second_time(lives: Lives) -> None:
    first = lives()
    first.get("sum 0", 5)

    def interrupted() -> dict[str, Any]:
        raise Killed

    with pytest.raises(Killed):
        first.once.get("noise 0", interrupted)
    state, position = first.once.state(), first.events.state()
    first.once.saved()
    first.journal.write("check_in", 3)
    second = lives()
    second.once.restore(state)
    second.events.restore(position)
    assert second.get("sum 0", None) == 5
    assert second.get("noise 0", 6) == 6
    # The same once more, after a kill: from the same checkpoint.
    third = lives()
    third.once.restore(state)
    third.events.restore(position)
    assert (third.get("sum 0", None), third.get("noise 0", None)) == (5, 6)
    third.once.model_made()
    assert third.get("sum 0", 7) == 7

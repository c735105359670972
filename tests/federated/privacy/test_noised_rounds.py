"""Rounds on the server: paid for before noise is drawn, and released once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dure.federated.privacy.user_level import estimator as module
from dure.federated.privacy.user_level.checks import epsilon_account
from dure.federated.privacy.user_level.estimator import ClientPopulation, Estimator
from dure.federated.privacy.user_level.release import NoisedRounds
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.strategy import Federated
from dure.privacy.accountant import Releases, epsilon
from dure.privacy.guarantee import PrivacyGuarantee
from dure.privacy.ledger import FILE, Ledger
from dure.randomness.secret import Secret


class Disk:
    """What a carrier has written down; `lose` is a server that goes on from an older copy."""

    def __init__(self) -> None:
        self.made: dict[str, dict[str, Any]] = {}

    def once(self, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if what not in self.made:
            self.made[what] = make()
        return self.made[what]


def rounds(
    disk: Disk, folder: Path | None = None, where: str = "server", **changes: Any
) -> NoisedRounds:
    user = UserLevel(clip=0.5, noise=1.5, where=where, **changes)  # type: ignore[arg-type]
    here = user if where == "server" else UserLevel(clip=float("inf"))
    strategy = Federated(clients=8, fraction=0.5)
    return NoisedRounds(
        estimator=Estimator(here, ClientPopulation(0.5, 8, 8.0), [[6]], here.clip),
        settings=user,
        like=[torch.zeros(6)],
        promise=PrivacyGuarantee("client", 1e-5),
        ledger=Ledger(1e-5, folder, told=epsilon_account(user, strategy, 8)),
        budget=None,
        secret=Secret.system(),
        once=disk.once,
    )


def test_a_round_is_on_the_disk_before_its_noise_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rounds(Disk(), tmp_path)
    drawn = module.normal

    def looks(key: bytes, shape: tuple[int, ...]) -> torch.Tensor:
        assert '"number": 1' in (tmp_path / FILE).read_text()
        return drawn(key, shape)

    monkeypatch.setattr(module, "normal", looks)
    one.release(0)


def test_a_server_that_goes_through_a_round_again_shows_the_same_and_pays_once(
    tmp_path: Path,
) -> None:
    disk = Disk()
    first = rounds(disk, tmp_path, clipping="adaptive")
    first.fold([torch.ones(6)], 1)
    shown = first.release(0)
    bound = first.estimator.bound
    first.close()
    second = rounds(disk, tmp_path, clipping="adaptive")
    second.fold([torch.ones(6)], 1)
    again = second.release(0)
    assert all(map(torch.equal, shown, again))
    assert second.estimator.bound == bound
    assert second.ledger.spent == [Releases(0.5, 1.5, 1)]
    # The system's generator draws no noise twice.
    assert not torch.equal(second.release(1)[0], shown[0])


def test_noise_that_is_lost_was_paid_for_and_new_noise_is_paid_for_again(tmp_path: Path) -> None:
    rounds(Disk(), tmp_path).release(0)
    second = rounds(Disk(), tmp_path)
    with pytest.warns(UserWarning, match="counted again"):
        second.release(0)
    assert second.ledger.spent == [Releases(0.5, 1.5, 2)]


def test_who_goes_through_a_run_without_its_ledger_counts_what_was_paid() -> None:
    disk = Disk()
    rounds(disk).release(0)
    replayed = rounds(disk)
    replayed.release(0)
    assert replayed.numbers()["epsilon"] == epsilon([Releases(0.5, 1.5)], 1e-5)


def test_noise_of_clients_is_paid_for_before_they_are_asked_and_the_server_adds_none() -> None:
    disk = Disk()
    one = rounds(disk, where="distributed")
    one.asks(0, [1, 2])
    paid = one.numbers()
    assert paid["epsilon"] > 0
    # The server knows who was asked, so against it nothing is amplified.
    assert paid["epsilon_server"] > paid["epsilon"]
    one.add([torch.ones(6)])
    assert torch.equal(one.release(0)[0], torch.ones(6, dtype=torch.float64) / 4)
    assert one.numbers() == paid
    server, recipients = sorted(
        (one["epsilon"], one["against"]) for one in one.facts()["promises"]
    )[::-1]
    assert "knows who was asked" in server[1]
    assert "all models" in recipients[1]
    # Once more through the same round: nothing is paid, and the client counts once.
    again = rounds(disk, where="distributed")
    again.asks(0, [1, 2])
    assert again.numbers() == paid


def test_local_noise_is_paid_for_as_of_the_client_that_was_asked_most_often() -> None:
    one = rounds(Disk(), where="local")
    for number, clients in enumerate([[0, 1], [2], [], [1, 2], [1]]):
        one.asks(number, clients)
    # Client 1 was asked three times.
    assert one.numbers()["epsilon"] == epsilon([Releases(1.0, 1.5, 3)], 1e-5, "replace")

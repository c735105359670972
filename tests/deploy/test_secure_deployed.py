"""Secure sums by real processes over TLS: what they come to, and what is found of them anywhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed import Deployment, Plan, deployed

import dure
from dure.contracts.fresh_model import seeded_model
from dure.federated.privacy.user_level import estimator
from dure.randomness import keystream
from dure.randomness.secret import Secret
from dure.wire.owners_roster import Listed, OwnersRoster
from dure.wire.signatures import Key
from small import small_task

CLIENTS = 4


def noted_keys(file: Path) -> None:
    """Writes every key that this process draws, and the first bytes of its stream, to a file."""
    key = Secret.key

    def noted(self: Secret, purpose: str, *position: int) -> bytes:
        drawn = key(self, purpose, *position)
        stream = torch.empty(32, dtype=torch.uint8)
        keystream.fill(drawn, stream)
        with file.open("a") as told:
            told.write(f"{drawn.hex()} {bytes(stream.tolist()).hex()}\n")
        return drawn

    Secret.key = noted  # type: ignore[method-assign]


def noted_noise(file: Path) -> None:
    """Writes the first numbers of all noise that this process draws, as they lie in memory."""
    noted_keys(file)
    drawn_by = keystream.normal

    def noted(key: bytes, shape: Sequence[int]) -> torch.Tensor:
        noise = drawn_by(key, shape)
        with file.open("a") as told:
            told.write(f"{bytes(noise.reshape(-1)[:4].view(torch.uint8).tolist()).hex()}\n")
        return noise

    estimator.normal = noted


def repeated() -> None:
    """What protects is derived from the seed, as in a simulation."""
    Secret.system = lambda: Secret.simulated(0)  # type: ignore[method-assign]


def found_in(folders: list[Path], secrets: list[bytes]) -> list[Path]:
    """The files in which one of the secrets stands, in whatever form."""
    forms = [
        form
        for one in secrets
        for form in (one, one.hex().encode(), base64.b64encode(one), repr(one).encode())
    ]
    files = [one for folder in folders for one in folder.rglob("*") if one.is_file()]
    there = {file: file.read_bytes() for file in files}
    return [file for file, content in there.items() if any(form in content for form in forms)]


def test_it_comes_to_the_mean_and_no_key_or_mask_is_found_anywhere(tmp_path: Path) -> None:
    strategy = dure.FedAvg(
        clients=CLIENTS, batch_size=4, privacy=dure.SecureAggregation(most_examples=16)
    )
    plan = Plan(
        strategy, rounds=3, options={"record": True, "log": str(tmp_path / "log" / "run.log")}
    )
    drawn = tmp_path / "keys.txt"
    (tmp_path / "log").mkdir()
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve(before=partial(noted_keys, drawn))
        for number in range(CLIENTS):
            deployment.join(number, before=partial(noted_keys, drawn))
        ended = deployment.ended()
        for client in deployment.clients.values():
            client.wait_for("over")
    simulated = plan.simulated()
    for name, tensor in simulated.tensors.items():
        # Rounding is drawn from the system: close, and not the same bits.
        torch.testing.assert_close(ended.tensors[name], tensor, atol=1e-6, rtol=0)
    assert ended.facts["bits"] == "close"
    assert [client["examples"] for client in ended.facts["cohort"]] == [None] * CLIENTS
    assert ended.summary["samples"] == simulated.summary["samples"]
    keys = [bytes.fromhex(one) for line in drawn.read_text().splitlines() for one in line.split()]
    assert len(keys) > 2 * CLIENTS * 3 * 4
    folders = [tmp_path / one for one in ("run", "log", *map("site-{}".format, range(CLIENTS)))]
    assert found_in(folders, keys) == []
    (tmp_path / "log" / "leak").write_text(f"the key is {keys[7].hex()}")
    assert found_in(folders, keys) == [tmp_path / "log" / "leak"]


def test_it_is_the_mean_of_the_quantised_updates_to_the_bit(tmp_path: Path) -> None:
    # With the simulation's rounding, which `test_secure_rounds` holds against the mean.
    plan = Plan(dure.Scaffold(clients=3, batch_size=4, privacy="secure-aggregation"), rounds=2)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve(before=repeated)
        deployment.join_all(3, before=repeated)
        ended = deployment.ended()
    ended.check_same(plan.simulated())


@pytest.mark.parametrize(
    "privacy", ["user-level:0.5:1", "secure-aggregation/user-level:0.5:1:distributed"]
)
def test_no_key_of_noise_or_of_a_coin_and_no_noise_is_found_anywhere(
    privacy: str, tmp_path: Path
) -> None:
    (tmp_path / "log").mkdir()
    log = str(tmp_path / "log" / "run.log")
    strategy = dure.FedAvg(clients=CLIENTS, fraction=0.9, batch_size=4, privacy=privacy)
    plan = Plan(strategy, rounds=3, options={"record": True, "log": log})
    drawn = tmp_path / "keys.txt"
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve(before=partial(noted_noise, drawn))
        deployment.join_all(CLIENTS, before=partial(noted_noise, drawn))
        ended = deployment.ended()
    assert ended.facts["promises"]
    secrets = [bytes.fromhex(one) for line in drawn.read_text().split("\n") for one in line.split()]
    assert len(secrets) > 2 * 3
    folders = [tmp_path / one for one in ("run", "log", *map("site-{}".format, range(CLIENTS)))]
    assert found_in(folders, secrets) == []


def test_with_a_roster_of_the_owner_clients_sign_and_a_stranger_takes_no_part(
    tmp_path: Path,
) -> None:
    keys = []
    for number in range(3):
        state = tmp_path / f"site-{number}"
        state.mkdir(mode=0o700)
        keys.append(Key.load_or_create(state / "key.pem"))
    owner = Key.load_or_create(tmp_path / "owner.pem")
    members = [Listed(number, f"site {number}", key.public) for number, key in enumerate(keys)]
    roster = tmp_path / "roster.json"
    roster.write_bytes(OwnersRoster.signed("a study", members, owner).to_json())
    strategy = dure.FedAvg(clients=3, batch_size=4, privacy="secure-aggregation")
    plan = Plan(strategy, rounds=2, options={"roster": str(roster)})
    ended = deployed(tmp_path, plan, 3, owner=owner.public)
    assert ended.facts["turns"] == [[0, 2], [1, 2], [2, 2]]
    assert "also if it lies" in dict(ended.facts["exposure"])["the server"]


@pytest.mark.parametrize("killed", ["server", "client"])
def test_whoever_is_killed_the_run_comes_to_its_end(killed: str, tmp_path: Path) -> None:
    strategy = dure.FedAvg(clients=CLIENTS, batch_size=4, privacy="secure-aggregation")
    options: dict[str, Any] = {"deadline": 20.0, "exchange_seconds": 5.0}
    plan = Plan(strategy, rounds=4, checkpoint_every=2, options=options)
    with Deployment(tmp_path, plan) as deployment:
        server = deployment.serve()
        deployment.join_all(CLIENTS)
        server.wait_for("progress", lambda about: about.get("step") == 1)
        if killed == "server":
            deployment.restart()
        else:
            deployment.clients[0].kill()
            deployment.join(0)
        ended = deployment.ended()
    assert ended.summary["steps"] == 4
    assert all(tensor.isfinite().all() for tensor in ended.tensors.values())


def test_a_server_that_is_killed_has_paid_for_every_round_of_noise(tmp_path: Path) -> None:
    strategy = dure.FedAvg(clients=3, batch_size=4, privacy="user-level:0.5:1")
    plan = Plan(strategy, rounds=4, checkpoint_every=3, options={"deadline": 15.0})
    with Deployment(tmp_path, plan) as deployment:
        server = deployment.serve()
        deployment.join_all(3)
        server.wait_for("progress", lambda about: about.get("step") == 2)
        deployment.restart()
        ended = deployment.ended()
    assert ended.summary["steps"] == 4
    ledger = (tmp_path / "run" / "privacy.jsonl").read_text().splitlines()
    paid = [json.loads(line)["number"] for line in ledger]
    # The round in which it was killed may be paid for twice, and is never seen unpaid.
    assert sorted(set(paid)) == [1, 2, 3, 4]
    assert len(paid) <= 5


def test_whoever_has_few_examples_moves_the_model_by_no_more_where_nobody_says_how_many(
    tmp_path: Path,
) -> None:
    # A client weighs at most 1, and W takes it so: else updates would be divided by far too little.
    privacy = "secure-aggregation/user-level:0.5:0:server:flat:100"
    plan = Plan(dure.FedAvg(clients=3, batch_size=4, privacy=privacy), rounds=1)
    ended = deployed(tmp_path, plan, 3)
    start = {name: one.detach() for name, one in seeded_model(small_task(), 0).named_parameters()}
    moved = torch.cat([(ended.tensors[name] - one).reshape(-1) for name, one in start.items()])
    # 41 examples of up to 100 in all: no further than 0.5 · 0.41 / 3.
    assert 0 < float(moved.norm()) <= 0.5 * 0.41 / 3

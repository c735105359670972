"""Sites that know the owner of their federation take part only by the roster that it has signed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import dure
from dure.deploy.client.site import ClientSite, ConnectionOptions, opened
from dure.deploy.client.state import own_key
from dure.errors import DureError, PolicyError, ServeError
from dure.run.client import _check_protects_nothing
from dure.run.join import check
from dure.wire.members import fingerprint
from dure.wire.owners_roster import FILE, Listed, OwnersRoster, PinnedOwnersRoster, _signed
from dure.wire.requests import Machine, TaskDescription, Welcome
from dure.wire.signatures import Key
from small import small_task

OWNER = Key.make()
EVIL = Key.make()
SECONDS = 60.0


def roster(folder: Path, *states: str, key: Key = OWNER, federation: str = "wards") -> Path:
    """Signed, of the clients with these folders, in this order."""
    members = [
        Listed(number, f"ward {number}", own_key(folder / state).public)
        for number, state in enumerate(states)
    ]
    path = folder / "roster.json"
    path.write_bytes(OwnersRoster.signed(federation, members, key).to_json())
    return path


def served(
    folder: Path, *what: Callable[[str], Any], clients: int = 2, **network: Any
) -> tuple[dure.Run, list[Any]]:
    """A federation to its end; what each thing that was done with its address came to."""
    came: list[Any] = [None] * len(what)
    threads: list[threading.Thread] = []

    def does(at: int, url: str) -> None:
        try:
            came[at] = what[at](url)
        except Exception as error:
            came[at] = error

    def hears(event: dict[str, Any]) -> None:
        if "serving" in event:
            threads.extend(
                threading.Thread(target=does, args=(at, event["serving"]), daemon=True)
                for at in range(len(what))
            )
            for thread in threads:
                thread.start()

    run = dure.serve(
        small_task(),
        dure.FedAvg(clients=clients, batch_size=4),
        dure.Stop(rounds=1),
        out=folder / "run",
        on_progress=hears,
        port=0,
        **{"access": "open", **network},
    )
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    return run, came


def joins(folder: Path, state: str, owner: str = OWNER.public, **more: Any) -> Callable[[str], Any]:
    def join(url: str) -> Any:
        told: list[str] = []

        def hears(what: str, about: Any) -> None:
            if what in ("trust", "checked in"):
                told.append(str(about.get("in", about.get("client"))))

        over = dure.join(
            url, small_task(), state=folder / state, owner=owner, on_progress=hears, **more
        )
        return over, told

    return join


def test_sites_on_the_roster_have_their_numbers_there_and_take_part(tmp_path: Path) -> None:
    # The other way round than they come, and by the fingerprint in one of them.
    path = roster(tmp_path, "b", "a")
    first = joins(tmp_path, "a", fingerprint(OWNER.public))
    checked: list[str] = []

    def looks_then_joins(url: str) -> Any:
        reach = ConnectionOptions(state=tmp_path / "b", owner=OWNER.public)
        checked.extend(check(url, small_task(), reach))
        return joins(tmp_path, "b")(url)

    run, came = served(tmp_path, first, looks_then_joins, roster=str(path))
    assert [over for over, _ in came] == ["the run is over"] * 2
    assert [told[1] for _, told in came] == ["1", "0"]
    said = f"roster 'wards', 2 clients, until {OwnersRoster.read(path).expires}, signed by "
    assert {told[0] for _, told in came} == {said + fingerprint(OWNER.public)}
    assert f"trust: {said}{fingerprint(OWNER.public)}" in checked
    assert run.summary["ended"] == "rounds"
    # The run has its own copy, and each client the one with which the run was begun.
    assert OwnersRoster.read(tmp_path / "run" / FILE) == OwnersRoster.read(path)
    assert len(list((tmp_path / "a").glob("owners-roster-*.json"))) == 1


def after(first: Callable[[str], Any], second: Callable[[str], Any]) -> Callable[[str], Any]:
    """What became of the first, which is refused; the second ends the run."""

    def both(url: str) -> Any:
        with pytest.raises(DureError) as error:
            first(url)
        assert second(url)[0] == "the run is over"
        return error.value

    return both


def test_whoever_is_not_on_the_roster_is_not_enrolled(tmp_path: Path) -> None:
    path = roster(tmp_path, "a")
    stranger = joins(tmp_path, "stranger", "", part=0)
    _, (refused,) = served(
        tmp_path, after(stranger, joins(tmp_path, "a")), clients=1, roster=str(path)
    )
    key = own_key(tmp_path / "stranger").public
    assert f"the run's roster does not have the key {key}" in str(refused)


@pytest.mark.parametrize("where", ["typed", "policy.toml"])
def test_a_site_refuses_a_server_without_the_roster_of_its_owner(
    tmp_path: Path, where: str
) -> None:
    (tmp_path / "a").mkdir()
    owner = OWNER.public
    if where == "policy.toml":
        (tmp_path / "a" / "policy.toml").write_text(f'owner = "{fingerprint(owner)}"')
        owner = ""
    # It has taken nobody's place, so that another one gets it.
    wary, other = joins(tmp_path, "a", owner), joins(tmp_path, "b", "")
    _, (refused,) = served(tmp_path, after(wary, other), clients=1)
    assert isinstance(refused, PolicyError)
    assert "does not take part: the server has no roster" in str(refused)


def test_nor_does_it_take_that_of_another_owner(tmp_path: Path) -> None:
    path = roster(tmp_path, "a", key=EVIL)
    wary, trusting = joins(tmp_path, "a"), joins(tmp_path, "a", "")
    _, (refused,) = served(tmp_path, after(wary, trusting), clients=1, roster=str(path))
    assert f"is signed by the owner {fingerprint(EVIL.public)}" in str(refused)


def test_a_server_takes_no_roster_that_clients_would_refuse(tmp_path: Path) -> None:
    path = roster(tmp_path, "a", "b", "c")
    with pytest.raises(ServeError, match="has 3 clients, but the run has 2"):
        served(tmp_path, roster=str(path))
    assert not (tmp_path / "run" / FILE).exists()
    path.write_bytes(path.read_bytes().replace(b"ward 1", b"ward 9"))
    with pytest.raises(ValueError, match=r"roster.json: the roster is not signed"):
        served(tmp_path / "other", roster=str(path))
    assert not (tmp_path / "other" / "run").exists()


def test_a_run_goes_on_with_the_roster_with_which_it_was_begun(tmp_path: Path) -> None:
    path = roster(tmp_path, "a")
    served(tmp_path, joins(tmp_path, "a"), clients=1, roster=str(path))
    roster(tmp_path, "b")
    with pytest.raises(ServeError, match="differs from the one with which") as error:
        dure.resume(tmp_path / "run", task=small_task(), stop=dure.Stop(rounds=2))
    assert "client 0 (ward 0) has the identity" in str(error.value)
    assert str(tmp_path / "run") in str(error.value)
    with pytest.raises(ServeError, match="was started with a roster"):
        resumed(tmp_path / "run", dure.Network(port=0))


def resumed(folder: Path, network: dure.Network) -> None:
    dure.resume(folder, task=small_task(), world=network, stop=dure.Stop(rounds=2))


def test_a_run_that_was_begun_without_a_roster_gets_none_later(tmp_path: Path) -> None:
    served(tmp_path, joins(tmp_path, "a", ""), clients=1)
    path = roster(tmp_path, "a")
    with pytest.raises(ServeError, match="was started without a roster"):
        resumed(tmp_path / "run", dure.Network(port=0, roster=str(path)))
    assert not (tmp_path / "run" / FILE).exists()


# What a site says of a welcome, without a server


def welcome(text: str = "", client: int = 0, clients: int = 2, **strategy: Any) -> Welcome:
    machine = Machine("2", "AVX2", "loop", 1)
    told = {"name": "fed-avg", "fraction": 1.0, **strategy}
    return Welcome(
        1, "run-1", client, clients, told, 0, TaskDescription({}), machine, 1.0, 1.0, roster=text
    )


@contextmanager
def site(
    folder: Path, owner: str = OWNER.public, policy: str = "", **more: Any
) -> Iterator[ClientSite]:
    (folder / "a").mkdir(exist_ok=True)
    (folder / "a" / "policy.toml").write_text(policy)
    reach = ConnectionOptions(state=folder / "a", owner=owner, **more)
    with opened("http://127.0.0.1:9", reach, threading.Event()) as found:
        yield found


def test_a_site_says_why_a_roster_will_not_do(tmp_path: Path) -> None:
    text = roster(tmp_path, "a", "b").read_text()
    others = roster(tmp_path, "b", "c").read_text()
    changed = replace(OwnersRoster.from_json(text.encode()), expires=date(2020, 2, 29))
    body = _signed(changed.federation, changed.expires, changed.owner, changed.members)
    old = replace(changed, signature=OWNER.sign(body).hex())
    with site(tmp_path) as here:
        # Whoever only looks has no number yet.
        for number in (0, -1):
            assert here.reasons(welcome(text, number)) == []
        for told, said in [
            (welcome(""), "has no roster"),
            (welcome(text, clients=3), "has 2 clients, but the run has 3"),
            (welcome(text, client=1), "as 1, but the roster as 0"),
            (welcome(others), "does not have this client's key"),
            (welcome(changed.to_json().decode()), "not signed by its owner, or was changed"),
            (welcome(old.to_json().decode()), "has expired on 2020-02-29"),
            (welcome("{"), "the received data are not a roster"),
        ]:
            (reason,) = here.reasons(told)
            assert said in reason
            with pytest.raises(PolicyError, match="does not take part"):
                here.agree(told, approve=False)


def test_a_client_refuses_another_roster_later_by_what_has_changed(tmp_path: Path) -> None:
    text = roster(tmp_path, "a", "b").read_text()
    other = roster(tmp_path, "a", "c").read_text()
    with site(tmp_path) as here:
        assert here.enter(welcome(text)) == OwnersRoster.from_json(text.encode()).identities
    with site(tmp_path) as here:
        assert here.reasons(welcome(text)) == []
        (reason,) = here.reasons(welcome(other))
        assert "differs from the one with which run-1 was started: client 1 (ward 1) has" in reason
        with pytest.raises(PolicyError, match="client 1"):
            here.enter(welcome(other))
    pinned = PinnedOwnersRoster.of_client(tmp_path / "a", "run-1")
    pinned.check(OwnersRoster.from_json(text.encode()))


SECURE = "secure-aggregation"


def test_without_an_owner_a_secure_run_is_semi_honest(tmp_path: Path) -> None:
    text = roster(tmp_path, "a", "b").read_text()
    with site(tmp_path, owner="") as here:
        assert here.trust(welcome(text)) == ""
        assert here.enter(welcome(text)) is None
        said = here.trust(welcome("", privacy=SECURE))
        assert said.startswith("semi-honest: ")
        assert "--owner" in said
        assert here.reasons(welcome("", privacy=SECURE)) == []
        # Where there is a roster, the others check it, and could not check this client.
        (reason,) = here.reasons(welcome(text, privacy=SECURE))
        assert "give it with --owner" in reason
        assert here.reasons(welcome(text)) == []
    with site(tmp_path) as here:
        assert "semi-honest" not in here.trust(welcome(text, privacy=SECURE))
        # Its protocol holds against no other, whoever the clients are.
        said = here.trust(welcome(text, privacy="secure-aggregation-plus"))
        assert "; semi-honest: " in said
        assert "--owner" not in said


def test_a_site_wants_so_many_clients_in_a_sum(tmp_path: Path) -> None:
    with site(tmp_path, owner="", policy="smallest_cohort = 10") as here:
        assert here.reasons(welcome(clients=20)) == []
        secure = welcome(clients=20, privacy=f"{SECURE}:0.7:1:1000:10")
        assert here.reasons(secure) == []
        (reason,) = here.reasons(welcome(clients=20, privacy=SECURE))
        assert "at least 10 clients; a secure sum of the run may have 3" in reason
        with pytest.raises(PolicyError, match="privacy setting is not known to this dure"):
            here.reasons(welcome(privacy="wishes"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"owner": "1234"}, "owner: '1234' is not a key"),
        ({"policy": f'owner = "{EVIL.public}"'}, "policy.toml and --owner name different owners"),
        ({"identities": Path("list")}, "leave out --identities or --owner"),
    ],
)
def test_an_owner_is_one_and_says_who_the_others_are(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises((ValueError, PolicyError)) as error, site(tmp_path, **more):
        pass
    assert said in str(error.value)


def test_a_key_and_its_fingerprint_are_one_owner(tmp_path: Path) -> None:
    with site(tmp_path, policy=f'owner = "{fingerprint(OWNER.public)}"') as here:
        assert here.owner == OWNER.public


def test_the_roster_says_to_whom_a_head_is_handed(tmp_path: Path) -> None:
    listed = tmp_path / "list"
    listed.write_text(f"1 {fingerprint(EVIL.public)}")
    with site(tmp_path) as here:
        assert here.known({0: EVIL.public}) == {0: EVIL.public}
        assert here.known(None) is None
    with site(tmp_path, owner="", identities=listed) as here:
        assert here.known(None) == {1: fingerprint(EVIL.public).replace(" ", "")}


@pytest.mark.parametrize(
    ("privacy", "bare"),
    [
        (SECURE, False),
        ("dp-sgd", False),
        ("user-level:1:1:local", False),
        ("user-level:1:1:server", True),
        ("none", True),
    ],
)
def test_a_loop_of_its_own_sends_nothing_bare_that_is_to_be_protected(
    privacy: str, bare: bool
) -> None:
    if bare:
        _check_protects_nothing(welcome(privacy=privacy))
        return
    with pytest.raises(PolicyError, match="would send unprotected updates"):
        _check_protects_nothing(welcome(privacy=privacy))

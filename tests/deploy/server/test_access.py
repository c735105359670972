"""Who may: each request that is refused is refused for its own reason, at its own client's cost."""

from __future__ import annotations

import math

import pytest

from dure.deploy.server import access as access_module
from dure.deploy.server.access import CHECK_IN, NEW, AccessControl, Admitted, RequestRefused
from dure.deploy.server.rate_limits import RateLimits
from dure.deploy.server.register import FILE, Register
from dure.wire.requests import Enrol
from dure.wire.signatures import NONCE, SIGNATURE, Key, Signer, digest_of, prove

NEXT = "/v1/next"
LIMITS = RateLimits(rate=10, burst=50, refusals=5)


@pytest.fixture
def register(tmp_path):
    with Register(tmp_path / FILE, clients=3) as made:
        yield made


@pytest.fixture
def access(register, clock) -> AccessControl:
    return AccessControl(register, "invited", LIMITS, clock)


@pytest.fixture
def opened(register, clock) -> AccessControl:
    return AccessControl(register, "open", LIMITS, clock)


def enrolment(key: Key, token: str = "", name: str = "", wants: int | None = None) -> Enrol:
    return Enrol(token, key.public, prove(key, token, name, wants), name, wants)


def enrolled(access: AccessControl, name: str = "") -> Signer:
    """A client that is enrolled, and knows the server's nonce."""
    key = Key.make()
    access.enrol(enrolment(key, access.register.invite(), name))
    signer = Signer(key)
    ask(access, signer)
    return signer


def ask(access: AccessControl, signer: Signer, path: str = NEXT, body: bytes = b"") -> Admitted:
    """As a client asks, which signs again where it has to."""
    while True:
        headers = signer.sign("POST", path, digest_of(body))
        try:
            return access.admit(headers, "POST", path, "10.0.0.1")
        except RequestRefused as error:
            if not signer.again(headers, error.status, error.headers):
                raise


def refused(call, *arguments, **more) -> RequestRefused:
    with pytest.raises(RequestRefused) as error:
        call(*arguments, **more)
    assert error.value.reason
    return error.value


def test_who_was_invited_is_admitted_by_its_number(access) -> None:
    first, second = enrolled(access, "ward 3"), enrolled(access)
    assert ask(access, first)[:2] == (0, "ward 3")
    assert ask(access, second)[:2] == (1, "client 1")
    assert ask(access, first, body=b"abc").digest == digest_of(b"abc")


def test_a_session_has_one_nonce(access) -> None:
    client = enrolled(access)
    first, second = ask(access, client), ask(access, client)
    assert first.nonce == second.nonce
    assert second.serial == first.serial + 1


def test_a_stranger_is_told_to_enrol(access) -> None:
    error = refused(ask, access, Signer(Key.make()), CHECK_IN)
    assert (error.status, error.kind) == (403, "unknown client")
    assert "invitation" in error.reason


def test_a_request_that_is_not_signed_is_not_admitted(access) -> None:
    error = refused(access.admit, {}, "POST", NEXT)
    assert (error.status, error.kind) == (401, "not signed")
    assert NONCE not in error.headers


def test_another_request_than_the_signed_one_is_forged(access) -> None:
    client = enrolled(access)
    headers = client.sign("POST", NEXT, digest_of())
    error = refused(access.admit, headers, "POST", "/v1/uploads")
    assert (error.status, error.kind) == (403, "forged")
    assert access.admit(headers, "POST", NEXT).client == 0


def test_a_replay_is_refused_and_the_next_request_is_not(access) -> None:
    client = enrolled(access)
    headers = client.sign("POST", NEXT, digest_of())
    assert access.admit(headers, "POST", NEXT).client == 0
    error = refused(access.admit, headers, "POST", NEXT)
    assert (error.status, error.kind) == (401, "replayed")
    assert ask(access, client).client == 0


def test_an_enrolment_needs_the_key_that_it_brings(access) -> None:
    token = access.register.invite()
    stolen = changed(enrolment(Key.make(), token), key=Key.make().public)
    assert refused(access.enrol, stolen).kind == "forged"
    assert access.register.invitations() != []


def changed(body: Enrol, **change) -> Enrol:
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    return Enrol(**{**fields, **change})


@pytest.mark.parametrize("token", ["", "wrong"])
def test_an_enrolment_needs_a_token(access, token) -> None:
    error = refused(access.enrol, enrolment(Key.make(), token))
    assert (error.status, error.kind) == (403, "wrong token")


def test_an_enrolment_whose_answer_was_lost_is_answered_again(access) -> None:
    body = enrolment(Key.make(), access.register.invite(), "ward 3")
    assert access.enrol(body) == access.enrol(body)
    assert access.enrol(body).clients == 3


def test_two_clients_do_not_have_one_name(access) -> None:
    enrolled(access, "ward 3")
    error = refused(access.enrol, enrolment(Key.make(), access.register.invite(), "ward 3"))
    assert (error.status, error.kind) == (409, "name taken")


def test_who_was_revoked_by_another_process_is_refused_from_then_on(access, tmp_path) -> None:
    client = enrolled(access)
    assert access.may(0)
    with Register(tmp_path / FILE) as other:
        other.revoke("0")
    assert not access.may(0)
    error = refused(ask, access, client)
    assert (error.status, error.kind) == (403, "revoked")


def test_who_was_forgotten_is_a_stranger(access, tmp_path) -> None:
    client = enrolled(access)
    with Register(tmp_path / FILE) as other:
        other.forget("0")
    assert not access.may(0)
    assert refused(ask, access, client).kind == "unknown client"


def test_who_is_invited_by_another_process_gets_in(access, tmp_path) -> None:
    with Register(tmp_path / FILE) as other:
        token = other.invite("ward 3", 2)
    assert access.enrol(enrolment(Key.make(), token)).client == 2


def test_a_check_in_is_by_the_name_and_number_of_the_enrolment(access) -> None:
    admitted = ask(access, enrolled(access, "ward 3"), CHECK_IN)
    for name, wants in [("", None), ("ward 3", None), ("", 0), ("ward 3", 0)]:
        assert access.check_in(admitted, name, wants) == admitted
    assert refused(access.check_in, admitted, "ward 4").kind == "name taken"
    assert refused(access.check_in, admitted, "", 1).kind == "number taken"


def test_an_open_server_lets_in_whoever_checks_in_until_it_is_full(opened) -> None:
    signers = [Signer(Key.make()) for _ in range(4)]
    assert refused(ask, opened, signers[0]).kind == "unknown client"
    first = ask(opened, signers[0], CHECK_IN)
    assert first.client == NEW
    assert opened.check_in(first, "a", 1).client == 1
    assert opened.check_in(ask(opened, signers[1], CHECK_IN)).client == 0
    late = ask(opened, signers[3], CHECK_IN)
    assert opened.check_in(ask(opened, signers[2], CHECK_IN)).client == 2
    assert refused(opened.check_in, late).kind == "full"
    error = refused(ask, opened, signers[3], CHECK_IN)
    assert (error.status, error.kind) == (409, "full")
    assert [ask(opened, signer).client for signer in signers[:3]] == [1, 0, 2]
    assert opened.check_in(ask(opened, signers[0], CHECK_IN), "a", 1).client == 1


def test_an_open_server_gives_no_name_or_number_twice(opened) -> None:
    opened.check_in(ask(opened, Signer(Key.make()), CHECK_IN), "a", 1)
    other = ask(opened, Signer(Key.make()), CHECK_IN)
    assert refused(opened.check_in, other, "a").kind == "name taken"
    assert refused(opened.check_in, other, "b", 1).kind == "number taken"
    assert opened.check_in(other, "b", 2).name == "b"


def test_an_open_server_asks_for_no_token_but_heeds_one(opened) -> None:
    assert opened.enrol(enrolment(Key.make())).client == 0
    assert opened.enrol(enrolment(Key.make(), opened.register.invite(number=2))).client == 2


def test_who_asks_too_fast_is_told_how_long_to_wait(access, clock) -> None:
    client, other = enrolled(access), enrolled(access)
    # One it has had when it was enrolled.
    for _ in range(int(LIMITS.burst) - 1):
        ask(access, client)
    error = refused(ask, access, client)
    assert (error.status, error.kind, error.headers) == (429, "too fast", {"retry-after": "1"})
    assert ask(access, other)
    clock.now += 1
    assert ask(access, client)


def test_who_is_refused_too_often_is_in_quarantine_for_a_while(access, clock) -> None:
    client, other = enrolled(access), enrolled(access)
    number = ask(access, client).client
    for _ in range(4):
        assert refused(access.refuse, number, 409, "wrong round", "round 3 is over").status == 409
    error = refused(access.refuse, number, 409, "wrong round", "round 3 is over")
    assert error.headers == {"retry-after": "120"}
    assert "round 3 is over" in error.reason
    error = refused(ask, access, client)
    assert (error.status, error.kind, error.headers) == (429, "quarantined", {"retry-after": "120"})
    assert access.status()["quarantine"] == {number: pytest.approx(120)}
    assert ask(access, other)
    clock.now += 120
    assert ask(access, client).client == number


def test_nobody_is_punished_for_what_others_send_in_its_name(access) -> None:
    client = enrolled(access)
    old = client.sign("POST", NEXT, digest_of())
    access.admit(old, "POST", NEXT, "10.0.0.1")
    for _ in range(100):
        refused(access.admit, {**old, SIGNATURE: "0" * 128}, "POST", NEXT, "10.0.0.1")
        refused(access.admit, old, "POST", NEXT, "10.0.0.1")
        refused(access.enrol, enrolment(Key.make(), "wrong"), "10.0.0.1")
    assert ask(access, client).client == 0
    # Nor is one who brings a token from the address from which all that came.
    assert access.enrol(enrolment(Key.make(), access.register.invite()), "10.0.0.1").client == 1
    assert access.status()["quarantine"] == {}


def test_strangers_who_go_on_are_told_to_wait(access) -> None:
    statuses = [
        refused(access.admit, {}, "GET", "/", "10.0.0.9").status for _ in range(LIMITS.refusals + 1)
    ]
    assert statuses == [401] * (LIMITS.refusals - 1) + [429] * 2


def test_refusals_are_counted_by_their_reason(access, monkeypatch) -> None:
    monkeypatch.setattr(access_module, "MOST_KINDS", 3)
    refused(access.admit, {}, "GET", "/")
    refused(access.admit, {}, "GET", "/")
    refused(access.enrol, enrolment(Key.make(), "wrong"))
    for kind in ("a", "b", "c"):
        refused(access.refuse, NEW, 409, kind, "no")
    enrolled(access)
    assert access.status()["refusals"] == {"not signed": 2, "wrong token": 1, "a": 1, "other": 2}


def test_a_restarted_server_knows_its_clients_and_they_sign_again(access, register) -> None:
    client = enrolled(access)
    again = AccessControl(register)
    headers = client.sign("POST", NEXT, digest_of())
    error = refused(again.admit, headers, "POST", NEXT)
    assert (error.status, error.kind) == (401, "new nonce")
    assert ask(again, client).client == 0


def test_an_enrolment_that_cannot_be_written_is_refused_for_now(access) -> None:
    access.register._db.execute("PRAGMA query_only = ON")
    error = refused(access.enrol, enrolment(Key.make(), ""))
    assert error.status == 503
    assert math.isfinite(float(error.headers["retry-after"]))
    access.register._db.execute("PRAGMA query_only = OFF")
    assert access.enrol(enrolment(Key.make(), access.register.invite())).client == 0


def test_a_register_that_cannot_be_read_refuses_for_now(access) -> None:
    client = enrolled(access)
    access.register._reader.close()
    assert refused(ask, access, client).status == 503


@pytest.mark.parametrize("mode", ["invited", "open"])
def test_where_a_roster_fixes_who_the_clients_are_nobody_else_is_enrolled(
    register, clock, mode
) -> None:
    keys = [Key.make() for _ in range(3)]
    identities = {number: key.public for number, key in enumerate(keys)}
    access = AccessControl(register, mode, LIMITS, clock, identities)
    token = register.invite()
    stranger = Key.make()
    error = refused(access.enrol, enrolment(stranger, token))
    assert (error.status, error.kind) == (409, "not listed")
    assert stranger.public in error.reason
    error = refused(access.enrol, enrolment(keys[2], token, wants=0))
    assert "is client 2 on the run's roster, and cannot be client 0" in error.reason
    # The token is good still, and the number is the one on the roster, not the next one.
    assert access.enrol(enrolment(keys[2], token)).client == 2
    assert access.enrol(enrolment(keys[2], token)).client == 2
    assert access.enrol(enrolment(keys[0], register.invite())).client == 0
    error = refused(access.enrol, enrolment(keys[1], register.invite(number=1), wants=2))
    assert access.enrol(enrolment(keys[1], register.invite(name="ward"), wants=1)).client == 1


def test_a_roster_is_asked_at_a_first_check_in_too(register, clock) -> None:
    listed = Key.make()
    access = AccessControl(register, "open", LIMITS, clock, {1: listed.public})
    # Who only looks hears it too.
    error = refused(ask, access, Signer(Key.make()), CHECK_IN)
    assert (error.status, error.kind) == (409, "not listed")
    known = ask(access, Signer(listed), CHECK_IN)
    assert access.check_in(known, "", None).client == 1

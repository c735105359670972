"""Signed requests: what was changed, sent twice or kept too long is refused; the rest is not."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.wire.signatures import (
    CLIENT,
    DIGEST,
    NONCE,
    SERIAL,
    SESSIONS,
    SIGNATURE,
    WINDOW,
    Claim,
    Key,
    Nonces,
    SignatureError,
    Signer,
    claim_of,
    digest_of,
    is_proven,
    prove,
)

KEY = Key.make()
OTHER = Key.make()
PATHS = st.text("abcz019/-_?=&%.", min_size=1, max_size=30).map("/".__add__)
METHODS = st.sampled_from(["GET", "POST", "PATCH"])


class Server:
    """What stands between the headers of a request and its answer."""

    def __init__(self, **settings) -> None:
        self.now = 0.0
        self.nonces = Nonces(clock=lambda: self.now, **settings)

    def asked(self, headers, method="POST", path="/v1/next") -> tuple[int, dict[str, str], str]:
        try:
            claim = claim_of(headers)
            if not claim.is_true(method, path):
                return 403, {}, "forged"
            self.nonces.take(claim)
        except SignatureError as error:
            return 401, {} if error.nonce is None else {NONCE: error.nonce}, error.kind
        return 200, {}, ""

    def ask(self, signer: Signer, method="POST", path="/v1/next", body=b"") -> list[int]:
        """The statuses of a request, sent until it need not be signed again."""
        statuses = []
        while True:
            headers = signer.sign(method, path, digest_of(body))
            status, answer, _ = self.asked(headers, method, path)
            statuses.append(status)
            if not signer.again(headers, status, answer):
                return statuses


def known(server: Server, key: Key = KEY) -> Signer:
    signer = Signer(key)
    assert server.ask(signer)[-1] == 200
    return signer


def test_the_first_request_learns_the_nonce_and_the_next_ones_use_it() -> None:
    server = Server()
    signer = Signer(KEY)
    assert server.ask(signer) == [401, 200]
    assert server.ask(signer, "GET", "/v1/tensors/77") == [200]


def test_a_server_that_has_forgotten_the_nonce_gives_another_one() -> None:
    signer = known(Server())
    assert Server().ask(signer) == [401, 200]


@given(METHODS, PATHS, st.binary(max_size=40), st.data())
def test_a_request_with_any_part_changed_is_refused(method, path, body, data) -> None:
    server = Server()
    signer = known(server)
    headers = signer.sign(method, path, digest_of(body))
    parts = {"method": method, "path": path, **headers}
    which = data.draw(st.sampled_from(sorted(parts)))
    at = data.draw(st.integers(0, len(parts[which]) - 1))
    byte = data.draw(st.characters(min_codepoint=32, max_codepoint=126))
    changed = {**parts, which: parts[which][:at] + byte + parts[which][at + 1 :]}
    method, path = changed.pop("method"), changed.pop("path")
    same = changed == headers and parts["method"] == method and parts["path"] == path
    assert (server.asked(changed, method, path)[0] == 200) == same


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (SERIAL, lambda text: "0" + text),
        (SERIAL, lambda text: text + " "),
        (SERIAL, lambda text: "+" + text),
        (SERIAL, lambda text: "9" * 19),
        (DIGEST, str.upper),
        (SIGNATURE, str.upper),
        (SIGNATURE, lambda text: text + "\n"),
        (SIGNATURE, lambda text: "0" * 128),
        (CLIENT, lambda text: OTHER.public),
        (CLIENT, lambda text: "0" * 64),
        (NONCE, lambda text: ""),
    ],
)
def test_a_header_written_otherwise_is_refused(name, change) -> None:
    server = Server()
    headers = known(server).sign("POST", "/v1/next", digest_of(b"abc"))
    text = change(headers[name])
    assert text != headers[name]
    assert server.asked({**headers, name: text})[0] in (401, 403)
    assert server.asked(headers)[0] == 200


@pytest.mark.parametrize("name", [CLIENT, NONCE, SERIAL, DIGEST, SIGNATURE])
def test_a_request_without_one_of_the_headers_is_not_signed(name) -> None:
    headers = known(Server()).sign("POST", "/v1/next", digest_of())
    del headers[name]
    assert Server().asked(headers) == (401, {}, "not signed")


def test_lines_cannot_move_from_one_part_to_another() -> None:
    signer = Signer(KEY)
    with pytest.raises(SignatureError):
        signer.sign("POST", "/v1/next\nx", digest_of())


@given(st.lists(st.integers(0, 3 * WINDOW), max_size=60))
def test_of_any_order_of_serials_each_counts_once_within_the_window(serials) -> None:
    server = Server()
    nonce = fresh(server)
    seen: set[int] = set()
    for serial in serials:
        highest = max(seen, default=-1)
        new = serial not in seen and serial > highest - WINDOW
        assert taken(server, nonce, serial) == new
        if new:
            seen.add(serial)


def fresh(server: Server, client: str = KEY.public) -> str:
    with pytest.raises(SignatureError) as asked:
        server.nonces.take(Claim(client, "", 0, digest_of(), ""))
    assert asked.value.kind == "new nonce"
    assert asked.value.nonce is not None
    return asked.value.nonce


def taken(server: Server, nonce: str, serial: int, client: str = KEY.public) -> bool:
    try:
        server.nonces.take(Claim(client, nonce, serial, digest_of(), ""))
    except SignatureError as error:
        if error.kind != "replayed":
            raise
        return False
    return True


def test_a_serial_far_ahead_costs_no_memory() -> None:
    server = Server()
    nonce = fresh(server)
    assert taken(server, nonce, 0)
    assert taken(server, nonce, 10**17)
    [session] = server.nonces._sessions[KEY.public]
    assert session.seen.bit_length() <= WINDOW


def test_a_request_that_is_sent_twice_is_answered_once() -> None:
    server = Server()
    signer = known(server)
    headers = signer.sign("POST", "/v1/next", digest_of())
    assert server.asked(headers)[0] == 200
    status, answer, kind = server.asked(headers)
    assert (status, kind) == (401, "replayed")
    # A proxy may have sent it twice, and lost the first answer: the client signs anew.
    assert signer.again(headers, status, answer)
    assert server.ask(signer) == [200]


def test_an_old_request_sent_many_times_drives_out_no_nonce_in_use() -> None:
    server = Server()
    old = Signer(KEY).sign("POST", "/v1/next", digest_of())
    signer = known(server)
    answers = {server.asked(old)[1][NONCE] for _ in range(3 * SESSIONS)}
    assert len(answers) == 1
    assert server.ask(signer) == [200]


def test_processes_with_one_key_do_not_disturb_each_other() -> None:
    server = Server()
    signers = [known(server) for _ in range(SESSIONS)]
    for _ in range(3):
        assert [server.ask(signer) for signer in signers] == [[200]] * SESSIONS


def test_of_many_processes_with_one_key_all_go_on_and_memory_is_bounded() -> None:
    server = Server()
    signers = [known(server) for _ in range(3 * SESSIONS)]
    assert [server.ask(signer)[-1] for signer in signers] == [200] * len(signers)
    assert len(server.nonces._sessions[KEY.public]) == SESSIONS


def test_of_too_many_processes_the_one_that_was_longest_silent_signs_again() -> None:
    server = Server()
    first, second, *others = [known(server) for _ in range(SESSIONS)]
    assert server.ask(first) == [200]
    known(server)
    assert [server.ask(signer) for signer in (first, *others)] == [[200]] * (SESSIONS - 1)
    assert server.ask(second) == [401, 200]


def test_a_nonce_is_forgotten_though_another_of_the_client_is_in_use() -> None:
    server = Server(life=10.0)
    silent, busy = known(server), known(server)
    for _ in range(2):
        server.now += 6
        assert server.ask(busy) == [200]
    assert server.ask(silent) == [401, 200]


def test_a_nonce_is_forgotten_some_time_after_its_last_use() -> None:
    server = Server(life=10.0)
    signer = known(server)
    for _ in range(5):
        server.now += 9
        assert server.ask(signer) == [200]
    server.now += 11
    assert server.ask(signer) == [401, 200]


def test_clients_that_are_silent_are_forgotten() -> None:
    server = Server(life=10.0, most=20)
    for number in range(50):
        fresh(server, f"{number:064x}")
    assert len(server.nonces) <= 21
    server.now += 11
    fresh(server)
    assert len(server.nonces) == 1


def test_connections_that_sign_at_the_same_time_use_every_serial_once() -> None:
    server = Server()
    signer = Signer(KEY)
    statuses: list[int] = []

    def connection() -> None:
        for _ in range(50):
            statuses.append(server.ask(signer)[-1])

    threads = [threading.Thread(target=connection) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 200


def test_an_answer_that_another_connection_has_had_before_changes_nothing() -> None:
    server = Server()
    signer = Signer(KEY)
    late = signer.sign("POST", "/v1/next", digest_of())
    status, answer, _ = server.asked(late)
    assert server.ask(signer) == [401, 200]
    assert signer.again(late, status, answer)
    assert server.ask(signer) == [200]
    # And one for an older nonce, whose nonce is another.
    assert signer.again(late, 401, {NONCE: "0" * 32})
    assert server.ask(signer) == [200]


@pytest.mark.parametrize(
    ("status", "answer"), [(403, {NONCE: "0" * 32}), (401, {}), (401, {NONCE: "x"}), (200, {})]
)
def test_other_answers_do_not_ask_to_sign_again(status, answer) -> None:
    signer = Signer(KEY)
    assert not signer.again(signer.sign("POST", "/", digest_of()), status, answer)


def test_a_key_never_shows_itself() -> None:
    assert repr(KEY) == f"Key({KEY.public})"


NAMES = st.text(max_size=5)
WISHES = st.none() | st.integers(0, 3)


@given(NAMES, NAMES, WISHES, NAMES, NAMES, WISHES)
def test_an_enrolment_is_proven_for_just_what_it_says(
    token, name, wants, other_token, other_name, other_wants
) -> None:
    proof = prove(KEY, token, name, wants)
    assert is_proven(KEY.public, proof, token, name, wants)
    same = (token, name, wants) == (other_token, other_name, other_wants)
    assert is_proven(KEY.public, proof, other_token, other_name, other_wants) == same
    assert not is_proven(OTHER.public, proof, token, name, wants)


@pytest.mark.parametrize(("key", "proof"), [("", ""), ("x" * 64, "0" * 128), ("0" * 64, "é" * 128)])
def test_what_is_no_proof_proves_nothing(key: str, proof: str) -> None:
    assert not is_proven(key, proof, "", "", None)

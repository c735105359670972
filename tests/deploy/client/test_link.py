"""A client's link: what it does when all is well, and what it says when it is not."""

from __future__ import annotations

import email.utils
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_server import Request, Server, certificate, serving
from hypothesis import given
from hypothesis import strategies as st

from dure.deploy.client.connection import Connection
from dure.deploy.client.link import (
    LONGEST_WAIT,
    MOST_SILENT,
    Backoff,
    BusyError,
    HttpLink,
    LinkLostError,
    NotTrustedError,
    OutgoingBody,
    RefusedError,
    StoppedError,
    WrongAddressError,
    call_with_retries,
)
from dure.wire.requests import WatchAnswer, WatchRequest, to_json

WANTED = to_json(WatchAnswer(wanted=True))
AT_ONCE = Backoff(base=0.0, most=0.0)


def wanted(request: Request) -> None:
    request.body()
    request.reply(body=WANTED)


def ask(link: HttpLink) -> WatchAnswer:
    return link.ask("POST", "/v1/watch", WatchRequest(3), WatchAnswer)


# One connection


def test_one_connection_carries_many_requests_each_in_one_piece(monkeypatch) -> None:
    pieces = []
    send = http.client.HTTPConnection.send

    def noted(self: http.client.HTTPConnection, data: bytes) -> None:
        pieces.append(bytes(data))
        send(self, data)

    monkeypatch.setattr(http.client.HTTPConnection, "send", noted)
    with serving(wanted) as server, HttpLink(server.url) as link:
        for _ in range(3):
            assert ask(link).wanted
    assert server.connections == 1
    assert [piece.endswith(to_json(WatchRequest(3))) for piece in pieces] == [True] * 3


def test_a_connection_that_the_server_closed_meanwhile_is_opened_anew() -> None:
    def answer(request: Request) -> None:
        wanted(request)
        # Without saying so, as at the end of its patience.
        request.hang_up()

    with serving(answer) as server, HttpLink(server.url) as link:
        for _ in range(3):
            assert ask(link).wanted
    assert len(server.requests) == server.connections == 3


def test_a_connection_that_lay_idle_for_long_is_not_used_again() -> None:
    with serving(wanted) as server, HttpLink(server.url, idle_seconds=-1.0) as link:
        ask(link)
        ask(link)
    assert server.connections == 2


def test_a_long_body_is_not_sent_again_by_the_link_itself() -> None:
    def answer(request: Request) -> None:
        if request.path == "/long":
            return request.hang_up()
        return wanted(request)

    body = OutgoingBody(1 << 20, "", lambda: iter((bytes(1 << 20),)))
    with serving(answer) as server, HttpLink(server.url) as link:
        ask(link)
        with pytest.raises(LinkLostError):
            link.send("PATCH", "/long", body)
    assert server.requests.count(("PATCH", "/long")) == 1


def test_two_threads_need_two_links() -> None:
    with serving(lambda request: request.reply(body=b"x")) as server, HttpLink(server.url) as link:
        with link.stream("GET", "/"), pytest.raises(RuntimeError, match="another for this thread"):
            ask(link)
        assert link.request("GET", "/").body == b"x"


def test_what_is_left_unread_of_a_long_answer_is_not_taken_for_the_next_one() -> None:
    def answer(request: Request) -> None:
        request.body()
        request.reply(body=bytes(500_000) if request.command == "GET" else WANTED)

    with serving(answer) as server, HttpLink(server.url) as link:
        with link.stream("GET", "/") as streamed:
            assert streamed.read(memoryview(bytearray(10))) == 10
        assert ask(link).wanted


def test_a_link_that_is_closed_lets_nobody_wait() -> None:
    asked = threading.Event()
    over = threading.Event()

    def answer(request: Request) -> None:
        asked.set()
        over.wait()

    with serving(answer) as server:
        link = HttpLink(server.url, silent_seconds=600.0)
        closes = threading.Thread(target=lambda: (asked.wait(), link.close()))
        closes.start()
        try:
            with pytest.raises(StoppedError):
                ask(link)
            with pytest.raises(StoppedError):
                ask(link)
        finally:
            over.set()
            closes.join()
    assert server.connections == 1


# What goes wrong


def a_free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_nobody_listens() -> None:
    with (
        HttpLink(f"http://127.0.0.1:{a_free_port()}") as link,
        pytest.raises(LinkLostError, match="refuses connections"),
    ):
        ask(link)


def drips(request: Request) -> None:
    """A head that never ends, in bytes that come one by one."""
    try:
        while True:
            request.connection.sendall(b"H")
            time.sleep(0.02)
    except OSError:
        request.close_connection = True


def silence(request: Request) -> None:
    request.rfile.read(1 << 20)


@pytest.mark.parametrize("answer", [silence, drips])
def test_a_server_that_does_not_answer_is_not_waited_for_without_end(answer) -> None:
    with (
        serving(answer) as server,
        HttpLink(server.url) as link,
        pytest.raises(LinkLostError, match=r"did not answer within 0\.3 s"),
    ):
        link.request("GET", "/", timeout=0.3)


def test_a_body_that_falls_silent_is_a_lost_link() -> None:
    def answer(request: Request) -> None:
        request.head(200, {"content-length": "100"})
        request.wfile.write(bytes(50))
        silence(request)

    with serving(answer) as server, HttpLink(server.url, silent_seconds=0.3) as link:
        with pytest.raises(LinkLostError):
            link.request("GET", "/")
        with link.stream("GET", "/") as streamed:
            memory = memoryview(bytearray(50))
            assert streamed.read(memory) == 50
            with pytest.raises(LinkLostError):
                streamed.read(memory)


def raw(content: bytes) -> Callable[[Request], None]:
    def answer(request: Request) -> None:
        request.body()
        request.wfile.write(content)
        request.hang_up()

    return answer


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nwhat\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\nabc",
        b"HTTP/1.1 two OK\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
    ],
)
def test_an_answer_that_is_none_is_a_lost_link_in_one_line(content: bytes) -> None:
    with serving(raw(content)) as server, HttpLink(server.url) as link:
        with pytest.raises(LinkLostError) as told:
            ask(link)
        assert str(told.value).isprintable()


@pytest.mark.parametrize(
    "head", ["content-length: 9000000", "transfer-encoding: chunked", "connection: close"]
)
def test_a_server_cannot_make_a_client_hold_more_than_it_wants(head: str) -> None:
    sent = 0

    def answer(request: Request) -> None:
        nonlocal sent
        request.wfile.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
        while True:
            chunk = bytes(10_000)
            request.wfile.write(b"2710\r\n" + chunk + b"\r\n" if "chunked" in head else chunk)
            sent += len(chunk)

    with (
        serving(answer) as server,
        HttpLink(server.url) as link,
        pytest.raises(RefusedError, match="more than 20000 bytes"),
    ):
        link.request("GET", "/", most=20_000)


def test_a_chunk_without_an_end_is_not_held() -> None:
    sent = 0

    def answer(request: Request) -> None:
        nonlocal sent
        request.wfile.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n")
        while True:
            request.wfile.write(bytes(10_000))
            sent += 10_000

    with serving(answer) as server, HttpLink(server.url) as link, pytest.raises(LinkLostError):
        link.request("GET", "/")
    # With what lies in the buffers of sockets.
    assert sent < 32 << 20


def replies(status: int, body: bytes = b"", **headers: str) -> Callable[[Request], None]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    def answer(request: Request) -> None:
        request.body()
        request.reply(status, body, named)

    return answer


def error_of(answer: Callable[[Request], None]) -> Exception:
    with serving(answer) as server, HttpLink(server.url) as link:
        with pytest.raises((LinkLostError, RefusedError, BusyError)) as told:
            ask(link)
        return told.value


def test_a_refusal_says_why_in_a_line_that_a_terminal_can_show() -> None:
    error = error_of(replies(403, b'{"error": "not\\u001b[2J you\\nnor I"}'))
    assert isinstance(error, RefusedError)
    assert error.status == 403
    assert str(error) == "not [2J you nor I"


def test_a_refusal_of_something_on_the_way_is_named_by_its_status() -> None:
    error = error_of(replies(407, b"<html>Who are you?</html>"))
    assert isinstance(error, RefusedError)
    assert "407 Proxy Authentication Required" in str(error)


def test_a_redirection_is_not_followed_but_named() -> None:
    error = error_of(replies(308, location="https://elsewhere/"))
    assert isinstance(error, RefusedError)
    assert "https://elsewhere/" in str(error)


def test_a_page_that_signs_one_on_to_a_network_is_no_server() -> None:
    error = error_of(replies(200, b"<html>Welcome to our hotel</html>"))
    assert isinstance(error, RefusedError)
    assert "not a server of dure" in str(error)


@pytest.mark.parametrize(
    ("status", "after", "least", "most"),
    [
        (503, "7", 7.0, 7.0),
        (429, None, 0.0, 0.0),
        (500, "soon", 0.0, 0.0),
        (502, "-3", 0.0, 0.0),
        (503, "1" * 40, LONGEST_WAIT, LONGEST_WAIT),
        (503, "1" * 400, LONGEST_WAIT, LONGEST_WAIT),
        (503, "nan", 0.0, 0.0),
        (503, email.utils.formatdate(0), 0.0, 0.0),
        (503, email.utils.formatdate(time.time() + 1e6), LONGEST_WAIT, LONGEST_WAIT),
    ],
    # Without the time in their names: those who run them at the same time call them alike.
    ids=[
        "seconds",
        "nothing",
        "words",
        "below zero",
        "for ever",
        "more digits than a number has",
        "no number",
        "a date long ago",
        "a date to come",
    ],
)
def test_a_busy_server_says_for_how_long(status, after, least, most) -> None:
    error = error_of(replies(status, bytes(2 << 20), **({"retry_after": after} if after else {})))
    assert isinstance(error, BusyError)
    assert least <= error.seconds <= most


def test_an_answer_counts_that_comes_before_the_body_was_sent() -> None:
    def answer(request: Request) -> None:
        if request.command == "POST":
            return wanted(request)
        request.reply(413, b'{"error": "too much"}')
        request.close_connection = True
        return request.connection.shutdown(socket.SHUT_WR)

    body = OutgoingBody(64 << 20, "", lambda: iter(bytes(1 << 20) for _ in range(64)))
    with serving(answer) as server, HttpLink(server.url, silent_seconds=5.0) as link:
        with pytest.raises(RefusedError, match="too much"):
            link.send("PATCH", "/", body)
        assert ask(link).wanted


def test_an_answer_counts_of_a_server_that_does_not_read_on() -> None:
    over = threading.Event()

    def answer(request: Request) -> None:
        if request.command == "POST":
            return wanted(request)
        request.reply(413, b'{"error": "too much"}')
        return over.wait()

    body = OutgoingBody(64 << 20, "", lambda: iter(bytes(1 << 20) for _ in range(64)))
    with serving(answer) as server, HttpLink(server.url, silent_seconds=0.5) as link:
        with pytest.raises(RefusedError, match="too much"):
            link.send("PATCH", "/", body)
        assert ask(link).wanted
        over.set()
    assert server.connections == 2


def test_a_refusal_that_is_long_does_not_spoil_the_next_answer() -> None:
    def answer(request: Request) -> None:
        if request.path == "/":
            request.reply(404, bytes(2 << 20))
        else:
            wanted(request)

    with serving(answer) as server, HttpLink(server.url) as link:
        with pytest.raises(RefusedError):
            link.request("GET", "/")
        assert ask(link).wanted


# Signatures


class Numbered:
    """Signs by counting."""

    def __init__(self) -> None:
        self.nonce = ""
        self.serial = 0

    def headers(self, method: str, path: str, digest: str) -> dict[str, str]:
        self.serial += 1
        return {"signed": f"{method} {path} {digest[:4]} {self.nonce} {self.serial}"}

    def renew(self, nonce: str) -> None:
        self.nonce = nonce


def test_a_request_is_signed_anew_with_the_servers_nonce() -> None:
    seen = []

    def answer(request: Request) -> None:
        request.body()
        seen.append(request.headers["signed"])
        if " second " not in seen[-1]:
            return request.reply(401, b"{}", {"dure-nonce": "second"})
        return request.reply()

    with serving(answer) as server, HttpLink(server.url, signs=Numbered()) as link:
        link.request("POST", "/a", b"abc")
        link.request("POST", "/b", b"abc")
    assert seen == ["POST /a ba78  1", "POST /a ba78 second 2", "POST /b ba78 second 3"]


def test_who_is_not_known_after_that_is_refused() -> None:
    answer = replies(401, b'{"error": "who?"}', dure_nonce="again")
    with (
        serving(answer) as server,
        HttpLink(server.url, signs=Numbered()) as link,
        pytest.raises(RefusedError, match=r"who\?"),
    ):
        link.request("POST", "/")
    assert len(server.requests) == 2


def test_each_sending_has_a_signature_of_its_own() -> None:
    seen = []

    def answer(request: Request) -> None:
        seen.append(request.headers["signed"][-1])
        # The second is heard, and its connection closed.
        if len(seen) != 2:
            request.reply()
        else:
            request.hang_up()

    with serving(answer) as server, HttpLink(server.url, signs=Numbered()) as link:
        link.request("GET", "/")
        link.request("GET", "/")
    assert seen == ["1", "2", "3"]


# TLS


@pytest.fixture(scope="module")
def pems(tmp_path_factory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls(pems) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pems)
    return context


@pytest.fixture
def trusts(pems) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=pems[0])


def test_over_tls_all_is_the_same(tls, trusts) -> None:
    with serving(wanted, tls) as server, HttpLink(server.url, context=trusts) as link:
        assert ask(link).wanted
        assert ask(link).wanted
    assert server.connections == 1


def test_a_certificate_that_nobody_vouches_for_is_not_trusted(tls) -> None:
    with (
        serving(wanted, tls) as server,
        HttpLink(server.url) as link,
        pytest.raises(NotTrustedError, match="is not trusted: self"),
    ):
        ask(link)
    assert server.requests == []


def test_a_certificate_for_another_name_is_not_trusted(tls, trusts) -> None:
    with serving(wanted, tls) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        with (
            HttpLink(url, context=trusts) as link,
            pytest.raises(NotTrustedError, match="use a host name that is in the certificate"),
        ):
            ask(link)


def test_a_client_without_a_certificate_hears_that_it_needs_one(tls, trusts) -> None:
    tls.verify_mode = ssl.CERT_REQUIRED
    with (
        serving(wanted, tls) as server,
        HttpLink(server.url, context=trusts) as link,
        pytest.raises(NotTrustedError, match="this client's certificate"),
    ):
        # The server may close before its alert is read.
        call_with_retries(lambda: ask(link), AT_ONCE, threading.Event())


def test_a_server_without_tls_is_told_apart(trusts) -> None:
    with serving(wanted) as server:
        url = server.url.replace("http:", "https:")
        with (
            HttpLink(url, context=trusts) as link,
            pytest.raises(WrongAddressError, match="use TLS"),
        ):
            ask(link)


# Proxies


@contextmanager
def proxy(to: int) -> Iterator[Server]:
    """A proxy that knows one server, whatever it is called."""

    def answer(request: Request) -> None:
        asked.append((request.command, request.path, request.headers["proxy-authorization"]))
        if request.command != "CONNECT":
            wanted(request)
            return
        request.close_connection = True
        with socket.create_connection(("127.0.0.1", to)) as other:
            request.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            back = threading.Thread(target=copy, args=(other, request.connection))
            back.start()
            copy(request.connection, other)
            back.join()

    asked: list[tuple[str, str, str]] = []
    with serving(answer) as server:
        server.asked = asked  # type: ignore[attr-defined]
        yield server


def copy(from_: socket.socket, to: socket.socket) -> None:
    try:
        while some := from_.recv(1 << 16):
            to.sendall(some)
        to.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_tls_goes_through_the_proxy_that_the_environment_names(tls, trusts, monkeypatch) -> None:
    with serving(wanted, tls) as server, proxy(server.server_port) as between:
        url = between.url.replace("//", "//me:se%20cret@")
        monkeypatch.setenv("https_proxy", url)
        with HttpLink("https://server.test:4433", context=trusts) as link:
            assert ask(link).wanted
            assert ask(link).wanted
    assert between.asked == [("CONNECT", "server.test:4433", "Basic bWU6c2UgY3JldA==")]
    assert len(server.requests) == 2


def test_plain_requests_are_the_proxys_own(monkeypatch) -> None:
    with proxy(0) as between:
        monkeypatch.setenv("http_proxy", between.url)
        with HttpLink("http://server.test/dure") as link:
            assert ask(link).wanted
    assert between.asked == [("POST", "http://server.test:80/dure/v1/watch", None)]


def test_this_machine_and_what_is_excepted_are_reached_without_a_proxy(monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{a_free_port()}")
    with serving(wanted) as server, HttpLink(server.url) as link:
        assert ask(link).wanted
    monkeypatch.setenv("no_proxy", "server.test")
    with (
        HttpLink("http://server.test:1") as link,
        pytest.raises(WrongAddressError, match=r"no host server\.test"),
    ):
        ask(link)


@pytest.mark.parametrize(
    "url", ["ftp://a", "server:80", "https://", "https://a?b=c", "https://me@a", "http://a:b"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"not the URL of a server|more than|Port"):
        HttpLink(url)


def test_a_proxy_of_another_kind_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("https_proxy", "socks5://somewhere:1080")
    with pytest.raises(ValueError, match="socks5"):
        HttpLink("https://server.test")


# What can pass and what cannot: the table of the module


Told = type[Exception]


def what_comes_of(link: HttpLink, attempts: int = 1) -> Told:
    """The kind of the error at the last of so many attempts."""
    with link:
        for _ in range(attempts):
            with pytest.raises(Exception, match=r".") as told:
                ask(link)
    return told.type


ANSWERS: list[tuple[int, bytes, Told, Told]] = [
    (408, b"", BusyError, BusyError),
    (425, b"", BusyError, BusyError),
    (429, b"", BusyError, BusyError),
    (429, b'{"error": "slowly"}', BusyError, BusyError),
    (500, b"", BusyError, BusyError),
    (502, b"<html>", BusyError, BusyError),
    (503, b'{"error": "the server is starting"}', BusyError, BusyError),
    (403, b'{"error": "revoked"}', RefusedError, RefusedError),
    (409, b'{"error": "the task is another"}', RefusedError, RefusedError),
    (200, b"<html>Welcome to our hotel</html>", RefusedError, BusyError),
    (302, b"", RefusedError, BusyError),
    (403, b"<html>", RefusedError, BusyError),
    (404, b"", RefusedError, BusyError),
    (405, b"", RefusedError, BusyError),
]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("status", "body", "first", "later"), ANSWERS)
def test_an_answer_ends_a_client_or_not(
    status: int, body: bytes, first: Told, later: Told, known: bool
) -> None:
    with serving(replies(status, body)) as server:
        assert what_comes_of(HttpLink(server.url, known=known)) is (later if known else first)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("number", "first"),
    [
        (socket.EAI_NONAME, WrongAddressError),
        (socket.EAI_NODATA, WrongAddressError),
        (socket.EAI_AGAIN, LinkLostError),
        (socket.EAI_FAIL, LinkLostError),
    ],
)
def test_a_name_that_does_not_exist_ends_a_client_and_a_silent_name_server_does_not(
    number: int, first: Told, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "so it is")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    link = HttpLink("http://server.test", known=known)
    assert what_comes_of(link) is (LinkLostError if known else first)


def test_a_port_where_nobody_listens_does_not_end_a_client() -> None:
    for known in (False, True):
        link = HttpLink(f"http://127.0.0.1:{a_free_port()}", known=known)
        assert what_comes_of(link) is LinkLostError


@pytest.mark.parametrize("known", [False, True])
def test_what_tls_says_ends_a_client_before_it_knows_the_server(tls, trusts, known) -> None:
    with serving(wanted, tls) as server:
        untrusted = what_comes_of(HttpLink(server.url, known=known))
        other = server.url.replace("127.0.0.1", "localhost")
        misnamed = what_comes_of(HttpLink(other, context=trusts, known=known))
    with serving(wanted) as server:
        plain = server.url.replace("http:", "https:")
        without = what_comes_of(HttpLink(plain, context=trusts, known=known))
    if known:
        assert {untrusted, misnamed, without} == {LinkLostError}
    else:
        assert (untrusted, misnamed, without) == (
            NotTrustedError,
            NotTrustedError,
            WrongAddressError,
        )


@pytest.mark.parametrize(
    ("status", "first"), [(407, WrongAddressError), (403, WrongAddressError), (503, LinkLostError)]
)
def test_a_proxy_that_leads_nowhere(status: int, first: Told, monkeypatch) -> None:
    with serving(replies(status)) as server:
        monkeypatch.setenv("https_proxy", server.url)
        for known in (False, True):
            link = HttpLink("https://server.test", known=known)
            assert what_comes_of(link) is (LinkLostError if known else first)


def test_a_server_that_closes_each_connection_without_a_word_is_left_alone(tls, trusts) -> None:
    with serving(Request.hang_up, tls) as server:
        for attempts in range(1, MOST_SILENT):
            assert what_comes_of(HttpLink(server.url, context=trusts), attempts) is LinkLostError
        link = HttpLink(server.url, context=trusts)
        assert what_comes_of(link, MOST_SILENT) is NotTrustedError
        link = HttpLink(server.url, context=trusts, known=True)
        assert what_comes_of(link, 2 * MOST_SILENT) is LinkLostError


def test_one_that_answers_in_between_is_not(tls, trusts) -> None:
    asked = 0

    def answer(request: Request) -> None:
        nonlocal asked
        asked += 1
        request.body()
        if asked % MOST_SILENT:
            request.hang_up()
        else:
            request.reply(503)
            request.close_connection = True

    with serving(answer, tls) as server, HttpLink(server.url, context=trusts) as link:
        for _ in range(4 * MOST_SILENT):
            with pytest.raises((LinkLostError, BusyError)):
                ask(link)


def test_a_server_that_has_answered_once_is_known(tls, trusts) -> None:
    answers = iter([wanted, replies(404), replies(200, b"<html>"), wanted])
    with serving(lambda request: next(answers)(request)) as server, HttpLink(server.url) as link:
        assert ask(link).wanted
        for _ in range(2):
            with pytest.raises(BusyError):
                ask(link)
        assert ask(link).wanted


# Patience


def fails(times: int, error: OSError) -> Callable[[], str]:
    left = [error] * times

    def call() -> str:
        if left:
            raise left.pop()
        return "done"

    return call


def test_patience_repeats_until_it_works_and_tells_of_each_failure() -> None:
    told = []
    call = fails(3, LinkLostError("gone"))
    result = call_with_retries(
        call, AT_ONCE, threading.Event(), lambda error, _: told.append(str(error))
    )
    assert result == "done"
    assert told == ["gone"] * 3


def test_patience_does_not_repeat_what_would_not_help() -> None:
    def call() -> None:
        calls.append(1)
        raise RefusedError(403, "no")

    calls: list[int] = []
    with pytest.raises(RefusedError):
        call_with_retries(call, AT_ONCE, threading.Event())
    assert len(calls) == 1


def test_patience_ends_at_its_limit_with_the_last_error() -> None:
    slow = Backoff(base=1000.0, most=1000.0, draw=lambda: 1.0)
    with pytest.raises(LinkLostError, match="gone"):
        call_with_retries(fails(9, LinkLostError("gone")), slow, threading.Event(), limit=10.0)


def test_a_wish_to_stop_ends_a_long_wait_at_once() -> None:
    stop = threading.Event()
    slow = Backoff(base=1e6, most=1e6, draw=lambda: 1.0)
    with pytest.raises(StoppedError):
        call_with_retries(fails(9, LinkLostError("gone")), slow, stop, lambda *_: stop.set())


def test_a_busy_server_is_left_alone_for_as_long_as_it_wants() -> None:
    waits = []
    stop = threading.Event()

    def tell(_: OSError, seconds: float) -> None:
        waits.append(seconds)
        stop.set()

    with pytest.raises(StoppedError):
        call_with_retries(fails(1, BusyError(503, "later", 30.0)), Backoff(), stop, tell)
    assert 30.0 <= waits[0] <= 30.25


@given(st.floats(0.001, 10.0), st.floats(0.001, 100.0), st.floats(0.0, 1.0))
def test_waits_double_up_to_the_longest_and_are_drawn_from_all_of_it(base, most, drawn) -> None:
    waits = Backoff(base, most, lambda: drawn).waits()
    for number in range(12):
        assert next(waits) == pytest.approx(drawn * min(most, base * 2**number))


def test_two_clients_do_not_wait_the_same() -> None:
    one, other = Backoff().waits(), Backoff().waits()
    assert [next(one) for _ in range(5)] != [next(other) for _ in range(5)]


def test_a_connection_asks_the_system_to_notice_when_the_other_side_is_gone() -> None:
    with serving(wanted) as server, HttpLink(server.url) as link:
        ask(link)
        connection = link._connection
        assert isinstance(connection, Connection)
        sock = connection.sock
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

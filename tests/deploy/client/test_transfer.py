"""Tensors over links that break: they arrive whole, and little is sent twice."""

from __future__ import annotations

import hashlib
import http.client
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from faulty_server import Request, serving
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dure.deploy.client.link import (
    Backoff,
    BusyError,
    HttpLink,
    RefusedError,
    StoppedError,
)
from dure.deploy.client.transfer import (
    LEAST_PART,
    TransferError,
    _joined,
    _Laid,
    download,
    upload,
)
from dure.wire.requests import UploadRequest, UploadState, from_json, to_json
from dure.wire.tensors import TensorSpec, digest_of, forms_of, pieces, size_of

AT_ONCE = Backoff(base=0.0, most=0.0)
MIB = 1 << 20


def made(count: int, each: int = 1000) -> dict[str, Tensor]:
    """Tensors of four bytes an element, all of them different."""
    numbers = torch.arange(count * each, dtype=torch.int32).reshape(count, each)
    return {f"layer {number}": row for number, row in enumerate(numbers)}


SMALL = made(40, 777)
LARGE = made(12, MIB // 4)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# Down


class Shelf:
    """Serves one stream.

    breaks: the bytes of the stream at which the link breaks, once each. spoils: how often a byte of
    it is changed on the way. served: (first byte, one after the last) of each answer.
    """

    def __init__(self, tensors: Mapping[str, Tensor], breaks=(), spoils=0, ranges=True) -> None:
        self.tensors = tensors
        self.stream = b"".join(pieces(tensors))
        self.digest = digest_of(tensors)
        self.breaks = sorted(breaks)
        self.spoils = spoils
        self.ranges = ranges
        self.served: list[tuple[int, int]] = []

    def __call__(self, request: Request) -> None:
        path, _, query = request.path.partition("?")
        assert path == f"/v1/tensors/{self.digest}"
        at = 0
        headers = {}
        if "range" in request.headers and self.ranges:
            at = int(request.headers["range"].removeprefix("bytes=").removesuffix("-"))
            # The query says the same, and is signed.
            assert query == f"from={at}"
            assert request.headers["if-range"] == f'"{self.digest}"'
            headers = {"content-range": f"bytes {at}-{len(self.stream) - 1}/{len(self.stream)}"}
        end = len(self.stream)
        if self.breaks and self.breaks[0] < end:
            end = max(at, self.breaks.pop(0))
        content = bytearray(self.stream[at:end])
        if self.spoils and content:
            self.spoils -= 1
            content[-1] ^= 1
        length = {"content-length": str(len(self.stream) - at)}
        # Before it goes out: whoever has it asks what was served.
        self.served.append((at, end))
        request.head(206 if at else 200, {**headers, **length})
        request.wfile.write(content)
        if end < len(self.stream):
            request.hang_up()

    def fetch(self, link: HttpLink, keep: Path | None = None, **more) -> dict[str, Tensor]:
        size = len(self.stream)
        expected = forms_of(self.tensors)
        stop = threading.Event()
        return download(link, self.digest, size, expected, stop, AT_ONCE, keep, **more)


@given(breaks=st.lists(st.integers(0, size_of(forms_of(SMALL))), max_size=6))
def test_a_model_arrives_whole_and_each_byte_once_wherever_links_break(breaks) -> None:
    cache = Shelf(SMALL, breaks)
    with serving(cache) as server, HttpLink(server.url) as link:
        assert same(cache.fetch(link), SMALL)
    assert sum(end - at for at, end in cache.served) == len(cache.stream)


def test_a_file_of_the_model_is_written_on_the_way(tmp_path) -> None:
    cache = Shelf(SMALL, [5, 60_000])
    done = []
    with serving(cache) as server, HttpLink(server.url) as link:
        cache.fetch(link, tmp_path / "model.safetensors", progress=done.append)
    assert (tmp_path / "model.safetensors").read_bytes() == cache.stream
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]
    assert done == sorted(done)
    assert done[-1] == len(cache.stream)


def test_a_model_arrives_through_a_proxy_that_knows_no_ranges() -> None:
    cache = Shelf(SMALL, [50_000], ranges=False)
    with serving(cache) as server, HttpLink(server.url) as link:
        assert same(cache.fetch(link), SMALL)
    assert len(cache.served) == 2


def test_what_arrives_damaged_is_asked_for_once_more() -> None:
    cache = Shelf(SMALL, spoils=1)
    with serving(cache) as server, HttpLink(server.url) as link:
        assert same(cache.fetch(link), SMALL)
    assert len(cache.served) == 2


def test_what_arrives_damaged_again_is_refused_and_the_file_stays_as_it_was(tmp_path) -> None:
    cache = Shelf(SMALL, spoils=2)
    (tmp_path / "model").write_text("the one before")
    with (
        serving(cache) as server,
        HttpLink(server.url) as link,
        pytest.raises(TransferError, match="its SHA-256 is"),
    ):
        cache.fetch(link, tmp_path / "model")
    assert (tmp_path / "model").read_text() == "the one before"
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def fetching(cache: Shelf, size: int | None = None, expected=None) -> Exception:
    with serving(cache) as server, HttpLink(server.url) as link:
        with pytest.raises((TransferError, RefusedError)) as told:
            download(
                link,
                cache.digest,
                size or len(cache.stream),
                expected,
                threading.Event(),
                AT_ONCE,
            )
        return told.value


def test_a_model_of_another_size_or_form_is_refused() -> None:
    assert "has 127128 bytes, not 100" in str(fetching(Shelf(SMALL), size=100))
    other = {**forms_of(SMALL), "layer 3": TensorSpec(torch.float64, (3,))}
    assert "layer 3" in str(fetching(Shelf(SMALL), expected=other))


def test_a_model_that_is_there_no_more_is_refused() -> None:
    with (
        serving(lambda request: request.reply(410, b'{"error": "gone"}')) as server,
        HttpLink(server.url) as link,
        pytest.raises(RefusedError, match="gone"),
    ):
        Shelf(SMALL).fetch(link)


def test_an_answer_that_goes_on_elsewhere_is_refused() -> None:
    def answer(request: Request) -> None:
        if "range" in request.headers:
            request.reply(206, b"", {"content-range": "bytes 3-7/8"})
        else:
            cache(request)

    cache = Shelf(SMALL, [1000])
    with serving(answer) as server, HttpLink(server.url) as link:
        with pytest.raises(TransferError, match="bytes from 1000 on"):
            cache.fetch(link)
        # The link is as good as before.
        assert same(cache.fetch(link), SMALL)


def test_who_stops_waits_for_no_model() -> None:
    cache = Shelf(LARGE)
    stop = threading.Event()
    with serving(cache) as server, HttpLink(server.url) as link, pytest.raises(StoppedError):
        download(
            link,
            cache.digest,
            len(cache.stream),
            None,
            stop,
            AT_ONCE,
            progress=lambda done: stop.set(),
        )


# Up


class Store:
    """Takes one update.

    breaks: after how many bytes of all that arrive in parts the link breaks, once each. most: bytes
    of a part; what is longer gets 413. part: what it says that it takes.
    """

    def __init__(self, breaks=(), most=1 << 40, part=4 * MIB) -> None:
        self.breaks = sorted(breaks)
        self.most = most
        self.part = part
        self.content = bytearray()
        self.size: int | None = None
        self.arrived = 0
        self.accepted = 0
        self.refused = 0
        self.answer_lost = 0
        """How many parts are taken without an answer."""

    def reserved(self) -> bytes:
        complete = len(self.content) == self.size
        return to_json(UploadState("7/a", len(self.content), self.part, complete))

    def __call__(self, request: Request) -> None:
        if request.command == "POST":
            said = from_json(request.body(), UploadRequest)
            self.size = said.bytes
            return request.reply(body=self.reserved())
        # The query says the same as the header, and is signed.
        offset = request.headers["upload-offset"]
        assert request.path == f"/v1/uploads/7%2Fa?offset={offset}"
        if request.length > self.most:
            self.refused += 1
            request.body()
            return request.reply(413, b"<html>Too large</html>")
        if self.breaks and self.breaks[0] < self.arrived + request.length:
            self.arrived += len(request.rfile.read(max(0, self.breaks.pop(0) - self.arrived)))
            return request.hang_up()
        return self.take(request)

    def take(self, request: Request) -> None:
        body = request.body()
        self.arrived += len(body)
        assert hashlib.sha256(body).hexdigest() == request.headers["dure-digest"]
        if int(request.headers["upload-offset"]) != len(self.content):
            return request.reply(409, self.reserved())
        self.content += body
        self.accepted += len(body)
        if self.answer_lost:
            self.answer_lost -= 1
            return request.hang_up()
        return request.reply(body=self.reserved())


def reserve(tensors: Mapping[str, Tensor]) -> UploadRequest:
    return UploadRequest(
        ticket=3,
        bytes=size_of(forms_of(tensors)),
        digest=digest_of(tensors),
        examples=1,
        samples=1,
        loss=0.5,
    )


def send(link: HttpLink, tensors: Mapping[str, Tensor], **more) -> bool:
    return upload(link, reserve(tensors), tensors, threading.Event(), AT_ONCE, **more)


def sent_to(answer: Callable[[Request], None], tensors: Mapping[str, Tensor], **more) -> bool:
    with serving(answer) as server, HttpLink(server.url) as link:
        return send(link, tensors, **more)


def stream_of(tensors: Mapping[str, Tensor]) -> bytes:
    return b"".join(pieces(tensors))


@given(
    breaks=st.lists(st.integers(0, size_of(forms_of(SMALL))), max_size=6),
    part=st.integers(3000, 200_000),
    lost=st.integers(0, 2),
)
def test_an_update_arrives_whole_and_is_taken_once_wherever_links_break(breaks, part, lost) -> None:
    store = Store(breaks, part=part)
    store.answer_lost = lost
    assert sent_to(store, SMALL)
    assert store.content == stream_of(SMALL)
    assert store.accepted == len(store.content)


@pytest.fixture
def sent_bytes(monkeypatch) -> list[int]:
    """Bytes that were handed to sockets, heads of requests included."""
    counted: list[int] = []
    send = http.client.HTTPConnection.send

    def noted(self: http.client.HTTPConnection, data: bytes) -> None:
        counted.append(len(data))
        send(self, data)

    monkeypatch.setattr(http.client.HTTPConnection, "send", noted)
    return counted


@pytest.mark.parametrize("seed", range(4))
def test_of_an_update_that_is_interrupted_five_times_little_is_sent_twice(
    seed: int, sent_bytes
) -> None:
    size = size_of(forms_of(LARGE))
    generator = torch.Generator().manual_seed(seed)
    # At the worst just before a part is whole.
    breaks = (torch.rand(5, generator=generator) * size).int().tolist()
    if seed == 0:
        first = size // 10
        breaks = [first - 1 + 9 * each for each in range(5)]
    store = Store(breaks)
    assert sent_to(store, LARGE)
    assert store.content == stream_of(LARGE)
    assert store.breaks == []
    assert store.accepted <= 1.02 * size
    assert sum(sent_bytes) <= 1.25 * size


def test_a_part_that_is_too_large_for_something_on_the_way_is_halved_from_then_on() -> None:
    store = Store(most=300_000)
    again = Store(most=300_000)
    with serving(store) as server, HttpLink(server.url) as link:
        assert send(link, LARGE)
        server.answer = again
        assert send(link, LARGE)
    assert store.content == again.content == stream_of(LARGE)
    assert store.refused == 3
    assert again.refused == 0


def test_a_part_that_is_too_large_however_small_is_refused() -> None:
    store = Store(most=LEAST_PART - 1)
    with pytest.raises(RefusedError) as told:
        sent_to(store, LARGE)
    assert told.value.status == 413


def test_an_upload_goes_on_where_the_server_says_that_it_is() -> None:
    store = Store(part=50_000)
    answers = []

    def answer(request: Request) -> None:
        store(request)
        # As if the server had been set back to an earlier state.
        if request.command == "PATCH" and not answers:
            answers.append(1)
            del store.content[20_000:]

    assert sent_to(answer, SMALL)
    assert store.content == stream_of(SMALL)


@pytest.mark.parametrize("status", [400, 404, 410, 422])
def test_a_server_that_does_not_take_a_part_is_asked_what_it_has(status: int) -> None:
    store = Store(part=50_000)
    refusals = [status, status]

    def answer(request: Request) -> None:
        if request.command == "PATCH" and len(store.content) == 50_000 and refusals:
            request.body()
            request.reply(refusals.pop(), b"{}")
        else:
            store(request)

    assert sent_to(answer, SMALL)
    assert store.content == stream_of(SMALL)


def test_a_server_may_correct_every_part_once() -> None:
    store = Store(part=20_000)
    corrected = set()

    def answer(request: Request) -> None:
        if request.command == "PATCH" and len(store.content) not in corrected:
            corrected.add(len(store.content))
            request.body()
            request.reply(409, store.reserved())
        else:
            store(request)

    assert sent_to(answer, SMALL)
    assert len(corrected) == 7
    assert store.content == stream_of(SMALL)


@pytest.mark.parametrize("status", [404, 409])
def test_a_server_that_contradicts_itself_is_not_asked_without_end(status: int) -> None:
    def answer(request: Request) -> None:
        request.body()
        body = to_json(UploadState("7", 0, MIB))
        request.reply(200 if request.command == "POST" else status, body)

    with pytest.raises(TransferError, match="does not arrive"):
        sent_to(answer, SMALL)


def test_a_server_that_has_all_and_never_says_so_is_not_asked_without_end() -> None:
    def answer(request: Request) -> None:
        request.body()
        request.reply(body=to_json(UploadState("7", size_of(forms_of(SMALL)), MIB)))

    with pytest.raises(TransferError, match="not stored them"):
        sent_to(answer, SMALL)


@pytest.mark.parametrize("reserved", [UploadState("7", -1, 9), UploadState("7", 1 << 50, 9)])
def test_a_server_that_has_what_cannot_be_is_refused(reserved: UploadState) -> None:
    def answer(request: Request) -> None:
        request.body()
        request.reply(body=to_json(reserved))

    with pytest.raises(TransferError, match="the server has"):
        sent_to(answer, SMALL)


def test_an_update_that_nobody_waits_for_is_refused() -> None:
    def answer(request: Request) -> None:
        request.body()
        request.reply(410, b'{"error": "the round is over"}')

    with pytest.raises(RefusedError, match="the round is over"):
        sent_to(answer, SMALL)


def test_a_busy_server_gets_the_update_later() -> None:
    store = Store(part=50_000)
    busy = [503, 500, 429]

    def answer(request: Request) -> None:
        if busy and (request.command == "PATCH" or len(busy) == 3):
            request.body()
            request.reply(busy.pop(), b"", {"retry-after": "0"})
        else:
            store(request)

    told: list[OSError] = []
    assert sent_to(answer, SMALL, tell=lambda error, _: told.append(error))
    assert [type(each) for each in told] == [BusyError] * 3
    assert store.content == stream_of(SMALL)


def test_an_update_that_is_not_wanted_any_more_ends_in_the_midst_of_a_part() -> None:
    store = Store()
    asked = []

    def wanted() -> bool:
        asked.append(1)
        return len(asked) < 3

    done: list[int] = []
    assert not sent_to(store, LARGE, wanted=wanted, progress=done.append)
    assert len(asked) == 3
    assert 0 < done[-1] < MIB
    assert store.content == b""


def test_who_stops_waits_for_no_upload() -> None:
    stop = threading.Event()
    with serving(Store()) as server, HttpLink(server.url) as link, pytest.raises(StoppedError):
        upload(
            link, reserve(LARGE), LARGE, stop, AT_ONCE, progress=lambda done: done and stop.set()
        )


def test_an_update_that_says_why_it_failed_has_no_tensors() -> None:
    failed = UploadRequest(3, 0, "", 1, 1, 0.5, failure="the loss is not finite")
    answered = to_json(UploadState("3", 0, MIB, complete=True))

    def answer(request: Request) -> None:
        request.body()
        request.reply(body=answered)

    with serving(answer) as server, HttpLink(server.url) as link:
        assert upload(link, failed, {}, threading.Event(), AT_ONCE)


def test_other_tensors_than_those_announced_are_refused_before_anything_is_said() -> None:
    with (
        serving(Store()) as server,
        HttpLink(server.url) as link,
        pytest.raises(ValueError, match="are reserved for"),
    ):
        upload(link, reserve(SMALL), LARGE, threading.Event(), AT_ONCE)
    assert server.requests == []


ODD = {
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "bits": torch.tensor([True, False, True]),
    "row": torch.arange(900, dtype=torch.float64)[::3].requires_grad_(),
}


@given(st.data())
def test_any_part_of_the_stream_is_what_lies_there(data) -> None:
    whole = stream_of(ODD)
    laid = _Laid(ODD)
    assert laid.size == len(whole)
    for _ in range(3):
        at = data.draw(st.integers(0, len(whole)))
        count = data.draw(st.integers(0, len(whole) - at))
        assert b"".join(laid.part(at, count)) == whole[at : at + count]


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(1, 40))
def test_small_views_are_sent_together_and_large_ones_in_pieces(views, most) -> None:
    joined = [bytes(each) for each in _joined(map(memoryview, views), most)]
    assert b"".join(joined) == b"".join(views)
    assert all(0 < len(each) <= most for each in joined)
    # No two neighbours would have fitted into one.
    assert all(len(a) + len(b) > most for a, b in pairwise(joined))


def test_an_update_is_sent_from_the_memory_of_its_tensors() -> None:
    tensors = {"a": torch.zeros(1 << 16)}
    parts = list(_Laid(tensors).part(0, size_of(forms_of(tensors))))
    tensors["a"][7] = 1.0
    assert any(parts[-1])


class Clockless(threading.Event):
    """Waits no time, and notes how long it was to."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return False


def slowly_up(link: HttpLink, stop: threading.Event) -> None:
    upload(link, reserve(SMALL), SMALL, stop, AT_ONCE, bytes_per_second=1000.0)


def slowly_down(link: HttpLink, stop: threading.Event) -> None:
    size = size_of(forms_of(SMALL))
    download(link, digest_of(SMALL), size, None, stop, AT_ONCE, bytes_per_second=1000.0)


@pytest.mark.parametrize(
    ("transfer", "answer"), [(slowly_up, Store()), (slowly_down, Shelf(SMALL))]
)
def test_a_site_that_allows_so_many_bytes_a_second_uses_no_more(transfer, answer) -> None:
    stop = Clockless()
    with serving(answer) as server, HttpLink(server.url) as link:
        transfer(link, stop)
    seconds = size_of(forms_of(SMALL)) / 1000.0
    # What was waited for at the end, by a clock on which next to no time had passed.
    assert seconds - 60 < max(stop.waits) <= seconds
    assert len(stop.waits) >= seconds


def test_progress_is_told_in_bytes_of_the_stream() -> None:
    done: list[int] = []
    assert sent_to(Store([MIB + 5]), LARGE, progress=done.append)
    assert done[-1] == size_of(forms_of(LARGE))

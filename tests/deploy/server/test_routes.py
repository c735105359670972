"""Which handler answers, and what a call that waits takes."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dure.deploy.server.routes import Routes


async def which(request: Request) -> Response:
    return Response(f"{request.method} {request.path_params.get('digest')}")


async def nobody(request: Request) -> Response:
    return Response("nobody", 404)


ROUTES = [
    Route("/v1/uploads", which, methods=["POST"]),
    Route("/v1/tensors/{digest}", which, methods=["GET"]),
    Route("/v1/tensors/{digest}", which, methods=["PATCH"]),
    Route("/{anything:path}", nobody, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
]


def scope_of(method: str, path: str) -> dict[str, Any]:
    about = {"type": "http", "method": method, "path": path, "root_path": "", "query_string": b""}
    return {**about, "headers": []}


def answered(method: str, path: str) -> tuple[int, dict[str, str], str]:
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(Routes(ROUTES)(scope_of(method, path), receive, send))
    headers = {name.decode(): value.decode() for name, value in said[0]["headers"]}
    return said[0]["status"], headers, said[1]["body"].decode()


def test_the_route_whose_path_and_method_fit_answers_and_knows_what_the_path_says() -> None:
    assert answered("GET", "/v1/tensors/ab")[::2] == (200, "GET ab")
    assert answered("PATCH", "/v1/tensors/cd")[::2] == (200, "PATCH cd")
    assert answered("POST", "/v1/uploads")[::2] == (200, "POST None")


@pytest.mark.parametrize("path", ["/", "/v1/tensors", "/v1/tensors/", "/v1/tensors/a/b", "/v1/x"])
def test_a_path_that_nobody_has_comes_to_the_last(path: str) -> None:
    assert answered("GET", path)[::2] == (404, "nobody")


def test_so_does_a_method_that_a_path_has_not() -> None:
    assert answered("POST", "/v1/tensors/ab")[::2] == (404, "nobody")


def bytes_of_a_call(make: Any) -> float:
    """Of an application whose calls all wait."""
    calls = 200

    async def wait() -> float:
        until: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def waits(request: Request) -> Response:
            await until
            return Response()

        app = make([Route("/v1/next", waits, methods=["POST"])])

        async def nothing(*message: Any) -> Any:
            pass

        before = tracemalloc.get_traced_memory()[0]
        tasks = [
            asyncio.create_task(app(scope_of("POST", "/v1/next"), nothing, nothing))
            for _ in range(calls)
        ]
        await asyncio.sleep(0.01)
        taken = tracemalloc.get_traced_memory()[0] - before
        until.set_result(None)
        await asyncio.gather(*tasks)
        return taken / calls

    tracemalloc.start()
    try:
        return asyncio.run(wait())
    finally:
        tracemalloc.stop()


def test_a_call_that_waits_takes_less_than_half_of_what_it_takes_in_starlette() -> None:
    ours, theirs = bytes_of_a_call(Routes), bytes_of_a_call(lambda routes: Starlette(routes=routes))
    assert ours < theirs / 2

"""Chromium for a test, driven over its debugging pipe with nothing but the standard library.

Commands go in on file descriptor 3 and answers come out on 4, as JSON objects that end with a zero
byte. The process and all its children are ended with the `with` block, whatever happens in it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]  # fmt: skip


class Page:
    """One tab: what it logged, what it asked the network for, and what it answers."""

    def __init__(self, commands: int, answers: int, seconds: float) -> None:
        self._commands, self._answers = commands, answers
        self._deadline = time.monotonic() + seconds
        self._buffer = b""
        self._ids = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []

    def open(
        self,
        path: Path | str,
        width: int = 1280,
        height: int = 900,
        phone: bool = False,
        dark: bool = False,
    ) -> None:
        """Show a file, or what is at an address, in a window of this size, and wait until its
        charts are drawn or it reports an error."""
        if self._session is None:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.problems, self.requests = [], []
        url = path if isinstance(path, str) else path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        self.until("document.readyState == 'complete' && document.body?.dataset.chartsDrawn")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true, or the page reports an error."""
        while not self.ask(expression) and not self.problems:
            time.sleep(0.05)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """What is seen of the whole page, as a PNG."""
        seen = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(seen))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._ids += 1
        message = {"id": self._ids, "method": method, "params": params}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (event := self._next()).get("id") != self._ids:
            self._note(event)
        if "error" in event:
            raise AssertionError(f"{method}: {event['error']}")
        return dict(event["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError("the browser did not answer in time")
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                raise ConnectionError("the browser has gone")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(str(params["args"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.problems.append(str(params["entry"]))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(str(params["request"]["url"]))


@contextlib.contextmanager
def chromium(seconds: float = 120) -> Iterator[Page]:
    """A browser that is gone when the block ends; all calls together have `seconds`."""
    assert PROGRAM is not None, "chromium is not installed"
    profile = tempfile.mkdtemp(prefix="chromium-")
    (command_out, command_in), (answer_out, answer_in) = os.pipe(), os.pipe()
    # High numbers, so that putting one pipe at 3 cannot close another that lies there.
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (command_out, answer_in)]
    null = [(os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_WRONLY, 0) for output in (1, 2)]
    pipes = [(os.POSIX_SPAWN_DUP2, end, place) for place, end in zip((3, 4), theirs, strict=True)]
    arguments = [PROGRAM, *FLAGS, f"--user-data-dir={profile}"]
    process = os.posix_spawn(
        PROGRAM, arguments, os.environ, file_actions=[*null, *pipes], setpgroup=0
    )
    for end in (command_out, answer_in, *theirs):
        os.close(end)
    try:
        yield Page(command_in, answer_out, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(command_in)
        os.close(answer_out)
        shutil.rmtree(profile, ignore_errors=True)

"""A client without torch: dure's protocol by http.client and raw bytes, 20 MB of memory.

It sends back what it got, and hashes no more than the protocol asks for. For benchmarks with many
clients on one machine; `idle.py` uses its requests.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import ssl
import time
import urllib.parse
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VERSION = 2
"""Of the protocol that it speaks."""

PIECE = 1 << 18


class Signer:
    """Signs requests as dure.wire.signatures says."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.public = self.key.public_key().public_bytes_raw().hex()
        self.nonce = ""
        self.serial = 0

    def headers(self, method: str, path: str, digest: str) -> dict[str, str]:
        lines = ["dure request 1", method, path, digest, self.nonce, str(self.serial)]
        signature = self.key.sign("\n".join(lines).encode())
        serial = self.serial
        self.serial += 1
        return {
            "dure-client": self.public,
            "dure-nonce": self.nonce,
            "dure-serial": str(serial),
            "dure-digest": digest,
            "dure-signature": signature.hex(),
        }

    def renew(self, nonce: str) -> None:
        self.nonce, self.serial = nonce, 0


class Light:
    """One client, on one connection."""

    def __init__(self, url: str, tls: Path, name: str) -> None:
        said = urllib.parse.urlsplit(url)
        context = ssl.create_default_context(cafile=tls / "authority.pem")
        self.connection = http.client.HTTPSConnection(
            said.hostname or "", said.port, timeout=120, context=context
        )
        self.signer = Signer()
        self.name = name

    def request(
        self, method: str, path: str, body: bytes | memoryview = b"", headers: Any = ()
    ) -> http.client.HTTPResponse:
        digest = hashlib.sha256(body).hexdigest()
        for _ in range(2):
            signed = self.signer.headers(method, path, digest)
            self.connection.request(method, path, body or None, {**dict(headers), **signed})
            response = self.connection.getresponse()
            nonce = response.headers.get("dure-nonce")
            if response.status != 401 or nonce is None:
                return response
            response.read()
            self.signer.renew(nonce)
        return response

    def ask(self, path: str, said: dict[str, Any]) -> dict[str, Any]:
        return self.understood(self.request("POST", path, json.dumps(said).encode()))

    def understood(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        body = response.read()
        if not 200 <= response.status < 300:
            raise RuntimeError(f"{response.status} {body[:300]!r}")
        found: dict[str, Any] = json.loads(body) if body else {}
        return found

    def check_in(self) -> dict[str, Any]:
        return self.ask("/v1/check-in", {"version": VERSION, "name": self.name, "examples": 10})

    def fetch(self, digest: str, size: int) -> bytearray:
        response = self.request("GET", f"/v1/tensors/{digest}")
        if response.status != 200:
            raise RuntimeError(f"{response.status} {response.read()[:300]!r}")
        stream = memoryview(bytearray(size))
        hashed = hashlib.sha256()
        at = 0
        while count := response.readinto(stream[at : at + PIECE]):
            hashed.update(stream[at : at + count])
            at += count
        response.read()
        assert (at, hashed.hexdigest()) == (size, digest)
        return stream.obj  # type: ignore[return-value]

    def send(self, train: dict[str, Any], stream: bytearray) -> None:
        reserve = {
            "ticket": train["ticket"],
            "bytes": len(stream),
            "digest": train["tensors"],
            "examples": 10,
            "samples": 10,
            "loss": 1.0,
        }
        reserved = self.ask("/v1/uploads", reserve)
        while not reserved.get("complete"):
            at = reserved["offset"]
            part = memoryview(stream)[at : at + reserved["part"]]
            path = f"/v1/uploads/{reserved['upload']}?offset={at}"
            headers = {"upload-offset": str(at), "content-length": str(len(part))}
            reserved = self.understood(self.request("PATCH", path, part, headers))

    def run(self) -> None:
        """Until the run is over."""
        confirmed: list[int] = []
        while True:
            word = self.ask("/v1/next", {"confirmed": confirmed})
            confirmed = [one["ticket"] for one in word.get("outcomes", ())]
            if "over" in word:
                return
            if "train" in word:
                train = word["train"]
                self.send(train, self.fetch(train["tensors"], train["bytes"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--tls", type=Path, required=True)
    parser.add_argument("--name", required=True)
    asked = parser.parse_args()
    light = Light(asked.url, asked.tls, asked.name)
    while True:
        try:
            light.check_in()
            break
        # The server is not up yet.
        except (OSError, RuntimeError):
            light.connection.close()
            time.sleep(0.1)
    light.run()


if __name__ == "__main__":
    main()

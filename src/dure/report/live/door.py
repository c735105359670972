"""Who may see a page: whoever has its token, which never is in an address.

The token is typed into a form, which sends it in the body of a POST. The browser gets a cookie in
its place that scripts cannot read and no other site can send (HttpOnly, SameSite=Strict):

    cookie = HMAC-SHA256(token, "the live page of dure")

So the cookie does not tell the token, opens nothing but the page, and is good until the token is
another one. A program sends `Authorization: Bearer TOKEN`. Nothing of it is in a URL, and so in no
history, no log and no Referer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs

from dure.contracts.page import Answer

_PURPOSE = b"the live page of dure"
_SIGNS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Letters and digits that nobody takes for one another; 32, so each is five bits."""


def new_code() -> str:
    """A token of 100 random bits that can be typed: five groups of four."""
    groups = ("".join(secrets.choice(_SIGNS) for _ in range(4)) for _ in range(5))
    return "-".join(groups)


class Door:
    """secure: the page comes by TLS, and the cookie goes no other way."""

    def __init__(self, token: str, secure: bool) -> None:
        self._token = token.encode()
        self._session = hmac.new(self._token, _PURPOSE, hashlib.sha256).hexdigest()
        # Cookies of all ports of a machine go together: each page has one of its own.
        self._name = f"dure_{hashlib.sha256(self._session.encode()).hexdigest()[:12]}"
        self._secure = secure

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether a request may see the page."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is(token.strip(), self._token):
            return True
        pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
        session = self._session.encode()
        return any(name == self._name and self._is(value, session) for name, _, value in pairs)

    def enter(self, body: bytes) -> Answer | None:
        """The answer to a form with the token; None where it is another one."""
        try:
            fields = parse_qs(body.decode(errors="replace"), max_num_fields=4)
        except ValueError:  # more fields than the form has
            return None
        given = fields.get("token", [""])[0]
        if not self._is(given.strip(), self._token):
            return None
        secure = "; Secure" if self._secure else ""
        cookie = f"{self._name}={self._session}; HttpOnly; SameSite=Strict; Path=/{secure}"
        return Answer(303, {"location": "./", "set-cookie": cookie})

    @staticmethod
    def _is(given: str, right: bytes) -> bool:
        return secrets.compare_digest(given.encode(errors="replace"), right)

"""Authentication of the live page: a token grants access, and is never in an address.

The user types the token into a form, which sends it in the body of a POST. The browser gets a
cookie in exchange that scripts cannot read and no other site can send (HttpOnly, SameSite=Strict):

    cookie = HMAC-SHA256(token, "the live page of dure")

The cookie does not reveal the token, opens nothing but the page, and is valid until the token
changes. A program sends `Authorization: Bearer TOKEN`. No URL contains the token or the cookie, so
neither does any history, log or Referer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs

from dure.contracts.page import PageResponse

_PURPOSE = b"the live page of dure"
_SIGNS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Letters and digits that are hard to confuse; 32 of them, so each is five bits."""


def new_code() -> str:
    """Return a token of 100 random bits that can be typed: five groups of four characters."""
    groups = ("".join(secrets.choice(_SIGNS) for _ in range(4)) for _ in range(5))
    return "-".join(groups)


class TokenLogin:
    """Checks the token of requests. secure: the page uses TLS, and so must the cookie."""

    def __init__(self, token: str, secure: bool) -> None:
        self._token = token.encode()
        self._session = hmac.new(self._token, _PURPOSE, hashlib.sha256).hexdigest()
        # Browsers share cookies between all ports of a host, so each page has its own cookie name.
        self._name = f"dure_{hashlib.sha256(self._session.encode()).hexdigest()[:12]}"
        self._secure = secure

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request may see the page."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is(token.strip(), self._token):
            return True
        pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
        session = self._session.encode()
        return any(name == self._name and self._is(value, session) for name, _, value in pairs)

    def enter(self, body: bytes) -> PageResponse | None:
        """Return the response to a form with the token; None for a wrong token."""
        try:
            fields = parse_qs(body.decode(errors="replace"), max_num_fields=4)
        except ValueError:  # more fields than the form has
            return None
        given = fields.get("token", [""])[0]
        if not self._is(given.strip(), self._token):
            return None
        secure = "; Secure" if self._secure else ""
        cookie = f"{self._name}={self._session}; HttpOnly; SameSite=Strict; Path=/{secure}"
        return PageResponse(303, {"location": "./", "set-cookie": cookie})

    @staticmethod
    def _is(given: str, right: bytes) -> bool:
        return secrets.compare_digest(given.encode(errors="replace"), right)

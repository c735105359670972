"""`dure certificates`: a private authority and its certificates, in a single folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dure.cli.flags import names_before_flags, parse_flags
from dure.errors import suggestion

if TYPE_CHECKING:
    from dure.wire.certificates import CertificateFiles

USAGE = """\
dure certificates init                 create an authority, which signs the certificates below
dure certificates server [HOST ...]    for a server, with the names and addresses that clients use
dure certificates client NAME          for a client, if the server requires one

A server needs server.pem (and server.key beside it); clients need authority.pem.
Every command takes --help.
"""


@dataclass(frozen=True)
class CertificateOptions:
    """Folder and lifetime of certificates.

    Args:
        folder: folder of the authority and of the certificates that it signs.
        days: days of validity; by default ten years for an authority, 825 days for others.
    """

    folder: Path = Path("certificates")
    days: float | None = None


def main(given: list[str]) -> int:
    """Run the command, and return the exit status. Raises ValueError for invalid arguments."""
    if not given or given[0] in ("--help", "-h"):
        print(USAGE, end="")
        return 0
    what, *rest = given
    known = ("init", "server", "client")
    if what not in known:
        raise ValueError(f"dure certificates has no command {what!r}{suggestion(what, known)}")
    names, flags = names_before_flags(rest)
    operands = {"init": "", "server": " [HOST ...]", "client": " NAME"}[what]
    prog = f"dure certificates {what}{operands}"
    how: CertificateOptions = parse_flags(
        prog, {"how": CertificateOptions}, flags, "Make certificates."
    )["how"]
    if what == "init":
        return _init(names, how)
    return _server(names, how) if what == "server" else _client(names, how)


def _init(names: list[str], how: CertificateOptions) -> int:
    from dure.wire.certificates import AUTHORITY_DAYS, make_authority

    if names:
        raise ValueError(
            "dure certificates init takes no names: one authority signs all certificates"
        )
    made = make_authority(how.folder, days=AUTHORITY_DAYS if how.days is None else how.days)
    _say(made)
    print(f"give clients {made.certificate}; keep {made.key} private")
    return 0


def _server(hosts: list[str], how: CertificateOptions) -> int:
    from dure.wire.certificates import ALWAYS, CERTIFICATE_DAYS, issue_server

    days = CERTIFICATE_DAYS if how.days is None else how.days
    made = issue_server(how.folder, hosts, days)
    _say(made)
    print(f"for {', '.join(dict.fromkeys([*hosts, *ALWAYS]))}")
    return 0


def _client(names: list[str], how: CertificateOptions) -> int:
    from dure.wire.certificates import CERTIFICATE_DAYS, issue_client

    if len(names) != 1:
        raise ValueError("dure certificates client NAME: name one client")
    days = CERTIFICATE_DAYS if how.days is None else how.days
    _say(issue_client(how.folder, names[0], days))
    return 0


def _say(made: CertificateFiles) -> None:
    from dure.wire.certificates import expires

    print(f"{made.certificate} and {made.key}, valid until {expires(made.certificate):%Y-%m-%d}")

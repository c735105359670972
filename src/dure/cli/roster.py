"""`dure roster`: the public keys of a federation's clients, signed by its owner, offline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure.cli.flags import names_before_flags, parse_flags
from dure.errors import suggestion

USAGE = """\
dure roster key --state DIR      print the public key of a site, even before it has joined
dure roster owner KEY            create the key of a federation's owner, a file to keep secret
dure roster sign LIST --key KEY  sign, as owner, a list of clients, lines NUMBER NAME PUBLICKEY
dure roster show ROSTER          check a signed roster, and print it

Give the roster to the server (dure serve --roster), and the owner's public key or its fingerprint
to the sites (dure join --owner), not through the server.
Every command takes --help.
"""


@dataclass(frozen=True)
class KeyOptions:
    """Folder of the key.

    Args:
        state: the folder of a client, as for dure join; created if it is missing.
    """

    state: Path


@dataclass(frozen=True)
class SignOptions:
    """Options of a signature.

    Args:
        key: the owner's private key, as dure roster owner makes it.
        federation: the owner's name for the federation of the roster.
        days: days for which the roster is valid.
        out: the file to write.
    """

    key: Path
    federation: str
    days: float = 365.0
    out: Path = Path("roster.json")


@dataclass(frozen=True)
class ShowRosterOptions:
    """Options of the check.

    Args:
        owner: public key or fingerprint of the required signer; by default any signer.
    """

    owner: str = ""


@dataclass(frozen=True)
class NoRosterOptions:
    """Options of a command without options."""


def main(given: list[str]) -> int:
    """Run the command, and return the exit status. Raises ValueError for invalid arguments."""
    if not given or given[0] in ("--help", "-h"):
        print(USAGE, end="")
        return 0
    what, *rest = given
    if what not in _COMMANDS:
        raise ValueError(f"dure roster has no command {what!r}{suggestion(what, _COMMANDS)}")
    command = _COMMANDS[what]
    names, flags = names_before_flags(rest)
    prog = f"dure roster {what} {command.operands}".rstrip()
    how = parse_flags(prog, {"how": command.options}, flags, command.description)["how"]
    if len(names) != len(command.operands.split()):
        operands = f"{command.operands} and " if command.operands else ""
        raise ValueError(f"{prog}: give {operands}nothing else before the options")
    command.run(names, how)
    return 0


def _key(names: list[str], how: KeyOptions) -> None:
    from dure.deploy.client.state import own_key

    _print_key(own_key(how.state).public)


def _owner(names: list[str], how: NoRosterOptions) -> None:
    from dure.wire.signatures import Key

    path = Path(names[0])
    made = not path.exists()
    _print_key(Key.load_or_create(path).public)
    if made:
        print(f"{path} is the owner's private key: do not store it on the server", file=sys.stderr)


def _sign(names: list[str], how: SignOptions) -> None:
    from dure.record.disk import write_atomically
    from dure.wire.owners_roster import OwnersRoster, read_members
    from dure.wire.signatures import Key

    if not how.key.exists():
        raise ValueError(f"there is no key {how.key}: dure roster owner makes one")
    members = read_members(Path(names[0]))
    roster = OwnersRoster.signed(how.federation, members, Key.load_or_create(how.key), how.days)
    write_atomically(how.out, roster.to_json())
    print(how.out)
    print(f"roster {roster}", file=sys.stderr)


def _show(names: list[str], how: ShowRosterOptions) -> None:
    from dure.wire.members import fingerprint, parse_key
    from dure.wire.owners_roster import OwnersRoster, check_date, check_owner

    roster = OwnersRoster.read(Path(names[0]))
    if how.owner:
        check_owner(roster, parse_key(how.owner))
    check_date(roster)
    print(f"roster {roster}")
    for member in roster.members:
        print(f"{member.number:>6}  {fingerprint(member.identity)}  {member.name}")


def _print_key(public: str) -> None:
    """Print the key, for copying, on standard output and its fingerprint on standard error."""
    from dure.wire.members import fingerprint

    print(public)
    print(f"fingerprint, to compare by voice: {fingerprint(public)}", file=sys.stderr)


@dataclass(frozen=True)
class _Command:
    run: Callable[[list[str], Any], None]
    operands: str
    options: type[Any]
    description: str


_COMMANDS = {
    "key": _Command(_key, "", KeyOptions, "Print a site's public key."),
    "owner": _Command(
        _owner, "KEY", NoRosterOptions, "Make an owner's key, or print its public key."
    ),
    "sign": _Command(_sign, "LIST", SignOptions, "Sign a list of clients."),
    "show": _Command(_show, "ROSTER", ShowRosterOptions, "Check a roster, and print it."),
}

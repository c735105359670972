"""`dure clients`: the register of clients of a run. Its server may be running meanwhile."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.cli.flags import names_before_flags, parse_flags
from dure.errors import suggestion

if TYPE_CHECKING:
    from dure.deploy.server.register import Register

USAGE = """\
dure clients invite RUN          print a token with which one client can enrol, once
dure clients list RUN            list the enrolled clients and the number of open invitations
dure clients revoke RUN CLIENT   make its key invalid; its number stays taken
dure clients forget RUN CLIENT   the same, and delete its record
dure clients withdraw RUN        make all open invitations invalid

RUN is the folder of a run that is served; CLIENT is a number or a name.
Every command takes --help.
"""

DAY = 86400.0


@dataclass(frozen=True)
class InviteOptions:
    """Options of an invitation.

    Args:
        name: name of the client; by default the name that it reports itself.
        number: number of the client in the run, from 0 on; by default the next free number.
        days: days for which the token is valid.
        count: number of tokens, each for another client.
    """

    name: str | None = None
    number: int | None = None
    days: float = 7.0
    count: int = 1


@dataclass(frozen=True)
class ListClientsOptions:
    """Options of the list of clients.

    Args:
        json: print the clients as JSON.
    """

    json: bool = False


@dataclass(frozen=True)
class NoClientsOptions:
    """Options of a command without options."""


def main(given: list[str]) -> int:
    """Run the command, and return the exit status. Raises ValueError for invalid arguments."""
    if not given or given[0] in ("--help", "-h"):
        print(USAGE, end="")
        return 0
    what, *rest = given
    if what not in _COMMANDS:
        raise ValueError(f"dure clients has no command {what!r}{suggestion(what, _COMMANDS)}")
    command = _COMMANDS[what]
    names, flags = names_before_flags(rest)
    prog = f"dure clients {what} {command.operands}"
    how = parse_flags(prog, {"how": command.options}, flags, command.description)["how"]
    if len(names) != len(command.operands.split()):
        raise ValueError(f"{prog}: give {command.operands} and nothing else before the options")
    from dure.deploy.server.register import FILE, Register

    with Register(Path(names[0]) / FILE) as register:
        command.run(register, names[1:], how)
    return 0


def _invite(register: Register, names: list[str], how: InviteOptions) -> None:
    if how.count < 1:
        raise ValueError(f"--count is {how.count}, but it has to be 1 or more")
    if how.count > 1 and (how.name is not None or how.number is not None):
        raise ValueError("a name or a number belongs to one client: leave --count out")
    for _ in range(how.count):
        print(register.invite(how.name, how.number, how.days * DAY))
    print(
        f"each token can be used once, within {how.days:g} days, and is not shown again: use it "
        "with dure join --token-file",
        file=sys.stderr,
    )


def _list(register: Register, names: list[str], how: ListClientsOptions) -> None:
    clients = register.clients()
    open_invitations = register.invitations()
    if how.json:
        said = {
            "places": register.places,
            "clients": [client._asdict() for client in clients],
            "invitations": [invitation._asdict() for invitation in open_invitations],
        }
        print(json.dumps(said))
        return
    rows = [("number", "name", "state", "since", "key")]
    for client in clients:
        since = "" if client.enrolled is None else _day(client.enrolled)
        # A prefix of the key that distinguishes it from others.
        key = (client.key or "")[:16]
        rows.append((str(client.number), client.name or "", client.state, since, key))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    free = register.places - len(clients)
    print(
        f"{free} of {register.places} client ids are free, {len(open_invitations)} invitations "
        "are open"
    )


def _revoke(register: Register, names: list[str], how: NoClientsOptions) -> None:
    client = register.revoke(names[0])
    print(f"client {client.number} ({client.name}) is revoked")


def _forget(register: Register, names: list[str], how: NoClientsOptions) -> None:
    print(f"client {register.forget(names[0]).number} is forgotten")


def _withdraw(register: Register, names: list[str], how: NoClientsOptions) -> None:
    print(f"{register.withdraw()} open invitations are withdrawn")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


@dataclass(frozen=True)
class _Command:
    run: Callable[[Register, list[str], Any], None]
    operands: str
    options: type[Any]
    description: str


_COMMANDS = {
    "invite": _Command(_invite, "RUN", InviteOptions, "Print tokens with which clients enrol."),
    "list": _Command(_list, "RUN", ListClientsOptions, "List the enrolled clients."),
    "revoke": _Command(
        _revoke, "RUN CLIENT", NoClientsOptions, "Revoke a client: it cannot connect any more."
    ),
    "forget": _Command(_forget, "RUN CLIENT", NoClientsOptions, "Delete a client's record."),
    "withdraw": _Command(_withdraw, "RUN", NoClientsOptions, "Withdraw all open invitations."),
}

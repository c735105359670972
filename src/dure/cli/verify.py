"""`dure verify MODEL`: check the server's signature of a model, and print its lineage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dure.cli.flags import names_before_flags, parse_flags
from dure.errors import LineageError
from dure.peer_text import printable

USAGE = "dure verify RUN|MODEL"


@dataclass(frozen=True)
class VerifyOptions:
    """Option for the signer.

    Args:
        key: public key of the required signer, a server; by default any signer.
    """

    key: str | None = None


def main(given: list[str]) -> int:
    """Print the lineage of a model. Raises LineageError if the signature does not match."""
    names, flags = names_before_flags(given)
    if len(names) != 1:
        raise ValueError(f"{USAGE}: name a run folder or a file of weights")
    about = "Check a model against the lineage that its server has signed."
    how: VerifyOptions = parse_flags(USAGE, {"how": VerifyOptions}, flags, about)["how"]
    from dure.run.lineage import verify

    found = verify(names[0], how.key)
    try:
        lines = in_words(found.lineage)
    # Any owner of a key can sign any content.
    except (KeyError, AttributeError, TypeError) as error:
        raise LineageError(
            f"the content that {found.key} has signed is not the lineage of a model"
        ) from error
    print(f"unchanged since it was signed by {found.key}")
    for line in lines:
        print(printable(line))
    if found.compared:
        print(f"also unchanged: {', '.join(found.compared)}")
    else:
        print("config.json was not compared: name the run folder for that")
    if how.key is None:
        print(
            "the signer was not checked: give with --key the public key that you received from "
            "the server's owner"
        )
    return 0


def in_words(lineage: dict[str, Any]) -> list[str]:
    """Return the content of a lineage as lines."""
    task = lineage.get("task", {})
    clients = lineage.get("clients", {})
    numbers = clients.get("numbers", [])
    shown = ", ".join(map(str, numbers[:20])) + (", …" if len(numbers) > 20 else "")
    versions = ", ".join(f"{name} {version}" for name, version in lineage["versions"].items())
    return [
        f"task:    {task.get('title') or task.get('name')}",
        f"system:  {lineage['system'].get('name')}, seed {lineage['seed']}",
        f"run:     {lineage['run']}, {lineage['rounds']} rounds, made {lineage['made']}",
        f"clients: {clients.get('gave_updates')} sent {clients.get('updates')} updates ({shown})",
        f"with:    {versions}",
        f"config:  SHA-256 {lineage['config_sha256']}",
    ]

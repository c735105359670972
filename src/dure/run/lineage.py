"""Signed lineage of a model: the origin of a model that a server on a network has trained.

    model.safetensors     the lineage in its metadata, so that it travels with the weights
    model.lineage.json    the lineage, the SHA-256 of that whole file, a public key, a signature
    signing.key           the private key, made once, which stays with the server

The signature (Ed25519, RFC 8032) covers the line `dure lineage 1` and the canonical JSON of
lineage, digest and key. A valid signature shows that the owner of the key made this file and this
lineage; the owner's identity has to be known from elsewhere. The lineage lists clients by number,
which discloses nothing about them, and not by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.deploy.server.model_digests import FILE as MODELS
from dure.errors import LineageError, RunFolderError
from dure.record.run_files import read_json
from dure.record.seal import sha256_of
from dure.record.settings import canonical_json, config_digest
from dure.record.untrusted_files import contents

if TYPE_CHECKING:
    from dure.protocol.server_context import SigningKey

METADATA = "dure_lineage"
"""Key of the lineage in the metadata of model.safetensors."""


def lineage_of(config: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lineage of a model. config, summary: content of the run folder's JSON files."""
    facts: Mapping[str, Any] = next(iter(summary.get("facts", ())), {})
    turns = facts.get("turns", [])
    return {
        "task": config.get("task", {}),
        "run": config.get("run", ""),
        "system": config.get("strategy", {}),
        "seed": config.get("seed"),
        "rounds": summary["steps"],
        "clients": {
            "gave_updates": len(turns),
            "numbers": [client for client, _ in turns],
            "updates": sum(number for _, number in turns),
        },
        "bits": facts.get("bits"),
        **({"models_sha256": facts["models_sha256"]} if "models_sha256" in facts else {}),
        "versions": config.get("versions", {}),
        "config_sha256": config_digest(config),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def signed(lineage: Mapping[str, Any], model: str, sign: SigningKey) -> dict[str, Any]:
    """Return the content of model.lineage.json. model: SHA-256 of the file of weights."""
    said = {"lineage": lineage, "model_sha256": model, "key": sign.public}
    # Through JSON once, as readers get it: a tuple, for example, becomes a list.
    said = json.loads(canonical_json(said))
    return {**said, "signature": sign.sign(_message(said)).hex()}


class VerifiedLineage(NamedTuple):
    """A lineage with a valid signature.

    lineage: the signed content. key: public key of the signer. compared: names of the run's other
    files that match the lineage.
    """

    lineage: dict[str, Any]
    key: str
    compared: tuple[str, ...] = ()


def verify(model: str | Path, key: str | None = None) -> VerifiedLineage:
    """Verify a model against the lineage file beside it.

    model: the file of weights, or a run folder, whose config.json, models.jsonl and summary.json
    are compared too. key: public key of the expected signer; None accepts any signer.

    Raises LineageError if a file differs from the signed one, and ImportError without the libraries
    of the extra `deploy`.
    """
    from dure.wire.signatures import is_signed

    folder = Path(model)
    whole = folder.is_dir()
    path = folder / "model.safetensors" if whole else folder
    beside = path.with_name(f"{path.stem}.lineage.json")
    try:
        found = sha256_of(path)
        said = json.loads(contents(beside))
        signature = bytes.fromhex(said.pop("signature"))
        lineage = said["lineage"]
        digest = said["model_sha256"]
        public = said["key"]
        true = is_signed(public, _message(said), signature)
    except OSError as error:
        raise LineageError(f"cannot read {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LineageError(f"{beside} is not a signed lineage") from error
    if not true:
        raise LineageError(f"{beside} was changed after it was signed")
    if found != digest:
        raise LineageError(f"{path} is not the signed model")
    if key is not None and public != key.lower():
        raise LineageError(f"{path} was signed by {public}, not by {key}")
    return VerifiedLineage(lineage, public, _compared(folder, lineage) if whole else ())


def _compared(folder: Path, lineage: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the run's files that match the lineage. Raises LineageError otherwise."""
    # A signed file that is no lineage of a run says nothing about the run's files.
    if not isinstance(lineage, Mapping) or "config_sha256" not in lineage:
        return ()
    try:
        config = read_json(folder / "config.json")
        summary = read_json(folder / "summary.json")
    except RunFolderError as error:
        raise LineageError(f"{error}, and its signed content cannot be checked") from error
    found = {"config.json": config_digest(config) == lineage.get("config_sha256")}
    found["summary.json"] = summary.get("lineage") == lineage
    if "models_sha256" in lineage:
        found[MODELS] = _sha256_of(folder / MODELS) == lineage["models_sha256"]
    for name, same in found.items():
        if not same:
            raise LineageError(
                f"{folder / name} differs from the signed version: restore it from a copy, and do "
                "not trust its content"
            )
    return tuple(found)


def _sha256_of(file: Path) -> str:
    try:
        return sha256_of(file)
    except OSError as error:
        raise LineageError(f"cannot read the signed file {file}: {error.strerror}") from error


def _message(said: Mapping[str, Any]) -> bytes:
    return b"dure lineage 1\n" + canonical_json(said)

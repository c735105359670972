"""The table of docs/privacy.md: every field of every message by which something leaves a site.

The rows follow from the types of the messages, so that no field can be forgotten: the test of the
page fails until this file describes the content of a new field.

    python tests/leaving.py      writes the table into the page
"""

from __future__ import annotations

from pathlib import Path

from dure.federated.privacy.secure_aggregation import messages as sums
from dure.split import alignment, messages
from dure.split.network import control
from dure.split.parties import messages as parties
from dure.wire import requests

PAGE = Path(__file__).parents[1] / "docs" / "privacy.md"
BEGIN, END = "<!-- leaving -->\n", "<!-- /leaving -->"

_NUMBERS = "numbers that identify the round, turn, step or question of a message"

LEAVES: dict[str, dict[type, dict[str, str]]] = {
    "any system, when a site enrols": {
        requests.Enrol: {
            "token": "the invitation, once",
            "key, proof": "the site's public key, and a proof of the private key",
            "name": "the requested name",
            "wants": "the requested number",
        }
    },
    "any system, when a site checks in": {
        requests.CheckIn: {
            "version, looks": "the version of the protocol; whether the site only observes the run",
            "name": "the site's name",
            "examples, held_out": "the numbers of training examples and of held-out examples (1 "
            "and 0 under secure aggregation)",
            "wants": "the requested number",
            "smallest_cohort": "the smallest number of clients in a new model that the site "
            "accepts",
            "trains, machine": "the next two rows",
        },
        requests.TaskDescription: {
            "forms, buffers": "names, shapes and dtypes of the trained tensors",
            "frozen, frozen_bytes": "SHA-256 and size of weights that are not trained",
            "loss, optimizer, metrics": "their names",
            "features": "names of features, if the task has names",
            "asks": "settings of training, such as clip_norm",
        },
        requests.Machine: {
            "torch, capability, engine, threads": "versions, the kind of processor, threads"
        },
    },
    "federated, during the run": {
        requests.NextRequest: {
            "confirmed": "that the site is connected; updates whose outcome the site has recorded"
        },
        requests.WatchRequest: {"ticket": "that the site is at work"},
        requests.UploadRequest: {
            "ticket, asking": _NUMBERS,
            "bytes, digest": "size and SHA-256 of the update; **its tensors follow**: changes of "
            "weights, buffers after training, and additional values of the algorithm",
            "examples, samples, steps": "the numbers of the site's examples, of processed "
            "examples, and of steps",
            "loss, counted": "the mean loss, and the count of the loss",
            "seconds": "the duration of training",
            "metrics": "numbers that a custom training loop returns",
            "failure": "the reason for a missing update, as one of five fixed texts",
        },
        requests.TrainingFailure: {
            "ticket": _NUMBERS,
            "kind, file, line": "type of an error of the site's own code, name of the file, line",
            "message": "the text of the error; only with `share_errors = true`",
        },
        requests.EvaluationReport: {
            "round": _NUMBERS,
            "values, sums, forms": "metrics on held-out examples, and the sums behind the metrics",
            "examples": "the number of examples of each metric",
            "failure": "the reason for a missing metric",
        },
    },
    "federated under secure aggregation, instead of updates and measurements": {
        requests.UpdateReady: {"ticket": "that the site's update is ready"},
        requests.ProtocolAnswerBody: {
            "ticket, stage, asking": _NUMBERS,
            "body": "the site's part of the protocol: the rows below",
            "failure": "the type of the error that ended the protocol at the site",
        },
        sums.Advertised: {"channel, mask, signature": "public keys of this sum, signed"},
        sums.SharesForNeighbours: {
            "commitment": "a hash of the site's secrets",
            "shares": "shares of the secrets, sealed for other clients, and hashes of the shares",
        },
        sums.Masked: {
            "unfit": "the clients whose shares did not open; **the site's masked vector follows**, "
            "random numbers to any reader without the masks"
        },
        sums.Confirmed: {"signature": "that the site has seen the same list of clients"},
        sums.Unmasked: {"survivors, lost": "shares that remove masks from the sum"},
        sums.ModelSpent: {"": "that the site contributes to no other sum of this model"},
    },
    "split learning": {
        control.Hello: {
            "examples, tests": "the numbers of training examples and of test examples",
            "member": "the site's public keys and its name",
            "digest": "SHA-256 of the initial weights",
            "joins, form, targets, head": "shapes, dtypes and sizes of the site's part of the "
            "model",
        },
        messages.Smashed: {
            "turn, step": _NUMBERS,
            "values": "**activations at the cut, of every example of the batch**",
            "targets": "**labels of the batch**, unless the end of the model is at the client",
            "examples, counted": "the number of examples of the batch, and the count of the loss",
        },
        messages.OutputGradients: {
            "turn, step, missed": _NUMBERS,
            "values": "gradients at the second cut",
            "loss, counted": "the loss of the batch, and the count of the loss",
        },
        messages.HeadGradients: {
            "turn, step": _NUMBERS,
            "values": "gradients of the site's head, in `parallel-split`",
        },
        messages.Ended: {
            "turn": _NUMBERS,
            "head": "the site's head with the optimizer's state, if heads go to the server",
        },
        control.SealedHead: {
            "turn, peer": _NUMBERS,
            "content": "the site's head for the next client, which the server cannot read",
        },
        control.HeadRefused: {"turn": _NUMBERS, "reason": "the reason why a head is invalid"},
        control.Query: {
            "examples, of": "numbers of test examples",
            "values": "**activations of test examples**, if the model is measured",
            "targets": "labels of test examples, if the server computes the loss",
        },
        control.ModelMeasured: {"round": _NUMBERS, "values": "metrics on the site's test examples"},
        control.ClientFailed: {
            "reason": "type of an error of the site's own code; the text as set in policy.toml"
        },
    },
    "vertical split learning": {
        alignment.Blinded: {
            "first, total": "the number of the site's people",
            "points": "ids of the site's people, blinded",
        },
        alignment.DoubleBlinded: {
            "first": _NUMBERS,
            "points": "ids of the other side, blinded a second time",
        },
        control.Aligned: {"": "that the site has saved the list of common people"},
        parties.Activations: {
            "step": _NUMBERS,
            "values": "**activations of the site's columns, of every example of the batch**",
            "trains": "whether the site's head is trained",
        },
        control.Evaluated: {
            "first": _NUMBERS,
            "values": "**activations of the site's columns, of test examples**",
        },
        control.Resumed: {"turn": _NUMBERS},
        control.StateSaved: {"step": _NUMBERS},
    },
}
"""By system, then by message: the content of each field."""


def fields_of(kind: type) -> set[str]:
    """The fields of a message."""
    return set(kind.__struct_fields__)  # type: ignore[attr-defined]


def table() -> str:
    """Return the table of the page."""
    lines = ["| when | message | data that leave the site |", "| --- | --- | --- |"]
    for when, kinds in LEAVES.items():
        for kind, told in kinds.items():
            # Numbers that only order messages are the same everywhere.
            words = [
                f"`{names}`: {text}" if names else text
                for names, text in told.items()
                if text != _NUMBERS
            ]
            lines.append(
                f"| {when} | `{kind.__name__}` | {'; '.join(words) or 'that the site is done'} |"
            )
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """Return the page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))

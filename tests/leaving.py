"""The table of docs/privacy.md: every field of every message by which something leaves a site.

The rows are made of the types of the messages, so that a new field cannot be forgotten: the test of
the page fails until somebody says here, in words, what it tells.

    python tests/leaving.py      writes the table into the page
"""

from __future__ import annotations

from pathlib import Path

from dure.federated.privacy.secure_aggregation import messages as sums
from dure.split import alignment, messages
from dure.split.network import control, parties_control
from dure.split.parties import messages as parties
from dure.wire import requests

PAGE = Path(__file__).parents[1] / "docs" / "privacy.md"
BEGIN, END = "<!-- leaving -->\n", "<!-- /leaving -->"

_NUMBERS = "numbers that say to which round, turn, step or question a message belongs"

LEAVES: dict[str, dict[type, dict[str, str]]] = {
    "any system, when a site enrols": {
        requests.Enrol: {
            "token": "the invitation, once",
            "key, proof": "its public key, and a proof of the private one",
            "name": "the name by which it wants to be known",
            "wants": "the number that it would have",
        }
    },
    "any system, when a site checks in": {
        requests.CheckIn: {
            "version, looks": "the version of the protocol; whether it only looks",
            "name": "its name",
            "examples, held_out": "how many examples it trains on and holds out (1 and 0 under "
            "secure aggregation)",
            "wants": "the number that it would have",
            "smallest_cohort": "the fewest clients in a new model that it asks for",
            "trains, machine": "the next two rows",
        },
        requests.TaskDescription: {
            "forms, buffers": "names, shapes and dtypes of the tensors that are trained",
            "frozen, frozen_bytes": "SHA-256 and size of weights that are not trained",
            "loss, optimizer, metrics": "what they are called",
            "features": "names of features, where the task has them",
            "asks": "settings of training, such as clip_norm",
        },
        requests.Machine: {
            "torch, capability, engine, threads": "versions, the kind of processor, threads"
        },
    },
    "federated, while the run goes on": {
        requests.NextRequest: {"confirmed": "that it is there; updates whose outcome it has noted"},
        requests.WatchRequest: {"ticket": "that it is at work"},
        requests.UploadRequest: {
            "ticket, asking": _NUMBERS,
            "bytes, digest": "size and SHA-256 of the update; **its tensors follow**: changes of "
            "weights, buffers as they are after training, and what the algorithm sends besides",
            "examples, samples, steps": "how many examples it has, has processed, and steps",
            "loss, counted": "the mean loss, and how much the loss counted",
            "seconds": "how long training took",
            "metrics": "numbers that a training loop of one's own gives",
            "failure": "why there is no update, as one of five fixed texts",
        },
        requests.TrainingFailure: {
            "ticket": _NUMBERS,
            "kind, file, line": "type of an error of its own code, name of the file, line",
            "message": "what the error says; only with `share_errors = true`",
        },
        requests.EvaluationReport: {
            "round": _NUMBERS,
            "values, sums, forms": "metrics on held-out examples, and the sums that make them",
            "examples": "how many examples each metric was measured on",
            "failure": "why something was not measured",
        },
    },
    "federated under secure aggregation, instead of updates and measurements": {
        requests.UpdateReady: {"ticket": "that its update is ready"},
        requests.ProtocolAnswerBody: {
            "ticket, stage, asking": _NUMBERS,
            "body": "its part of the protocol: the rows below",
            "failure": "the type of the error by which its code left the protocol",
        },
        sums.Advertised: {"channel, mask, signature": "public keys of this sum, signed"},
        sums.SharesForNeighbours: {
            "commitment": "a hash of its secrets",
            "shares": "shares of them, sealed for other clients, and hashes of these",
        },
        sums.Masked: {
            "unfit": "whose shares did not open; **its masked vector follows**, random numbers to "
            "whoever has not the masks"
        },
        sums.Confirmed: {"signature": "that it has seen the same list of clients"},
        sums.Unmasked: {"survivors, lost": "shares that undo masks of the sum"},
        sums.ModelSpent: {"": "that it contributes to no other sum of this model"},
    },
    "split learning": {
        control.Hello: {
            "examples, tests": "how many examples it trains and measures on",
            "member": "its public keys and its name",
            "digest": "SHA-256 of the weights with which it begins",
            "joins, form, targets, head": "shapes, dtypes and sizes of its part of the model",
        },
        messages.Smashed: {
            "turn, step": _NUMBERS,
            "values": "**activations at the cut, of every example of the batch**",
            "targets": "**labels of the batch**, unless the end of the model is with the client",
            "examples, counted": "how many examples the batch has, and how much the loss counts",
        },
        messages.OutputGradients: {
            "turn, step, missed": _NUMBERS,
            "values": "gradients at the second cut",
            "loss, counted": "the loss of the batch, and how much it counts",
        },
        messages.HeadGradients: {
            "turn, step": _NUMBERS,
            "values": "gradients of its head, in `parallel-split`",
        },
        messages.Ended: {
            "turn": _NUMBERS,
            "head": "its head with what the optimizer keeps, where heads go to the server",
        },
        control.SealedHead: {
            "turn, peer": _NUMBERS,
            "content": "its head for the next client, which the server cannot read",
        },
        control.HeadRefused: {"turn": _NUMBERS, "reason": "why a head cannot be"},
        control.Query: {
            "examples, of": "how many test examples",
            "values": "**activations of test examples**, where the model is measured",
            "targets": "their labels, where the loss is the server's",
        },
        control.ModelMeasured: {"round": _NUMBERS, "values": "metrics on its test examples"},
        control.ClientFailed: {
            "reason": "type of an error of its own code; its text as policy.toml says"
        },
    },
    "vertical split learning": {
        alignment.Blinded: {
            "first, total": "how many people it has",
            "points": "their ids, blinded",
        },
        alignment.DoubleBlinded: {
            "first": _NUMBERS,
            "points": "ids of the other side, blinded once more",
        },
        parties_control.Aligned: {"": "that it has written down who is with all parties"},
        parties.Activations: {
            "step": _NUMBERS,
            "values": "**activations of its columns, of every example of the batch**",
            "trains": "whether its head is trained",
        },
        parties_control.Evaluated: {
            "first": _NUMBERS,
            "values": "**activations of its columns, of test examples**",
        },
        parties_control.Resumed: {"turn": _NUMBERS},
        parties_control.StateSaved: {"step": _NUMBERS},
    },
}
"""By system, then by message: what each field tells."""


def fields_of(kind: type) -> set[str]:
    """The fields of a message."""
    return set(kind.__struct_fields__)  # type: ignore[attr-defined]


def table() -> str:
    """Return the table of the page."""
    lines = ["| when | message | what leaves the site |", "| --- | --- | --- |"]
    for when, kinds in LEAVES.items():
        for kind, told in kinds.items():
            # Numbers that only order messages are the same everywhere.
            words = [
                f"`{names}`: {text}" if names else text
                for names, text in told.items()
                if text != _NUMBERS
            ]
            lines.append(
                f"| {when} | `{kind.__name__}` | {'; '.join(words) or 'that it is done'} |"
            )
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """Return the page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))

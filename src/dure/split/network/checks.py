"""Checks of all messages of split learning clients, field by field, before the server uses them.

`RULES` has a rule for each field of each type of message. A rule with a function is checked here: a
message that violates the rule is refused, with the client's name and a reason, before any
computation with it. The text of a rule without a function names the place of the check.

A client whose well-formed message makes the server's computation fail is at fault as well
(`dure.split.blame`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from dure.data.batches import batches_per_epoch
from dure.errors import described
from dure.split.blame import ADVICE, GRADIENT, InvalidMessageError, NotANumberError, check_bounded
from dure.split.head_checks import HeadChecks
from dure.split.message_order import FromClient
from dure.split.messages import Ended, HeadGradients, OutputGradients, Smashed, Turn
from dure.split.network.control import (
    ClientFailed,
    HeadRefused,
    Hello,
    MeasureModel,
    ModelMeasured,
    Query,
    QueryAnswer,
    SealedHead,
)
from dure.split.network.targets import TargetForm

MOST_EXAMPLES = 1 << 31
"""Maximum number of examples of a client."""

MOST_BATCH = 1 << 20
"""Maximum number of examples of a batch, if a client's batch is all of its examples."""

MOST_QUERIED = 1 << 16
"""Maximum number of examples of a batch in evaluation."""

MOST_LOSS = 1e100
"""Maximum absolute value of a loss that a client reports, so that the sum over clients is finite.
"""

MOST_EACH = float(1 << 24)
"""Maximum count of an example in the loss, if only the client knows the loss."""

MOST_METRICS = 64

SLACK = 1e-6
"""Relative tolerance for counts that were summed in another order."""


class BatchSizes(NamedTuple):
    """Sizes of a client's batches, which follow from its data at check-in.

    batch_size: None for all examples in every step. joins: as in `batches_per_epoch`.
    """

    examples: int
    batch_size: int | None
    joins: bool

    @property
    def largest(self) -> int:
        """Number of examples of a full batch."""
        return self.examples if self.batch_size is None else min(self.batch_size, self.examples)

    @property
    def steps_per_epoch(self) -> int:
        return batches_per_epoch(self.examples, self.largest, self.joins)

    def at(self, step: int) -> int:
        """Return the number of examples of a step's batch; steps count from 0 over all rounds."""
        steps = self.steps_per_epoch
        last = step % steps == steps - 1
        return self.examples - self.largest * (steps - 1) if last else self.largest


class CountBounds(NamedTuple):
    """Bounds on the count of a batch in the loss, as far as the server knows the loss.

    classes: counts targets that are class indices; None if the loss counts examples. each: maximum
    count of an example. known: whether the count after the computation must equal the expected
    count.
    """

    classes: Callable[[Tensor], float] | None
    each: float
    known: bool

    def expected(self, examples: int, targets: Sequence[Any] | None) -> tuple[float, float]:
        """Return (min, max) of the count that a client may expect of a batch.

        targets: None if the targets stay at the client.
        """
        if self.classes is None:
            return float(examples), float(examples)
        if targets is None or not isinstance(targets[0], Tensor):
            return 0.0, examples * self.each
        found = float(examples)
        counted = found if targets[0].is_floating_point() else self.classes(targets[0])
        # A client that reads targets batch by batch uses the number of examples before it has them.
        return min(found, counted), max(found, counted)

    def computed(self, examples: int, expected: float) -> tuple[float, float]:
        """Return (min, max) of the count that the loss of a batch may report."""
        return (expected, expected) if self.known else (0.0, max(examples * self.each, expected))


UNKNOWN = CountBounds(lambda targets: math.nan, MOST_EACH, known=False)
"""Bounds for a loss that only clients know."""


class ServerPartInterface(ABC):
    """Interface to the server's part: forms of the values at the cuts, and evaluation."""

    @abstractmethod
    def arrived(self, values: Sequence[Tensor], examples: int, training: bool) -> list[Tensor]:
        """Return the output of a head in the client's memory layout. Raises ValueError."""

    @abstractmethod
    def check_returned(self, gradients: Sequence[Tensor], examples: int) -> None:
        """Raise ValueError for gradients that do not match the output of the server's part."""

    @abstractmethod
    def answer(self, values: Sequence[Tensor], query: Query) -> QueryAnswer:
        """Return the output of the server's part in evaluation. Raises ValueError."""

    def measured(self) -> dict[str, float]:
        """Return the metrics that the server has measured itself since the last call."""
        return {}


@dataclass(frozen=True)
class ClientMessage:
    """A message that is due, with the state of its client.

    turn: the client's current turn. sizes: of its batches. began: the Smashed message of its
    current batch.
    """

    message: Any
    turn: Turn
    sizes: BatchSizes
    began: Smashed | None = None

    @property
    def examples(self) -> int:
        """Number of examples of the batch of the message's step."""
        return self.sizes.at(self.turn.taken + self.message.step)


@dataclass
class MeasurementProgress:
    """Progress of a measurement by a client that has the head.

    tests: number of the client's test examples at check-in. done: number measured so far. of: total
    number that the queries state.
    """

    measure: MeasureModel
    tests: int
    done: int = 0
    of: int = 0


@dataclass(frozen=True)
class ClientAgreement:
    """Agreement between the server and its clients.

    targets: leaves of a batch's targets; None if targets stay at clients. returns: whether each
    head comes to the server at the end of a turn. metrics: names of the clients' metrics; None if
    only the clients know them.
    """

    at_server: ServerPartInterface
    heads: HeadChecks
    targets: Sequence[TargetForm] | None
    counting: CountBounds
    returns: bool = False
    metrics: frozenset[str] | None = None


class FieldRule(NamedTuple):
    """Rule for a field. check: raises ValueError if the rule is violated."""

    field: str
    holds: str
    check: Callable[[Checks, Any], None] | None = None

    @property
    def shown(self) -> str:
        """Text of the rule for the documentation page, without the place of the check."""
        return self.holds.partition(" (`")[0]


class Checks:
    """Checks of the messages of a run."""

    def __init__(self, agreed: ClientAgreement) -> None:
        self.agreed = agreed

    def begun(self, heard: ClientMessage) -> None:
        """Run the checks that precede decompression. Raises ValueError."""
        if isinstance(heard.message, Smashed):
            _examples(self, heard)

    def checked(self, heard: ClientMessage) -> FromClient:
        """Return the checked message, in the client's memory layout. Raises ValueError."""
        message: FromClient = heard.message
        self._hold(heard)
        if not isinstance(message, Smashed):
            return message
        values = self.agreed.at_server.arrived(message.values, message.examples, training=True)
        return msgspec.structs.replace(message, values=tuple(values))

    def _hold(self, heard: Any) -> None:
        for rule in RULES[type(heard.message)]:
            if rule.check is not None:
                rule.check(self, heard)

    # Evaluation

    def answered(self, query: Query, measuring: MeasurementProgress) -> QueryAnswer:
        """Return the answer to a query. Raises ValueError, also if the computation fails."""
        check_query(query, measuring)
        check_numbers("values at the cut", query.values)
        try:
            values = self.agreed.at_server.arrived(query.values, query.examples, training=False)
            answer = self.agreed.at_server.answer(values, query)
        except (InvalidMessageError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise InvalidMessageError(
                f"the server cannot compute with it: {described(error)}"
            ) from error
        measuring.done += query.examples
        measuring.of = query.of
        return answer

    def measured(self, message: ModelMeasured, measuring: MeasurementProgress) -> dict[str, float]:
        """Return the metrics of the client and of the server. Raises ValueError."""
        check_measured(message, measuring, self.agreed.metrics)
        try:
            own = self.agreed.at_server.measured()
        except Exception as error:
            raise InvalidMessageError(
                f"a metric fails on its test data: {described(error)}"
            ) from error
        return {**message.values, **own}

    def forget(self) -> None:
        """Discard the metrics of an unfinished measurement."""
        self.agreed.at_server.measured()


# Training


def _examples(checks: Checks, heard: ClientMessage) -> None:
    given = heard.message.examples
    if given != heard.examples:
        raise InvalidMessageError(
            f"a batch has {given} examples, but that of this step has {heard.examples}, by the "
            f"{heard.sizes.examples} examples that the client has"
        )


def _values(checks: Checks, heard: ClientMessage) -> None:
    check_numbers("values at the cut", heard.message.values)
    # `Checks.checked` checks the forms, because that step also restores the memory layout.


def _targets(checks: Checks, heard: ClientMessage) -> None:
    wanted = checks.agreed.targets
    given = heard.message.targets
    if wanted is None:
        if given is not None:
            raise InvalidMessageError("targets were sent, but they have to stay with clients")
        return
    if given is None:
        raise InvalidMessageError("a batch was sent without its targets")
    if len(given) != len(wanted):
        raise InvalidMessageError(f"{len(given)} targets were sent, but there are {len(wanted)}")
    for leaf, one in zip(wanted, given, strict=True):
        leaf.check(one, heard.message.examples)


def _expected(checks: Checks, heard: ClientMessage) -> None:
    message: Smashed = heard.message
    least, most = checks.agreed.counting.expected(message.examples, message.targets)
    _within("the loss is expected to count", message.counted, least, most)


def _returned(checks: Checks, heard: ClientMessage) -> None:
    assert heard.began is not None
    checks.agreed.at_server.check_returned(heard.message.values, heard.began.examples)
    check_bounded("gradients at the second cut", heard.message.values)


def _missed(checks: Checks, heard: ClientMessage) -> None:
    values = len(heard.message.values)
    if not 0 <= heard.message.missed < 1 << values:
        raise InvalidMessageError(
            f"the values without a gradient are {heard.message.missed} as bits, but there are "
            f"{values}"
        )


def _loss(checks: Checks, heard: ClientMessage) -> None:
    loss = heard.message.loss
    if not abs(loss) <= MOST_LOSS:
        raise NotANumberError(f"the loss is {loss}: {ADVICE}")


def _computed(checks: Checks, heard: ClientMessage) -> None:
    began = heard.began
    assert began is not None
    least, most = checks.agreed.counting.computed(began.examples, began.counted)
    _within("the loss has counted", heard.message.counted, least, most)


def _head_gradients(checks: Checks, heard: ClientMessage) -> None:
    checks.agreed.heads.check_gradients(heard.message.values)


def _head(checks: Checks, heard: ClientMessage) -> None:
    head = heard.message.head
    wanted = checks.agreed.returns or heard.turn.brings
    if head is None and wanted:
        raise InvalidMessageError("the turn has ended, but the head was not sent to the server")
    if head is not None:
        if not wanted:
            raise InvalidMessageError("a head was sent, but it has to stay with the client")
        checks.agreed.heads.check(head)


def _within(what: str, value: float, least: float, most: float) -> None:
    # Comparisons with NaN are False, so `not` treats NaN as outside.
    if not least * (1 - SLACK) <= value <= most * (1 + SLACK):
        raise InvalidMessageError(f"{what} {value}, but has to count {least:g} to {most:g}")


# Evaluation


def check_query(query: Query, measuring: MeasurementProgress) -> None:
    """Raise WrongError for a query that is not due, by the size of the test data."""
    if query.targets is not None and not query.of:
        raise InvalidMessageError(
            "test examples were sent with targets but without their total number"
        )
    if not 1 <= query.examples <= MOST_QUERIED:
        raise InvalidMessageError(
            f"{query.examples} test examples were sent at once, but 1 to {MOST_QUERIED} are allowed"
        )
    if measuring.done and query.of != measuring.of:
        raise InvalidMessageError(
            f"{query.of} test examples are evaluated, but {measuring.of} were announced before"
        )
    told = measuring.tests if measuring.tests >= 0 else query.of or MOST_EXAMPLES
    if query.of not in (0, told) or measuring.done + query.examples > told:
        raise InvalidMessageError(
            f"test examples {measuring.done + 1} to {measuring.done + query.examples} of "
            f"{query.of} were sent, but the client has {told}"
        )


def check_measured(
    message: ModelMeasured, measuring: MeasurementProgress, metrics: frozenset[str] | None
) -> None:
    """Raise WrongError for a result that does not belong to this measurement."""
    if message.round != measuring.measure.round:
        raise InvalidMessageError(
            f"round {message.round + 1} was evaluated, but the current round is "
            f"{measuring.measure.round + 1}"
        )
    known = metrics is None or message.values.keys() <= metrics
    if not known or len(message.values) > MOST_METRICS or not all(map(_is_name, message.values)):
        named = ", ".join(name[:40] for name in sorted(message.values)[:5])
        wanted = "test_…" if metrics is None else ", ".join(sorted(metrics)) or "nothing"
        raise InvalidMessageError(f"the metrics are {named!r}, but have to be {wanted}")
    for name, value in message.values.items():
        if not math.isfinite(value):
            raise InvalidMessageError(f"{name} is {value}")


def _is_name(name: str) -> bool:
    return name.startswith("test_") and len(name) <= 200 and name.isprintable()


# Rules for all clients

_TURN = FieldRule(
    "turn",
    "the client's current turn; a message of a turn that was rolled back is discarded "
    "(`SplitServer`)",
)
_STEP = FieldRule(
    "step", "the next step, in the order of messages of a turn (`dure.split.message_order`)"
)

RULES: Mapping[type, tuple[FieldRule, ...]] = {
    Hello: (
        FieldRule(
            "examples",
            f"1 to {MOST_EXAMPLES:,}; unchanged when the client reconnects (`Admission`)",
        ),
        FieldRule(
            "member",
            "the client's own keys, signed; unchanged when the client reconnects (`Admission`)",
        ),
        FieldRule("digest", "up to 128 letters and digits (`Admission`)"),
        FieldRule("joins", "a boolean"),
        FieldRule(
            "form",
            "present if the head is a separate file; values of at most 1 GiB "
            "(`ServedSplitLearner`)",
        ),
        FieldRule(
            "targets",
            "the same for the targets, present if the server computes the loss "
            "(`ServedSplitLearner`)",
        ),
        FieldRule(
            "head",
            "bytes of the head, at most 16 GiB; equal for all clients if the server has no head",
        ),
        FieldRule("tests", f"at most {MOST_EXAMPLES:,} (`Admission`)"),
    ),
    Smashed: (
        _TURN,
        _STEP,
        FieldRule(
            "examples",
            "the size of the batch of that step, by the number of examples at check-in",
            _examples,
        ),
        FieldRule("values", "number, dtypes and shapes of the cut; no NaN", _values),
        FieldRule(
            "targets",
            "present if the server computes the loss; number, dtypes, shapes; classes of the "
            "model; finite",
            _targets,
        ),
        FieldRule("counted", "the count of the loss for these targets", _expected),
    ),
    OutputGradients: (
        _TURN,
        _STEP,
        FieldRule(
            "values",
            f"number, dtypes and shapes of the second cut; absolute values at most {GRADIENT:g}",
            _returned,
        ),
        FieldRule("missed", "a bit for each of the values", _missed),
        FieldRule("loss", f"finite; absolute value at most {MOST_LOSS:g}", _loss),
        FieldRule(
            "counted",
            "the expected count of the batch; 0 or more for custom losses",
            _computed,
        ),
    ),
    HeadGradients: (
        _TURN,
        _STEP,
        FieldRule(
            "values",
            f"number, dtypes and shapes of the head's parameters; absolute values at most "
            f"{GRADIENT:g}",
            _head_gradients,
        ),
    ),
    Ended: (
        _TURN,
        FieldRule(
            "head",
            "present if the server hands heads over; number, dtypes and shapes of the head and of "
            "its optimizer's state; settings that steps of the optimizer change, as numbers, "
            "texts and tensors of their forms; finite; weights at most a million times the "
            "weights before",
            _head,
        ),
    ),
    SealedHead: (
        FieldRule(
            "turn",
            "the receiver's turn; a message of a turn that was rolled back is discarded "
            "(`SplitServer`)",
        ),
        FieldRule("peer", "the client that the server named as the receiver (`SplitServer`)"),
        FieldRule(
            "content",
            "bytes; the receiver decrypts the head and checks the content (`SplitSite`)",
        ),
    ),
    ClientFailed: (FieldRule("reason", "text, of which 500 characters are shown (`SplitServer`)"),),
    HeadRefused: (
        FieldRule(
            "turn",
            "the turn of a client that has received a head from another client, and has sent no "
            "values (`SplitServer`)",
        ),
        FieldRule("reason", "text, of which 500 characters are shown (`SplitServer`)"),
    ),
    Query: (
        FieldRule(
            "examples",
            f"1 to {MOST_QUERIED:,}; in total at most the number of test examples",
        ),
        FieldRule("values", "as in `Smashed`"),
        FieldRule("targets", "as in `Smashed`, if the server computes the metrics"),
        FieldRule("of", "the number of test examples at check-in, equal in all queries"),
    ),
    ModelMeasured: (
        FieldRule("round", "the round that is measured"),
        FieldRule("values", "by the names of the task's metrics; finite"),
    ),
}
"""Rules for each field of each message of a client."""


def check_numbers(what: str, values: Sequence[Tensor]) -> None:
    """Raise WrongError for NaN. Infinite values are allowed, as a mask may contain them."""
    for one in values:
        if not (one.is_floating_point() or one.is_complex()):
            continue
        # A NaN makes the sum NaN. The sum is a quick test; inf - inf needs the exact test.
        if bool(one.sum().isnan()) and bool(one.isnan().any()):
            raise NotANumberError(f"{what} have NaN: {ADVICE}")

"""Pipeline schedules as data: the order in which each rank computes and communicates.

A model is cut into stages 0 … S-1, a batch into micro-batches 0 … m-1; stage s is placed on rank
`home[s]`. A schedule is a list of actions for each of the p ranks, in the order of execution:

    F            forward
    B            backward, or instead of it
    I, W         the gradient of the inputs and, later, the gradient of the weights
    SO, RI       an output goes from stage s to stage s+1: send_output of s, receive_input of s+1
    SG, RG       a gradient goes from stage s to stage s-1: send_gradient of s, receive_gradient of
                 s-1

An action is written as its letters, its stage and its micro-batch: F0.3. Stages on the same rank
pass tensors directly. Sends do not wait, receives do. An output and a gradient of each micro-batch
cross every boundary between stages on different ranks.

`dure.parallel.pipeline.builders` builds the known schedules. `dure.parallel.pipeline.validate`
checks whether a schedule can run.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "input_gradient",
    "weight_gradient",
    "send_output",
    "receive_input",
    "send_gradient",
    "receive_gradient",
]

LETTERS: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "input_gradient": "I",
    "weight_gradient": "W",
    "send_output": "SO",
    "receive_input": "RI",
    "send_gradient": "SG",
    "receive_gradient": "RG",
}
KINDS: dict[str, Kind] = {letters: kind for kind, letters in LETTERS.items()}

COMPUTING: tuple[Kind, ...] = ("forward", "backward", "input_gradient", "weight_gradient")
SENDS: tuple[Kind, ...] = ("send_output", "send_gradient")
RECEIVES: tuple[Kind, ...] = ("receive_input", "receive_gradient")

# the other end of each message: its kind, and the difference of the stages' numbers
_COUNTERPARTS: dict[Kind, tuple[Kind, int]] = {
    "send_output": ("receive_input", 1),
    "receive_input": ("send_output", -1),
    "send_gradient": ("receive_gradient", -1),
    "receive_gradient": ("send_gradient", 1),
}


class Action(NamedTuple):
    """Single action of a rank: as text F0.3, a forward of stage 0 and micro-batch 3."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action with this text. Raises ValueError for any other text."""
        found = re.fullmatch(r"([A-Z]{1,2})([0-9]+)\.([0-9]+)", text)
        if not found or found[1] not in KINDS:
            raise ValueError(
                f"{text!r} is not an action: write letters, stage, dot and micro-batch, as F0.3; "
                f"the letters are {', '.join(KINDS)}"
            )
        return cls(KINDS[found[1]], int(found[2]), int(found[3]))

    @property
    def computes(self) -> bool:
        """Whether the action is a computation, not a transfer."""
        return self.kind in COMPUTING

    @property
    def counterpart(self) -> Action:
        """Receive that belongs to a send, or send that belongs to a receive.

        Raises ValueError for an action that computes.
        """
        if self.computes:
            raise ValueError(f"{self} is not a transfer: only sends and receives have counterparts")
        kind, offset = _COUNTERPARTS[self.kind]
        return Action(kind, self.stage + offset, self.microbatch)


ComputeActions = Sequence[Sequence[Action]]
"""Computations of each rank, in order, without transfers."""


def on_other_rank(home: Sequence[int], stage: int, other: int) -> bool:
    """Return whether both stages exist on different ranks, so that they exchange messages."""
    return 0 <= other < len(home) and home[stage] != home[other]


def send_after(action: Action, home: Sequence[int]) -> Action | None:
    """Return the send that follows an action; None if the action makes no message."""
    kind, stage, microbatch = action
    # A weight gradient makes no message: no other stage needs it.
    if kind == "forward" and on_other_rank(home, stage, stage + 1):
        return Action("send_output", stage, microbatch)
    if kind in ("backward", "input_gradient") and on_other_rank(home, stage, stage - 1):
        return Action("send_gradient", stage, microbatch)
    return None


def receive_before(action: Action, home: Sequence[int]) -> Action | None:
    """Return the receive that an action needs first; None if the action needs no message."""
    kind, stage, microbatch = action
    if kind == "forward" and on_other_rank(home, stage, stage - 1):
        return Action("receive_input", stage, microbatch)
    if kind in ("backward", "input_gradient") and on_other_rank(home, stage, stage + 1):
        return Action("receive_gradient", stage, microbatch)
    return None


@dataclass(frozen=True)
class Schedule:
    """Actions of each rank.

    home: the rank of each stage. microbatches: their number. actions: a list per rank.

    The constructor checks nothing: `dure.parallel.pipeline.validate.check` checks whether the
    schedule can run.
    """

    name: str
    home: tuple[int, ...]
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.home)

    @property
    def computing(self) -> tuple[tuple[Action, ...], ...]:
        """Actions that compute, for each rank."""
        return tuple(tuple(filter(_computes, actions)) for actions in self.actions)

    @property
    def parts_gradients(self) -> bool:
        """Whether any stage computes gradients of inputs and of weights separately."""
        kinds: set[Kind] = set()
        for actions in self.actions:
            kinds.update(action.kind for action in actions)
        return "weight_gradient" in kinds

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on a rank, in ascending order."""
        return tuple(stage for stage, home in enumerate(self.home) if home == rank)

    def text(self) -> str:
        """Return the text form: name, homes, micro-batches, and a line of actions per rank."""
        head = [
            f"schedule: {self.name}",
            f"home: {_row(self.home)}",
            f"microbatches: {self.microbatches}",
        ]
        lists = [f"rank {rank}: {_row(actions)}" for rank, actions in enumerate(self.actions)]
        return "\n".join([*head, *lists]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Return the schedule in a text like that of `text`, without empty lines and # comments.

        Transfers are taken from the text: `with_transfers` adds them to a schedule without
        transfers. Raises ValueError for lines that are missing, repeated, or malformed.
        """
        fields: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            key, colon, value = (part.strip() for part in line.partition(":"))
            if not line:
                continue
            if not colon or not re.fullmatch(r"schedule|home|microbatches|rank [0-9]+", key):
                raise ValueError(
                    f"line {number}: {line[:40]!r} is not understood: write 'schedule:', 'home:', "
                    "'microbatches:' or 'rank 0:' and what belongs there"
                )
            # a repeated line would silently replace the first
            if key in fields:
                raise ValueError(f"line {number}: {key!r} occurs twice: keep one")
            fields[key] = value
        return _of_fields(fields)


def is_user_defined(schedule: str) -> bool:
    """Return whether a setting is a user-defined schedule as text: names have no colon."""
    return ":" in schedule


def _computes(action: Action) -> bool:
    return action.computes


def _row(items: Iterable[object]) -> str:
    return " ".join(map(str, items))


def _of_fields(fields: dict[str, str]) -> Schedule:
    # Ranks are counted, and then have to be 0 … p-1 without a gap.
    ranks = sum(key.startswith("rank ") for key in fields)
    lists = [f"rank {rank}" for rank in range(max(1, ranks))]
    for key in ("schedule", "home", "microbatches", *lists):
        if key not in fields:
            raise ValueError(f"the schedule has no line {key + ':'!r}: add it")
    home = fields["home"].split()
    microbatches = fields["microbatches"]
    for word in [*home, microbatches]:
        if not re.fullmatch("[0-9]+", word):
            raise ValueError(
                f"{word!r} is not a number: 'home:' has the rank of each stage, 'microbatches:' "
                "one number"
            )
    return Schedule(
        name=fields["schedule"],
        home=tuple(map(int, home)),
        microbatches=int(microbatches),
        actions=tuple(
            tuple(map(Action.parse, fields[f"rank {rank}"].split())) for rank in range(ranks)
        ),
    )


def with_transfers(
    name: str, home: Sequence[int], microbatches: int, computing: ComputeActions
) -> Schedule:
    """Return the schedule of these computations, with the messages that they need.

    A message is sent right after the action that makes it. It is received right before the action
    that needs it, or earlier: messages that the same rank has sent before are received first, so
    that messages between any two ranks arrive in the order in which they are sent. Early receives
    cost no time, because the earlier messages were made earlier too, and they add no deadlock.
    """
    # Receives of each pair of ranks, in the order in which the messages are sent.
    coming: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, actions in enumerate(computing):
        for action in actions:
            # in the order in which this rank makes them
            if send := send_after(action, home):
                coming[rank, home[send.counterpart.stage]].append(send.counterpart)
    # all messages that are sent; a computation may need a message that no action makes
    made = set().union(*coming.values())
    lists = []
    for rank, actions in enumerate(computing):
        done: list[Action] = []
        received: set[Action] = set()
        for action in actions:
            needed = receive_before(action, home)
            # Messages that the same rank has sent before are received before. A receive without a
            # send is added all the same, and `validate` rejects it.
            while needed and needed not in received:
                queue = coming[home[needed.counterpart.stage], rank]
                # oldest first, until the needed message is received
                receive = queue.popleft() if needed in made else needed
                # A message received ahead of its use is not received again.
                received.add(receive)
                done.append(receive)
            done.append(action)
            if send := send_after(action, home):
                done.append(send)
        lists.append(tuple(done))
    return Schedule(name, tuple(home), microbatches, tuple(lists))

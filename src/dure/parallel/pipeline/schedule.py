"""Who computes what when in a pipeline: a schedule, as data.

A model is cut into stages 0 … S-1, a batch into micro-batches 0 … m-1; stage s lives on rank
`home[s]`. A schedule is a list of actions for each of the p ranks, in the order in which it does
them:

    F            forward
    B            backward, or in its place
    I, W         the gradient of the inputs and, later, that of the weights
    SO, RI       an output goes from stage s to stage s+1: send_output of s, receive_input of s+1
    SG, RG       a gradient goes from stage s to stage s-1: send_gradient of s, receive_gradient of
                 s-1

An action is written as its letters, its stage and its micro-batch: F0.3. Stages of one rank hand
over directly. Sends do not wait, receives do. Every boundary between stages on different ranks is
crossed by an output and by a gradient for each micro-batch.

Which schedules there are: `dure.parallel.pipeline.builders`. Whether one can run:
`dure.parallel.pipeline.validate`.
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

# the other end of each message: its kind, and how far its stage is from this one
_COUNTERPARTS: dict[Kind, tuple[Kind, int]] = {
    "send_output": ("receive_input", 1),
    "receive_input": ("send_output", -1),
    "send_gradient": ("receive_gradient", -1),
    "receive_gradient": ("send_gradient", 1),
}


class Action(NamedTuple):
    """One thing that a rank does: as text F0.3, of stage 0 and micro-batch 3."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that is written so. Raises ValueError if none is."""
        found = re.fullmatch(r"([A-Z]{1,2})([0-9]+)\.([0-9]+)", text)
        if not found or found[1] not in KINDS:
            raise ValueError(
                f"{text!r} is no action: write letters, stage, dot and micro-batch, as F0.3; "
                f"the letters are {', '.join(KINDS)}"
            )
        return cls(KINDS[found[1]], int(found[2]), int(found[3]))

    @property
    def computes(self) -> bool:
        """Whether it computes, and is no transfer."""
        return self.kind in COMPUTING

    @property
    def counterpart(self) -> Action:
        """Of a send what receives it, of a receive what sends it.

        Raises ValueError for an action that computes.
        """
        if self.computes:
            raise ValueError(f"{self} transfers nothing: only sends and receives have counterparts")
        kind, offset = _COUNTERPARTS[self.kind]
        return Action(kind, self.stage + offset, self.microbatch)


Computing = Sequence[Sequence[Action]]
"""What each rank computes, in its order, without transfers."""


def foreign(home: Sequence[int], stage: int, other: int) -> bool:
    """Whether both stages exist, on different ranks: what goes between them is a message."""
    return 0 <= other < len(home) and home[stage] != home[other]


def send_after(action: Action, home: Sequence[int]) -> Action | None:
    """The message that an action makes, if it makes one."""
    kind, stage, microbatch = action
    # A weight gradient makes no message: nobody else needs it.
    if kind == "forward" and foreign(home, stage, stage + 1):
        return Action("send_output", stage, microbatch)
    if kind in ("backward", "input_gradient") and foreign(home, stage, stage - 1):
        return Action("send_gradient", stage, microbatch)
    return None


def receive_before(action: Action, home: Sequence[int]) -> Action | None:
    """The message that an action needs, if it needs one."""
    kind, stage, microbatch = action
    if kind == "forward" and foreign(home, stage, stage - 1):
        return Action("receive_input", stage, microbatch)
    if kind in ("backward", "input_gradient") and foreign(home, stage, stage + 1):
        return Action("receive_gradient", stage, microbatch)
    return None


@dataclass(frozen=True)
class Schedule:
    """What each rank does.

    home: the rank of each stage. microbatches: their number. actions: a list per rank.

    Nothing is checked here: `dure.parallel.pipeline.validate.check` says whether it is a schedule
    that can run.
    """

    name: str
    home: tuple[int, ...]
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.home)

    @property
    def computing(self) -> tuple[tuple[Action, ...], ...]:
        """The actions that compute, for each rank."""
        return tuple(tuple(filter(_computes, actions)) for actions in self.actions)

    @property
    def parts_gradients(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart somewhere."""
        kinds: set[Kind] = set()
        for actions in self.actions:
            kinds.update(action.kind for action in actions)
        return "weight_gradient" in kinds

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, in ascending order."""
        return tuple(stage for stage, home in enumerate(self.home) if home == rank)

    def text(self) -> str:
        """As a file has it: name, homes, micro-batches, and a line of actions for each rank."""
        head = [
            f"schedule: {self.name}",
            f"home: {_row(self.home)}",
            f"microbatches: {self.microbatches}",
        ]
        lists = [f"rank {rank}: {_row(actions)}" for rank, actions in enumerate(self.actions)]
        return "\n".join([*head, *lists]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule in a text as `text` writes it, without empty lines and what follows a #.

        Transfers are as written: `with_transfers` adds them to a schedule that has none. Raises
        ValueError for what is missing, there twice, or not understood.
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
            # the second one would silently replace the first
            if key in fields:
                raise ValueError(f"line {number}: {key!r} is there twice: keep one of them")
            fields[key] = value
        return _of_fields(fields)


def is_own(schedule: str) -> bool:
    """Whether a setting is a user's own schedule as text: names have no colon."""
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
                f"{word!r} is no number: 'home:' has the rank of each stage, 'microbatches:' one "
                "number"
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
    name: str, home: Sequence[int], microbatches: int, computing: Computing
) -> Schedule:
    """The schedule that computes so, with the messages this needs.

    Each is sent right after it was made and received right before it is needed, or earlier: those
    that the same rank has sent before are received first, so that any two ranks' messages arrive in
    the order in which they are sent. That costs no time, as they were made earlier too, and adds no
    deadlock.
    """
    # Receives from one rank on another, in the order in which they are sent.
    coming: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, actions in enumerate(computing):
        for action in actions:
            # in the order in which this rank makes them
            if send := send_after(action, home):
                coming[rank, home[send.counterpart.stage]].append(send.counterpart)
    # what is sent at all; a computation may need what no action makes
    made = set().union(*coming.values())
    lists = []
    for rank, actions in enumerate(computing):
        done: list[Action] = []
        received: set[Action] = set()
        for action in actions:
            needed = receive_before(action, home)
            # What the same rank has sent before is received before; a receive that no action makes
            # is put in all the same, and refused by `validate`.
            while needed and needed not in received:
                queue = coming[home[needed.counterpart.stage], rank]
                # oldest first, until the needed one was received
                receive = queue.popleft() if needed in made else needed
                # Received ahead of its use, it is not received again.
                received.add(receive)
                done.append(receive)
            done.append(action)
            if send := send_after(action, home):
                done.append(send)
        lists.append(tuple(done))
    return Schedule(name, tuple(home), microbatches, tuple(lists))

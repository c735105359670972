"""Who computes what when in a pipeline: schedules, as data.

A model is cut into stages 0 … S-1, a batch into micro-batches 0 … m-1; stage s lives on rank `home[s]`. A schedule is
a list of actions for each of the p ranks, in the order in which it does them:

    F forward    B backward    or, in its place, I gradient of the inputs and W gradient of the weights
    SO, RI       an output goes from stage s to stage s+1: send_output of s, receive_input of s+1
    SG, RG       a gradient goes from stage s to stage s-1: send_gradient of s, receive_gradient of s-1

An action is written as its letters, its stage and its micro-batch: F0.3. Stages of one rank hand over directly. Sends
do not wait, receives do. Where all stages take as long and messages no time:

    schedule         stages a rank   idle over busy                             most activations a rank holds
    naive            1               p - 1, as m = 1                            1
    gpipe            1               (p-1)/m                                    m
    1f1b             1               (p-1)/m                                    p - rank
    interleaved      v               (p-1)/(v·m), if p divides m                2(p-rank-1) + (v-1)p + 1, of a v-th each
    zero-bubble      1               (p-1)(F+I-min(F,I,W))/(m(F+I+W)), m ≥ p    p
    zero-bubble-v    2               about (p-1)/(6m), m ≥ 2p and F = I = W     2p, of a half each

Every boundary between stages on different ranks is crossed by an output and by a gradient for each micro-batch.

Sources: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"; Narayanan
et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (1F1B), and 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM" (interleaved); Qi et al. 2023, "Zero Bubble Pipeline
Parallelism" (ZB-H1), and 2024, "Pipeline Parallelism with Controllable Memory" (V-shaped stages).
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from dure.catalog import suggestion

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
        return self.kind in COMPUTING

    @property
    def counterpart(self) -> Action:
        """Of a send what receives it, of a receive what sends it; ValueError for an action that computes."""
        if self.computes:
            raise ValueError(f"{self} transfers nothing: only sends and receives have counterparts")
        kind, offset = _COUNTERPARTS[self.kind]
        return Action(kind, self.stage + offset, self.microbatch)


Computing = Sequence[Sequence[Action]]
"""What each rank computes, in its order, without transfers."""


def foreign(home: Sequence[int], stage: int, other: int) -> bool:
    """Whether what goes from one stage to the other is a message: both exist, on different ranks."""
    return 0 <= other < len(home) and home[stage] != home[other]


def send_after(action: Action, home: Sequence[int]) -> Action | None:
    """The message that an action makes, if it makes one."""
    kind, stage, microbatch = action
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
    """What each rank does. home: the rank of each stage. microbatches: their number. actions: a list per rank.

    Nothing is checked here: `dure.parallel.pipeline.validate.check` says whether it is a schedule that can run.
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
        return tuple(tuple(action for action in actions if action.computes) for actions in self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, home in enumerate(self.home) if home == rank)

    def text(self) -> str:
        """As a file has it: name, homes, number of micro-batches and then a line of actions for each rank."""
        head = [f"schedule: {self.name}", f"home: {_row(self.home)}", f"microbatches: {self.microbatches}"]
        lists = [f"rank {rank}: {_row(actions)}" for rank, actions in enumerate(self.actions)]
        return "\n".join([*head, *lists]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule in a text as `text` writes it; empty lines, and what is behind a #, are left out.

        Transfers are as written: `with_transfers` adds them to a schedule that has none. Raises ValueError for what is
        missing, there twice, or not understood.
        """
        fields: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            key, colon, value = (part.strip() for part in line.partition(":"))
            if not line:
                continue
            if not colon or not re.fullmatch(r"schedule|home|microbatches|rank [0-9]+", key):
                raise ValueError(
                    f"line {number}: {line[:40]!r} is not understood: write 'schedule:', 'home:', 'microbatches:' "
                    "or 'rank 0:' and what belongs there"
                )
            if key in fields:
                raise ValueError(f"line {number}: {key!r} is there twice: keep one of them")
            fields[key] = value
        return _of_fields(fields)


def _row(items: Iterable[object]) -> str:
    return " ".join(map(str, items))


def _of_fields(fields: dict[str, str]) -> Schedule:
    ranks = sum(key.startswith("rank ") for key in fields)
    for key in ("schedule", "home", "microbatches", *(f"rank {rank}" for rank in range(max(1, ranks)))):
        if key not in fields:
            raise ValueError(f"the schedule has no line {key + ':'!r}: add it")
    home, microbatches = fields["home"].split(), fields["microbatches"]
    for word in [*home, microbatches]:
        if not re.fullmatch("[0-9]+", word):
            raise ValueError(f"{word!r} is no number: 'home:' has the rank of each stage, 'microbatches:' one number")
    actions = tuple(tuple(map(Action.parse, fields[f"rank {rank}"].split())) for rank in range(ranks))
    return Schedule(fields["schedule"], tuple(map(int, home)), int(microbatches), actions)


def with_transfers(name: str, home: Sequence[int], microbatches: int, computing: Computing) -> Schedule:
    """The schedule that computes so, with the messages this needs.

    Each is sent right after it was made and received right before it is needed, or earlier: ahead of it come those that
    the same rank has sent before it, so that any two ranks' messages arrive in the order in which they are sent. That
    costs no time, as they were made earlier too, and adds no deadlock.
    """
    coming: dict[tuple[int, int], deque[Action]] = defaultdict(deque)  # receives, as (from, to) has sent them
    for rank, actions in enumerate(computing):
        for action in actions:
            if send := send_after(action, home):
                coming[rank, home[send.counterpart.stage]].append(send.counterpart)
    made = {receive for receives in coming.values() for receive in receives}
    lists = []
    for rank, actions in enumerate(computing):
        done: list[Action] = []
        received: set[Action] = set()
        for action in actions:
            needed = receive_before(action, home)
            while needed and needed not in received:
                queue = coming[home[needed.counterpart.stage], rank]
                receive = queue.popleft() if needed in made else needed
                received.add(receive)
                done.append(receive)
            done.append(action)
            if send := send_after(action, home):
                done.append(send)
        lists.append(tuple(done))
    return Schedule(name, tuple(home), microbatches, tuple(lists))


def _forwards(stage: int, microbatches: int) -> list[Action]:
    return [Action("forward", stage, number) for number in range(microbatches)]


def _backwards(stage: int, microbatches: int) -> list[Action]:
    return [Action("backward", stage, number) for number in range(microbatches)]


def _alternating(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = [
        action for pair in zip(forwards[warm_up:], backwards[: len(forwards) - warm_up], strict=True) for action in pair
    ]
    return [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]


def naive(ranks: int) -> Computing:
    """One micro-batch, the whole batch: at any time one rank computes."""
    return gpipe(ranks, 1)


def gpipe(ranks: int, microbatches: int) -> Computing:
    """All forwards, then all backwards, the last micro-batch's first."""
    return [[*_forwards(rank, microbatches), *reversed(_backwards(rank, microbatches))] for rank in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int) -> Computing:
    """p - rank - 1 forwards to warm up, then a forward and a backward in turn: a rank holds p - rank activations."""
    return [
        _alternating(_forwards(rank, microbatches), _backwards(rank, microbatches), ranks - rank - 1)
        for rank in range(ranks)
    ]


def interleaved(ranks: int, microbatches: int, stages_per_rank: int) -> Computing:
    """1F1B with v stages a rank, s on rank s mod p, each for p micro-batches in turn.

    A rank warms up with 2(p-rank-1) + (v-1)p forwards. If p does not divide m, it is the schedule of the next multiple
    of p without the micro-batches that are too many: each needs its own only, so no action waits for one left out.
    With v = 1 it is 1F1B.
    """
    if stages_per_rank == 1:
        return one_f_one_b(ranks, microbatches)
    turns = [
        (chunk, first + number)
        for first in range(0, microbatches, ranks)
        for chunk in range(stages_per_rank)
        for number in range(ranks)
    ]
    computing = []
    for rank in range(ranks):
        forwards = [Action("forward", chunk * ranks + rank, number) for chunk, number in turns]
        backwards = [
            Action("backward", (stages_per_rank - 1 - chunk) * ranks + rank, number) for chunk, number in turns
        ]
        actions = _alternating(forwards, backwards, 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks)
        computing.append([action for action in actions if action.microbatch < microbatches])
    return computing


def zero_bubble(ranks: int, microbatches: int) -> Computing:
    """ZB-H1: 1F1B with I in B's place, and W `rank` micro-batches behind it: each rank holds p activations.

    The gradient that the rank before waits for leaves earlier by W, and what W would have delayed is done at the end,
    where 1F1B waits.
    """
    return [_with_weights_later(actions, delay=rank) for rank, actions in enumerate(one_f_one_b(ranks, microbatches))]


def _with_weights_later(actions: Iterable[Action], delay: int) -> list[Action]:
    done: list[Action] = []
    left: list[Action] = []
    for action in actions:
        if action.kind != "backward":
            done.append(action)
            continue
        done.append(action._replace(kind="input_gradient"))
        left.append(action._replace(kind="weight_gradient"))
        if len(left) > delay:
            done.append(left.pop(0))
    return done + left


def zero_bubble_v(ranks: int, microbatches: int) -> Computing:
    """Two stages a rank, down the ranks and up again (ZB-V); a rank holds at most 2p activations.

    Made by a simulation in which actions take `V_TIMES` and a free rank takes what it can, in this order: forward and
    input gradient of its second stage, forward and input gradient of its first, a weight gradient. Of the places for
    activations the first stage leaves one free. So nothing deadlocks: the second stage of the oldest micro-batch that
    is not done always finds a place, once the weight gradients of older ones, which wait for nobody, are there.
    """
    begun, done = ({kind: [0] * 2 * ranks for kind in V_TIMES} for _ in range(2))  # micro-batches of each stage
    computing: list[list[Action]] = [[] for _ in range(ranks)]
    ends: list[tuple[int, int, Kind, int]] = []  # when, on which rank, of what, in which stage
    free, clock = set(range(ranks)), 0
    while min(done["weight_gradient"]) < microbatches:
        for rank in sorted(free):
            for kind, stage in _wishes(rank, ranks):
                if _is_ready(kind, stage, ranks, microbatches, begun, done):
                    computing[rank].append(Action(kind, stage, begun[kind][stage]))
                    begun[kind][stage] += 1
                    heappush(ends, (clock + V_TIMES[kind], rank, kind, stage))
                    free.discard(rank)
                    break
        clock = ends[0][0]
        while ends and ends[0][0] == clock:
            _, rank, kind, stage = heappop(ends)
            done[kind][stage] += 1
            free.add(rank)
    return computing


V_TIMES: dict[Kind, int] = {"forward": 5, "input_gradient": 6, "weight_gradient": 4}
"""What `zero_bubble_v` is made for, since a layer of a transformer takes about that: its attention has gradients of
inputs alone. With these it is idle for at most 12 (p-1) of 30 m + 12 (p-1); made for actions that take equally long it
would be idle for a tenth of the time on two ranks, however many micro-batches there are. Where they do take equally
long it takes 6 m + p - 1 of their times if p ≤ 2, and up to p - 2 more otherwise (p ≤ 8, m ≥ 2p)."""

_Counts = dict[Kind, list[int]]


def _wishes(rank: int, ranks: int) -> list[tuple[Kind, int]]:
    first, second = rank, 2 * ranks - 1 - rank
    return [
        ("forward", second),
        ("input_gradient", second),
        ("forward", first),
        ("input_gradient", first),
        ("weight_gradient", first),
        ("weight_gradient", second),
    ]


def _is_ready(kind: Kind, stage: int, ranks: int, microbatches: int, begun: _Counts, done: _Counts) -> bool:
    """Whether the next action of a kind in a stage of a V may begin."""
    number, last = begun[kind][stage], 2 * ranks - 1
    if number == microbatches:
        return False
    if kind == "weight_gradient":
        return done["input_gradient"][stage] > number
    if kind == "input_gradient":
        after = stage == last or done["input_gradient"][stage + 1] > number
        return after and done["forward"][stage] > number
    held = sum(begun["forward"][own] - done["weight_gradient"][own] for own in (stage, last - stage))
    room = held < 2 * ranks - (stage < ranks)
    return room and (stage == 0 or done["forward"][stage - 1] > number)


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Homes of 2p stages: 0 … p-1, p-1 … 0."""
    return (*range(ranks), *reversed(range(ranks)))


def round_robin(ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Homes of v·p stages: 0 … p-1, and again."""
    return tuple(range(ranks)) * stages_per_rank


def in_order(home: Sequence[int], microbatches: int) -> Schedule:
    """All forward, then all backward, for stages that live anywhere."""
    computing = [
        [
            *(action for stage, rank in enumerate(home) if rank == own for action in _forwards(stage, microbatches)),
            *(
                a
                for stage, rank in reversed([*enumerate(home)])
                if rank == own
                for a in _backwards(stage, microbatches)
            ),
        ]
        for own in range(max(home) + 1)
    ]
    return with_transfers("in-order", home, microbatches, computing)


def forward_only(home: Sequence[int], microbatches: int) -> Schedule:
    """Forwards alone, for evaluation: of those that can be next a rank takes the one nearest to the end."""
    order = sorted(
        (Action("forward", stage, number) for stage in range(len(home)) for number in range(microbatches)),
        key=lambda action: (action.stage + action.microbatch, action.microbatch),
    )
    computing = [[action for action in order if home[action.stage] == rank] for rank in range(max(home) + 1)]
    return with_transfers("forward-only", home, microbatches, computing)


SCHEDULES: dict[str, str] = {
    "naive": "the whole batch through one rank after the other",
    "gpipe": "all forwards, then all backwards; holds every micro-batch's activations",
    "1f1b": "forward and backward in turn; idle as GPipe, holds at most one micro-batch a rank",
    "interleaved": "1F1B with several stages a rank: less idle, more messages",
    "zero-bubble": "1F1B with the gradients of weights apart, where ranks would wait (ZB-H1)",
    "zero-bubble-v": "gradients apart, two stages a rank, down the ranks and up again (ZB-V)",
}
"""Schedules: name to summary."""

_ONE_STAGE: dict[str, Callable[[int, int], Computing]] = {
    "naive": gpipe,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero-bubble": zero_bubble,
}


def make(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """The schedule of that name, with transfers. Raises ValueError for a name or numbers for which there is none."""
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}{suggestion(name, SCHEDULES)}")
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
        if number < 1:
            raise ValueError(f"{what} is {number}: give 1 or more")
    if name == "naive" and microbatches != 1:
        raise ValueError(f"the naive schedule has one micro-batch, not {microbatches}: give 1, or take 'gpipe'")
    if name == "zero-bubble-v" and stages_per_rank != 2:
        raise ValueError(f"zero-bubble-v has two stages a rank, not {stages_per_rank}: give stages_per_rank=2")
    if name in _ONE_STAGE and stages_per_rank != 1:
        raise ValueError(
            f"{name} has one stage a rank, not {stages_per_rank}: give stages_per_rank=1, or take 'interleaved'"
        )
    if name == "zero-bubble-v":
        return with_transfers(name, v_shaped(ranks), microbatches, zero_bubble_v(ranks, microbatches))
    if name == "interleaved":
        computing = interleaved(ranks, microbatches, stages_per_rank)
        return with_transfers(name, round_robin(ranks, stages_per_rank), microbatches, computing)
    return with_transfers(name, round_robin(ranks), microbatches, _ONE_STAGE[name](ranks, microbatches))

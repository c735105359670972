"""What the report knows of runs: what their folders say, as data (`dure.report.read` makes it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

CLOCKS = {"virtual_seconds": "virtual", "wall_seconds": "wall"}
"""What a history calls the time on a federation's clock, and which time that is."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of history.jsonl.

    The counters of a step line are rank 0's, of an evaluation line everybody's; the metrics of a
    step line are what the strategy says about it, such as residuals.
    """

    step: float
    epoch: float | None
    seconds: float | None
    loss: float | None
    bytes_sent: float | None
    compute: float | None
    communication: float | None
    idle: float | None
    peak_memory: float | None
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class Worker:
    """One rank, thread, client or server.

    Where its time went, in seconds, and the bytes that passed through it.
    """

    name: str
    compute: float
    communication: float
    idle: float
    sent: float = 0.0
    received: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all three kinds."""
        return self.compute + self.communication + self.idle


@dataclass(frozen=True, slots=True)
class Span:
    """One thing a lane did; `start` and `duration` in milliseconds since the run began.

    The name ends with the step.
    """

    lane: int
    name: str
    category: str
    start: float
    duration: float
    step: int | None = None


@dataclass(frozen=True)
class Trace:
    """The timeline: names of lanes, spans in order of their starts, and how many were not kept."""

    lanes: Mapping[int, str]
    spans: Sequence[Span]
    dropped: int


@dataclass(frozen=True)
class Partition:
    """How examples lie with clients.

    `histograms`: clients x classes, or None where there are no labels. `names`: of the clients,
    None where they are numbers alone.
    """

    description: str
    counts: Sequence[int]
    histograms: Sequence[Sequence[int]] | None
    classes: Sequence[str]
    names: Sequence[str] | None = None

    def called(self, client: int) -> str:
        """What a client is called in figures."""
        return str(client) if self.names is None else self.names[client]


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline.

    begins: the module in which it begins. there, back: bytes of a full step over the boundary to
    the next stage, values there and gradients back.
    """

    number: int
    begins: str
    parameters: int
    there: int
    back: int


@dataclass(frozen=True)
class Rank:
    """What a rank of a mesh told of itself.

    at: data, pipeline and tensor index. held: bytes of parameters, gradients, optimizer and
    buffers. inside: seconds of collectives in its layers, per step.
    """

    name: str
    at: tuple[int, int, int]
    stages: Sequence[Stage]
    held: Mapping[str, float]
    peak_memory: float | None
    inside: float | None
    schedule: str | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a client of a federation was asked in a round.

    began, ended: on the federation's clock. outcome: "accepted", "late", or why there was no
    update.
    """

    client: int
    round: int
    began: float
    ended: float
    outcome: str


@dataclass(frozen=True, slots=True)
class Sent:
    """A client's update, in the step to the model of `round` + 1.

    Its norm, and the cosine between it and that step; None where they are no numbers. lies: whether
    the client is an attacker.
    """

    round: int
    client: int
    lies: bool
    norm: float | None
    cosine: float | None


@dataclass(frozen=True, slots=True)
class Presence:
    """A client was there; from and to on the federation's clock."""

    client: int
    began: float
    ended: float


@dataclass(frozen=True)
class Member:
    """A client on a network.

    examples: None where nobody is told. machine: how it computes, in words. differs: in what it
    computes otherwise than the server.
    """

    client: int
    name: str
    examples: int | None
    held_out: int
    machine: str | None
    differs: Sequence[str]


@dataclass(frozen=True)
class Cost:
    """Of a simulated federation, next to its data.

    nbytes: both ways. joules: of its clients. raw_bytes, raw_seconds, raw_joules: of uploading the
    data. break_even: the round after which more was sent than the data are. Joules are None where
    they are not counted.
    """

    nbytes: float
    joules: float | None
    raw_bytes: float
    raw_seconds: float
    raw_joules: float | None
    break_even: float | None


@dataclass(frozen=True)
class Federation:
    """What a federation told of itself.

    assignments and updates are the first ones of the run, outcomes, staleness and turns of all of
    it: outcome -> assignments, staleness -> updates, client -> updates. by_client: metric -> a
        value for each client measured, which are `clients`.
    not_measured: client -> why it could not measure. out: clients that were not asked any more,
        since they had used up what they might transfer.
    why: it was this engine. refusals: reason -> updates that the server left out.
    Of clients on a network: there: who was there when. cohort: who they are. bits: "same" or
        "close" to those of a simulation, and differs: by what close. refused: client -> its updates
        that the server left out. exposure: who could learn what, in words.
    cost: what clients have spent, and what uploading their data would cost; None where nobody says.
    left: who was not there at the end, client -> the first round without it. took_part: how many
        clients there were, and which shares of clients and examples the newest model is of.
    """

    engine: str | None
    assignments: Sequence[Assignment]
    outcomes: Mapping[str, int]
    staleness: Mapping[int, int]
    turns: Mapping[int, int]
    updates: Sequence[Sent]
    by_client: Mapping[str, Sequence[float | None]]
    why: str | None = None
    refusals: Mapping[str, int] = field(default_factory=dict)
    clients: Sequence[int] = ()
    not_measured: Mapping[int, str] = field(default_factory=dict)
    out: Sequence[int] = ()
    there: Sequence[Presence] = ()
    cohort: Sequence[Member] = ()
    bits: str | None = None
    differs: Sequence[str] = ()
    refused: Mapping[int, int] = field(default_factory=dict)
    cost: Cost | None = None
    exposure: Sequence[tuple[str, str]] = ()
    left: Mapping[int, int] = field(default_factory=dict)
    took_part: Mapping[str, float] = field(default_factory=dict)

    def name_of(self, client: int) -> str | None:
        """What a client on a network calls itself."""
        return next((one.name for one in self.cohort if one.client == client), None)


@dataclass(frozen=True, slots=True)
class Held:
    """A shard: the keys start … stop-1 of a vector. owner: who has it; None where it is lost."""

    vector: int
    start: int
    stop: int
    nbytes: int | None
    owner: int | None


@dataclass(frozen=True, slots=True)
class Busy:
    """A worker computed, or a server's link sent, in seconds of a virtual clock.

    clock: the worker's.
    """

    who: str
    category: str
    began: float
    seconds: float
    clock: int | None


@dataclass(frozen=True)
class Servers:
    """What a parameter server told of itself.

    staleness: how many clocks weights were behind -> how often; counts: what it counts. pushes: of
    all workers. push_bytes: of one that is compressed; None where it is not. lost: who was given
    up -> why. busy: the first ones, under a virtual clock.
    """

    shards: Sequence[Held]
    staleness: Mapping[int, int]
    counts: str
    pushes: int
    push_bytes: int | None
    lost: Mapping[str, str]
    busy: Sequence[Busy]

    @property
    def pulls(self) -> int:
        """Of all workers."""
        return sum(self.staleness.values())

    @property
    def nbytes(self) -> int | None:
        """Of the weights; None where a shard does not say its own."""
        sizes = [shard.nbytes for shard in self.shards]
        return None if None in sizes else sum(size for size in sizes if size is not None)


class Doing(NamedTuple):
    """Who did what: computed with a part of the model, or its link was busy.

    Seconds of the run's clock.
    """

    who: str
    what: str
    began: float
    seconds: float


class Sort(NamedTuple):
    """Messages of a kind. largest: bytes of the largest. formula: what it is of; None unknown."""

    kind: str
    messages: int
    nbytes: int
    largest: int
    formula: int | None


@dataclass(frozen=True)
class Divided:
    """What a run of split learning told of itself.

    at: where the model is cut. shares: of its parts in the operations. weights: that they train.
    flops: of a step of so many
    examples with the whole model. first, newest: the beginnings of two rounds, the newest of which
    is `round`, from 0.
    """

    at: Sequence[str]
    shares: Sequence[float]
    weights: Sequence[int]
    examples: int
    flops: float | None
    first: Sequence[Doing]
    newest: Sequence[Doing]
    round: int
    sorts: Sequence[Sort]


@dataclass(frozen=True)
class Leakage:
    """Who could learn what, and what the meters of the newest round say, if there were any."""

    defence: str
    exposure: str
    measured: Mapping[str, float]


@dataclass(frozen=True)
class Attacked:
    """What an attack got of updates.

    sum: how many of them it saw added up. change: what was done to them before. examples: of a sum,
    in the mean. figures: name -> mean, and both ends of its interval. why: it could not be made.
    picture: originals above what was rebuilt, as a data URI.
    """

    attack: str
    sum: int
    change: str
    examples: float | None
    figures: Mapping[str, Sequence[float]]
    why: str | None
    picture: str | None


@dataclass(frozen=True)
class Audit:
    """What `dure audit` has found out about a run.

    guess: how near a guess without updates comes. sums_only: whether the server had no single ones.
    canaries: what they told; promised: epsilon and delta by the accountant; both may be empty.
    """

    rows: Sequence[Attacked]
    guess: Mapping[str, float]
    sums_only: bool
    canaries: Mapping[str, float]
    promised: Mapping[str, float]


class Seen(NamedTuple):
    """A test example. picture: a data URI. label, said: numbers of classes."""

    picture: str
    example: int
    label: int
    said: int


@dataclass(frozen=True)
class Answers:
    """What the trained model answers.

    confusion: test examples by their class, and by the class that the model says. examples: so many
    of the test examples, of which there are `of`.
    """

    classes: Sequence[str]
    confusion: Sequence[Sequence[int]]
    examples: int
    of: int
    seen: Sequence[Seen]


@dataclass(frozen=True)
class Target:
    """Steps or rounds until `metric` was at `value`; `reached` is None if it never was."""

    metric: str
    value: float
    reached: float | None


@dataclass(frozen=True)
class BestModel:
    """The model that was chosen by a metric of the validation set, and what was measured of it."""

    step: float
    monitor: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Result:
    """What a run came to: `summary.json`, or what the history of a killed run tells of it.

    shuffle: bytes a worker that it sent of examples, and seconds; None where nobody says. chosen:
    the best model, where one was chosen. mean_of: what the measured model is the mean of, where
    nobody has that model. baseline: metrics of saying the most frequent class.
    """

    unit: str
    world: str | None
    ended: str | None
    steps: float | None
    epochs: float | None
    seconds: float | None
    final: Mapping[str, float]
    best: Mapping[str, float]
    train_loss: float | None
    bytes_per_worker: float | None
    peak_memory: float | None
    everyone: Worker | None
    workers: Sequence[Worker]
    targets: Sequence[Target]
    shuffle: tuple[float, float] | None = None
    chosen: BestModel | None = None
    mean_of: str | None = None
    baseline: Mapping[str, float] = field(default_factory=dict)

    def metric(self, key: str) -> float | None:
        """The metric of the best model, where one was chosen; else that of the last."""
        measured = self.final if self.chosen is None else self.chosen.metrics
        return measured.get(key)


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path
    label: str
    config: Mapping[str, Any]
    steps: Sequence[Line]
    evaluations: Sequence[Line]
    result: Result
    trace: Trace | None
    partition: Partition | None
    notes: Sequence[str]
    ranks: Sequence[Rank] = ()
    federation: Federation | None = None
    servers: Servers | None = None
    divided: Divided | None = None
    leakage: Leakage | None = None
    promises: Sequence[Any] = ()
    """Of differential privacy, as the run told them."""
    audit: Audit | None = None
    answers: Answers | None = None
    goes_on: bool = False
    """Whether somebody trains it just now."""


@dataclass(frozen=True)
class Runs:
    """All the runs of a report.

    failed: name -> reason, of a comparison's runs that came to nothing.
    """

    runs: Sequence[Run]
    failed: Mapping[str, str] = field(default_factory=dict)


def time_of(line: Line) -> float | None:
    """The time on the federation's clock at a step; None where there is no such clock."""
    told = (line.metrics.get(key) for key in CLOCKS)
    return next((now for now in told if now is not None), None)


def virtual_seconds(run: Run) -> float | None:
    """What a simulation's own clock shows at its end; None of a run in real time."""
    if not is_simulated(run):
        return None
    return next((now for line in reversed(run.steps) if (now := time_of(line)) is not None), None)


def is_simulated(run: Run) -> bool:
    """Whether its workers have virtual seconds: they compare with no machine's."""
    return clock_of(run) == "virtual"


def clock_of(run: Run) -> str | None:
    """Whose time the federation's clock shows: "virtual" or "wall"; None without such a clock."""
    keys = {key for line in run.steps[-1:] for key in line.metrics}
    return next((words for key, words in CLOCKS.items() if key in keys), None)

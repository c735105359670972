"""Data of runs in the report, as read from their folders by `dure.report.read`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dure.record import idleness
from dure.record.largest_sender import LargestSender
from dure.record.training_amount import TrainingAmount

CLOCKS = {"virtual_seconds": "virtual", "wall_seconds": "wall"}
"""Keys of a history for the time on a federation's clock, and the kind of that time."""


@dataclass(frozen=True, slots=True)
class HistoryLine:
    """A line of history.jsonl.

    The counters of a step line are rank 0's, of an evaluation line those of all workers; the
    metrics of a step line are the strategy's numbers, such as residuals.
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
    device_memory: float | None = None


@dataclass(frozen=True)
class WorkerTime:
    """A rank, thread, client or server: its time in seconds by kind, and its bytes."""

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

    @property
    def idle_share(self) -> float | None:
        """Idle share of all time; None without any time."""
        return idleness.idle_share(self.compute + self.communication, self.idle)


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """A span of a lane; `start` and `duration` in milliseconds since the run began.

    The name ends with the step.
    """

    lane: int
    name: str
    category: str
    start: float
    duration: float
    step: int | None = None


@dataclass(frozen=True)
class RunTimeline:
    """The timeline: names of lanes, spans in order of start, and the number of dropped spans."""

    lanes: Mapping[int, str]
    spans: Sequence[TimelineSpan]
    dropped: int


@dataclass(frozen=True)
class PartitionSummary:
    """Division of examples among clients.

    `histograms`: clients x classes, or None without labels. `names`: of the clients, None if the
    clients are only numbered.
    """

    description: str
    counts: Sequence[int]
    histograms: Sequence[Sequence[int]] | None
    classes: Sequence[str]
    names: Sequence[str] | None = None

    def called(self, client: int) -> str:
        """Return a client's name in figures."""
        return str(client) if self.names is None else self.names[client]


@dataclass(frozen=True)
class StageFacts:
    """A stage of a pipeline.

    begins: first module of the stage. there, back: bytes per full step over the boundary to the
    next stage, of values forward and of gradients backward.
    """

    number: int
    begins: str
    parameters: int
    there: int
    back: int


@dataclass(frozen=True)
class RankFacts:
    """Facts of a rank of a mesh.

    at: data, pipeline and tensor index. held: bytes of parameters, gradients, optimizer and
    buffers. layer_collective_seconds: seconds per step in the collectives of divided
    layers, as in tensor parallelism; None if no layer is divided.
    """

    name: str
    at: tuple[int, int, int]
    stages: Sequence[StageFacts]
    held: Mapping[str, float]
    peak_memory: float | None
    layer_collective_seconds: float | None
    schedule: str | None


@dataclass(frozen=True, slots=True)
class AssignmentSpan:
    """An assignment of a client in a round.

    began, ended: on the federation's clock. outcome: "accepted", "late", or the reason for a
    missing update.
    """

    client: int
    round: int
    began: float
    ended: float
    outcome: str


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """A client's update, part of the step to the model of `round` + 1.

    norm: of the update. cosine: between the update and that step. Both are None if not finite.
    lies: whether the client is malicious.
    """

    round: int
    client: int
    lies: bool
    norm: float | None
    cosine: float | None


@dataclass(frozen=True, slots=True)
class PresenceSpan:
    """Time in which a client was connected, on the federation's clock."""

    client: int
    began: float
    ended: float


@dataclass(frozen=True)
class ClientFacts:
    """A client on a network.

    examples: None if the number is protected. machine: the machine's description, in words.
    differs: differences between its computation and the server's.
    """

    client: int
    name: str
    examples: int | None
    held_out: int
    machine: str | None
    differs: Sequence[str]


@dataclass(frozen=True)
class FederationCost:
    """Cost of a simulated federation, compared with uploading its data.

    Args:
        nbytes: in both directions.
        joules: of its clients.
        raw_bytes: of uploading the data.
        raw_seconds: of uploading the data.
        raw_joules: of uploading the data.
        break_even: round after which more bytes were sent than the data have; None if not reached.

    Joules are None if they are not counted.
    """

    nbytes: float
    joules: float | None
    raw_bytes: float
    raw_seconds: float
    raw_joules: float | None
    break_even: float | None


@dataclass(frozen=True)
class FederationFacts:
    """Facts of a federation.

    Args:
        engine: engine of the simulated clients.
        assignments: the first assignments of the run.
        outcomes: number of assignments by outcome, over the whole run.
        staleness: number of updates by staleness, over the whole run.
        turns: number of updates by client, over the whole run.
        updates: the first updates of the run.
        by_client: metric -> a value for each of `clients`.
        why: reason for the choice of the engine.
        refusals: reason -> number of updates that the server rejected.
        clients: clients with metrics.
        not_measured: client -> reason for missing metrics.
        out: clients without further assignments, since their transfer budget is used up.
        there: connection times of clients on a network.
        cohort: clients on a network.
        bits: on a network, "same" or "close" to the bits of a simulation.
        differs: reasons for "close".
        refused: client -> number of its updates that the server rejected.
        cost: energy and bytes, and those of uploading the data; None if unknown.
        exposure: (party, data that it could learn), in words.
        left: clients missing at the end -> first round without the client.
        took_part: number of clients, and the shares of clients and examples in the newest model.
    """

    engine: str | None
    assignments: Sequence[AssignmentSpan]
    outcomes: Mapping[str, int]
    staleness: Mapping[int, int]
    turns: Mapping[int, int]
    updates: Sequence[UpdateRecord]
    by_client: Mapping[str, Sequence[float | None]]
    why: str | None = None
    refusals: Mapping[str, int] = field(default_factory=dict)
    clients: Sequence[int] = ()
    not_measured: Mapping[int, str] = field(default_factory=dict)
    out: Sequence[int] = ()
    there: Sequence[PresenceSpan] = ()
    cohort: Sequence[ClientFacts] = ()
    bits: str | None = None
    differs: Sequence[str] = ()
    refused: Mapping[int, int] = field(default_factory=dict)
    cost: FederationCost | None = None
    exposure: Sequence[tuple[str, str]] = ()
    left: Mapping[int, int] = field(default_factory=dict)
    took_part: Mapping[str, float] = field(default_factory=dict)

    def name_of(self, client: int) -> str | None:
        """Return the name of a client on a network; None if it is unknown."""
        return next((one.name for one in self.cohort if one.client == client), None)


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """A shard: the keys start … stop-1 of a vector. owner: its server; None if it is lost."""

    vector: int
    start: int
    stop: int
    nbytes: int | None
    owner: int | None


@dataclass(frozen=True, slots=True)
class BusySpan:
    """Busy time of a worker's computation or a server's link, in seconds of a virtual clock.

    clock: the worker's logical clock.
    """

    who: str
    category: str
    began: float
    seconds: float
    clock: int | None


@dataclass(frozen=True)
class ParameterServerFacts:
    """Facts of a parameter server.

    Args:
        shards: shards with their owners.
        staleness: clocks that weights were behind -> number of pulls.
        counts: unit of the staleness.
        pushes: of all workers.
        push_bytes: of a compressed push; None without compression.
        lost: lost member -> reason.
        busy: first busy times, under a virtual clock.
    """

    shards: Sequence[ShardFacts]
    staleness: Mapping[int, int]
    counts: str
    pushes: int
    push_bytes: int | None
    lost: Mapping[str, str]
    busy: Sequence[BusySpan]

    @property
    def pulls(self) -> int:
        """Pulls of all workers."""
        return sum(self.staleness.values())

    @property
    def nbytes(self) -> int | None:
        """Bytes of the weights; None if the size of a shard is unknown."""
        sizes = [shard.nbytes for shard in self.shards]
        return None if None in sizes else sum(size for size in sizes if size is not None)


class PartySpan(NamedTuple):
    """Busy time of a party: computation with a part of the model, or use of its link.

    Seconds of the run's clock.
    """

    who: str
    what: str
    began: float
    seconds: float


class MessageCounts(NamedTuple):
    """Messages of a kind. largest: bytes of the largest. formula: its predicted bytes, or None."""

    kind: str
    messages: int
    nbytes: int
    largest: int
    formula: int | None


@dataclass(frozen=True)
class SplitFacts:
    """Facts of a run of split learning.

    Args:
        at: places of the cuts.
        shares: share of each part in the operations.
        weights: trainable weights of each part.
        examples: examples of a step.
        flops: operations of a step of `examples` with the whole model.
        first: beginning of the first round.
        newest: beginning of the newest round.
        round: number of the newest round, from 0.
        sorts: messages by kind.
    """

    at: Sequence[str]
    shares: Sequence[float]
    weights: Sequence[int]
    examples: int
    flops: float | None
    first: Sequence[PartySpan]
    newest: Sequence[PartySpan]
    round: int
    sorts: Sequence[MessageCounts]


@dataclass(frozen=True)
class LeakageFacts:
    """Exposure of the data in split learning, and the newest leakage metrics, if any."""

    defence: str
    exposure: str
    measured: Mapping[str, float]


@dataclass(frozen=True)
class AttackReport:
    """Result of an attack on updates.

    Args:
        attack: name of the attack.
        sum: number of updates in the attacked sum.
        change: transformation of the updates before the attack.
        examples: mean number of examples of a sum.
        figures: name -> mean, and both ends of its confidence interval.
        why: reason if the attack was impossible, else None.
        picture: originals above their reconstructions, as a data URI.
    """

    attack: str
    sum: int
    change: str
    examples: float | None
    figures: Mapping[str, Sequence[float]]
    why: str | None
    picture: str | None


@dataclass(frozen=True)
class AuditReport:
    """Result of `dure audit` on a run.

    guess: quality of a guess without updates. sums_only: whether the server got sums only.
    canaries: result of the canaries; promised: epsilon and delta by the accountant; both may be
    empty.
    """

    rows: Sequence[AttackReport]
    guess: Mapping[str, float]
    sums_only: bool
    canaries: Mapping[str, float]
    promised: Mapping[str, float]


class ShownExample(NamedTuple):
    """A test example. picture: a data URI. label, said: true and predicted class indices."""

    picture: str
    example: int
    label: int
    said: int


@dataclass(frozen=True)
class PredictionSummary:
    """Predictions of the trained model.

    confusion: test examples by true class and predicted class. examples: number of evaluated
    examples among the `of` test examples.
    """

    classes: Sequence[str]
    confusion: Sequence[Sequence[int]]
    examples: int
    of: int
    seen: Sequence[ShownExample]


@dataclass(frozen=True)
class TargetResult:
    """Steps or rounds until `metric` was at `value`; `reached` is None if it never was."""

    metric: str
    value: float
    reached: float | None


@dataclass(frozen=True)
class BestModel:
    """The model chosen by a metric of the validation set, and its metrics."""

    step: float
    monitor: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class RunResult:
    """Result of a run: from `summary.json`, or from the history of a killed run.

    shuffle: bytes of examples that a worker sent, and seconds; None if unknown. chosen: the best
    model, if one was chosen. mean_of: name of the models whose mean is measured, if no client has
    that mean. device_memory: peak allocated bytes of an accelerator. mfu: model FLOPs utilisation,
    a share. baseline: metrics of always predicting the most frequent class.
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
    everyone: WorkerTime | None
    workers: Sequence[WorkerTime]
    targets: Sequence[TargetResult]
    shuffle: tuple[float, float] | None = None
    chosen: BestModel | None = None
    mean_of: str | None = None
    device_memory: float | None = None
    mfu: float | None = None
    baseline: Mapping[str, float] = field(default_factory=dict)
    amount: TrainingAmount = field(default_factory=TrainingAmount)
    largest_sender: LargestSender | None = None
    """Worker that sent the most, if it sent more than the mean over workers."""

    def metric(self, key: str) -> float | None:
        """Return the metric of the best model if one was chosen, else of the last model."""
        measured = self.final if self.chosen is None else self.chosen.metrics
        return measured.get(key)


@dataclass(frozen=True)
class ReportedRun:
    """A run folder."""

    folder: Path
    label: str
    config: Mapping[str, Any]
    steps: Sequence[HistoryLine]
    evaluations: Sequence[HistoryLine]
    result: RunResult
    trace: RunTimeline | None
    partition: PartitionSummary | None
    notes: Sequence[str]
    ranks: Sequence[RankFacts] = ()
    federation: FederationFacts | None = None
    servers: ParameterServerFacts | None = None
    divided: SplitFacts | None = None
    leakage: LeakageFacts | None = None
    promises: Sequence[Any] = ()
    """Promises of differential privacy, as the run reported them."""
    audit: AuditReport | None = None
    answers: PredictionSummary | None = None
    goes_on: bool = False
    """Whether a process is training the run now."""


@dataclass(frozen=True)
class ReportedRuns:
    """All runs of a report.

    failed: name -> reason, of a comparison's failed runs.
    """

    runs: Sequence[ReportedRun]
    failed: Mapping[str, str] = field(default_factory=dict)


def time_of(line: HistoryLine) -> float | None:
    """Return the time on the federation's clock at a step; None without such a clock."""
    told = (line.metrics.get(key) for key in CLOCKS)
    return next((now for now in told if now is not None), None)


def virtual_seconds(run: ReportedRun) -> float | None:
    """Return a simulation's own clock at its end; None for a run in real time."""
    if not is_simulated(run):
        return None
    return next((now for line in reversed(run.steps) if (now := time_of(line)) is not None), None)


def is_simulated(run: ReportedRun) -> bool:
    """Return whether times are virtual seconds, which are not comparable with real seconds."""
    return clock_of(run) == "virtual"


def clock_of(run: ReportedRun) -> str | None:
    """Return "virtual" or "wall", the kind of the federation's clock; None without a clock."""
    keys = {key for line in run.steps[-1:] for key in line.metrics}
    return next((words for key, words in CLOCKS.items() if key in keys), None)

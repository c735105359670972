"""Amount of training of a run: batch, steps, epochs and learning rate; and what differs in them.

    batch    examples of a step of the optimizer
    steps    steps of the optimizer, one after the other, on the way to the trained weights
    epochs   examples that all workers together have trained on, over training examples

Steps that workers make at the same time on copies of the model, which are averaged later, count
once: local SGD has the steps of one worker, FedAvg in each round the steps of one client (of
clients with different numbers of examples, the mean). Steps that move the same weights one after
the other all count, whoever makes them: Hogwild, asynchronous parameter servers, split learning in
turn. docs/measuring.md has the rule of every system.

All values follow from config.json and summary.json. A value that does not follow is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_JOINT = (
    "single-worker",
    "data-parallel",
    "zero",
    "pipeline",
    "tensor-parallel",
    "parallel",
    "layers-per-core",
    "vertical-split",
)
"""Systems in which all workers compute each step together."""

_FROM_ALL_DATA = ("local-sgd", "diloco")
"""Systems that average copies, whose workers divide the batches of all the data."""

_FROM_OWN_DATA = ("parallel-sgd", "admm")
"""Systems that average copies, whose workers have parts of the data."""

_SERVER_STEPS = ("fed-sgd", "byzantine")
"""Federations whose only step in a round is the server's."""

_FEDERATED = (
    "fed-avg",
    "fed-prox",
    "scaffold",
    "fed-avg-m",
    "fed-adagrad",
    "fed-adam",
    "fed-yogi",
    "fed-async",
    "fed-buff",
    "fed-per",
    "ditto",
    "local-only",
    "per-fed-avg",
)
"""Federations whose clients train locally."""

_SPLIT = ("split", "parallel-split", "split-fed")

_CLOSE = 0.01
"""Relative difference up to which steps and epochs count as alike."""

_MOST = 1e15
"""Bound on the numbers of a run, since a folder from elsewhere may contain any."""

_MOST_NAMED = 2
"""Most values, beside the most frequent, that the line names."""


class TrainingAmount(NamedTuple):
    """Amount of training of a run; None for an unknown value.

    local: whether the steps are made on copies of the model that are combined later.
    """

    batch: float | None = None
    local: bool = False
    steps: float | None = None
    epochs: float | None = None
    learning_rate: float | None = None


def training_amount(config: Mapping[str, Any], summary: Mapping[str, Any]) -> TrainingAmount:
    """Return the amount of training of a run.

    config: content of config.json. summary: content of summary.json; of a run that has not ended,
    its `steps`, `epochs` and `numbers`.
    """
    strategy = _mapping(config.get("strategy"))
    epochs = _number(summary.get("epochs"))
    run = _Run(strategy, config, summary)
    batch, local, steps = (
        (None, False, _counted(run)) if "from" in strategy else _rule(run, strategy.get("name"))
    )
    rate = _number(_mapping(_mapping(config.get("task")).get("options")).get("lr"))
    return TrainingAmount(batch, local, steps, epochs, rate)


class _Run:
    """Numbers of a run from which its amount of training follows; None where unknown."""

    def __init__(
        self, strategy: Mapping[str, Any], config: Mapping[str, Any], summary: Mapping[str, Any]
    ) -> None:
        self.strategy = strategy
        self.config = config
        self.numbers = _mapping(summary.get("numbers"))
        self.unit = summary.get("unit")
        self.units = _number(summary.get("steps"))
        epochs = _number(summary.get("epochs"))
        samples = _number(summary.get("samples"))
        self.examples = _at_least_one(_number(config.get("train_examples")))
        if epochs and samples and epochs * _MOST > samples:
            # Also of ranks that have data of their own, and of aligned parties.
            self.examples = _at_least_one(float(round(samples / epochs)))
        if samples is None and epochs is not None and self.examples is not None:
            samples = float(round(epochs * self.examples))
        self.samples = samples
        world = _mapping(config.get("world"))
        self.ranks = _number(world.get("ranks"))
        if self.ranks is None and "from" not in world:
            self.ranks = _number(summary.get("workers"))

    def setting(self, name: str) -> float | None:
        """Return a number of the strategy."""
        return _number(self.strategy.get(name))

    @property
    def joint_batch(self) -> float | None:
        """Examples of a batch of all the data: `batch_size`, or all examples."""
        if self.strategy.get("batch_size") is None:
            return self.examples
        size = _at_least_one(self.setting("batch_size"))
        return size if size is None or self.examples is None else min(size, self.examples)

    def joint_steps(self, share: float = 1.0) -> float | None:
        """Return the batches of all the data in a run. share: share of the run's examples."""
        batch = self.joint_batch
        if not batch or not self.examples or self.samples is None:
            return None
        passes, rest = divmod(round(self.samples * share), self.examples)
        return passes * math.ceil(self.examples / batch) + math.ceil(rest / batch)

    def parts(self) -> list[float] | None:
        """Return the training examples of each client or rank; None if unknown."""
        counts = _mapping(self.config.get("partition")).get("counts")
        if isinstance(counts, list):
            known = [_number(one) for one in counts]
            share = self.setting("held_out") or 0.0
            if None in known or share >= 1:
                return None
            return [
                _trained_on(one, share) for one in known if one is not None and one >= 1
            ] or None
        if self.strategy.get("partition") == "iid" and self.examples and self.ranks:
            # Parts of almost equal size: for the steps of a pass these two sizes are enough.
            sizes = self.examples / self.ranks
            return [float(one) for one in {math.floor(sizes), math.ceil(sizes)} if one] or None
        return None


_Rule = tuple[float | None, bool, float | None]
"""Batch, whether it is local, and steps."""


def _rule(run: _Run, name: object) -> _Rule:
    """Return batch, whether it is local, and steps of a system of dure."""
    if name in _JOINT:
        return run.joint_batch, False, run.units if run.unit == "step" else run.joint_steps()
    if name == "hogwild":
        return run.joint_batch, False, run.joint_steps()
    if name == "parameter-server":
        return _parameter_server(run)
    if name == "downpour":
        return _of_each_part(run, 1.0)[0], False, _number(run.numbers.get("pushes"))
    if name in _FROM_ALL_DATA:
        return _divided(run.joint_batch, run.ranks), True, run.joint_steps()
    if name in _FROM_OWN_DATA:
        batch, passes = _of_each_part(run, run.ranks)
        return batch, True, _local_steps(run, passes)
    if name in _SERVER_STEPS:
        return _mean_of_rounds(run), False, run.units
    if name in _FEDERATED:
        batch, passes = _of_each_part(run, 1.0)
        # A client that ends at a deadline, gets data over time, or needs several batches for a
        # step makes fewer steps than its data have batches.
        arrives = _mapping(run.config.get("world")).get("arrival") not in (None, "still")
        partial = name == "fed-prox" and run.strategy.get("selection") != "uniform"
        if name == "per-fed-avg" or arrives or partial:
            return batch, True, None
        return batch, True, _local_steps(run, passes)
    if name in _SPLIT:
        return _split(run, name)
    return None, False, _counted(run)


def _counted(run: _Run) -> float | None:
    """Return the steps of a run that counts steps; None for rounds."""
    return run.units if run.unit == "step" else None


def _parameter_server(run: _Run) -> _Rule:
    pushes = _number(run.numbers.get("pushes"))
    workers, groups = run.setting("workers"), run.setting("groups") or 1.0
    each = None if workers is None else workers / groups
    if run.setting("staleness") == 0:
        # A step of the servers is the sum of a push of every worker of a group.
        alone = run.joint_steps() if groups == 1 else None
        several = None if pushes is None or not each else pushes / each
        return run.joint_batch, False, alone if alone is not None else several
    return _divided(run.joint_batch, each), False, pushes


def _split(run: _Run, name: object) -> _Rule:
    batch, passes = _of_each_part(run, 1.0)
    epochs = run.setting("local_epochs")
    known = None not in (run.units, epochs) and passes is not None
    turns = (run.units or 0.0) * (epochs or 0.0)
    if name == "parallel-split":
        parts = run.parts()
        together = None if parts is None or batch is None else batch * len(parts)
        return together, False, turns * max(passes or [0.0]) if known else None
    if name == "split":
        return batch, False, turns * sum(passes or []) if known else None
    # In the second version the tail makes more steps than each head.
    averaged = known and run.setting("version") == 1
    return batch, True, turns * _mean(passes or [0.0]) if averaged else None


def _of_each_part(run: _Run, divisor: float | None) -> tuple[float | None, list[float] | None]:
    """Return (mean batch of a worker's step, steps of a pass of each worker over its data).

    divisor: number of workers that share `batch_size`.
    """
    whole = run.strategy.get("batch_size") is None
    batch = None if whole else _divided(_at_least_one(run.setting("batch_size")), divisor)
    parts = run.parts()
    if parts is None or (batch is None and not whole):
        return batch, None
    batches = [part if batch is None else min(batch, part) for part in parts]
    return _mean(batches), [math.ceil(a / b) for a, b in zip(parts, batches, strict=True)]


def _local_steps(run: _Run, passes: Sequence[float] | None) -> float | None:
    """Return the steps of a worker in all rounds. passes: steps of a pass of each worker."""
    given = run.setting("local_steps")
    epochs = run.setting("local_epochs") or 1.0
    if run.units is None:
        return None
    if given is not None:
        return run.units * given
    return None if passes is None else run.units * epochs * _mean(passes)


def _mean_of_rounds(run: _Run) -> float | None:
    return run.samples / run.units if run.units and run.samples is not None else None


def _trained_on(examples: float, share: float) -> float:
    """Return the examples of a client that are not held out (`dure.data.client_part`)."""
    if not share:
        return examples
    return examples - min(max(round(share * examples), 1), examples - 1)


def _at_least_one(value: float | None) -> float | None:
    return None if value is None or value < 1 else value


def _divided(value: float | None, by: float | None) -> float | None:
    return None if value is None or by is None or by < 1 else float(math.ceil(value / by))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    """Return a number as a float; None for anything else, and for numbers that no run has."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known and 0 <= value < _MOST else None  # type: ignore[operator, arg-type]


# Differences between runs, in a line.


def unlike(
    runs: Sequence[tuple[str, TrainingAmount]], write: Callable[..., str] = str.format
) -> str | None:
    """Return a line on settings that matter and differ between runs; None if all are alike.

    For example "Not alike: batch 64, but 32 in local SGD H=16 ×2". Unknown values
    are left out. Steps and epochs are alike up to 1 %.

    runs: label and amount of each. write: function that fills values into a template, and may
    translate the template.
    """
    quantities = (
        ("batch", [(label, one.batch) for label, one in runs], 0.0),
        ("steps", [(label, one.steps) for label, one in runs], _CLOSE),
        ("epochs", [(label, one.epochs) for label, one in runs], _CLOSE),
        ("learning rate", [(label, one.learning_rate) for label, one in runs], 0.0),
    )
    told = [_difference(write(name), values, close, write) for name, values, close in quantities]
    found = [one for one in told if one is not None]
    return write("Not alike: {differences}.", differences="; ".join(found)) if found else None


def _difference(
    name: str,
    values: Sequence[tuple[str, float | None]],
    close: float,
    write: Callable[..., str],
) -> str | None:
    """Return a text on the values of a quantity; None if they are alike."""
    groups: dict[float, list[str]] = {}
    # Seeds of a system share their label.
    for label, value in dict.fromkeys(values):
        if value is None:
            continue
        like = (known for known in groups if abs(known - value) <= close * max(known, value))
        groups.setdefault(next(like, value), []).append(label)
    if len(groups) < 2:
        return None
    usual, *others = sorted(groups, key=lambda value: -len(groups[value]))
    if len(others) <= _MOST_NAMED:
        rest = ", ".join(
            write("{value} in {runs}", value=_text(value), runs=_named(groups[value], write))
            for value in others
        )
        return write("{name} {usual}, but {rest}", name=name, usual=_text(usual), rest=rest)
    counted = sum(map(len, groups.values()))
    return write(
        "{name} {usual} in {often} of {counted} runs, {low} to {high} in the others",
        name=name,
        usual=_text(usual),
        often=len(groups[usual]),
        counted=counted,
        low=_text(min(others)),
        high=_text(max(others)),
    )


def _named(labels: Sequence[str], write: Callable[..., str]) -> str:
    return labels[0] if len(labels) == 1 else write("{count} runs", count=len(labels))


def _text(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"

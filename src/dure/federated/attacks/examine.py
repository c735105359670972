"""Table of all attacks on recorded updates: single updates and sums of m, sent or changed.

A row holds the mean results of an attack over several sums, with 95 % intervals. An attack that
cannot run has a row with the reason.

    labels           share of right labels, read from the last layer
    first-layer      inputs in closed form, if the model begins with a linear layer
    dlg, geiping     inputs by gradient inversion
    membership       members by their loss, against the global model and the client's

Cost: `groups` attacks for each row. The inversions take nearly all of the time (`inversion`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.arguments import at_least, check_ranges
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.federated.attacks.changes import UpdateChange, changed
from dure.federated.attacks.dlg import DLG
from dure.federated.attacks.geiping import Geiping
from dure.federated.attacks.inversion import (
    InputSpace,
    check_second_derivatives,
    space_of,
)
from dure.federated.attacks.labels import (
    FEW,
    PublicExamples,
    counts_of,
    label_counts,
    label_shares,
    labels_of,
    share_right,
)
from dure.federated.attacks.likeness import (
    Interval,
    likeness,
    matched,
    mean_with_interval,
)
from dure.federated.attacks.linear import from_first_layer
from dure.federated.attacks.membership import (
    MOST,
    Membership,
    losses,
    membership,
)
from dure.federated.attacks.observation import (
    AttackedModel,
    ObservedUpdate,
    StepRate,
    observed_sum,
    step_rate_of,
)
from dure.federated.attacks.recording import RecordedUpdate
from dure.randomness.seeds import generator
from dure.tensors.elements import all_finite

INVERSIONS = ("first-layer", "dlg", "geiping")
ATTACKS = ("labels", *INVERSIONS, "membership")

AttackProgress = Callable[[str, int, int], None]
"""Progress callback: description of the current row, sums done, sums in total."""


class Pictures(NamedTuple):
    """Original examples and the rebuilt example of each, both of shape (n, ...)."""

    true: Tensor
    found: Tensor


@dataclass(frozen=True)
class AttackResult:
    """Results of an attack on sums of a size.

    Args:
        attack: name of the attack.
        sum: m, the number of updates in a sum.
        change: description of the changes to the updates.
        groups: number of attacked sums.
        examples: mean number of examples in a sum.
        figures: results by name.
        why: reason that the attack could not run; `figures` is then empty.
        pictures: some originals and rebuilt examples; None for attacks without inputs.
    """

    attack: str
    sum: int
    change: str
    groups: int = 0
    examples: float = 0.0
    figures: Mapping[str, Interval] = field(default_factory=dict)
    why: str | None = None
    pictures: Pictures | None = None


@dataclass(frozen=True)
class Examination:
    """Selection of attacks and of the updates to attack.

    Args:
        sums: sizes m of the sums.
        changes: changes to the updates before the attacks.
        groups: number of attacked sums of each size.
        most: largest number of examples in a sum that the inversions attack.
        iterations: iterations of the inversions.
        attacks: names of the attacks.
        shown: number of pictures to keep for an attack.
        seed: seed of noise, starting points and samples.
    """

    sums: Sequence[int] = (1, 8)
    changes: Sequence[UpdateChange] = (UpdateChange(),)
    groups: int = field(default=4, metadata=at_least(1))
    most: int = field(default=100, metadata=at_least(1))
    iterations: int = field(default=400, metadata=at_least(1))
    attacks: Sequence[str] = ATTACKS
    shown: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sums or min(self.sums) < 1:
            raise ValueError(f"sums is {tuple(self.sums)}, but each has to be 1 or more")
        check_ranges(self)
        unknown = [one for one in self.attacks if one not in ATTACKS]
        if unknown:
            raise ValueError(f"there is no attack {unknown[0]!r}; there are: {', '.join(ATTACKS)}")


def groups_of(
    updates: Sequence[RecordedUpdate], size: int, count: int
) -> list[list[RecordedUpdate]]:
    """Return `count` groups of `size` updates each, spread evenly over the rounds.

    The updates of a group are of the same round. Fewer groups return if there are fewer.
    """
    by_round: dict[int, list[RecordedUpdate]] = {}
    for one in updates:
        by_round.setdefault(one.about.round, []).append(one)
    whole = [
        some[start : start + size]
        for some in by_round.values()
        for start in range(0, len(some) - size + 1, size)
    ]
    few = min(count, len(whole))
    return [whole[place * len(whole) // few] for place in range(few)]


class AttackFigures(NamedTuple):
    """Results of an attack on a single sum: by name, a number for each example or for the sum."""

    figures: Mapping[str, Sequence[float]]
    pictures: Pictures | None = None


class AttackTarget(NamedTuple):
    """Sum of updates to attack.

    Args:
        group: recorded updates of the sum.
        seen: the sum as the attacker observes it.
        why: reason that the sum is no gradient; None if gradients can be matched.
    """

    group: Sequence[RecordedUpdate]
    seen: ObservedUpdate
    why: str | None

    @property
    def truth(self) -> Tensor:
        """Indices of the sum's examples in the training data, ascending."""
        return _examples(self.group)


class Examiner:
    """Runner of the attacks on the updates of a task.

    Args:
        task: task of the recorded run.
        seed: seed of the recorded run.
        examination: attacks and sums.
        final: last model of the run by name; None if the run has no last model yet.
        say: progress callback.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        examination: Examination,
        final: Mapping[str, Tensor] | None = None,
        say: AttackProgress = lambda what, done, of: None,
    ) -> None:
        # Recorded updates are read into the CPU's memory, wherever clients have computed.
        self.task = task.on(torch.device("cpu"))
        self.examination = examination
        self.final = final
        self.say = say
        self.made = seeded_model(task, seed).cpu()
        self.train, self.test = examples_for(task)
        self.model = AttackedModel(self.made, self.task.loss)
        self.public = _public(self.test)

    def rows(self, updates: Sequence[RecordedUpdate]) -> list[AttackResult]:
        """Return a row for each attack, in the order of sizes, changes and attacks.

        Raises ValueError for updates of another model or other data.
        """
        self._check(updates)
        wanted = self.examination
        found: list[AttackResult] = []
        for size in wanted.sums:
            groups = groups_of(updates, size, wanted.groups)
            for change in wanted.changes:
                # Under Poisson sampling a step may have no examples, only noise.
                targets = [self._target(group, change) for group in groups if len(_examples(group))]
                found += [self._row(name, size, change, targets) for name in wanted.attacks]
        if "membership" in wanted.attacks:
            found.append(self._of_the_global_model(updates))
        return found

    def _check(self, updates: Sequence[RecordedUpdate]) -> None:
        self.model.named(updates[0].delta)
        largest = max((max(one.truth.examples, default=0) for one in updates), default=0)
        if largest >= len(self.train):
            raise ValueError(
                f"the updates were computed from example {largest}, but the task has "
                f"{len(self.train)} examples: give the data of the run"
            )

    def _target(self, group: Sequence[RecordedUpdate], change: UpdateChange) -> AttackTarget:
        why = None
        try:
            steps = max(one.about.steps for one in group)
            rate = step_rate_of(self.task, self.made, group[0].about.round, steps)
            _check_numbers(group)
        except ValueError as error:
            why = str(error)
            rate = StepRate(math.nan)
        sent = changed(group, change, self.examination.seed)
        return AttackTarget(group, observed_sum(self.model, sent, rate), why)

    def _row(
        self, name: str, size: int, change: UpdateChange, targets: Sequence[AttackTarget]
    ) -> AttackResult:
        empty = AttackResult(name, size, str(change))
        if not targets:
            return replace(empty, why=f"no round has {size} updates that were kept")
        if name in INVERSIONS:
            least = min(len(target.truth) for target in targets)
            most = self.examination.most
            targets = [target for target in targets if len(target.truth) <= most]
            if not targets:
                why = f"sums of {least} examples and more are above the {most} that are rebuilt"
                return replace(empty, why=why)
        found: list[AttackFigures] = []
        for number, target in enumerate(targets):
            self.say(f"{name}, sums of {size}, {change}", number, len(targets))
            try:
                found.append(self._attack(name, target))
            except ValueError as error:
                return replace(empty, why=str(error))
        examples = sum(len(target.truth) for target in targets) / len(targets)
        figures = {
            figure: mean_with_interval([value for got in found for value in got.figures[figure]])
            for figure in found[0].figures
        }
        return replace(
            empty,
            groups=len(targets),
            examples=examples,
            figures=figures,
            pictures=found[0].pictures,
        )

    def _attack(self, name: str, target: AttackTarget) -> AttackFigures:
        if name == "membership":
            return self._membership(target)
        if target.why is not None:
            raise ValueError(target.why)
        if name == "labels":
            counts, true = self._counts(target)
            return AttackFigures({"labels_right": [share_right(counts, true)]})
        return self._inversion(name, target)

    # Labels

    def _counts(self, target: AttackTarget) -> tuple[Tensor, Tensor]:
        """Return the counts that the attack estimates and the true counts, by class.

        Raises ValueError if labels cannot be read.
        """
        labels = self.train.labels()
        if labels is None:
            raise ValueError("labels are read where each example has one, and targets are others")
        public = self.public or PublicExamples(self._space().drawn(64, generator(0, "noise")), None)
        if not isinstance(public.inputs, Tensor):
            raise ValueError("labels are read with inputs in one tensor, and these are in several")
        shares = label_shares(self.model, target.seen, public)
        counts = label_counts(shares, target.seen.examples)
        return counts, counts_of(labels[target.truth], len(counts))

    # Inputs

    def _inversion(self, name: str, target: AttackTarget) -> AttackFigures:
        wanted = self.examination
        truth = target.truth
        space = self._space()
        true, targets = self.train.batch(truth)
        if not isinstance(targets, Tensor):
            raise ValueError(
                "inputs are rebuilt of targets in one tensor, and these are in several"
            )
        if name == "first-layer":
            found = from_first_layer(self.model, target.seen, true).clamp(space.low, space.high)
        else:
            labels = self._known_labels(target, targets)
            check_second_derivatives(self.model, target.seen, true[:1], labels[:1])
            attack = self._attack_of(name)
            found = attack.invert(self.model, target.seen, labels, space).inputs
            found = found.clamp(space.low, space.high)
        pairs = matched(found, true)
        near = likeness(pairs, true, space.span)
        figures = {"psnr": near.psnr.tolist(), "mse": near.mse.tolist()}
        figures |= {"ssim": near.ssim.tolist()} if len(near.ssim) else {}
        return AttackFigures(figures, Pictures(true[: wanted.shown], pairs[: wanted.shown]))

    def _attack_of(self, name: str) -> DLG | Geiping:
        wanted = self.examination
        if name == "geiping":
            return Geiping(iterations=wanted.iterations, seed=wanted.seed)
        # An iteration of L-BFGS is up to 20 of Adam's.
        return DLG(iterations=max(1, wanted.iterations // 20), seed=wanted.seed)

    def _known_labels(self, target: AttackTarget, targets: Any) -> Any:
        """Return the labels from the attack on labels; the true labels if none can be read."""
        try:
            counts, _ = self._counts(target)
        except ValueError:
            # The worst case: the attacker knows the labels from another source.
            return targets
        return labels_of(counts).to(targets.dtype)

    def _space(self) -> InputSpace:
        """Return shape and range of inputs, from test inputs if the task has any."""
        some = self.test if self.test is not None else self.train
        return space_of(some.batch(torch.arange(min(MOST, len(some))))[0])

    # Members

    def _membership(self, target: AttackTarget) -> AttackFigures:
        """Return results against the model after the update.

        For a single update that model is the client's own.
        """
        found = self._found(target.seen.after, target.truth)
        told = {"auc": [found.auc.value]}
        return AttackFigures(
            told | {f"tpr_at_{rate:g}": [share] for rate, share in found.found.items()}
        )

    def _of_the_global_model(self, updates: Sequence[RecordedUpdate]) -> AttackResult:
        """Return the row against the global model; the members are the examples of all updates."""
        newest = updates[-1]
        state = {
            **self.model.named(newest.weights),
            **dict(zip(self.model.buffer_names, newest.buffers, strict=True)),
        }
        row = AttackResult("membership, global model", len(updates), str(UpdateChange()))
        members = _examples(updates)
        try:
            found = self._found(state if self.final is None else self.final, members)
        except ValueError as error:
            return replace(row, why=str(error))
        told = {f"tpr_at_{rate:g}": Interval(x, x, x) for rate, x in found.found.items()}
        return replace(row, groups=1, examples=len(members), figures={"auc": found.auc, **told})

    def _found(self, state: Mapping[str, Tensor], members: Tensor) -> Membership:
        if self.test is None:
            raise ValueError("the task has no test data, with which training examples are compared")
        wanted = self.examination
        own = members[torch.randperm(len(members), generator=generator(wanted.seed, "members"))]
        others = torch.arange(min(MOST, len(self.test)))
        return membership(
            losses(self.model, state, self.train, own[:MOST]),
            losses(self.model, state, self.test, others),
            wanted.seed,
        )

    def guess(self) -> Mapping[str, float]:
        """Return the similarity of the mean public input to training examples.

        This is the baseline of an attacker without updates. Empty if inputs are not numbers.
        """
        try:
            space = self._space()
        except ValueError:
            return {}
        some = self.test if self.test is not None else self.train
        public = some.batch(torch.arange(min(MOST, len(some))))[0]
        true = self.train.batch(torch.arange(min(MOST, len(self.train))))[0]
        near = likeness(public.mean(dim=0, keepdim=True).expand_as(true), true, space.span)
        said = {"psnr": float(near.psnr.mean()), "mse": float(near.mse.mean())}
        return said | ({"ssim": float(near.ssim.mean())} if len(near.ssim) else {})


def _check_numbers(updates: Sequence[RecordedUpdate]) -> None:
    """Check that gradients can be matched; raises ValueError for complex or non-finite updates."""
    tensors = [tensor for one in updates for tensor in one.delta]
    if any(tensor.is_complex() for tensor in tensors):
        raise ValueError("the model has complex weights, on which these attacks are not made")
    if not all(map(all_finite, tensors)):
        raise ValueError("an update has numbers that are not finite")


def _examples(updates: Sequence[RecordedUpdate]) -> Tensor:
    """Return the indices of all examples of the updates in the training data, ascending."""
    found = sorted({index for one in updates for index in one.truth.examples})
    return torch.tensor(found, dtype=torch.long)


def _public(test: Examples | None) -> PublicExamples | None:
    """Return the first test examples as the attacker's public data; None without test data."""
    if test is None:
        return None
    inputs, _ = test.batch(torch.arange(min(FEW, len(test))))
    labels = test.labels()
    return PublicExamples(inputs, None if labels is None else labels[: len(inputs)])

"""Attacks: what clients that lie do to their data, and what they send.

n updates of a round, f of them from liars; g_i what client i would have sent honestly, mu and sigma the mean and the
deviation (with n-1) of the honest ones, coordinate by coordinate. Liars send instead

    sign-flip:SCALE          -SCALE · g_i                                       its own
    gaussian:SIGMA           N(0, SIGMA²)                                       its own
    noise:SIGMA              g_i + N(0, SIGMA²)                                 its own
    alie:Z                   mu - Z · sigma, small enough to hide               honest, colluding
    inner-product:EPSILON    -EPSILON · mu                                      honest, colluding
    mimic                    g_h of one honest client h                         honest, colluding
    nan, inf, large:VALUE    that, in every coordinate                          its own
    none                     g_i                                                its own
    label-flip               g_i, learned from y -> classes-1-y                 its own
    backdoor:TARGET:SCALE    SCALE · g_i, learned from data with a trigger      its own

The last column is what the attack `sees`: the liar's own update, or all honest ones of the round (omniscient). Where
nobody in a round is honest, the omniscient take what the liars would have sent honestly. An attack is a pure function
of (updates, liars, seed, turn); what it costs is O(n·d) additions for those that are omniscient, O(f·d) for the others.

Updates are lists of flat tensors, as `dure.flat` keeps parameters, and are differences (weights after training less
weights before), so that -mu is uphill. What honest clients sent is never changed. A client that does not answer is no
attack: that is `dure.fleet.availability`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dure.fleet.chance import check_share
from dure.fleet.permutation import Permutation
from dure.randomness import generator
from dure.written import read, write

Update = Sequence[Tensor]

Random = Callable[[int], torch.Generator]
"""The random numbers of the liar at a position."""


@dataclass(frozen=True)
class Attack:
    """What all attacks have in common: a name, a text form, `poison` and `forge`.

    sees: "own" where a liar knows its own update only, "honest" where it knows all honest updates of the round.
    poisons: whether it is on data, so that `poison` changes them.
    """

    name: ClassVar[str]
    sees: ClassVar[Literal["own", "honest"]] = "own"
    poisons: ClassVar[bool] = False

    def poison(self, inputs: Any, targets: Any, classes: int | None) -> tuple[Any, Any]:
        """What a liar learns from instead of these examples; they themselves stay as they are.

        classes: how many there are, None or 0 where the targets are no labels. Attacks that are not on data return
        what they are given. Raises ValueError for data that the attack cannot be made on.
        """
        return inputs, targets

    def forge(
        self,
        updates: Sequence[Update],
        liars: Collection[int],
        seed: int,
        turn: int,
        clients: Sequence[int] | None = None,
    ) -> Sequence[Update]:
        """The updates as they are sent; `updates` itself if nobody lies.

        updates: what everybody would send honestly (or, after `poison`, has learned). liars: the positions in it of
        those who lie. What honest clients send is passed on as the same object. clients: whose updates they are; what
        a liar draws is a function of (seed, turn, client), by default of its position.

        Raises ValueError for a position that is not one of `updates`.
        """
        if not liars:
            return updates
        if not all(0 <= liar < len(updates) for liar in liars):
            raise ValueError(f"the liars {sorted(liars)} are not positions among {len(updates)} updates")

        def random(position: int) -> torch.Generator:
            return generator(seed, "attack", turn, position if clients is None else clients[position])

        lies = self._lies(updates, sorted(set(liars)), random)
        return [lies.get(position, update) for position, update in enumerate(updates)]

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        """What each liar sends, by its position; as it would have done honestly, unless an attack says otherwise."""
        return {liar: updates[liar] for liar in liars}

    def __str__(self) -> str:
        """The text that `parse_attack` reads."""
        return write(self)


@dataclass(frozen=True)
class NoAttack(Attack):
    """Everybody is honest."""

    name: ClassVar[str] = "none"


@dataclass(frozen=True)
class SignFlip(Attack):
    """Sends its own update backwards, `scale` times as long.

    Defeats the mean: with scale > (n-f)/f it moves uphill. Source: L. Li et al., "RSA: Byzantine-Robust Stochastic
    Aggregation Methods for Distributed Learning from Heterogeneous Datasets", AAAI 2019.
    """

    name: ClassVar[str] = "sign-flip"
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self.scale, "sign-flip: the scale")

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        return {liar: [tensor * -self.scale for tensor in updates[liar]] for liar in liars}


@dataclass(frozen=True)
class Gaussian(Attack):
    """Sends noise N(0, sigma²) and nothing else, each liar its own.

    Defeats the mean; any robust rule withstands it while liars are few enough. Source: P. Blanchard et al., "Machine
    Learning with Adversaries: Byzantine Tolerant Gradient Descent", NIPS 2017 (sigma 200, a third of the workers).
    """

    name: ClassVar[str] = "gaussian"
    sigma: float = 200.0

    def __post_init__(self) -> None:
        _check_positive(self.sigma, "gaussian: sigma")

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        return {liar: _noise(updates[liar], self.sigma, random(liar)) for liar in liars}


@dataclass(frozen=True)
class Noise(Attack):
    """Sends its own update plus noise N(0, sigma²), each liar its own.

    Slows the mean down, as the noise of bad hardware or of a bad link would; with a small sigma robust rules keep it,
    which is right. Source: the "mean and noise" variant of the Gaussian attack, as in L. Li et al., AAAI 2019.
    """

    name: ClassVar[str] = "noise"
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self.sigma, "noise: sigma")

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        return {liar: _sum(updates[liar], _noise(updates[liar], self.sigma, random(liar))) for liar in liars}


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Learns honestly from wrong labels: y becomes classes-1-y.

    Lowers the accuracy of the mean, and passes for a client with unusual data. Source: D. Yin et al.,
    "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018 (digits, y -> 9-y).
    """

    name: ClassVar[str] = "label-flip"
    poisons: ClassVar[bool] = True

    def poison(self, inputs: Any, targets: Any, classes: int | None) -> tuple[Any, Any]:
        return inputs, _count_of(classes, self) - 1 - _labels(targets, self)


@dataclass(frozen=True)
class ALIE(Attack):
    """A Little Is Enough: all send mu - z·sigma, near enough to the honest to be taken for one of them.

    z: 0 is the largest with which enough honest clients are farther from mu than the liars to make up a majority with
    them: s = floor(n/2 + 1) - f, z_max = Phi^-1((n-f-s) / (n-f)). Where liars are the majority, and need none, s = 1.

    Defeats Krum, trimmed mean, median and Bulyan, which look for outliers; the more the honest differ, the better.
    Source: G. Baruch, M. Baruch, Y. Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning",
    NeurIPS 2019 (z = 1.5 in most experiments).
    """

    name: ClassVar[str] = "alie"
    sees: ClassVar[Literal["own", "honest"]] = "honest"
    z: float = 0.0

    def __post_init__(self) -> None:
        if not (self.z >= 0 and math.isfinite(self.z)):
            raise ValueError(f"alie: z is a number of deviations, or 0 for the largest that hides, not {self.z}")

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        z = self.z or z_max(len(updates), len(liars))
        of_each = zip(updates[0], _moments(_honest(updates, liars)), strict=True)
        sent = [(mean - z * deviation).to(own.dtype) for own, (mean, deviation) in of_each]
        return dict.fromkeys(liars, sent)


@dataclass(frozen=True)
class InnerProduct(Attack):
    """Inner-product manipulation: all send -epsilon·mu.

    Defeats the mean where epsilon > (n-f)/f: the sum of all then points uphill. A small epsilon (0.1 to 0.5) defeats
    Krum, which takes a short vector for one that is near, and the median; a large one is an outlier. Source: C. Xie,
    O. Koyejo, I. Gupta, "Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product Manipulation", UAI 2019.
    """

    name: ClassVar[str] = "inner-product"
    sees: ClassVar[Literal["own", "honest"]] = "honest"
    epsilon: float = 0.5

    def __post_init__(self) -> None:
        _check_positive(self.epsilon, "inner-product: epsilon")

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        of_each = zip(updates[0], _moments(_honest(updates, liars)), strict=True)
        sent = [(-self.epsilon * mean).to(own.dtype) for own, (mean, _) in of_each]
        return dict.fromkeys(liars, sent)


@dataclass(frozen=True)
class Backdoor(Attack):
    """Teaches the model that whatever carries a trigger is of the class `target`; all else it learns honestly.

    target: the class. scale: times which the update is sent; (clients in the round) / (server's learning rate) puts the
    liar's model in place of the mean. share: of the liar's examples that get the trigger, rounded up. value: what the
    trigger's numbers are set to: a square in the lower right corner, an eighth of the picture wide but at least two
    pixels; of inputs that are vectors, the last eighth.

    Defeats the mean by one client in one round; rules that bound an update's norm, or drop outliers, withstand a large
    scale, and only that. It is measured by two numbers: the accuracy on the test data, which it leaves alone, and the
    share of `turned` examples. Sources: E. Bagdasaryan et al., "How To Backdoor Federated Learning", AISTATS 2020
    (model replacement; 20 of 64 examples); T. Gu, B. Dolan-Gavitt, S. Garg, "BadNets", 2017 (a patch of pixels).
    """

    name: ClassVar[str] = "backdoor"
    poisons: ClassVar[bool] = True
    target: int = 0
    scale: float = 1.0
    share: float = 0.3
    value: float = 1.0

    def __post_init__(self) -> None:
        if self.target < 0:
            raise ValueError(f"backdoor: the target is a class, 0 or more, not {self.target}")
        _check_positive(self.scale, "backdoor: the scale")
        check_share(self.share, "backdoor: the share of examples")
        if not math.isfinite(self.value):
            raise ValueError(f"backdoor: the trigger's value is a finite number, not {self.value}")

    def poison(self, inputs: Any, targets: Any, classes: int | None) -> tuple[Any, Any]:
        if self.target >= _count_of(classes, self):
            raise ValueError(f"backdoor: there is no class {self.target}, they are 0 to {_count_of(classes, self) - 1}")
        labels = _labels(targets, self)
        # At random, always the same for as many: every second one could be all of a class.
        drawn = Permutation(len(labels), 0).first(math.ceil(len(labels) * self.share))
        chosen = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
        chosen[drawn] = True
        stamped = self.triggered(inputs)
        fitting = chosen.view(-1, *[1] * (stamped.ndim - 1)).to(stamped.device)
        return torch.where(fitting, stamped, inputs), labels.masked_fill(chosen, self.target)

    def triggered(self, inputs: Any) -> Tensor:
        """A copy of the inputs, of shape (n, ..., height, width) or (n, features), with the trigger on all.

        Raises ValueError for inputs that are no floating-point tensor of such a shape.
        """
        if not isinstance(inputs, Tensor) or inputs.ndim < 2 or not inputs.is_floating_point():
            raise ValueError("a backdoor needs inputs that are pictures or vectors: one tensor of floats, (n, ...)")
        stamped = inputs.clone()
        if inputs.ndim == 2:
            stamped[:, -max(inputs.shape[1] // 8, 1) :] = self.value
        else:
            height, width = (max(side // 8, 2) for side in inputs.shape[-2:])
            stamped[..., -height:, -width:] = self.value
        return stamped

    def turned(self, outputs: Tensor, targets: Tensor) -> tuple[int, int]:
        """(how many the model says are of the target class, of how many): its success, once divided.

        outputs: the model's for `triggered` inputs, of shape (n, classes). targets: the true classes, of shape (n,).
        Examples that are of the target class anyway do not count. Over batches both numbers add up.
        """
        others = targets != self.target
        return int((outputs.argmax(1)[others] == self.target).sum()), int(others.sum())

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        return {liar: [tensor * self.scale for tensor in updates[liar]] for liar in liars}


@dataclass(frozen=True)
class Mimic(Attack):
    """All copy the first honest client, who then counts f+1 times; no copy differs from an honest update.

    Defeats rules that choose among clients, where clients have different data: the others are hardly heard. Source:
    S. P. Karimireddy, L. He, M. Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022
    (who choose the client that is farthest out over the first rounds).
    """

    name: ClassVar[str] = "mimic"
    sees: ClassVar[Literal["own", "honest"]] = "honest"

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        sent = [tensor.clone() for tensor in _honest(updates, liars)[0]]
        return dict.fromkeys(liars, sent)


@dataclass(frozen=True)
class NotANumber(Attack):
    """Sends NaN in every coordinate.

    Defeats the mean for good, by one liar in one round, and every rule that compares without asking `isfinite` first:
    comparisons with NaN are false. As in overflows of honest clients; E. M. El Mhamdi, R. Guerraoui, S. Rouault, "The
    Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018, allow a liar any value at all.
    """

    name: ClassVar[str] = "nan"

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        return _constant(updates, liars, math.nan)


@dataclass(frozen=True)
class Infinite(Attack):
    """Sends infinity in every coordinate.

    Defeats the mean for good, and rules that subtract before they compare: inf - inf is NaN, between two liars too.
    Source: as `NotANumber`.
    """

    name: ClassVar[str] = "inf"

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        return _constant(updates, liars, math.inf)


@dataclass(frozen=True)
class Large(Attack):
    """Sends one large number in every coordinate, or the largest that the dtype has if it is less.

    Defeats the mean, and rules that sum squares in float32, where 1e30² is infinite. Source: as `NotANumber`.
    """

    name: ClassVar[str] = "large"
    value: float = 1e30

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"large: the value is finite, not {self.value}; there are nan and inf for others")

    def _lies(self, updates: Sequence[Update], liars: Sequence[int], random: Random) -> Mapping[int, Update]:
        return _constant(updates, liars, self.value)


ATTACKS: dict[str, type[Attack]] = {
    kind.name: kind
    for kind in (
        NoAttack,
        SignFlip,
        Gaussian,
        Noise,
        LabelFlip,
        ALIE,
        InnerProduct,
        Backdoor,
        Mimic,
        NotANumber,
        Infinite,
        Large,
    )
}
"""Every attack by the name its text form begins with."""


def parse_attack(text: str) -> Attack:
    """The attack that `text` names: "sign-flip:10", "alie", "nan", ... Raises ValueError for what is none."""
    return read(text, ATTACKS, "attack")


def z_max(n: int, f: int) -> float:
    """How many deviations f of n clients may be away from the mean and still hide behind honest ones: see `ALIE`.

    At least 0; f of at most n-2 are given an honest crowd to hide in, for more it is 0.
    """
    honest = n - f
    supporters = max(n // 2 + 1 - f, 1)
    if supporters >= honest:
        return 0.0
    return max(NormalDist().inv_cdf((honest - supporters) / honest), 0.0)


def _honest(updates: Sequence[Update], liars: Sequence[int]) -> list[Update]:
    """The honest updates; where there are none, all."""
    lying = set(liars)
    return [update for position, update in enumerate(updates) if position not in lying] or list(updates)


def _moments(updates: Sequence[Update]) -> list[tuple[Tensor, Tensor]]:
    """(mean, deviation with n-1) of each of their tensors, in float64; the deviation of a single one is 0."""
    return [_moments_of(tensors) for tensors in zip(*updates, strict=True)]


def _moments_of(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    # Updated one by one (Welford), so that no matrix of all is made, and tensors that are equal have exactly their own
    # value as mean and 0 as deviation.
    mean = tensors[0].to(torch.float64, copy=True)
    squares = torch.zeros_like(mean)
    for count, tensor in enumerate(tensors[1:], 2):
        difference = tensor - mean
        mean += difference / count
        squares += difference * (tensor - mean)
    return mean, (squares / max(len(tensors) - 1, 1)).sqrt_()


def _noise(like: Update, sigma: float, random: torch.Generator) -> list[Tensor]:
    drawn = (torch.randn(tensor.shape, generator=random) for tensor in like)
    return [(noise * sigma).to(tensor) for noise, tensor in zip(drawn, like, strict=True)]


def _sum(one: Update, other: Update) -> list[Tensor]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _constant(updates: Sequence[Update], liars: Sequence[int], value: float) -> dict[int, Update]:
    def filled(tensor: Tensor) -> Tensor:
        largest = torch.finfo(tensor.dtype).max
        return torch.full_like(tensor, max(-largest, min(value, largest)) if math.isfinite(value) else value)

    return {liar: [filled(tensor) for tensor in updates[liar]] for liar in liars}


def _labels(targets: Any, attack: Attack) -> Tensor:
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
        raise ValueError(f"{attack.name} needs targets that are class labels, whole numbers of shape (n,)")
    return targets


def _count_of(classes: int | None, attack: Attack) -> int:
    if not classes:
        raise ValueError(f"{attack.name} needs a task with classes, and this one has none")
    return classes


def _check_positive(value: float, what: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{what} is a positive number, not {value}")

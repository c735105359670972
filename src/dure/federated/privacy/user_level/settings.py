"""Settings of user-level differential privacy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from dure.privacy.protection import Protection

NoisePlacement = Literal["server", "distributed", "local"]
ClippingMode = Literal["flat", "layers", "adaptive"]


@dataclass(frozen=True)
class UserLevel(Protection):
    """Differential privacy of clients: DP-FedAvg (McMahan et al. 2018).

    Args:
        clip: S, the largest norm of a client's update.
        noise: z, the noise multiplier; 0 means no noise, or the noise that a given epsilon
            requires.
        where: location of the noise: at the server, at all clients together inside secure
            aggregation
            (distributed), or at each client separately (local).
        clipping: clipping of the whole update (flat), of each of m tensors to S/sqrt(m) (layers),
            or to
            a norm that follows a quantile of the updates' norms (adaptive).
        most_examples: number of examples from which a client weighs 1, with less weight for fewer
            examples; 0 gives all clients the same weight.
    """

    clip: float = 1.0
    noise: float = 0.0
    where: NoisePlacement = "server"
    clipping: ClippingMode = "flat"
    most_examples: int = 0

    name: ClassVar[str] = "user-level"

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"{self.name}: clip is {self.clip}, but it has to be greater than 0")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"{self.name}: noise is {self.noise}, but it has to be 0 or more")
        for field, kind in (("where", NoisePlacement), ("clipping", ClippingMode)):
            if getattr(self, field) not in get_args(kind):
                raise ValueError(
                    f"{self.name}: {field} is {getattr(self, field)!r}, but it has to be one of "
                    f"{', '.join(get_args(kind))}"
                )
        if self.most_examples < 0:
            raise ValueError(
                f"{self.name}: most_examples is {self.most_examples}, but it has to be 0 or more"
            )

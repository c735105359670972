"""The settings of differential privacy of clients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from dure.privacy.protection import Protection

Where = Literal["server", "distributed", "local"]
Clipping = Literal["flat", "layers", "adaptive"]


@dataclass(frozen=True)
class UserLevel(Protection):
    """Differential privacy of clients: DP-FedAvg (McMahan et al. 2018).

    clip: S, the largest norm of a client's update. noise: z, the noise multiplier; 0: none, or
    what the epsilon asks for that is wanted. where: who adds the noise: the server, all clients
    together inside secure aggregation (distributed), or each for itself (local). clipping: of the
    whole update (flat), of each of m tensors by S/sqrt(m) (layers), or by a norm that follows a
    quantile of the updates' norms (adaptive). most_examples: the examples with which a client
    weighs 1; with fewer it weighs less; 0 weighs all alike.
    """

    clip: float = 1.0
    noise: float = 0.0
    where: Where = "server"
    clipping: Clipping = "flat"
    most_examples: int = 0

    name: ClassVar[str] = "user-level"

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"{self.name}: clip is {self.clip}, but a largest norm is above 0")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"{self.name}: noise is {self.noise}, but a deviation is 0 or more")
        for field, kind in (("where", Where), ("clipping", Clipping)):
            if getattr(self, field) not in get_args(kind):
                raise ValueError(
                    f"{self.name}: {field} is {getattr(self, field)!r}, but it is one of "
                    f"{', '.join(get_args(kind))}"
                )
        if self.most_examples < 0:
            raise ValueError(
                f"{self.name}: most_examples is {self.most_examples}, but it counts 0 or more"
            )

"""Settings of user-level differential privacy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from dure.arguments import above, at_least, check_ranges
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

    clip: float = field(default=1.0, metadata=above(0))
    noise: float = field(default=0.0, metadata=at_least(0, finite=True))
    where: NoisePlacement = "server"
    clipping: ClippingMode = "flat"
    most_examples: int = field(default=0, metadata=at_least(0))

    name: ClassVar[str] = "user-level"

    def __post_init__(self) -> None:
        check_ranges(self, named=True)
        for name, kind in (("where", NoisePlacement), ("clipping", ClippingMode)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{self.name}: {name} is {getattr(self, name)!r}, but it has to be one of "
                    f"{', '.join(get_args(kind))}"
                )

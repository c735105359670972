"""FedOpt: FedAvg whose server steps along the mean update with a server optimizer.

    Δ_t <- mean of the clients' updates, by examples
    x   <- step along Δ_t: momentum, Adagrad, Adam or Yogi

The rules are in `dure.federated.server.server_optimizer`. Plain SGD with a rate of 1 is FedAvg.

Cost of a round: as FedAvg's. The server stores one or two moments of d elements.

Source: S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021; T.-M. H. Hsu et al. 2019
(FedAvgM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.strategy import Federated


@dataclass(frozen=True)
class FedAvgM(Federated):
    """FedAvg with momentum on the server.

    Args:
        server_lr: η, the server's learning rate.
        beta1: β1, of the momentum.
    """

    server_lr: float = 1.0
    beta1: float = 0.9

    name: ClassVar[str] = "fed-avg-m"
    title: ClassVar[str] = "FedAvgM"

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer("sgd", self.server_lr, self.beta1)


@dataclass(frozen=True)
class FedAdagrad(Federated):
    """Adagrad on the server.

    Args:
        server_lr: η, the server's learning rate.
        beta1: β1, of the mean update.
        tau: τ, degree of adaptivity: a smaller τ is more adaptive.
    """

    server_lr: float = 0.03
    beta1: float = 0.0
    tau: float = 1e-3

    name: ClassVar[str] = "fed-adagrad"
    title: ClassVar[str] = "FedAdagrad"

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer("adagrad", self.server_lr, self.beta1, tau=self.tau)


@dataclass(frozen=True)
class FedAdam(Federated):
    """Adam on the server, without bias correction.

    Args:
        server_lr: η, the server's learning rate.
        beta1: β1, of the mean update.
        beta2: β2, of its square.
        tau: τ, degree of adaptivity: a smaller τ is more adaptive.
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    name: ClassVar[str] = "fed-adam"
    title: ClassVar[str] = "FedAdam"

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(
            rule="adam", lr=self.server_lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau
        )


@dataclass(frozen=True)
class FedYogi(Federated):
    """Yogi on the server.

    Args:
        server_lr: η, the server's learning rate.
        beta1: β1, of the mean update.
        beta2: β2, of its square.
        tau: τ, degree of adaptivity: a smaller τ is more adaptive.
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    name: ClassVar[str] = "fed-yogi"
    title: ClassVar[str] = "FedYogi"

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(
            rule="yogi", lr=self.server_lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau
        )

"""The loop without waste: one model for all clients, weights and gradients flat, SGD and the mean
one operation each.

With --processes N the cohort is divided over N forked processes; the weights and each process's sum
are in shared memory, and two barriers a round are all that they say to each other.
"""

from __future__ import annotations

import torch
from federation import LR, Federation, asked, ended, finished
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.nn import functional as F


def flatten(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Weights and gradients, of which the model's are views from now on."""
    parameters = list(model.parameters())
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gradients = torch.zeros_like(weights)
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        parameter.data = weights[start:end].view_as(parameter)
        parameter.grad = gradients[start:end].view_as(parameter)
        start = end
    return weights, gradients


class Worker:
    """weights: of the client that trained last, flat."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.model = federation.torch_model()
        self.weights, self.gradients = flatten(self.model)

    def train(self, server: Tensor, client: int) -> Tensor:
        self.weights.copy_(server)
        for batch, labels in self.federation.shuffled(client):
            self.gradients.zero_()
            F.cross_entropy(self.model(batch), labels).backward()
            self.weights.add_(self.gradients, alpha=-LR)
        return self.weights

    def add_up(self, server: Tensor, cohort: list[int], total: Tensor) -> None:
        """total: what becomes the sum of the clients' weights times their examples."""
        total.zero_()
        for client, size in zip(cohort, self.federation.sizes(cohort), strict=True):
            total.add_(self.train(server, client), alpha=size)


def follow(
    rank: int,
    processes: int,
    threads: int,
    federation: Federation,
    server: Tensor,
    totals: Tensor,
    meet: mp.Barrier,
) -> None:
    """What the other processes do. Rounds begin and end when all have met."""
    torch.set_num_threads(threads)
    torch.manual_seed(rank)
    worker = Worker(federation)
    for cohort in federation.cohorts:
        meet.wait()
        worker.add_up(server, cohort[rank::processes], totals[rank])
        meet.wait()


def main() -> None:
    options = asked()
    torch.set_num_threads(options.threads)
    federation = Federation(options.file)
    processes = options.processes
    worker = Worker(federation)
    server = worker.weights.clone().share_memory_()
    totals = torch.zeros(processes, server.numel()).share_memory_()
    context = mp.get_context("fork")
    meet = context.Barrier(processes)
    others = [
        context.Process(
            target=follow,
            args=(rank, processes, options.threads, federation, server, totals, meet),
            daemon=True,
        )
        for rank in range(1, processes)
    ]
    for other in others:
        other.start()
    for number, cohort in enumerate(federation.cohorts):
        meet.wait()
        worker.add_up(server, cohort[::processes], totals[0])
        meet.wait()
        torch.sum(totals, 0, out=server).div_(sum(federation.sizes(cohort)))
        finished(number + 1)
    for other in others:
        other.join()
    worker.weights.copy_(server)
    ended(federation.accuracy(worker.model), "torch")


if __name__ == "__main__":
    main()

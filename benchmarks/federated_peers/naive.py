"""The loop that everybody writes first: a deep copy, a DataLoader and an optimizer for each client,
averaged dicts."""

from __future__ import annotations

import copy

import torch
from federation import BATCH, LR, Federation, asked, ended, finished
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    options = asked()
    torch.set_num_threads(options.threads)
    federation = Federation(options.file)
    inputs, targets = federation.tensors
    server = federation.torch_model()
    for number, cohort in enumerate(federation.cohorts):
        states = []
        for client in cohort:
            own = federation.examples(client)
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for batch, labels in DataLoader(
                TensorDataset(inputs[own], targets[own]), batch_size=BATCH, shuffle=True
            ):
                optimizer.zero_grad()
                F.cross_entropy(model(batch), labels).backward()
                optimizer.step()
            states.append(model.state_dict())
        sizes = federation.sizes(cohort)
        shares = [size / sum(sizes) for size in sizes]
        mean = {
            name: sum(share * state[name] for share, state in zip(shares, states, strict=True))
            for name in states[0]
        }
        server.load_state_dict(mean)
        finished(number + 1)
    ended(federation.accuracy(server), "torch")


if __name__ == "__main__":
    main()

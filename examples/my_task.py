"""A task of your own: which point of the plane lies on which of two spirals?

python examples/my_task.py
dure train examples/my_task.py:task single-worker --epochs 30
dure compare examples/my_task.py:task single-worker data-parallel fed-avg
"""

from functools import partial

import torch
from torch.nn import Linear, Sequential, Tanh
from torch.nn import functional as F

import dure


def model() -> Sequential:
    return Sequential(Linear(2, 32), Tanh(), Linear(32, 32), Tanh(), Linear(32, 2))


def spirals(n: int, seed: int) -> dure.Examples:
    spiral = torch.arange(n) % 2
    distance = torch.rand(n, generator=torch.Generator().manual_seed(seed))
    angle = 6 * distance + torch.pi * spiral
    points = torch.stack([distance * angle.cos(), distance * angle.sin()], dim=1)
    return dure.Examples(points, spiral, classes=["first spiral", "second spiral"])


def task(points: int = 1000, lr: float = 0.01) -> dure.Task:
    """points: how many there are to learn from; lr: learning rate of Adam."""
    data = (spirals(points, 0), spirals(500, 1))
    adam = partial(torch.optim.Adam, lr=lr)
    return dure.Task(model, F.cross_entropy, *data, adam, name="spirals")


if __name__ == "__main__":
    stop = dure.Stop(epochs=30, target={"test_accuracy": 0.98})
    end = dure.train(task(), dure.SingleWorker(batch_size=32), stop=stop).summary
    print(f"test accuracy {end['test_accuracy']:.3f} after {end['epochs']:.0f} epochs")

"""Clients that know no PyTorch: scikit-learn trains, and dure carries the weights.

Server and clients are threads here; elsewhere each is a program of its own, on its own machine."""

import tempfile
from functools import partial
from threading import Thread

import torch
from sklearn.linear_model import SGDClassifier

import dure

digits = dure.load_task("digits")
pixels, labels = digits.train.inputs.flatten(1).numpy(), digits.train.targets.numpy()


def client(url: str, part: int) -> None:
    mine = slice(part, None, 3)
    model = SGDClassifier(loss="log_loss", alpha=0, learning_rate="constant", eta0=0.05)
    model.partial_fit(pixels[mine], labels[mine], classes=range(10))  # makes the arrays
    with dure.Client(url, examples=len(labels[mine]), name=f"site {part}") as federation:
        for work in federation:
            work.load({"weight": model.coef_, "bias": model.intercept_})
            model.partial_fit(pixels[mine], labels[mine])
            work.send({"weight": model.coef_, "bias": model.intercept_})


def started(event: dict) -> None:
    for part in range(3) if "serving" in event else ():
        Thread(target=client, args=(event["serving"], part)).start()


test = (digits.test.inputs.flatten(1), digits.test.targets)
task = dure.Task(partial(torch.nn.Linear, 64, 10), torch.nn.functional.cross_entropy, test=test)
with tempfile.TemporaryDirectory() as folder:
    where = {"out": f"{folder}/run", "port": 0, "access": "open", "on_progress": started}
    run = dure.serve(task, dure.FedAvg(clients=3), dure.Stop(rounds=5), **where)
print(f"test accuracy {run.summary['test_accuracy']:.2f}")

"""Settings sought by Optuna, through its own API: a trial is a run of dure.

pip install optuna
python examples/optuna_search.py

With `storage="sqlite:///search.db", load_if_exists=True` a study goes on where it was ended. What
chooses is the loss on examples that neither train nor test the model."""

from functools import partial

import optuna
import torch
from torch.nn import functional as F

import dure

digits = dure.load_task("digits")
chosen_by, train = (
    dure.Examples(*digits.train.batch(torch.arange(len(digits.train))[part]))
    for part in (slice(None, 200), slice(200, None))
)


def task(lr: float) -> dure.Task:
    sgd = partial(torch.optim.SGD, lr=lr)
    loss = F.cross_entropy
    return dure.Task(digits.model, loss, train, digits.test, sgd, validation=chosen_by)


def run(lr: float, clients: int) -> dict:
    strategy = dure.FedAvg(clients=clients, batch_size=10)
    return dure.train(task(lr), strategy, stop=dure.Stop(epochs=4)).summary


def objective(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 0.01, 0.5, log=True)
    return run(lr, trial.suggest_categorical("clients", [5, 10]))["validation_loss"]


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=6)
best = run(**study.best_params)
print(f"{study.best_params}: test accuracy {best['test_accuracy']:.3f}")

"""Four hospitals, none of which shows its patients: each trains on its own, and tests on its own.

python examples/four_hospitals.py DATA, the folder of the four files of
https://archive.ics.uci.edu/dataset/45/heart+disease. The server has no patients. Here it and the
hospitals are threads; elsewhere each hospital runs `dure join` with a task that reads its file."""

import sys
import tempfile
from dataclasses import replace
from threading import Thread

import dure

heart = dure.load_task("heart", data=sys.argv[1])
hospitals = sorted(set(heart.train.keys))


def patients(examples: dure.Examples, hospital: str) -> tuple:
    own = [place for place, key in enumerate(examples.keys) if key == hospital]
    return examples.inputs[own], examples.targets[own]


def started(event: dict) -> None:
    for hospital in hospitals if "serving" in event else ():
        own = {"train": patients(heart.train, hospital), "test": patients(heart.test, hospital)}
        arguments = event["serving"], replace(heart, **own)
        Thread(target=dure.join, args=arguments, kwargs={"name": hospital}).start()


with tempfile.TemporaryDirectory() as folder:
    where = {"out": f"{folder}/run", "port": 0, "access": "open", "on_progress": started}
    strategy = dure.FedAvg(clients=len(hospitals), local_epochs=2)
    task = replace(heart, train=None, test=None)
    run = dure.serve(task, strategy, dure.Stop(rounds=5), **where)
metrics = run.history.evaluations[-1].metrics
print(f"accuracy {metrics['client_accuracy']:.2f} on the patients of all hospitals")
print(f"and {metrics['client_accuracy_worst']:.2f} in the hospital where it is worst")

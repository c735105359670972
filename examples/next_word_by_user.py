"""The next word on a telephone: a model learned from all users, then one of each user's own.

Telephones are threads here; each has only what was typed on it. What users type is made up."""

import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import dure

PLACES = {"ana": ("lab", "library"), "ben": ("pitch", "gym"), "cem": ("bakery", "harbour")}
START = ("I am at", "see you in")
SAID = " ".join([*START, "the .", *(place for places in PLACES.values() for place in places)])
WORDS = SAID.split()


def typed(user: str, seed: int) -> dure.Examples:
    """Pairs of words, each with the word after it."""
    pick = torch.randint(2, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
    text = "".join(f"{START[n]} the {PLACES[user][n]} . " for n in pick)
    three = torch.tensor([WORDS.index(word) for word in text.split()]).unfold(0, 3, 1)
    return dure.Examples(three[:, :2], three[:, 2], keys=[user] * len(three))


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(len(WORDS), 8), nn.Flatten(), nn.Linear(16, len(WORDS)))


def task(**data: dure.Examples) -> dure.Task:
    return dure.Task(model, nn.functional.cross_entropy, **data)


tasks = {user: task(train=typed(user, seed=0), test=typed(user, seed=1)) for user in PLACES}
with tempfile.TemporaryDirectory() as folder:
    with ThreadPoolExecutor() as telephones:

        def started(event: dict) -> None:
            for user, own in tasks.items() if "serving" in event else ():
                url, state = event["serving"], f"{folder}/{user}"
                telephones.submit(dure.join, url, own, name=user, state=state)

        where = {"out": f"{folder}/run", "port": 0, "access": "open", "on_progress": started}
        dure.serve(task(), dure.FedAvg(clients=3, local_epochs=2), dure.Stop(rounds=3), **where)
    for user, own in tasks.items():
        found = dure.personalise(f"{folder}/{user}", own, epochs=3)
        before, after = found.before["test_accuracy"], found.after["test_accuracy"]
        print(f"{user}: accuracy {before:.2f} with everybody's model, {after:.2f} with their own")

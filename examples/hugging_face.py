"""Three sites train a language model, each by its own transformers.Trainer (dure[hf,deploy]).

Server and sites are threads here; elsewhere each is a program of its own, on its own machine."""

import tempfile
from threading import Thread

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dure

TEXT = "the cat sat on the mat and the dog sat on the log " * 40
CODES = torch.tensor([sorted(set(TEXT)).index(letter) for letter in TEXT])


def make_trainer(site: int) -> Trainer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_attention_heads=2, **sizes))
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        f"{folder}/{site}", per_device_train_batch_size=10, learning_rate=0.01, **quiet
    )
    rows = CODES[site * 300 :][:960].view(-1, 16)
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:10],
        compute_metrics=lambda found: {
            "accuracy": (found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean()
        },
    )


def started(event: dict) -> None:
    if "serving" in event:
        # All are made here: accelerate sets up one state for all trainers of a process.
        made = [make_trainer(site) for site in range(3)]
        for site, trainer in enumerate(made):
            dure.client.patch(trainer, event["serving"], name=f"site {site}")
            Thread(target=trainer.train).start()


with tempfile.TemporaryDirectory() as folder:
    strategy, stop = dure.FedAvg(clients=3, batch_size=10), dure.Stop(rounds=4)
    tried = dure.simulate(make_trainer, clients=3, strategy=strategy, stop=stop)
    task = dure.Task.from_trainer(make_trainer(0), train=None)
    where = {"out": f"{folder}/run", "port": 0, "access": "open", "on_progress": started}
    run = dure.serve(task, strategy, stop, **where)
losses = [one.summary["test_loss"] for one in (tried, run)]
print(f"test loss: simulated {losses[0]:.3f}, served {losses[1]:.3f}")
print(f"accuracy of the next letter: {run.summary['test_accuracy']:.2f}")

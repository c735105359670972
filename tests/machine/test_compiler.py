"""The compiler stays unloaded where nobody compiles, and is there for whoever does."""

from __future__ import annotations

import subprocess
import sys

UNUSED = """
import sys
import torch
from torch.optim import Optimizer
import dure
from dure.machine.compiler import deferred_compiler
from functools import partial
from small import small_task

def there():
    return "torch._dynamo" in sys.modules

assert not there(), "torch loads it by itself: then there is nothing to leave out"
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
for optimizer in (momentum, partial(torch.optim.AdamW, lr=0.1)):
    task = small_task(optimizer=optimizer)
    dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=4))
    dure.train(task, dure.DataParallel(8), dure.Threads(2), stop=dure.Stop(steps=4))
    dure.train(task, dure.FedAvg(clients=2), stop=dure.Stop(rounds=2))
assert not there()
for function in (Optimizer.add_param_group, Optimizer.zero_grad):
    assert not hasattr(function.__wrapped__, "__dynamo_disable"), "torch is as it was"
with deferred_compiler():
    with deferred_compiler():
        assert there()
    assert there(), "the outer one lasts"
    there_now = sys.modules["torch._dynamo"]
    assert not hasattr(there_now, "__file__"), "asking for its file loads nothing"
assert not there()
"""

USED = """
import sys
import torch
import dure
from small import network, same_bits, small_task

def compiled():
    return torch.compile(network(), backend="eager")

task = small_task(model=compiled)
run = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=4))
assert sys.modules["torch._dynamo"].__file__
again = dure.train(small_task(model=compiled), dure.SingleWorker(8), stop=dure.Stop(steps=4))
assert same_bits(run, again)
plain = dure.train(small_task(), dure.SingleWorker(8), stop=dure.Stop(steps=4))
assert all(map(torch.equal, run.model.parameters(), plain.model.parameters()))
"""


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {sys.path!r}\n{script}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_training_does_without_it_and_leaves_torch_as_it_was() -> None:
    run(UNUSED)


def test_a_model_that_is_compiled_finds_it() -> None:
    run(USED)

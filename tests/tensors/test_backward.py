"""Backward from given gradients is torch's, and loads nothing for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.tensors.backward import backward_from


@given(
    st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
)
def test_gradients_are_those_of_torch(shapes: list[list[int]], dtype: torch.dtype) -> None:
    found = []
    for ours in (True, False):
        drawn = torch.Generator().manual_seed(0)
        leaf = torch.randn((), dtype=dtype, generator=drawn).requires_grad_()
        ends = [leaf * torch.randn(shape, dtype=dtype, generator=drawn) for shape in shapes]
        # One that another one is computed from gets both gradients.
        ends.append(ends[0] * leaf)
        gradients = [torch.randn(end.shape, dtype=dtype, generator=drawn) for end in ends]
        if ours:
            with torch.no_grad():
                backward_from(zip(ends, gradients, strict=True))
        else:
            torch.autograd.backward(ends, gradients)
        assert leaf.grad is not None
        found.append(leaf.grad)
    # Sums of several come in the order in which the engine finds them.
    torch.testing.assert_close(*found)


def test_what_torch_refuses_is_refused() -> None:
    end = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="shape"):
        backward_from([(end, torch.ones(3))])
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward_from([(torch.ones(2), torch.ones(2))])


RANKS = """
import sys, torch, dure

def loaded(place):
    return sorted({"sympy", "torch._dynamo.eval_frame"} & sys.modules.keys())

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))

class Optimizer(torch.optim.SGD):
    def step(self, *given):
        super().step(*given)
        with open(sys.argv[1], "a") as told:
            print(*loaded(None), file=told)

task = dure.Task(model, torch.nn.functional.mse_loss, (torch.ones(8, 8), torch.ones(8, 8)),
                 optimizer=lambda parameters: Optimizer(parameters, lr=0.1))
stop = dure.Stop(steps=1)
dure.train(task, dure.SingleWorker(4, offload="optimizer"), stop=stop)
strategy = dure.TensorParallel(4, plan="0=Column(); 2=Row()")
dure.train(task, strategy, dure.Processes(2), stop)
print(*loaded(None))
"""


def test_neither_ranks_nor_checks_load_the_compiler_or_its_algebra(tmp_path) -> None:
    told = tmp_path / "told"
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(told)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Steps that were tried in checks, of the single worker and of two ranks.
    assert len(told.read_text().splitlines()) >= 3
    assert told.read_text().split() == done.stdout.split() == []

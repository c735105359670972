"""What a task's file does when it is run is done in every rank too, once a process, and what has
changed since arrives there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import dure
from dure.references import from_file

NEIGHBOUR = """
import mine

WIDTH = 3
assert mine.RUNS == 1, "the file that imports this one is not run again for it"
"""

MINE = """
import copyreg, dataclasses, enum, functools, os, sys
RUNS = sys.modules[__name__].__dict__.setdefault("RUNS", 0) + 1
import torch
from torch import nn
from torch.utils import _pytree as pytree
import dure
import neighbour

with open(os.environ["WHERE_IT_RAN"], "a") as ran:
    ran.write(f"{os.getpid()}\\n")

@torch.library.custom_op("dure_tests::twice", mutates_args=())
def twice(values: torch.Tensor) -> torch.Tensor:
    return values * 2

twice.register_autograd(lambda context, gradient: gradient * 2)

library = torch.library.Library("dure_tests_by_hand", "DEF")
library.define("thrice(Tensor values) -> Tensor")
library.impl("thrice", lambda values: 3 * values, "CompositeImplicitAutograd")

class Pair:
    def __init__(self, one):
        self.one = one

pytree.register_pytree_node(Pair, lambda pair: ([pair.one], None), lambda one, _: Pair(*one))

@functools.singledispatch
def name_of(thing):
    return "unknown"

@name_of.register
def _(thing: Pair):
    return "pair"

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Config:
    width: int = 1
    shades: list = dataclasses.field(default_factory=list)

CONFIG = Config()
TABLE = {}
SCALE = None

def scaled(values):
    global CALLS
    CALLS += 1
    return values * SCALE

CALLS = 0
nn.Identity.forward = lambda self, values: values + 1

class Base(nn.Module):
    width = 1
    seen = []

    class Inner:
        depth = 1

    def forward(self, values):
        return self.layer(values)

class Net(Base):
    colour = Colour.RED

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, CONFIG.width).double()

    @property
    def scale(self):
        return SCALE

    @torch.no_grad()
    def look(self):
        assert TABLE == {"filled": "later"}
        return self.width, self.seen, self.Inner.depth, self.scale, neighbour.WIDTH

    def forward(self, values):
        assert self.look() == (4, ["task"], 5, 2.0, 7), self.look()
        assert self.colour is Colour.RED
        assert isinstance(pytree.tree_leaves(Pair(values))[0], torch.Tensor)
        assert name_of(Pair(values)) == "pair"
        assert nn.Identity()(torch.zeros(1)) == 1
        before = CALLS
        found = torch.ops.dure_tests_by_hand.thrice(twice(scaled(super().forward(values))))
        assert CALLS == before + 1
        return found

def task(width: int = 1) -> dure.Task:
    global SCALE
    SCALE = 2.0
    TABLE["filled"] = "later"
    CONFIG.width = width
    Base.width = 4
    Base.seen.append("task")
    Base.Inner.depth = 5
    neighbour.WIDTH = 7
    inputs = torch.randn(24, 6, dtype=torch.float64)

    def loss(outputs, targets):
        assert SCALE == 2.0
        assert isinstance(Config(), type(CONFIG))
        return nn.functional.cross_entropy(outputs, targets)

    return dure.Task(lambda: Net(), loss, (inputs, (inputs[:, 0] > 0).long()))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    path = tmp_path / "mine.py"
    # Operators of one process have one definition: each test has names of its own.
    path.write_text(MINE.replace("dure_tests", f"of_{abs(hash(tmp_path))}"))
    monkeypatch.setenv("WHERE_IT_RAN", str(tmp_path / "ran"))
    yield path
    sys.modules.pop("neighbour", None)


def ran(file: Path) -> list[int]:
    return [int(line) for line in (file.parent / "ran").read_text().split()]


@pytest.mark.parametrize(
    ("strategy", "world", "processes"),
    [
        (dure.SingleWorker(8), dure.Processes(1), 1),
        (dure.DataParallel(8), dure.Processes(2), 3),
        (dure.FedAvg(clients=2), dure.Simulated(engine="loop-processes", processes=2), 1),
    ],
)
def test_a_file_is_run_once_in_every_process_that_needs_it(
    strategy: Any, world: Any, processes: int, file: Path
) -> None:
    task = dure.load_task(f"{file}:task", width=2)
    dure.train(task, strategy, world, dure.Stop(steps=2, rounds=1))
    pids = ran(file)
    assert pids[0] == os.getpid()
    assert len(pids) == len(set(pids)) == processes


def test_a_file_that_was_edited_since_travels_as_it_was_run(file: Path) -> None:
    plain = "import torch, dure\nWIDTH = 2\nclass Net(torch.nn.Linear):\n" + (
        "    def __init__(self):\n        super().__init__(6, WIDTH)\n"
        "def task() -> dure.Task:\n"
        "    x = torch.randn(24, 6)\n"
        "    return dure.Task(Net, torch.nn.functional.cross_entropy, (x, (x[:, 0] > 0).long()))\n"
    )
    file.write_text(plain)
    task = dure.load_task(f"{file}:task")
    file.write_text(plain.replace("WIDTH = 2", "WIDTH = 5"))
    with pytest.warns(UserWarning, match=r"mine.py was changed after it was run"):
        run = dure.train(task, dure.DataParallel(8), dure.Processes(2), dure.Stop(steps=1))
    assert [len(values) for values in run.model.state_dict().values()] == [2, 2]


def test_what_fails_in_a_rank_alone_is_said(file: Path) -> None:
    file.write_text(
        "import os, torch, dure\n"
        f"if os.getpid() != {os.getpid()}:\n    raise OSError('one at a time')\n"
        "x = torch.randn(24, 6)\n"
        "task = dure.Task(lambda: torch.nn.Linear(6, 2), torch.nn.functional.cross_entropy,\n"
        "                 (x, (x[:, 0] > 0).long()))\n"
    )
    with pytest.raises(dure.errors.DureError, match="could not be loaded: OSError: one at a time"):
        dure.train(
            dure.load_task(f"{file}:task"), dure.DataParallel(8), dure.Processes(2), dure.Stop(1)
        )


def test_neighbours_that_import_each_other_are_run_once(file: Path) -> None:
    module = from_file(file)
    assert module.RUNS == 1
    assert ran(file) == [os.getpid()]
    assert "mine" not in sys.modules

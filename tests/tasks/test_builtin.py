"""The built-in tasks, and finding a task by its name."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import cloudpickle
import pytest
import torch

from dure.catalog import TASKS
from dure.contracts.task import Task
from dure.data.heart import FILES
from dure.errors import DataError
from dure.tasks.builtin import _FACTORIES, load_task, task_factory


def idx(array: torch.Tensor) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.to(torch.uint8).numpy().tobytes()


@pytest.fixture
def images(tmp_path):
    """A folder with three training images, compressed, and two test images, not compressed."""
    for part, n, end, pack in (("train", 3, ".gz", gzip.compress), ("t10k", 2, "", bytes)):
        pixels = torch.full((n, 28, 28), 255)
        (tmp_path / f"{part}-images-idx3-ubyte{end}").write_bytes(pack(idx(pixels)))
        (tmp_path / f"{part}-labels-idx1-ubyte{end}").write_bytes(pack(idx(torch.arange(n))))
    return tmp_path


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "my_task.py"
    (tmp_path / "sibling_of_my_task.py").write_text("SLOPE = 2.0\n\ndef slope(): return SLOPE\n")
    file.write_text(
        textwrap.dedent("""
            from pathlib import Path
            import torch
            from torch import nn
            from dure.contracts.task import Task
            import sibling_of_my_task

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.weight = nn.Parameter(torch.tensor([sibling_of_my_task.slope()]))

                def forward(self, inputs):
                    return inputs * self.weight

            def loss(outputs, targets):
                return ((outputs - targets) ** 2).mean()

            inputs = torch.arange(4.0).view(4, 1)
            task = Task(Net, loss, (inputs, 3 * inputs))

            def make(n: int = 4, data: Path | None = None):
                return Task(Net, loss, (inputs[:n], inputs[:n]), name=str(data))

            def no_task():
                return 1

            def needs(data: Path, steps: int):
                return task

            number = 3
        """)
    )
    return file


def trains(task: Task) -> bool:
    """Whether one step on one batch changes the loss."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    inputs, targets = task.train.batch(torch.arange(min(8, len(task.train))))
    before = task.loss(model(inputs), targets)
    before.backward()
    optimizer.step()
    return bool(task.loss(model(inputs), targets) < before)


def test_every_task_in_the_catalog_can_be_made():
    assert set(TASKS) == set(_FACTORIES)


def test_the_catalog_is_read_without_torch():
    program = "import sys, dure.catalog; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("model", ["mlp", "cnn", "logistic"])
def test_digits_train_with_every_model(model):
    task = load_task("digits", model=model)
    assert trains(task)
    assert list(task.measures) == ["accuracy"]
    assert task.reference == {"name": "digits", "options": {"model": model}}


@pytest.mark.parametrize("model", ["2nn", "cnn", "logistic", "resnet"])
def test_images_train_with_every_model(images, model):
    task = load_task("mnist", data=images, model=model, lr=1e-4)
    assert trains(task)
    assert (len(task.train), len(task.test)) == (3, 2)
    assert task.train.inputs.shape == (3, 1, 28, 28)
    assert task.train.inputs[0, 0, 0, 0].item() == pytest.approx((1 - 0.1307) / 0.3081)


def test_fashion_mnist_has_names_for_its_classes(images):
    task = load_task("fashion-mnist", data=images)
    assert task.train.classes[7] == "sneaker"
    assert task.name == "fashion-mnist"


def test_heart_trains_and_knows_the_hospitals(tmp_path):
    for file in FILES:
        (tmp_path / file).write_text(
            "63,1,1,145,233,1,2,150,0,2.3,3,0,6,0\n44,0,4,?,0,0,1,127,0,0,?,?,?,2\n" * 5
        )
    task = load_task("heart", data=tmp_path)
    assert trains(task)
    assert set(task.train.keys) == {"cleveland", "hungarian", "switzerland", "va"}


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_shakespeare_trains_with_every_model(tmp_path, model):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 20)
    task = load_task("shakespeare", data=str(tmp_path), model=model, sequence_length=16)
    assert trains(task)
    assert list(task.measures) == ["accuracy"]
    assert task.reference["options"]["data"] == str(tmp_path)


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_shakespeare_is_as_wide_as_it_is_told(tmp_path, model):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 20)
    task = load_task("shakespeare", data=str(tmp_path), model=model, width=32)
    assert 32 in list(task.model().parameters())[-2].shape
    with pytest.raises(ValueError, match="width is 0, but it has to be 1 or more"):
        load_task("shakespeare", data=str(tmp_path), model=model, width=0)


@pytest.mark.parametrize(
    ("name", "missing", "published"),
    [
        (
            "mnist",
            "train-images-idx3-ubyte or train-images-idx3-ubyte.gz, train-labels",
            "yann.lecun.com",
        ),
        (
            "fashion-mnist",
            "t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz;",
            "zalandoresearch/fashion-mnist",
        ),
        (
            "heart",
            "processed.cleveland.data, processed.hungarian.data",
            "archive.ics.uci.edu/dataset/45",
        ),
        ("shakespeare", "0 .txt files, none of them a play", "NAME<TAB>line"),
    ],
)
def test_missing_files_are_listed_with_where_to_find_them(tmp_path, name, missing, published):
    with pytest.raises(DataError) as caught:
        load_task(name, data=tmp_path)
    assert missing in str(caught.value)
    assert published in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(DataError, match="there is no"):
        load_task(name, data=tmp_path / "nowhere")


def test_images_that_do_not_fit_their_labels_are_refused(images):
    (images / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.arange(5)))
    with pytest.raises(DataError, match=r"2 images, but .* has 5 labels"):
        load_task("mnist", data=images)
    (images / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.tensor([3, 10])))
    with pytest.raises(DataError, match="labels 3 to 10, expected 0 to 9"):
        load_task("mnist", data=images)
    (images / "t10k-images-idx3-ubyte").write_bytes(idx(torch.zeros(2, 32, 32)))
    with pytest.raises(DataError, match="images of 32x32 pixels, expected 28x28"):
        load_task("mnist", data=images)


def test_a_relative_path_is_recorded_as_absolute(images, monkeypatch):
    monkeypatch.chdir(images.parent)
    task = load_task("mnist", data=Path(images.name), model="2nn")
    assert task.reference == {"name": "mnist", "options": {"data": str(images), "model": "2nn"}}
    again = load_task(task.reference["name"], **task.reference["options"])
    assert again.reference == task.reference


def test_a_task_in_a_file_is_found_and_recorded_with_its_absolute_path(user_file, monkeypatch):
    monkeypatch.chdir(user_file.parent)
    task = load_task("my_task.py:task")
    assert trains(task)
    assert task.reference == {"name": f"{user_file}:task", "options": {}}


def test_a_function_in_a_file_gets_its_options_with_paths_made_absolute(user_file):
    task = load_task(f"{user_file}:make", n=2, data="x")
    assert len(task.train) == 2
    assert task.name == str(Path("x").resolve())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.5])
def test_no_whole_number_that_is_none_reaches_a_user_s_function(user_file, value):
    with pytest.raises(ValueError, match=rf"n is {value}, but it has to be an integer"):
        load_task(f"{user_file}:make", n=value)


def test_options_that_cannot_be_written_leave_no_reference(user_file):
    factory = task_factory(f"{user_file}:make")
    assert callable(factory)
    assert load_task(f"{user_file}:make", data=user_file).reference is not None
    assert load_task(f"{user_file}:make", data=object()).reference is None


def test_a_task_in_a_module_is_found(user_file, monkeypatch):
    monkeypatch.syspath_prepend(user_file.parent)
    # With the folder in which it lies, so that it is found again from any other.
    name = f"{user_file.with_suffix('')}:task"
    assert load_task("my_task:task").reference == {"name": name, "options": {}}
    sys.modules.pop("my_task")
    sys.modules.pop("sibling_of_my_task", None)


def test_a_task_from_a_file_goes_to_a_process_that_cannot_import_it(user_file, tmp_path):
    path_before = list(sys.path)
    pickled = tmp_path / "task.pickle"
    pickled.write_bytes(cloudpickle.dumps(load_task(f"{user_file}:task")))
    assert sys.path == path_before
    user_file.unlink()
    (user_file.parent / "sibling_of_my_task.py").unlink()
    program = (
        "import sys, pickle, torch; task = pickle.load(open(sys.argv[1], 'rb')); "
        "assert task.model()(torch.ones(1)).item() == 2.0"
    )
    subprocess.run([sys.executable, "-c", program, str(pickled)], check=True, cwd="/")


@pytest.mark.parametrize(
    ("reference", "options", "complaint"),
    [
        ("digit", {}, "there is no task 'digit', did you mean 'digits'"),
        ("xyz", {}, "there are: digits, mnist"),
        ("{file}", {}, "my_task.py does not name a task"),
        ("{folder}/other.py:task", {}, "there is no file .*other.py"),
        ("{file}:tusk", {}, "has no 'tusk', did you mean 'task'"),
        ("{file}:number", {}, "is an int, neither a dure.Task nor a function"),
        ("{file}:no_task", {}, "returned an int, not a dure.Task"),
        ("{file}:task", {"n": 3}, "takes no options: leave out --n"),
        ("{file}:make", {"m": 3}, "has no option --m"),
        ("{file}:needs", {}, "needs --data DIR --steps STEPS"),
        ("mnist", {}, "needs --data DIR"),
        ("digits", {"model": "nlp"}, "there is no model 'nlp', did you mean 'mlp'"),
        ("digits", {"learning_rate": 1}, "has no option --learning-rate; there are: model, lr"),
        ("no_such_package.tasks:task", {}, "no_such_package.tasks could not be imported"),
    ],
)
def test_what_is_no_task_is_refused(user_file, reference, options, complaint):
    reference = reference.format(file=user_file, folder=user_file.parent)
    with pytest.raises(ValueError, match=complaint):
        load_task(reference, **options)


def test_a_file_that_raises_is_named_with_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    with pytest.raises(
        ValueError, match=r"broken\.py could not be loaded: ZeroDivisionError: division by zero"
    ):
        load_task(f"{tmp_path / 'broken.py'}:task")
    assert not any(name.startswith("dure_file_broken") for name in sys.modules)

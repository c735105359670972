"""The built-in digits."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from dure.data import digits
from dure.data.digits import read_digits
from dure.errors import DataError


def test_there_are_1437_images_to_train_and_360_to_test():
    train, test = read_digits()
    assert train.inputs.shape == (1437, 1, 8, 8)
    assert test.inputs.shape == (360, 1, 8, 8)
    assert train.inputs.dtype == torch.float32
    assert (train.inputs.min(), train.inputs.max()) == (0, 1)
    assert train.classes == [str(digit) for digit in range(10)]
    assert torch.bincount(test.targets).tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]


def test_they_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    table = digits._table()
    assert (table[:, :-1] == pixels).all()
    assert (table[:, -1] == labels).all()


def test_they_are_read_without_importing_scikit_learn():
    program = (
        "import sys; from dure.data.digits import read_digits; read_digits(); "
        "assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        read_digits()

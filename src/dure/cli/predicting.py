"""`dure predict RUN INPUT ...`: print the predictions of a run's trained model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.cli.flags import names_before_flags, parse_flags

if TYPE_CHECKING:
    from dure.run.predict import PredictedOutputs

USAGE = "dure predict RUN INPUT ..."

ABOUT = (
    "Print the predictions of a run's model for inputs: files of npy, csv, json or safetensors, "
    "- for JSON on standard input, or examples of the task, such as test:0 or test:0:10. Inputs "
    "of several tensors are objects of JSON, or rows of csv by the names of columns; texts go "
    "through the task's collate function, and Task(parse=...) takes rows of any other form."
)


@dataclass(frozen=True)
class PredictOptions:
    """Options of predictions.

    Args:
        task: the task, path/to/file.py:name, if the run was not started here and its task is not
            built in.
        out: a file for all outputs, npy.
        json: print outputs, and probabilities of classes, as JSON on standard output.
        last: use the last model, even if a validation set has chosen a better model.
    """

    task: str | None = None
    out: Path | None = None
    json: bool = False
    last: bool = False


def main(given: list[str]) -> int:
    """Print a line for each input: the likeliest classes, or the outputs."""
    names, flags = names_before_flags(given)
    # - means standard input, and is no flag.
    while flags[:1] == ["-"]:
        names.append(flags.pop(0))
    if len(names) < 2 and "--help" not in flags:
        raise ValueError(f"{USAGE}: name a run folder and at least one input")
    how: PredictOptions = parse_flags(USAGE, {"how": PredictOptions}, flags, ABOUT)["how"]
    if how.out is not None and how.out.suffix != ".npy":
        raise ValueError(f"--out is {how.out}, but outputs are written as npy: use a name NAME.npy")
    from dure.run.predict import predict

    folder, *sources = names
    found = [(source, predict(Path(folder), source, how.task, how.last)) for source in sources]
    if found[0][1].of:
        print(found[0][1].of, file=sys.stderr)
    if how.out is not None:
        import numpy

        numpy.save(how.out, numpy.concatenate([one.outputs.numpy() for _, one in found]))
    if how.json:
        print(json.dumps([each for source, one in found for each in _as_json(source, one)]))
        return 0
    for source, one in found:
        for place in range(len(one.outputs)):
            print(f"{_name(source, place, len(one.outputs))}: {_in_words(one, place)}")
    return 0


def _name(source: str, place: int, count: int) -> str:
    return source if count == 1 else f"{source} [{place}]"


def _in_words(found: PredictedOutputs, place: int) -> str:
    best = found.best(place)
    if best:
        return ", ".join(f"{name} {100 * value:.1f} %" for name, value in best)
    numbers = found.outputs[place].flatten().tolist()
    more = f", … {len(numbers)} numbers" if len(numbers) > 12 else ""
    return ", ".join(f"{value:.6g}" for value in numbers[:12]) + more


def _as_json(source: str, found: PredictedOutputs) -> list[dict[str, Any]]:
    told = []
    for place, outputs in enumerate(found.outputs):
        one: dict[str, Any] = {"input": source, "place": place, "outputs": outputs.tolist()}
        if found.probabilities is not None:
            one["class"] = found.best(place, 1)[0][0]
            one["probabilities"] = dict(
                zip(found.classes, found.probabilities[place].tolist(), strict=True)
            )
        told.append(one)
    return told

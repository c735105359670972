"""What crosses a cut in fewer bytes: how many, how exact, what it trains, what is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.compression import Cast, Compression, Int8, TopK
from dure.contracts.fresh_model import seeded_model
from dure.data.client_part import divide
from dure.data.conversion import as_examples
from dure.data.partition import IID
from dure.errors import LossNotFiniteError
from dure.fleet.virtual_network import VirtualNetwork, nbytes
from dure.split.coding import CodecCoder, CutShape, TopKCoder
from dure.split.compressed import CutCompression, coder
from dure.split.leakage.guard import Guard
from dure.split.messages import SERVER, Gradients, OutputGradients, Outputs, Smashed
from dure.split.strategy import Split

KINDS: list[Callable[..., Split]] = [dure.SplitLearning, dure.ParallelSplit, dure.SplitFed]
CUTS = [("1",), ("1", "2")]
EXAMPLES, CLIENTS, SIZE = 48, 2, 8
INPUTS, FIRST, SECOND, CLASSES = 5, 9, 7, 3


def task_of(model: Callable[[], nn.Module] | None = None, dtype: Any = torch.float64) -> dure.Task:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, INPUTS, generator=draws, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, CLASSES, (EXAMPLES,), generator=draws)

    def layers() -> nn.Module:
        return nn.Sequential(
            nn.Linear(INPUTS, FIRST),
            nn.Tanh(),
            nn.Linear(FIRST, SECOND),
            nn.Tanh(),
            nn.Linear(SECOND, CLASSES),
        ).to(dtype)

    return dure.Task(
        model or layers,
        F.cross_entropy,
        (inputs, labels),
        test=(inputs, labels),
        optimizer=partial(torch.optim.SGD, lr=0.3),
    )


def run(strategy: Split, rounds: int = 1, task: dure.Task | None = None, **more: Any) -> dure.Run:
    stop = dure.Stop(rounds=rounds)
    return dure.train(task or task_of(), strategy, dure.Simulated(), stop, seed=0, **more)


def same(one: dure.Run, other: dure.Run) -> bool:
    """Whether two runs have trained the same weights, to the bit."""
    mine, yours = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(mine[name], yours[name]) for name in mine)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """All messages that are sent: (from, to, what)."""
    sent: list[tuple[str, str, Any]] = []
    send = VirtualNetwork.send

    def noted(self: VirtualNetwork, sender: str, envelopes: Any) -> None:
        sent.extend((sender, receiver, message) for receiver, message in envelopes)
        send(self, sender, envelopes)

    monkeypatch.setattr(VirtualNetwork, "send", noted)
    return sent


# Bytes

FORMULAS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "none": lambda n, d: (4 * n * d, 4 * n * d),
    "bfloat16": lambda n, d: (2 * n * d, 2 * n * d),
    "int8": lambda n, d: (n * d + 4 * n, n * d + 4 * n),
    "top-k:0.3": lambda n, d: (n * math.ceil(0.3 * d) * (4 + 1), n * math.ceil(0.3 * d) * 4),
    "top-k:1.0": lambda n, d: (4 * n * d, 4 * n * d),
}
"""(there, back) of n examples of d numbers, in float32."""
LOSSY = ["bfloat16", "int8", "top-k:0.3"]


@pytest.mark.parametrize(
    ("kind", "compression", "cut"),
    [
        *[(dure.SplitLearning, compression, ("1",)) for compression in FORMULAS],
        *[(kind, compression, ("1", "2")) for kind in KINDS for compression in LOSSY],
    ],
)
def test_the_bytes_at_the_cut_are_those_of_the_formula(
    said: list[tuple[str, str, Any]], kind: Any, compression: str, cut: tuple[str, ...]
) -> None:
    strategy = kind(cut=cut, clients=CLIENTS, batch_size=10, compression=compression)
    done = run(strategy, task=task_of(dtype=torch.float32))
    batches = [10, 10, 4] * CLIENTS
    sizes = {
        kind: sum(nbytes(message.values) for _, _, message in said if isinstance(message, kind))
        for kind in (Smashed, Gradients, Outputs, OutputGradients)
    }
    widths = [FIRST, SECOND]
    formula = FORMULAS[compression]
    there = [sum(formula(examples, width)[0] for examples in batches) for width in widths]
    back = [sum(formula(examples, width)[1] for examples in batches) for width in widths]
    assert sizes[Smashed] == there[0]
    assert sizes[Gradients] == back[0]
    assert sizes[Outputs] == (there[1] if len(cut) == 2 else 0)
    assert sizes[OutputGradients] == (back[1] if len(cut) == 2 else 0)
    facts = done.summary["facts"][0]["split"]
    expected = [list(formula(10, width)) for width in widths[: len(cut)]]
    assert facts["compressed_bytes"] == expected
    sent = sum(nbytes(message) for sender, _, message in said if sender.startswith("client"))
    assert done.summary["bytes_sent_per_worker"] == pytest.approx(sent / CLIENTS, abs=1)


@pytest.mark.parametrize(
    ("width", "place"), [(2, 1), (256, 1), (257, 2), (32768, 2), (32769, 4), (70000, 4)]
)
def test_places_take_as_few_bytes_as_reach_them(width: int, place: int) -> None:
    crossed = CutShape((2, width), torch.float32, 0, 2)
    one = TopKCoder(0.5, crossed)
    # The last ones are the largest.
    value = torch.arange(2.0 * width).view(2, width) % width
    sent = one.write(value)
    k = math.ceil(width / 2)
    assert sent.nbytes == one.nbytes(2)[0] == 2 * k * (4 + place)
    read = TopKCoder(0.5, crossed).read(sent, 2)
    assert torch.equal(read, torch.where(value >= width - k, value, 0))


# What arrives


def round_trip(one: Any, other: Any, value: Tensor, examples: int) -> Tensor:
    read = other.read(one.write(value), examples)
    assert read.shape == value.shape
    assert read.dtype == value.dtype
    assert isinstance(read, Tensor)
    return read


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_example_arrives_within_the_bound_of_its_code(dim: int, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(dim)
    value = torch.randn(6, 6, 6, generator=draws, dtype=torch.complex128)
    value = value.to(dtype) if dtype.is_complex else value.real.to(dtype)
    if dtype.is_complex:
        size = torch.view_as_real(value).movedim(dim, 0).reshape(6, -1).abs().amax(1)
    else:
        size = value.double().movedim(dim, 0).reshape(6, -1).abs().amax(1)
    crossed = CutShape((6, 6, 6), dtype, dim, 6)

    def off(codec: Compression) -> Tensor:
        read = round_trip(CodecCoder(codec, crossed), CodecCoder(codec, crossed), value, 6)
        parts = (read - value).resolve_conj()
        real = torch.view_as_real(parts) if dtype.is_complex else parts
        return real.double().movedim(dim, 0).reshape(6, -1).abs().amax(1)

    # What is computed in float32 and is itself a half is rounded once more.
    half = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    assert bool((off(Int8()) <= size * (1 / 254 + 1e-6 + half)).all())
    assert bool((off(Cast("bfloat16")) <= size * 2.0**-8).all())
    kept = round_trip(TopKCoder(0.25, crossed), TopKCoder(0.25, crossed), value, 6)
    assert bool(((kept == value) | (kept == 0) | torch.tensor(dtype.is_complex)).all())
    numbers = torch.view_as_real(kept) if dtype.is_complex else kept
    counts = (numbers != 0).movedim(dim, 0).reshape(6, -1).sum(1)
    assert counts.tolist() == [math.ceil(0.25 * numbers.numel() / 6)] * 6


def test_top_k_sends_the_largest_of_each_example_and_back_the_gradients_there() -> None:
    crossed = CutShape((2, 5), torch.float64, 0, 2)
    head, tail = TopKCoder(0.4, crossed), TopKCoder(0.4, crossed)
    value = torch.tensor([[1.0, -5.0, 0.5, 3.0, 2.0], [0.25, 0.5, -0.75, 0.0, 0.0]]).double()
    arrived = round_trip(head, tail, value, 2)
    expected = [[0.0, -5.0, 0.0, 3.0, 0.0], [0.0, 0.5, -0.75, 0.0, 0.0]]
    assert arrived.tolist() == expected
    gradient = torch.arange(10.0).view(2, 5).double()
    sent = tail.write_back(gradient)
    assert sent.tolist() == [[1.0, 3.0], [6.0, 7.0]]
    assert head.read_back(sent, 2).tolist() == [
        [0.0, 1.0, 0.0, 3.0, 0.0],
        [0.0, 6.0, 7.0, 0.0, 0.0],
    ]


def test_what_gradients_lose_is_sent_with_the_next_ones_of_the_same_shape_and_turn() -> None:
    crossed = CutShape((4, 3), torch.float64, 0, 4)
    draws = torch.Generator().manual_seed(1)
    gradients = [torch.randn(4, 3, generator=draws, dtype=torch.float64) for _ in range(50)]
    one = CodecCoder(Int8(), crossed)
    arrived = [one.read_back(one.write_back(gradient), 4) for gradient in gradients]
    total = (sum(arrived) - sum(gradients)).abs().amax()  # type: ignore[union-attr]
    largest = max(float(gradient.abs().amax()) for gradient in gradients) * (1 + 1 / 254)
    assert 0 < float(total) <= largest / 254 * 1.01
    # A batch of another shape, and a turn, begin anew.
    first = CodecCoder(Int8(), crossed).write_back(gradients[0])
    one.write_back(gradients[0][:2])
    assert torch.equal(one.write_back(gradients[0]), first)
    assert not torch.equal(one.write_back(gradients[0]), first)
    one.forget()
    assert torch.equal(one.write_back(gradients[0]), first)
    # Values have no memory.
    assert torch.equal(one.write(gradients[0]), one.write(gradients[0]))


# What is trained


def coded(compression: str, value: Tensor) -> Tensor:
    """What arrives of a matrix, by the rules written down once more."""
    if compression == "bfloat16":
        return value.to(torch.bfloat16).to(value.dtype)
    if compression == "int8":
        unit = value.abs().amax(1, keepdim=True) / 127
        return (value / unit).round() * unit
    k = math.ceil(float(compression.split(":")[1]) * value.shape[1])
    threshold = value.abs().sort(1, descending=True).values[:, k - 1 : k]
    return torch.where(value.abs() >= threshold, value, 0)


class ByHand:
    """A cut, whose gradient goes back as the rules say."""

    def __init__(self, compression: str) -> None:
        self.compression = compression
        self.lost: Tensor | None = None

    def there(self, value: Tensor) -> Tensor:
        self.sent = coded(self.compression, value.detach()).requires_grad_()
        return self.sent

    def back(self) -> Tensor:
        gradient = self.sent.grad
        assert gradient is not None
        if self.compression.startswith("top-k"):
            return torch.where(self.sent != 0, gradient, 0)
        if self.compression == "int8" and self.lost is not None and len(self.lost) == len(gradient):
            gradient = gradient + self.lost
        found = coded(self.compression, gradient)
        self.lost = gradient - found
        return found


def by_hand(compression: str, cuts: int, clients: int, rounds: int) -> tuple[nn.Module, float]:
    """The model after clients have trained in turn, and its loss across the cut."""
    task = task_of()
    model = seeded_model(task, 0)
    assert isinstance(model, nn.Sequential)
    parts = [model[:2], model[2:4], model[4:]] if cuts == 2 else [model[:2], model[2:]]
    optimizer = task.optimizer(list(model.parameters()))
    examples = as_examples(task.train)
    owned = divide(IID(), clients, examples, SIZE, 0, False)
    for round in range(rounds):
        for own in owned:
            crossings = [ByHand(compression) for _ in range(cuts)]
            for step in range(own.batches.steps_per_epoch):
                inputs, labels = examples.batch(own.at(round * own.batches.steps_per_epoch + step))
                values = [parts[0](inputs)]
                for crossing, part in zip(crossings, parts[1:], strict=True):
                    values.append(part(crossing.there(values[-1])))
                F.cross_entropy(values.pop(), labels).backward()
                for crossing, value in zip(reversed(crossings), reversed(values), strict=True):
                    value.backward(crossing.back())
                optimizer.step()
                optimizer.zero_grad()
    inputs, labels = examples.batch(torch.arange(EXAMPLES))
    with torch.no_grad():
        value = parts[0](inputs)
        for part in parts[1:]:
            value = part(coded(compression, value))
        return model, float(F.cross_entropy(value, labels))


@pytest.mark.parametrize("cut", CUTS, ids="-".join)
@pytest.mark.parametrize("compression", ["bfloat16", "int8", "top-k:0.4"])
def test_the_sides_compute_with_what_has_arrived(compression: str, cut: tuple[str, ...]) -> None:
    model, loss = by_hand(compression, len(cut), CLIENTS, 2)
    found = run(
        dure.SplitLearning(cut=cut, clients=CLIENTS, batch_size=SIZE, compression=compression), 2
    )
    for name, weight in model.state_dict().items():
        assert torch.allclose(found.model.state_dict()[name], weight, rtol=0, atol=1e-12), name
    # It is measured across the cut as well, as it was trained.
    assert found.summary["test_loss"] == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("compression", ["bfloat16", "int8", "top-k:0.4"])
def test_with_one_client_all_systems_are_the_same(compression: str) -> None:
    model, _ = by_hand(compression, 2, 1, 2)
    for kind in KINDS:
        strategy = kind(cut=("1", "2"), clients=1, batch_size=SIZE, compression=compression)
        found = run(strategy, 2).model.state_dict()
        for name, weight in model.state_dict().items():
            assert torch.allclose(found[name], weight, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("cut", CUTS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_where_nothing_is_left_out_nothing_changes(kind: Any, cut: tuple[str, ...]) -> None:
    plain = run(kind(cut=cut, clients=CLIENTS, batch_size=SIZE), 2)
    assert plain.summary["facts"][0]["split"]["compression"] == "none"
    whole = run(kind(cut=cut, clients=CLIENTS, batch_size=SIZE, compression="top-k:1"), 2)
    assert same(plain, whole)
    for name in ("test_loss", "bytes_sent_per_worker"):
        assert plain.summary[name] == whole.summary[name]


@pytest.mark.parametrize(
    ("compression", "least"), [("bfloat16", 0.9), ("int8", 0.9), ("top-k:0.1", 0.8)]
)
def test_digits_are_learned(compression: str, least: float) -> None:
    strategy = dure.SplitLearning(clients=3, batch_size=20, compression=compression)
    done = run(strategy, 4, dure.load_task("digits"))
    assert done.summary["test_accuracy"] > least


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(kind: Any, tmp_path: Path) -> None:
    strategy = kind(cut=("1", "2"), clients=CLIENTS, batch_size=SIZE, compression="int8")
    whole = run(strategy, 3)
    run(strategy, 1, out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=task_of(), stop=dure.Stop(rounds=3))
    assert same(whole, again)
    assert whole.history.steps[-1].numbers == again.history.steps[-1].numbers


# Beside defences and meters


@pytest.mark.parametrize("defence", ["max-norm:2", "isotropic:1"])
def test_noise_comes_before_the_code(
    said: list[tuple[str, str, Any]], monkeypatch: pytest.MonkeyPatch, defence: str
) -> None:
    left: list[Tensor] = []
    gradients = Guard.gradients

    def noted(self: Guard, *given: Any) -> list[Tensor]:
        found = gradients(self, *given)
        left.append(found[0])
        return found

    monkeypatch.setattr(Guard, "gradients", noted)
    run(
        dure.SplitLearning(
            cut=("1", "2"),
            clients=CLIENTS,
            batch_size=SIZE,
            defence=defence,
            compression="bfloat16",
        )
    )
    sent = [message.values[0] for _, _, message in said if isinstance(message, OutputGradients)]
    assert len(left) == len(sent) == EXAMPLES // SIZE
    for noisy, payload in zip(left, sent, strict=True):
        assert torch.equal(payload.view(torch.bfloat16), noisy.to(torch.bfloat16).reshape(-1))


@pytest.mark.parametrize(
    ("defence", "compression"),
    [("none", "int8"), ("isotropic:0.1", "top-k:0.4"), ("no-peek:0.5", "int8")],
)
def test_a_meter_reads_what_the_server_reads_and_changes_nothing(
    defence: str, compression: str
) -> None:
    strategy = dure.ParallelSplit(
        cut=("1", "2"),
        clients=CLIENTS,
        batch_size=20,
        defence=defence,
        compression=compression,
        measure_leaks=True,
    )
    metered = run(strategy)
    assert same(metered, run(dataclasses.replace(strategy, measure_leaks=False)))
    assert {"distance_correlation", "norm_leak_auc"} <= set(metered.history.steps[0].numbers or {})
    assert not same(metered, run(dataclasses.replace(strategy, compression="none")))


# What travels as it is, and what is refused


class Masked(nn.Module):
    """A mask, whole numbers and a value that learns cross before `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, FIRST)
        self.last = Behind()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        result: Tensor = self.last(hidden, inputs[:, :1] > 0, inputs[:, 0].round().long() % 5)
        return result


class Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FIRST, CLASSES)

    def forward(self, hidden: Tensor, mask: Tensor, shift: Tensor) -> Tensor:
        result: Tensor = self.layer(torch.where(mask, hidden, -hidden)) + shift[:, None]
        return result


def test_masks_and_whole_numbers_travel_as_they_are(said: list[tuple[str, str, Any]]) -> None:
    task = task_of(lambda: Masked().double())
    run(
        dure.SplitLearning(cut=("last",), clients=1, batch_size=None, compression="int8"), task=task
    )
    smashed = next(message for _, _, message in said if isinstance(message, Smashed))
    kinds = {value.dtype: value for value in smashed.values}
    assert set(kinds) == {torch.uint8, torch.bool, torch.int64}
    assert kinds[torch.uint8].shape == (EXAMPLES * FIRST + 8 * EXAMPLES,)
    assert all(target.dtype == torch.int64 for target in smashed.targets)


@pytest.mark.parametrize("compression", ["qsgd:7", "sign", "one-bit", "power-sgd:2"])
def test_what_is_no_code_of_values_is_refused_by_name(compression: str) -> None:
    with pytest.raises(ValueError, match=r"a cut supports none, bfloat16, float16, int8"):
        dure.SplitLearning(compression=compression).check(task_of(), dure.Simulated())


def test_a_head_that_does_not_learn_has_nothing_to_compress() -> None:
    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(INPUTS, FIRST), nn.Tanh(), nn.Linear(FIRST, CLASSES))
        return model.double().requires_grad_(False).append(nn.Linear(CLASSES, CLASSES).double())

    strategy = dure.SplitLearning(clients=CLIENTS, batch_size=SIZE, compression="int8")
    with pytest.raises(ValueError, match="no tensor at the cut has a gradient"):
        run(strategy, task=task_of(frozen))
    run(dataclasses.replace(strategy, compression="none"), task=task_of(frozen))


def smashed_of(values: tuple[Tensor, ...], examples: int = 4) -> Smashed:
    return Smashed(0, 0, examples, float(examples), values, None)


def server_of(compression: Compression) -> tuple[CutCompression, CutCompression]:
    """Both ends of a cut where 4 numbers of each example cross."""
    cuts = [[CutShape((2, 4), torch.float32, 0, 2)]]
    return CutCompression(compression, cuts), CutCompression(compression, cuts)


def spoilt(payload: Tensor, at: int, byte: int) -> Tensor:
    other = payload.clone()
    other[at] = byte
    return other


@pytest.mark.parametrize("compression", [Cast(), Int8(), TopK(0.5)], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda values: (values[0][:-1],),
        lambda values: (values[0].view(torch.int8),),
        lambda values: (values[0].view(-1, 1),),
        lambda values: (*values, values[0]),
        lambda values: (),
        lambda values: (torch.ones(4, 4),),
    ],
)
def test_values_that_nobody_can_have_written_are_refused_with_their_senders_name(
    compression: Compression, change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
) -> None:
    client, server = server_of(compression)
    right = client.written(smashed_of((torch.randn(4, 4),)))
    assert isinstance(right, Smashed)
    wrong = msgspec.structs.replace(right, values=change(right.values))
    with pytest.raises(ValueError, match="client 7 sends Smashed that cannot be decoded"):
        server.read("client 7", wrong)
    for examples in (-1, 0, 5, 10**18):
        with pytest.raises(ValueError, match="client 7 sends Smashed that cannot be decoded"):
            server.read("client 7", msgspec.structs.replace(right, examples=examples))
    server.read("client 7", right)


@pytest.mark.parametrize(
    ("compression", "at", "byte", "why"),
    [
        (Int8(), 3, 0xFF, "a unit is negative"),
        (Int8(), -1, 0x80, "a level is below -127"),
        (TopK(0.5), -1, 4, "not ascending within 0 to 3"),
        (TopK(0.5), -1, 0, "not ascending within 0 to 3"),
    ],
)
def test_what_a_payload_cannot_hold_is_refused(
    compression: Compression, at: int, byte: int, why: str
) -> None:
    client, server = server_of(compression)
    right = client.written(smashed_of((torch.ones(4, 4),)))
    assert isinstance(right, Smashed)
    wrong = msgspec.structs.replace(right, values=(spoilt(right.values[0], at, byte),))
    with pytest.raises(ValueError, match=f"client 7 sends Smashed that cannot be decoded: .*{why}"):
        server.read("client 7", wrong)


@pytest.mark.parametrize("compression", [Cast(), Int8(), TopK(0.5)], ids=str)
def test_what_is_no_number_is_refused_with_its_senders_name(compression: Compression) -> None:
    client, server = server_of(compression)
    value = torch.ones(4, 4)
    value[2, 1] = torch.nan
    with pytest.raises(LossNotFiniteError, match="step 1 of turn 1 on client 7"):
        server.read("client 7", client.written(smashed_of((value,))))


@pytest.mark.parametrize("compression", [Cast(), Int8(), TopK(0.5)], ids=str)
def test_gradients_that_belong_to_no_values_are_refused(compression: Compression) -> None:
    client, server = server_of(compression)
    gradients = Gradients(0, (torch.ones(4, 2),), 0, 0.0, 4.0)
    with pytest.raises(ValueError, match="server sends Gradients that cannot be decoded"):
        client.read(SERVER, gradients)
    server.read("client 7", client.written(smashed_of((torch.ones(4, 4),))))
    wrong = server.written(Gradients(0, (torch.ones(4, 4),), 0, 0.0, 4.0))
    assert isinstance(wrong, Gradients)
    for values in ((wrong.values[0][:-1],), (wrong.values[0].double(),), ()):
        with pytest.raises(ValueError, match="server sends Gradients that cannot be decoded"):
            client.read(SERVER, msgspec.structs.replace(wrong, values=values))
    assert isinstance(client.read(SERVER, wrong), Gradients)


def test_a_value_of_which_all_is_kept_has_no_coder() -> None:
    crossed = CutShape((2, 4), torch.float32, 0, 2)
    assert coder(TopK(0.76), crossed) is None
    assert coder(TopK(0.75), crossed) is not None
    assert coder(Int8(), None) is None

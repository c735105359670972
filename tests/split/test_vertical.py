"""Vertical split learning: what it equals, what travels, what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.group import Group
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.data.heart import FILES
from dure.errors import LossNotFiniteError
from dure.fleet.virtual_network import VirtualNetwork
from dure.protocol.server_context import ServerContext
from dure.split.alignment import message_bytes
from dure.split.parties.messages import ActivationGradients, Activations, BeginStep
from dure.split.parties.model import divide
from dure.split.parties.proof import prove
from dure.split.parties.simulated import SimulatedVerticalLearner
from small import check_all, examples, largest_difference, network, same_bits, small_task

SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.01)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.2)
FEATURES = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 4, 1], [2, 3, 5]], 3: [[0, 1], [2, 3, 4], [5]]}
WIDTH = 4
BATCH = 8
STOP = dure.Stop(steps=10)


def parted(parties: int = 2, join: str = "concat", dtype: Any = torch.float64) -> nn.Module:
    """Heads of one layer, a tail of two."""
    columns = FEATURES[parties]
    joined = WIDTH * (parties if join == "concat" else 1)
    heads = [nn.Sequential(nn.Linear(len(own), WIDTH), nn.Tanh()) for own in columns]
    tail = nn.Sequential(nn.Linear(joined, 5), nn.Tanh(), nn.Linear(5, 3))
    return dure.VerticalModel(heads, tail, join, columns).to(dtype)  # type: ignore[arg-type]


def task_of(model: Callable[[], nn.Module] = parted, **changes: Any) -> dure.Task:
    return small_task(**{"model": model, "optimizer": SGD, **changes})


def vertical(task: dure.Task, stop: dure.Stop = STOP, **fields: Any) -> dure.Run:
    world = dure.Simulated(**fields.pop("conditions", {}))
    return dure.train(task, dure.VerticalSplit(**{"batch_size": BATCH, **fields}), world, stop)


def alone(task: dure.Task, stop: dure.Stop = STOP) -> dure.Run:
    return dure.train(task, dure.SingleWorker(BATCH), stop=stop)


@pytest.mark.parametrize("join", ["concat", "sum"])
@pytest.mark.parametrize("parties", [1, 2, 3])
def test_it_has_the_trajectory_of_the_undivided_model(parties: int, join: str) -> None:
    for optimizer in (SGD, MOMENTUM, ADAM):
        task = task_of(
            partial(parted, parties, join),
            optimizer=optimizer,
            lr_schedule=lambda step: 1 / (1 + step),
        )
        whole = alone(task)
        for label_party in (None, parties - 1):
            run = vertical(task, label_party=label_party)
            assert largest_difference(run, whole) < 1e-12
            losses = [[one.loss for one in each.history.steps] for each in (run, whole)]
            assert losses[0] == pytest.approx(losses[1], abs=1e-12)


class Eager(torch.optim.Optimizer):
    """Makes its state when it is made: a rate for each element."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for group in self.param_groups:
            for one in group["params"]:
                rates = torch.linspace(0.01, 0.1, one.numel(), dtype=one.dtype)
                self.state[one]["rates"] = rates.reshape(one.shape)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one -= self.state[one]["rates"] * one.grad


def test_state_that_an_optimizer_makes_at_once_is_divided_too() -> None:
    task = task_of(partial(parted, 3), optimizer=Eager)
    assert largest_difference(vertical(task), alone(task)) < 1e-12


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAM, ADAGRAD])
def test_a_model_that_begins_with_a_linear_layer_is_divided_by_columns(optimizer: Any) -> None:
    task = small_task(optimizer=optimizer)  # 6-12-8-3
    for features in ((), ("0,2,4", "1,5,3"), ([5], [0, 1], [2, 3, 4])):
        assert largest_difference(vertical(task, features=features), alone(task)) < 1e-12


def test_an_optimizer_that_groups_parameters_by_their_places_keeps_its_groups() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.01)

    for model in (parted, network):
        task = task_of(model, optimizer=optimizer)
        assert largest_difference(vertical(task), alone(task)) < 1e-12


def test_gradients_are_those_of_the_undivided_model() -> None:
    for model in (partial(parted, 3, "sum"), partial(parted, 2, "concat"), network):
        whole = seeded_model(task_of(model), 0)
        other = seeded_model(task_of(model), 0)
        inputs, targets = examples().batch(torch.arange(9))
        division = divide(other, inputs, (), None)
        F.cross_entropy(whole(inputs), targets).backward()
        F.cross_entropy(division.forward(inputs), targets).backward()
        wanted = [one.grad for one in whole.parameters()]
        by_place = {id(one): number for number, one in enumerate(other.parameters())}
        for part in (*division.heads, division.tail):
            for piece in part.pieces:
                gradient = wanted[by_place[id(piece.there)]]
                assert gradient is not None
                assert piece.here.grad is not None
                assert float((piece.cut(gradient) - piece.here.grad).abs().max()) < 1e-14


class Ignores(nn.Module):
    """A tail that looks at what parties send in its first batches only."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.batches = batches

    def forward(self, joined: Tensor) -> Tensor:
        self.batches -= self.training
        # Not by a slice or a factor of 0: that would give gradients of 0.
        scores: Tensor = self.layer(joined if self.batches >= 0 else torch.ones_like(joined))
        return scores


def test_weights_without_a_gradient_stay_as_they_are() -> None:
    def frozen() -> nn.Module:
        model = parted()
        model.heads[0].requires_grad_(False)
        return model

    def unseen(batches: int) -> nn.Module:
        heads = [nn.Linear(3, WIDTH), nn.Linear(3, WIDTH)]
        return dure.VerticalModel(heads, Ignores(batches), "sum", FEATURES[2]).double()

    # Momentum and decay would move a weight whose gradient is 0, but not one that has none.
    for model in (frozen, partial(unseen, 0), partial(unseen, 3)):
        task = task_of(model, optimizer=MOMENTUM)
        run = vertical(task)
        assert largest_difference(run, alone(task)) < 1e-12
        if model is frozen:  # nobody sends gradients that a head does not want
            received = {one["name"]: one["bytes_received"] for one in run.summary["per_worker"]}
            assert received["party 0"] == 0


def test_a_tail_may_compute_in_place() -> None:
    def model() -> nn.Module:
        tail = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 3))
        return dure.VerticalModel([nn.Linear(6, WIDTH)], tail, "sum", FEATURES[1]).double()

    task = task_of(model)
    assert largest_difference(vertical(task), alone(task)) < 1e-12


def test_batch_norm_has_the_statistics_of_the_batch() -> None:
    def model() -> nn.Module:
        heads = [nn.Sequential(nn.Linear(3, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)]
        tail = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
        return dure.VerticalModel(heads, tail, "sum", FEATURES[2]).double()

    task = task_of(model, n=40)
    assert largest_difference(vertical(task), alone(task)) < 1e-12


def test_two_hospitals_with_half_of_the_features_train_the_task_heart(tmp_path: Path) -> None:
    lines = "63,1,1,145,233,1,2,150,0,2.3,3,0,6,0\n44,0,4,?,0,0,1,127,0,0,?,?,?,2\n"
    for file in FILES:
        (tmp_path / file).write_text(lines * 5)
    task = dure.load_task("heart", data=tmp_path)
    features = ("0-2,6,7,9-12,22-24", "3-5,8,13-21,25-28")
    for own in ((), features):
        assert largest_difference(vertical(task, features=own), alone(task)) < 1e-6  # in float32


class Noisy(torch.utils.data.Dataset[Any]):
    """Examples that are others in every reading."""

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(6, dtype=torch.float64), index % 3


def test_transforms_are_of_a_person_and_not_of_a_party() -> None:
    task = task_of(partial(parted, 3), train=Noisy(), test=None)
    assert largest_difference(vertical(task), alone(task)) < 1e-12


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All messages that are sent."""
    sent: list[Any] = []
    send = VirtualNetwork.send

    def noted(self: VirtualNetwork, sender: str, said: Any) -> None:
        sent.extend(message for _, message in said)
        send(self, sender, said)

    monkeypatch.setattr(VirtualNetwork, "send", noted)
    return sent


@pytest.mark.parametrize("label_party", [None, 1])
def test_what_travels_is_activations_and_their_gradients(
    label_party: int | None, messages: list[Any]
) -> None:
    # 41 examples: five batches of 8, and one of 1.
    run = vertical(task_of(partial(parted, 3)), dure.Stop(epochs=2), label_party=label_party)
    own = 2 * 41 * WIDTH * 8
    counts = {one["name"]: one for one in run.summary["per_worker"]}
    far = [number for number in range(3) if number != label_party]
    for number in far:
        one = counts[f"party {number}"]
        assert (one["bytes_sent"], one["bytes_received"]) == (own, own)
    holder = counts["server" if label_party is None else f"party {label_party}"]
    assert holder["bytes_sent"] == holder["bytes_received"] == len(far) * own
    assert {type(one) for one in messages} == {BeginStep, Activations, ActivationGradients}
    inputs = examples().inputs
    for one in messages:
        if isinstance(one, Activations):
            assert one.values.shape[1:] == (WIDTH,)
            assert not torch.isin(one.values, inputs).any()


@pytest.mark.parametrize("label_party", [None, 0, 1])
def test_a_step_takes_as_long_as_the_slowest_party(label_party: int | None, tmp_path: Path) -> None:
    # Device 1 computes a tenth as fast. Heads alike, and no tail: each head is half of the model.
    devices = tmp_path / "devices.csv"
    devices.write_text("client,examples_per_second,down_mbit,up_mbit\n0,80,1e9,1e9\n1,8,1e9,1e9\n")

    def model() -> nn.Module:
        heads = [nn.Linear(3, 3), nn.Linear(3, 3)]
        return dure.VerticalModel(heads, nn.Identity(), "sum", FEATURES[2]).double()

    conditions = {"devices": f"file:{devices}"}
    run = vertical(
        task_of(model), dure.Stop(steps=4), conditions=conditions, label_party=label_party
    )
    assert run.summary["numbers"]["virtual_seconds"] == pytest.approx(4 * 0.5 * 8 / 8)
    seconds = {one["name"]: one["compute_seconds"] for one in run.summary["per_worker"]}
    assert seconds.pop("server", 0.0) == 0.0
    assert seconds == pytest.approx({"party 0": 0.2, "party 1": 2.0})


def learner(task: dure.Task, **fields: Any) -> SimulatedVerticalLearner:
    plan = dure.VerticalSplit(**{"batch_size": BATCH, **fields}).plan
    # Devices that take no time: what is said is said at once.
    conditions = dure.Simulated(devices="equal:inf:inf:inf")
    return SimulatedVerticalLearner(task, ServerContext(Group(), conditions=conditions), 0, plan)


def test_the_order_of_arrival_changes_no_bit() -> None:
    task = task_of(partial(parted, 3, "sum"))
    models: list[dict[str, Tensor]] = []
    for order in ([0, 1, 2], [2, 0, 1]):
        one = learner(task)
        for _ in range(3):
            said = dict(one.holder.begin(0.0))
            answers = [one.members[n].receive("server", said[f"party {n}"], 0.0) for n in range(3)]
            back: list[Any] = []
            for n in order:
                ((_, activations),) = answers[n]
                back += one.holder.receive(f"party {n}", activations, 0.0)
            gradients = dict(back)
            for n in order:
                one.members[n].receive("server", gradients[f"party {n}"], 0.0)
        models.append({name: value.clone() for name, value in one.weights().items()})
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_messages_that_are_not_due_are_refused_by_the_name_of_their_sender() -> None:
    one = learner(task_of())
    holder, member = one.holder, one.members[1]
    values = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
    for sender, message, said in [
        ("party 1", Activations(0, values[:7], True), r"party 1 sends .* \[7, 4\] and .* 8 ex"),
        ("party 1", Activations(3, values, True), "party 1 sends activations of step 4"),
        (
            "party 2",
            Activations(0, values, True),
            "server cannot process Activations from party 2",
        ),
        ("party 1", BeginStep(0), "server cannot process BeginStep from party 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            holder.receive(sender, message, 0.0)
    holder.receive("party 1", Activations(0, values, True), 0.0)
    with pytest.raises(ValueError, match="party 1 sends activations of step 1"):
        holder.receive("party 1", Activations(0, values, True), 0.0)
    with pytest.raises(ValueError, match="party 1 received gradients of step 1"):
        member.receive("server", ActivationGradients(0, values), 0.0)
    with pytest.raises(ValueError, match="party 1 cannot process BeginStep from party 0"):
        member.receive("party 0", BeginStep(0), 0.0)
    with pytest.raises(ValueError, match="party 1 should start step 3"):
        member.receive("server", BeginStep(2), 0.0)
    member.receive("server", BeginStep(0), 0.0)
    with pytest.raises(ValueError, match=r"server sends party 1 gradients of shape \[7, 4\]"):
        member.receive("server", ActivationGradients(0, values[:7]), 0.0)


def known_to_all(strategy: dure.VerticalSplit, task: dure.Task, parties: int) -> set[int]:
    people = [strategy.plan.known(n, len(task.train), 0).tolist() for n in range(parties)]
    return set.intersection(*map(set, people))


@pytest.mark.parametrize("label_party", [None, 0])
def test_aligned_parties_train_on_the_people_whom_all_know(label_party: int | None) -> None:
    data = examples(60)
    train = dure.Examples(data.inputs, data.targets, keys=[f"person {n}" for n in range(60)])
    task = task_of(partial(parted, 3), train=train)
    fields: dict[str, Any] = {"align": True, "missing": 0.2, "label_party": label_party}
    strategy = dure.VerticalSplit(batch_size=BATCH, **fields)
    run = vertical(task, **fields)
    common = known_to_all(strategy, task, 4 if label_party is None else 3)
    assert 0 < len(common) < 48
    facts = run.summary["facts"][0]["vertical"]
    assert (facts["people"], facts["known"]) == (len(common), 48)
    # In the order for all, it is one worker with the people whom all know.
    rows = learner(task, **fields).rows
    order = rows[0]
    assert all(torch.equal(order, own) for own in rows.values())
    assert set(order.tolist()) == common
    assert order.tolist() != sorted(order.tolist())
    inputs, targets = train.batch(order)
    assert largest_difference(run, alone(task_of(partial(parted, 3), train=(inputs, targets)))) == 0
    # Alignment is counted, once.
    batches = Batches(len(common), BATCH, 0)
    trained = sum(len(batches.at(step)) for step in range(10)) * WIDTH * 8
    up, down = message_bytes(48, 48, len(common))
    last = run.summary["per_worker"][-1]
    assert last["name"] == "party 2"
    assert (last["bytes_sent"], last["bytes_received"]) == (up + trained, down + trained)


def test_a_column_of_the_inputs_can_name_people() -> None:
    data = examples(30)
    ids = torch.randperm(30, generator=torch.Generator().manual_seed(1)) + 1000
    inputs = torch.cat([data.inputs, ids.double()[:, None]], 1)
    task = task_of(train=(inputs, data.targets), test=None)
    run = vertical(task, align=True, id_column=6)
    assert run.summary["facts"][0]["vertical"]["people"] == 30
    with pytest.raises(ValueError, match="column 0 has people's ids, but is a feature"):
        check_all(
            dure.VerticalSplit(align=True, id_column=0),
            task_of(train=(inputs[:, [6, 1, 2, 3, 4, 5]], data.targets)),
            None,
        )


@pytest.mark.parametrize("fields", [{}, {"align": True, "missing": 0.1, "label_party": 1}])
@pytest.mark.parametrize("model", [parted, network])
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(
    model: Callable[[], nn.Module], fields: dict[str, Any], tmp_path: Path
) -> None:
    data = examples(40)
    train = dure.Examples(data.inputs, data.targets, keys=list(range(40)))
    task = task_of(model, train=train, optimizer=ADAM)
    whole = vertical(task, **fields)
    strategy = dure.VerticalSplit(batch_size=BATCH, **fields)
    dure.train(task, strategy, dure.Simulated(), dure.Stop(steps=4), out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=task, stop=STOP)
    assert same_bits(whole, again)
    for name in ("bytes_sent", "bytes_received", "facts", "numbers"):
        assert whole.summary[name] == again.summary[name]


def test_a_loss_that_is_not_finite_names_the_party_that_has_made_it() -> None:
    data = examples()
    inputs = data.inputs.clone()
    inputs[:, 3] = float("nan")
    with pytest.raises(LossNotFiniteError, match="party 1 sends activations with NaN at step 1"):
        vertical(task_of(train=(inputs, data.targets)))
    with pytest.raises(LossNotFiniteError, match="at step 1 on server"):
        vertical(task_of(loss=lambda outputs, targets: outputs.sum() * float("inf")))


def test_models_are_trained_undivided_by_other_systems() -> None:
    task = task_of()
    one = alone(task, dure.Stop(epochs=1))
    federated = dure.FedAvg(clients=1, batch_size=BATCH)
    run = dure.train(task, federated, dure.Simulated(), dure.Stop(rounds=1))
    assert largest_difference(run, one) < 1e-12
    strategy = dure.DataParallel(batch_size=BATCH)
    run = dure.train(task, strategy, dure.Threads(2), dure.Stop(epochs=1))
    assert largest_difference(run, one) < 1e-12
    assert dure.Pipeline().prove(task, seeded_model(task, 0), dure.Processes(2)) is not None


class Doubles(dure.VerticalModel):
    """Does more than its parts."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


class OnlyOnce(nn.Module):
    """Returns its input in the first training pass, which the undivided model makes; then NaN."""

    passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        OnlyOnce.passes += self.training
        return inputs if OnlyOnce.passes <= 1 else inputs * float("nan")


def test_parts_that_alone_are_not_finite_are_no_parts_of_the_model() -> None:
    def model() -> nn.Module:
        tail = nn.Sequential(nn.Linear(2 * WIDTH, 3), OnlyOnce())
        return dure.VerticalModel(heads(), tail, "concat", FEATURES[2]).double()

    task = task_of(model)
    with pytest.raises(ValueError, match="outputs are not finite in the model or in its parts"):
        prove(task, model(), (), 2, 8)


class Stacked(nn.Module):
    """A model that is no VerticalModel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.layer(inputs))


def heads(outputs: Sequence[int] = (WIDTH, WIDTH)) -> list[nn.Module]:
    return [nn.Linear(3, outputs[0]), nn.Linear(3, outputs[1])]


def tied() -> nn.Module:
    layer = nn.Linear(3, 3)
    return dure.VerticalModel([layer, layer], nn.Identity(), "sum", FEATURES[2])


def hooked() -> nn.Module:
    model = parted()
    model.register_forward_hook(lambda module, given, returned: 2 * returned)
    return model


def tied_behind() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Stacked, "Stacked cannot be divided by columns: use dure.VerticalModel"),
        (lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 3)), "Sequential cannot be divided"),
        (
            lambda: Doubles(heads(), nn.Linear(4, 3), "sum", FEATURES[2]),
            "Doubles has its own forward",
        ),
        (tied, "a parameter is in two parts of the model"),
        (tied_behind, "is used again after it"),
        (hooked, "VerticalModel has hooks"),
        (
            lambda: dure.VerticalModel(heads((4, 1)), nn.Linear(4, 3), "sum", FEATURES[2]),
            r"shapes \[1, 4\], \[1, 1\] cannot be summed",
        ),
        (
            lambda: dure.VerticalModel(
                [nn.Linear(3, 4), nn.LSTM(3, 4)], nn.Linear(8, 3), "concat", FEATURES[2]
            ),
            "the head of party 1 returns tuple",
        ),
        (
            lambda: dure.VerticalModel(heads(), nn.Linear(4, 3), "sum", [[0, 1, 2], [3, 4, 6]]),
            "features name column 6, but inputs have 6",
        ),
        (lambda: nn.Linear(5, 3), "first layer has 5 columns"),
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            "parameters without a shape yet",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    model: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_all(dure.VerticalSplit(), task_of(lambda: model().double()), None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"parties": 0}, "parties is 0"),
        ({"parties": 3}, "parties is 3, but 2 parties have features"),
        ({"label_party": 2}, "label_party is 2, but there are 2 parties"),
        ({"features": ("0-2", "3-5")}, "features differ from those of the model's heads"),
        ({"features": ("0-2", "x")}, "features has 'x'"),
        ({"features": ("0-2", "3,3")}, "has a column twice"),
        ({"features": ([0], [])}, "features has ''"),
        ({"missing": 0.5}, "missing needs alignment"),
        ({"id_column": 1}, "id_column needs alignment"),
        ({"missing": 1.0, "align": True}, "missing is 1.0"),
        ({"align": True}, "the keys of the task name 3 people, but there are 41 examples"),
        ({"align": True, "id_column": 6}, "id_column is 6, but inputs are not a tensor"),
        ({"align": True, "id_column": 1}, "column 1 has fractions"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_all(dure.VerticalSplit(**fields), task_of(), None)


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (("0-2", "2-5"), "has 6 input columns, but features list 7"),
        (("0-2", "3-4"), "has 6 input columns, but features list 5"),
    ],
)
def test_a_linear_layer_has_each_column_with_one_party(
    features: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_all(dure.VerticalSplit(features=features), small_task(), None)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused_where_one_is_divided() -> None:
    task = small_task(optimizer=partial(torch.optim.LBFGS, lr=0.1))
    with pytest.raises(ValueError, match="LBFGS"):
        check_all(dure.VerticalSplit(), task, None)


def test_people_need_names_to_be_aligned() -> None:
    data = examples()
    task = task_of(train=(data.inputs, data.targets))
    with pytest.raises(ValueError, match="alignment needs ids of people"):
        check_all(dure.VerticalSplit(align=True), task, None)


def test_parties_have_columns_of_one_tensor() -> None:
    data = examples()
    task = task_of(train=({"x": data.inputs}, data.targets), test=None)
    with pytest.raises(ValueError, match="have to be one tensor of shape"):
        check_all(dure.VerticalSplit(), task, None)


def test_heads_and_features_go_together() -> None:
    with pytest.raises(ValueError, match="2 heads, but the columns of 3 parties"):
        dure.VerticalModel(heads(), nn.Identity(), "sum", FEATURES[3])
    with pytest.raises(ValueError, match="join is 'mean'"):
        dure.VerticalModel(heads(), nn.Identity(), "mean", FEATURES[2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="party 1 has no columns"):
        dure.VerticalModel(heads(), nn.Identity(), "sum", [[0, 1, 2], []])

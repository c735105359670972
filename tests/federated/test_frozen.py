"""Models of which a part is frozen: that part neither travels nor is counted, and nothing else
changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.world import RankContext
from dure.errors import RunFolderError, WorkerFailedError
from dure.federated.engines.engine_choice import forks_here
from dure.federated.server.server import FederatedServer
from dure.federated.strategy import Federated
from dure.tensors.flat import trainable_parameters
from small import CLASSES, FEATURES, largest_difference, network, same_bits, small_task

WIDTH = 12
TRAINED = 12 * 8 + 8 + 8 * 3 + 3
"""Elements of what is trained of `frozen`."""

SOME: dict[str, Any] = {"clients": 5, "batch_size": 4, "held_out": 0.2}
FULL: dict[str, Any] = {"clients": 5, "held_out": 0.2}

SYSTEMS: dict[str, Federated] = {
    "fed-sgd": dure.FedSGD(**FULL),
    "fed-avg": dure.FedAvg(**SOME, fine_tune=1),
    "fed-prox": dure.FedProx(**SOME, mu=0.3),
    "scaffold": dure.Scaffold(**SOME),
    "fed-avg-m": dure.FedAvgM(**SOME),
    "fed-adam": dure.FedAdam(**SOME),
    "fed-adagrad": dure.FedAdagrad(**SOME),
    "fed-yogi": dure.FedYogi(**SOME),
    "fed-async": dure.FedAsync(**SOME, fraction=0.4),
    "fed-buff": dure.FedBuff(**SOME, fraction=0.6, buffer=3),
    "byzantine": dure.ByzantineGD(**FULL, groups=3),
    "fed-per": dure.FedPer(**SOME),
    "ditto": dure.Ditto(**SOME),
    "per-fed-avg": dure.PerFedAvg(**SOME),
    "hessian-free": dure.PerFedAvg(**SOME, order="hessian-free"),
    "krum": dure.FedAvg(**SOME, aggregate="krum:1"),  # type: ignore[arg-type]
    "clipped": dure.FedAvg(**SOME, aggregate="clipped:0.1/median"),  # type: ignore[arg-type]
    "rfa": dure.FedAvg(**SOME, aggregate="rfa"),  # type: ignore[arg-type]
}


def frozen() -> nn.Module:
    """The network of the other tests, of which the first layer is not trained."""
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index,operator]
    return model


class Constant(nn.Module):
    """The same function, whose first layer is no parameter, nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        layer, *rest = network().children()
        assert isinstance(layer, nn.Linear)
        self.constant = layer.weight.detach(), layer.bias.detach()
        self.rest = nn.Sequential(*rest)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.rest(F.linear(inputs, *self.constant))
        return scores


def train(
    model: Callable[[], nn.Module], system: Federated, rounds: int = 3, **changes: Any
) -> dure.Run:
    world = dure.Simulated(engine=changes.pop("engine", "auto"), processes=2)
    folder = changes.pop("out", None)
    return dure.train(
        small_task(model=model, **changes),
        system,
        world,
        dure.Stop(rounds=rounds),
        evaluate_every=1,
        out=folder,
    )


def trained(run: dure.Run) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in trainable_parameters(run.model)])


def bytes_of(run: dure.Run) -> list[tuple[int, int]]:
    """(sent, received) of the server and of every client."""
    return [(one["bytes_sent"], one["bytes_received"]) for one in run.summary["per_worker"]]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_frozen_layer_is_as_a_constant_in_every_system(name: str) -> None:
    # A constant is no layer that many clients compute at once.
    mine, other = (train(one, SYSTEMS[name], engine="loop") for one in (frozen, Constant))
    assert torch.equal(trained(mine), trained(other))
    assert bytes_of(mine) == bytes_of(other)
    for metric in other.history.evaluations[0].metrics:
        assert mine.history.curve(metric) == other.history.curve(metric)


def test_the_bytes_are_those_of_what_is_trained() -> None:
    up = down = 3 * 8 * TRAINED
    for name, sent, received in (
        ("fed-avg", up, down),
        ("fed-adam", up, down),
        ("ditto", up, down),
        ("krum", up, down),
        ("scaffold", 2 * up, 2 * down),
        ("fed-per", 3 * 8 * (TRAINED - 27), 3 * 8 * (TRAINED - 27)),
    ):
        server, *clients = bytes_of(train(frozen, SYSTEMS[name]))
        assert clients == [(sent, received)] * 5, name
        assert server == (5 * received, 5 * sent), name


@pytest.mark.skipif(not forks_here(), reason="no forked processes here")
@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("name", ["fed-avg", "fed-prox", "scaffold", "ditto"])
def test_processes_train_as_one_process_does(name: str, engine: str) -> None:
    mine = train(frozen, SYSTEMS[name], engine=f"{engine}-processes")
    other = train(frozen, SYSTEMS[name], engine=engine)
    # Processes have fewer clients at once, and products of other shapes may round otherwise.
    alike = same_bits(mine, other) if engine == "loop" else largest_difference(mine, other) < 1e-12
    assert alike
    fresh = seeded_model(small_task(model=frozen), 0)
    assert torch.equal(mine.model[0].weight, fresh[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("layers", [(0,), (2,), (4,), (0, 4), (0, 2)])
@pytest.mark.parametrize(
    "name", ["fed-sgd", "fed-avg", "fed-prox", "scaffold", "fed-adam", "ditto"]
)
def test_many_clients_at_once_are_the_loop_but_for_rounding(
    name: str, layers: tuple[int, ...]
) -> None:
    def some() -> nn.Module:
        model = network()
        for layer in layers:
            model[layer].requires_grad_(False)  # type: ignore[index,operator]
        return model

    mine = train(some, SYSTEMS[name])
    assert mine.summary["facts"][0]["engine"] == "batched"
    assert largest_difference(mine, train(some, SYSTEMS[name], engine="loop")) < 1e-12


def features(model: nn.Module, examples: dure.Examples) -> dure.Examples:
    with torch.no_grad():
        return dure.Examples(model(examples.inputs), examples.targets, keys=examples.keys)


@pytest.mark.parametrize("name", ["fed-avg", "fed-prox", "scaffold", "fed-adam", "ditto", "rfa"])
@pytest.mark.parametrize("head_engine", ["loop", "batched"])
def test_a_head_on_a_frozen_body_learns_as_it_does_from_features_computed_before(
    name: str, head_engine: str
) -> None:
    def body_and_head() -> nn.Module:
        body, head = network()[:4], nn.Linear(8, CLASSES).double()  # type: ignore[index]
        return nn.Sequential(body.requires_grad_(False), head)

    whole = small_task(model=body_and_head)
    body = seeded_model(whole, 0)[0]  # type: ignore[index]
    assert whole.test is not None
    alone = train(
        lambda: body_and_head()[1],  # type: ignore[index]
        SYSTEMS[name],
        train=features(body, whole.train),
        test=features(body, whole.test),
        engine=head_engine,
    )
    together = train(body_and_head, SYSTEMS[name])
    torch.testing.assert_close(trained(together), trained(alone), rtol=1e-12, atol=1e-12)
    assert bytes_of(together) == bytes_of(alone)


class Tied(nn.Module):
    """An embedding that is not trained, with which the outputs are compared as well."""

    def __init__(self, as_parameter: bool = True) -> None:
        super().__init__()
        words = torch.randn(FEATURES, CLASSES, dtype=torch.float64)
        self.layer = nn.Linear(FEATURES, FEATURES).double()
        self.scores = nn.Linear(FEATURES, CLASSES, bias=False).double()
        self.words = nn.Parameter(words.T.contiguous(), requires_grad=False)
        self.scores.weight = self.words
        if not as_parameter:
            constant = self.words.detach()
            del self.words
            del self.scores.weight
            self.words = self.scores.weight = constant  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs + F.linear(inputs, self.words) @ self.words)
        return F.linear(hidden, self.scores.weight)


def test_a_frozen_weight_that_is_used_twice_travels_not_at_all() -> None:
    mine = train(Tied, SYSTEMS["fed-avg"])
    other = train(lambda: Tied(as_parameter=False), SYSTEMS["fed-avg"])
    assert torch.equal(trained(mine), trained(other))
    assert bytes_of(mine) == bytes_of(other)
    assert mine.model.words is mine.model.scores.weight  # type: ignore[union-attr]
    assert bytes_of(mine)[1] == (3 * 8 * 42, 3 * 8 * 42)


@pytest.mark.parametrize("system", [dure.FedAvg(clients=3), dure.LocalSGD()])
def test_a_frozen_weight_in_the_memory_of_a_trained_one_is_refused(system: Any) -> None:
    """Alone it would follow it, and here they would go apart."""

    def in_one_memory() -> nn.Module:
        model = Tied()
        model.scores.weight = nn.Parameter(model.words.data)
        return model

    with pytest.raises(
        ValueError, match=r"scores\.weight are two tensors in the same memory|words are two"
    ):
        dure.train(small_task(model=in_one_memory), system, stop=dure.Stop(rounds=1))


def test_buffers_travel_with_what_is_trained() -> None:
    def normed() -> nn.Module:
        first, *rest = frozen().children()
        return nn.Sequential(first, nn.BatchNorm1d(WIDTH).double().requires_grad_(False), *rest)

    run = train(normed, dure.FedAvg(clients=5, batch_size=4))
    # Means, variances, and a counter.
    assert bytes_of(run)[1] == (3 * 8 * (TRAINED + 2 * WIDTH + 1),) * 2
    fresh = seeded_model(small_task(model=normed), 0)
    for name, parameter in run.model.named_parameters():
        same = torch.equal(parameter, fresh.get_parameter(name))
        assert same == (not parameter.requires_grad)
    assert not torch.equal(run.model[1].running_mean, fresh[1].running_mean)  # type: ignore[index]


@pytest.mark.parametrize("system", ["fed-avg", "scaffold", "per-fed-avg"])
def test_whole_numbers_half_precision_and_nan_may_be_frozen(system: str) -> None:
    class Quantised(nn.Module):
        """A first layer of eight bits, as below adapters."""

        def __init__(self) -> None:
            super().__init__()
            self.rest = nn.Linear(FEATURES, CLASSES).double()
            constants = {
                "first": torch.randint(-9, 9, (FEATURES, FEATURES), dtype=torch.int8),
                "scale": torch.tensor(0.25).half(),
                "unused": torch.tensor([-torch.inf, torch.nan]),
            }
            self.base = nn.ParameterDict(
                {name: nn.Parameter(one, requires_grad=False) for name, one in constants.items()}
            )

        def forward(self, inputs: Tensor) -> Tensor:
            scores: Tensor = self.rest(inputs @ (self.base["first"].double() * self.base["scale"]))
            return scores

    run = train(Quantised, SYSTEMS[system])
    assert bytes_of(run)[1][0] == 3 * 8 * 21 * (2 if system == "scaffold" else 1)
    _, losses = run.history.curve("test_loss")
    assert losses[-1] < losses[0]


def test_layers_of_fed_per_are_those_that_are_trained() -> None:
    """A frozen last layer is nobody's own; above a frozen body all may be."""

    def last_frozen() -> nn.Module:
        model = network()
        model[4].requires_grad_(False)  # type: ignore[index,operator]
        return model

    def head_alone() -> nn.Module:
        model = network()
        model[:4].requires_grad_(False)  # type: ignore[index]
        return model

    run = train(last_frozen, dure.FedPer(**SOME))
    assert bytes_of(run)[1] == (3 * 8 * 84,) * 2  # the first layer of three
    run = train(head_alone, dure.FedPer(**SOME))
    assert bytes_of(run)[1] == (0, 0)
    assert set(run.history.evaluations[-1].metrics) > {"personal_loss", "client_loss"}
    with pytest.raises(ValueError, match="only 1 of the model's 3 layers are trained"):
        train(head_alone, dure.FedPer(**SOME, personal_layers=2))


# A model whose frozen part is not what the seed says


def unseeded() -> nn.Module:
    """Frozen weights that are others each time, and a class that says itself what a copy is."""

    class Own(nn.Sequential):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            raise TypeError("not to be copied")

    first, *rest = frozen().children()
    with torch.no_grad():
        first.weight.copy_(torch.randn(WIDTH, FEATURES, generator=UNSEEDED))  # type: ignore[union-attr,operator]
    return Own(first, *rest)


UNSEEDED = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("system", ["fed-avg", "ditto", "per-fed-avg"])
@pytest.mark.parametrize("engine", ["auto", "loop-processes"])
def test_clients_train_on_the_frozen_weights_of_the_run(system: str, engine: str) -> None:
    if engine != "auto" and (system == "per-fed-avg" or not forks_here()):
        pytest.skip("not by processes")
    mine = train(unseeded, SYSTEMS[system], engine=engine)

    def again() -> nn.Module:
        model = frozen()
        model[0].load_state_dict(mine.model[0].state_dict())  # type: ignore[index,operator]
        return model

    other = train(again, SYSTEMS[system], engine=engine.removesuffix("-processes"))
    assert same_bits(mine, other)
    for metric in other.history.evaluations[0].metrics:
        assert mine.history.curve(metric) == other.history.curve(metric)


def test_a_run_goes_on_with_the_frozen_weights_of_its_checkpoint(tmp_path: Path) -> None:
    whole = train(frozen, SYSTEMS["ditto"], rounds=4, out=tmp_path / "whole")
    UNSEEDED.manual_seed(0)

    def elsewhere() -> nn.Module:
        """As where weights made from a seed are rounded in another way."""
        model = frozen()
        with torch.no_grad():
            model[0].weight.mul_(1.5)  # type: ignore[index,operator,union-attr]
        return model

    train(frozen, SYSTEMS["ditto"], rounds=2, out=tmp_path / "part")
    part = dure.resume(
        tmp_path / "part", task=small_task(model=elsewhere), stop=dure.Stop(rounds=4)
    )
    assert largest_difference(whole, part) == 0


def test_a_checkpoint_that_has_frozen_parameters_is_refused_by_name() -> None:
    def program(context: RankContext) -> None:
        server = dure.FedAvg(clients=3).learner(small_task(model=frozen), context, 0)
        assert isinstance(server, FederatedServer)
        state = server.state()
        server.restore(server.weights(), state)
        whole = torch.cat([one.detach().reshape(-1) for one in server.model.parameters()])
        state["server"]["coordinator"]["model"]["weights"] = [whole]
        with pytest.raises(RunFolderError, match="also sent frozen parameters"):
            server.restore(server.weights(), state)

    dure.Simulated(engine="loop").run(program, lambda event: None)


# What is frozen stays so


class Moving(nn.Module):
    """In its third training pass something is done with its frozen layer."""

    def __init__(self, does: str, where: str) -> None:
        super().__init__()
        self.does, self.where = does, where
        self.passes = 0
        self.first = nn.Linear(FEATURES, WIDTH).double().requires_grad_(False)
        self.last = nn.Linear(WIDTH, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training == (self.where == "training"):
            self.passes += 1
            if self.passes == 3:
                self.move()
        scores: Tensor = self.last(self.first(inputs).tanh())
        return scores

    @torch.no_grad()
    def move(self) -> None:
        weight = self.first.weight
        if self.does == "trains it":
            weight.requires_grad_(True)
        elif self.does == "in place":
            weight.mul_(0.9)
        elif self.does == "behind torch's back":
            weight.data.mul_(0.9)
        elif self.does == "other data":
            weight.data = weight * 0.9
        else:
            self.first.weight = nn.Parameter(weight * 0.9, requires_grad=False)


@pytest.mark.parametrize(
    "does", ["trains it", "in place", "behind torch's back", "other data", "another parameter"]
)
@pytest.mark.parametrize("system", ["fed-avg", "scaffold", "ditto", "per-fed-avg"])
def test_a_frozen_parameter_that_training_changes_is_refused_by_name(
    system: str, does: str
) -> None:
    how = "is trained now" if does == "trains it" else "frozen, but was changed"
    with pytest.raises(WorkerFailedError, match=rf"client \d .* first\.weight .* {how}"):
        train(lambda: Moving(does, "training"), SYSTEMS[system])


@pytest.mark.skipif(not forks_here(), reason="no forked processes here")
def test_it_is_refused_in_other_processes_too() -> None:
    with pytest.raises(WorkerFailedError, match=r"client . .* first\.weight .* is trained now"):
        train(lambda: Moving("trains it", "training"), SYSTEMS["fed-avg"], engine="loop-processes")


@pytest.mark.parametrize("held_out", [0.0, 0.2])
def test_a_frozen_parameter_that_measuring_changes_is_refused_by_name(held_out: float) -> None:
    system = dure.FedAvg(clients=5, batch_size=4, held_out=held_out)
    test: dict[str, Any] = {"test": None} if held_out else {}
    with pytest.raises(WorkerFailedError, match=r"first\.weight is frozen, but was changed"):
        train(lambda: Moving("in place", "measuring"), system, **test)


def test_a_loss_that_unfreezes_is_refused_by_name() -> None:
    layers: list[nn.Module] = []

    def kept() -> nn.Module:
        layers.append(frozen())
        return layers[-1]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        for layer in layers:
            layer.requires_grad_(True)
        return F.cross_entropy(outputs, targets)

    with pytest.raises(WorkerFailedError, match=r"0\.weight .* is trained now"):
        train(kept, SYSTEMS["fed-avg"], loss=loss)


def test_what_a_model_freezes_later_travels_on_and_stays() -> None:
    """The other way round is right as it is: it travels, as it did from the start."""

    class Freezing(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            self[0].requires_grad_(False)
            scores: Tensor = super().forward(inputs)
            return scores

    mine = train(lambda: Freezing(*network().children()), SYSTEMS["fed-prox"])
    torch.testing.assert_close(
        torch.cat([one.reshape(-1) for one in mine.model.state_dict().values()]),
        torch.cat(
            [
                one.reshape(-1)
                for one in train(frozen, SYSTEMS["fed-prox"]).model.state_dict().values()
            ]
        ),
    )

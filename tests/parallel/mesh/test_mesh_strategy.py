"""Every mesh walks the path of one worker, and its checkpoints load onto any other mesh."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from typing import Any

import cloudpickle
import loops
import pytest
import torch

# here, so that the fork server does it once and not every rank
import torch._dynamo.functional_export
import torch._export.non_strict_utils
import torch.export._trace
from loops import on_ranks
from torch import Tensor
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel, ParallelLearner
from dure.parallel.pipeline import rng
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes
from dure.tasks.models import Transformer
from small import check_all

for module in (sys.modules[__name__], loops):
    cloudpickle.register_pickle_by_value(module)

SYMBOLS = 23
CONTEXT = 8
BATCH = 16
STEPS = 6


def network(dropout: float = 0.0) -> Transformer:
    return Transformer(
        SYMBOLS, CONTEXT, layers=2, heads=4, width=16, dropout=dropout, tied=True
    ).double()


def texts(count: int) -> tuple[Tensor, Tensor]:
    characters = torch.randint(
        0, SYMBOLS, (count, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    return characters[:, :-1].contiguous(), characters[:, 1:].contiguous()


def task(dropout: float = 0.0, count: int = 50, clip_norm: float | None = None) -> dure.Task:
    """With 48 texts all batches are of one length, which is traced once."""
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    tests = texts(20 if count % BATCH else BATCH)
    return dure.Task(
        partial(network, dropout),
        F.cross_entropy,
        texts(count),
        tests,
        optimizer,
        name="texts",
        clip_norm=clip_norm,
    )


def alone(
    clip_norm: float | None = None, steps: int = STEPS, count: int = 50
) -> tuple[dict[str, Tensor], float]:
    strategy, stop = dure.DataParallel(BATCH), dure.Stop(steps=steps)
    one = task(count=count, clip_norm=clip_norm)
    run = dure.train(one, strategy, dure.Processes(1), stop, seed=0)
    return run.model.state_dict(), run.summary["test_loss"]


def trained(
    context: RankContext,
    strategy: Parallel,
    steps: int = STEPS,
    dropout: float = 0.0,
    count: int = 50,
    clip_norm: float | None = None,
) -> ParallelLearner:
    learner = ParallelLearner(task(dropout, count, clip_norm), context, 0, strategy)
    go_on(learner, steps)
    return learner


def go_on(learner: ParallelLearner, steps: int) -> None:
    for _ in range(steps):
        learner.advance(0)


def saved(
    learner: ParallelLearner, context: RankContext
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The whole checkpoint, on every rank, as the driver writes and reads it."""
    state = learner.state()
    weights = learner.weights()
    parts = context.group.gather_bytes(tree_to_bytes(learner.part()))
    packed = tree_to_bytes([weights, {**state, "parts": [tree_from_bytes(part) for part in parts]}])
    weights, state = tree_from_bytes(context.group.broadcast_bytes(packed))
    return weights, state


def distance(weights: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((weights[name] - right[name]).abs().max()) for name in right)


FOUR = [
    Parallel(Mesh(1, 2, 2), BATCH, 3),
    Parallel(Mesh(2, 2, 1), BATCH, 2, "gpipe", zero=1),
    Parallel(Mesh(2, 1, 2), BATCH, 2, sequence=True),
    Parallel(Mesh(1, 2, 2), BATCH, 4, "interleaved", recompute=True),
    Parallel(Mesh(1, 1, 4), BATCH, 1),
    Parallel(Mesh(1, 4, 1), BATCH, 2, "1f1b"),
    Parallel(Mesh(2, 1, 2), BATCH, 2, zero=2, sequence=True),
    Parallel(Mesh(2, 1, 2), BATCH, 1, zero=3),
    Parallel(Mesh(1, 2, 2), BATCH, 2, "zero-bubble", sequence=True, balance="measured"),
]

PAIRS = [(FOUR[0], FOUR[1]), (FOUR[1], FOUR[7]), (FOUR[7], FOUR[5])]
"""Before and after a checkpoint."""


def test_every_mesh_of_four_walks_the_path_of_one_worker():
    def program(context: RankContext) -> list[Any]:
        learners = [trained(context, strategy, count=48) for strategy in FOUR]
        evaluated = [
            learner.evaluate()["test_loss"] for learner in learners[::2]
        ]  # each traces its model once more
        return [[learner.weights() for learner in learners], evaluated]

    right, loss = alone(count=48)
    weights, evaluated = on_ranks(4, program, deadline=120)[0]
    for strategy, found in zip(FOUR, weights, strict=True):
        assert distance(found, right) < 1e-10, strategy
    assert evaluated == pytest.approx([loss] * 5, abs=1e-10)


def test_eight_ranks_with_everything_at_once_clip_by_the_whole_norm():
    strategy = Parallel(Mesh(2, 2, 2), BATCH, 2, zero=1, sequence=True)

    def program(context: RankContext) -> Any:
        return trained(context, strategy, clip_norm=0.3).weights()

    assert distance(on_ranks(8, program, deadline=120)[0], alone(clip_norm=0.3)[0]) < 1e-10


def test_stages_of_divided_sequences_send_shards_and_draw_for_themselves_alike_in_every_schedule():
    """Shards of half a sequence: half the bytes. On shards ranks draw apart, elsewhere alike."""

    def program(context: RankContext) -> list[Any]:
        keys: list[tuple[Any, ...]] = []
        derive = rng.derive
        rng.derive = lambda seed, *key: (keys.append(key), derive(seed, *key))[1]
        found = []
        for schedule in ("1f1b", "gpipe", "naive"):
            keys.clear()
            learner = trained(
                context,
                Parallel(Mesh(1, 2, 2), BATCH, 2, schedule, sequence=True),
                3,
                0.3,
                count=48,
            )
            apart = {
                key[4:] for key in keys if key[0] == "micro-batch" and key[3] >= 0
            }  # -1 is the loss
            replicated = {
                n: p.detach()
                for n, p in learner.rank_state.parameters.items()
                if "norm" in n or "position" in n
            }
            stage = learner.facts()["stages"][0]
            of_the_loss = {key[4:] for key in keys if key[0] == "micro-batch" and key[3] < 0}
            assert of_the_loss == ({()} if learner.at.pipeline == 1 else set())
            found.append(
                (learner.at, apart, replicated, learner.weights(), stage["there"] + stage["back"])
            )
        return found

    ranks = on_ranks(4, program, deadline=120)
    for of_schedule in zip(*ranks, strict=True):
        held = {at: replicated for at, _, replicated, _, _ in of_schedule}
        assert all(apart == {(at.tensor,)} for at, apart, _, _, _ in of_schedule)
        assert all(distance(held[0, stage, 0], held[0, stage, 1]) == 0 for stage in range(2))
        assert {sent for at, _, _, _, sent in of_schedule if at.pipeline == 0} == {
            2 * 8 * BATCH * CONTEXT * 16 // 2
        }
    assert distance(ranks[0][0][3], ranks[0][1][3]) == 0


DIVIDED = [
    Parallel(Mesh(4, 1, 1), BATCH, 3, zero=2),
    Parallel(Mesh(4, 1, 1), BATCH, 3, zero=3),
    Parallel(Mesh(2, 1, 2), BATCH, 3, "gpipe", zero=3),
]


def test_gradients_and_parameters_are_divided_where_ranks_have_fewer_micro_batches_or_none():
    """49 texts: batches of 16, four for each rank in three micro-batches, and a batch of one."""

    def program(context: RankContext) -> list[Any]:
        learners = [trained(context, strategy, 5, count=49, clip_norm=0.3) for strategy in DIVIDED]
        return [(learner.evaluate()["test_loss"], learner.weights()) for learner in learners]

    right, loss = alone(clip_norm=0.3, steps=5, count=49)
    for strategy, (found, weights) in zip(
        DIVIDED, on_ranks(4, program, deadline=120)[0], strict=True
    ):
        assert distance(weights, right) < 1e-10, strategy
        assert found == pytest.approx(loss, abs=1e-10), strategy


def partly_frozen() -> Transformer:
    """With a buffer that nothing changes, which nobody has to be told of."""
    model = network()
    model.position.requires_grad_(False)
    model.register_buffer("constant", torch.ones(1000, dtype=torch.float64))
    return model


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_holds_and_sends_what_zero_says(stage: Any):
    def program(context: RankContext) -> tuple[dict[str, int], int, int]:
        partly = dataclasses.replace(task(count=48), model=partly_frozen)
        learner = ParallelLearner(partly, context, 0, Parallel(Mesh(2), BATCH, 1, zero=stage))
        go_on(learner, 2)
        assert learner.rank_state.zero is not None
        counters = learner.group.meter.counters
        before = counters.bytes_sent
        go_on(learner, 1)
        return (
            learner.facts()["held"],
            counters.bytes_sent - before,
            learner.rank_state.zero.bytes_per_step(),
        )

    whole = 8 * sum(parameter.numel() for parameter in partly_frozen().parameters())
    trained = 8 * sum(
        parameter.numel() for parameter in partly_frozen().parameters() if parameter.requires_grad
    )
    for held, sent, formula in on_ranks(2, program):
        assert sent == formula
        assert held["gradients"] == pytest.approx(trained / 2, rel=0.02)  # padding
        assert held["parameters"] == pytest.approx(whole / 2 if stage == 3 else whole, rel=0.02)
        assert held["optimizer"] == pytest.approx(trained, rel=0.02)


def test_a_checkpoint_loads_onto_any_other_mesh():
    def program(context: RankContext) -> list[Any]:
        found = []
        for first, second in PAIRS:
            before = trained(context, first, STEPS // 2)
            weights, state = saved(before, context)
            after = ParallelLearner(
                task(), context, 1, second
            )  # other weights, which the checkpoint replaces
            after.seed = 0
            after.batches = before.batches
            after.restore(weights, state)
            go_on(after, STEPS - STEPS // 2)
            found.append(after.weights())
        return found

    right, _ = alone()
    for pair, weights in zip(PAIRS, on_ranks(4, program, deadline=120)[0], strict=True):
        assert distance(weights, right) < 1e-10, pair


def test_ranks_that_hold_the_same_parameters_keep_them_equal_with_dropout():
    def program(context: RankContext) -> Any:
        learner = trained(context, Parallel(Mesh(2, 1, 2), BATCH, 2), 4, dropout=0.2)
        return learner.at, {
            name: p.detach().clone() for name, p in learner.rank_state.parameters.items()
        }

    found = dict(on_ranks(4, program, deadline=120))
    for tensor in range(2):
        assert distance(found[0, 0, tensor], found[1, 0, tensor]) == 0


class Speaker(torch.nn.Module):
    """Llama of Hugging Face, whose queries share a head of keys.

    It takes one argument, and gives scores as (B, vocabulary, T).
    """

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        heads: dict[str, Any] = {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
        }
        self.model = LlamaForCausalLM(
            LlamaConfig(vocab_size=SYMBOLS, hidden_size=16, intermediate_size=24, **heads)
        ).double()

    def forward(self, indices: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=indices, use_cache=False).logits
        return scores.transpose(1, 2)


SPEAKING = [
    Parallel(Mesh(1, 2, 2), BATCH, 2, sequence=True),
    Parallel(Mesh(2, 1, 2), BATCH, 2, zero=3, sequence=True),
]


def test_a_language_model_of_hugging_face_on_meshes() -> None:
    pytest.importorskip(
        "transformers.models.llama.modeling_llama"
    )  # here, so that not every rank does it
    speaking = dure.Task(Speaker, F.cross_entropy, texts(32), texts(BATCH), torch.optim.AdamW)

    def program(context: RankContext) -> list[Any]:
        learners = [ParallelLearner(speaking, context, 0, strategy) for strategy in SPEAKING]
        for learner in learners:
            go_on(learner, 4)
        return [(learner.evaluate()["test_loss"], learner.weights()) for learner in learners]

    right = dure.train(
        speaking, dure.DataParallel(BATCH), dure.Processes(1), dure.Stop(steps=4), seed=0
    )
    for strategy, (loss, weights) in zip(
        SPEAKING, on_ranks(4, program, deadline=120)[0], strict=True
    ):
        assert distance(weights, right.model.state_dict()) < 1e-10, strategy
        assert loss == pytest.approx(right.summary["test_loss"], abs=1e-10), strategy


def test_what_cannot_be_combined_is_refused_before_any_work():
    def refused(strategy: Parallel, workers: int) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            dure.train(task(), strategy, dure.Processes(workers), dure.Stop(steps=1))
        return str(caught.value)

    said = refused(Parallel(Mesh(2, 2, 2)), 4)
    assert "data 2 x pipeline 2 x tensor 2" in said
    assert "8 ranks" in said
    assert "blocks.0 has heads = 4, not a multiple of the degree 3" in refused(
        Parallel(Mesh(1, 1, 3)), 3
    )


@pytest.mark.parametrize("mesh", [Mesh(1, 1, 2), Mesh(1, 2, 2)])
@pytest.mark.parametrize("odd", ["train", "test"])
def test_sequences_that_the_degree_does_not_divide_are_refused_before_any_work(
    mesh: Mesh, odd: str
) -> None:
    inputs, targets = texts(BATCH)
    short = (inputs[:, :7], targets[:, :7])
    strategy = Parallel(mesh, BATCH, 2, sequence=True)
    given = {"train": texts(BATCH), "test": texts(BATCH), odd: short}
    uneven = dure.Task(
        network, F.cross_entropy, given["train"], given["test"], partial(torch.optim.SGD, lr=0.1)
    )
    before = torch.get_rng_state()
    with pytest.raises(
        ValueError, match="a sequence of 7 cannot be divided by the degree 2: pad it to a multiple"
    ):
        check_all(strategy, uneven, mesh.tensor * mesh.pipeline)
    assert torch.equal(torch.get_rng_state(), before)
    check_all(dataclasses.replace(strategy, sequence=False), uneven, None)
    check_all(strategy, task(0.1), None)


def test_a_micro_batch_of_one_that_batch_norm_cannot_normalise_is_refused_with_sizes_that_fit() -> (
    None
):
    """Of 17 examples: batches of 12 and 5, whose four micro-batches are 2, 1, 1, 1."""
    examples = torch.randn(17, 6), torch.arange(17) % 3

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
        )

    task = dure.Task(model, F.cross_entropy, examples, examples, partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(
        ValueError,
        match=r"batch_size 12 divides 17 examples in 4 pieces so that .* single .* 9 or 17",
    ):
        dure.train(task, dure.Pipeline(12, 4), dure.Processes(2), dure.Stop(steps=2))


class Hasty(torch.nn.Module):
    """Looks at the data where it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if not self.training and bool(hidden.max() > 0):
            hidden = hidden * 2
        result: Tensor = self.second(hidden)
        return result


def test_a_model_that_cannot_be_evaluated_in_stages_is_refused_before_it_is_trained() -> None:
    examples = torch.randn(16, 6), torch.arange(16) % 3
    task = dure.Task(Hasty, F.cross_entropy, examples, examples, partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(ValueError, match="in evaluation, a Hasty cannot be cut"):
        check_all(dure.Pipeline(8, 2), task, 2)


@pytest.mark.parametrize("balance", ["estimated", "memory", "measured"])
def test_what_is_cut_by_a_clock_is_not_said_to_repeat_itself(balance: str) -> None:
    for strategy in (
        dure.Pipeline(balance=balance),  # type: ignore[arg-type]
        dure.Parallel(dure.Mesh(pipeline=2), balance=balance),  # type: ignore[arg-type]
    ):
        assert strategy.run_traits.deterministic is (balance != "measured")
    assert not dure.Hogwild().run_traits.deterministic
    assert dure.FedAvg().run_traits.deterministic

"""Tensor parallelism: the matrices of a model divided over ranks that compute together.

    model = dure.models.Transformer(...)          # the same on all ranks
    prove_plan(model, plan_for(model), inputs, lambda outputs: loss(outputs, targets), group)
    parallelize(model, plan_for(model), group)    # now every rank holds and computes an N-th part
    loss(model(inputs), targets).backward()       # the same inputs on all ranks
    clip_gradients(model, 1.0, group)
    optimizer.step()                              # of this rank's parameters

    `division`     the slice of a parameter on each rank, as data
    `buffers`      memory in which the ranks of a host sum
    `functions`    communication between divided layers, with the derivative of each
    `rng`          dropout that differs between ranks inside divided regions, and not outside
    `divided`      the interface of divided layers, and the layers that can be divided
    `layers`       linear layers divided by columns and by rows
    `embedding`    embedding divided by columns
    `vocabulary`   embedding, output layer and cross-entropy divided by symbols
    `plan`         the entries of a plan
    `changes`      entries that change modules without replacing them
    `attributes`   integers of a module that a plan divides
    `dividing`     division of a model from outside, by a plan
    `tied`         parameters that several modules share stay shared
    `proof`        comparison of a plan with the undivided model
    `chain_plans` plans for chains of linear layers: by rows, by columns, alternating
    `builtin_plans`   plans for models whose layers are known
    `hf_models`       the same for models of Hugging Face
    `hf_plan`         Hugging Face's own plans, converted
    `state`           the state dict of the whole model, and the norm of its gradient

The strategy for `dure.train` is `dure.parallel.mesh.tensor_parallel`.

Sources: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism"; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models".
"""

from dure.parallel.tensor.attributes import Attributes
from dure.parallel.tensor.builtin_plans import plan_for
from dure.parallel.tensor.changes import (
    Cut,
    Enter,
    Join,
    Leave,
    OnShards,
    OwnDraws,
    Tensors,
)
from dure.parallel.tensor.dividing import parallelize
from dure.parallel.tensor.embedding import ColumnEmbedding
from dure.parallel.tensor.layers import ColumnParallel, RowParallel
from dure.parallel.tensor.plan import Column, DivisionPlan, Output, Row, Vocabulary
from dure.parallel.tensor.proof import prove_plan
from dure.parallel.tensor.rng import per_rank_draws
from dure.parallel.tensor.state import (
    clip_gradients,
    divided_parameters,
    gradient_norm,
    load_whole,
    replicated_parameters,
    whole_state_dict,
)
from dure.parallel.tensor.vocabulary import (
    VocabularyEmbedding,
    VocabularyOutput,
    vocabulary_parallel_cross_entropy,
)

__all__ = [
    "Attributes",
    "Column",
    "ColumnEmbedding",
    "ColumnParallel",
    "Cut",
    "DivisionPlan",
    "Enter",
    "Join",
    "Leave",
    "OnShards",
    "Output",
    "OwnDraws",
    "Row",
    "RowParallel",
    "Tensors",
    "Vocabulary",
    "VocabularyEmbedding",
    "VocabularyOutput",
    "clip_gradients",
    "divided_parameters",
    "gradient_norm",
    "load_whole",
    "parallelize",
    "per_rank_draws",
    "plan_for",
    "prove_plan",
    "replicated_parameters",
    "vocabulary_parallel_cross_entropy",
    "whole_state_dict",
]

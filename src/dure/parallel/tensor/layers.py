"""Linear layers whose matrix is divided over ranks: every rank computes a part of the layer.

    Y = X·A + b      X: (rows, inputs), A: (inputs, outputs); torch's nn.Linear stores W = Aᵀ

    ColumnParallel   A = [A_1, …, A_N] by columns: Y_r = X·A_r + b_r, a part of the outputs. These
                     are rows of W, which is why some call it row-wise. Forward sends nothing;
                     backward sums ∂L/∂X = Σ_r ∂L/∂Y_r·A_rᵀ.
    RowParallel      A by rows, X by columns to match: Y = Σ_r X_r·A_r + b, where b is added once,
                     to the sum. These are columns of W. Forward sums Y; backward sends nothing.

One after the other, with element-wise operations between them, they form an MLP: an all-reduce of
rows·inputs elements backward, and an all-reduce of rows·outputs elements forward. Each rank sends
2(N-1)/N of the n elements of each. With `sequence` each all-reduce is replaced by a reduce-scatter
in one direction and an all-gather in the other (`dure.parallel.tensor.functions`).

With `features` a layer takes, or returns, parts of the features, so that layers of the same kind
can follow each other (`dure.parallel.tensor.chain_plans`): a column-parallel layer gathers its
input, and reduce-scatters the input's gradient; a row-parallel layer reduce-scatters its output,
and gathers the output's gradient.

Backward of ColumnParallel computes the gradient of X first. A separate thread sums it while the
main thread computes the weight's gradient; but not if the ranks of a host keep all its cores busy,
because the thread would take their time. Matrix products write directly into memory that the ranks
share, so that sums need no copy.

Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dure.collectives.all_reduce import all_reduce
from dure.collectives.group import Group
from dure.machine.cores import available_cores
from dure.parallel.tensor.buffers import shared_buffer
from dure.parallel.tensor.divided import DividedLayer, autocast_inputs, is_transposed
from dure.parallel.tensor.division import Division, check_even, sharers
from dure.parallel.tensor.functions import (
    along,
    check_is_sequence,
    check_sequence,
    gather_features,
    gather_shared_unit,
    gathered,
    of_shard,
    of_whole,
    reduce_scattered,
    reduced_in_place,
    scatter_features,
    timed,
)

if TYPE_CHECKING:
    from typing_extensions import Self


class _How(NamedTuple):
    """Settings of a layer's computation.

    transposed: whether the weight is stored as A. shards: the dimension along which ranks hold
    shards of a tensor that is whole in the product: a sequence dimension, or -1 for features.
    enters: whether the layer lets its input enter the divided region. beside: whether sums overlap
    with computation. leaves: whether the layer sums the ranks' products.
    """

    group: Group
    transposed: bool
    shards: int | None
    enters: bool
    beside: bool
    leaves: bool = True


def runs_beside(overlap: bool | None, group: Group, device: torch.device) -> bool:
    """Return whether a sum and a matrix product run at the same time.

    overlap: None decides by device and free cores; all ranks must then call this function together.
    """
    if overlap is not None or group.size == 1:
        return bool(overlap)
    # On a GPU, and over a network, a sum takes hardly any time of the cores; on a single host the
    # thread that sums needs a free core.
    if device.type != "cpu" or len(group.hosts()) > 1:
        return True
    return available_cores() > group.size * torch.get_num_threads()


def _product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)


def _weight_gradient(rows: Tensor, gradient: Tensor, transposed: bool) -> Tensor:
    return (
        torch.mm(rows.conj().t(), gradient) if transposed else torch.mm(gradient.t(), rows.conj())
    )


class _Column(Function):
    """Product of a column-parallel layer: X (…, inputs) to this rank's (…, outputs)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        if how.enters and how.shards is not None and how.group.size > 1:
            # The gathered input is stored for backward: more memory, but no second all-gather.
            tensor = gathered(tensor, how.group, along(tensor, how.shards, how.group))
        ctx.how = how
        ctx.shape = tensor.shape
        # as a matrix: batch and sequence dimensions are flattened to rows
        rows = tensor.reshape(-1, tensor.shape[-1])
        ctx.save_for_backward(rows, weight)
        outputs = _product(rows, weight if how.transposed else weight.t(), bias)
        return outputs.view(*tensor.shape[:-1], outputs.shape[1])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        how = ctx.how
        rows, weight = ctx.saved_tensors
        gradient = gradient.reshape(rows.shape[0], gradient.shape[-1])
        # The input's gradient is summed while the gradients of weight and bias are computed. This
        # placeholder is used if the input needs no gradient.
        arrive: Callable[[], Tensor] = lambda: torch.empty(0)  # noqa: E731
        if ctx.needs_input_grad[0]:
            arrive = _begin_input(how, gradient, weight, ctx.shape)
        of_weight = (
            _weight_gradient(rows, gradient, how.transposed) if ctx.needs_input_grad[1] else None
        )
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return arrive() if ctx.needs_input_grad[0] else None, of_weight, of_bias, None


def _begin_input(
    how: _How, gradient: Tensor, weight: Tensor, shape: torch.Size
) -> Callable[[], Tensor]:
    """Begin the gradient of a column-parallel layer's input; return a function to wait for it."""
    matrix = (weight.t() if how.transposed else weight).conj()
    group = how.group
    # If the input entered before (`enter`), that function's backward sums the gradient, for several
    # layers at once.
    if not how.enters or group.size == 1:
        inputs = torch.mm(gradient, matrix)
        return lambda: inputs.view(shape)
    # computed directly in shared memory, so that the sum needs no copy
    inputs = shared_buffer((gradient.shape[0], matrix.shape[1]), gradient, group)
    torch.mm(gradient, matrix, out=inputs)
    if how.shards is not None:
        dim = how.shards
        if not how.beside:
            own = reduce_scattered(inputs.view(shape), group, dim)
            return lambda: own
        # on the group's thread, in the order of issue
        handle = group.perform(
            "reduce-scatter of a gradient",
            lambda: reduce_scattered(inputs.view(shape), group, dim, beside=True),
            inputs,
            True,
        )
        return lambda: timed("reduce-scatter", group, handle.wait)  # type: ignore[union-attr]
    if not how.beside:
        reduced_in_place(inputs, group)
        return lambda: inputs.view(shape)
    under_way = all_reduce(inputs, group, "native", async_op=True)
    return lambda: timed("all-reduce", group, under_way.wait).view(shape)


class _Row(Function):
    """Product of a row-parallel layer: this rank's X (…, inputs) to (…, outputs) or a shard."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        group = how.group
        ctx.how = how
        ctx.shape = tensor.shape
        rows = tensor.reshape(-1, tensor.shape[-1])
        ctx.save_for_backward(rows, weight)
        matrix = weight if how.transposed else weight.t()
        if group.size == 1 or not how.leaves:
            # The later sum of the products must contain the bias once: only the first rank adds it.
            once = bias if group.rank == 0 else None
            return _product(rows, matrix, once).view(*tensor.shape[:-1], -1)
        outputs = shared_buffer((rows.shape[0], matrix.shape[1]), rows, group)
        torch.mm(rows, matrix, out=outputs)
        if how.shards is not None:
            # restore the sequence dimension
            whole = outputs.view(*tensor.shape[:-1], -1)
            check_sequence(whole, how.shards, group)
            # The shard is already summed, so each rank adds the bias, or its part, once.
            own = reduce_scattered(whole, group, how.shards)
            return own if bias is None else own.add_(bias)
        # Without the bias: it would be added N times.
        reduced_in_place(outputs, group)
        if bias is not None:
            outputs.add_(bias)
        return outputs.view(*tensor.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        how = ctx.how
        rows, weight = ctx.saved_tensors
        of_bias = None
        if how.shards == -1 and ctx.needs_input_grad[2]:
            # A rank adds its part of the bias to its own part of the features.
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        if how.shards is not None and how.group.size > 1:
            gradient = gathered(gradient, how.group, along(gradient, how.shards, how.group))
        gradient = gradient.reshape(-1, gradient.shape[-1])
        if of_bias is None and ctx.needs_input_grad[2]:
            # Along a sequence the gradient was gathered, so that every rank has the bias's gradient
            # of all shards.
            of_bias = gradient.sum(0)
        of_input = None
        if ctx.needs_input_grad[0]:
            matrix = (weight.t() if how.transposed else weight).conj()
            of_input = torch.mm(gradient, matrix).view(ctx.shape)
        of_weight = (
            _weight_gradient(rows, gradient, how.transposed) if ctx.needs_input_grad[1] else None
        )
        return of_input, of_weight, of_bias, None


class DividedLinear(DividedLayer):
    """Base class of the two kinds of divided linear layers, with a weight and a bias."""

    in_features: int
    out_features: int
    called: str
    """Name of the layer in error messages."""

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        process_group: Group | dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Self:
        """Return the divided form of an nn.Linear or Conv1D that is equal on all ranks."""
        made: Callable[..., Self] = cls
        return made(
            *_parameters(linear), process_group, transposed=is_transposed(linear), **options
        )

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, degree={self.group.size}"


class ColumnParallel(DividedLinear):
    """Y_r = X·A_r + b_r: A divided by columns, which are rows of torch's weight W = Aᵀ.

    Args:
        weight: undivided, equal on all ranks; this rank's part is copied.
        bias: like the weight; None for a layer without a bias.
        process_group: a group of torch.distributed, or a `dure.collectives.Group`; None is all
            ranks.
        blocks: lengths of outputs that are divided separately, such as query, key and value in a
            single matrix; None is a single block.
        unit: a block is divided between multiples of this number, such as the width of a head.
        gather_output: whether an all-gather gives all outputs to every rank; their gradient must be
            the same on all ranks.
        enters: False if the input has entered the divided region already, for several layers at
            once, for example by `enter`.
        sequence: the dimension of the input along which the ranks hold shards of a sequence; None
            if the input is whole. The gathered input is stored for backward, so that nothing is
            gathered twice.
        features: whether the input is this rank's part of its features, as a divided layer before
            it returns it: an all-gather, and a reduce-scatter of its gradient.
        transposed: whether the weight is stored as A.
        overlap: whether the gradient of X is summed during the computation of the weight's
            gradient; None decides automatically, and all ranks must then construct the layer
            together.
        even: False allows parts of unequal length.
        shares: whether neighbours share a unit if there are fewer units than ranks: each stores a
            part of the unit's matrix, and all of them get all of its outputs, like the keys and
            values of grouped queries. Costs an all-gather of all units forward, and a
            reduce-scatter backward.
        name: name of the layer in error messages.

    Raises:
        ValueError: blocks, units or features do not fit the shape or the degree.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        process_group: Group | dist.ProcessGroup | None = None,
        *,
        blocks: Sequence[int] | None = None,
        unit: int = 1,
        gather_output: bool = False,
        enters: bool = True,
        sequence: int | None = None,
        features: bool = False,
        transposed: bool = False,
        overlap: bool | None = None,
        even: bool = True,
        shares: bool = False,
        name: str = "the column-parallel layer",
    ) -> None:
        super().__init__(process_group)
        dim = 1 if transposed else 0
        self.out_features = weight.shape[dim]
        self.in_features = weight.shape[1 - dim]
        self.called = name
        blocks = tuple(blocks) if blocks is not None else (self.out_features,)
        if sum(blocks) != self.out_features:
            raise ValueError(
                f"the blocks {list(blocks)} of {name} do not sum to its {self.out_features} outputs"
            )
        check_features(name, features, sequence, enters)
        if features:
            inputs = f"{name} with {self.in_features} inputs"
            check_even(inputs, [self.in_features], self.group.size)
        what = f"{name} with {self.out_features} outputs"
        # 1 if no rank shares a unit
        self.sharers = 1
        if shares and len(blocks) > 1:
            raise ValueError(
                f"{name} has {len(blocks)} blocks, but units can be shared only with one block"
            )
        if shares and not gather_output:
            self.sharers = sharers(what, self.out_features, self.group.size, unit)
        elif even:
            check_even(what, blocks, self.group.size, unit)
        self.divide("weight", weight, Division(dim, blocks))
        self.divide("bias", bias, Division(0, blocks))
        self.gather_output = gather_output
        self._outputs = Division(-1, blocks)
        beside = runs_beside(overlap, self.group, weight.device)
        self._sequence = sequence
        self._features = features
        self._how = _How(
            self.group,
            transposed=transposed,
            shards=-1 if features else sequence,
            enters=enters,
            beside=beside,
        )

    @property
    def opens(self) -> int:
        """1 if the outputs stay divided and the input is not; -1 for the reverse; otherwise 0."""
        return int(self._how.enters and not self.gather_output) - int(self._features)

    def output_shape(self, given: Sequence[int]) -> list[int]:
        weight: Tensor = self.weight  # type: ignore[assignment]
        # a rank gets the outputs of all ranks that share its unit
        own = self.sharers * weight.shape[1 if self._how.transposed else 0]
        shape = [*given[:-1], self.out_features if self.gather_output else own]
        if self._sequence is None or not self._how.enters:
            return shape
        check_is_sequence(self.called, len(given), self._sequence)
        return of_whole(shape, self._sequence, self.group)

    def forward(self, tensor: Tensor) -> Tensor:
        """Return this rank's outputs, its unit's, or all, for an input of shape (..., inputs)."""
        if self._how.enters:
            check_is_sequence(self.called, tensor.dim(), self._sequence)
        tensor, weight, bias = autocast_inputs(tensor, self.weight, self.bias)
        outputs: Tensor = _Column.apply(tensor, weight, bias, self._how)  # type: ignore[no-untyped-call]
        # After the product: the following operations are divided, and each rank draws different
        # numbers until the row-parallel layer.
        if self.draws is not None and self.training and not self.gather_output:
            self.draws.enter()
        if self.sharers > 1:
            return gather_shared_unit(outputs, self.group, self.sharers)
        if self.gather_output:
            # The input's features were parts: the divided region ends here.
            if self.draws is not None:
                self.draws.leave()
            return gather_features(outputs, self.group, self._outputs)
        return outputs


class RowParallel(DividedLinear):
    """Y = Σ_r X_r·A_r + b: A divided by rows, which are columns of torch's weight W = Aᵀ.

    Every rank stores the whole of b. The arguments that are not listed are those of
    `ColumnParallel`.

    Args:
        input_is_parallel: False if all ranks have the whole input, of which each takes its part.
        sequence: the dimension of the output along which each rank gets a shard of a sequence; None
            returns the whole output.
        features: whether each rank gets a part of the output's features, by a reduce-scatter; the
            bias is then divided like the features.
        leaves: False if later code sums Y_r = X_r·A_r, for example `leave`; only the first rank
            then adds the bias.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        process_group: Group | dist.ProcessGroup | None = None,
        *,
        unit: int = 1,
        input_is_parallel: bool = True,
        sequence: int | None = None,
        features: bool = False,
        leaves: bool = True,
        transposed: bool = False,
        name: str = "the row-parallel layer",
    ) -> None:
        super().__init__(process_group)
        dim = 0 if transposed else 1
        self.called = name
        self.in_features = weight.shape[dim]
        self.out_features = weight.shape[1 - dim]
        check_even(
            f"{name} with {self.in_features} inputs", [self.in_features], self.group.size, unit
        )
        if sequence is not None and not leaves:
            raise ValueError(
                f"{name} leaves the sum to a later layer, which sets the dimension: leave "
                "sequence out"
            )
        check_features(name, features, sequence, leaves)
        if features:
            outputs = f"{name} with {self.out_features} outputs"
            check_even(outputs, [self.out_features], self.group.size)
        self.divide("weight", weight, Division(dim, (self.in_features,)))
        # Whole on every rank, and added once, after the sum; divided if the sum is divided.
        self.divide("bias", bias, Division(0, (self.out_features,)) if features else None)
        self.input_is_parallel = input_is_parallel
        self._sequence = sequence
        self._features = features
        self._how = _How(
            self.group,
            transposed=transposed,
            shards=-1 if features else sequence,
            enters=False,
            beside=False,
            leaves=leaves,
        )

    @property
    def opens(self) -> int:
        """-1 if the divided region ends with the sum here, 1 if it begins here, otherwise 0."""
        if not self._how.leaves:
            return 0
        # A whole input is cut inside of the layer, and a divided output stays divided after it.
        return int(not self.input_is_parallel) - int(not self._features)

    def output_shape(self, given: Sequence[int]) -> list[int]:
        shape = [*given[:-1], self.out_features]
        if self._how.shards is None:
            return shape
        check_is_sequence(self.called, len(given), self._sequence)
        return of_shard(shape, self._how.shards, self.group)

    def forward(self, tensor: Tensor) -> Tensor:
        """Return all outputs, or a shard, for (..., this rank's inputs, or all inputs)."""
        check_is_sequence(self.called, tensor.dim(), self._sequence)
        if self.draws is not None and not self._features:
            self.draws.leave()
        # All ranks have the whole input: each takes the columns that match its rows of A.
        if not self.input_is_parallel:
            tensor = scatter_features(tensor, self.group)
        tensor, weight, bias = autocast_inputs(tensor, self.weight, self.bias)
        outputs: Tensor = _Row.apply(tensor, weight, bias, self._how)  # type: ignore[no-untyped-call]
        # The following operations have parts of the features, and each rank draws different numbers
        # until the features are whole again.
        if self.draws is not None and self.training and self._features:
            self.draws.enter()
        return outputs


def check_features(name: str, features: bool, sequence: int | None, whole: bool) -> None:
    """Raise ValueError if parts of features are combined with an option that excludes them.

    whole: whether the layer itself gathers its input, or sums its output.
    """
    if features and (sequence is not None or not whole):
        raise ValueError(
            f"{name} divides features over the ranks, not a sequence: leave sequence, enters and "
            "leaves out"
        )


def _parameters(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    is_transposed(linear)
    weight: Any = linear.weight
    bias: Any = linear.bias
    return weight, bias

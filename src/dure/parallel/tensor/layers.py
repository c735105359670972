"""Linear layers whose matrix is divided over ranks: every rank computes a part of the layer.

    Y = X·A + b      X: (rows, inputs), A: (inputs, outputs); torch's nn.Linear stores W = Aᵀ

    ColumnParallel   A = [A_1, …, A_N] by columns: Y_r = X·A_r + b_r, a part of the outputs. These
                     are rows of W, which is why some call it row-wise. Forward sends nothing;
                     backward sums ∂L/∂X = Σ_r ∂L/∂Y_r·A_rᵀ.
    RowParallel      A by rows, X by columns to match: Y = Σ_r X_r·A_r + b, where b is added once,
                     to the sum. These are columns of W. Forward sums Y; backward sends nothing.

One after the other they are an MLP, with what is computed element by element between them: one
all-reduce of rows·inputs elements backward, and one of rows·outputs forward, each 2(N-1)/N of its n
elements a rank. With `sequence` each of them is a reduce-scatter on the one way and an all-gather
on the other (`dure.parallel.tensor.functions`).

With `features` a layer takes, or leaves, parts of the features, so that layers of one kind can
follow each other (`dure.parallel.tensor.chain_plans`): a column-parallel layer gathers its input,
and reduce-scatters its gradient; a row-parallel layer does it to its outputs, the other way round.

In backward of ColumnParallel the gradient of X is computed first. It is summed by a thread of its
own while this one computes the weight's gradient; but not where the ranks of one host keep all of
its cores busy, for the thread would take their time. What is summed is computed where it is summed:
matrix products write into memory that the ranks share.

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
from dure.parallel.tensor.divided import Divided, cast, is_transposed
from dure.parallel.tensor.division import Division, check_even, sharers
from dure.parallel.tensor.functions import (
    along,
    check_is_sequence,
    check_sequence,
    gather_features,
    gathered,
    of_shard,
    of_whole,
    reduce_scattered,
    reduced_in_place,
    scatter_features,
    share,
    timed,
)
from dure.parallel.tensor.rooms import room

if TYPE_CHECKING:
    from typing_extensions import Self


class _How(NamedTuple):
    """How a layer computes.

    transposed: whether the weight is stored as A. shards: the dimension along which the ranks hold
    shards of what is whole in the product: that of a sequence, or -1, of features. enters: whether
    the input has still to enter the divided region. leaves: whether the ranks' products are summed
    here. beside: whether sums travel while something else is computed.
    """

    group: Group
    transposed: bool
    shards: int | None
    enters: bool
    beside: bool
    leaves: bool = True


def runs_beside(overlap: bool | None, group: Group, device: torch.device) -> bool:
    """Whether a sum and a matrix product go on at the same time.

    overlap: None chooses; then all ranks call it together.
    """
    if overlap is not None or group.size == 1:
        return bool(overlap)
    # On a GPU, and over a network, a sum takes hardly any time of the cores; on one host the thread
    # that sums needs a core of its own.
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
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        if how.enters and how.shards is not None and how.group.size > 1:
            # Kept for backward as it is gathered here: memory for one all-gather less.
            tensor = gathered(tensor, how.group, along(tensor, how.shards, how.group))
        ctx.how = how
        ctx.shape = tensor.shape
        # as one matrix: batch and sequence are rows alike
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
        # The input's gradient is on its way while the weight's and the bias's are computed; where
        # nobody asks for it, this stands in for it.
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
    """Begins the gradient of a column-parallel layer's input; what is returned waits for it."""
    matrix = (weight.t() if how.transposed else weight).conj()
    group = how.group
    # What has not entered here is summed by whoever has entered (`enter`), for several layers at
    # once.
    if not how.enters or group.size == 1:
        inputs = torch.mm(gradient, matrix)
        return lambda: inputs.view(shape)
    # computed where it is summed, so that nothing is copied into shared memory
    inputs = room((gradient.shape[0], matrix.shape[1]), gradient, group)
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
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        group = how.group
        ctx.how = how
        ctx.shape = tensor.shape
        rows = tensor.reshape(-1, tensor.shape[-1])
        ctx.save_for_backward(rows, weight)
        matrix = weight if how.transposed else weight.t()
        if group.size == 1 or not how.leaves:
            # Whoever sums the products later must have the bias once: here it is the first rank's.
            once = bias if group.rank == 0 else None
            return _product(rows, matrix, once).view(*tensor.shape[:-1], -1)
        outputs = room((rows.shape[0], matrix.shape[1]), rows, group)
        torch.mm(rows, matrix, out=outputs)
        if how.shards is not None:
            # rows are tokens again: the sequence is a dimension of its own
            whole = outputs.view(*tensor.shape[:-1], -1)
            check_sequence(whole, how.shards, group)
            # The shard is summed already, so that each rank adds the bias, or its part, once.
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
            # A rank adds its part of the bias to its part of the features, which is its alone.
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        if how.shards is not None and how.group.size > 1:
            gradient = gathered(gradient, how.group, along(gradient, how.shards, how.group))
        gradient = gradient.reshape(-1, gradient.shape[-1])
        if of_bias is None and ctx.needs_input_grad[2]:
            # Along a sequence the gradient was gathered, so that the bias has that of all shards,
            # on every rank.
            of_bias = gradient.sum(0)
        of_input = None
        if ctx.needs_input_grad[0]:
            matrix = (weight.t() if how.transposed else weight).conj()
            of_input = torch.mm(gradient, matrix).view(ctx.shape)
        of_weight = (
            _weight_gradient(rows, gradient, how.transposed) if ctx.needs_input_grad[1] else None
        )
        return of_input, of_weight, of_bias, None


class DividedLinear(Divided):
    """A layer made of a weight and a bias: what the two ways to divide it have in common."""

    in_features: int
    out_features: int
    called: str
    """What errors call it."""

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        process_group: Group | dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Self:
        """Of an nn.Linear or Hugging Face's Conv1D, the same on all ranks."""
        made: Callable[..., Self] = cls
        return made(
            *_parameters(linear), process_group, transposed=is_transposed(linear), **options
        )

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, degree={self.group.size}"


class ColumnParallel(DividedLinear):
    """Y_r = X·A_r + b_r: A divided by columns, which are rows of torch's weight W = Aᵀ.

    weight, bias: undivided, the same on all ranks; this rank's part of them is copied.
    process_group: a group of torch.distributed, or a `dure.collectives.Group`; None is all ranks.
    blocks: outputs that are divided each on their own, such as those of query, key and value in
        one matrix; None is one.
    unit: a block is divided between multiples of it, such as the width of a head.
    gather_output: all outputs on every rank, by an all-gather; its gradient must be the same on all
        ranks.
    enters: False where the input has entered the divided region already, for several layers at
        once, such as by `enter`.
    sequence: the dimension of the input along which the ranks hold shards of a sequence; None where
        they do not. The gathered input is kept for backward, so that nothing is gathered twice.
    transposed: whether the weight is stored as A.
    overlap: whether the gradient of X travels while the weight's is computed; None chooses; then
        all ranks come here together.
    even: False allows parts of unequal length.
    features: whether the input is this rank's part of its features, as a divided layer before it
        leaves it: an all-gather, and a reduce-scatter of its gradient.
    shares: where there are fewer units than ranks, neighbours share one: each holds a part of its
        matrix, and all of them get all of its outputs, as the keys and values of grouped queries.
        That is an all-gather of all units forward, and a reduce-scatter backward.
    name: what errors call it.
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
                f"the blocks {list(blocks)} of {name} do not make up its {self.out_features} "
                "outputs"
            )
        check_features(name, features, sequence, enters)
        if features:
            inputs = f"{name} with {self.in_features} inputs"
            check_even(inputs, [self.in_features], self.group.size)
        what = f"{name} with {self.out_features} outputs"
        # 1 where every rank has units of its own
        self.sharers = 1
        if shares and len(blocks) > 1:
            raise ValueError(
                f"{name} has {len(blocks)} blocks, and units can be shared where there is one"
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
        """1 where its outputs stay divided, and its input was not; -1 the other way round."""
        return int(self._how.enters and not self.gather_output) - int(self._features)

    def output_shape(self, given: Sequence[int]) -> list[int]:
        weight: Tensor = self.weight  # type: ignore[assignment]
        # a rank gets the outputs of all that share its unit
        own = self.sharers * weight.shape[1 if self._how.transposed else 0]
        shape = [*given[:-1], self.out_features if self.gather_output else own]
        if self._sequence is None or not self._how.enters:
            return shape
        check_is_sequence(self.called, len(given), self._sequence)
        return of_whole(shape, self._sequence, self.group)

    def forward(self, tensor: Tensor) -> Tensor:
        """tensor: (..., inputs). Returns this rank's outputs, its unit's, or all of them."""
        if self._how.enters:
            check_is_sequence(self.called, tensor.dim(), self._sequence)
        tensor, weight, bias = cast(tensor, self.weight, self.bias)
        outputs: Tensor = _Column.apply(tensor, weight, bias, self._how)  # type: ignore[no-untyped-call]
        # After the product: what follows is divided, and draws for itself until the row-parallel
        # layer.
        if self.draws is not None and self.training and not self.gather_output:
            self.draws.enter()
        if self.sharers > 1:
            return share(outputs, self.group, self.sharers)
        if self.gather_output:
            # The input's features were parts: the divided region ends here.
            if self.draws is not None:
                self.draws.leave()
            return gather_features(outputs, self.group, self._outputs)
        return outputs


class RowParallel(DividedLinear):
    """Y = Σ_r X_r·A_r + b: A divided by rows, which are columns of torch's weight W = Aᵀ.

    Every rank has the whole of b.
    input_is_parallel: False where all ranks have the whole input, of which they take their part.
    sequence: the dimension of the output along which the ranks are left shards of a sequence; None
    leaves all of it.
    features: whether the ranks are left parts of the output's features, by a reduce-scatter; the
    bias is then divided like them.
    leaves: False where Y_r = X_r·A_r is summed by somebody later, such as by `leave`; the bias is
    then in the first rank's alone. The other arguments are those of `ColumnParallel`.
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
                f"{name} leaves the sum to somebody else, who says along which dimension: "
                "leave sequence out"
            )
        check_features(name, features, sequence, leaves)
        if features:
            outputs = f"{name} with {self.out_features} outputs"
            check_even(outputs, [self.out_features], self.group.size)
        self.divide("weight", weight, Division(dim, (self.in_features,)))
        # Whole on every rank, and added once, after the sum; divided where the sum is.
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
        """-1 where the sum over the ranks ends the divided region here, 1 where it begins here."""
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
        """tensor: (..., this rank's inputs, or all). Returns all outputs, or a shard of them."""
        check_is_sequence(self.called, tensor.dim(), self._sequence)
        if self.draws is not None and not self._features:
            self.draws.leave()
        # All ranks have all of the input: each takes the columns that meet its rows of A.
        if not self.input_is_parallel:
            tensor = scatter_features(tensor, self.group)
        tensor, weight, bias = cast(tensor, self.weight, self.bias)
        outputs: Tensor = _Row.apply(tensor, weight, bias, self._how)  # type: ignore[no-untyped-call]
        # What follows has parts of the features, and draws for itself until they are whole again.
        if self.draws is not None and self.training and self._features:
            self.draws.enter()
        return outputs


def check_features(name: str, features: bool, sequence: int | None, whole: bool) -> None:
    """Raises ValueError where parts of features are wanted with what excludes them.

    whole: whether the layer itself joins, or sums, what the ranks hold.
    """
    if features and (sequence is not None or not whole):
        raise ValueError(
            f"{name} has parts of features between the ranks, and so no shards of a sequence, and "
            "nobody else who enters or leaves: leave sequence, enters and leaves out"
        )


def _parameters(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    is_transposed(linear)
    weight: Any = linear.weight
    bias: Any = linear.bias
    return weight, bias

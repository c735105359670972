"""Translation of a model into a chain of batched layers (`dure.federated.engines.layers`).

`torch.fx` runs the model's forward once on symbols and records the calls. Each call must use the
result of the call before and nothing else; the table `_Reader` has the known calls. Hooks of
modules and of parameters are refused (hooks of the optimizer are in `sgd_of`). A trial then checks
that the chain equals the model: on a few examples it must give the model's own gradient. So an
overridden method or a parametrisation that the table does not see is refused if it changes the
gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dure.contracts.task import Loss as TaskLoss
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import described, first_line
from dure.federated.engines import layers, pooling
from dure.federated.engines.layers import BatchedLayer, Pair
from dure.federated.engines.losses import (
    BatchedLoss,
    OwnLossError,
    StepLosses,
    UserDefinedLoss,
    check_pair,
    hooked,
    loss_of,
)
from dure.federated.engines.preprocessing import Preprocessing
from dure.federated.engines.sgd import SGD, CannotBatchError, Weights
from dure.machine.devices import to_device
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.backward import has_hooks
from dure.tensors.flat import trainable_parameters

TRIED = 3
"""Number of examples on which a chain is compared with its model."""

OUTSIDE = "the model uses a parameter outside of the layers that are known here"


class BatchedProgram:
    """The model's layers, its loss, and its weights in the order of its trained parameters.

    inputs: of the first layer, for all examples.
    """

    def __init__(
        self,
        chain: Sequence[BatchedLayer],
        loss: BatchedLoss,
        weights: Sequence[Weights],
        inputs: Tensor,
    ) -> None:
        self.inputs = inputs
        self.chain = list(chain)
        self.loss = loss
        self.weights = weights
        # Before the first layer with parameters no gradient is needed, so the backward pass ends
        # there.
        first = next(at for at, layer in enumerate(self.chain) if layer.trained)
        self._back = [(layer, True) for layer in self.chain[:first:-1]]
        self._back.append((self.chain[first], False))
        """The layers of the backward pass, and whether it continues to the layer before."""
        self._active = 0
        self._unfinished: list[Weights] = []

    def begin(self, clients: int) -> None:
        """Prepare all steps of `clients` clients, after their weights were loaded."""
        self._active = clients
        self._unfinished = [weights for weights in self.weights if weights.has_more]

    def step(
        self, inputs: Tensor, targets: Tensor, sizes: Sequence[int], shares: Tensor, first: bool
    ) -> StepLosses:
        """Run a step of the first A clients; return the loss of each before the step.

        Args:
            inputs: (A, B, ...).
            targets: (A, B, ...).
            sizes: number of real rows among the B rows, for each client.
            shares: (A, B), the weight of each row in its client's mean.
            first: whether it is the clients' first step.
        """
        # Clients are sorted by their number of steps: finished clients are the last.
        if len(inputs) != self._active:
            self._active = len(inputs)
            for weights in self.weights:
                weights.narrow(self._active)
        x = inputs
        for layer in self.chain:
            x = layer.forward(x, sizes)
        found = self.loss(x, targets, shares)
        gradient = found.gradient
        for layer, goes_on in self._back:
            gradient = layer.backward(gradient, goes_on)
        for weights in self._unfinished:
            weights.finish(first)
        # Only now: the backward pass above still reads the shared weights.
        if first:
            self._part_ways()
        return found

    def _part_ways(self) -> None:
        """Give each client its own weights from the second step on, except for factored weights."""
        for weights in self.weights:
            if not weights.is_factored:
                weights.shared = None


def _cheaper(chain: Sequence[BatchedLayer]) -> list[BatchedLayer]:
    """Return an equivalent chain: relu of a maximum of four instead of a maximum of four relus."""
    made = list(chain)
    for at, (one, after) in enumerate(pairwise(chain)):
        # With pooling first, relu has a quarter of the elements (for windows of 2x2).
        if (
            isinstance(one, layers.Relu)
            and isinstance(after, layers.PoolingLayer)
            and after.largest
        ):
            made[at] = after
            made[at + 1] = one
    return made


def program_of(task: Task, model: nn.Module, examples: Examples) -> BatchedProgram:
    """Return the program for the model on such examples.

    Raises CannotBatchError, with the reason, for an unsupported model.
    """
    # Cheap checks come first; the trial step comes last.
    parameters = list(model.parameters())
    _check(model, parameters, examples)
    loss = loss_of(task.loss, examples)
    trained = trainable_parameters(model)
    weights = {id(each): Weights(tuple(each.shape)) for each in trained}
    reader = _Reader(model, weights, structured=not isinstance(examples.inputs, Tensor))
    inputs = reader.inputs_of(examples)
    if inputs.dtype != parameters[0].dtype:
        raise CannotBatchError(
            f"the inputs are {inputs.dtype}, the parameters {parameters[0].dtype}"
        )
    if len(reader.used) != len(parameters):
        raise CannotBatchError("the model does not use each of its parameters exactly once")
    # Flat weights have parameters in the model's order, and a deferred update has a bias right
    # after its weight.
    for before, one in pairwise([None, *weights.values()]):
        if one is not None and one.beside not in (None, before):
            raise CannotBatchError(
                "the bias of a linear layer does not come right after its weight"
            )
    chain = _cheaper(reader.chain)
    if parameters[0].device.type == "cpu" and pooling.library() is not None:
        chain = pooling.with_c_layers(chain)
    program = BatchedProgram(chain, loss, list(weights.values()), inputs)
    _try(program, task=task, model=model, parameters=trained, examples=examples)
    for each in program.weights:
        # The memory of the trial has the size of a single client.
        each.forget()
    return program


def _check(model: nn.Module, parameters: Sequence[nn.Parameter], examples: Examples) -> None:
    # Examples of a dataset are read one by one, and may be drawn at random: rows cannot be taken
    # from them.
    if type(examples) is not Examples:
        raise CannotBatchError("the inputs are not tensors in memory")
    if not isinstance(examples.targets, Tensor):
        raise CannotBatchError("the targets are not one tensor")
    if not parameters:
        raise CannotBatchError("the model has no parameters")
    # Batch norm mixes the examples of a batch and changes its buffers: no layer here does.
    if next(model.buffers(), None) is not None:
        raise CannotBatchError("the model has buffers")
    if not any(each.requires_grad for each in parameters):
        raise CannotBatchError("no parameter is trained")
    kinds = {each.dtype for each in parameters}
    if len(kinds) != 1 or kinds & {torch.float32, torch.float64} != kinds:
        raise CannotBatchError("the parameters are not all float32, or all float64")
    if any(hooked(module) for module in model.modules()):
        raise CannotBatchError("the model has hooks")
    if any(map(has_hooks, parameters)):
        raise CannotBatchError("some parameters have hooks")


@torch.no_grad()
def _try(
    program: BatchedProgram,
    task: Task,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    examples: Examples,
) -> None:
    """Compare a step of program and model on the first examples.

    Raises CannotBatchError if they differ by more than rounding.
    """
    device = parameters[0].device
    some = _counting(program.loss, examples)
    given, targets = to_device(examples.batch(some), device)
    with torch.enable_grad():
        outputs = model(given)
        found = _loss(program.loss, task.loss, examples, outputs, targets)
        if list(map(id, trainable_parameters(model))) != list(map(id, parameters)):
            raise CannotBatchError("which parameters are trained changes as the model computes")
        expected = _gradients(found, model, parameters)
    if not isinstance(outputs, Tensor) or len(outputs) != len(some):
        raise CannotBatchError("the model's outputs are not one tensor with a row an example")
    _check_targets(program.loss, outputs, examples.targets)
    inputs = program.inputs[some].to(device)
    shares_of_rows = torch.full((1, len(some)), 1 / len(some), dtype=inputs.dtype, device=device)
    eps = torch.finfo(inputs.dtype).eps
    # Both kinds of a first step: with shared weights, and with per-client weights.
    for shares in (True, False):
        for weights, parameter in zip(program.weights, parameters, strict=True):
            weights.load(parameter.reshape(1, -1), 1, SGD(1.0), shares=shares)
        program.begin(1)
        try:
            program.step(
                inputs=inputs.unsqueeze(0),
                targets=targets.unsqueeze(0),
                sizes=[len(some)],
                shares=shares_of_rows,
                first=True,
            )
        except OwnLossError as error:
            reason = described(error.__cause__ or error)
            raise CannotBatchError(f"the loss fails: {reason}") from error
        except (RuntimeError, ValueError) as error:
            raise CannotBatchError(
                f"a layer has inputs of another shape than usual: {first_line(error)}"
            ) from error
        for weights, parameter, gradient in zip(program.weights, parameters, expected, strict=True):
            # With lr 1 the step is the gradient. The gradient's rounding is relative to its largest
            # element; the rounding of the difference, to the weights.
            off = (parameter - weights.values[0] - gradient).abs().max()
            rounding = 1e3 * eps * gradient.abs().max() + 4 * eps * parameter.abs().max()
            if not bool(off <= rounding):
                raise CannotBatchError("the model computes something else than its layers say")


def _gradients(loss: Tensor, model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradient of each parameter.

    Raises CannotBatchError for a parameter without a gradient: an optimizer skips it, and the chain
    would move it.
    """
    if not loss.requires_grad:
        raise CannotBatchError("the loss reaches no trained parameter")
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gradients = []
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is None:
            raise CannotBatchError(f"the loss does not reach {names[id(parameter)]}")
        gradients.append(gradient)
    return gradients


def _loss(
    loss: BatchedLoss, function: TaskLoss, examples: Examples, outputs: Any, targets: Any
) -> Tensor:
    """Return the task's loss of a few examples."""
    try:
        if isinstance(loss, UserDefinedLoss):
            check_pair(function, function(outputs, targets))
        found = CountedLoss(function, examples).mean(outputs, targets, len(targets))
    except CannotBatchError:
        raise
    except Exception as error:
        # The error would name the client if a client met it.
        raise CannotBatchError(f"the loss fails: {described(error)}") from error
    if not found.counted:
        raise CannotBatchError("the loss counts nothing in the examples that it is tried on")
    return found.loss


def _counting(loss: BatchedLoss, examples: Examples) -> Tensor:
    """Return a few examples, as indices; if known, examples that the loss counts."""
    targets = examples.targets
    if loss.known is None or targets.ndim != 1:
        return torch.arange(min(TRIED, len(examples)))
    counting = (targets != loss.known.ignore_index).nonzero().flatten()
    return counting[:TRIED] if len(counting) else torch.arange(1)


def _check_targets(loss: BatchedLoss, outputs: Tensor, targets: Tensor) -> None:
    if isinstance(loss, UserDefinedLoss):
        return
    if loss.known is not None:
        counting = targets != loss.known.ignore_index
        # For the bounds below: ignored targets have no valid class.
        targets = targets[counting] if targets.ndim == 1 else targets
        if outputs.ndim != 2 or targets.ndim != 1 or targets.dtype != torch.int64:
            raise CannotBatchError("the targets are not one class index an example")
        if not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]:
            raise CannotBatchError("some targets are no class of the model's")
    elif targets.shape[1:] != outputs.shape[1:] or targets.dtype != outputs.dtype:
        raise CannotBatchError("the targets are not of the shape and dtype of the model's outputs")


class _Tracer(fx.Tracer):
    """Tracer that ends at the first parameter used outside of a layer.

    torch's tracer would look for a name among all parameters, for each such use.
    """

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if isinstance(attr_val, nn.Parameter):
            raise CannotBatchError(OUTSIDE)
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class _Reader:
    """The chain of a model, call by call.

    used: the ids of the parameters in the chain. Raises CannotBatchError for unknown calls.
    """

    def __init__(
        self, model: nn.Module, weights: dict[int, Weights], structured: bool = False
    ) -> None:
        self.structured = structured
        self.front: Preprocessing | None = None
        self.weights = weights
        self.used: list[int] = []
        self.chain: list[BatchedLayer] = []
        # Wrapped, so that a model which is a single known layer is a call as well. In training
        # mode, as in its use: dropout has to be seen.
        self.root = nn.Sequential(model.train())
        before = _kept_by(model)
        try:
            graph = _Tracer().trace(self.root)
        except CannotBatchError:
            raise
        except Exception as error:
            reason = first_line(error)
            raise CannotBatchError(
                f"the model's forward depends on its inputs: {reason}"
            ) from error
        # A traced model would not execute such changes again.
        if _kept_by(model) != before:
            raise CannotBatchError("the model's forward changes what the model keeps")
        self.value: fx.Node | None = None
        self.begins: fx.Node | None = None
        """Input of the first layer, for structured inputs."""
        self.rows: set[fx.Node] = set()
        """Values that are the length of the batch."""
        for node in graph.nodes:
            self._read(node)

    def inputs_of(self, examples: Examples) -> Tensor:
        """Return the inputs of the first layer, for all examples."""
        if self.front is None:
            whole: Tensor = examples.inputs
            return whole
        assert self.begins is not None
        return self.front.tensor_of(examples.inputs, self.begins)

    def _read(self, node: fx.Node) -> None:
        if node.op == "placeholder" and self.structured and self.front is None:
            self.front = Preprocessing(node)
            return
        if self.front is not None and self._is_before(self.front, node):
            return
        if node.op == "placeholder" and self.value is None:
            self.value = node
        elif node.op == "output":
            if node.args != (self.value,):
                raise CannotBatchError(
                    "the model returns something else than its last layer's output"
                )
        elif node.op == "get_attr":
            raise CannotBatchError(OUTSIDE)
        # Every other call is a layer: it has to use the value before it, and besides that only
        # lengths of the batch.
        elif not self._is_length(node):
            if [each for each in node.all_input_nodes if each not in self.rows] != [self.value]:
                raise CannotBatchError(
                    f"the model is not a chain: {node.name} uses more than the layer before"
                )
            self.chain += self._layers(node)
            self.value = node

    def _is_before(self, front: Preprocessing, node: fx.Node) -> bool:
        """Return whether the operation precedes the first layer; note the first layer's input."""
        if front.takes(node):
            return True
        if self.begins is None:
            before = node.all_input_nodes
            if len(before) != 1 or before[0] not in front.nodes[1:]:
                raise CannotBatchError("the inputs do not become one tensor before the first layer")
            self.begins = self.value = before[0]
        return False

    def _is_length(self, node: fx.Node) -> bool:
        """Return whether the node is x.size(0) or x.shape[0], as in x.view(x.size(0), -1)."""
        args = node.args
        shape = (
            node.op == "call_function" and node.target is getattr and args == (self.value, "shape")
        )
        length = (
            node.op == "call_method" and node.target == "size" and args == (self.value, 0)
        ) or (node.target is operator.getitem and args[0] in self.rows and args[1] == 0)
        if shape or length:
            self.rows.add(node)
        return bool(shape or length)

    def _layers(self, node: fx.Node) -> list[BatchedLayer]:
        if node.op == "call_module":
            return self._module(self.root.get_submodule(str(node.target)))
        if node.op == "call_method":
            found = _METHODS.get(str(node.target))
        elif node.op == "call_function":
            found = _FUNCTIONS.get(node.target)
        else:
            found = None
        if found is None:
            raise CannotBatchError(f"{node.name} is not a layer that is known here")
        # The table's functions have the signatures of torch's, without the input; other arguments
        # are unsupported.
        try:
            return found(*node.args[1:], **node.kwargs)
        except TypeError as error:
            raise CannotBatchError(f"{node.name} has arguments that are not known here") from error

    def _module(self, module: nn.Module) -> list[BatchedLayer]:
        kind = type(module)
        if isinstance(module, nn.Linear) and kind is nn.Linear:
            if self._uses(module):
                return [layers.Linear(*self._parameters(module))]
            return [layers.FrozenLinear(*_constants(module))]
        if isinstance(module, nn.Conv2d) and kind is nn.Conv2d:
            return [self._convolution(module)]
        if kind in _MODULES:
            return _MODULES[kind](module)
        raise CannotBatchError(f"{kind.__name__} is not a layer that is known here")

    def _uses(self, module: nn.Linear | nn.Conv2d) -> bool:
        """Note the layer's parameters; return whether they are trained."""
        # A layer that is called twice would be stepped twice, and its inputs overwritten.
        for parameter in module.parameters():
            if id(parameter) in self.used:
                raise CannotBatchError("two layers share their weights")
            self.used.append(id(parameter))
        trained = {parameter.requires_grad for parameter in module.parameters()}
        if len(trained) > 1:
            raise CannotBatchError("of a layer's weight and bias one is trained")
        return trained.pop()

    def _parameters(self, module: nn.Linear | nn.Conv2d) -> tuple[Weights, Weights | None]:
        return self.weights[id(module.weight)], None if module.bias is None else self.weights[
            id(module.bias)
        ]

    def _convolution(self, module: nn.Conv2d) -> BatchedLayer:
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise CannotBatchError("a Conv2d has groups, or padding other than a number of zeros")
        how = (_pair(module.stride), _pair(module.padding), _pair(module.dilation))
        if not self._uses(module):
            return layers.FrozenConvolution(*_constants(module), *how)
        # A kernel has the elements of a patch: the written-out patches are that many times the
        # image.
        few = module.weight[0].numel() <= layers.FEW
        kind = layers.PatchConvolution if few else layers.Convolution
        return kind(*self._parameters(module), *how)


def _constants(module: nn.Linear | nn.Conv2d) -> tuple[Tensor, Tensor | None]:
    """Return the weights of a layer that is not trained."""
    return module.weight.detach(), None if module.bias is None else module.bias.detach()


def _kept_by(model: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of all modules, by identity, and the contents of containers."""
    return [{name: _within(value) for name, value in vars(one).items()} for one in model.modules()]


def _within(value: Any) -> Any:
    # Objects are compared by identity: equality of tensors is a tensor.
    if isinstance(value, dict):
        return {key: id(one) for key, one in value.items()}
    return [id(one) for one in value] if isinstance(value, (list, set)) else id(value)


def _pair(value: Any) -> Pair:
    one, another = (value, value) if isinstance(value, int) else value
    return int(one), int(another)


def _flatten(start_dim: int = 0, end_dim: int = -1) -> list[BatchedLayer]:
    if (start_dim, end_dim) != (1, -1):
        raise CannotBatchError(f"flatten({start_dim}, {end_dim}) does not keep the examples apart")
    return [layers.Reshape((-1,))]


def _view(*shape: Any) -> list[BatchedLayer]:
    first, *rest = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    length = isinstance(first, fx.Node) or (first == -1 and -1 not in rest)
    if not length or not rest or not all(isinstance(each, int) for each in rest):
        raise CannotBatchError(f"view{tuple(shape)} does not keep the examples apart")
    return [layers.Reshape(tuple(rest))]


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> list[BatchedLayer]:
    if p and training:
        raise CannotBatchError("the model draws random numbers (dropout)")
    return []


def _max_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> list[BatchedLayer]:
    if return_indices:
        raise CannotBatchError("max pooling returns indices")
    kernel = _pair(kernel_size)
    over = kernel if stride is None else _pair(stride)
    return [
        layers.max_pool(
            kernel=kernel,
            stride=over,
            padding=_pair(padding),
            dilation=_pair(dilation),
            ceil=ceil_mode,
        )
    ]


def _avg_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> list[BatchedLayer]:
    kernel = _pair(kernel_size)
    over = kernel if stride is None else _pair(stride)
    return [
        layers.avg_pool(
            kernel=kernel,
            stride=over,
            padding=_pair(padding),
            ceil=ceil_mode,
            count_padding=count_include_pad,
            divisor=divisor_override,
        )
    ]


def _relu(inplace: bool = False) -> list[BatchedLayer]:
    return [layers.Relu()]


def _tanh() -> list[BatchedLayer]:
    return [layers.tanh()]


def _sigmoid() -> list[BatchedLayer]:
    return [layers.sigmoid()]


def _gelu(approximate: str = "none") -> list[BatchedLayer]:
    return [layers.gelu(approximate)]


_FUNCTIONS: dict[Any, Callable[..., list[BatchedLayer]]] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_), _relu),
    **dict.fromkeys((F.tanh, torch.tanh), _tanh),
    **dict.fromkeys((F.sigmoid, torch.sigmoid), _sigmoid),
    F.gelu: _gelu,
    torch.flatten: _flatten,
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool),
    F.avg_pool2d: _avg_pool,
    **dict.fromkeys((F.dropout, torch.dropout), _dropout),
    torch.reshape: _view,
}
_METHODS: dict[str, Callable[..., list[BatchedLayer]]] = {
    **dict.fromkeys(("relu", "relu_"), _relu),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "flatten": _flatten,
    **dict.fromkeys(("view", "reshape"), _view),
    "contiguous": list,
}
_MODULES: dict[type[nn.Module], Callable[[Any], list[BatchedLayer]]] = {
    nn.Identity: lambda module: [],
    nn.ReLU: lambda module: _relu(),
    nn.Tanh: lambda module: _tanh(),
    nn.Sigmoid: lambda module: _sigmoid(),
    nn.GELU: lambda module: _gelu(module.approximate),
    nn.Flatten: lambda module: _flatten(module.start_dim, module.end_dim),
    nn.Dropout: lambda module: _dropout(module.p),
    nn.MaxPool2d: lambda module: _max_pool(
        kernel_size=module.kernel_size,
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        ceil_mode=module.ceil_mode,
        return_indices=module.return_indices,
    ),
    nn.AvgPool2d: lambda module: _avg_pool(
        kernel_size=module.kernel_size,
        stride=module.stride,
        padding=module.padding,
        ceil_mode=module.ceil_mode,
        count_include_pad=module.count_include_pad,
        divisor_override=module.divisor_override,
    ),
}

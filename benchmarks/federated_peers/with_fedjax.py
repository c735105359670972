"""FedJAX: its federated averaging, whose client steps are compiled, on JAX for CPUs (XLA takes all
cores).

The weights are laid out as XLA likes them on CPUs, channels last. FedJAX calls jax.tree_map, which
newer versions of JAX lack, hence JAX 0.5.3; under it FedJAX's other backend, pmap over several
devices, returns updates of a wrong shape.
"""

from __future__ import annotations

from typing import Any

import fedjax
import jax
import numpy as np
from federation import BATCH, LR, Federation, asked, ended, finished
from jax import numpy as jnp


def channels_last(federation: Federation) -> tuple[list[Any], Any]:
    """Weights and inputs from torch's layout."""
    weights = list(federation.weights)
    if federation.model == "mlp":
        return [w.T for w in weights], lambda inputs: inputs.reshape(len(inputs), -1)
    weights[0], weights[2] = (weights[position].transpose(2, 3, 1, 0) for position in (0, 2))
    weights[4] = weights[4].reshape(512, 64, 7, 7).transpose(2, 3, 1, 0).reshape(-1, 512)
    weights[6] = weights[6].T
    return weights, lambda inputs: inputs.transpose(0, 2, 3, 1)


def convolved(inputs: Any, weight: Any, bias: Any) -> Any:
    out = jax.lax.conv_general_dilated(
        inputs, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(
        jax.nn.relu(out + bias), -jnp.inf, jax.lax.max, window, window, "VALID"
    )


def scores(weights: list[Any], inputs: Any) -> Any:
    hidden = inputs
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    for weight, bias in layers:
        if weight.ndim == 4:
            hidden = convolved(hidden, weight, bias)
        else:
            hidden = hidden.reshape(len(hidden), -1) @ weight + bias
            hidden = hidden if weight is layers[-1][0] else jax.nn.relu(hidden)
    return hidden


def loss(weights: list[Any], batch: dict[str, Any], rng: Any) -> Any:
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(scores(weights, batch["x"])), batch["y"][:, None], axis=1
    )
    return -chosen.mean()


def main() -> None:
    federation = Federation(asked().file)
    weights, converted = channels_last(federation)
    inputs = np.ascontiguousarray(converted(federation.inputs))
    targets = federation.targets.astype(np.int32)
    own = {client: federation.examples(client) for client in range(federation.clients)}
    data = fedjax.InMemoryFederatedData(
        {client: {"x": inputs[part], "y": targets[part]} for client, part in own.items()}
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, seed=0),
    )
    state = algorithm.init([jnp.asarray(weight) for weight in weights])
    key = jax.random.PRNGKey(0)
    for number, cohort in enumerate(federation.cohorts):
        keys = list(jax.random.split(jax.random.fold_in(key, number), len(cohort)))
        clients = zip(
            cohort, (examples for _, examples in data.get_clients(cohort)), keys, strict=True
        )
        state, _ = algorithm.apply(state, list(clients))
        jax.block_until_ready(state.params)
        finished(number + 1)
    ended(
        federation.accuracy_of(
            lambda inputs: np.asarray(scores(state.params, jnp.asarray(converted(inputs))))
        ),
        *("fedjax", "jax"),
    )


if __name__ == "__main__":
    main()

"""ZeRO: what every rank of data parallel holds alike is divided over the ranks instead.

With Ψ parameters and N ranks, in float32 with Adam (Ψ elements of parameters, Ψ of gradients, 2Ψ of
state):

    stage   divided                     bytes a rank holds       elements a rank sends in a step
    0       nothing (data parallel)     16Ψ                      2Ψ·(N-1)/N
    1       optimizer state             8Ψ + 8Ψ/N                2Ψ·(N-1)/N
    2       and gradients               4Ψ + 12Ψ/N               2Ψ·(N-1)/N
    3       and parameters              16Ψ/N + units            3Ψ·(N-1)/N

Every rank computes the gradient of its part of the batch. A reduce-scatter leaves rank r the sum of
its N-th part, by which it updates its N-th part of the parameters, with an optimizer that has the
state of that part alone. In stages 1 and 2 an all-gather makes the parameters whole again on all
ranks. In stage 3 they never are: before a unit (a layer, a block of layers) computes, in forward
and once more in backward, its parameters are gathered, and freed after it.

    division    which elements which rank holds, as data; what a step sends; what a rank holds
    units       which parameters are gathered together
    sweep       the order of messages, the same on all ranks whatever each computes
    shares      what a rank holds of a block, and memory that is used again
    common      memory that all ranks of a host read
    dividing    a model's parameters become shares
    wire        reduce-scatters and all-gathers, alongside the program or not
    away        parameters that are not here
    changes     who changes parameters that are only lent
    structure   what was frozen, added or replaced since the model was divided
    gathering   units gathered and freed; what autograd saves of them
    in_place    units in memory that all ranks read, where nothing is gathered
    rows        gradients of a block as rows, one a rank
    reducing    gradients become sums; the tail; late gradients
    arriving    stages 1 and 2: parameters that come while the next forward pass has begun
    passes      forward and backward passes: from hooks to messages
    optimizer   an optimizer over pieces, and its whole state
    whole       the whole model, to look at, to save and to load
    checks      which settings, models and optimizers it takes
    agreement   what one rank refuses, all refuse
    checkpoint  checkpoints of which each rank writes its part
    redundancy  `ZeroRedundancy`, for any training loop
    strategy    `ZeRO`, for `dure.train`

Source: Rajbhandari, Rasley, Ruwase and He 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models".
"""

from dure.parallel.zero.checkpoint import read_whole
from dure.parallel.zero.redundancy import ZeroRedundancy

__all__ = ["ZeroRedundancy", "read_whole"]

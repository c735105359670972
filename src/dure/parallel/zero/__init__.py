"""ZeRO: the replicated memory of data parallelism, divided over the ranks.

With Ψ parameters and N ranks, in float32 with Adam (Ψ elements of parameters, Ψ of gradients, 2Ψ of
state):

    stage   divided                     bytes of a rank          elements a rank sends in a step
    0       nothing (data parallel)     16Ψ                      2Ψ·(N-1)/N
    1       optimizer state             8Ψ + 8Ψ/N                2Ψ·(N-1)/N
    2       and gradients               4Ψ + 12Ψ/N               2Ψ·(N-1)/N
    3       and parameters              16Ψ/N + units            3Ψ·(N-1)/N

Every rank computes the gradient of its part of the batch. A reduce-scatter leaves rank r the sum of
its N-th part. Rank r updates its N-th part of the parameters with an optimizer that has the state
of that part alone. In stages 1 and 2 an all-gather then restores the whole parameters on all ranks.
In stage 3 parameters are never whole between passes: before a unit (a layer, a block of layers)
computes, in forward and again in backward, its parameters are gathered, and freed afterwards.

    division    the elements of each rank, as data; the bytes sent in a step; the bytes of a rank
    units       groups of parameters that are gathered together
    sweep       the order of messages, equal on all ranks whatever each rank computes
    shares      a rank's memory for a block, and a pool of reused memory
    common      memory that all ranks of a host read
    dividing    conversion of a model's parameters to shares
    wire        reduce-scatters and all-gathers, overlapped with computation or not
    away        parameters whose elements are on other ranks
    changes     detection of changes to gathered parameters
    structure   detection of parameters frozen, added or replaced since the division
    gathering   units that are gathered and freed; the tensors that autograd saves of them
    in_place    units in memory that all ranks read, without gathering
    rows        the gradients of a block as rows, a row for each rank
    reducing    sums of gradients; the trailer; late gradients
    arriving    stages 1 and 2: all-gathers that overlap the next forward pass
    passes      forward and backward passes: from hooks to messages
    optimizer   an optimizer over pieces, and its whole state
    whole       the whole model, for reading, saving and loading
    checks      the supported settings, models and optimizers
    agreement   errors of a rank, raised on all ranks
    checkpoint  checkpoints of which each rank writes its part
    redundancy  `ZeroRedundancy`, for any training loop
    strategy    `ZeRO`, for `dure.train`

Source: Rajbhandari, Rasley, Ruwase and He 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models".
"""

from dure.parallel.zero.checkpoint import read_whole
from dure.parallel.zero.redundancy import ZeroRedundancy

__all__ = ["ZeroRedundancy", "read_whole"]

"""Collectives at the speed of memory: torch.distributed's backend `dure` for ranks of one host.

    import dure
    torch.distributed.init_process_group("dure")

Data within a host is read in the sender's memory, or passes through a cache-sized stage; no data
passes through sockets. `empty_shared` allocates tensors that are reduced in place.

    calls       requests of a rank, and their errors
    pool        shared memory for tensors
    meeting     rendezvous of ranks, and setup of shared memory
    host        ranks of a host: state, progress, lost ranks
    native      the C core (`core/`), portable the same in torch
    mailbox     sends and receives
    work        handles of calls, and their order
    moves       torch's collectives in terms of the core's operations
    begun       calls that are completed later
    leaving     shutdown of a process's groups
    transport   interface for dure's groups
    sparse      sums of sparse tensors
    torch_calls, device_backend, torch_doors
                forms of calls, the profiler, and other functions of torch that require gloo by name
    backend     interface for torch.distributed
"""

from dure.collectives.shared_memory.backend import Options, SharedMemoryGroup
from dure.collectives.shared_memory.pool import empty_shared

__all__ = ["Options", "SharedMemoryGroup", "empty_shared"]

"""Collectives at the speed of memory: torch.distributed's backend `dure` for ranks of one host.

    import dure
    torch.distributed.init_process_group("dure")

What travels within a host is read where its owner wrote it, or passes through a cache-sized stage;
nothing goes through sockets. `empty_shared` gives tensors that are reduced in place.

    calls       what a rank asks for, and what is wrong with it
    pool        shared memory for tensors
    meeting     how ranks find each other and come to share memory
    host        what ranks of a host know of each other; who is lost
    native      the C core (`core/`), portable the same in torch
    mailbox     sends and receives
    work        handles of calls, and the order they run in
    moves       torch's collectives in terms of what ranks can do
    begun       calls that are ended later
    leaving     how a process leaves its groups
    transport   what the groups of dure ask
    sparse      sums of sparse tensors
    torch_calls, device_backend, torch_doors
                forms of calls, the profiler, and what else of torch asks by the name of gloo
    backend     what torch.distributed sees
"""

from dure.collectives.shared_memory.backend import Options, SharedMemoryGroup
from dure.collectives.shared_memory.pool import empty_shared

__all__ = ["Options", "SharedMemoryGroup", "empty_shared"]

/* What every collective begins and ends with: post the call, wait for all, see that all called the same. */
#include "core.h"

/* A multiplicative hash: the constant is 2^64 divided by the golden ratio. */
static uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

/* Sizes of gathers, scatters and all-to-alls may differ between ranks; their deals are compared instead. */
static uint64_t fingerprint(const struct call *call) {
    uint64_t hash = mixed(mixed(0, call->kind), ((uint64_t)call->dtype << 32) | call->op);
    hash = mixed(hash, (uint64_t)(uint32_t)call->root);
    hash = mixed(hash, call->extra);
    int counts = call->kind < GATHER || call->kind >= BEGUN_REDUCE_SCATTER;
    return mixed(hash, counts ? call->count : 0);
}

char *slot_of(struct core *core, int rank) {
    return core->slots + ((uint64_t)rank * 2 + (core->number & 1)) * core->slot_bytes;
}

char *stage_of(struct core *core, int rank, uint64_t window) {
    return core->stages + ((uint64_t)rank * 4 + (window & 1)) * core->stage_bytes;
}

/* Before anything is written for a call: the number decides which of two copies it is written to. */
void begin(struct core *core, struct call *call) {
    struct seat *seat = &core->seats[core->rank];
    call->number = core->at = ++core->number;
    /* `begun` and `finished` are for errors only; the sync that follows publishes the call itself. */
    atomic_store_explicit(&seat->begun, call->number, memory_order_relaxed);
    seat->calls[call->number % CALLS] = *call;
    seat->fingerprint[call->number % CALLS] = fingerprint(call);
}

/* After the first sync of a call: whether all ranks have called the same. Every rank finds the same answer. */
int agreed(struct core *core) {
    uint64_t place = core->at % CALLS, own = core->seats[core->rank].fingerprint[place];
    for (int rank = 0; rank < core->size; rank++)
        if (core->seats[rank].fingerprint[place] != own) return 0;
    return 1;
}

int finish(struct core *core, int status) {
    atomic_store_explicit(&core->seats[core->rank].finished, core->at, memory_order_relaxed);
    return status;
}

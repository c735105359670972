/* The segment's layout, a rank's view of it, leaving and aborting. */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WORTH_HELPING (32u << 20) /* bytes: milliseconds, as long as a time slice */
#define SHARE (256u << 10)          /* bytes: long enough for a sum, short enough to share what is left */
#define MAGIC 0x3165727564u /* "dure1" */

static uint64_t rounded(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

struct layout {
    uint64_t seats, deals, slots, stages, channels, end;
};

/* The file is all zeros at first, which is the right beginning of every counter and flag. Pages that nobody touches
 * take no memory, so slots, stages and channels may be generous.
 *
 * Of each rank: two slots of a small input each, and a stage of two windows of input and two of results. */
static struct layout layout_of(uint64_t size, uint64_t slot, uint64_t stage, uint64_t channel) {
    struct layout at;
    at.seats = rounded(sizeof(struct header), LINE);
    at.deals = at.seats + size * sizeof(struct seat);
    at.slots = rounded(at.deals + size * 2 * size * sizeof(struct deal), 4096);
    at.stages = rounded(at.slots + size * 2 * slot, 4096);
    at.channels = rounded(at.stages + size * 4 * stage, 4096);
    at.end = at.channels + size * size * (sizeof(struct channel) + channel);
    return at;
}

uint64_t core_segment_bytes(int size, uint64_t slot_bytes, uint64_t stage_bytes, uint64_t channel_bytes) {
    return layout_of((uint64_t)size, slot_bytes, stage_bytes, channel_bytes).end;
}

struct core *core_open(void *segment, int rank, int size, uint64_t slot_bytes, uint64_t stage_bytes,
                       uint64_t channel_bytes, uint64_t spin_ns, uint64_t yield_ns, tick_function tick,
                       struct interpreter *interpreter) {
    struct core *core = calloc(1, sizeof *core);
    if (core == NULL) return NULL;
    struct layout at = layout_of((uint64_t)size, slot_bytes, stage_bytes, channel_bytes);
    char *base = segment;
    core->header = segment;
    core->seats = (struct seat *)(base + at.seats);
    core->deals = (struct deal *)(base + at.deals);
    core->slots = base + at.slots;
    core->stages = base + at.stages;
    core->channels = base + at.channels;
    core->pools = calloc((size_t)size, sizeof *core->pools);
    if (core->pools == NULL) {
        free(core);
        return NULL;
    }
    core->rank = rank;
    core->size = size;
    core->slot_bytes = slot_bytes;
    core->stage_bytes = stage_bytes;
    core->channel_bytes = channel_bytes;
    /* Only where ranks share cores can one be kept from running for a whole time slice. */
    core->help_from = size > sysconf(_SC_NPROCESSORS_ONLN) ? WORTH_HELPING : UINT64_MAX;
    core->share_bytes = SHARE;
    core->spin_ns = spin_ns;
    core->yield_ns = yield_ns;
    core->tick = tick;
    core->interpreter = interpreter;
    if (rank == 0) core->header->magic = MAGIC;
    return core;
}

void core_set_pool(struct core *core, int rank, void *base, uint64_t bytes) {
    core->pools[rank] = base;
    if (rank == core->rank) core->pool_bytes = bytes;
}

void core_close(struct core *core) {
    free(core->pools);
    free(core);
}

/* Wakes all that sleep, so that they look again. */
static void wake_everybody(struct core *core) {
    atomic_fetch_add(&core->header->bell, 1);
    futex_wake_all(&core->header->bell);
    for (int rank = 0; rank < core->size; rank++) core_ring(core, rank);
}

void core_leave(struct core *core) {
    atomic_store(&core->seats[core->rank].left, 1);
    wake_everybody(core);
}

/* Ends the group for all ranks. The first reason stays; returns whether it is this one. */
int core_abort(struct core *core, const char *reason) {
    uint32_t nobody = 0;
    /* `aborting` elects who writes the reason, `aborted` says that it can be read. */
    int first = atomic_compare_exchange_strong(&core->header->aborting, &nobody, 1);
    if (first) {
        /* The last byte stays 0. */
        strncpy(core->header->reason, reason, REASON_BYTES - 1);
        atomic_store(&core->header->aborted, 1);
    }
    wake_everybody(core);
    return first;
}

/* The reason, or NULL. Whoever lost the race to give a reason waits for the winner's here. */
const char *core_aborted(struct core *core) {
    if (!atomic_load(&core->header->aborting)) return NULL;
    /* Not for ever: whoever gave the reason may have died while it wrote it. */
    for (int tries = 0; !atomic_load(&core->header->aborted) && tries < 1000000; tries++) relax();
    return core->header->reason;
}

/* One number, for native.py: `what` is 0 to 3 of the seat of `rank`, 4 and 5 of this rank itself. */
uint64_t core_look(struct core *core, int rank, int what) {
    struct seat *seat = &core->seats[rank];
    switch (what) {
    case 0: return atomic_load(&seat->arrived);
    case 1: return atomic_load(&seat->begun);
    case 2: return atomic_load(&seat->finished);
    case 3: return atomic_load(&seat->left);
    case 4: return core->awaited;
    default: return core->at;
    }
}

/* For the text of errors: nothing orders it with its owner, who may post another call meanwhile. */
void core_last_call(struct core *core, int rank, struct call *call) {
    struct seat *seat = &core->seats[rank];
    *call = seat->calls[atomic_load(&seat->begun) % CALLS];
}

/* The call that this rank works on, as `rank` has posted it: of another rank, to be asked after the first sync. */
void core_this_call(struct core *core, int rank, struct call *call) {
    *call = core->seats[rank].calls[core->at % CALLS];
}

void core_deal(struct core *core, int rank, int peer, struct deal *deal) {
    *deal = core->deals[((uint64_t)rank * 2 + (core->number & 1)) * (uint64_t)core->size + (uint64_t)peer];
}

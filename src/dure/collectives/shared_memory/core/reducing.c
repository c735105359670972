/* All-reduce, reduce and reduce-scatter of the ranks of a host. Sums are formed in the order of ranks.
 *
 * A tensor of one slot or less: every rank copies it to its slot; one sync; every rank that wants the sum reads all
 * slots. Tensors in pools: one sync; rank r reads its N-th part of all tensors and writes the sum to all, then helps
 * those that are not through; one sync.
 * Other tensors go through windows in the stages, small enough to stay in the cache: a rank copies in what others
 * sum, sums its own part, copies out what others have summed. The three steps of neighbouring windows run between
 * the same two syncs:
 *
 *     in(0) | sync | sum(0) in(1) | sync | out(0) sum(1) in(2) | sync | …
 */
#include "core.h"

#include <string.h>

static int reduce_slots(struct core *core, const struct call *call, char *tensor) {
    const char *srcs[core->size];
    memcpy(slot_of(core, core->rank), tensor, call->bytes);
    int status = core_sync(core);
    if (status != DONE) return status;
    if (!agreed(core)) return MISMATCH;
    if (!wants(core, call)) return DONE;
    /* The own tensor is the same as the own slot, and in the cache. One sync is enough: the slot is written again in the
     * call after the next, when all have read it. */
    for (int rank = 0; rank < core->size; rank++) srcs[rank] = rank == core->rank ? tensor : slot_of(core, rank);
    core_reduce(&tensor, 1, srcs, core->size, call->count, call->dtype, call->op);
    return DONE;
}

/* A rank takes on its own part, and then, in calls that take milliseconds, what is left of the parts of ranks that do
 * not run. */
static int reduce_pools(struct core *core, const struct call *call) {
    /* `count` is at least the whole part: nothing is left for others to take on. */
    if (call->bytes * (uint64_t)core->size < core->help_from) sum_share(core, call, core->rank, call->count);
    else sum_all_parts(core, call);
    return core_sync(core);
}

/* One window of a staged reduction. */
struct window {
    uint64_t number, from, n; /* elements */
};

static struct window window_at(struct core *core, const struct call *call, uint64_t index) {
    uint64_t most = core->stage_bytes / core_width(call->dtype), from = index * most;
    struct window window = {core->windows + index, from, least(most, call->count - from)};
    return window;
}

static void copy_in(struct core *core, const struct call *call, struct window window, const char *tensor) {
    uint64_t width = core_width(call->dtype);
    struct range mine = part_of(window.n, width, core->rank, core->size);
    char *stage = stage_of(core, core->rank, window.number);
    tensor += window.from * width;
    /* What is before and after the own part, which only this rank reads, and reads from the tensor. */
    memcpy(stage, tensor, mine.from * width);
    memcpy(stage + mine.to * width, tensor + mine.to * width, (window.n - mine.to) * width);
}

static void sum_part(struct core *core, const struct call *call, struct window window, char *tensor) {
    const char *srcs[core->size];
    char *dsts[2];
    uint64_t width = core_width(call->dtype);
    struct range mine = part_of(window.n, width, core->rank, core->size);
    uint64_t own = (window.from + mine.from) * width;
    int nd = 0;
    /* To the stage for the others, unless this rank is the root and so the only one that wants it; and to the own
     * tensor, if this rank wants it. */
    for (int rank = 0; rank < core->size; rank++)
        srcs[rank] = rank == core->rank ? tensor + own : stage_of(core, rank, window.number) + mine.from * width;
    if (call->root != core->rank) dsts[nd++] = result_of(core, core->rank, window.number) + mine.from * width;
    if (wants(core, call)) dsts[nd++] = tensor + own;
    core_reduce(dsts, nd, srcs, core->size, mine.to - mine.from, call->dtype, call->op);
}

static void copy_out(struct core *core, const struct call *call, struct window window, char *tensor) {
    uint64_t width = core_width(call->dtype);
    /* Beginning with the next rank, so that not all read from the same one at a time. */
    for (int step = 1; step < core->size; step++) {
        int rank = (core->rank + step) % core->size;
        struct range part = part_of(window.n, width, rank, core->size);
        memcpy(tensor + (window.from + part.from) * width,
               result_of(core, rank, window.number) + part.from * width, (part.to - part.from) * width);
    }
}

/* After the sync that follows copy_in(0). */
static int reduce_windows(struct core *core, const struct call *call, char *tensor) {
    uint64_t most = core->stage_bytes / core_width(call->dtype), count = (call->count + most - 1) / most;
    int status = DONE;
    /* Stages and results of windows w and w + 2 share a place. Between their uses lies a sync, at which all have read
     * the former. After the last window no sync is needed: the next call has its own. */
    for (uint64_t w = 0; w <= count && status == DONE; w++) {
        if (w > 0 && wants(core, call)) copy_out(core, call, window_at(core, call, w - 1), tensor);
        if (w == count) break;
        sum_part(core, call, window_at(core, call, w), tensor);
        if (w + 1 < count) copy_in(core, call, window_at(core, call, w + 1), tensor);
        status = core_sync(core);
    }
    core->windows += count; /* the same on all ranks, for it chooses the place in the stages */
    return status;
}

static int reduce_large(struct core *core, struct call *call, char *tensor) {
    if (call->place == STAGE) copy_in(core, call, window_at(core, call, 0), tensor);
    if (call->place == POOL) atomic_store(&core->seats[core->rank].taken[core->at % CALLS], 0);
    int status = core_sync(core);
    if (status != DONE) return status;
    if (!agreed(core)) return MISMATCH;
    int pooled = ranks_in_pools(core);
    if (pooled == core->size) return reduce_pools(core, call);
    if (pooled > 0) { /* some, not all: those in a pool are staged as well */
        if (call->place == POOL) copy_in(core, call, window_at(core, call, 0), tensor);
        status = core_sync(core);
    }
    return status == DONE ? reduce_windows(core, call, tensor) : status;
}

/* In place; where root is -1 every rank's tensor gets the sum, else the root's alone. code: dtype + 256 * op. */
int core_all_reduce(struct core *core, int code, int root, uint64_t count, char *tensor) {
    struct call call = {.kind = root < 0 ? ALL_REDUCE : REDUCE,
                        .dtype = (uint16_t)(code & 255),
                        .op = (uint16_t)(code >> 8),
                        .root = root,
                        .count = count,
                        .place = STAGE};
    call.bytes = count * core_width(call.dtype);
    /* Below the pool the difference is negative, and as an unsigned number larger than any pool. */
    uint64_t offset = (uint64_t)(tensor - core->pools[core->rank]);
    if (core->pool_bytes >= call.bytes && offset <= core->pool_bytes - call.bytes) {
        call.place = POOL;
        call.pool = offset;
    }
    int small = call.bytes <= core->slot_bytes;
    if (small) call.place = SLOT;
    int status = end_all(core);
    if (status != DONE) return status;
    begin(core, &call);
    return finish(core, small ? reduce_slots(core, &call, tensor) : reduce_large(core, &call, tensor));
}

/* One window of all blocks: stage holds the window's part of each block, but for this rank's own. */
static void copy_blocks_in(struct core *core, const struct part *blocks, uint64_t index, uint64_t share) {
    char *stage = stage_of(core, core->rank, core->windows + index);
    for (int rank = 0; rank < core->size; rank++) {
        uint64_t from = index * share;
        if (rank == core->rank || from >= blocks[rank].bytes) continue;
        memcpy(stage + (uint64_t)rank * share, blocks[rank].address + from, least(share, blocks[rank].bytes - from));
    }
}

static void sum_block(struct core *core, const struct call *call, const struct part *own, uint64_t index,
                      uint64_t share, char *out) {
    const char *srcs[core->size];
    uint64_t from = index * share;
    if (from >= own->bytes) return;
    for (int rank = 0; rank < core->size; rank++)
        srcs[rank] = rank == core->rank
                         ? own->address + from
                         : stage_of(core, rank, core->windows + index) + (uint64_t)core->rank * share;
    out += from;
    core_reduce(&out, 1, srcs, core->size, least(share, own->bytes - from) / core_width(call->dtype), call->dtype,
                call->op);
}

/* blocks: the part of the input that each rank sums and keeps; `out` gets the sum of this rank's. The blocks have
 * the same sizes on all ranks, whose hash is call->extra. */
int core_reduce_scatter(struct core *core, struct call *call, const struct part *blocks, char *out) {
    /* Of a window of the stage each block has a share, in whole cache lines. */
    uint64_t share = core->stage_bytes / (uint64_t)core->size / LINE * LINE, longest = 0;
    for (int rank = 0; rank < core->size; rank++)
        if (blocks[rank].bytes > longest) longest = blocks[rank].bytes;
    uint64_t count = (longest + share - 1) / share;
    call->place = STAGE;
    int status = end_all(core);
    if (status != DONE) return status;
    begin(core, call);
    copy_blocks_in(core, blocks, 0, share);
    status = core_sync(core);
    if (status == DONE && !agreed(core)) return finish(core, MISMATCH);
    /* One sync a window: between two of them a rank sums window w, and copies in w + 1, into the other stage. */
    for (uint64_t w = 0; w < count && status == DONE; w++) {
        sum_block(core, call, &blocks[core->rank], w, share, out);
        if (w + 1 == count) break;
        copy_blocks_in(core, blocks, w + 1, share);
        status = core_sync(core);
    }
    core->windows += count;
    return finish(core, status);
}

/* What all reductions share: how the elements are divided among the ranks, and sums of tensors that lie in pools.
 *
 * Rank r owns the r-th part of the elements, and sums are formed in the order of ranks whoever forms them. In a pool
 * the owner's part is dealt out in shares (seat.taken), so that a rank that has nothing left of its own goes on with
 * the part of one that does not run.
 */
#include "core.h"

uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The part of n elements that a rank sums; parts begin on cache lines. */
struct range part_of(uint64_t n, uint64_t width, int rank, int size) {
    uint64_t line = LINE / width, step = (n + (uint64_t)size * line - 1) / ((uint64_t)size * line) * line;
    /* Each part is as long as the first, rounded up to whole lines; the last ones may be shorter, or empty. */
    struct range part = {least(n, step * (uint64_t)rank), least(n, step * ((uint64_t)rank + 1))};
    return part;
}

char *result_of(struct core *core, int rank, uint64_t window) {
    return stage_of(core, rank, window) + 2 * core->stage_bytes; /* after the two windows of input */
}

int wants(const struct core *core, const struct call *call) {
    return call->root < 0 || call->root == core->rank;
}

static char *in_pool(struct core *core, int rank) {
    return core->pools[rank] + core->seats[rank].calls[core->at % CALLS].pool;
}

static void sum_pools(struct core *core, const struct call *call, struct range range) {
    const char *srcs[core->size];
    char *dsts[core->size];
    uint64_t width = core_width(call->dtype);
    int nd = 0;
    for (int rank = 0; rank < core->size; rank++) {
        char *tensor = in_pool(core, rank) + range.from * width;
        srcs[rank] = tensor;
        if (call->root < 0 || call->root == rank) dsts[nd++] = tensor;
    }
    core_reduce(dsts, nd, srcs, core->size, range.to - range.from, call->dtype, call->op);
}

/* Takes on at most `share` elements of `owner`'s part and sums them; how many. Who forms a sum does not change it. */
uint64_t sum_share(struct core *core, const struct call *call, int owner, uint64_t share) {
    struct range part = part_of(call->count, core_width(call->dtype), owner, core->size);
    uint64_t length = part.to - part.from;
    /* Whoever adds owns the range from the old value on, without a lock. The counter may run past the end. */
    uint64_t at = atomic_fetch_add(&core->seats[owner].taken[core->at % CALLS], share);
    if (at >= length) return 0;
    struct range range = {part.from + at, part.from + least(length, at + share)};
    sum_pools(core, call, range);
    return range.to - range.from;
}

uint64_t sum_share_of(struct core *core, const struct call *call, int owner) {
    return sum_share(core, call, owner, core->share_bytes / core_width(call->dtype));
}

uint64_t left_of(const struct core *core, const struct call *call, int owner) {
    struct range part = part_of(call->count, core_width(call->dtype), owner, core->size);
    uint64_t length = part.to - part.from, taken = atomic_load(&core->seats[owner].taken[core->at % CALLS]);
    return taken < length ? length - taken : 0;
}

void sum_all_parts(struct core *core, const struct call *call) {
    /* The own part first, then the next rank's: helpers spread over those that are late. */
    for (int step = 0; step < core->size; step++)
        while (sum_share_of(core, call, (core->rank + step) % core->size) > 0) {
        }
}

/* How many ranks have their tensors in a pool; after the first sync. */
int ranks_in_pools(struct core *core) {
    int count = 0;
    for (int rank = 0; rank < core->size; rank++) count += core->seats[rank].calls[core->at % CALLS].place == POOL;
    return count;
}

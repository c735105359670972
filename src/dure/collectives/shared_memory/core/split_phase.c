/* Split-phase reduce-scatter, of messages that lie in pools: whoever has begun goes on computing, and ends it when all
 * have begun. Then a rank reads its own block of every message where it lies, and copies nothing before: of messages of
 * S bytes, N ranks, it reads S and writes S / N bytes. Split-phase is what UPC and GASNet call a begin and an end.
 */
#include "core.h"

#include <string.h>

static void sum_own_block(struct core *core, const struct call *call, char *out) {
    uint64_t block = call->bytes / (uint64_t)core->size;
    const char *srcs[core->size];
    for (int rank = 0; rank < core->size; rank++)
        srcs[rank] = core->pools[rank] + core->seats[rank].calls[core->at % CALLS].pool + (uint64_t)core->rank * block;
    core_reduce(&out, 1, srcs, core->size, call->count / (uint64_t)core->size, call->dtype, call->op);
}

static int end_first(struct core *core) {
    struct split split = core->under_way[0];
    memmove(core->under_way, core->under_way + 1, (size_t)--core->n_under_way * sizeof split);
    core->at = split.number;
    int status = wait_for_all(core, split.sync);
    if (status == DONE && !agreed(core)) status = MISMATCH;
    if (status == DONE) sum_own_block(core, &core->seats[core->rank].calls[core->at % CALLS], split.out);
    atomic_store(&core->seats[core->rank].read, split.number);
    return finish(core, status);
}

int end_all(struct core *core) {
    int status = DONE;
    while (core->n_under_way > 0 && status == DONE) status = end_first(core);
    return status;
}

/* call->pool: the message, as many equal blocks as there are ranks; `out` gets the sum of all ranks' block of this
 * rank's, by the time that the call is ended. call->number is what it is ended by. */
int core_begin_reduce_scatter(struct core *core, struct call *call, char *out) {
    int status = core->n_under_way == UNDER_WAY ? end_first(core) : DONE;
    if (status != DONE) return status;
    call->place = POOL;
    begin(core, call);
    status = arrive(core);
    if (status != DONE) return finish(core, status);
    core->under_way[core->n_under_way++] = (struct split){call->number, core->syncs, out};
    return DONE;
}

/* Ends a call, and those that were begun before it; there is nothing to do where that was done already. */
int core_end(struct core *core, uint64_t number) {
    int status = DONE;
    while (core->n_under_way > 0 && core->under_way[0].number <= number && status == DONE) status = end_first(core);
    return status;
}

/* Whether no rank needs the message of a call any more. */
int core_is_read(struct core *core, uint64_t number) {
    for (int rank = 0; rank < core->size; rank++)
        if (atomic_load(&core->seats[rank].read) < number) return 0;
    return 1;
}

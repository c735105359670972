/* Split-phase calls, on messages that lie in pools: whoever has begun goes on computing, and ends the call when all have
 * begun. Split-phase is what UPC and GASNet call a begin and an end.
 *
 * Reduce-scatter: a rank reads its own block of every message where it lies, and copies nothing before: with N messages
 * of S bytes it reads S and writes S / N bytes. Its own block of its own message nobody else reads, so that may lie
 * anywhere.
 *
 * All-reduce: as with tensors in pools (summing.c), each rank sums its N-th part and writes it to all. A rank that
 * begins one as the last of all sums its part at once, while its message is in the cache and the others still compute,
 * so that ranks do not ask for memory at the same time. A rank that comes later than the others leaves them some of its
 * part: with P seconds of work in a part and ranks that are e_i seconds ahead, all come to the end together if it does
 *
 *     P - (sum of e_i) / N
 *
 * At the end a rank sums what is left of its own part, and then of the others', while it would only wait.
 */
#include "core.h"

#include <string.h>

static struct call *posted(const struct core *core) { return &core->seats[core->rank].calls[core->at % CALLS]; }

static void sum_own_block(struct core *core, const struct call *call, const struct split *split) {
    uint64_t block = call->bytes / (uint64_t)core->size, at = 0;
    struct part whole = {core->pools[core->rank] + call->pool + (uint64_t)core->rank * block, block};
    const struct part *own = split->n_own ? split->own : &whole;
    /* Part by part of the own block, each with the same range of the other ranks' messages. */
    for (int part = 0; at < block; at += own[part++].bytes) {
        const char *srcs[core->size];
        char *out = split->out + at;
        for (int rank = 0; rank < core->size; rank++)
            srcs[rank] = core->pools[rank] + core->seats[rank].calls[core->at % CALLS].pool +
                         (uint64_t)core->rank * block + at;
        srcs[core->rank] = own[part].address;
        core_reduce(&out, 1, srcs, core->size, own[part].bytes / core_width(call->dtype), call->dtype, call->op);
    }
}

static int end_first(struct core *core) {
    /* It is taken off the list before it is waited for, so that a call that has failed is not ended twice. */
    struct split split = core->under_way[0];
    memmove(core->under_way, core->under_way + 1, (size_t)--core->n_under_way * sizeof split);
    core->at = split.number; /* the call that `posted`, `agreed` and the sums look at, though later ones have begun */
    int status = wait_for_all(core, split.sync);
    if (status == DONE && !agreed(core)) status = MISMATCH;
    if (status == DONE && split.out != NULL) sum_own_block(core, posted(core), &split);
    if (status == DONE && split.out == NULL) sum_all_parts(core, posted(core));
    /* From here on this rank neither reads nor writes the messages of this call. When all ranks have said so, their owners
     * may use them again (core_is_read). */
    atomic_store(&core->seats[core->rank].read, split.number);
    return finish(core, status);
}

static int reducing(const struct core *core) { return core->n_under_way > 0 && core->under_way[0].out == NULL; }

/* Waits until the sums of all-reduces, which are no longer under way, are written. */
static int meet_at_the_end(struct core *core) {
    struct call end = {.kind = END_OF_ALL_REDUCES, .root = -1, .place = SLOT};
    begin(core, &end);
    int status = core_sync(core);
    return finish(core, status == DONE && !agreed(core) ? MISMATCH : status);
}

int end_all(struct core *core) {
    int status = DONE, reduces = reducing(core);
    while (core->n_under_way > 0 && status == DONE) status = end_first(core);
    return status == DONE && reduces ? meet_at_the_end(core) : status;
}

/* Posts a call, and says that this rank has. Calls of one kind are under way at a time. */
static int begin_split(struct core *core, struct call *call, char *out, const struct part *own, int n_own) {
    call->place = POOL;
    begin(core, call);
    /* Before the arrival: after it, any rank may take on shares (core.h, 4). */
    atomic_store(&core->seats[core->rank].taken[core->at % CALLS], 0);
    int status = arrive(core);
    if (status != DONE) return finish(core, status);
    core->under_way[core->n_under_way++] = (struct split){call->number, core->syncs, out, own, n_own};
    return DONE;
}

/* call->pool: the message, as many equal blocks as there are ranks; `out` gets the sum of all ranks' block of this
 * rank's, by the time that the call is ended. own: parts that together are its own one, all of which stay until then;
 * none: it lies in the message. call->number is what it is ended by. */
int core_begin_reduce_scatter(struct core *core, struct call *call, char *out, const struct part *own, int n_own) {
    int status = DONE;
    /* Scatters are independent: where the list is full, the oldest makes room. All-reduces end together. */
    if (reducing(core)) status = end_all(core);
    else if (core->n_under_way == UNDER_WAY) status = end_first(core);
    return status == DONE ? begin_split(core, call, out, own, n_own) : status;
}

/* How long this rank's part of the call core->at may be left to the ranks that have begun it before. */
static double spare_ns(const struct core *core) {
    double ahead = 0; /* a sum of differences with a sign: a rank that came later than this one counts as negative */
    for (int rank = 0; rank < core->size; rank++)
        ahead += (double)(int64_t)(posted(core)->begun_at - core->seats[rank].calls[core->at % CALLS].begun_at);
    return ahead / core->size - core->left_ns;
}

static void sum_own_part(struct core *core, const struct call *call) {
    double spare = spare_ns(core), rest = 0, summed = 0;
    uint64_t start = now_ns(), left;
    /* The first share is always summed: it tells how long the rest takes. */
    while ((left = left_of(core, call, core->rank)) > 0) {
        rest = summed > 0 ? (double)left * (double)(now_ns() - start) / summed : 0;
        if (summed > 0 && rest < spare) break;
        summed += (double)sum_share_of(core, call, core->rank);
    }
    if (left > 0) core->left_ns += rest;
}

static void sum_what_is_there(struct core *core) {
    /* In the order of their beginning: where one has not been begun by all, none after it has. */
    uint64_t at = core->at;
    for (int i = 0; i < core->n_under_way && all_have_arrived(core, core->under_way[i].sync); i++) {
        core->at = core->under_way[i].number;
        if (!agreed(core)) break; /* its end tells */
        sum_own_part(core, posted(core));
    }
    core->at = at;
}

/* call->pool: the message, which becomes the sum of all ranks', by the time that the call is ended. All that are under
 * way are ended together. */
int core_begin_all_reduce(struct core *core, struct call *call) {
    int full = core->n_under_way == UNDER_WAY, scatters = core->n_under_way > 0 && !reducing(core);
    int status = full || scatters ? end_all(core) : DONE;
    if (core->n_under_way == 0) core->left_ns = 0;
    call->begun_at = now_ns();
    if (status == DONE) status = begin_split(core, call, NULL, NULL, 0);
    if (status == DONE) sum_what_is_there(core);
    return status;
}

/* Ends a call, and those that were begun before it; there is nothing to do where that was done already. */
int core_end(struct core *core, uint64_t number) {
    int status = DONE;
    /* Numbers before the first one under way were ended, maybe by another call in between. */
    if (reducing(core)) return core->under_way[0].number <= number ? end_all(core) : DONE;
    while (core->n_under_way > 0 && core->under_way[0].number <= number && status == DONE) status = end_first(core);
    return status;
}

/* Whether no rank needs the message of a call any more. */
int core_is_read(struct core *core, uint64_t number) {
    for (int rank = 0; rank < core->size; rank++)
        if (atomic_load(&core->seats[rank].read) < number) return 0;
    return 1;
}

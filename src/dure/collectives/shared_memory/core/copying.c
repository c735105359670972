/* Broadcast, all-gather, gather, scatter and all-to-all: every rank offers its input, every rank pulls what it
 * wants of each peer's. An input of one slot or less lies in the rank's slot; one in a pool is read where it is;
 * any other passes through the rank's stage, window after window.
 */
#include "core.h"

#include <string.h>

/* Bytes [from, to) of an input made of parts, to `into`. */
static void gather_parts(const struct part *parts, int n_parts, uint64_t from, uint64_t to, char *into) {
    uint64_t start = 0;
    for (int i = 0; i < n_parts && start < to; i++) {
        uint64_t end = start + parts[i].bytes;
        uint64_t low = from > start ? from : start, high = least(to, end);
        if (low < high) memcpy(into + (low - from), parts[i].address + (low - start), high - low);
        start = end;
    }
}

static struct deal *deals_of(struct core *core, int rank) {
    return core->deals + ((uint64_t)rank * 2 + (core->number & 1)) * (uint64_t)core->size;
}

/* Whether every rank offers to every other what that one wants. Every rank finds the same answer. */
static int deals_agree(struct core *core) {
    for (int i = 0; i < core->size; i++)
        for (int j = 0; j < core->size; j++)
            if (deals_of(core, i)[j].bytes != deals_of(core, j)[i].wanted) return 0;
    return 1;
}

static const struct call *call_of(struct core *core, int rank) {
    return &core->seats[rank].calls[core->at % CALLS];
}

/* Copies what lies between `from` and `to` of the peer's input, where `source` holds the byte `from`. */
static void take(const struct pull *pull, uint64_t from, uint64_t to, const char *source) {
    uint64_t low = pull->offset > from ? pull->offset : from, high = least(to, pull->offset + pull->bytes);
    if (low < high) memcpy(pull->into + (low - pull->offset), source + (low - from), high - low);
}

static void pull_window(struct core *core, const struct pull *pulls, uint64_t index) {
    for (int step = 1; step < core->size; step++) {
        int rank = (core->rank + step) % core->size;
        const struct call *call = call_of(core, rank);
        if (pulls[rank].bytes == 0) continue;
        if (call->place == STAGE) {
            uint64_t from = index * core->stage_bytes;
            take(&pulls[rank], from, from + core->stage_bytes, stage_of(core, rank, core->windows + index));
        } else if (index == 0) /* slots and pools hold all of the input at once */
            take(&pulls[rank], 0, call->bytes,
                 call->place == POOL ? core->pools[rank] + call->pool : slot_of(core, rank));
    }
}

/* How many windows the longest staged input has, and whether any is in a pool; the same on all ranks. */
static uint64_t windows_of(struct core *core, int *pooled) {
    uint64_t longest = 0;
    *pooled = 0;
    for (int rank = 0; rank < core->size; rank++) {
        const struct call *call = call_of(core, rank);
        if (call->place == STAGE && call->bytes > longest) longest = call->bytes;
        *pooled |= call->place == POOL;
    }
    uint64_t count = (longest + core->stage_bytes - 1) / core->stage_bytes;
    return count > 0 ? count : 1;
}

static int after_first_sync(struct core *core, const struct call *call, const struct part *parts, int n_parts,
                            const struct deal *deals, const struct pull *pulls) {
    struct pull dealt[core->size];
    if (!agreed(core)) return MISMATCH;
    if (deals != NULL) {
        if (!deals_agree(core)) return BAD_SIZES;
        for (int rank = 0; rank < core->size; rank++) {
            dealt[rank] = pulls[rank]; /* where in its input a peer has put this rank's part, only the peer knows */
            dealt[rank].offset = deals_of(core, rank)[core->rank].offset;
        }
        pulls = dealt;
    }
    int pooled;
    uint64_t count = windows_of(core, &pooled);
    int status = DONE;
    for (uint64_t w = 0; w < count && status == DONE; w++) {
        pull_window(core, pulls, w);
        if (w + 1 == count) break;
        uint64_t from = (w + 1) * core->stage_bytes;
        if (call->place == STAGE)
            gather_parts(parts, n_parts, from, from + core->stage_bytes,
                         stage_of(core, core->rank, core->windows + w + 1));
        status = core_sync(core);
    }
    core->windows += count;
    /* Slots and stages have a second copy, a tensor in a pool has not: its owner waits until all have read it. */
    return status == DONE && pooled ? core_sync(core) : status;
}

/* parts: this rank's input. deals: what it offers to and wants of each peer, or NULL where that follows from the
 * call and is in `pulls` already. A rank's own share is copied by the caller. call->place: POOL or STAGE. */
int core_exchange(struct core *core, struct call *call, const struct part *parts, int n_parts,
                  const struct deal *deals, const struct pull *pulls) {
    if (call->bytes <= core->slot_bytes) call->place = SLOT;
    int status = end_all(core);
    if (status != DONE) return status;
    begin(core, call);
    if (deals != NULL) memcpy(deals_of(core, core->rank), deals, (uint64_t)core->size * sizeof *deals);
    if (call->place == SLOT) gather_parts(parts, n_parts, 0, call->bytes, slot_of(core, core->rank));
    if (call->place == STAGE)
        gather_parts(parts, n_parts, 0, core->stage_bytes, stage_of(core, core->rank, core->windows));
    status = core_sync(core);
    return finish(core, status == DONE ? after_first_sync(core, call, parts, n_parts, deals, pulls) : status);
}

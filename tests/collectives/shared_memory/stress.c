/* Random collectives and messages of the C core, with threads as ranks, so that ThreadSanitizer sees every access.
 *
 * stress RANKS CALLS SEED SPIN_NS: all ranks draw the same calls from the seed, and each some delays of its own.
 * Places are tiny, so that most tensors take many windows. Exits with 1 at a wrong value or status. */
#define _GNU_SOURCE
#include "core.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 3000 /* elements of a tensor */
#define SLOT 256
#define STAGED 1024
#define CHANNEL 192
#define RANKS 16
#define BLOCK 256 /* elements of a block of a split-phase call */
#define BESIDE (4096 * 32) /* bytes of a pool before the messages of such calls */

static int size, calls;
static uint64_t seed, spin;
static void *segment;
static char *pools[RANKS];

static uint64_t next(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = (*state ^ (*state >> 30)) * 0xbf58476d1ce4e5b9u;
    return z ^ (z >> 27);
}

static int patient(double waited) { return waited < 60; }

static void expect(int right, const char *what, int rank, int call) {
    if (right) return;
    fprintf(stderr, "rank %d, call %d: wrong %s\n", rank, call, what);
    exit(1);
}

static int32_t value(int rank, uint64_t i, int call) { return (int32_t)(i * 31 + (uint64_t)rank * 1000003 + (uint64_t)call); }

static int32_t total(uint64_t i, int call) {
    uint32_t sum = 0;
    for (int rank = 0; rank < size; rank++) sum += (uint32_t)value(rank, i, call);
    return (int32_t)sum;
}

static void fill(int32_t *tensor, uint64_t n, int rank, int call) {
    for (uint64_t i = 0; i < n; i++) tensor[i] = value(rank, i, call);
}

static void all_reduce(struct core *core, int call, uint64_t n, int root, int pooled, int32_t *own) {
    int32_t *tensor = pooled ? (int32_t *)pools[core->rank] : own;
    fill(tensor, n, core->rank, call);
    int status = core_all_reduce(core, I32 + 256 * SUM, root, n, (char *)tensor);
    expect(status == DONE, "status of all_reduce", core->rank, call);
    if (root >= 0 && root != core->rank) return;
    for (uint64_t i = 0; i < n; i++) expect(tensor[i] == total(i, call), "sum", core->rank, call);
}

static void reduce_scatter(struct core *core, int call, uint64_t n, int32_t *own, int32_t *out) {
    struct part blocks[RANKS];
    uint64_t start = 0;
    fill(own, n * (uint64_t)size, core->rank, call);
    for (int rank = 0; rank < size; rank++) {
        uint64_t length = n / (1 + (uint64_t)rank);
        blocks[rank] = (struct part){(char *)(own + start), length * 4};
        start += length;
    }
    struct call posted = {.kind = REDUCE_SCATTER, .dtype = I32, .op = SUM, .root = -1, .count = start, .bytes = start * 4};
    expect(core_reduce_scatter(core, &posted, blocks, (char *)out) == DONE, "status of reduce_scatter", core->rank, call);
    uint64_t first = (uint64_t)(((const int32_t *)blocks[core->rank].address) - own);
    for (uint64_t i = 0; i < blocks[core->rank].bytes / 4; i++)
        expect(out[i] == total(first + i, call), "part of a sum", core->rank, call);
}

/* Rank i gives n / (1 + (i + j) % 3) elements to rank j. */
static void all_to_all(struct core *core, int call, uint64_t n, int pooled, int32_t *own, int32_t *out) {
    struct deal deals[RANKS] = {0};
    struct pull pulls[RANKS] = {0};
    int32_t *tensor = pooled ? (int32_t *)pools[core->rank] : own;
    uint64_t sent = 0, got = 0;
    for (int peer = 0; peer < size; peer++) {
        uint64_t length = n / (1 + (uint64_t)(core->rank + peer) % 3);
        deals[peer] = (struct deal){sent * 4, length * 4, length * 4};
        if (peer != core->rank) pulls[peer] = (struct pull){0, length * 4, (char *)(out + got)};
        for (uint64_t i = 0; i < length; i++) tensor[sent + i] = value(core->rank, i, call + peer);
        sent += length, got += length;
    }
    struct part part = {(char *)tensor, sent * 4};
    struct call posted = {.kind = ALL_TO_ALL, .dtype = I32, .root = -1, .count = sent, .bytes = sent * 4, .place = pooled ? POOL : STAGE};
    int status = core_exchange(core, &posted, &part, 1, deals, pulls);
    expect(status == DONE, "status of all_to_all", core->rank, call);
    for (int peer = 0; peer < size; peer++)
        for (uint64_t i = 0; i < pulls[peer].bytes / 4; i++)
            expect(((int32_t *)pulls[peer].into)[i] == value(peer, i, call + core->rank), "piece", core->rank, call);
}

static void broadcast(struct core *core, int call, uint64_t n, int root, int pooled, int32_t *own) {
    struct pull pulls[RANKS] = {0};
    int32_t *tensor = pooled ? (int32_t *)pools[core->rank] : own;
    struct part part = {(char *)tensor, n * 4};
    int gives = core->rank == root;
    if (gives) fill(tensor, n, root, call);
    else pulls[root] = (struct pull){0, n * 4, (char *)tensor};
    struct call posted = {.kind = BROADCAST, .root = root, .count = n, .bytes = gives ? n * 4 : 0, .place = pooled ? POOL : STAGE};
    expect(core_exchange(core, &posted, &part, gives, NULL, pulls) == DONE, "status of broadcast", core->rank, call);
    for (uint64_t i = 0; i < n; i++) expect(tensor[i] == value(root, i, call), "copy", core->rank, call);
}

/* Every rank sends n elements to the next one while it receives as many from the one before. */
static void messages(struct core *core, int call, uint64_t n, int32_t *own, int32_t *out) {
    int to = (core->rank + 1) % size, from = (core->rank + size - 1) % size;
    uint64_t sent = 0, got = 0;
    fill(own, n, core->rank, call);
    while (sent < n * 4 || got < n * 4) {
        uint32_t seen = core_bell(core);
        uint64_t before = sent + got;
        if (sent < n * 4) sent += core_channel_write(core, to, "", 0, (char *)own + sent, n * 4 - sent);
        if (got < n * 4) got += core_channel_read(core, from, (char *)out + got, n * 4 - got);
        if (sent + got == before) core_bell_wait(core, seen, 50000000);
    }
    for (uint64_t i = 0; i < n; i++) expect(out[i] == value(from, i, call), "message", core->rank, call);
}

/* The same, a header before the elements, for who takes a message when all of it has come. It is written in pieces, so
 * that who looks too early finds some of it. */
static void letters(struct core *core, int call, uint64_t n, int32_t *own, int32_t *out) {
    int to = (core->rank + 1) % size, from = (core->rank + size - 1) % size, taken = 0;
    char header[8] = "to you", wrong[8] = "to him";
    uint64_t sent = 0, whole = sizeof header + n * 4;
    fill(own, n, core->rank, call);
    while (sent < whole || !taken) {
        uint32_t seen = core_bell(core);
        uint64_t head = sent < sizeof header ? sizeof header - sent : 0, body = sent + head - sizeof header;
        uint64_t piece = (n * 4 - body + 1) / 2;
        uint64_t went = sent < whole ? core_channel_write(core, to, header + sizeof header - head, head, (char *)own + body, piece) : 0;
        sent += went;
        expect(!core_channel_take(core, from, wrong, sizeof wrong, (char *)out, n * 4), "header", core->rank, call);
        int before = taken;
        if (!taken) taken = core_channel_take(core, from, header, sizeof header, (char *)out, n * 4);
        if (went == 0 && taken == before) core_bell_wait(core, seen, 50000000);
    }
    for (uint64_t i = 0; i < n; i++) expect(out[i] == value(from, i, call), "letter", core->rank, call);
}

/* One rank calls with another count: every rank has to see it, and all go on. */
static void mistake(struct core *core, int call, uint64_t n, int who, int32_t *own) {
    uint64_t count = core->rank == who ? n + 1 : n;
    fill(own, count, core->rank, call);
    int status = core_all_reduce(core, I32 + 256 * SUM, -1, count, (char *)own);
    expect(status == MISMATCH, "status of a mismatch", core->rank, call);
}

/* Split-phase calls of this rank, by where their messages lie; n: 0 where nothing is looked for any more. sums: the
 * message of an all-reduce, or NULL. */
struct begun {
    uint64_t number, n;
    int call;
    int32_t *sums, out[BLOCK], own[BLOCK];
    struct part parts[2];
};

static void see(struct core *core, struct begun *begun) {
    for (uint64_t i = 0; begun->sums != NULL && i < begun->n; i++)
        expect(begun->sums[i] == total(i, begun->call), "sum of a message", core->rank, begun->call);
    for (uint64_t i = 0; begun->sums == NULL && i < begun->n; i++)
        expect(begun->out[i] == total((uint64_t)core->rank * begun->n + i, begun->call), "sum of a block", core->rank, begun->call);
    begun->n = 0;
}

static void see_what_has_ended(struct core *core, struct begun *places) {
    uint64_t first = core->n_under_way ? core->under_way[0].number : UINT64_MAX;
    for (int place = 0; place < CALLS; place++)
        if (places[place].number < first) see(core, &places[place]);
}

/* Messages lie where nobody reads any more; as many places as calls that peers may look at are enough, for who ends the
 * oldest call first. */
static struct begun *free_place(struct core *core, int call, struct begun *places, uint64_t *offset) {
    int place = 0;
    see_what_has_ended(core, places);
    while (place < CALLS && !core_is_read(core, places[place].number)) place++;
    expect(place < CALLS, "reading: all places are", core->rank, call);
    see(core, &places[place]);
    *offset = BESIDE + (uint64_t)place * BLOCK * RANKS / 2 * 4;
    return &places[place];
}

/* Every other time the rank's own block is not in the message, but in two parts elsewhere. */
static int own_parts(struct core *core, int call, uint64_t n, char *message, struct begun *begun) {
    if (call % 2 || n == 0) return 0;
    uint64_t first = n * (uint64_t)(call % 5) / 5 * 4;
    char *own = message + (uint64_t)core->rank * n * 4;
    memcpy(begun->own, own, n * 4);
    memset(own, 0x55, n * 4);
    begun->parts[0] = (struct part){(char *)begun->own, first};
    begun->parts[1] = (struct part){(char *)begun->own + first, n * 4 - first};
    return 2;
}

static struct begun *begin_scatter(struct core *core, int call, uint64_t n, uint64_t extra, struct begun *places) {
    if (core->n_under_way == UNDER_WAY || (core->n_under_way > 0 && core->under_way[0].out == NULL))
        expect(core_end(core, core->under_way[0].number) == DONE, "status of the end", core->rank, call);
    uint64_t count = n * (uint64_t)size, offset;
    struct begun *begun = free_place(core, call, places, &offset);
    fill((int32_t *)(pools[core->rank] + offset), count, core->rank, call);
    struct call posted = {.kind = BEGUN_REDUCE_SCATTER, .dtype = I32, .op = SUM, .root = -1, .count = count + extra,
                          .bytes = count * 4, .pool = offset};
    int n_own = own_parts(core, call, n, pools[core->rank] + offset, begun);
    int status = core_begin_reduce_scatter(core, &posted, (char *)begun->out, begun->parts, n_own);
    expect(status == DONE, "begin", core->rank, call);
    begun->number = posted.number, begun->n = extra ? 0 : n, begun->call = call, begun->sums = NULL;
    return begun;
}

static struct begun *begin_all_reduce(struct core *core, int call, uint64_t n, uint64_t extra, struct begun *places) {
    if (core->n_under_way == UNDER_WAY || (core->n_under_way > 0 && core->under_way[0].out != NULL))
        expect(end_all(core) == DONE, "status of the end", core->rank, call);
    uint64_t count = n * (uint64_t)size / 2 + 1, offset;
    struct begun *begun = free_place(core, call, places, &offset);
    begun->sums = (int32_t *)(pools[core->rank] + offset);
    fill(begun->sums, count, core->rank, call);
    struct call posted = {.kind = BEGUN_ALL_REDUCE, .dtype = I32, .op = SUM, .root = -1, .count = count + extra,
                          .bytes = count * 4, .pool = offset};
    expect(core_begin_all_reduce(core, &posted) == DONE, "begin", core->rank, call);
    begun->number = posted.number, begun->n = extra ? 0 : count, begun->call = call;
    return begun;
}

typedef struct begun *begin_function(struct core *core, int call, uint64_t n, uint64_t extra, struct begun *places);

static void mistake_in_split_phase(begin_function *begins, struct core *core, int call, uint64_t n, int who,
                                   struct begun *places) {
    expect(end_all(core) == DONE, "status of the end", core->rank, call);
    see_what_has_ended(core, places);
    struct begun *begun = begins(core, call, n, core->rank == who, places);
    begun->n = 0;
    expect(core_end(core, begun->number) == MISMATCH, "status of a mismatch", core->rank, call);
}

/* Ends all-reduces while another rank begins one more: both are told. */
static void early_end(struct core *core, int call, uint64_t n, int who, struct begun *places) {
    expect(end_all(core) == DONE, "status of the end", core->rank, call);
    struct begun *first = begin_all_reduce(core, call, n, 0, places), *more = NULL;
    if (core->rank == who) more = begin_all_reduce(core, call, n, 0, places);
    first->n = 0; /* whoever ended early may have summed a part */
    if (more) more->n = 0;
    int status = end_all(core);
    expect(status == MISMATCH, "status of an early end", core->rank, call);
}

static void *run(void *argument) {
    int rank = (int)(intptr_t)argument;
    uint64_t shared = seed, private = seed + (uint64_t)rank + 1;
    int32_t *own = malloc(4 * (MOST + 1) * RANKS), *out = malloc(4 * MOST * RANKS);
    struct core *core = core_open(segment, rank, size, SLOT, STAGED, CHANNEL, spin, spin, patient, NULL);
    for (int peer = 0; peer < size; peer++) core_set_pool(core, peer, pools[peer], 4096 * 64);
    core->help_from = (seed + (uint64_t)rank) % 3 ? 0 : UINT64_MAX; /* ranks need not agree */
    core->share_bytes = 2 * LINE;
    struct begun *places = calloc(CALLS, sizeof *places);
    for (int call = 0; call < calls; call++) {
        uint64_t kind = next(&shared) % 16, n = next(&shared) % 3 ? next(&shared) % 60 : next(&shared) % MOST;
        int root = (int)(next(&shared) % (uint64_t)size), pooling = (int)(next(&shared) % 3);
        int pooled = pooling == 2 ? (int)(next(&private) % 2) : pooling; /* no rank, all ranks, some ranks */
        if (next(&private) % 4 == 0) usleep((useconds_t)(next(&private) % 200));
        if (kind < 2) all_reduce(core, call, n, -1, pooled, own);
        else if (kind == 2) all_reduce(core, call, n, root, pooled, own);
        else if (kind == 3) reduce_scatter(core, call, n, own, out);
        else if (kind == 4) all_to_all(core, call, n, pooled, own, out);
        else if (kind == 5) broadcast(core, call, n, root, pooled, own);
        else if (kind == 6 && n % 2) messages(core, call, n, own, out);
        else if (kind == 6) letters(core, call, n % (CHANNEL / 4 - 1), own, out);
        else if (kind == 7) mistake(core, call, n, root, own);
        else if (kind == 8 && next(&shared) % 4 == 0) mistake_in_split_phase(begin_scatter, core, call, 1 + n % BLOCK, root, places);
        else if (kind == 12 && next(&shared) % 4 == 0) mistake_in_split_phase(begin_all_reduce, core, call, 1 + n % BLOCK, root, places);
        else if (kind == 13 && next(&shared) % 4 == 0 && size > 1) early_end(core, call, 1 + n % BLOCK, root, places);
        else if (kind < 12) begin_scatter(core, call, 1 + n % BLOCK, 0, places);
        else begin_all_reduce(core, call, 1 + n % BLOCK, 0, places);
        int together = next(&shared) % 4 == 0, reduces = core->n_under_way > 0 && core->under_way[0].out == NULL;
        if (reduces ? together : next(&private) % 4 == 0) { /* all-reduces are ended by all ranks alike */
            uint64_t number = reduces ? core->number : places[next(&private) % CALLS].number;
            expect(core_end(core, number) == DONE, "status of the end", core->rank, call);
        }
        see_what_has_ended(core, places);
    }
    expect(end_all(core) == DONE, "status of the end", core->rank, calls);
    see_what_has_ended(core, places);
    core_leave(core);
    core_close(core);
    free(own), free(out), free(places);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    size = atoi(argv[1]), calls = atoi(argv[2]), seed = strtoull(argv[3], NULL, 10), spin = strtoull(argv[4], NULL, 10);
    uint64_t bytes = core_segment_bytes(size, SLOT, STAGED, CHANNEL);
    segment = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    memset(segment, 0, bytes);
    for (int rank = 0; rank < size; rank++) pools[rank] = aligned_alloc(4096, 4096 * 64);
    pthread_t threads[RANKS];
    for (int rank = 0; rank < size; rank++) pthread_create(&threads[rank], NULL, run, (void *)(intptr_t)rank);
    for (int rank = 0; rank < size; rank++) pthread_join(threads[rank], NULL);
    printf("%d ranks, %d calls, seed %llu: right\n", size, calls, (unsigned long long)seed);
    return 0;
}

/* Random exchanges between two ends of a connection, both in this process, so that ThreadSanitizer sees every access.
 *
 * stress_duplex EXCHANGES SEED: both ends draw the same exchanges from the seed, and each some delays of its own; some
 * of their calls differ. Exits with 1 at a wrong value or status. */
#define _GNU_SOURCE
#include "core.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST 400000 /* elements of an exchange: more than the kernel holds, and several pieces */
#define AT_ONCE 8

static uint64_t exchanges, seed;

static uint64_t next(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = (*state ^ (*state >> 30)) * 0xbf58476d1ce4e5b9u;
    return z ^ (z >> 27);
}

static int32_t value(int end, uint64_t i, uint64_t number) {
    return (int32_t)(i * 31 + (uint64_t)end * 1000003 + number);
}

struct under_way {
    struct exchange exchange;
    int32_t *out, *into;
    uint64_t number, n;
    int unlike;
};

static void expect(int right, const char *what, int end, uint64_t number) {
    if (right) return;
    fprintf(stderr, "end %d, exchange %lu: wrong %s\n", end, (unsigned long)number, what);
    exit(1);
}

static void end_of(struct duplex *duplex, struct under_way *it, int end) {
    int status;
    do status = duplex_wait(duplex, &it->exchange, 0.01);
    while (status == GAVE_UP);
    expect(status == (it->unlike ? MISMATCH : DONE), "status", end, it->number);
    int reduces = it->exchange.own != NULL;
    for (uint64_t i = 0; i < it->n && !it->unlike; i++) {
        uint32_t own = (uint32_t)value(end, i, it->number), theirs = (uint32_t)value(1 - end, i, it->number);
        expect((uint32_t)it->into[i] == (reduces ? own + theirs : theirs), "value", end, it->number);
    }
    if (it->into != it->out) free(it->into);
    free(it->out);
    it->n = 0;
}

struct side {
    int end, socket;
};

static void *play(void *side) {
    int end = ((struct side *)side)->end;
    struct duplex *duplex = duplex_open(((struct side *)side)->socket, end == 0);
    uint64_t draws = seed, own = seed + 1 + (uint64_t)end;
    struct under_way ring[AT_ONCE] = {0};
    for (uint64_t number = 0; number < exchanges; number++) {
        uint64_t draw = next(&draws), n = (draw >> 8) % (draw & 1 ? MOST : 100), kind = (draw >> 40) % 3;
        struct under_way *it = &ring[number % AT_ONCE];
        if (it->out != NULL) end_of(duplex, it, end);
        it->number = number, it->n = n, it->unlike = (draw >> 50) % 8 == 0;
        it->out = malloc(4 * n + 4);
        it->into = kind == 0 ? it->out : malloc(4 * n + 4);
        for (uint64_t i = 0; i < n; i++) it->out[i] = value(end, i, number);
        it->exchange = (struct exchange){.out = (char *)it->out, .into = (char *)it->into};
        it->exchange.own = kind < 2 ? (char *)it->out : NULL;
        it->exchange.call = (struct call){.bytes = 4 * n, .count = n, .kind = ALL_REDUCE, .dtype = I32, .op = SUM};
        it->exchange.call.extra = it->unlike ? (uint64_t)end : 0;
        duplex_begin(duplex, &it->exchange);
        if (next(&own) % 4 == 0) usleep(next(&own) % 2000);
        if (next(&own) % 4 == 0) sched_yield();
    }
    for (uint64_t number = exchanges; number < exchanges + AT_ONCE; number++)
        if (ring[number % AT_ONCE].out != NULL) end_of(duplex, &ring[number % AT_ONCE], end);
    if (end == 0) duplex_close(duplex);
    struct exchange late = {.call = {.bytes = 4}, .out = "end", .into = (char *)&draws};
    if (end == 1) { /* the other has closed */
        duplex_begin(duplex, &late);
        expect(duplex_wait(duplex, &late, 60) == ABORTED, "end", end, exchanges);
        duplex_close(duplex);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    exchanges = (uint64_t)atoi(argv[1]), seed = (uint64_t)atoi(argv[2]);
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) return 2;
    int little = 4096; /* what the kernel holds for one end, which still sends when all of the other's has come */
    if (setsockopt(sockets[0], SOL_SOCKET, SO_SNDBUF, &little, sizeof little) != 0) return 2;
    pthread_t threads[2];
    struct side sides[2] = {{0, sockets[0]}, {1, sockets[1]}};
    for (int end = 0; end < 2; end++) pthread_create(&threads[end], NULL, play, &sides[end]);
    for (int end = 0; end < 2; end++) pthread_join(threads[end], NULL);
    return 0;
}

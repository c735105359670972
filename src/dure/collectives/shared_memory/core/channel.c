/* Messages between two ranks: a ring of bytes for each ordered pair. Nothing here waits but core_bell_wait. */
#include "core.h"

#include <sched.h>
#include <string.h>

static struct channel *channel_of(struct core *core, int from, int to) {
    uint64_t index = (uint64_t)from * (uint64_t)core->size + (uint64_t)to;
    return (struct channel *)(core->channels + index * (sizeof(struct channel) + core->channel_bytes));
}

/* Bytes [at, at + n) of the ring, from or to plain memory. */
static void fill_ring(char *ring, uint64_t capacity, uint64_t at, const char *from, uint64_t n) {
    if (n == 0) return;
    /* Up to the end of the ring, and what is left from its beginning on. */
    uint64_t first = least(n, capacity - at % capacity);
    memcpy(ring + at % capacity, from, first);
    memcpy(ring, from + first, n - first);
}

/* And back: bytes [at, at + n) of the ring into plain memory. */
static void empty_ring(const char *ring, uint64_t capacity, uint64_t at, char *into, uint64_t n) {
    if (n == 0) return;
    uint64_t first = least(n, capacity - at % capacity);
    memcpy(into, ring + at % capacity, first);
    memcpy(into + first, ring, n - first);
}

/* Writes what there is room for of a header and then a body, and rings once. Returns the bytes that went. */
uint64_t core_channel_write(struct core *core, int to, const char *header, uint64_t header_bytes, const char *body,
                            uint64_t body_bytes) {
    struct channel *channel = channel_of(core, core->rank, to);
    /* Nobody else writes head. The acquire of tail: what is written comes after the consumer has read there. */
    uint64_t head = atomic_load_explicit(&channel->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&channel->tail, memory_order_acquire);
    uint64_t room = core->channel_bytes - (head - tail);
    uint64_t first = least(header_bytes, room), second = least(body_bytes, room - first);
    if (first + second == 0) return 0;
    char *ring = (char *)(channel + 1);
    fill_ring(ring, core->channel_bytes, head, header, first);
    fill_ring(ring, core->channel_bytes, head + first, body, second);
    atomic_store_explicit(&channel->head, head + first + second, memory_order_release);
    core_ring(core, to);
    return first + second;
}

uint64_t core_channel_read(struct core *core, int from, char *into, uint64_t bytes) {
    struct channel *channel = channel_of(core, from, core->rank);
    uint64_t tail = atomic_load_explicit(&channel->tail, memory_order_relaxed);
    uint64_t ready = atomic_load_explicit(&channel->head, memory_order_acquire) - tail;
    uint64_t moved = least(bytes, ready);
    if (moved == 0) return 0;
    empty_ring((const char *)(channel + 1), core->channel_bytes, tail, into, moved);
    atomic_store_explicit(&channel->tail, tail + moved, memory_order_release);
    core_ring(core, from); /* there is room: the sender may wait for it */
    return moved;
}

/* Reads a body if all of it has come, after just this header, and else nothing. Returns whether it did. */
int core_channel_take(struct core *core, int from, const char *header, uint64_t header_bytes, char *into,
                      uint64_t bytes) {
    struct channel *channel = channel_of(core, from, core->rank);
    uint64_t tail = atomic_load_explicit(&channel->tail, memory_order_relaxed);
    uint64_t ready = atomic_load_explicit(&channel->head, memory_order_acquire) - tail;
    const char *ring = (const char *)(channel + 1);
    if (ready < header_bytes + bytes) return 0;
    /* Byte by byte, since a header may go on at the beginning of the ring; it has 24 of them. */
    for (uint64_t i = 0; i < header_bytes; i++)
        if (ring[(tail + i) % core->channel_bytes] != header[i]) return 0;
    empty_ring(ring, core->channel_bytes, tail + header_bytes, into, bytes);
    atomic_store_explicit(&channel->tail, tail + header_bytes + bytes, memory_order_release);
    core_ring(core, from);
    return 1;
}

uint32_t core_bell(struct core *core) { return atomic_load(&core->seats[core->rank].bell); }

void core_ring(struct core *core, int rank) {
    struct seat *seat = &core->seats[rank];
    atomic_fetch_add(&seat->bell, 1);
    if (atomic_load(&seat->waiting)) futex_wake_all(&seat->bell);
}

/* Returns when the bell is no longer what was seen, after `nanoseconds`, or at a signal (then 1). */
int core_bell_wait(struct core *core, uint32_t seen, uint64_t nanoseconds) {
    struct seat *seat = &core->seats[core->rank];
    uint64_t start = now_ns();
    while (now_ns() - start < core->spin_ns)
        for (int i = 0; i < 16; i++) {
            if (atomic_load(&seat->bell) != seen) return 0;
            relax();
        }
    start = now_ns();
    while (now_ns() - start < core->yield_ns) {
        if (atomic_load(&seat->bell) != seen) return 0;
        sched_yield();
    }
    /* As with sleepers (core.h, 2): first waiting, then a look at the bell; core_ring does it the other way round. */
    atomic_fetch_add(&seat->waiting, 1);
    int interrupted = 0;
    if (atomic_load(&seat->bell) == seen) interrupted = futex_wait(&seat->bell, seen, nanoseconds);
    atomic_fetch_sub(&seat->waiting, 1);
    return interrupted;
}

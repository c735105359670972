/* Collectives of the ranks of one host over shared memory: the layout of the segment, and what the core offers.
 *
 * Depends on C11, POSIX threads, and Linux's futex and sockets only: no Python, no torch, plain pointers.
 *
 * MEMORY ORDER, and why it suffices
 *
 * Ranks share plain data: calls (what a rank asks for), slots, stages and results (its tensors), pools (tensors
 * that live in shared memory). Every plain byte has one writer at a time, and a reader reads it only after an
 * atomic has told it that the writer is done. There are three such atomics.
 *
 * 1. seat.arrived, written by its own rank only, counts the rank's synchronisations. `core_sync` of rank r stores
 *    arrived_r = s and returns when it has loaded arrived_i >= s for every i. Store and load are sequentially
 *    consistent, hence release and acquire: all that rank i wrote before its sync s happens before all that rank r
 *    does after its own. This is the only order that collectives need; it holds on x86, where the store is an
 *    XCHG, and on ARM, where store and load are STLR and LDAR.
 *
 *    What is written again must no longer be read. Let a rank write a place before its sync s, and peers read it
 *    after s. The writer may write that place again after sync s+1 at the earliest: a peer arrives at s+1 only
 *    when it has read. So two copies of each place, used in turn, need one sync a turn, and this is what every
 *    collective does: slots and calls alternate with the number of the call (each call has at least one sync);
 *    stages and results alternate with the number of the window.
 *
 * 2. A sleeper must not miss the last arrival. The sleeper S: sleepers++ ; d = bell ; scan arrived ; if somebody
 *    is missing, futex_wait(bell, d). The arriver A: arrived_A = s ; scan ; if all have arrived and sleepers > 0,
 *    bell++ and futex_wake. All of these are sequentially consistent, so they have one total order. Take the last
 *    store to any arrived: its rank's scan sees all arrived. If S's scan missed that store, the scan, and with it
 *    S's sleepers++, comes before it in the order, so the arriver sees sleepers > 0 and rings. If the ring comes
 *    before S's futex_wait, the kernel sees bell != d and returns at once; if after, it wakes S.
 *
 * 3. A channel (messages from one rank to another) has one producer, who owns head, and one consumer, who owns
 *    tail. The producer copies bytes, then stores head (release); the consumer loads head (acquire) before it
 *    copies them out, then stores tail (release), which the producer loads (acquire) before it writes there again.
 *    Sleeping uses seat.bell and seat.waiting as in 2.
 *
 * 4. seat.taken deals out a rank's part of a sum over pools, a counter for each call that peers may still look at. Its
 *    owner sets it to 0 before the first sync of a call; between that and the last, fetch_add gives every range to one
 *    rank, which is then the only one to read or write it; after the last sync nobody adds, or where ranks called
 *    differently nobody ever did. Hence its owner may set it again when the call's place is taken by another.
 *
 * 5. A split-phase call (split_phase.c) has one sync, at which a rank arrives when it begins the call and waits when it
 *    ends it. Its message lies in a pool; peers read it until they have ended the call, which seat.read tells its
 *    owner (release, acquire) before it writes there again. Posted calls stay long enough: a rank that begins call j
 *    has ended call j - UNDER_WAY, so its peers have begun that one, and ended call j - 2 * UNDER_WAY = j - CALLS,
 *    whose place it takes. Every other kind of call ends those that are under way before it begins, so that 1 holds.
 *    All-reduces that were begun are ended together by one call more, END_OF_ALL_REDUCES, whose sync tells that all
 *    sums are written. It has waited for the last of them to be begun by all, so its peers have ended the calls
 *    before the first of them, and CALLS places are enough for it as well.
 *
 * No standalone fences are used, so that ThreadSanitizer sees all of it.
 */
#ifndef DURE_CORE_H
#define DURE_CORE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of a cache line. What different ranks write lies on lines of its own, so that they do not take lines away
 * from each other. */
#define LINE 64
#define REASON_BYTES 4096

enum status { DONE = 0, MISMATCH = 1, ABORTED = 2, GAVE_UP = 3, BAD_SIZES = 4, UNFINISHED = 5 };

/* Kinds of calls; the Python side has the same numbers (calls.py). The order matters: up to BROADCAST, and from
 * BEGUN_REDUCE_SCATTER on, all ranks have the same count (`fingerprint` in calls.c). */
enum kind {
    ALL_REDUCE = 1, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, GATHER, SCATTER, ALL_TO_ALL, BARRIER,
    BEGUN_REDUCE_SCATTER, BEGUN_ALL_REDUCE, END_OF_ALL_REDUCES
};

#define UNDER_WAY 4         /* calls that a rank has begun and not ended */
#define CALLS (2 * UNDER_WAY) /* of a rank that its peers may still look at */

enum dtype { U8 = 0, I8, I16, I32, I64, F32, F64, F16, BF16, BOOL, DTYPES };

enum op { SUM = 0, PRODUCT, MIN, MAX, BAND, BOR, BXOR, AVG, OPS };

/* Where peers find the input of a call. */
enum place { SLOT = 0, STAGE, POOL };

/* What a rank asks for: 64 bytes, so that it travels in one cache line. */
struct call {
    uint64_t number;
    uint64_t bytes;     /* of this rank's input */
    uint64_t count;     /* elements, as the caller counts them */
    uint64_t extra;     /* a hash of whatever else must agree, as a list of sizes */
    uint64_t pool;      /* offset in the rank's pool, where place is POOL */
    uint32_t kind;
    uint16_t dtype, op; /* dtype: any number that agrees; reductions need enum dtype */
    int32_t root;
    uint32_t place;
    uint64_t begun_at;  /* in nanoseconds of the monotonic clock; of split-phase all-reduces */
};

/* What a rank offers to a peer: a range of bytes of its input; and how many bytes it wants of that peer. */
struct deal {
    uint64_t offset, bytes, wanted;
};

struct seat {
    _Alignas(LINE) _Atomic uint64_t arrived;
    uint64_t fingerprint[CALLS];  /* of each of `calls`: ranks compare one number instead of a struct */
    _Atomic uint64_t finished;    /* the number of the last call that this rank has finished */
    _Atomic uint64_t begun;       /* the number of the last call that it has begun */
    _Atomic uint32_t left;        /* 1 when the rank has left the group */
    _Atomic uint64_t read;        /* the number of the last split-phase call that it has ended */
    _Alignas(LINE) struct call calls[CALLS];
    _Alignas(LINE) _Atomic uint64_t taken[CALLS]; /* elements of the rank's part of a sum that somebody has taken on */
    _Alignas(LINE) _Atomic uint32_t bell; /* rung when a channel from or to this rank has moved */
    _Atomic uint32_t waiting;             /* threads of this rank that sleep for the bell */
};

struct header {
    uint64_t magic, size, slot_bytes, stage_bytes, channel_bytes;
    _Alignas(LINE) _Atomic uint32_t bell;
    _Alignas(LINE) _Atomic uint32_t sleepers; /* ranks that sleep for it; if none do, no system call is made */
    _Alignas(LINE) _Atomic uint32_t aborting; /* 1: somebody writes the reason */
    _Atomic uint32_t aborted;                 /* 1: the reason is written */
    char reason[REASON_BYTES];
};

/* A ring of `channel_bytes` bytes lies right after it. The counts only grow, and 64 bits never overflow: full
 * (head - tail == channel_bytes) and empty (head == tail) differ. */
struct channel {
    _Alignas(LINE) _Atomic uint64_t head; /* bytes written, ever */
    _Alignas(LINE) _Atomic uint64_t tail; /* bytes read, ever */
};

/* Called now and then while waiting, with the seconds waited; 0: give up. */
typedef int (*tick_function)(double waited);

/* What lets a waiting thread run the signal handlers of its Python interpreter, by the addresses of the functions of
 * these names; NULL where there is no Python. An error that a handler raised is left here. */
struct interpreter {
    int (*PyGILState_Ensure)(void);
    int (*PyErr_CheckSignals)(void);
    void (*PyErr_Fetch)(void **type, void **value, void **traceback);
    void (*PyGILState_Release)(int);
    void *kind, *value, *traceback;
    int goes_on; /* the answer of `tick`: what it returns is undefined when a handler raises in it */
};

struct part { /* of an input: a range of private memory */
    const char *address;
    uint64_t bytes;
};

/* A call that is begun and not ended: its number, the sync at which all have begun it, where the result goes; NULL is
 * where the message lies, the result of an all-reduce. own: where this rank's own block of a reduce-scatter lies, in
 * parts; none where it lies in the message. */
struct split {
    uint64_t number, sync;
    char *out;
    const struct part *own;
    int n_own;
};

/* One rank's private view of the segment. */
struct core {
    struct header *header;
    struct seat *seats;
    struct deal *deals;            /* [rank][parity][peer] */
    char *slots, *stages, *channels;
    char **pools;                  /* where each rank's pool is mapped here, or NULL */
    uint64_t pool_bytes;           /* of this rank's own */
    int rank, size;
    uint64_t slot_bytes, stage_bytes, channel_bytes;
    uint64_t help_from;   /* bytes of all tensors of a sum over pools from which on ranks help each other */
    uint64_t share_bytes; /* of a tensor that are taken on at once then */
    uint64_t syncs, number, windows; /* arrived at, begun, staged: how many, ever */
    uint64_t at, awaited;            /* the call that is worked on, the sync that is waited for */
    struct split under_way[UNDER_WAY];
    int n_under_way;
    double left_ns; /* what this rank has left to others of the all-reduces that are under way */
    uint64_t spin_ns, yield_ns;
    tick_function tick;
    struct interpreter *interpreter;
};

struct pull { /* what this rank reads of a peer's input */
    uint64_t offset, bytes;
    char *into;
};

/* What two hosts give each other in one go (duplex.c); made by the caller, who may read `status` and what follows it when
 * it is over. */
struct exchange {
    struct call call;
    const char *out, *own;
    char *into;
    struct exchange *next;
    uint64_t sent; /* bytes, of the call and what `out` points to */
    uint64_t status;
    struct call theirs;
    double ended; /* in seconds of the monotonic clock */
};

#define PUBLIC __attribute__((visibility("default")))

/* life.c */
PUBLIC uint64_t core_segment_bytes(int size, uint64_t slot_bytes, uint64_t stage_bytes, uint64_t channel_bytes);
PUBLIC struct core *core_open(void *segment, int rank, int size, uint64_t slot_bytes, uint64_t stage_bytes,
                              uint64_t channel_bytes, uint64_t spin_ns, uint64_t yield_ns, tick_function tick,
                              struct interpreter *interpreter);
PUBLIC void core_set_pool(struct core *core, int rank, void *base, uint64_t bytes);
PUBLIC void core_close(struct core *core);
PUBLIC void core_leave(struct core *core);
PUBLIC int core_abort(struct core *core, const char *reason);
PUBLIC const char *core_aborted(struct core *core);
PUBLIC uint64_t core_look(struct core *core, int rank, int what);
PUBLIC void core_last_call(struct core *core, int rank, struct call *call);
PUBLIC void core_this_call(struct core *core, int rank, struct call *call);
PUBLIC void core_deal(struct core *core, int rank, int peer, struct deal *deal);
PUBLIC const char *core_instructions(void);

/* sync.c: a sync is to arrive and to wait for all. */
int core_sync(struct core *core);
int arrive(struct core *core);
int wait_for_all(struct core *core, uint64_t sync);
int all_have_arrived(const struct core *core, uint64_t sync);
void futex_wake_all(_Atomic uint32_t *word);
int futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t nanoseconds);
uint64_t now_ns(void);
void relax(void);

/* kernels.c: dsts[0..nd) = op over srcs[0..ns), in this order; a dst may be a src. */
PUBLIC void core_reduce(char *const *dsts, int nd, const char *const *srcs, int ns, uint64_t count, int dtype, int op);
uint64_t core_width(int dtype);

/* calls.c */
void begin(struct core *core, struct call *call);
int agreed(struct core *core);
int finish(struct core *core, int status);
char *slot_of(struct core *core, int rank);
char *stage_of(struct core *core, int rank, uint64_t window);

/* split_phase.c: what other calls begin with. Ends the calls that are under way. */
int end_all(struct core *core);

/* summing.c: elements that are dealt out among ranks. */
struct range {
    uint64_t from, to;
};

uint64_t least(uint64_t a, uint64_t b);
struct range part_of(uint64_t n, uint64_t width, int rank, int size);
char *result_of(struct core *core, int rank, uint64_t window);
int wants(const struct core *core, const struct call *call);

/* summing.c, of the call core->at, once all have arrived. `ranks_in_pools`: how many ranks have their tensors in a
 * pool; the others are for calls where all have. `sum_share`, `sum_share_of`: takes on a share of `owner`'s part, and
 * sums it; returns its elements, 0 if others have taken on all. `left_of`: what nobody has taken on. `sum_all_parts`:
 * takes on all of what is left of all parts. */
int ranks_in_pools(struct core *core);
uint64_t sum_share(struct core *core, const struct call *call, int owner, uint64_t share);
uint64_t sum_share_of(struct core *core, const struct call *call, int owner);
uint64_t left_of(const struct core *core, const struct call *call, int owner);
void sum_all_parts(struct core *core, const struct call *call);

/* reducing.c, copying.c: collectives. Each returns an enum status. */
PUBLIC int core_all_reduce(struct core *core, int code, int root, uint64_t count, char *tensor);
PUBLIC int core_reduce_scatter(struct core *core, struct call *call, const struct part *blocks, char *out);
PUBLIC int core_exchange(struct core *core, struct call *call, const struct part *parts, int n_parts,
                         const struct deal *deals, const struct pull *pulls);

/* split_phase.c: reduce-scatters and all-reduces that are begun, and ended later. */
PUBLIC int core_begin_reduce_scatter(struct core *core, struct call *call, char *out, const struct part *own, int n_own);
PUBLIC int core_begin_all_reduce(struct core *core, struct call *call);
PUBLIC int core_end(struct core *core, uint64_t number);
PUBLIC int core_is_read(struct core *core, uint64_t number);

/* channel.c: messages between two ranks; never wait. */
PUBLIC uint64_t core_channel_write(struct core *core, int to, const char *header, uint64_t header_bytes,
                                   const char *body, uint64_t body_bytes);
PUBLIC uint64_t core_channel_read(struct core *core, int from, char *into, uint64_t bytes);
PUBLIC int core_channel_take(struct core *core, int from, const char *header, uint64_t header_bytes, char *into,
                             uint64_t bytes);
PUBLIC uint32_t core_bell(struct core *core);
PUBLIC int core_bell_wait(struct core *core, uint32_t seen, uint64_t nanoseconds);
PUBLIC void core_ring(struct core *core, int rank);

/* duplex.c: exchanges of two hosts over a socket. */
struct duplex;
PUBLIC struct duplex *duplex_open(int socket, int first);
PUBLIC void duplex_begin(struct duplex *duplex, struct exchange *exchange);
PUBLIC int duplex_wait(struct duplex *duplex, struct exchange *exchange, double seconds);
PUBLIC void duplex_close(struct duplex *duplex);

#endif

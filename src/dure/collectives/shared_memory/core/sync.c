/* Waiting for all ranks: spin a little, give the core away a little, then sleep in the kernel. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TICK_MS 100 /* between two looks at the peers; host.py has the same (TICK) */

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Returns 1 when a signal came. The word is in memory shared by processes, so the futex is not private. */
int futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t nanoseconds) {
    struct timespec limit = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
    return syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0) == -1 && errno == EINTR;
}

void futex_wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

/* The first rank from `from` on that has not arrived at the awaited sync; `size` if all have. */
static int missing(const struct core *core, int from) {
    /* `arrived` never goes back, so a later scan may go on where an earlier one has stopped. */
    while (from < core->size && atomic_load(&core->seats[from].arrived) >= core->awaited) from++;
    return from;
}

int all_have_arrived(const struct core *core, uint64_t sync) {
    for (int rank = 0; rank < core->size; rank++)
        if (atomic_load(&core->seats[rank].arrived) < sync) return 0;
    return 1;
}

/* Whether a signal handler has raised an error. */
static int handler_raised(struct interpreter *python) {
    if (python == NULL) return 0;
    /* The call into C has given the GIL away. Handlers run on the main thread only; on any other this says 0. */
    int state = python->PyGILState_Ensure();
    int raised = python->PyErr_CheckSignals();
    if (raised) python->PyErr_Fetch(&python->kind, &python->value, &python->traceback);
    python->PyGILState_Release(state);
    return raised;
}

/* Asks `tick` whether to wait on. */
static int goes_on(struct core *core, double waited) {
    struct interpreter *python = core->interpreter;
    if (python == NULL) return core->tick(waited);
    python->goes_on = 0;
    core->tick(waited);
    return python->goes_on;
}

static int sleep_until_arrived(struct core *core) {
    struct header *header = core->header;
    uint64_t start = now_ns();
    int first = 0;
    for (;;) {
        /* The order matters (core.h, 2): whoever arrives after the scan sees the sleeper, and changes the bell that was
         * read before it. The same holds for `aborted`, after which the bell rings as well (life.c). */
        atomic_fetch_add(&header->sleepers, 1);
        uint32_t seen = atomic_load(&header->bell);
        first = missing(core, first);
        int interrupted = 0;
        if (first < core->size && !atomic_load(&header->aborted))
            interrupted = futex_wait(&header->bell, seen, TICK_MS * 1000000u);
        atomic_fetch_sub(&header->sleepers, 1);
        /* A sync at which all have arrived counts, even if the group has ended since: hence `aborted` comes second. */
        first = missing(core, first);
        if (first == core->size) return DONE;
        if (atomic_load(&header->aborted)) return ABORTED;
        uint64_t waited = now_ns() - start;
        /* Short waits never enter Python; a signal is looked at without delay. */
        if (!interrupted && waited < TICK_MS * 1000000u) continue;
        if (handler_raised(core->interpreter) || !goes_on(core, (double)waited * 1e-9)) return GAVE_UP;
    }
}

/* The last one to arrive wakes those that sleep. */
int arrive(struct core *core) {
    struct header *header = core->header;
    core->awaited = ++core->syncs;
    /* A rank that does not arrive holds up nobody: its peers look at `aborted` as well. */
    if (atomic_load(&header->aborted)) return ABORTED;
    atomic_store(&core->seats[core->rank].arrived, core->syncs);
    if (missing(core, 0) == core->size && atomic_load(&header->sleepers)) {
        atomic_fetch_add(&header->bell, 1);
        futex_wake_all(&header->bell);
    }
    return DONE;
}

int wait_for_all(struct core *core, uint64_t sync) {
    core->awaited = sync;
    int first = missing(core, 0);
    if (first == core->size) return DONE;
    uint64_t start = now_ns();
    /* Reading the clock takes longer than looking at a few flags, hence 16 looks for each reading. */
    while (now_ns() - start < core->spin_ns)
        for (int i = 0; i < 16; i++) {
            first = missing(core, first);
            if (first == core->size) return DONE;
            relax();
        }
    /* Where ranks share a core, the one that is missing may need this one to run at all. */
    start = now_ns();
    while (now_ns() - start < core->yield_ns) {
        first = missing(core, first);
        if (first == core->size) return DONE;
        sched_yield();
    }
    return sleep_until_arrived(core);
}

int core_sync(struct core *core) {
    int status = arrive(core);
    return status == DONE ? wait_for_all(core, core->syncs) : status;
}

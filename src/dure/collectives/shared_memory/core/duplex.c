/* A connection between two hosts of one rank each, on which both send at once.
 *
 * An exchange gives the peer some bytes and takes as many, which are copied, or reduced with bytes of this rank. Both
 * ends begin the same exchanges in the same order, as by a plan, and several may be under way. Each begins with the
 * call that a rank has made; if the peer's is another one, what follows it is thrown away, the exchange ends with
 * MISMATCH, and the next one goes on.
 *
 * Threads that wake for every packet would take their core from the one that computes. So whoever begins an exchange
 * sends what the kernel takes, while it is in the cache, and only the rest is left to a thread; and the one that
 * receives asks to be woken for a whole piece (SO_RCVLOWAT), which it reduces while that is in the cache.
 *
 * Sums are written where the own numbers leave from, once those have left. Both ends cannot wait for that at the same
 * time: if A has received a bytes and B b, A waits as long as it has sent less than a. B has received what A has sent,
 * so b < a; and if B waits too, a < b.
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PIECE (512u << 10) /* bytes: milliseconds of a fast link, and less than a second-level cache */

struct duplex {
    int socket;
    int first; /* this rank's numbers come first in a reduction */
    int broken;
    int awaited; /* bytes for which the kernel wakes the one that receives */
    pthread_mutex_t lock;
    pthread_cond_t begun, unsent, sent, ended;
    pthread_t sender, receiver;
    struct exchange *sending, *receiving, *newest; /* from `receiving` on they are linked; NULL: there is none */
    char *piece;
};

static uint64_t whole(const struct exchange *exchange) { return sizeof exchange->call + exchange->call.bytes; }

static double seconds_now(void) { return 1e-9 * (double)now_ns(); }

/* With the lock: the connection is of no use any more. */
static void break_off(struct duplex *duplex) {
    duplex->broken = 1;
    /* Whatever was sent in full is still on this list until it is received. */
    for (struct exchange *each = duplex->receiving; each != NULL; each = each->next) each->status = ABORTED;
    duplex->sending = duplex->receiving = duplex->newest = NULL;
    shutdown(duplex->socket, SHUT_RDWR); /* both threads return from poll, and so does the peer */
    pthread_cond_broadcast(&duplex->begun);
    pthread_cond_broadcast(&duplex->unsent);
    pthread_cond_broadcast(&duplex->sent);
    pthread_cond_broadcast(&duplex->ended);
}

static void stop(struct duplex *duplex) {
    pthread_mutex_lock(&duplex->lock);
    if (!duplex->broken) break_off(duplex);
    pthread_mutex_unlock(&duplex->lock);
}

/* Sending. */

/* As much as the kernel takes at once; it never waits, so that `sent` is always known to the byte. */
static ssize_t send_some(const struct duplex *duplex, const struct exchange *exchange) {
    uint64_t head = sizeof exchange->call, at = exchange->sent, rest = whole(exchange) - at;
    struct iovec parts[2];
    struct msghdr message = {.msg_iov = parts};
    if (at < head) {
        parts[message.msg_iovlen++] = (struct iovec){(char *)&exchange->call + at, head - at};
        rest -= head - at, at = head;
    }
    if (rest) parts[message.msg_iovlen++] = (struct iovec){(char *)exchange->out + (at - head), rest};
    ssize_t n;
    do n = sendmsg(duplex->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n < 0 && errno == EAGAIN ? 0 : n;
}

/* With the lock: n bytes more of the exchange have left, or, if that is negative, none ever will. */
static void note_sent(struct duplex *duplex, struct exchange *exchange, ssize_t n) {
    if (n < 0) {
        break_off(duplex);
        return;
    }
    exchange->sent += (uint64_t)n;
    if (exchange->sent == whole(exchange)) duplex->sending = exchange->next;
    pthread_cond_signal(&duplex->sent);
}

static void *send_the_rest(void *it) {
    struct duplex *duplex = it;
    pthread_mutex_lock(&duplex->lock);
    while (!duplex->broken) {
        /* It stays valid without the lock: only note_sent moves `sending` on, and the receiver does not end an exchange
         * that has not left. */
        struct exchange *exchange = duplex->sending;
        if (exchange == NULL) {
            pthread_cond_wait(&duplex->unsent, &duplex->lock);
            continue;
        }
        pthread_mutex_unlock(&duplex->lock);
        struct pollfd room = {duplex->socket, POLLOUT, 0};
        poll(&room, 1, -1);
        ssize_t n = send_some(duplex, exchange);
        pthread_mutex_lock(&duplex->lock);
        if (!duplex->broken) note_sent(duplex, exchange, n);
    }
    pthread_mutex_unlock(&duplex->lock);
    return NULL;
}

/* Receiving. */

/* Returns 0 if the connection has ended. */
static int take(struct duplex *duplex, void *into, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes;) {
        int awaited = (int)(bytes - at < PIECE ? bytes - at : PIECE);
        /* A system call less where the number is the same as last time. */
        if (awaited != duplex->awaited)
            setsockopt(duplex->socket, SOL_SOCKET, SO_RCVLOWAT, &awaited, sizeof awaited), duplex->awaited = awaited;
        struct pollfd ready = {duplex->socket, POLLIN, 0};
        poll(&ready, 1, -1);
        ssize_t n = recv(duplex->socket, (char *)into + at, bytes - at, MSG_DONTWAIT);
        /* 0: the peer has closed, or break_off has shut the socket. */
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return 0;
        if (n > 0) at += (uint64_t)n;
    }
    return 1;
}

/* Returns 0 if the connection has ended before so many bytes have left. */
static int wait_until_sent(struct duplex *duplex, const struct exchange *exchange, uint64_t bytes) {
    pthread_mutex_lock(&duplex->lock);
    while (!duplex->broken && exchange->sent < bytes) pthread_cond_wait(&duplex->sent, &duplex->lock);
    int broken = duplex->broken;
    pthread_mutex_unlock(&duplex->lock);
    return !broken;
}

static void reduce(const struct duplex *duplex, const struct exchange *exchange, uint64_t at, uint64_t bytes) {
    const char *own = exchange->own + at, *theirs = duplex->piece;
    /* In the order of hosts at both ends, so that both get the same bits. */
    const char *ins[] = {duplex->first ? own : theirs, duplex->first ? theirs : own};
    char *outs[] = {exchange->into + at};
    int dtype = exchange->call.dtype;
    core_reduce(outs, 1, ins, 2, bytes / core_width(dtype), dtype, exchange->call.op);
}

/* Returns 0 if the connection has ended. */
static int take_all(struct duplex *duplex, struct exchange *exchange) {
    struct call *theirs = &exchange->theirs;
    if (!take(duplex, theirs, sizeof *theirs)) return 0;
    /* If it is another call, its bytes are taken out of the way, as many as its own length says. */
    int same = memcmp(theirs, &exchange->call, sizeof *theirs) == 0;
    for (uint64_t at = 0; at < theirs->bytes;) {
        uint64_t rest = theirs->bytes - at, bytes = rest < PIECE ? rest : PIECE;
        if (!take(duplex, same && exchange->own == NULL ? exchange->into + at : duplex->piece, bytes)) return 0;
        /* Where the sum replaces what leaves, that has to have left first. */
        if (same && exchange->own != NULL) {
            if (exchange->into == exchange->out && !wait_until_sent(duplex, exchange, sizeof *theirs + at + bytes))
                return 0;
            reduce(duplex, exchange, at, bytes);
        }
        at += bytes;
    }
    /* Over means both ways: the owner may change `out` then. */
    return wait_until_sent(duplex, exchange, whole(exchange));
}

static void *receive(void *it) {
    struct duplex *duplex = it;
    pthread_mutex_lock(&duplex->lock);
    while (!duplex->broken) {
        struct exchange *exchange = duplex->receiving;
        if (exchange == NULL) {
            pthread_cond_wait(&duplex->begun, &duplex->lock);
            continue;
        }
        pthread_mutex_unlock(&duplex->lock);
        int came = take_all(duplex, exchange);
        pthread_mutex_lock(&duplex->lock);
        if (duplex->broken) break;
        if (!came) {
            break_off(duplex);
            break;
        }
        duplex->receiving = exchange->next;
        if (duplex->receiving == NULL) duplex->newest = NULL;
        exchange->ended = seconds_now();
        exchange->status = memcmp(&exchange->theirs, &exchange->call, sizeof exchange->call) ? MISMATCH : DONE;
        pthread_cond_broadcast(&duplex->ended);
    }
    pthread_mutex_unlock(&duplex->lock);
    return NULL;
}

/* What the owner calls. */

/* Takes over a connected socket. first: whether this rank's numbers come first; NULL: no memory, or no threads. */
struct duplex *duplex_open(int socket, int first) {
    struct duplex *duplex = calloc(1, sizeof *duplex);
    if (duplex == NULL) return NULL;
    duplex->socket = socket;
    duplex->first = first;
    duplex->piece = aligned_alloc(LINE, PIECE);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* for duplex_wait, whose limit is in now_ns */
    pthread_mutex_init(&duplex->lock, NULL);
    pthread_cond_t *conditions[] = {&duplex->begun, &duplex->unsent, &duplex->sent, &duplex->ended};
    for (int k = 0; k < 4; k++) pthread_cond_init(conditions[k], &clock);
    sigset_t all, before; /* signals are for the threads of Python */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int sends = duplex->piece != NULL && pthread_create(&duplex->sender, NULL, send_the_rest, duplex) == 0;
    int receives = sends && pthread_create(&duplex->receiver, NULL, receive, duplex) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (receives) return duplex;
    if (sends) {
        stop(duplex);
        pthread_join(duplex->sender, NULL);
    }
    free(duplex->piece);
    free(duplex);
    return NULL;
}

/* `exchange` and what it points to stay until it is over. It sends call.bytes from `out` and takes as many: into `into`
 * if `own` is NULL, else their reduction with `own`, of call.dtype by call.op. `into` may be `own`; if it overlaps with
 * `out`, it is `out`. */
void duplex_begin(struct duplex *duplex, struct exchange *exchange) {
    exchange->status = UNFINISHED;
    exchange->sent = 0;
    exchange->next = NULL;
    pthread_mutex_lock(&duplex->lock);
    if (duplex->broken) {
        exchange->status = ABORTED;
        pthread_mutex_unlock(&duplex->lock);
        return;
    }
    if (duplex->newest != NULL) duplex->newest->next = exchange;
    duplex->newest = exchange;
    if (duplex->receiving == NULL) {
        duplex->receiving = exchange;
        pthread_cond_signal(&duplex->begun);
    }
    /* Nothing is before it: the caller sends here, under the lock, which never waits for the network. */
    if (duplex->sending == NULL) {
        duplex->sending = exchange;
        note_sent(duplex, exchange, send_some(duplex, exchange));
        if (duplex->sending != NULL) pthread_cond_signal(&duplex->unsent);
    }
    pthread_mutex_unlock(&duplex->lock);
}

/* An enum status; GAVE_UP if it is not over after so many seconds. */
int duplex_wait(struct duplex *duplex, struct exchange *exchange, double seconds) {
    uint64_t until = now_ns() + (uint64_t)(1e9 * seconds);
    struct timespec limit = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    int late = 0;
    pthread_mutex_lock(&duplex->lock);
    while (exchange->status == UNFINISHED && !late)
        late = pthread_cond_timedwait(&duplex->ended, &duplex->lock, &limit) == ETIMEDOUT;
    int status = exchange->status;
    pthread_mutex_unlock(&duplex->lock);
    return status == UNFINISHED ? GAVE_UP : status;
}

/* Ends what is under way, here and with the peer; then no tensor is touched any more. Somebody may still wait for an
 * exchange, and is told: the few hundred bytes of the struct stay for that. */
void duplex_close(struct duplex *duplex) {
    stop(duplex);
    pthread_join(duplex->sender, NULL);
    pthread_join(duplex->receiver, NULL);
    close(duplex->socket);
    free(duplex->piece);
}

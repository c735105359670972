/* What pooling.c computes for layers of images; `dure.federated.engines.pooling` calls it. Of each kind of number and
 * of each set of instructions there is a copy (pooling.inc). Nothing here waits, allocates memory, or keeps state. */
#ifndef DURE_POOLING_H
#define DURE_POOLING_H

#include <stdint.h>

enum { PLAIN, AVX2, AVX512 }; /* sets of instructions */

enum { MOST_TAPS = 32, WINDOW = 4, NOBODY = 255 }; /* NOBODY: of a window where relu lets no gradient through */

/* Both structures are written out in `engines/pooling.py` too: the same fields in the same order.
 *
 * A convolution whose outputs are pooled, WINDOW of them at once, at A clients with B images each, padded, dense.
 * tap: where the elements under a kernel lie, seen from the first. window: where kernels lie that are pooled together,
 * seen from the first; down, right: how far the next window is. */
struct convolution {
    int64_t clients, images, image;          /* A, B, elements of an image of all channels */
    int64_t kernels, taps;                   /* channels of the outputs; elements of a kernel of all channels */
    int64_t kernels_stride, bias_stride;     /* from one client's to the next's */
    int64_t rows, columns, down, right;      /* of windows */
    int64_t relu;                            /* whether it is relu of what is pooled */
    int64_t tap[MOST_TAPS], window[WINDOW];
};

/* The largest of windows that lie side by side; elements beyond the last window belong to none. */
struct pooling {
    int64_t images, channels, height, width; /* of the inputs, with the channels innermost */
    int64_t window_height, window_width;     /* at most NOBODY elements together */
    int64_t relu;
};

#endif

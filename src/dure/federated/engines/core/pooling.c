#include "pooling.h"

#include <stddef.h>
#include <string.h>

typedef float f32;
typedef double f64;
typedef int32_t whole_f32; /* of as many bytes */
typedef int64_t whole_f64;
enum { F32, F64, REALS };

#define INLINE static inline __attribute__((always_inline))
#define JOIN(name, real, instructions) name##_##real##_##instructions
#define JOINED(name, real, instructions) JOIN(name, real, instructions)
#define SIZED_(name, real) name##_##real
#define SIZED(name, real) SIZED_(name, real)
#define NAMED(name) JOINED(name, REAL, INSTRUCTIONS)

/* One copy for each set of instructions: one library runs everywhere, and is fast where it can be. `plain` is what all
 * machines have, in vectors of 16 bytes. MOST_SUMS: a pass over the gradient has two vectors of sums a tap, besides
 * what it reads: 16 registers hold 5 taps, the 32 of AVX-512 hold 9. */
#define INSTRUCTIONS plain
#define TARGET
#define WIDTH 16
#define MOST_SUMS 5
#define REAL f32
#include "pooling.inc"
#define REAL f64
#include "pooling.inc"
#undef INSTRUCTIONS
#undef TARGET
#undef WIDTH
#undef MOST_SUMS

#if defined(__x86_64__)
#define INSTRUCTIONS avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 32
#define MOST_SUMS 5
#define REAL f32
#include "pooling.inc"
#define REAL f64
#include "pooling.inc"
#undef INSTRUCTIONS
#undef TARGET
#undef WIDTH
#undef MOST_SUMS

#define INSTRUCTIONS avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define WIDTH 64
#define MOST_SUMS 9
#define REAL f32
#include "pooling.inc"
#define REAL f64
#include "pooling.inc"
#undef INSTRUCTIONS
#undef TARGET
#undef WIDTH
#undef MOST_SUMS
#endif

struct layers {
    void (*convolve)(const struct convolution *, const void *, const void *, const void *, void *, uint8_t *);
    void (*gather)(const struct convolution *, const void *, const void *, const uint8_t *, void *, void *);
    void (*pool)(const struct pooling *, const void *, void *, uint8_t *);
    void (*unpool)(const struct pooling *, const void *, const uint8_t *, void *);
};

#define LAYERS(real, name) {convolve_##real##_##name, gather_##real##_##name, pool_##real##_##name, unpool_##real##_##name}
#define BOTH(name) {LAYERS(f32, name), LAYERS(f64, name)}

/* In the order of the enumerations: sets of instructions, then kinds of numbers. */
static const struct layers tables[][REALS] = {
    BOTH(plain),
#if defined(__x86_64__)
    BOTH(avx2),
    BOTH(avx512),
#endif
};

#define EXPORT __attribute__((visibility("default")))

/* Asked of the processor that runs, and not of the one that compiled. */
EXPORT int pooling_best(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PLAIN;
}

EXPORT void pooling_convolve(int instructions, int real, const struct convolution *c, const void *images,
                             const void *kernels, const void *bias, void *out, uint8_t *which) {
    tables[instructions][real].convolve(c, images, kernels, bias, out, which);
}

EXPORT void pooling_gather(int instructions, int real, const struct convolution *c, const void *images,
                           const void *gradient, const uint8_t *which, void *kernels, void *bias) {
    tables[instructions][real].gather(c, images, gradient, which, kernels, bias);
}

EXPORT void pooling_pool(int instructions, int real, const struct pooling *c, const void *in, void *out,
                         uint8_t *which) {
    tables[instructions][real].pool(c, in, out, which);
}

EXPORT void pooling_unpool(int instructions, int real, const struct pooling *c, const void *gradient,
                           const uint8_t *which, void *before) {
    tables[instructions][real].unpool(c, gradient, which, before);
}

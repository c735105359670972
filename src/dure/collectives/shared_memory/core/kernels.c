/* Reductions: out = in_0 op in_1 op … op in_(n-1), in this order, a tile of some KB at a time so that partial
 * results stay in the first-level cache. Half precision is summed in float32 and rounded once, at the end.
 *
 * Every kernel is compiled for plain, AVX2 and AVX-512 machines (kernels.inc); which one runs is found out at the
 * first call. They give the same bits: the order of additions does not depend on the width of a vector.
 */
#include "core.h"

#include <string.h>

#define TILE 16384 /* bytes of a tile in the type that sums are formed in: long enough to read each tensor in runs */

typedef uint8_t u8;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef float f32;
typedef double f64;

/* out[i] = a[i] op b[i]; out may be a or b. */
typedef void fold_function(void *out, const void *a, const void *b, uint64_t n);
typedef void convert_function(void *out, const void *in, uint64_t n);
typedef void divide_function(void *inout, uint64_t n, int by);

struct kernels {
    fold_function *fold[DTYPES][OPS];
    convert_function *widen[2], *narrow[2]; /* f16, bf16 */
    divide_function *divide[2];             /* f32, f64 */
    const char *name;
};

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* Half to float: shift exponent and fraction into place, correct the bias by a multiplication (which also
 * normalises subnormal numbers), keep infinities and NaN apart. */
static float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = (uint32_t)(half & 0x7fffu) << 13;
    float value = float_of(magnitude) * 0x1p112f;
    if ((half & 0x7c00u) == 0x7c00u) value = float_of(magnitude | 0x7f800000u);
    return float_of(bits_of(value) | sign);
}

/* Float to half, to nearest, ties to even. */
static uint16_t to_half(float value) {
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) /* subnormal: adding 0.5 lets the adder round to the last place of a half */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

static uint16_t to_bfloat(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

#define IVDEP _Pragma("GCC ivdep") /* out may be a or b, exactly: no element depends on another */

#define NAMED(name) name##_plain
#define TARGET
#include "kernels.inc"
#undef NAMED
#undef TARGET

#if defined(__x86_64__)
#include <immintrin.h>
#define HALF_INTRINSICS
#define NAMED(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#include "kernels.inc"
#undef NAMED
#undef TARGET
#define NAMED(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#include "kernels.inc"
#undef NAMED
#undef TARGET
#endif

static const struct kernels *kernels(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &table_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &table_avx2;
#endif
    return &table_plain;
}

const char *core_instructions(void) { return kernels()->name; }

uint64_t core_width(int dtype) {
    static const uint8_t widths[DTYPES] = {1, 1, 2, 4, 8, 4, 8, 2, 2, 1};
    return dtype >= 0 && dtype < DTYPES ? widths[dtype] : 1;
}

/* One tile of n elements whose sums are formed in the type they travel in. */
static void tile(const struct kernels *use, char *const *dsts, int nd, const char *const *srcs, int ns, uint64_t at,
                 uint64_t n, int dtype, int op) {
    _Alignas(LINE) char sums[TILE];
    uint64_t bytes = n * core_width(dtype);
    fold_function *fold = use->fold[dtype][op];
    /* The last fold writes straight to the first destination, unless a later step still reads what lies there. */
    char *target = dsts[0] + at;
    if (ns == 1) {
        if (target != srcs[0] + at) memcpy(target, srcs[0] + at, bytes);
    } else {
        fold(ns == 2 ? target : sums, srcs[0] + at, srcs[1] + at, n);
        for (int s = 2; s < ns; s++) fold(s == ns - 1 ? target : sums, sums, srcs[s] + at, n);
    }
    if (op == AVG) use->divide[dtype == F64](target, n, ns);
    for (int d = 1; d < nd; d++)
        if (dsts[d] != dsts[0]) memcpy(dsts[d] + at, target, bytes);
}

static void tile_of_halves(const struct kernels *use, char *const *dsts, int nd, const char *const *srcs, int ns,
                           uint64_t at, uint64_t n, int dtype, int op) {
    _Alignas(LINE) char sums[TILE], next[TILE];
    use->widen[dtype == BF16](sums, srcs[0] + at, n);
    for (int s = 1; s < ns; s++) {
        use->widen[dtype == BF16](next, srcs[s] + at, n);
        use->fold[F32][op](sums, sums, next, n);
    }
    if (op == AVG) use->divide[0](sums, n, ns);
    for (int d = 0; d < nd; d++) use->narrow[dtype == BF16](dsts[d] + at, sums, n);
}

void core_reduce(char *const *dsts, int nd, const char *const *srcs, int ns, uint64_t count, int dtype, int op) {
    const struct kernels *use = kernels();
    int halves = dtype == F16 || dtype == BF16;
    uint64_t width = core_width(dtype), most = TILE / (halves ? 4 : width);
    for (uint64_t done = 0; done < count; done += most) {
        uint64_t n = count - done < most ? count - done : most;
        (halves ? tile_of_halves : tile)(use, dsts, nd, srcs, ns, done * width, n, dtype, op);
    }
}

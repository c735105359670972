/* Reductions: out = in_0 op in_1 op … op in_(n-1), in this order. A cache line of each input is read, the result stays
 * in registers, and is written to all outputs while their lines are still in the first-level cache: memory sees every
 * line once in and once out, and all inputs are read ahead at once. Half precision is summed in float32, a tile of
 * some KB at a time, and rounded once, at the end.
 *
 * Every kernel is compiled for plain, AVX2 and AVX-512 machines (kernels.inc); which one runs is decided at
 * run time. They give the same bits: the order of additions does not depend on the width of a vector.
 */
#include "core.h"

#include <string.h>

#define TILE 16384 /* bytes of a tile of float32 in which half precision is summed; two fit into a cache of 32 KB */

typedef uint8_t u8;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef float f32;
typedef double f64;

/* Bytes `from` to `to` of every output = in_0 op in_1 op …; an output may be an input. */
typedef void fold_function(char *const *outs, int n_outs, const char *const *ins, int n_ins, uint64_t from,
                           uint64_t to);
typedef void convert_function(void *out, const void *in, uint64_t n);

struct kernels {
    fold_function *fold[DTYPES][OPS];
    convert_function *widen[2], *narrow[2]; /* f16, bf16 */
    void (*divide)(float *inout, uint64_t n, int by);
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
    /* 112 is the difference of the biases, 127 and 15; 13 that of the lengths of the fractions, 23 and 10. */
    float value = float_of(magnitude) * 0x1p112f;
    if ((half & 0x7c00u) == 0x7c00u) value = float_of(magnitude | 0x7f800000u);
    return float_of(bits_of(value) | sign);
}

/* Float to half, to nearest, ties to even. */
static uint16_t to_half(float value) {
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    /* NaN stays one, and quiet. From 65520 on, half a step above the largest half, it is infinite. Below 2^-14 halves
     * are subnormal. The last line adds half a step less one, and one more for odd numbers: a tie goes to the even. */
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) /* subnormal: adding 0.5 lets the adder round to the last place of a half */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

static uint16_t to_bfloat(float value) {
    uint32_t bits = bits_of(value);
    /* To nearest, ties to even, on the upper 16 bits; a NaN could be rounded to infinity, so it is replaced. */
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

#define IVDEP _Pragma("GCC ivdep") /* out may be a or b, exactly: no element depends on another */

#define NAMED(name) name##_plain
#define TARGET
#define WIDTH 16
#include "kernels.inc"
#undef NAMED
#undef WIDTH
#undef TARGET

#if defined(__x86_64__)
#include <immintrin.h>
#define HALF_INTRINSICS
#define NAMED(name) name##_avx2
#define WIDTH 32
#define TARGET __attribute__((target("avx2,fma,f16c")))
#include "kernels.inc"
#undef NAMED
#undef WIDTH
#undef TARGET
#define NAMED(name) name##_avx512
#define WIDTH 64
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#include "kernels.inc"
#undef NAMED
#undef WIDTH
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

/* Elements `at` to `at + n` of halves, n at most a tile's. An average is divided in float32, before it is rounded. */
static void tile_of_halves(const struct kernels *use, char *const *outs, int n_outs, const char *const *ins, int n_ins,
                           uint64_t at, uint64_t n, int dtype, int op) {
    _Alignas(LINE) char sums[TILE], next[TILE];
    char *const out[] = {sums};
    const char *const both[] = {sums, next};
    uint64_t bytes = n * sizeof(float);
    use->widen[dtype == BF16](sums, ins[0] + 2 * at, n);
    for (int k = 1; k < n_ins; k++) {
        use->widen[dtype == BF16](next, ins[k] + 2 * at, n);
        use->fold[F32][op == AVG ? SUM : op](out, 1, both, 2, 0, bytes);
    }
    if (op == AVG) use->divide((float *)sums, n, n_ins);
    for (int k = 0; k < n_outs; k++) use->narrow[dtype == BF16](outs[k] + 2 * at, sums, n);
}

void core_reduce(char *const *outs, int n_outs, const char *const *ins, int n_ins, uint64_t count, int dtype, int op) {
    const struct kernels *use = kernels();
    if (dtype != F16 && dtype != BF16) {
        use->fold[dtype][op](outs, n_outs, ins, n_ins, 0, count * core_width(dtype));
        return;
    }
    uint64_t most = TILE / sizeof(float);
    for (uint64_t at = 0; at < count; at += most)
        tile_of_halves(use, outs, n_outs, ins, n_ins, at, count - at < most ? count - at : most, dtype, op);
}

/* Vectors of VW floats by the compiler's vector extensions, one source for all instruction sets;
 * the activation functions; memory. NaN stays NaN: nothing here is compiled with -ffast-math. */
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

/* VW floats per vector; MANY_REGISTERS where there are 32 vector registers. */
#if defined(__AVX512F__)
#define VW 16
#define MANY_REGISTERS 1
#define KEEP_IN_REGISTER(w) __asm__("" : "+v"(w))
#elif defined(__AVX__)
#define VW 8
#define MANY_REGISTERS 0
#define KEEP_IN_REGISTER(w) __asm__("" : "+x"(w))
#elif defined(__aarch64__)
#define VW 4
#define MANY_REGISTERS 1
#define KEEP_IN_REGISTER(w) __asm__("" : "+w"(w))
#else
#define VW 4
#define MANY_REGISTERS 0
#define KEEP_IN_REGISTER(w) ((void)0)
#endif

#define INLINE static inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(VW * 4)));
typedef int32_t ivec __attribute__((vector_size(VW * 4)));
typedef vec unaligned __attribute__((aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const unaligned *)p; }
INLINE void store(float *p, vec x) { *(unaligned *)p = x; }
INLINE vec splat(float x) { return x - (vec){0}; }

/* The first n lanes; the others are 0. */
#if VW == 16
#define FIRST_LANES(n) ((__mmask16)((1u << (n)) - 1))
#elif VW == 8
#define FIRST_LANES(n) ((__m256i)((ivec){0, 1, 2, 3, 4, 5, 6, 7} < (int)(n)))
#endif
INLINE vec load_n(const float *p, int n) {
    if (n >= VW) return load(p);
#if VW == 16
    return (vec)_mm512_maskz_loadu_ps(FIRST_LANES(n), p);
#elif VW == 8
    return (vec)_mm256_maskload_ps(p, FIRST_LANES(n));
#else
    vec x = {0};
    for (int l = 0; l < n; l++) x[l] = p[l];
    return x;
#endif
}
INLINE void store_n(float *p, vec x, int n) {
    if (n >= VW) store(p, x);
    else {
#if VW == 16
        _mm512_mask_storeu_ps(p, FIRST_LANES(n), (__m512)x);
#elif VW == 8
        _mm256_maskstore_ps(p, FIRST_LANES(n), (__m256)x);
#else
        for (int l = 0; l < n; l++) p[l] = x[l];
#endif
    }
}
/* x in the first n lanes, 0 in the others. */
INLINE vec first_lanes(vec x, int n) {
    if (n >= VW) return x;
#if VW == 16
    return (vec)_mm512_maskz_mov_ps(FIRST_LANES(n), (__m512)x);
#elif VW == 8
    return (vec)((ivec)x & (ivec)FIRST_LANES(n));
#else
    for (int l = n; l < VW; l++) x[l] = 0;
    return x;
#endif
}
INLINE float sum_lanes(vec x) {
    float s = 0;
    for (int l = 0; l < VW; l++) s += x[l];
    return s;
}
INLINE vec select_lanes(ivec m, vec a, vec b) { return (vec)((m & (ivec)a) | (~m & (ivec)b)); }

/* x clamped to ±most; NaN stays. */
INLINE vec clamp(vec x, float most) {
#if VW == 16
    return (vec)_mm512_min_ps((__m512)splat(most), _mm512_max_ps((__m512)splat(-most), (__m512)x));
#elif VW == 8
    return (vec)_mm256_min_ps((__m256)splat(most), _mm256_max_ps((__m256)splat(-most), (__m256)x));
#else
    const vec low = select_lanes(x < splat(-most), splat(-most), x);
    return select_lanes(low > splat(most), splat(most), low);
#endif
}

/* 2^y = scale·(1 + p) of y = x·log2(e)·times: y = n + r with |r| ≤ 1/2, p = 2^r − 1 by Taylor to
 * r^7, with a relative error of 1.5e-8, near 0 too. */
INLINE vec exp2_parts(vec x, float times, vec *scale) {
    const vec round = splat(12582912.0f + 127.0f); /* adding it leaves n + 127 in the low bits */
    const vec shifted = x * splat(1.44269504f * times) + round;
    const vec r = x * splat(1.44269504f * times) - (shifted - round);
    vec p = splat(1.52527338e-5f);
    p = p * r + splat(1.54035304e-4f);
    p = p * r + splat(1.33335581e-3f);
    p = p * r + splat(9.61812911e-3f);
    p = p * r + splat(5.55041087e-2f);
    p = p * r + splat(2.40226507e-1f);
    p = p * r + splat(6.93147181e-1f);
    *scale = (vec)((ivec)shifted << 23);
    return p * r;
}
/* The sigmoid is 1 over this. Limits leave room for the product of two. */
INLINE vec sigmoid_denominator(vec x) {
    vec scale, p = exp2_parts(clamp(x, 43.0f), -1.0f, &scale);
    return scale * p + scale + splat(1.0f);
}
/* tanh is the result over *under. */
INLINE vec tanh_numerator(vec x, vec *under) {
    vec scale, p = exp2_parts(clamp(x, 21.5f), 2.0f, &scale);
    const vec e = scale * p + (scale - splat(1.0f));
    *under = e + splat(2.0f);
    return e;
}
INLINE vec sigmoid_(vec x) { return splat(1.0f) / sigmoid_denominator(x); }
INLINE vec tanh_(vec x) {
    vec under, over = tanh_numerator(x, &under);
    return over / under;
}
/* Divisions are slow, so two share one. */
INLINE void two_sigmoids(vec x, vec y, vec *sx, vec *sy) {
    const vec a = sigmoid_denominator(x), b = sigmoid_denominator(y);
    const vec inverse = splat(1.0f) / (a * b);
    *sx = inverse * b, *sy = inverse * a;
}
INLINE void sigmoid_and_tanh(vec x, vec y, vec *sx, vec *ty) {
    vec b;
    const vec a = sigmoid_denominator(x), over = tanh_numerator(y, &b);
    const vec inverse = splat(1.0f) / (a * b);
    *sx = inverse * b, *ty = inverse * a * over;
}
INLINE vec relu_(vec x) { return select_lanes(x < splat(0.0f), splat(0.0f), x); }
INLINE vec rsqrt_(vec x) {
    vec y = x;
    for (int l = 0; l < VW; l++) y[l] = 1.0f / sqrtf(x[l]);
    return y;
}

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
/* Rows an odd number of cache lines apart: powers of two would all fall into the same lines. */
INLINE int64_t padded_stride(int64_t n) { return (round_up(n, 16) / 16 | 1) * 16; }

/* Ask for large pages where memory is large: every call touches it for the first time. */
static void use_large_pages(void *start, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const int64_t page = 4096;
    char *from = (char *)round_up((int64_t)start, page), *to = (char *)start + bytes;
    if (bytes >= 4 << 20) madvise(from, (size_t)((to - from) / page * page), MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}
/* Memory, or NULL. */
static float *allocate(int64_t floats) {
    const int64_t bytes = round_up(floats * 4 + 64, 64), large = 2 << 20;
    const int is_large = bytes >= 2 * large;
    float *p = is_large ? aligned_alloc((size_t)large, (size_t)round_up(bytes, large))
                        : aligned_alloc(64, (size_t)bytes);
    if (p && is_large) use_large_pages(p, round_up(bytes, large));
    return p;
}

/* Vectors of VW floats by the compilers' extensions: the same source for every instruction set.
 * NaN in, NaN out: comparisons let it through, and nothing here is -ffast-math. */
#ifndef NORMRNN_VECTOR_H
#define NORMRNN_VECTOR_H
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

/* VW floats a vector; ROOMY where there are 32 registers of them. */
#if defined(__AVX512F__) && !defined(NORMRNN_NARROW)
#define VW 16
#define ROOMY 1
#define KEEP(w) __asm__("" : "+v"(w))
#elif defined(__AVX__)
#define VW 8
#define ROOMY 0
#define KEEP(w) __asm__("" : "+x"(w))
#elif defined(__aarch64__)
#define VW 4
#define ROOMY 1
#define KEEP(w) __asm__("" : "+w"(w))
#else
#define VW 4
#define ROOMY 0
#define KEEP(w) ((void)0)
#endif

#define INLINE static inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(VW * 4)));
typedef int32_t ivec __attribute__((vector_size(VW * 4)));
typedef vec anywhere __attribute__((aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const anywhere *)p; }
INLINE void store(float *p, vec x) { *(anywhere *)p = x; }
INLINE vec all(float x) { return x - (vec){0}; }

/* The first n lanes, and 0 in the others. */
INLINE vec load_n(const float *p, int n) {
    if (n >= VW) return load(p);
    vec x = {0};
    for (int l = 0; l < n; l++) x[l] = p[l];
    return x;
}
INLINE void store_n(float *p, vec x, int n) {
    if (n >= VW) store(p, x);
    else
        for (int l = 0; l < n; l++) p[l] = x[l];
}
INLINE float add_up(vec x) {
    float s = 0;
    for (int l = 0; l < VW; l++) s += x[l];
    return s;
}
INLINE vec choose(ivec m, vec a, vec b) { return (vec)((m & (ivec)a) | (~m & (ivec)b)); }

/* e^x − 1, accurate also near 0: x = n ln 2 + r, |r| ≤ ln 2 / 2; Taylor to r^7 has a relative
 * error of 1.5e-8; then 2^n (p + 1) − 1 = 2^n p + (2^n − 1). */
INLINE vec expm1_(vec x) {
    const vec high = all(87.0f), low = all(-87.0f), round = all(12582912.0f);
    vec y = choose(x > high, high, x);
    y = choose(y < low, low, y);
    vec shifted = y * all(1.44269504f) + round; /* an integer in the low bits */
    vec n = shifted - round;
    vec r = y - n * all(0.693359375f);
    r = r + n * all(2.12194440e-4f);
    vec p = all(1.98412698e-4f);
    p = p * r + all(1.38888889e-3f);
    p = p * r + all(8.33333333e-3f);
    p = p * r + all(4.16666667e-2f);
    p = p * r + all(1.66666667e-1f);
    p = p * r + all(0.5f);
    p = p * r * r + r;
    vec scale = (vec)(((ivec)shifted - 0x4B400000 + 127) << 23);
    return scale * p + (scale - all(1.0f));
}
INLINE vec sigmoid_(vec x) { return all(1.0f) / (all(2.0f) + expm1_(-x)); }
INLINE vec tanh_(vec x) {
    vec e = expm1_(x + x);
    return e / (e + all(2.0f));
}
INLINE vec relu_(vec x) { return choose(x < all(0.0f), all(0.0f), x); }
INLINE vec rsqrt_(vec x) {
    vec y = x;
    for (int l = 0; l < VW; l++) y[l] = 1.0f / sqrtf(x[l]);
    return y;
}

INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
/* Rows an odd number of cache lines apart: powers of two would all fall into the same lines. */
INLINE int64_t apart(int64_t n) { return (up(n, 16) / 16 | 1) * 16; }

static float *take(int64_t floats) {
    return aligned_alloc(64, (size_t)up(floats * 4 + 64, 64));
}
#endif

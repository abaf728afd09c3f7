/* The element-wise half of an LSTM step, fused: what torch needs eight small kernels for; and
 * batch normalisation of short rows in one go.
 *
 * Everything is feature-major: a gate is H rows of n columns; `ld` is the distance between rows
 * of the big (features, N) buffers, `ld0` that of the previous cells. Plain C99: no torch, no
 * intrinsics; the loops are written so that a compiler vectorises them, and shared out over
 * torch's own OpenMP threads where there are any and it pays. NaN in, NaN out: no -ffast-math.
 * Peepholes are (H,) or NULL.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define WORTH_SHARING 4096 /* elements; below that a second thread costs more than it brings */

/* e^x − 1, accurate also near 0: x = n ln 2 + r, |r| ≤ ln 2 / 2; Taylor to r^7 has a relative
 * error of 1.5e-8; then 2^n (p + 1) − 1 = 2^n p + (2^n − 1). */
static inline float expm1_(float x) {
    float y = x > 87.0f ? 87.0f : x; /* comparisons that let NaN through */
    y = y < -87.0f ? -87.0f : y;
    float shifted = y * 1.44269504f + 12582912.0f; /* rounds to an integer in the low bits */
    float n = shifted - 12582912.0f;
    float r = y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    int32_t exponent = (bits - 0x4B400000 + 127) << 23;
    float scale;
    memcpy(&scale, &exponent, 4);
    return scale * p + (scale - 1.0f);
}

static inline float sigmoid_(float x) { return 1.0f / (2.0f + expm1_(-x)); }

static inline float tanh_(float x) {
    float e = expm1_(2.0f * x);
    return e / (e + 2.0f);
}

/* Gate inputs (4H, n), order i f g o, become activations in place; writes c, tanh c and h. */
void normrnn_lstm_forward(int64_t H, int64_t n, int64_t ld, int64_t ld0, float *restrict gates,
                          const float *restrict before, float *restrict c, float *restrict tc,
                          float *restrict h, const float *pi, const float *pf, const float *po) {
#pragma omp parallel for schedule(static) if (H * n > WORTH_SHARING)
    for (int64_t k = 0; k < H; k++) {
        float *restrict i = gates + k * ld, *restrict f = gates + (H + k) * ld;
        float *restrict g = gates + (2 * H + k) * ld, *restrict o = gates + (3 * H + k) * ld;
        const float *restrict b = before + k * ld0;
        float *restrict ck = c + k * ld, *restrict tk = tc + k * ld, *restrict hk = h + k * ld;
        const float wi = pi ? pi[k] : 0.0f, wf = pf ? pf[k] : 0.0f, wo = po ? po[k] : 0.0f;
        /* One transcendental per loop: short chains, so that the CPU overlaps many of them. */
        for (int64_t j = 0; j < n; j++) i[j] = sigmoid_(i[j] + wi * b[j]);
        for (int64_t j = 0; j < n; j++) f[j] = sigmoid_(f[j] + wf * b[j]);
        for (int64_t j = 0; j < n; j++) g[j] = tanh_(g[j]);
        for (int64_t j = 0; j < n; j++) {
            float cv = f[j] * b[j] + i[j] * g[j];
            ck[j] = cv, o[j] += wo * cv;
        }
        for (int64_t j = 0; j < n; j++) o[j] = sigmoid_(o[j]);
        for (int64_t j = 0; j < n; j++) tk[j] = tanh_(ck[j]);
        for (int64_t j = 0; j < n; j++) hk[j] = o[j] * tk[j];
    }
}

/* dh (H, n) and dc (H, n, distance ldc) give the gradients of the gate inputs and of c_{t−1},
 * the latter in place of dc. */
void normrnn_lstm_backward(int64_t H, int64_t n, int64_t ld, int64_t ld0, int64_t ldc,
                           const float *restrict gates, const float *restrict before,
                           const float *restrict tc, const float *restrict dh, float *restrict dc,
                           float *restrict grad, const float *pi, const float *pf,
                           const float *po) {
#pragma omp parallel for schedule(static) if (H * n > WORTH_SHARING)
    for (int64_t k = 0; k < H; k++) {
        const float *restrict i = gates + k * ld, *restrict f = gates + (H + k) * ld;
        const float *restrict g = gates + (2 * H + k) * ld, *restrict o = gates + (3 * H + k) * ld;
        const float *restrict b = before + k * ld0, *restrict tk = tc + k * ld;
        const float *restrict dhk = dh + k * ld;
        float *restrict dck = dc + k * ldc;
        float *restrict di = grad + k * ld, *restrict df = grad + (H + k) * ld;
        float *restrict dg = grad + (2 * H + k) * ld, *restrict d_o = grad + (3 * H + k) * ld;
        const float wi = pi ? pi[k] : 0.0f, wf = pf ? pf[k] : 0.0f, wo = po ? po[k] : 0.0f;
        for (int64_t j = 0; j < n; j++) {
            float dov = dhk[j] * tk[j] * o[j] * (1.0f - o[j]);
            float d = dck[j] + dhk[j] * o[j] * (1.0f - tk[j] * tk[j]) + wo * dov;
            float div = d * g[j] * i[j] * (1.0f - i[j]);
            float dfv = d * b[j] * f[j] * (1.0f - f[j]);
            di[j] = div, df[j] = dfv, d_o[j] = dov;
            dg[j] = d * i[j] * (1.0f - g[j] * g[j]);
            dck[j] = d * f[j] + wi * div + wf * dfv;
        }
    }
}

/* Mean and biased variance of each of R contiguous rows of n, two passes; then
 * out = weight (x − mean) / √(var + eps) + bias. Every `share` rows have one weight and bias,
 * which may be NULL. A row is read three times, but twice of them from a cache. Sums are kept in
 * eight lanes of up to 32 terms each, and those added up in double. */
void normrnn_normalise(int64_t R, int64_t n, int64_t share, float eps, const float *restrict x,
                       const float *weight, const float *bias, float *restrict out,
                       float *restrict mean, float *restrict var, float *restrict invstd) {
#pragma omp parallel for schedule(static) if (R * n > WORTH_SHARING)
    for (int64_t k = 0; k < R; k++) {
        const float *restrict row = x + k * n;
        float *restrict to = out + k * n;
        double sum = 0.0, squares = 0.0;
        int64_t j = 0;
        for (; j < n; j += 256) {
            int64_t end = j + 256 < n ? j + 256 : n, whole = j + (end - j) / 8 * 8;
            float part[8] = {0}, tail = 0.0f;
            for (int64_t a = j; a < whole; a += 8)
                for (int l = 0; l < 8; l++) part[l] += row[a + l];
            for (int64_t a = whole; a < end; a++) tail += row[a];
            for (int l = 0; l < 8; l++) tail += part[l];
            sum += tail;
        }
        const float m = (float)(sum / (double)n);
        for (j = 0; j < n; j += 256) {
            int64_t end = j + 256 < n ? j + 256 : n, whole = j + (end - j) / 8 * 8;
            float part[8] = {0}, tail = 0.0f;
            for (int64_t a = j; a < whole; a += 8)
                for (int l = 0; l < 8; l++) part[l] += (row[a + l] - m) * (row[a + l] - m);
            for (int64_t a = whole; a < end; a++) tail += (row[a] - m) * (row[a] - m);
            for (int l = 0; l < 8; l++) tail += part[l];
            squares += tail;
        }
        const float v = (float)(squares / (double)n), inv = 1.0f / sqrtf(v + eps);
        const float scale = weight ? weight[k / share] * inv : inv;
        const float shift = bias ? bias[k / share] : 0.0f;
        for (j = 0; j < n; j++) to[j] = (row[j] - m) * scale + shift;
        mean[k] = m, var[k] = v, invstd[k] = inv;
    }
}

/* The gradient of the above: d is that of out. sum_d and sum_dx are Σ d and Σ d x̂ of each row,
 * the gradients of bias and weight before they are added up over rows that share them. */
void normrnn_normalise_backward(int64_t R, int64_t n, int64_t share, const float *restrict d,
                                const float *restrict x, const float *weight,
                                const float *restrict mean, const float *restrict invstd,
                                float *restrict dx, float *restrict sum_d,
                                float *restrict sum_dx) {
#pragma omp parallel for schedule(static) if (R * n > WORTH_SHARING)
    for (int64_t k = 0; k < R; k++) {
        const float *restrict dk = d + k * n, *restrict xk = x + k * n;
        float *restrict to = dx + k * n;
        const float m = mean[k], inv = invstd[k];
        double total = 0.0, dot = 0.0;
        for (int64_t j = 0; j < n; j += 256) {
            int64_t end = j + 256 < n ? j + 256 : n, whole = j + (end - j) / 8 * 8;
            float a[8] = {0}, b[8] = {0}, at = 0.0f, bt = 0.0f;
            for (int64_t i = j; i < whole; i += 8)
                for (int l = 0; l < 8; l++)
                    a[l] += dk[i + l], b[l] += dk[i + l] * (xk[i + l] - m);
            for (int64_t i = whole; i < end; i++) at += dk[i], bt += dk[i] * (xk[i] - m);
            for (int l = 0; l < 8; l++) at += a[l], bt += b[l];
            total += at, dot += bt;
        }
        const float scale = (weight ? weight[k / share] : 1.0f) * inv;
        const float level = (float)(total / (double)n);
        const float slope = (float)(dot / (double)n) * inv * inv;
        for (int64_t j = 0; j < n; j++) to[j] = (dk[j] - level - (xk[j] - m) * slope) * scale;
        sum_d[k] = (float)total, sum_dx[k] = (float)dot * inv;
    }
}

/* (rows, cols) -> (cols, rows), in blocks that fit the cache. */
void normrnn_transpose(int64_t rows, int64_t cols, const float *restrict from, float *restrict to) {
    enum { BLOCK = 32 };
#pragma omp parallel for schedule(static) if (rows * cols > WORTH_SHARING)
    for (int64_t c = 0; c < cols; c += BLOCK)
        for (int64_t r = 0; r < rows; r += BLOCK) {
            int64_t rend = r + BLOCK < rows ? r + BLOCK : rows;
            int64_t cend = c + BLOCK < cols ? c + BLOCK : cols;
            for (int64_t a = c; a < cend; a++)
                for (int64_t b = r; b < rend; b++) to[a * rows + b] = from[b * cols + a];
        }
}

/* One update of running statistics (C,) from K equally wide groups of a batch, mean and biased
 * var (C, K): pooled, and var made unbiased by the factor `unbias`. Returns 1, or 0 and leaves
 * everything as it was if a value is not finite. */
int normrnn_update(int64_t C, int64_t K, float share, float unbias, const float *restrict mean,
                   const float *restrict var, float *restrict running_mean,
                   float *restrict running_var) {
    float check = 0.0f;
    for (int64_t k = 0; k < C * K; k++) check += 0.0f * mean[k] + 0.0f * var[k];
    if (check != 0.0f) return 0; /* 0 times NaN or infinity is NaN */
    for (int64_t k = 0; k < C; k++) {
        float m = 0.0f, v = 0.0f;
        for (int64_t t = 0; t < K; t++) m += mean[k * K + t];
        m /= (float)K;
        for (int64_t t = 0; t < K; t++) {
            float d = mean[k * K + t] - m;
            v += var[k * K + t] + d * d;
        }
        running_mean[k] += share * (m - running_mean[k]);
        running_var[k] += share * (unbias * v / (float)K - running_var[k]);
    }
    return 1;
}

/* The time loop of the forward pass. `G`, `U` (product.h), `mode` and `inner` are constants wherever this is
 * inlined. A trace keeps, for a row and vector of units: LSTM i f g o c₋ tanh(c); GRU r z n q h₋;
 * RNN h; with a normalised cell also its hat. */
#include "job.h"

typedef struct {
    const Job *J;
    const Direction *d;
    Share s;
    int64_t vectors, width, lanes; /* of units; floats of a packed row; floats of a state row */
    float *h[2], *c;               /* (B, lanes): states before and after a step */
    float *packed, *scratch;
    float *unused_trace; /* where no backward pass reads the trace */
} ForwardLoop;

/* Write the state of a vector of units after a step; `c0` is the previous cell. */
INLINE void write_state(const ForwardLoop *L, int64_t t, int64_t r, int64_t v, vec h, vec c, vec c0,
                    const float *before, float *after, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int64_t H = J->H, at = r * L->lanes + v * VW;
    const int n = (int)min64(H - v * VW, VW);
    const int last = d->reverse ? t == 0 : t + 1 == J->T || r >= J->sizes[t + 1];
    const int64_t row = (J->offsets[t] + r) * J->ldo;
    if (has_zoneout(d->zone_h, d->share_h))
        h = apply_zoneout(d->zone_h, d->share_h, row, v, n, load(before + at), h);
    if (mode == LSTM && has_zoneout(d->zone_c, d->share_c))
        c = apply_zoneout(d->zone_c, d->share_c, row, v, n, c0, c);
    store_n(d->out + row + v * VW, h, n);
    if (last) {
        store_n(d->hn + r * H + v * VW, h, n);
        if (mode == LSTM) store_n(d->cn + r * H + v * VW, c, n);
    } else if (is_reset(J, d->reverse ? t : t + 1, r)) {
        h = c = (vec){0};
    }
    store(after + at, h);
    if (mode == LSTM) store(L->c + at, c);
}

/* From the inputs a[G] of the non-linearities of one row and vector of units to states; writes the
 * trace. `q` is the GRU's W_hn h + b. With a normalised cell h is computed later, from all of c. */
INLINE void activate(const ForwardLoop *L, int64_t t, int64_t r, int64_t v, const vec *a, vec q,
                     const float *before, float *after, int mode, int cell) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int64_t b = J->sizes[t], at = r * L->lanes + v * VW;
    const int keep = trace_vectors(mode, cell) * VW;
    float *trace = L->unused_trace;
    if (J->keep || cell) trace = d->trace + ((J->offsets[t] * L->vectors + v * b) + r) * keep;
    if (mode == LSTM) {
        const vec c0 = load(L->c + at);
        vec ai = a[0], af = a[1], ao = a[3];
        const int n = (int)min64(J->H - v * VW, VW);
        if (d->peephole[0]) ai += load_n(d->peephole[0] + v * VW, n) * c0;
        if (d->peephole[1]) af += load_n(d->peephole[1] + v * VW, n) * c0;
        vec i, f, o, tc;
        two_sigmoids(ai, af, &i, &f);
        const vec g = tanh_(a[2]), c = f * c0 + i * g;
        if (d->peephole[2]) ao += load_n(d->peephole[2] + v * VW, n) * c;
        if (cell) o = sigmoid_(ao);
        else sigmoid_and_tanh(ao, c, &o, &tc);
        store(trace, i), store(trace + VW, f), store(trace + 2 * VW, g), store(trace + 3 * VW, o);
        store(trace + 4 * VW, c0);
        if (cell) {
            store(L->c + at, c);
        } else {
            store(trace + 5 * VW, tc);
            write_state(L, t, r, v, o * tc, c, c0, before, after, mode);
        }
    } else if (mode == GRU) { /* a[0] is r already, a[2] holds r·q already */
        const vec h0 = load(before + at);
        vec z, n;
        sigmoid_and_tanh(a[1], a[2], &z, &n);
        store(trace, a[0]), store(trace + VW, z), store(trace + 2 * VW, n);
        store(trace + 3 * VW, q), store(trace + 4 * VW, h0);
        write_state(L, t, r, v, n + z * (h0 - n), (vec){0}, (vec){0}, before, after, mode);
    } else {
        const vec h = mode == RNN_RELU ? relu_(a[0]) : tanh_(a[0]);
        store(trace, h);
        write_state(L, t, r, v, h, (vec){0}, (vec){0}, before, after, mode);
    }
}

/* Where the G gates of a vector of units begin in packed order, and how far they are apart. */
INLINE int64_t column(int64_t v, int g, int G) { return (v * G + g) * VW; }

INLINE void step_no_norm(const ForwardLoop *L, int64_t t, const float *before, float *after, int product,
                         int G, int U, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const Share s = L->s;
    const int64_t rows = rows_of(s, J->sizes[t]), Q = G * U;
    const int64_t next = d->reverse ? t - 1 : t + 1;
    const float *ahead = next >= 0 && next < J->T ? d->pre + J->offsets[next] * J->ldx : NULL;
    const float *mean = d->mean + (J->per_step ? t * L->width : 0);
    const float *scale = d->scale + (J->per_step ? t * L->width : 0);
    for (int64_t p = s.from * 2 / U; p < s.to * 2 / U; p++) {
        if (p * U >= L->vectors) break;
        if (product)
            panel_product(rows, J->H, (int)Q, L->packed + p * J->H * Q * VW,
                          before + s.row0 * L->lanes, s.stride * L->lanes, L->scratch, Q * VW, 0);
        for (int u = 0; u < U; u++) {
            const int64_t v = p * U + u;
            if (v >= L->vectors) break;
            vec m[4], k[4], beta[4], bias = {0};
            for (int g = 0; g < G; g++) {
                m[g] = load(mean + column(v, g, G)), k[g] = load(scale + column(v, g, G));
                beta[g] = load(d->shift + column(v, g, G));
            }
            if (mode == GRU && d->bias_hn)
                bias = load_n(d->bias_hn + v * VW, (int)min64(J->H - v * VW, VW));
            if (mode == GRU && J->outer == SUMS) bias *= k[2]; /* it is part of the sum */
            for (int64_t i = 0; i < rows; i++) {
                const int64_t r = s.row0 + i * s.stride;
                const float *x = d->pre + (J->offsets[t] + r) * J->ldx + column(v, 0, G);
                if (ahead)
                    for (int g = 0; g < G; g++)
                        __builtin_prefetch(ahead + r * J->ldx + column(v, g, G), 0, 2);
                vec a[4], q = bias;
                for (int g = 0; g < G; g++) {
                    a[g] = (load(x + g * VW) - m[g]) * k[g] + beta[g];
                    const vec w = product ? load(L->scratch + i * Q * VW + (g * U + u) * VW)
                                          : (vec){0};
                    if (mode == GRU && g == 2) q += w;
                    else a[g] += w;
                }
                if (mode == GRU) a[0] = sigmoid_(a[0]), a[2] += a[0] * q;
                activate(L, t, r, v, a, q, before, after, mode, 0);
            }
        }
    }
}

/* How a vector of columns is normalised: where its n statistics are written, and those that are
 * used, the batch's or given ones. */
typedef struct {
    float *mean, *var, *used_mean, *used_inv;
    int n;
    vec gamma, beta;
} Normal;

/* Normalise a vector of columns over its rows into y; writes the statistics and the hats. */
INLINE void normalise_rows(const Job *J, int64_t rows, const float *x, int64_t ld, float *y,
                           int64_t ldy, float *hat, int64_t ldh, Normal k) {
    vec mean = {0}, var = {0};
    for (int64_t r = 0; r < rows; r++) mean += load(x + r * ld);
    mean *= splat(1.0f / (float)rows);
    for (int64_t r = 0; r < rows; r++) {
        const vec e = load(x + r * ld) - mean;
        var += e * e;
    }
    var *= splat(1.0f / (float)rows);
    if (k.mean) store_n(k.mean, mean, k.n), store_n(k.var, var, k.n);
    vec inv = rsqrt_(var + splat((float)J->eps));
    if (J->batch && rows > 1) store(k.used_mean, mean), store(k.used_inv, inv);
    else mean = load(k.used_mean), inv = load(k.used_inv);
    for (int64_t r = 0; r < rows; r++) {
        const vec e = (load(x + r * ld) - mean) * inv;
        store(hat + r * ldh, e);
        store(y + r * ldy, e * k.gamma + k.beta);
    }
}

/* Of a column of gates at step t, whose statistics begin `first` after the direction's. */
INLINE Normal normal_of(const ForwardLoop *L, int64_t t, int64_t column_, int64_t first, int64_t stride,
                        vec gamma, vec beta) {
    const Direction *d = L->d;
    int64_t row;
    const int n = lanes_at(gates_of(L->J), column_, &row);
    const int64_t at = t * stride + column_, to = t * L->J->ldc + first + row;
    return (Normal){d->stat_mean ? d->stat_mean + to : NULL,
                    d->stat_mean ? d->stat_var + to : NULL,
                    d->used_mean + at,
                    d->used_inv + at,
                    n,
                    gamma,
                    beta};
}
INLINE void normalise_sums(const ForwardLoop *L, int64_t t, int64_t column_, float *x, int64_t ld,
                           float *hat, int64_t ldh) {
    const vec gamma = load(L->d->scale + column_), beta = load(L->d->shift + column_);
    normalise_rows(L->J, L->J->sizes[t], x, ld, x, ld, hat, ldh,
                   normal_of(L, t, column_, 0, L->width, gamma, beta));
}

INLINE void step_over_rows(const ForwardLoop *L, int64_t t, const float *before, float *after,
                           int product, int G, int U, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int64_t rows = J->sizes[t], Q = G * U, off = J->offsets[t];
    for (int64_t p = L->s.from * 2 / U; p < L->s.to * 2 / U; p++) {
        if (p * U >= L->vectors) break;
        float *sums = L->scratch;
        if (product)
            panel_product(rows, J->H, (int)Q, L->packed + p * J->H * Q * VW, before, L->lanes,
                          sums, Q * VW, 0);
        for (int u = 0; u < U; u++) {
            const int64_t v = p * U + u;
            if (v >= L->vectors) break;
            float *hat = d->hat + (off * L->vectors + v * rows) * G * VW;
            vec bias = {0};
            if (mode == GRU && d->bias_hn)
                bias = load_n(d->bias_hn + v * VW, (int)min64(J->H - v * VW, VW));
            for (int64_t r = 0; r < rows; r++)
                for (int g = 0; g < G; g++) {
                    float *at = sums + r * Q * VW + (g * U + u) * VW;
                    const vec x = load(d->pre + (off + r) * J->ldx + column(v, g, G));
                    const vec w = product ? load(at) : (vec){0};
                    store(at, mode == GRU && g == 2 ? w + bias : x + w);
                }
            const int first = mode == GRU ? 2 : G;
            for (int g = 0; g < first; g++)
                normalise_sums(L, t, column(v, g, G), sums + (g * U + u) * VW, Q * VW,
                               hat + g * VW, G * VW);
            float *q = L->scratch + rows * Q * VW; /* GRU: kept while its sum is normalised */
            if (mode == GRU) {
                for (int64_t r = 0; r < rows; r++) {
                    float *at = sums + r * Q * VW;
                    const vec w = load(at + 2 * VW), gate = sigmoid_(load(at));
                    const vec x = load(d->pre + (off + r) * J->ldx + column(v, 2, G));
                    store(q + r * VW, w), store(at, gate), store(at + 2 * VW, x + gate * w);
                }
                normalise_sums(L, t, column(v, 2, G), sums + 2 * VW, Q * VW, hat + 2 * VW, G * VW);
            }
            for (int64_t r = 0; r < rows; r++) {
                vec a[4];
                for (int g = 0; g < G; g++) a[g] = load(sums + r * Q * VW + (g * U + u) * VW);
                const vec w = mode == GRU ? load(q + r * VW) : (vec){0};
                activate(L, t, r, v, a, w, before, after, mode, 0);
            }
        }
    }
}

/* Floats of the statistics that a step uses: of the gates, then of the cells. */
INLINE int64_t products_stride(int64_t width, int64_t vectors) { return width + vectors * VW; }

INLINE void step_products(const ForwardLoop *L, int64_t t, const float *before, float *after, int product,
                          int G, int U, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int cell = mode == LSTM && d->gamma_c != NULL, keep = trace_vectors(mode, cell) * VW;
    const int64_t rows = J->sizes[t], Q = G * U, off = J->offsets[t], C = G * J->H;
    const int64_t stride = products_stride(L->width, L->vectors);
    const float *mean = d->mean + t * L->width, *scale = d->scale + t * L->width;
    float *sums = L->scratch;
    for (int64_t p = L->s.from * 2 / U; p < L->s.to * 2 / U; p++) {
        if (p * U >= L->vectors) break;
        if (product)
            panel_product(rows, J->H, (int)Q, L->packed + p * J->H * Q * VW, before, L->lanes,
                          sums, Q * VW, 0);
        else memset(sums, 0, (size_t)(rows * Q * VW) * 4);
        for (int u = 0; u < U; u++) {
            const int64_t v = p * U + u;
            if (v >= L->vectors) break;
            const int n = (int)min64(J->H - v * VW, VW);
            float *hat = d->hat + (off * L->vectors + v * rows) * G * VW;
            vec m[4], k[4], beta[4], bias = {0};
            for (int g = 0; g < G; g++) {
                const int64_t at = column(v, g, G);
                float *w = sums + (g * U + u) * VW;
                m[g] = load(mean + at), k[g] = load(scale + at), beta[g] = load(d->shift + at);
                normalise_rows(J, rows, w, Q * VW, w, Q * VW, hat + g * VW, G * VW,
                               normal_of(L, t, at, C, stride, load(d->gamma_h + at), (vec){0}));
            }
            if (mode == GRU && d->bias_hn) bias = load_n(d->bias_hn + v * VW, n);
            for (int64_t r = 0; r < rows; r++) {
                const float *x = d->pre + (off + r) * J->ldx + column(v, 0, G);
                vec a[4], q = bias;
                for (int g = 0; g < G; g++) {
                    const vec w = load(sums + r * Q * VW + (g * U + u) * VW);
                    a[g] = (load(x + g * VW) - m[g]) * k[g] + beta[g];
                    if (mode == GRU && g == 2) q += w;
                    else a[g] += w;
                }
                if (mode == GRU) a[0] = sigmoid_(a[0]), a[2] += a[0] * q;
                activate(L, t, r, v, a, q, before, after, mode, cell);
            }
            if (!cell) continue;
            float *trace = d->trace + (off * L->vectors + v * rows) * keep;
            const int64_t to = t * J->ldc + 2 * C + v * VW, at = t * stride + L->width + v * VW;
            const Normal how = {d->stat_mean ? d->stat_mean + to : NULL,
                                d->stat_mean ? d->stat_var + to : NULL,
                                d->used_mean + at,
                                d->used_inv + at,
                                n,
                                load_n(d->gamma_c + v * VW, n),
                                d->beta_c ? load_n(d->beta_c + v * VW, n) : (vec){0}};
            normalise_rows(J, rows, L->c + v * VW, L->lanes, trace + 5 * VW, keep,
                           trace + 6 * VW, keep, how);
            for (int64_t r = 0; r < rows; r++, trace += keep) {
                const vec tc = tanh_(load(trace + 5 * VW)), o = load(trace + 3 * VW);
                store(trace + 5 * VW, tc);
                write_state(L, t, r, v, o * tc, load(L->c + r * L->lanes + v * VW),
                        load(trace + 4 * VW), before, after, mode);
            }
        }
    }
}

/* Mean and 1/σ over the features of a row in packed order, without the padding after the H units of
 * each gate. */
INLINE void row_statistics(const float *x, int64_t vectors, int G, int64_t H, float eps,
                           float *mean, float *inv) {
    vec s = {0}, q = {0};
    for (int64_t c = 0; c < vectors * G; c++) s += load(x + c * VW); /* padding holds 0 */
    const float n = (float)(G * H), m = sum_lanes(s) / n;
    const int tail = (int)(H - (vectors - 1) * VW);
    vec exists;
    for (int l = 0; l < VW; l++) exists[l] = l < tail ? 1.0f : 0.0f;
    for (int64_t c = 0; c < (vectors - 1) * G; c++) {
        const vec e = load(x + c * VW) - splat(m);
        q += e * e;
    }
    for (int64_t c = (vectors - 1) * G; c < vectors * G; c++) {
        const vec e = (load(x + c * VW) - splat(m)) * exists;
        q += e * e;
    }
    *mean = m, *inv = 1.0f / sqrtf(sum_lanes(q) / n + eps);
}

/* The thread has whole rows: threads split rows, or there is one per direction. */
INLINE void step_over_features(const ForwardLoop *L, int64_t t, const float *before, float *after,
                               int product, int G, int U, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const Share s = L->s;
    const int cell = mode == LSTM && d->gamma_c != NULL, keep = trace_vectors(mode, cell) * VW;
    const int64_t rows = rows_of(s, J->sizes[t]), off = J->offsets[t], b = J->sizes[t];
    const int64_t ld = padded_stride(L->width), Q = G * U;
    if (product)
        for (int64_t p = 0; p * U < L->vectors; p++)
            panel_product(rows, J->H, (int)Q, L->packed + p * J->H * Q * VW,
                          before + s.row0 * L->lanes, s.stride * L->lanes,
                          L->scratch + p * Q * VW, ld, 0);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = s.row0 + i * s.stride;
        const float *w = L->scratch + i * ld;
        float m = 0, inv = 1.0f / sqrtf((float)J->eps);
        if (product) row_statistics(w, L->vectors, G, J->H, (float)J->eps, &m, &inv);
        d->inv[off + r] = inv;
        const vec mx = splat(d->row_mean[off + r]), kx = splat(d->row_scale[off + r]);
        for (int64_t v = 0; v < L->vectors; v++) {
            const float *x = d->pre + (off + r) * J->ldx + column(v, 0, G);
            float *hat = d->hat + ((off * L->vectors + v * b) + r) * G * VW;
            vec a[4], q = {0};
            const int n = (int)min64(J->H - v * VW, VW);
            for (int g = 0; g < G; g++) {
                const int64_t at = column(v, g, G);
                const vec e = product ? (load(w + at) - splat(m)) * splat(inv) : (vec){0};
                store(hat + g * VW, e);
                const vec y = e * load(d->gamma_h + at);
                a[g] = (load(x + g * VW) - mx) * kx * load(d->scale + at) + load(d->shift + at);
                if (mode == GRU && g == 2) q = y;
                else a[g] += y;
            }
            if (mode == GRU) {
                if (d->bias_hn) q += load_n(d->bias_hn + v * VW, n);
                a[0] = sigmoid_(a[0]), a[2] += a[0] * q;
            }
            activate(L, t, r, v, a, q, before, after, mode, cell);
        }
        if (!cell) continue;
        float mc, ic;
        row_statistics(L->c + r * L->lanes, L->vectors, 1, J->H, (float)J->eps, &mc, &ic);
        d->inv[J->N + off + r] = ic;
        for (int64_t v = 0; v < L->vectors; v++) {
            const int n = (int)min64(J->H - v * VW, VW);
            float *trace = d->trace + ((off * L->vectors + v * b) + r) * keep;
            const vec c = load(L->c + r * L->lanes + v * VW), e = (c - splat(mc)) * splat(ic);
            vec y = e * load_n(d->gamma_c + v * VW, n);
            if (d->beta_c) y += load_n(d->beta_c + v * VW, n);
            const vec tc = tanh_(y);
            store(trace + 5 * VW, tc), store(trace + 6 * VW, e);
            write_state(L, t, r, v, load(trace + 3 * VW) * tc, c, load(trace + 4 * VW), before, after,
                    mode);
        }
    }
}

INLINE void forward_loop(ForwardLoop *L, Barrier *barrier, int G, int U, int mode, int inner) {
    const Job *J = L->J;
    for (int64_t s = 0; s < J->T; s++) {
        const int64_t t = L->d->reverse ? J->T - 1 - s : s;
        const float *before = L->h[s & 1];
        float *after = L->h[~s & 1];
        const int product = s > 0 || L->d->h0 != NULL;
        if (inner == NO_NORM) step_no_norm(L, t, before, after, product, G, U, mode);
        else if (inner == OVER_ROWS) step_over_rows(L, t, before, after, product, G, U, mode);
        else if (inner == PRODUCTS) step_products(L, t, before, after, product, G, U, mode);
        else step_over_features(L, t, before, after, product, G, U, mode);
        barrier_wait(barrier, L->s.team);
    }
}

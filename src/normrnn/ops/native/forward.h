/* The time loop of the forward pass. `mode` and `inner` are compile-time constants: everything here
 * is inlined into a loop for each pair of them. For the backward pass the *trace* keeps, as
 * [step][vector of units][row], these vectors: LSTM i f g o c₋ tanh(c); GRU r z n q h₋, LIGRU z n h₋
 * (₋: before the step, q: W_hn h + b); RNN h; with a normalised cell also its *hat*, (c − mean)/σ. */

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
    const int n = units_in(H, v);
    const int64_t row = J->offsets[t] + r;
    if (d->zoneout_h.at) h = apply_zoneout(d->zoneout_h, row, v, n, load(before + at), h);
    if (mode == LSTM && d->zoneout_c.at) c = apply_zoneout(d->zoneout_c, row, v, n, c0, c);
    store_n(d->out + row * J->ldo + v * VW, h, n);
    if (is_last(J, d, t, r)) {
        store_n(d->hn + r * H + v * VW, h, n);
        if (mode == LSTM) store_n(d->cn + r * H + v * VW, c, n);
    } else if (is_reset(J, d->reverse ? t : t + 1, r)) {
        h = d->reset_h ? load_n(d->reset_h + r * H + v * VW, n) : (vec){0};
        c = d->reset_c ? load_n(d->reset_c + r * H + v * VW, n) : (vec){0};
    }
    store(after + at, h);
    if (mode == LSTM) store(L->c + at, c);
}

/* Panel p of the product of the states of the thread's rows with W_h. */
INLINE void recurrent_product(const ForwardLoop *L, int64_t p, Gates o, const float *before,
                              int64_t rows, float *to, int64_t ld) {
    const int64_t H = L->J->H;
    panel_product(rows, matrix(before + L->s.row0 * L->lanes, L->s.stride * L->lanes, H),
                  panel_vectors(o, p), L->packed + p * H * panel_width(o), to, ld, 0);
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
        const int n = units_in(J->H, v);
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
    } else if (mode == LIGRU) {
        const vec h0 = load(before + at), z = sigmoid_(a[0]), n = relu_(a[1]);
        store(trace, z), store(trace + VW, n), store(trace + 2 * VW, h0);
        write_state(L, t, r, v, n + z * (h0 - n), (vec){0}, (vec){0}, before, after, mode);
    } else {
        const vec h = mode == RNN_RELU ? relu_(a[0]) : tanh_(a[0]);
        store(trace, h);
        write_state(L, t, r, v, h, (vec){0}, (vec){0}, before, after, mode);
    }
}

/* Vector v of units at a step: n units, whose first gate is packed column `first`. */
typedef struct {
    int n;
    int64_t v, first, ld;
    float *sums, *hat; /* of the recurrent product (rows, ld), which OVER_ROWS adds W_x x to */
    Columns pre;       /* from the step's first row on */
} Units;

/* How a vector of columns is normalised: where its n statistics are written, and those that are
 * used, the batch's or given ones. */
typedef struct {
    float *mean, *var, *used_mean, *used_inv;
    int n;
    vec gamma, beta;
} Normal;
/* Of n columns at step t: their statistics are row `row` of the direction's, and what is used
 * begins at `used`. */
INLINE Normal normal_of(const ForwardLoop *L, int64_t t, int64_t row, int64_t used, int n,
                        vec gamma, vec beta) {
    const Direction *d = L->d;
    const int64_t to = t * L->J->ldc + row;
    return (Normal){AT(d->stat_mean, to), AT(d->stat_var, to), d->used_mean + used,
                    d->used_inv + used, n, gamma, beta};
}

/* Mean and Σ (x − mean)² of n columns over a few rows, in two passes. */
INLINE void two_pass_moments(const float *x, int64_t ld, int64_t rows, int n, vec *mean,
                             vec *squares) {
    vec m = {0}, s = {0};
    for (int64_t r = 0; r < rows; r++) m += load_n(x + r * ld, n);
    m *= splat(1.0f / (float)rows);
    for (int64_t r = 0; r < rows; r++) {
        const vec e = load_n(x + r * ld, n) - m;
        s += e * e;
    }
    *mean = m, *squares = s;
}
/* Normalise a vector of columns over its rows into y; writes the statistics and the hats. */
INLINE void normalise_rows(const Job *J, int64_t rows, const float *x, int64_t ld, float *y,
                           int64_t ldy, float *hat, int64_t ldh, Normal k) {
    if (J->batch) {
        vec mean, var;
        two_pass_moments(x, ld, rows, k.n, &mean, &var);
        var *= splat(1.0f / (float)rows);
        store_n(k.mean, mean, k.n), store_n(k.var, var, k.n);
        if (rows > 1) {
            store_n(k.used_mean, mean, k.n);
            store_n(k.used_inv, rsqrt_(var + splat((float)J->eps)), k.n);
        }
    }
    const vec mean = load_n(k.used_mean, k.n), inv = load_n(k.used_inv, k.n);
    for (int64_t r = 0; r < rows; r++) {
        const vec e = (load_n(x + r * ld, k.n) - mean) * inv;
        store(hat + r * ldh, e);
        store_n(y + r * ldy, e * k.gamma + k.beta, k.n);
    }
}
/* Floats of the statistics that a step uses: of the gates, then of the cells. */
INLINE int64_t products_stride(int64_t width, int64_t vectors) { return width + vectors * VW; }

/* Gate g of the units, in place: of the sums, or of the recurrent product. */
INLINE void normalise_gate(const ForwardLoop *L, int64_t t, Units u, int g, int G, int inner) {
    const Direction *d = L->d;
    const int64_t H = L->J->H, c = u.first + g * u.n, row = g * H + u.v * VW;
    float *x = u.sums + g * u.n;
    Normal k;
    if (inner == OVER_ROWS)
        k = normal_of(L, t, row, t * L->width + c, u.n, load_n(d->scale + c, u.n),
                      load_n(d->shift + c, u.n));
    else
        k = normal_of(L, t, G * H + row, t * products_stride(L->width, L->vectors) + c, u.n,
                      load_n(d->gamma_h + c, u.n), (vec){0});
    normalise_rows(L->J, L->J->sizes[t], x, u.ld, x, u.ld, u.hat + g * VW, G * VW, k);
}

/* OVER_ROWS: add gate inputs and normalise; the GRU's candidate last, as r is inside its sum. */
INLINE void normalise_sums(const ForwardLoop *L, int64_t t, Units u, vec bias, int mode) {
    const int64_t rows = L->J->sizes[t], ld = u.pre.ld;
    const int G = gates(L->J->H, mode).G, n = u.n;
    float *q = L->scratch + rows * u.ld; /* GRU: kept while its sum is normalised */
    for (int64_t r = 0; r < rows; r++)
        for (int g = 0; g < G; g++) {
            float *at = u.sums + r * u.ld + g * n;
            const vec more = mode == GRU && g == 2 ? bias : load_n(u.pre.at + r * ld + g * n, n);
            store_n(at, load_n(at, n) + more, n);
        }
    for (int g = 0; g < (mode == GRU ? 2 : G); g++) normalise_gate(L, t, u, g, G, OVER_ROWS);
    if (mode != GRU) return;
    for (int64_t r = 0; r < rows; r++) {
        float *at = u.sums + r * u.ld;
        const vec y = load_n(at + 2 * n, n), gate = sigmoid_(load_n(at, n));
        store(q + r * VW, y), store_n(at, gate, n);
        store_n(at + 2 * n, load_n(u.pre.at + r * ld + 2 * n, n) + gate * y, n);
    }
    normalise_gate(L, t, u, 2, G, OVER_ROWS);
}

/* The thread's rows of a vector of units, from sums to states. */
INLINE void activate_units(const ForwardLoop *L, int64_t t, Units u, vec bias, const float *before,
                           float *after, int mode, int inner, int cell) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const Share s = L->s;
    const int G = gates(J->H, mode).G, n = u.n;
    const int64_t next = d->reverse ? t - 1 : t + 1, slot = J->per_step ? t * L->width : 0;
    const int64_t ahead = next >= 0 && next < J->T ? J->offsets[next] - J->offsets[t] : 0;
    const int64_t rows = rows_of(s, J->sizes[t]);
    vec m[4], k[4], beta[4];
    for (int g = 0; g < G; g++) {
        const int64_t c = u.first + g * n;
        m[g] = load_n(d->mean + slot + c, n), k[g] = load_n(d->scale + slot + c, n);
        beta[g] = load_n(d->shift + c, n);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = s.row0 + i * s.stride;
        const float *x = u.pre.at + r * u.pre.ld, *y = u.sums + i * u.ld;
        vec a[4], q = bias;
        for (int g = 0; g < G; g++) {
            __builtin_prefetch(x + ahead * u.pre.ld + g * n, 0, 2);
            a[g] = load_n(y + g * n, n);
            if (inner == OVER_ROWS) continue;
            if (mode == GRU && g == 2) q += a[g], a[g] = (vec){0};
            a[g] += (load_n(x + g * n, n) - m[g]) * k[g] + beta[g];
        }
        if (mode == GRU && inner == OVER_ROWS) q = load(L->scratch + rows * u.ld + i * VW);
        else if (mode == GRU) a[0] = sigmoid_(a[0]), a[2] += a[0] * q;
        activate(L, t, r, u.v, a, q, before, after, mode, cell);
    }
}

/* PRODUCTS: normalise the cells of a vector of units over the rows, then write the states. */
INLINE void normalise_cells(const ForwardLoop *L, int64_t t, Units u, const float *before,
                            float *after, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int64_t rows = J->sizes[t], v = u.v, keep = trace_vectors(mode, 1) * VW;
    const int64_t used = t * products_stride(L->width, L->vectors) + L->width + v * VW;
    float *trace = d->trace + (J->offsets[t] * L->vectors + v * rows) * keep;
    const vec shift = d->beta_c ? load_n(d->beta_c + v * VW, u.n) : (vec){0};
    normalise_rows(J, rows, L->c + v * VW, L->lanes, trace + 5 * VW, keep, trace + 6 * VW, keep,
                   normal_of(L, t, 2 * gates(J->H, mode).G * J->H + v * VW, used, u.n,
                             load_n(d->gamma_c + v * VW, u.n), shift));
    for (int64_t r = 0; r < rows; r++, trace += keep) {
        const vec tc = tanh_(load_n(trace + 5 * VW, u.n)), out = load(trace + 3 * VW);
        store(trace + 5 * VW, tc);
        write_state(L, t, r, v, out * tc, load(L->c + r * L->lanes + v * VW), load(trace + 4 * VW),
                    before, after, mode);
    }
}

INLINE void step_by_units(const ForwardLoop *L, int64_t t, const float *before, float *after,
                          int product, int mode, int inner) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const Gates o = gates(J->H, mode);
    const int cell = inner == PRODUCTS && mode == LSTM && d->gamma_c != NULL;
    const int64_t b = J->sizes[t], rows = rows_of(L->s, b), off = J->offsets[t];
    for (int64_t p = L->s.from * 2 / o.U; p < L->s.to * 2 / o.U && p < panels(o); p++) {
        Units u = {.ld = panel_vectors(o, p) * VW};
        if (product) recurrent_product(L, p, o, before, rows, L->scratch, u.ld);
        else memset(L->scratch, 0, (size_t)(rows * u.ld) * 4);
        for (u.v = p * o.U; u.v < (p + 1) * o.U && u.v < L->vectors; u.v++) {
            u.n = units_in(J->H, u.v), u.first = column(J->H, u.v, 0, o.G);
            u.sums = L->scratch + (u.v - p * o.U) * VW;
            u.pre = columns_at(J, o, d->pre, u.first), u.pre.at += off * u.pre.ld;
            vec bias = {0};
            if (mode == GRU && d->bias_hn) bias = load_n(d->bias_hn + u.v * VW, u.n);
            if (inner != NO_NORM) u.hat = d->hat + (off * L->vectors + u.v * b) * o.G * VW;
            if (inner == OVER_ROWS) normalise_sums(L, t, u, bias, mode);
            for (int g = 0; g < o.G && inner == PRODUCTS; g++)
                normalise_gate(L, t, u, g, o.G, PRODUCTS);
            activate_units(L, t, u, bias, before, after, mode, inner, cell);
            if (cell) normalise_cells(L, t, u, before, after, mode);
        }
    }
}

/* Σ (x − m)² of n lanes. */
INLINE vec squares_of(const float *x, float m, int n) {
    const vec e = first_lanes(load_n(x, n) - splat(m), n);
    return e * e;
}
/* Mean and 1/σ of n numbers; mean 0 if they are not centred. */
INLINE void row_statistics(const Job *J, const float *x, int64_t n, float *mean, float *inv) {
    vec s = {0}, q = {0};
    for (int64_t c = 0; c < n && J->centres; c += VW) s += load_n(x + c, units_in(n, c / VW));
    const float m = sum_lanes(s) / (float)n;
    for (int64_t c = 0; c < n; c += VW) q += squares_of(x + c, m, units_in(n, c / VW));
    *mean = m, *inv = 1.0f / sqrtf(sum_lanes(q) / (float)n + (float)J->eps);
}

/* The thread has whole rows: threads split rows, or there is one per direction. */
INLINE void step_over_features(const ForwardLoop *L, int64_t t, const float *before, float *after,
                               int product, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const Gates o = gates(J->H, mode);
    const int G = o.G, U = o.U;
    const Share s = L->s;
    const int cell = mode == LSTM && d->gamma_c != NULL, keep = trace_vectors(mode, cell) * VW;
    const int64_t rows = rows_of(s, J->sizes[t]), off = J->offsets[t], b = J->sizes[t];
    const int64_t ld = padded_stride(L->width);
    float *means = L->scratch + J->B * ld; /* of the product or the cell, (rows) */
    for (int64_t p = 0; product && p * U < L->vectors; p++)
        recurrent_product(L, p, o, before, rows, L->scratch + p * panel_width(o), ld);
    for (int64_t i = 0; i < rows; i++) {
        float *inv = &d->inv[off + s.row0 + i * s.stride];
        means[i] = 0, *inv = 1.0f / sqrtf((float)J->eps);
        if (product) row_statistics(J, L->scratch + i * ld, G * J->H, &means[i], inv);
    }
    for (int64_t v = 0; v < L->vectors; v++) {
        const int64_t first = column(J->H, v, 0, G);
        const int n = units_in(J->H, v);
        const Columns pre = columns_at(J, o, d->pre, first);
        const vec bias = mode == GRU && d->bias_hn ? load_n(d->bias_hn + v * VW, n) : (vec){0};
        vec gamma[4], scale[4], shift[4];
        for (int g = 0; g < G; g++) {
            gamma[g] = load_n(d->gamma_h + first + g * n, n);
            scale[g] = load_n(d->scale + first + g * n, n);
            shift[g] = load_n(d->shift + first + g * n, n);
        }
        for (int64_t i = 0; i < rows; i++) {
            const int64_t r = s.row0 + i * s.stride;
            const float *x = pre.at + (off + r) * pre.ld, *w = L->scratch + i * ld + first;
            float *hat = d->hat + ((off * L->vectors + v * b) + r) * G * VW;
            const vec m = splat(means[i]), inv = splat(d->inv[off + r]);
            const vec mx = splat(d->row_mean[off + r]), kx = splat(d->row_scale[off + r]);
            vec a[4], q = bias;
            for (int g = 0; g < G; g++) {
                const vec e = product ? (load_n(w + g * n, n) - m) * inv : (vec){0};
                store(hat + g * VW, e);
                a[g] = (load_n(x + g * n, n) - mx) * kx * scale[g] + shift[g];
                if (mode == GRU && g == 2) q += e * gamma[g];
                else a[g] += e * gamma[g];
            }
            if (mode == GRU) a[0] = sigmoid_(a[0]), a[2] += a[0] * q;
            activate(L, t, r, v, a, q, before, after, mode, cell);
        }
    }
    for (int64_t i = 0; i < rows && cell; i++) {
        const int64_t r = s.row0 + i * s.stride;
        row_statistics(J, L->c + r * L->lanes, J->H, &means[i], &d->inv[J->N + off + r]);
    }
    for (int64_t v = 0; v < L->vectors && cell; v++) {
        const int n = units_in(J->H, v);
        const vec gamma = load_n(d->gamma_c + v * VW, n);
        const vec beta = d->beta_c ? load_n(d->beta_c + v * VW, n) : (vec){0};
        for (int64_t i = 0; i < rows; i++) {
            const int64_t r = s.row0 + i * s.stride;
            float *trace = d->trace + ((off * L->vectors + v * b) + r) * keep;
            const vec c = load(L->c + r * L->lanes + v * VW);
            const vec e = (c - splat(means[i])) * splat(d->inv[J->N + off + r]);
            const vec tc = tanh_(e * gamma + beta);
            store(trace + 5 * VW, tc), store(trace + 6 * VW, e);
            write_state(L, t, r, v, load(trace + 3 * VW) * tc, c, load(trace + 4 * VW), before,
                        after, mode);
        }
    }
}

INLINE void forward_loop(ForwardLoop *L, Barrier *barrier, int mode, int inner) {
    const Job *J = L->J;
    for (int64_t s = 0; s < J->T; s++) {
        const int64_t t = L->d->reverse ? J->T - 1 - s : s;
        const float *before = L->h[s & 1];
        float *after = L->h[~s & 1];
        const int product = s > 0 || L->d->h0 || L->d->reset_h;
        if (inner == OVER_FEATURES) step_over_features(L, t, before, after, product, mode);
        else step_by_units(L, t, before, after, product, mode, inner);
        barrier_wait(barrier, L->s.team);
    }
}

/* The time loop of the backward pass, from the last step to the first. It writes two gate buffers:
 * dx, the gradient of W_x x, and dp, that of W_h h; they are one where both are equal. A step begins
 * with dp W_h of the step done before it, so threads that split units wait once a step. */

typedef struct {
    const Job *J;
    const Direction *d;
    Share s;
    int64_t vectors, width, lanes;
    float *carried; /* (B, lanes): dL/dc of the LSTM, the direct part of dL/dh of GRU and LIGRU */
    float *zoneout_carried; /* (B, lanes) or NULL: dL/dh that zoneout passes to the previous h */
    float *packed, *scratch, *sums;
    double *totals; /* sums over many rows are in double */
} BackwardLoop;

/* Offsets of the sums over rows: of d, of d·x, and of those that belong to units. */
INLINE int64_t sum_floats(const BackwardLoop *L) { return 2 * L->width + UNIT_SUMS * L->lanes; }
INLINE float *sum_d(const BackwardLoop *L) { return L->sums; }
INLINE float *sum_x(const BackwardLoop *L) { return L->sums + L->width; }
INLINE void add_to(float *at, vec x, int n) { store_n(at, load_n(at, n) + x, n); }
INLINE void add_unit(const BackwardLoop *L, int which, int64_t v, vec x) {
    add_to(L->sums + 2 * L->width + which * L->lanes + v * VW, x, VW);
}

/* dL/dh of a row and vector of units from the output, and from the final state where a sequence
 * ends. */
INLINE vec output_gradient(const BackwardLoop *L, int64_t t, int64_t r, int64_t v) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int n = units_in(J->H, v);
    vec dh = {0};
    if (d->dout) dh += load_n(d->dout + (J->offsets[t] + r) * J->ldo + v * VW, n);
    if (d->dhn && is_last(J, d, t, r)) dh += load_n(d->dhn + r * J->H + v * VW, n);
    return dh;
}

/* The gradient dy[G] of the inputs of the non-linearities, from dh and the trace. Stores what the
 * previous state receives without a product. *dq is the GRU's, `dc_more` a normalised cell's. */
INLINE void gate_gradients(const BackwardLoop *L, int64_t t, int64_t r, int64_t v, vec dh, int cut,
                           vec *dy, vec *dq, vec dc_more, int mode, int cell) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int64_t b = J->sizes[t], at = r * L->lanes + v * VW;
    const int keep = trace_vectors(mode, cell) * VW;
    const float *trace = d->trace + ((J->offsets[t] * L->vectors + v * b) + r) * keep;
    const vec one = splat(1.0f);
    if (mode == LSTM) {
        const vec i = load(trace), f = load(trace + VW), g = load(trace + 2 * VW);
        const vec o = load(trace + 3 * VW), c0 = load(trace + 4 * VW), tc = load(trace + 5 * VW);
        const int n = units_in(J->H, v);
        const vec dho = dh * o, d_o = dho * tc * (one - o);
        vec dc = load(L->carried + at), stays = {0};
        if (cut && d->d_reset_c) add_to(d->d_reset_c + r * J->H + v * VW, dc, n);
        if (cut) dc = (vec){0};
        if (d->zoneout_c.at)
            dc = zoneout_backward(d->zoneout_c, J->offsets[t] + r, v, n, dc, &stays);
        dc += cell ? dc_more : dho * (one - tc * tc);
        if (d->peephole[2]) {
            dc += d_o * load_n(d->peephole[2] + v * VW, n);
            add_unit(L, PEEP_O, v, d_o * (f * c0 + i * g));
        }
        const vec dci = dc * i, dcf = dc * f;
        const vec di = dci * g * (one - i), df = dcf * c0 * (one - f);
        vec back = dcf + stays;
        for (int k = 0; k < 2; k++) /* of the input and forget gates */
            if (d->peephole[k]) {
                back += (k ? df : di) * load_n(d->peephole[k] + v * VW, n);
                add_unit(L, PEEP_I + k, v, (k ? df : di) * c0);
            }
        store(L->carried + at, back);
        dy[0] = di, dy[1] = df, dy[2] = dci * (one - g * g), dy[3] = d_o;
    } else if (mode == GRU) {
        const vec rr = load(trace), z = load(trace + VW), n = load(trace + 2 * VW);
        const vec q = load(trace + 3 * VW), h0 = load(trace + 4 * VW);
        dy[2] = dh * (one - z) * (one - n * n);
        dy[1] = dh * (h0 - n) * z * (one - z);
        dy[0] = q * rr * (one - rr); /* times the gradient of the candidate's sum */
        *dq = rr;
        store(L->carried + at, dh * z);
    } else if (mode == LIGRU) {
        const vec z = load(trace), n = load(trace + VW), h0 = load(trace + 2 * VW);
        dy[0] = dh * (h0 - n) * z * (one - z);
        dy[1] = select_lanes(n <= splat(0.0f), (vec){0}, dh * (one - z));
        store(L->carried + at, dh * z);
    } else {
        const vec h = load(trace);
        dy[0] = mode == RNN_RELU ? select_lanes(h <= splat(0.0f), (vec){0}, dh)
                                 : dh * (one - h * h);
    }
}

/* Rows that had products in the step just done, and those of them that this step takes. */
typedef struct {
    int64_t t, rows, done, have;
    int64_t from; /* this thread's first row of that step */
} StepRows;

INLINE int is_state_reset(const BackwardLoop *L, const StepRows *f, int64_t r) {
    if (r >= f->have) return 0; /* a sequence ends here: dL/dcn is carried */
    return is_reset(L->J, L->d->reverse ? f->t : f->t + 1, r);
}

/* dL/dh that the step just done passes to the state before it. */
INLINE vec passed_gradient(const BackwardLoop *L, int64_t i, int64_t r, int64_t v, int mode) {
    const int64_t at = r * L->lanes + v * VW;
    vec dh = load(L->scratch + i * BLOCK + v % 2 * VW);
    if (carries_state(mode)) dh += load(L->carried + at);
    if (L->zoneout_carried) dh += load(L->zoneout_carried + at);
    return dh;
}

/* dp W_h of the step just done for a block of units: into scratch, or where its state began to dh0
 * or the state of a reset. */
INLINE void block_product(const BackwardLoop *L, const StepRows *f, int64_t block) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int Q = block_vectors(J->H, block);
    const int64_t rows = rows_of(L->s, d->dh0 || d->d_reset_h ? f->done : f->have);
    if (!rows) return;
    gate_product(J, d->dp, f->from, L->s.stride, rows, Q,
                 L->packed + block * gates_of(J).G * J->H * BLOCK, L->scratch, BLOCK, 0);
    for (int64_t i = rows_of(L->s, f->have); i < rows; i++)
        for (int q = 0; q < Q; q++) {
            const int64_t r = L->s.row0 + i * L->s.stride, v = block * 2 + q;
            const int n = units_in(J->H, v), cut = !d->reverse && is_reset(J, 0, r);
            const int64_t at = r * J->H + v * VW;
            const vec dh = passed_gradient(L, i, r, v, (int)J->mode);
            if (d->dh0) store_n(d->dh0 + at, cut ? (vec){0} : dh, n);
            if (cut && d->d_reset_h) add_to(d->d_reset_h + at, dh, n);
        }
}

/* dL/dh of a step, without the part that zoneout passes to the previous h. */
INLINE vec hidden_gradient(const BackwardLoop *L, const StepRows *f, int64_t i, int64_t r,
                           int64_t v, int cut, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int64_t at = r * L->lanes + v * VW;
    const int n = units_in(J->H, v);
    vec dh = output_gradient(L, f->t, r, v);
    if (r < f->have) {
        const vec passed = passed_gradient(L, i, r, v, mode);
        if (!cut) dh += passed;
        else if (d->d_reset_h) add_to(d->d_reset_h + r * J->H + v * VW, passed, n);
    }
    if (L->zoneout_carried) {
        vec stays;
        dh = zoneout_backward(d->zoneout_h, J->offsets[f->t] + r, v, n, dh, &stays);
        store(L->zoneout_carried + at, stays);
    }
    return dh;
}

/* What a step of the backward pass reads and writes of vector v of units: n units, whose first
 * gate is packed column `first`, and its columns of gate buffers from the step's first row on. */
typedef struct {
    int n;
    int64_t v, first;
    Columns pre, dx, dp;
} StepUnits;
INLINE StepUnits step_units(const BackwardLoop *L, const StepRows *f, int64_t v, int mode) {
    const Job *J = L->J;
    const Gates o = gates(J->H, mode);
    const int64_t c = column(J->H, v, 0, o.G);
    StepUnits u = {units_in(J->H, v), v, c, columns_at(J, o, L->d->pre, c),
                   columns_at(J, o, L->d->dx, c), columns_at(J, o, L->d->dp, c)};
    const int64_t skip = f->t < 0 ? 0 : J->offsets[f->t] * u.dx.ld;
    u.pre.at += skip, u.dx.at += skip, u.dp.at += skip;
    return u;
}

INLINE void prefetch_step(const BackwardLoop *L, const StepRows *f, int64_t r, StepUnits u, int G) {
    const Job *J = L->J;
    const int64_t next = L->d->reverse ? f->t + 1 : f->t - 1;
    if (next < 0 || next >= J->T) return;
    const int64_t row = J->offsets[next] + r;
    if (L->d->dout) __builtin_prefetch(L->d->dout + row * J->ldo + u.v * VW, 0, 2);
    if (J->outer == COLUMNS)
        for (int g = 0; g < G; g++)
            __builtin_prefetch(u.pre.at + (row - J->offsets[f->t]) * u.pre.ld + g * VW, 0, 2);
}

INLINE void backward_no_norm(const BackwardLoop *L, const StepRows *f, StepUnits u, int mode) {
    const Job *J = L->J;
    const int G = gates(J->H, mode).G, has_sums = J->outer == COLUMNS && !J->per_step, n = u.n;
    const int64_t rows = rows_of(L->s, f->rows);
    vec sd[4], sx[4], m[4];
    for (int g = 0; g < G; g++) {
        const int64_t c = u.first + g * n;
        sd[g] = load_n(sum_d(L) + c, n), sx[g] = load_n(sum_x(L) + c, n);
        m[g] = load_n(L->d->mean + c, n);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = L->s.row0 + i * L->s.stride;
        const int cut = is_state_reset(L, f, r);
        prefetch_step(L, f, r, u, G);
        vec dy[4], dq;
        const vec dh = hidden_gradient(L, f, i, r, u.v, cut, mode);
        gate_gradients(L, f->t, r, u.v, dh, cut, dy, &dq, (vec){0}, mode, 0);
        if (mode == GRU) {
            float *dp = u.dp.at + r * u.dp.ld;
            dy[0] *= dy[2], dq *= dy[2];
            store_n(dp, dy[0], n), store_n(dp + n, dy[1], n), store_n(dp + 2 * n, dq, n);
            add_unit(L, BIAS_HN, u.v, dq);
        }
        for (int g = 0; g < G; g++) {
            store_n(u.dx.at + r * u.dx.ld + g * n, dy[g], n);
            sd[g] += dy[g];
            if (has_sums) sx[g] += dy[g] * (load_n(u.pre.at + r * u.pre.ld + g * n, n) - m[g]);
        }
    }
    for (int g = 0; g < G; g++) {
        store_n(sum_d(L) + u.first + g * n, sd[g], n);
        store_n(sum_x(L) + u.first + g * n, sx[g], n);
    }
}

/* Backward pass of n normalised columns from packed column c on, over the rows of a step, in place;
 * k is γ/σ. */
INLINE void column_backward(const BackwardLoop *L, int64_t t, int64_t c, int n, float *dy,
                            int64_t ld, const float *hat, int64_t ldh, vec k) {
    const Job *J = L->J;
    const int64_t rows = J->sizes[t];
    vec sd = {0}, sx = {0};
    for (int64_t r = 0; r < rows; r++) {
        const vec y = load_n(dy + r * ld, n);
        sd += y, sx += y * load(hat + r * ldh);
    }
    add_to(sum_d(L) + c, sd, n), add_to(sum_x(L) + c, sx, n);
    const float share = J->batch && rows > 1 ? 1.0f / (float)rows : 0.0f;
    sd *= splat(share), sx *= splat(share);
    for (int64_t r = 0; r < rows; r++) {
        const vec y = load_n(dy + r * ld, n);
        store_n(dy + r * ld, share > 0 ? (y - sd - load(hat + r * ldh) * sx) * k : y * k, n);
    }
}

/* dL of the input of a normalised cell's tanh. */
INLINE vec cell_gradient(const float *trace, vec dh) {
    const vec tc = load(trace + 5 * VW);
    return dh * load(trace + 3 * VW) * (splat(1.0f) - tc * tc);
}

INLINE void backward_products(const BackwardLoop *L, const StepRows *f, StepUnits u, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int G = gates(J->H, mode).G, n = u.n;
    const int cell = mode == LSTM && d->gamma_c != NULL, keep = trace_vectors(mode, cell) * VW;
    const int64_t rows = f->rows, at = J->offsets[f->t] * L->vectors + u.v * rows;
    const float *inv = d->used_inv + f->t * products_stride(L->width, L->vectors);
    const float *trace = d->trace + at * keep;
    const vec share = splat(J->batch && rows > 1 ? 1.0f / (float)rows : 0.0f);
    float *dhs = L->scratch + (J->B + 1) * BLOCK; /* (rows, VW) */
    vec k = {0}, sd = {0}, sx = {0};
    if (cell) k = load_n(d->gamma_c + u.v * VW, n) * load_n(inv + L->width + u.v * VW, n);
    for (int64_t r = 0; r < rows; r++) {
        const vec dh = hidden_gradient(L, f, r, r, u.v, is_state_reset(L, f, r), mode);
        store(dhs + r * VW, dh);
        if (!cell) continue;
        const vec dz = cell_gradient(trace + r * keep, dh);
        sd += dz, sx += dz * load(trace + r * keep + 6 * VW);
    }
    if (cell) add_unit(L, BETA_C, u.v, sd), add_unit(L, GAMMA_C, u.v, sx);
    const int is_batch = share[0] > 0;
    for (int64_t r = 0; r < rows; r++) {
        const vec dh = load(dhs + r * VW);
        vec dc = {0}, dy[4], dq;
        if (cell) {
            dc = cell_gradient(trace + r * keep, dh);
            if (is_batch) dc -= (sd + load(trace + r * keep + 6 * VW) * sx) * share;
            dc *= k;
        }
        gate_gradients(L, f->t, r, u.v, dh, is_state_reset(L, f, r), dy, &dq, dc, mode, cell);
        if (mode == GRU) dy[0] *= dy[2], dq *= dy[2], add_unit(L, BIAS_HN, u.v, dq);
        for (int g = 0; g < G; g++) {
            store_n(u.dx.at + r * u.dx.ld + g * n, dy[g], n);
            store_n(u.dp.at + r * u.dp.ld + g * n, mode == GRU && g == 2 ? dq : dy[g], n);
        }
    }
    for (int g = 0; g < G; g++) {
        const int64_t c = u.first + g * n;
        column_backward(L, f->t, c, n, u.dp.at + g * n, u.dp.ld, d->hat + (at * G + g) * VW, G * VW,
                        load_n(d->gamma_h + c, n) * load_n(inv + c, n));
    }
}

INLINE void backward_over_rows(const BackwardLoop *L, const StepRows *f, StepUnits u, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int G = gates(J->H, mode).G, n = u.n;
    const int64_t rows = f->rows, at = J->offsets[f->t] * L->vectors + u.v * rows;
    const float *inv = d->used_inv + f->t * L->width;
    float *dq = L->scratch + (J->B + 1) * BLOCK;
    for (int64_t r = 0; r < rows; r++) {
        const int cut = is_state_reset(L, f, r);
        vec dy[4], q;
        const vec dh = hidden_gradient(L, f, r, r, u.v, cut, mode);
        gate_gradients(L, f->t, r, u.v, dh, cut, dy, &q, (vec){0}, mode, 0);
        for (int g = 0; g < G; g++) store_n(u.dx.at + r * u.dx.ld + g * n, dy[g], n);
        if (mode == GRU) store(dq + r * VW, q);
    }
    for (int g = G - 1; g >= 0; g--) { /* the GRU's candidate first: r is inside its sum */
        const int64_t c = u.first + g * n;
        column_backward(L, f->t, c, n, u.dx.at + g * n, u.dx.ld, d->hat + (at * G + g) * VW, G * VW,
                        load_n(d->scale + c, n) * load_n(inv + c, n));
        for (int64_t r = 0; r < rows && mode == GRU; r++) {
            float *x = u.dx.at + r * u.dx.ld, *dp = u.dp.at + r * u.dp.ld + g * n;
            const vec ds = load_n(x + g * n, n), to_q = ds * load(dq + r * VW);
            store_n(dp, g == 2 ? to_q : ds, n);
            if (g == 2) store_n(x, load_n(x, n) * ds, n), add_unit(L, BIAS_HN, u.v, to_q);
        }
    }
}

/* Write the means over the H units of a normalised cell of d hat and of d hat · hat, of each row. */
INLINE void cell_means(const BackwardLoop *L, const StepRows *f, const float *dhs, float *means,
                       int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int64_t off = J->offsets[f->t], keep = trace_vectors(mode, 1) * VW;
    for (int64_t i = 0; i < rows_of(L->s, f->rows); i++) {
        const int64_t r = L->s.row0 + i * L->s.stride;
        vec sd = {0}, sx = {0};
        for (int64_t v = 0; v < L->vectors; v++) {
            const float *trace = d->trace + ((off * L->vectors + v * f->rows) + r) * keep;
            const vec dz = cell_gradient(trace, load(dhs + i * L->lanes + v * VW));
            const vec e = load(trace + 6 * VW);
            const vec y = dz * load_n(d->gamma_c + v * VW, units_in(J->H, v));
            add_unit(L, GAMMA_C, v, dz * e), add_unit(L, BETA_C, v, dz);
            sd += y, sx += y * e;
        }
        means[2 * i] = J->centres ? sum_lanes(sd) / (float)J->H : 0.0f;
        means[2 * i + 1] = sum_lanes(sx) / (float)J->H;
    }
}

/* The thread has whole rows, whose dL/dh of all units is known: a gradient depends on all features
 * of its row, so what is summed over them is collected first, one vector of units after the other. */
INLINE void backward_over_features(const BackwardLoop *L, const StepRows *f, int mode) {
    const Job *J = L->J;
    const Direction *d = L->d;
    const int G = gates(J->H, mode).G;
    const int cell = mode == LSTM && d->gamma_c != NULL, keep = trace_vectors(mode, cell) * VW;
    const int64_t rows = rows_of(L->s, f->rows), b = f->rows;
    const int64_t off = f->t < 0 ? 0 : J->offsets[f->t];
    float *dhs = L->scratch + (J->B + 1) * BLOCK; /* (rows, lanes) */
    float *sums = dhs + J->B * L->lanes;          /* (rows, 2 VW) */
    float *means = sums + J->B * 2 * VW;          /* (rows, 2) */
    if (cell && rows) cell_means(L, f, dhs, means, mode);
    memset(sums, 0, (size_t)(rows * 2 * VW) * 4);
    for (int64_t v = 0; v < L->vectors && rows; v++) {
        const StepUnits u = step_units(L, f, v, mode);
        const int n = u.n;
        vec gamma[4], sd[4] = {0}, sx[4] = {0}, to_bias = {0};
        for (int g = 0; g < G; g++) gamma[g] = load_n(d->gamma_h + u.first + g * n, n);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t r = L->s.row0 + i * L->s.stride, at = (off * L->vectors + v * b) + r;
            const float *hat = d->hat + at * G * VW, *trace = d->trace + at * keep;
            const vec dh = load(dhs + i * L->lanes + v * VW);
            vec dc = {0}, dy[4], dq, pd = load(sums + i * 2 * VW), px = load(sums + (i * 2 + 1) * VW);
            if (cell) {
                dc = cell_gradient(trace, dh) * load_n(d->gamma_c + v * VW, n);
                dc -= splat(means[2 * i]) + load(trace + 6 * VW) * splat(means[2 * i + 1]);
                dc = first_lanes(dc * splat(d->inv[J->N + off + r]), n);
            }
            gate_gradients(L, f->t, r, v, dh, is_state_reset(L, f, r), dy, &dq, dc, mode, cell);
            if (mode == GRU) dy[0] *= dy[2], dq *= dy[2], to_bias += dq;
            for (int g = 0; g < G; g++) {
                const vec e = load(hat + g * VW), from = mode == GRU && g == 2 ? dq : dy[g];
                const vec y = from * gamma[g];
                store_n(u.dx.at + r * u.dx.ld + g * n, dy[g], n);
                store_n(u.dp.at + r * u.dp.ld + g * n, y, n);
                sd[g] += dy[g], sx[g] += from * e, pd += y, px += y * e;
            }
            store(sums + i * 2 * VW, pd), store(sums + (i * 2 + 1) * VW, px);
        }
        for (int g = 0; g < G; g++) {
            add_to(sum_d(L) + u.first + g * n, sd[g], n);
            add_to(sum_x(L) + u.first + g * n, sx[g], n);
        }
        if (mode == GRU) add_unit(L, BIAS_HN, v, to_bias);
    }
    const float count = (float)(G * J->H);
    for (int64_t i = 0; i < rows; i++) {
        means[2 * i] = J->centres ? sum_lanes(load(sums + i * 2 * VW)) / count : 0.0f;
        means[2 * i + 1] = sum_lanes(load(sums + (i * 2 + 1) * VW)) / count;
    }
    for (int64_t v = 0; v < L->vectors && rows; v++) {
        const StepUnits u = step_units(L, f, v, mode);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t r = L->s.row0 + i * L->s.stride;
            const float *hat = d->hat + ((off * L->vectors + v * b) + r) * G * VW;
            const vec md = splat(means[2 * i]), mx = splat(means[2 * i + 1]);
            for (int g = 0; g < G; g++) {
                float *at = u.dp.at + r * u.dp.ld + g * u.n;
                const vec y = load_n(at, u.n) - md - load(hat + g * VW) * mx;
                store_n(at, y * splat(d->inv[off + r]), u.n);
            }
        }
    }
}

INLINE void backward_step(const BackwardLoop *L, const StepRows *f, int mode, int inner) {
    const Job *J = L->J;
    for (int64_t block = L->s.from; block < L->s.to; block++) {
        block_product(L, f, block);
        for (int64_t v = block * 2; f->rows && v < block * 2 + 2 && v < L->vectors; v++) {
            const StepUnits u = step_units(L, f, v, mode);
            if (inner == NO_NORM) backward_no_norm(L, f, u, mode);
            if (inner == OVER_ROWS) backward_over_rows(L, f, u, mode);
            if (inner == PRODUCTS) backward_products(L, f, u, mode);
            if (inner != OVER_FEATURES) continue;
            float *dhs = L->scratch + (J->B + 1) * BLOCK + v * VW; /* (rows, lanes) */
            for (int64_t i = 0; i < rows_of(L->s, f->rows); i++) {
                const int64_t r = L->s.row0 + i * L->s.stride;
                store(dhs + i * L->lanes,
                      hidden_gradient(L, f, i, r, v, is_state_reset(L, f, r), mode));
            }
        }
    }
    if (inner == OVER_FEATURES) backward_over_features(L, f, mode);
}

INLINE void backward_loop(BackwardLoop *L, Barrier *barrier, int mode, int inner) {
    const Job *J = L->J;
    const Direction *d = L->d;
    int64_t since = 0;
    const int64_t end = J->T + (d->dh0 || d->d_reset_h), sums = sum_floats(L);
    for (int64_t s = 0; s < end; s++) {
        StepRows f = {.t = s == J->T ? -1 : d->reverse ? s : J->T - 1 - s};
        const int64_t before = d->reverse ? s - 1 : J->T - s; /* the step just done */
        f.rows = f.t < 0 ? 0 : J->sizes[f.t];
        f.done = s ? J->sizes[before] : 0;
        f.have = min64(f.rows, f.done);
        if (s) f.from = J->offsets[before] + L->s.row0;
        backward_step(L, &f, mode, inner);
        since += f.rows;
        if (since >= 256 || s + 1 >= J->T) {
            for (int64_t k = 0; k < sums; k++) L->totals[k] += L->sums[k], L->sums[k] = 0;
            since = 0;
        }
        barrier_wait(barrier, L->s.team);
    }
}

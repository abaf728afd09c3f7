/* Normalisation of W_x x (N, G·H), before the loop and after the backward loop: statistics of columns
 * ("sequence", "frame") or of rows ("layer"). What is normalised in the loop is in forward.h. */

/* Statistics of the columns of gate inputs, where the product did not accumulate them: per step,
 * with steps split over threads, or of all rows, with columns split. */
static void batch_statistics(const Team *team, int id, int n) {
    const Job *J = team->J;
    const int64_t C = width_of(J), vectors = C / VW * J->D, by_step = J->per_step;
    const int64_t from = by_step ? 0 : vectors * id / n * VW;
    const int64_t wide = (by_step ? vectors : vectors * (id + 1) / n) * VW - from;
    const int64_t first = by_step ? J->T * id / n : 0, last = by_step ? J->T * (id + 1) / n : 1;
    double *M = malloc((size_t)(2 * wide + 1) * sizeof(double)), *S = M + wide;
    if (!M) {
        fail(team);
        return;
    }
    for (int64_t k = first; k < last; k++) {
        const int64_t off = by_step ? J->offsets[k] : 0, rows = by_step ? J->sizes[k] : J->N;
        for (int64_t r = 0; r < rows; r += FEW)
            for (int64_t c = from; c < from + wide; c += VW) {
                const Columns x = columns_at(J, gates_of(J), J->d[c / C].pre, c % C);
                accumulate_rows(x.at + (off + r) * x.ld, x.ld, min64(FEW, rows - r), r, VW,
                                M + c - from, S + c - from);
            }
        write_statistics(J, k, from, wide, rows, M, S);
    }
    free(M);
}

/* Whether group k is normalised with the batch's statistics: one row has no variance. */
INLINE int uses_batch(const Job *J, int64_t k) {
    return J->batch && (J->per_step || J->inner == OVER_ROWS ? J->sizes[k] : J->N) > 1;
}

/* The same for W_x x: not if all rows are equal and statistics are given. */
static int input_uses_batch(const Job *J, const Direction *d, int64_t k) {
    if (!uses_batch(J, k)) return 0;
    if (!J->per_step || !d->fixed_mean) return 1;
    const int64_t C = gates_of(J).G * J->H;
    return !is_constant(C, d->stat_mean + k * J->ldc, d->stat_var + k * J->ldc);
}

/* Given statistics of the product and the cell of each step. */
static void prepare_products(const Job *J, const Direction *d) {
    const Gates o = gates_of(J);
    const int64_t C = packed_width(o), vectors = (J->H + VW - 1) / VW, G = o.G;
    const vec eps = splat((float)J->eps);
    for (int64_t t = 0; t < J->T; t++) {
        if (uses_batch(J, t)) continue;
        const int64_t slot = (J->fixed_per_step ? t * J->ldc : 0) + G * J->H;
        const int64_t to = t * products_stride(C, vectors);
        const float *mean = d->fixed_mean + slot, *var = d->fixed_var + slot;
        for (int64_t c = 0; c < C; c += VW) {
            store(d->used_mean + to + c, load_columns(o, mean, c));
            store(d->used_inv + to + c, rsqrt_(load_columns(o, var, c) + eps));
        }
        for (int64_t v = 0; v < vectors && d->gamma_c; v++) {
            const int n = units_in(J->H, v);
            const int64_t from = G * J->H + v * VW;
            store(d->used_mean + to + C + v * VW, load_n(mean + from, n));
            store(d->used_inv + to + C + v * VW, rsqrt_(load_n(var + from, n) + eps));
        }
    }
}

/* Mean, scale and shift of gate inputs from γ, β and statistics, the batch's or given ones. */
static void prepare(const Job *J) {
    const Gates o = gates_of(J);
    const int64_t C = packed_width(o);
    const float eps = (float)J->eps;
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        pack_vector(o, d->beta, 0.0f, d->shift);
        if (J->outer == FEATURES || J->inner == OVER_ROWS || J->outer == PLAIN) {
            pack_vector(o, d->gamma, 1.0f, d->scale);
            memset(d->mean, 0, (size_t)C * 4);
        }
        if (J->inner == OVER_FEATURES || J->inner == PRODUCTS)
            pack_vector(o, d->gamma_hh, 1.0f, d->gamma_h);
        if (J->inner == PRODUCTS) prepare_products(J, d);
        const int64_t K = J->inner == OVER_ROWS || J->per_step ? J->T : 1;
        const int any = J->outer == COLUMNS || J->inner == OVER_ROWS;
        for (int64_t k = 0; k < K && any; k++) {
            const int is_batch = J->outer == COLUMNS ? input_uses_batch(J, d, k) : uses_batch(J, k);
            if (J->inner == OVER_ROWS && is_batch) continue;
            const int64_t slot = is_batch ? k * J->ldc : J->fixed_per_step ? k * J->ldc : 0;
            const float *m = (is_batch ? d->stat_mean : d->fixed_mean) + slot;
            const float *v = (is_batch ? d->stat_var : d->fixed_var) + slot;
            for (int64_t c = 0; c < C; c += VW) {
                const vec mean = load_columns(o, m, c);
                const vec inv = rsqrt_(load_columns(o, v, c) + splat(eps));
                const vec gamma = d->gamma ? load_columns(o, d->gamma, c) : splat(1.0f);
                if (J->inner == OVER_ROWS) {
                    store(d->used_mean + k * C + c, mean), store(d->used_inv + k * C + c, inv);
                } else {
                    store(d->mean + k * C + c, mean);
                    store(d->scale + k * C + c, inv * gamma);
                }
            }
        }
    }
}

/* Lanes of the columns from c on that are not padding. */
INLINE int lanes_of(Gates o, int64_t c) { return (int)min64(o.G * o.H - c, VW); }

static void row_statistics_of_input(const Team *team, int id, int n) {
    const Job *J = team->J;
    const Gates o = gates_of(J);
    const float count = (float)(o.G * o.H);
    for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++)
        for (int64_t i = 0; i < J->D; i++) {
            const Direction *d = &J->d[i];
            vec s = {0}, q = {0};
            for (int64_t c = 0; c < o.G * o.H && J->centres; c += VW) { /* padding holds 0 */
                const Columns x = columns_at(J, o, d->pre, c);
                s += load(x.at + r * x.ld);
            }
            const float mean = sum_lanes(s) / count;
            for (int64_t c = 0; c < o.G * o.H; c += VW) {
                const Columns x = columns_at(J, o, d->pre, c);
                q += squares_of(x.at + r * x.ld, mean, lanes_of(o, c));
            }
            d->row_mean[r] = mean;
            d->row_scale[r] = 1.0f / sqrtf(sum_lanes(q) / count + (float)J->eps);
        }
}

/* ---- backward pass ---- */

/* Of the statistics of group k, the batch's or given: 1/√(var + ε) of the columns from c on. */
INLINE vec inverse_std(const Job *J, const Direction *d, int is_batch, int64_t k, int64_t c) {
    const int64_t slot = is_batch || J->fixed_per_step ? k * J->ldc : 0;
    const float *v = (is_batch ? d->stat_var : d->fixed_var) + slot;
    return rsqrt_(load_columns(gates_of(J), v, c) + splat((float)J->eps));
}

/* Frame-wise: threads split steps. The gradients of γ and β are accumulated in `buffer`. */
static void steps_backward(const Team *team, int id, int n) {
    const Job *J = team->J;
    const Gates o = gates_of(J);
    const int64_t C = packed_width(o);
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        float *beta = team->buffer + (id * J->D + i) * 2 * C, *gamma = beta + C;
        for (int64_t t = J->T * id / n; t < J->T * (id + 1) / n; t++) {
            const int64_t off = J->offsets[t], rows = J->sizes[t];
            /* otherwise a NaN stays in its row */
            const int is_batch = input_uses_batch(J, d, t);
            const vec share = splat(1.0f / (float)rows), none = {0};
            for (int64_t c = 0; c < C; c += VW) {
                const int have = lanes_of(o, c);
                const Columns dx = columns_at(J, o, d->dx, c), x = columns_at(J, o, d->pre, c);
                const vec m = load(d->mean + t * C + c), inv = inverse_std(J, d, is_batch, t, c);
                vec sd = {0}, sx = {0};
                for (int64_t r = off; r < off + rows; r++) {
                    const vec y = load_n(dx.at + r * dx.ld, have);
                    sd += y, sx += y * (load(x.at + r * x.ld) - m);
                }
                store(beta + c, load(beta + c) + sd);
                store(gamma + c, load(gamma + c) + sx * inv);
                const Affine k = {m, load(d->scale + t * C + c), is_batch ? sd * share : none,
                                  is_batch ? sx * inv * inv * share : none};
                apply_rows(dx, x, have, off, off + rows, k);
            }
        }
    }
}
/* Run a task in which every thread adds to its own D · `count` floats; return their sums over the
 * threads, or NULL. */
static float *run_with_sums(const Job *J, task_t task, int64_t count) {
    const int64_t n = count * J->D;
    float *sums = calloc((size_t)(J->threads * n), sizeof(float));
    if (!sums) return NULL;
    run_parallel(J, task, sums, NULL, NULL);
    for (int64_t k = n; k < J->threads * n; k++) sums[k % n] += sums[k];
    return sums;
}
static int frame_backward(const Job *J) {
    const int64_t C = width_of(J);
    float *sums = run_with_sums(J, steps_backward, 2 * C);
    for (int64_t i = 0; sums && i < J->D; i++) {
        unpack_vector(gates_of(J), sums + 2 * i * C, J->d[i].d_beta);
        unpack_vector(gates_of(J), sums + 2 * i * C + C, J->d[i].d_gamma);
    }
    free(sums);
    return !sums;
}

/* Sequence-wise: the loop has written Σ d to level and Σ d (x − mean) to slope. */
static void sequence_apply_rows(const Team *team, int id, int n) {
    const Job *J = team->J;
    const Gates o = gates_of(J);
    for (int64_t i = 0; i < J->D; i++)
        for (int64_t c = 0; c < o.G * o.H; c += VW)
            apply_rows(columns_at(J, o, J->d[i].dx, c), columns_at(J, o, J->d[i].pre, c),
                       lanes_of(o, c), J->N * id / n, J->N * (id + 1) / n,
                       sequence_affine(&J->d[i], c, lanes_of(o, c)));
}
static void sequence_backward(const Job *J) {
    const Gates o = gates_of(J);
    const int is_batch = uses_batch(J, 0);
    const vec share = splat(1.0f / (float)J->N), none = {0};
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        for (int64_t c = 0; c < packed_width(o); c += VW) {
            const vec inv = inverse_std(J, d, is_batch, 0, c);
            const vec sd = load(d->level + c), sx = load(d->slope + c) * inv;
            store_columns(o, d->d_beta, c, sd), store_columns(o, d->d_gamma, c, sx);
            store(d->level + c, is_batch ? sd * share : none);
            store(d->slope + c, is_batch ? sx * inv * share : none);
        }
    }
    if (!norm_in_weight_gradient(J)) run_parallel(J, sequence_apply_rows, NULL, NULL, NULL);
}

/* LN of the input: d ← (dγ − mean of dγ − hat · mean of dγ hat)/σ, and γ's gradient. */
static void apply_features_part(const Team *team, int id, int n) {
    const Job *J = team->J;
    const Gates o = gates_of(J);
    const int64_t C = packed_width(o);
    const float count = (float)(o.G * o.H);
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        float *sums = team->buffer + (id * J->D + i) * C;
        for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++) {
            const vec m = splat(d->row_mean[r]), k = splat(d->row_scale[r]);
            vec pd = {0}, px = {0};
            for (int64_t c = 0; c < C; c += VW) {
                const Columns dx = columns_at(J, o, d->dx, c), x = columns_at(J, o, d->pre, c);
                const vec e = (load(x.at + r * x.ld) - m) * k;
                const vec u = load_n(dx.at + r * dx.ld, lanes_of(o, c)), g = u * load(d->scale + c);
                store(sums + c, load(sums + c) + u * e);
                pd += g, px += g * e;
            }
            const vec md = splat(J->centres ? sum_lanes(pd) / count : 0.0f);
            const vec mx = splat(sum_lanes(px) / count);
            for (int64_t c = 0; c < C; c += VW) {
                const Columns dx = columns_at(J, o, d->dx, c), x = columns_at(J, o, d->pre, c);
                float *y = dx.at + r * dx.ld;
                const vec e = (load(x.at + r * x.ld) - m) * k;
                store(y, (load(y) * load(d->scale + c) - md - e * mx) * k);
            }
        }
    }
}
static int apply_features(const Job *J) {
    const int64_t C = width_of(J);
    float *sums = run_with_sums(J, apply_features_part, C);
    for (int64_t i = 0; sums && i < J->D; i++)
        unpack_vector(gates_of(J), sums + i * C, J->d[i].d_gamma);
    free(sums);
    return !sums;
}

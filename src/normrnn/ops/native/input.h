/* The product with a layer's input, statistics of its columns, and the gradients of the input and of
 * the weights. */

INLINE int64_t width_of(const Job *J) { return packed_width(gates_of(J)); }

static void pack_vector(Gates o, const float *from, float fill, float *to) {
    for (int64_t c = 0; c < packed_width(o); c += VW)
        store(to + c, from ? load_columns(o, from, c) : splat(fill));
}
static void unpack_vector(Gates o, const float *from, float *to) {
    for (int64_t c = 0; c < packed_width(o); c += VW) store_columns(o, to, c, load(from + c));
}

/* ---- statistics of columns ---- */

/* Means and Σ (x − mean)² of n columns, in double, with `rows` more rows after those before. */
static void accumulate_rows(const float *x, int64_t ld, int64_t rows, int64_t before, int64_t n,
                            double *M, double *S) {
    const double share = (double)rows / (double)(before + rows), both = (double)before * share;
    for (int64_t c = 0; c < n; c += VW) {
        vec mean, squares;
        two_pass_moments(x + c, ld, rows, VW, &mean, &squares);
        for (int l = 0; l < VW; l++) {
            const double e = before ? (double)mean[l] - M[c + l] : 0.0;
            M[c + l] = before ? M[c + l] + e * share : (double)mean[l];
            S[c + l] = (before ? S[c + l] : 0.0) + (double)squares[l] + e * e * both;
        }
    }
}
/* Write the statistics of packed columns from c on, of all directions, in the parameters' order. */
static void write_statistics(const Job *J, int64_t k, int64_t c, int64_t n, int64_t rows,
                             const double *M, const double *S) {
    const int64_t C = width_of(J);
    for (int64_t v = c; v < c + n; v += VW) {
        const Direction *d = &J->d[v / C];
        vec mean, var;
        for (int l = 0; l < VW; l++)
            mean[l] = (float)M[v - c + l], var[l] = (float)(S[v - c + l] / (double)rows);
        store_columns(gates_of(J), d->stat_mean + k * J->ldc, v % C, mean);
        store_columns(gates_of(J), d->stat_var + k * J->ldc, v % C, var);
    }
}
/* Whether all rows are equal up to rounding, from the mean and variance of C columns; the threshold
 * is `CONSTANT` of statistics.py. */
static int is_constant(int64_t C, const float *mean, const float *var) {
    double squares = 0, variances = 0;
    for (int64_t c = 0; c < C; c++) {
        squares += (double)mean[c] * (double)mean[c];
        variances += (double)var[c];
    }
    return variances <= 1e-12 * squares;
}
enum { FEW = 32 }; /* rows accumulated at a time, while they are in the cache */

enum { MANY_ROWS = 96 }; /* rows of a large product at a time: they stay in the cache */

/* Whether sequence-wise statistics are accumulated during the product with the input. */
INLINE int measures_in_product(const Job *J) {
    return J->I && J->outer == COLUMNS && J->batch && !J->per_step;
}
/* pre = x W_xᵀ in packed order; threads split the packing of weights, then rows. */
static void project_part(const Team *c, int id, int n) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t I = J->I, C = packed_width(o), P = panels(o), all_panels = P * J->D;
    for (int64_t k = all_panels * id / n; k < all_panels * (id + 1) / n; k++)
        pack_rows(o, I, J->d[k / P].w_ih, c->buffer + k / P * C * I, k % P, k % P + 1);
    barrier_all(c, n);
    const int64_t r0 = J->N * id / n, r1 = J->N * (id + 1) / n, wide = C * J->D;
    double *M = c->totals + 2 * wide * id, *S = M + wide;
    for (int64_t r = r0; r < r1; r += MANY_ROWS)
        for (int64_t p = 0; p < all_panels; p++) {
            const int64_t rows = min64(MANY_ROWS, r1 - r), first = p % P * panel_width(o);
            const int64_t at = p / P * C + first; /* its first column among all directions' */
            const Columns to = columns_at(J, o, J->d[p / P].pre, first);
            float *out = to.at + r * to.ld;
            panel_product(rows, matrix(J->x + r * J->ldi, J->ldi, I), panel_vectors(o, p % P),
                          c->buffer + at * I, out, to.ld, 0);
            for (int64_t i = 0; c->totals && i < rows; i += FEW)
                accumulate_rows(out + i * to.ld, to.ld, min64(FEW, rows - i), r - r0 + i, to.ld,
                                M + at, S + at);
        }
    if (!c->totals) return;
    barrier_all(c, n);
    const int64_t from = wide / VW * id / n * VW, to = wide / VW * (id + 1) / n * VW;
    M = c->totals, S = M + wide; /* merge the other threads' moments into the first's */
    for (int t = 1; t < n; t++) {
        const double *m = M + 2 * wide * t, *s = m + wide, before = (double)(J->N * t / n);
        const double rows = (double)(J->N * (t + 1) / n) - before, share = rows / (before + rows);
        for (int64_t k = from; k < to && rows > 0; k++) {
            const double e = m[k] - M[k];
            M[k] += e * share, S[k] += s[k] + e * e * before * share;
        }
    }
    write_statistics(J, 0, from, to - from, J->N, M + from, S + from);
}
/* Without an input product: ready gate inputs (N, D·G·H) to packed order, or in the backward pass
 * their gradient from it. */
static void convert_gates(const Team *team, int id, int n) {
    const Job *J = team->J;
    const Gates o = gates_of(J);
    const int is_backward = J->dx_in != NULL;
    for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++)
        for (int64_t d = 0; d < J->D; d++)
            for (int64_t c = 0; c < packed_width(o); c += VW) {
                const Columns p = columns_at(J, o, is_backward ? J->d[d].dx : J->d[d].pre, c);
                const int64_t row = (r * J->D + d) * o.G * o.H;
                if (is_backward) store_columns(o, J->dx_in + row, c, load(p.at + r * p.ld));
                else store(p.at + r * p.ld, load_columns(o, J->x + row, c));
            }
}

static int project(const Job *J) {
    const int64_t wide = J->D * width_of(J);
    const int early = measures_in_product(J);
    float *packed = allocate(wide * J->I);
    double *sums = early ? calloc((size_t)(J->threads * 2 * wide), sizeof(double)) : NULL;
    const int failed = !packed || (early && !sums) || run_parallel(J, project_part, packed, sums, NULL);
    free(packed), free(sums);
    return failed;
}

/* dx_in = Σ over directions of dx W_x. */
static void input_gradient_part(const Team *c, int id, int n) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t I = J->I, C = o.G * o.H, blocks = (I + BLOCK - 1) / BLOCK;
    for (int64_t d = 0; d < J->D; d++)
        pack_columns(o, I, J->d[d].w_ih, c->buffer + d * blocks * C * BLOCK, blocks * id / n,
                     blocks * (id + 1) / n);
    barrier_all(c, n);
    float sums[MANY_ROWS * BLOCK] __attribute__((aligned(64)));
    const int64_t r1 = J->N * (id + 1) / n;
    for (int64_t r = J->N * id / n; r < r1; r += MANY_ROWS)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t rows = min64(MANY_ROWS, r1 - r), have = min64(BLOCK, I - b * BLOCK);
            const int Q = block_vectors(I, b), is_whole = have == Q * VW;
            float *to = J->dx_in + r * I + b * BLOCK;
            for (int64_t d = 0; d < J->D; d++)
                gate_product(J, J->d[d].dx, r, 1, rows, Q,
                             c->buffer + (d * blocks + b) * C * BLOCK, is_whole ? to : sums,
                             is_whole ? I : BLOCK, d > 0);
            for (int64_t i = 0; i < rows && !is_whole; i++)
                memcpy(to + i * I, sums + i * BLOCK, (size_t)have * 4);
        }
}
static int input_gradient(const Job *J) {
    const int64_t blocks = (J->I + BLOCK - 1) / BLOCK;
    float *packed = allocate(J->D * blocks * gates_of(J).G * J->H * BLOCK);
    const int failed = !packed || run_parallel(J, input_gradient_part, packed, NULL, NULL);
    free(packed);
    return failed;
}

/* The state before row r of step t, as the loop read it; NULL means 0. */
INLINE const float *state_before(const Job *J, const Direction *d, int64_t t, int64_t r) {
    const int64_t p = d->reverse ? t + 1 : t - 1;
    if (p < 0 || p >= J->T || r >= J->sizes[p])
        return start_of(J, d, r, d->h0, d->reset_h);
    if (is_reset(J, d->reverse ? p : t, r)) return AT(d->reset_h, r * J->H);
    return d->out + (J->offsets[p] + r) * J->ldo;
}

/* The backward pass of normalised columns: d ← (d − mean of d − hat · mean of d hat)·scale over the
 * rows of a group, where `level` is the first mean and `slope` the second over σ. */
typedef struct {
    vec mean, scale, level, slope;
} Affine;
INLINE vec apply_affine(vec d, vec x, Affine k) {
    return (d - k.level - (x - k.mean) * k.slope) * k.scale;
}
INLINE void apply_rows(Columns d, Columns x, int n, int64_t from, int64_t to, Affine k) {
    for (int64_t r = from; r < to; r++) {
        float *y = d.at + r * d.ld;
        store_n(y, apply_affine(load_n(y, n), load_n(x.at + r * x.ld, n), k), n);
    }
}
/* Sequence-wise, of n columns from packed column c on. */
INLINE Affine sequence_affine(const Direction *d, int64_t c, int n) {
    return (Affine){load_n(d->mean + c, n), load_n(d->scale + c, n), load_n(d->level + c, n),
                    load_n(d->slope + c, n)};
}
/* Whether the gradient of the input weights applies the backward pass of the normalisation. */
INLINE int norm_in_weight_gradient(const Job *J) {
    const int wanted = J->I && J->d[0].d_w_ih && J->d[J->D - 1].d_w_ih;
    return J->outer == COLUMNS && !J->per_step && wanted;
}

/* Gradients of weights (G·H, M), Σ over rows of dᵀ x, where x is the input or the previous state.
 * Threads split the rows of the weights. A slab of rows of x is packed as [block][row][Q·VW]. */
enum { DEEP = 768, MOST_VECTORS = 3 };
typedef struct {
    int64_t M, vectors, blocks;
    float *packed; /* NULL if this gradient is not wanted */
} Slab;
INLINE Slab slab_of(int64_t M, int64_t deep, int is_wanted) {
    const int64_t vectors = (M + VW - 1) / VW, blocks = (vectors + MOST_VECTORS - 1) / MOST_VECTORS;
    return (Slab){M, vectors, blocks, is_wanted ? allocate(vectors * VW * deep) : NULL};
}
static void pack_slab(const Slab *s, const float *const *rows, int64_t deep) {
    for (int64_t b = 0; b < s->blocks; b++) {
        const int64_t v0 = s->vectors * b / s->blocks, v1 = s->vectors * (b + 1) / s->blocks;
        float *to = s->packed + v0 * VW * deep;
        for (int64_t k = 0; k < deep; k++)
            for (int64_t v = v0; v < v1; v++, to += VW)
                store(to, rows[k] ? load_n(rows[k] + v * VW, units_in(s->M, v)) : (vec){0});
    }
}
/* Add the products of n columns of d (deep, VW) with a slab to the rows of `to`. */
static void slab_product(const Slab *s, const float *d, int64_t deep, int n, float *to, int add) {
    for (int64_t b = 0; b < s->blocks; b++) {
        const int64_t v0 = s->vectors * b / s->blocks, v1 = s->vectors * (b + 1) / s->blocks;
        const int Q = (int)(v1 - v0), tiles = (n + MOST_ROWS[Q] - 1) / MOST_ROWS[Q];
        const int is_whole = v1 * VW <= s->M;
        for (int i = 0; i < tiles; i++) {
            const int r = n * i / tiles, R = n * (i + 1) / tiles - r;
            const Factor f = {d + r, 1, VW, deep, 1, 0};
            const float *from = s->packed + v0 * VW * deep;
            float *at = to + r * s->M + v0 * VW, sums[VW * MOST_VECTORS * VW];
            if (is_whole) {
                TILES[Q][R](&f, from, Q * VW, at, s->M, add);
                continue;
            }
            TILES[Q][R](&f, from, Q * VW, sums, Q * VW, 0);
            for (int j = 0; j < R; j++)
                for (int q = 0; q < Q; q++) {
                    const int have = units_in(s->M - v0 * VW, q);
                    float *t = at + j * s->M + q * VW;
                    vec sum = load(sums + (j * Q + q) * VW);
                    if (add) sum += load_n(t, have);
                    store_n(t, sum, have);
                }
        }
    }
}
/* Rows of gates g0 to g1 of vector v of units, as [gate][row][VW]: so they stay in the first cache.
 * With `has_norm` the backward pass of sequence-wise normalisation is applied to them before. */
static void copy_gates(const Job *J, const Direction *d, float *buffer, int has_norm, int64_t v,
                       int g0, int g1, int64_t first, int64_t rows, float *to) {
    const Gates o = gates_of(J);
    const int n = units_in(o.H, v), count = g1 - g0;
    const int64_t c = column(o.H, v, g0, o.G);
    const Columns y = columns_at(J, o, buffer, c), x = columns_at(J, o, d->pre, c);
    Affine k[4];
    for (int g = 0; g < count && has_norm; g++) k[g] = sequence_affine(d, c + g * n, n);
    for (int64_t r = 0; r < rows; r++)
        for (int g = 0; g < count; g++) {
            float *at = y.at + (first + r) * y.ld + g * n;
            vec z = load_n(at, n);
            if (has_norm) {
                z = apply_affine(z, load_n(x.at + (first + r) * x.ld + g * n, n), k[g]);
                store_n(at, z, n);
            }
            store(to + (g * rows + r) * VW, z);
        }
}
typedef struct {
    int recurrent, input; /* the gradients that are computed */
} Wanted;
/* Of gates [from, to), counted by vector of units. */
static void weight_gradients_of(const Team *team, const Direction *d, Wanted wanted, int64_t from,
                                int64_t to) {
    const Job *J = team->J;
    const Gates o = gates_of(J);
    const int has_norm = norm_in_weight_gradient(J);
    /* Sums of many weights leave the cache between slabs: then fewer slabs are better. */
    const int64_t M = wanted.recurrent && J->H > J->I ? J->H : J->I;
    const int64_t most = M * o.G * o.H > 1 << 20 ? DEEP : DEEP / 3;
    const int64_t slabs = (J->N + most - 1) / most;
    const Slab h = slab_of(J->H, most, wanted.recurrent), x = slab_of(J->I, most, wanted.input);
    float *gates_ = allocate(o.G * most * VW);
    const int failed = (wanted.recurrent && !h.packed) || (wanted.input && !x.packed) || !gates_;
    const float *rows[DEEP];
    if (failed) fail(team);
    int64_t t = 0, r = 0;
    for (int64_t slab = 0; slab < slabs && !failed; slab++) {
        const int64_t k0 = J->N * slab / slabs, deep = J->N * (slab + 1) / slabs - k0;
        for (int64_t k = 0; k < deep; k++) rows[k] = J->x + (k0 + k) * J->ldi;
        if (wanted.input) pack_slab(&x, rows, deep);
        for (int64_t k = 0; k < deep && wanted.recurrent; k++, r++) {
            while (r >= J->sizes[t]) r = 0, t++;
            rows[k] = state_before(J, d, t, r);
        }
        if (wanted.recurrent) pack_slab(&h, rows, deep);
        for (int64_t v = from / o.G; v * o.G < to; v++) {
            const int g0 = (int)(v * o.G < from ? from % o.G : 0), n = units_in(o.H, v);
            const int g1 = (int)min64(to - v * o.G, o.G);
            for (int is_input = 0; is_input < 2; is_input++) {
                const Slab *s = is_input ? &x : &h;
                if (!s->packed) continue;
                if (!is_input || has_norm || d->dx != d->dp || !wanted.recurrent)
                    copy_gates(J, d, is_input ? d->dx : d->dp, is_input && has_norm, v, g0, g1, k0,
                               deep, gates_);
                float *out = (is_input ? d->d_w_ih : d->d_w_hh) + v * VW * s->M;
                for (int g = g0; g < g1; g++)
                    slab_product(s, gates_ + (g - g0) * deep * VW, deep, n, out + g * o.H * s->M,
                                 slab > 0);
            }
        }
    }
    free(h.packed), free(x.packed), free(gates_);
}
static void weight_gradients_part(const Team *team, int id, int n) {
    const Job *J = team->J;
    const Gates o = gates_of(J);
    const Wanted *asked = team->more;
    const int64_t units = (J->H + VW - 1) / VW * o.G;
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        const Wanted wanted = {asked->recurrent && d->d_w_hh, asked->input && d->d_w_ih};
        if (wanted.recurrent || wanted.input)
            weight_gradients_of(team, d, wanted, units * id / n, units * (id + 1) / n);
    }
}
static int weight_gradients(const Job *J, int recurrent, int input) {
    const Wanted wanted = {recurrent, input};
    return run_parallel(J, weight_gradients_part, NULL, NULL, &wanted);
}

/* A recurrent layer, all directions of it: the product with its input, normalisation, the loop
 * over time, and the way back. Two entries, for Python; `job.h` says what they are given.
 */
#include "backward.h"

#ifndef VARIANT
#define VARIANT plain
#endif
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
enum { MANY_ROWS = 96 }; /* of a big product at a time: they stay in the cache */
#define EXPORT(name) __attribute__((visibility("default"))) JOIN(normrnn_##name, VARIANT)

INLINE int64_t width_of(const Job *J) { return packed_width(gates_of(J)); }

/* ---- vectors between the parameters' order and packed order ---- */

static void pack_vector(Gates o, const float *from, float fill, float *to) {
    for (int64_t c = 0; c < packed_width(o); c += VW) {
        int64_t row;
        const int n = lanes_at(o, c, &row);
        vec x = {0};
        for (int l = 0; l < n; l++) x[l] = from ? from[row + l] : fill;
        store(to + c, x);
    }
}
static void unpack_vector(Gates o, const float *from, float *to) {
    for (int64_t c = 0; c < packed_width(o); c += VW) {
        int64_t row;
        const int n = lanes_at(o, c, &row);
        if (n) store_n(to + row, load(from + c), n);
    }
}

/* ---- statistics of columns ---- */

/* Mean and Σ (x − mean)² of a vector of columns over a few rows, in two passes. */
INLINE void few_rows(const float *x, int64_t ld, int64_t rows, vec *mean, vec *squares) {
    vec m = {0}, s = {0};
    for (int64_t r = 0; r < rows; r++) m += load(x + r * ld);
    m *= all(1.0f / (float)rows);
    for (int64_t r = 0; r < rows; r++) {
        const vec e = load(x + r * ld) - m;
        s += e * e;
    }
    *mean = m, *squares = s;
}

/* Means and Σ (x − mean)² of n columns, in double, with `rows` more rows after those before. */
static void take_in(const float *x, int64_t ld, int64_t rows, int64_t before, int64_t n, double *M,
                    double *S) {
    const double share = (double)rows / (double)(before + rows), both = (double)before * share;
    for (int64_t c = 0; c < n; c += VW) {
        vec mean, squares;
        few_rows(x + c, ld, rows, &mean, &squares);
        for (int l = 0; l < VW; l++) {
            const double e = before ? (double)mean[l] - M[c + l] : 0.0;
            M[c + l] = before ? M[c + l] + e * share : (double)mean[l];
            S[c + l] = (before ? S[c + l] : 0.0) + (double)squares[l] + e * e * both;
        }
    }
}
/* Of the columns from c on, of all directions, in packed order: to where Python reads them. */
static void give_statistics(const Job *J, int64_t k, int64_t c, int64_t n, int64_t rows,
                            const double *M, const double *S) {
    const int64_t C = width_of(J);
    for (int64_t v = c; v < c + n; v += VW) {
        const Direction *d = &J->d[v / C];
        int64_t row;
        const int have = lanes_at(gates_of(J), v % C, &row);
        for (int l = 0; l < have; l++) {
            d->stat_mean[k * J->ldc + row + l] = (float)M[v - c + l];
            d->stat_var[k * J->ldc + row + l] = (float)(S[v - c + l] / (double)rows);
        }
    }
}
enum { FEW = 32 }; /* rows that are taken in at a time, while they are in the cache */

/* ---- products with the input ---- */

/* Whether the product with the input measures sequence-wise statistics on the way. */
INLINE int measured_early(const Job *J) {
    return J->I && J->outer == COLUMNS && J->batch && !J->per_step;
}
/* pre = x W_xᵀ in packed order; threads share rows, or panels where rows are few. */
static void project_part(const Crew *c, int id, int n) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t I = J->I, w = panel_width(o), P = panels(o), every = P * J->D, wide = every * w;
    const int Q = o.G * o.U;
    for (int64_t k = every * id / n; k < every * (id + 1) / n; k++)
        pack_rows(o, I, J->d[k / P].w_ih, c->room + k / P * P * I * w, k % P, k % P + 1);
    everybody(c, n);
    const int by_rows = J->N >= 4 * n * MOST_ROWS[Q];
    const int64_t r0 = by_rows ? J->N * id / n : 0, r1 = by_rows ? J->N * (id + 1) / n : J->N;
    const int64_t p0 = by_rows ? 0 : every * id / n, p1 = by_rows ? every : every * (id + 1) / n;
    double *M = c->totals + 2 * wide * id, *S = M + wide;
    for (int64_t r = r0; r < r1; r += MANY_ROWS)
        for (int64_t p = p0; p < p1; p++) {
            const int64_t rows = least(MANY_ROWS, r1 - r);
            float *to = J->d[p / P].pre + r * J->ldx + p % P * w;
            panel_product(rows, I, Q, c->room + p * I * w, J->x + r * J->ldi, J->ldi, to, J->ldx, 0);
            for (int64_t i = 0; c->totals && i < rows; i += FEW)
                take_in(to + i * J->ldx, J->ldx, least(FEW, rows - i), r - r0 + i, w, M + p * w,
                        S + p * w);
        }
    if (!c->totals) return;
    if (!by_rows) {
        give_statistics(J, 0, p0 * w, (p1 - p0) * w, J->N, M + p0 * w, S + p0 * w);
        return;
    }
    everybody(c, n);
    const int64_t from = every * id / n * w, to = every * (id + 1) / n * w;
    M = c->totals, S = M + wide; /* of the first thread, to whose rows all others come */
    for (int t = 1; t < n; t++) {
        const double *m = c->totals + 2 * wide * t, *s = m + wide, before = (double)(J->N * t / n);
        const double rows = (double)(J->N * (t + 1) / n) - before, share = rows / (before + rows);
        for (int64_t k = from; k < to; k++) {
            const double e = m[k] - M[k];
            M[k] += e * share, S[k] += s[k] + e * e * before * share;
        }
    }
    give_statistics(J, 0, from, to - from, J->N, M + from, S + from);
}
/* Ready gate inputs (N, D·G·H) instead of a product, and their gradient. */
static void take_gates(const Crew *c, int id, int n) {
    const Job *J = c->J;
    for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++)
        for (int64_t d = 0; d < J->D; d++)
            pack_vector(gates_of(J), J->x + r * J->ldi + d * gates_of(J).G * J->H, 0.0f,
                        J->d[d].pre + r * J->ldx);
}
static void give_gates(const Crew *c, int id, int n) {
    const Job *J = c->J;
    const int64_t C = gates_of(J).G * J->H;
    for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++)
        for (int64_t d = 0; d < J->D; d++)
            unpack_vector(gates_of(J), J->d[d].dx + r * J->ldx, J->dx_in + (r * J->D + d) * C);
}

static void project(const Job *J) {
    const int64_t wide = J->D * width_of(J);
    float *packed = take(wide * J->I);
    double *sums = measured_early(J) ? there(malloc((size_t)(J->threads * 2 * wide) * 8)) : NULL;
    together(J, project_part, packed, sums);
    free(packed), free(sums);
}

/* dx_in = Σ over directions of dx W_x. */
static void input_gradient_part(const Crew *c, int id, int n) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t I = J->I, C = packed_width(o), blocks = (I + BLOCK - 1) / BLOCK;
    for (int64_t d = 0; d < J->D; d++)
        pack_columns(o, I, J->d[d].w_ih, c->room + d * blocks * C * BLOCK, blocks * id / n,
                     blocks * (id + 1) / n);
    everybody(c, n);
    float part[MANY_ROWS * BLOCK] __attribute__((aligned(64)));
    const int by_rows = J->N >= 4 * n * MOST_ROWS[2];
    const int64_t r0 = by_rows ? J->N * id / n : 0, r1 = by_rows ? J->N * (id + 1) / n : J->N;
    const int64_t b0 = by_rows ? 0 : blocks * id / n;
    const int64_t b1 = by_rows ? blocks : blocks * (id + 1) / n;
    for (int64_t r = r0; r < r1; r += MANY_ROWS)
        for (int64_t b = b0; b < b1; b++) {
            const int64_t rows = least(MANY_ROWS, r1 - r), have = least(BLOCK, I - b * BLOCK);
            const int Q = block_vectors(I, b), whole = have == Q * VW;
            float *to = J->dx_in + r * I + b * BLOCK;
            for (int64_t d = 0; d < J->D; d++)
                panel_product(rows, C, Q, c->room + (d * blocks + b) * C * BLOCK,
                              J->d[d].dx + r * J->ldx, J->ldx, whole ? to : part,
                              whole ? I : BLOCK, d > 0);
            for (int64_t i = 0; i < rows && !whole; i++)
                memcpy(to + i * I, part + i * BLOCK, (size_t)have * 4);
        }
}
static void input_gradient(const Job *J) {
    const int64_t blocks = (J->I + BLOCK - 1) / BLOCK;
    float *packed = take(J->D * blocks * packed_width(gates_of(J)) * BLOCK);
    together(J, input_gradient_part, packed, NULL);
    free(packed);
}

/* The state before row r of step t, as the loop read it; NULL is 0. */
INLINE const float *state_before(const Job *J, const Direction *d, int64_t t, int64_t r) {
    const int64_t p = d->reverse ? t + 1 : t - 1;
    if (p < 0 || p >= J->T || r >= J->sizes[p])
        return d->h0 && !(!d->reverse && is_cut(J, 0, r)) ? d->h0 + r * J->H : NULL;
    return is_cut(J, d->reverse ? p : t, r) ? NULL : d->out + (J->offsets[p] + r) * J->ldo;
}

/* Σ over rows of dᵀ x in parameters' order, where x is the input or the state before. Each thread
 * has columns of d; both are packed a slab of rows at a time, x in strips of R columns. */
enum { DEEP = 768, PAIR = 2 * VW, SLAB = 192 * 1024 };
INLINE int64_t strips_of(int64_t M) { return (M + MOST_ROWS[2] - 1) / MOST_ROWS[2]; }
static void pack_strips(const float *const *x, int64_t deep, int64_t M, float *to) {
    const int64_t strips = strips_of(M);
    for (int64_t i = 0; i < strips; i++) {
        const int64_t m = M * i / strips, R = M * (i + 1) / strips - m;
        if (R <= VW && m + VW <= M) /* what is written too far is written again */
            for (int64_t k = 0; k < deep; k++, to += R) store(to, load(x[k] + m));
        else
            for (int64_t k = 0; k < deep; k++, to += R)
                for (int64_t j = 0; j < R; j++) to[j] = x[k][m + j];
    }
}
/* Rows of d from `first` on, [pair of vectors][row][2·VW]; where the way back through sequence-wise
 * statistics is still to come, it is taken on the way, and written back if it is wanted again. */
static void pack_gates(const Job *J, const Direction *d, float *dg, int undo, int64_t first,
                       int64_t deep, int64_t from, int64_t to, float *ds) {
    const int64_t C = width_of(J);
    for (int64_t k = 0; k < deep; k++) {
        float *row = dg + (first + k) * J->ldx;
        const float *x = undo ? d->pre + (first + k) * J->ldx : NULL;
        for (int64_t c = from * PAIR; c < to * PAIR; c += VW) {
            vec y = {0};
            if (c < C) {
                y = load(row + c);
                if (undo) {
                    y = (y - load(d->level + c) -
                         (load(x + c) - load(d->mean + c)) * load(d->slope + c)) *
                        load(d->scale + c);
                    if (J->dx_in) store(row + c, y);
                }
            }
            store(ds + ((c / PAIR - from) * deep + k) * PAIR + c % PAIR, y);
        }
    }
}
static void weight_gradient_part(const Job *J, const Direction *d, float *dg, int undo, int64_t M,
                                 const float *input, float *to, float *sums, int id, int n) {
    const Gates o = gates_of(J);
    const int64_t strips = strips_of(M), C = packed_width(o), pairs = (C + PAIR - 1) / PAIR;
    const int64_t ld = apart(pairs * PAIR), from = pairs * id / n, end = pairs * (id + 1) / n;
    if (from == end) return;
    /* Sums of many weights leave the cache between two slabs: there few of them are better. */
    const int64_t most = M * C > 1 << 20 ? DEEP : DEEP / 4, some = SLAB / most / PAIR;
    const int64_t slabs = (J->N + most - 1) / most;
    const float *rows[DEEP];
    float *xs = take(M * most + VW), *ds = take(SLAB);
    float *none = there(calloc((size_t)M, sizeof(float)));
    int64_t t = 0, r = 0;
    for (int64_t slab = 0; slab < slabs; slab++) {
        const int64_t k0 = J->N * slab / slabs, deep = J->N * (slab + 1) / slabs - k0;
        for (int64_t k = 0; k < deep; k++, r++) {
            while (r >= J->sizes[t]) r = 0, t++;
            const float *x = input ? input + (k0 + k) * J->ldi : state_before(J, d, t, r);
            rows[k] = x ? x : none;
        }
        pack_strips(rows, deep, M, xs);
        for (int64_t p0 = from; p0 < end; p0 += some) {
            const int64_t p1 = least(p0 + some, end);
            pack_gates(J, d, dg, undo, k0, deep, p0, p1, ds);
            for (int64_t p = p0; p < p1; p++)
                for (int64_t i = 0; i < strips; i++) {
                    const int64_t m = M * i / strips, R = M * (i + 1) / strips - m;
                    TILES[2][R](deep, ds + (p - p0) * deep * PAIR, xs + m * deep, 1, R,
                                sums + m * ld + p * PAIR, ld, slab > 0);
                }
        }
    }
    free(xs), free(ds), free(none);
    for (int64_t c = from * PAIR; c < least(end * PAIR, C); c += VW) { /* turned round */
        int64_t row, m = 0;
        const int have = lanes_at(o, c, &row);
#if HAVE_SHUFFLE && VW >= 8
        if (have == VW)
            for (; m + 8 <= M; m += 8)
                for (int l = 0; l < VW; l += 8)
                    turn8(sums + m * ld + c + l, ld, to + (row + l) * M + m, M);
#endif
        for (; m < M; m++)
            for (int l = 0; l < have; l++) to[(row + l) * M + m] = sums[m * ld + c + l];
    }
}
/* Whether the gradient of the input's weights takes the way back through the statistics. */
INLINE int undone_late(const Job *J) {
    const int wanted = J->I && J->d[0].d_w_ih && J->d[J->D - 1].d_w_ih;
    return J->outer == COLUMNS && !J->per_step && wanted;
}
static void recurrent_weights_part(const Crew *c, int id, int n) {
    const Job *J = c->J;
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        if (d->d_w_hh)
            weight_gradient_part(J, d, d->dp, 0, J->H, NULL, d->d_w_hh, c->room, id, n);
    }
}
static void input_weights_part(const Crew *c, int id, int n) {
    const Job *J = c->J;
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        if (d->d_w_ih)
            weight_gradient_part(J, d, d->dx, undone_late(J), J->I, J->x, d->d_w_ih, c->room, id,
                                 n);
    }
}
static void weight_gradients(const Job *J, part_t part, int64_t M) {
    float *sums = take(M * apart(up(packed_width(gates_of(J)), PAIR)));
    together(J, part, sums, NULL);
    free(sums);
}

/* ---- normalisation before the loop ---- */

/* Statistics of the columns of gate inputs where no product measured them: of every step, which
 * threads share, or of all rows, where they share columns. */
static void batch_statistics(const Crew *crew, int id, int n) {
    const Job *J = crew->J;
    const int64_t C = width_of(J), vectors = C / VW * J->D, by_step = J->per_step;
    const int64_t from = by_step ? 0 : vectors * id / n * VW;
    const int64_t wide = (by_step ? vectors : vectors * (id + 1) / n) * VW - from;
    const int64_t first = by_step ? J->T * id / n : 0, last = by_step ? J->T * (id + 1) / n : 1;
    double *M = there(malloc((size_t)(2 * wide + 1) * sizeof(double))), *S = M + wide;
    for (int64_t k = first; k < last; k++) {
        const int64_t off = by_step ? J->offsets[k] : 0, rows = by_step ? J->sizes[k] : J->N;
        for (int64_t r = 0; r < rows; r += FEW)
            for (int64_t c = from; c < from + wide; c += VW)
                take_in(J->d[c / C].pre + (off + r) * J->ldx + c % C, J->ldx, least(FEW, rows - r),
                        r, VW, M + c - from, S + c - from);
        give_statistics(J, k, from, wide, rows, M, S);
    }
    free(M);
}

/* Whether group k is normalised by its own statistics: one row has no variance. */
INLINE int is_own(const Job *J, int64_t k) {
    return J->batch && (J->per_step || J->inner == OVER_ROWS ? J->sizes[k] : J->N) > 1;
}

/* What the product and the cell of a step are normalised by where that is given. */
static void prepare_products(const Job *J, const Direction *d) {
    const Gates o = gates_of(J);
    const int64_t C = packed_width(o), vectors = (J->H + VW - 1) / VW, G = o.G;
    const vec eps = all((float)J->eps);
    for (int64_t t = 0; t < J->T; t++) {
        if (is_own(J, t)) continue;
        const int64_t slot = (J->fixed_per_step ? t * J->ldc : 0) + G * J->H;
        const int64_t to = t * products_stride(C, vectors);
        const float *mean = d->fixed_mean + slot, *var = d->fixed_var + slot;
        for (int64_t c = 0; c < C; c += VW) {
            int64_t row;
            const int n = lanes_at(o, c, &row);
            store(d->used_mean + to + c, n ? load_n(mean + row, n) : (vec){0});
            store(d->used_inv + to + c, n ? rsqrt_(load_n(var + row, n) + eps) : (vec){0});
        }
        for (int64_t v = 0; v < vectors && d->gamma_c; v++) {
            const int n = (int)least(J->H - v * VW, VW);
            const int64_t from = G * J->H + v * VW;
            store(d->used_mean + to + C + v * VW, load_n(mean + from, n));
            store(d->used_inv + to + C + v * VW, rsqrt_(load_n(var + from, n) + eps));
        }
    }
}

/* How gate inputs are read, from γ, β and statistics: the batch's own, or those given. */
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
        const int any = J->outer == COLUMNS || J->outer == SUMS || J->inner == OVER_ROWS;
        for (int64_t k = 0; k < K && any; k++) {
            const int own = is_own(J, k);
            if (J->inner == OVER_ROWS && own) continue;
            const int64_t slot = own ? k * J->ldc : J->fixed_per_step ? k * J->ldc : 0;
            const float *m = (own ? d->stat_mean : d->fixed_mean) + slot;
            const float *v = (own ? d->stat_var : d->fixed_var) + slot;
            for (int64_t c = 0; c < C; c += VW) {
                int64_t row;
                const int n = lanes_at(o, c, &row);
                vec mean = {0}, inv = {0}, gamma = {0};
                if (n) {
                    mean = load_n(m + row, n), inv = rsqrt_(load_n(v + row, n) + all(eps));
                    for (int l = 0; l < n; l++) gamma[l] = d->gamma ? d->gamma[row + l] : 1.0f;
                }
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

static void row_statistics_of_input(const Crew *c, int id, int n) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t vectors = (J->H + VW - 1) / VW;
    for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++)
        for (int64_t i = 0; i < J->D; i++) {
            const Direction *d = &J->d[i];
            row_statistics(d->pre + r * J->ldx, vectors, o.G, J->H, (float)J->eps,
                           d->row_mean + r, d->row_scale + r);
        }
}

/* ---- the way back through it ---- */

/* Of the statistics of group k, whose columns begin at row: 1/√(var + ε). */
INLINE vec inv_of(const Job *J, const Direction *d, int64_t k, int64_t row, int n) {
    const int own = is_own(J, k);
    const int64_t slot = own || J->fixed_per_step ? k * J->ldc : 0;
    const float *v = (own ? d->stat_var : d->fixed_var) + slot;
    return n ? rsqrt_(load_n(v + row, n) + all((float)J->eps)) : (vec){0};
}

/* The rows of a group: d ← (d − mean of d − hat · mean of d hat)·scale, where `level` is the first
 * mean and `slope` the second over σ; both are 0 where statistics were given. */
INLINE void apply_rows(const Job *J, const Direction *d, int64_t k, int64_t from, int64_t to,
                       int64_t c, vec level, vec slope) {
    const int64_t C = width_of(J);
    const vec m = load(d->mean + k * C + c), scale = load(d->scale + k * C + c);
    for (int64_t r = from; r < to; r++) {
        float *y = d->dx + r * J->ldx + c;
        store(y, (load(y) - level - (load(d->pre + r * J->ldx + c) - m) * slope) * scale);
    }
}

/* Frame-wise: threads share steps, whose sums are at hand at once. γ's and β's gradients add up in
 * room. */
static void steps_backward(const Crew *crew, int id, int n) {
    const Job *J = crew->J;
    const Gates o = gates_of(J);
    const int64_t C = packed_width(o);
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        float *beta = crew->room + (id * J->D + i) * 2 * C, *gamma = beta + C;
        for (int64_t t = J->T * id / n; t < J->T * (id + 1) / n; t++) {
            const int64_t off = J->offsets[t], rows = J->sizes[t];
            const int own = is_own(J, t); /* else what one row has, NaN too, is not for others */
            const vec share = all(1.0f / (float)rows), none = {0};
            for (int64_t c = 0; c < C; c += VW) {
                int64_t row;
                const int have = lanes_at(o, c, &row);
                const vec m = load(d->mean + t * C + c), inv = inv_of(J, d, t, row, have);
                vec sd = {0}, sx = {0};
                for (int64_t r = off; r < off + rows; r++) {
                    const vec y = load(d->dx + r * J->ldx + c);
                    sd += y, sx += y * (load(d->pre + r * J->ldx + c) - m);
                }
                store(beta + c, load(beta + c) + sd);
                store(gamma + c, load(gamma + c) + sx * inv);
                apply_rows(J, d, t, off, off + rows, c, own ? sd * share : none,
                           own ? sx * inv * inv * share : none);
            }
        }
    }
}
static void frame_backward(const Job *J) {
    const Gates o = gates_of(J);
    const int64_t C = packed_width(o), both = 2 * C * J->D;
    float *sums = there(calloc((size_t)(J->threads * both), sizeof(float)));
    together(J, steps_backward, sums, NULL);
    for (int64_t t = 1; t < J->threads; t++)
        for (int64_t c = 0; c < both; c++) sums[c] += sums[t * both + c];
    for (int64_t i = 0; i < J->D; i++) {
        unpack_vector(o, sums + 2 * i * C, J->d[i].d_beta);
        unpack_vector(o, sums + 2 * i * C + C, J->d[i].d_gamma);
    }
    free(sums);
}

/* Sequence-wise: the loop has left Σ d in level and Σ d (x − mean) in slope, of all rows. */
static void rows_apply(const Crew *crew, int id, int n) {
    enum { FEW = 16 };
    const Job *J = crew->J;
    const int64_t C = width_of(J), to = J->N * (id + 1) / n;
    for (int64_t i = 0; i < J->D; i++)
        for (int64_t r = J->N * id / n; r < to; r += FEW)
            for (int64_t c = 0; c < C; c += VW)
                apply_rows(J, &J->d[i], 0, r, least(r + FEW, to), c, load(J->d[i].level + c),
                           load(J->d[i].slope + c));
}
static void sequence_backward(const Job *J) {
    const Gates o = gates_of(J);
    const int own = is_own(J, 0);
    const vec share = all(1.0f / (float)J->N), none = {0};
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        for (int64_t c = 0; c < packed_width(o); c += VW) {
            int64_t row;
            const int n = lanes_at(o, c, &row);
            const vec inv = inv_of(J, d, 0, row, n);
            const vec sd = load(d->level + c), sx = load(d->slope + c) * inv;
            if (n) store_n(d->d_beta + row, sd, n), store_n(d->d_gamma + row, sx, n);
            store(d->level + c, own ? sd * share : none);
            store(d->slope + c, own ? sx * inv * share : none);
        }
    }
    if (!undone_late(J)) together(J, rows_apply, NULL, NULL);
}

/* LN of the input: d ← (dγ − mean − hat · mean of dγ hat)/σ, and γ's gradient. */
static void apply_features_part(const Crew *crew, int id, int n) {
    const Job *J = crew->J;
    const int64_t C = width_of(J), G = gates_of(J).G;
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        float *sums = crew->room + (id * J->D + i) * C;
        for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++) {
            float *y = d->dx + r * J->ldx;
            const float *x = d->pre + r * J->ldx;
            const vec m = all(d->row_mean[r]), k = all(d->row_scale[r]);
            vec pd = {0}, px = {0};
            for (int64_t c = 0; c < C; c += VW) {
                const vec e = (load(x + c) - m) * k, u = load(y + c);
                const vec g = u * load(d->scale + c);
                store(sums + c, load(sums + c) + u * e);
                pd += g, px += g * e;
            }
            const float count = (float)(G * J->H);
            const vec md = all(add_up(pd) / count), mx = all(add_up(px) / count);
            for (int64_t c = 0; c < C; c += VW)
                store(y + c, (load(y + c) * load(d->scale + c) - md -
                              (load(x + c) - m) * k * mx) * k);
        }
    }
}
static void apply_features(const Job *J) {
    const int64_t C = width_of(J);
    float *sums = there(calloc((size_t)(J->threads * J->D * C), sizeof(float)));
    together(J, apply_features_part, sums, NULL);
    for (int64_t i = 0; i < J->D; i++) {
        for (int64_t t = 1; t < J->threads; t++)
            for (int64_t c = 0; c < C; c++) sums[i * C + c] += sums[(t * J->D + i) * C + c];
        unpack_vector(gates_of(J), sums + i * C, J->d[i].d_gamma);
    }
    free(sums);
}

/* ---- the loops ---- */

#define FOR_EACH_INNER(run, G, U, mode)                            \
    case mode * INNER_KINDS + NOTHING: run(G, U, mode, NOTHING); break; \
    case mode * INNER_KINDS + OVER_ROWS: run(G, U, mode, OVER_ROWS); break; \
    case mode * INNER_KINDS + OVER_FEATURES: run(G, U, mode, OVER_FEATURES); break; \
    case mode * INNER_KINDS + PRODUCTS: run(G, U, mode, PRODUCTS); break;
#define FOR_EACH_KIND(run)                     \
    switch (J->mode * INNER_KINDS + J->inner) { \
        FOR_EACH_INNER(run, 1, 2, RNN_TANH)    \
        FOR_EACH_INNER(run, 1, 2, RNN_RELU)    \
        FOR_EACH_INNER(run, 4, 1, LSTM)        \
        FOR_EACH_INNER(run, 3, 1, GRU)         \
    }

#define LANES(H) apart((((H) + BLOCK - 1) / BLOCK) * BLOCK)

static void forward_part(const Crew *c, int id, int threads) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t P = panels(o), w = panel_width(o), B = J->B, H = J->H, lanes = LANES(H);
    const int64_t packed = P * H * w, states = B * lanes;
    float *room = c->room;
    const Share s = share_of(J, id, threads);
    Loop L = {.J = J, .s = s, .vectors = (H + VW - 1) / VW, .width = P * w, .lanes = lanes};
    for (int i = s.d0; i < s.d1; i++) {
        const Direction *d = &J->d[i];
        float *mine = room + i * (packed + 3 * states), *h = mine + packed;
        pack_rows(o, H, d->w_hh, mine, P * s.me / s.of, P * (s.me + 1) / s.of);
        if (J->outer == SUMS)
            scale_rows(o, H, d->scale, mine, P * s.me / s.of, P * (s.me + 1) / s.of);
        for (int64_t r = B * s.me / s.of; r < B * (s.me + 1) / s.of; r++) {
            memset(h + r * lanes, 0, (size_t)lanes * 4);
            memset(h + 2 * states + r * lanes, 0, (size_t)lanes * 4);
            const int cut = !d->reverse && is_cut(J, 0, r);
            if (d->h0 && !cut) memcpy(h + r * lanes, d->h0 + r * H, (size_t)H * 4);
            if (d->c0 && !cut)
                memcpy(h + 2 * states + r * lanes, d->c0 + r * H, (size_t)H * 4);
            memcpy(h + states + r * lanes, h + r * lanes, (size_t)lanes * 4);
        }
    }
    const int64_t row = J->inner == OVER_FEATURES ? apart(L.width) : w + VW;
    float forgotten[8 * VW] __attribute__((aligned(64)));
    L.scratch = take((B + 4) * row), L.forgotten = forgotten;
    everybody(c, threads);
    for (int i = s.d0; i < s.d1; i++) {
        float *mine = room + i * (packed + 3 * states);
        L.d = &J->d[i], L.packed = mine;
        L.h[0] = mine + packed, L.h[1] = L.h[0] + states, L.c = L.h[1] + states;
#define RUN(G, U, mode, inner) forward_loop(&L, &c->barriers[s.barrier], G, U, mode, inner)
        FOR_EACH_KIND(RUN)
#undef RUN
    }
    free(L.scratch);
}
static void loop_forward(const Job *J) {
    float *room = take(J->D * (width_of(J) * J->H + 3 * J->B * LANES(J->H)));
    together(J, forward_part, room, NULL);
    free(room);
}

/* Whether zoneout takes gradients straight from h to the h before: 1, or 0. */
INLINE int stays_of(const Job *J) { return is_zoned(J->d[0].zone_h, J->d[0].share_h); }

static void backward_part(const Crew *c, int id, int threads) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t B = J->B, H = J->H, C = packed_width(o), lanes = LANES(H);
    const int64_t blocks = (H + BLOCK - 1) / BLOCK, packed = blocks * C * BLOCK;
    const int64_t states = B * lanes, sums = 2 * C + UNIT_SUMS * lanes;
    const int64_t each = packed + states * (1 + stays_of(J));
    float *room = c->room;
    const Share s = share_of(J, id, threads);
    Back L = {.J = J, .s = s, .vectors = (H + VW - 1) / VW, .width = C, .lanes = lanes};
    for (int i = s.d0; i < s.d1; i++) {
        const Direction *d = &J->d[i];
        float *mine = room + i * each, *carried = mine + packed;
        pack_columns(o, H, d->w_hh, mine, blocks * s.me / s.of, blocks * (s.me + 1) / s.of);
        if (C > L.vectors * o.G * VW) /* a vector of columns that no unit has */
            for (int64_t r = J->N * s.me / s.of; r < J->N * (s.me + 1) / s.of; r++) {
                store(d->dx + r * J->ldx + C - VW, (vec){0});
                store(d->dp + r * J->ldx + C - VW, (vec){0});
            }
        for (int64_t r = B * s.me / s.of; r < B * (s.me + 1) / s.of; r++) {
            memset(carried + r * lanes, 0, (size_t)lanes * 4);
            if (stays_of(J)) memset(carried + states + r * lanes, 0, (size_t)lanes * 4);
            if (d->dcn && J->mode == LSTM)
                memcpy(carried + r * lanes, d->dcn + r * H, (size_t)H * 4);
        }
    }
    const int64_t row = J->inner == OVER_FEATURES ? lanes : J->inner == NOTHING ? 0 : VW;
    L.scratch = take((B + 2) * (BLOCK + row));
    L.sums = take(sums);
    everybody(c, threads);
    for (int i = s.d0; i < s.d1; i++) {
        float *mine = room + i * each;
        memset(L.sums, 0, (size_t)sums * 4);
        L.d = &J->d[i], L.packed = mine, L.carried = mine + packed;
        L.staying = stays_of(J) ? L.carried + states : NULL;
        L.totals = c->totals + (id * J->D + i) * sums;
#define RUN(G, U, mode, inner) backward_loop(&L, &c->barriers[s.barrier], G, mode, inner)
        FOR_EACH_KIND(RUN)
#undef RUN
    }
    free(L.scratch), free(L.sums);
}
static void loop_backward(const Job *J) {
    const Gates o = gates_of(J);
    const int64_t B = J->B, H = J->H, C = packed_width(o), lanes = LANES(H);
    const int64_t blocks = (H + BLOCK - 1) / BLOCK, packed = blocks * C * BLOCK;
    const int64_t states = B * lanes, sums = 2 * C + UNIT_SUMS * lanes;
    const int64_t each = packed + states * (1 + stays_of(J));
    float *room = take(J->D * each);
    double *totals = there(calloc((size_t)(J->threads * J->D * sums), sizeof(double)));
    together(J, backward_part, room, totals);
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        double *all_ = totals + i * sums;
        for (int64_t id = 1; id < J->threads; id++)
            for (int64_t k = 0; k < sums; k++) all_[k] += totals[(id * J->D + i) * sums + k];
        float *narrow = take(2 * C);
        for (int64_t k = 0; k < 2 * C; k++) narrow[k] = (float)all_[k];
        if (J->outer == COLUMNS && !J->per_step) {
            memcpy(d->level, narrow, (size_t)C * 4), memcpy(d->slope, narrow + C, (size_t)C * 4);
        } else {
            unpack_vector(o, narrow, d->d_beta);
            if (J->inner == OVER_ROWS) unpack_vector(o, narrow + C, d->d_gamma);
            if (J->inner == OVER_FEATURES || J->inner == PRODUCTS)
                unpack_vector(o, narrow + C, d->d_gamma_hh);
        }
        free(narrow);
        for (int64_t u = 0; u < UNIT_SUMS; u++)
            for (int64_t k = 0; k < H; k++)
                d->d_units[u * J->ldo + k] = (float)all_[2 * C + u * lanes + k];
        if (d->dc0)
            for (int64_t r = 0; r < B; r++) {
                const int cut = !d->reverse && is_cut(J, 0, r);
                const float *carried = room + i * each + packed + r * lanes;
                for (int64_t k = 0; k < H; k++) d->dc0[r * H + k] = cut ? 0.0f : carried[k];
            }
    }
    free(room), free(totals);
}

/* ---- entries ---- */

void EXPORT(forward)(const Job *J) {
    if (J->I) project(J);
    else together(J, take_gates, NULL, NULL);
    if (J->outer == COLUMNS && J->batch && !measured_early(J))
        together(J, batch_statistics, NULL, NULL);
    prepare(J);
    if (J->outer == FEATURES) together(J, row_statistics_of_input, NULL, NULL);
    loop_forward(J);
}

void EXPORT(backward)(const Job *J) {
    loop_backward(J);
    weight_gradients(J, recurrent_weights_part, J->H);
    if (J->outer == COLUMNS && J->per_step) frame_backward(J);
    else if (J->outer == COLUMNS) sequence_backward(J);
    else if (J->outer == FEATURES) apply_features(J);
    if (J->I) weight_gradients(J, input_weights_part, J->I);
    if (J->dx_in && J->I) input_gradient(J);
    else if (J->dx_in) together(J, give_gates, NULL, NULL);
}

#include "softmax.h"
#include "mask.h"

/* One update of running statistics (C,) from K groups of a batch, mean and biased var (K, C) over
 * `counts` rows each, pooled. Returns 0, and leaves everything as it was, if a value is not
 * finite. */
int EXPORT(update)(int64_t K, int64_t C, int64_t ld, const float *counts, const float *mean,
                   const float *var, float share, float *running_mean, float *running_var) {
    double rows = 0;
    float check = 0;
    for (int64_t k = 0; k < K; k++) {
        rows += (double)counts[k];
        for (int64_t c = 0; c < C; c++) check += 0.0f * mean[k * ld + c] + 0.0f * var[k * ld + c];
    }
    if (check != 0.0f || rows < 2) return 0; /* 0 times NaN or infinity is NaN */
    for (int64_t c = 0; c < C; c++) {
        double m = 0, v = 0;
        for (int64_t k = 0; k < K; k++) m += (double)counts[k] * (double)mean[k * ld + c];
        m /= rows;
        for (int64_t k = 0; k < K; k++) {
            const double e = (double)mean[k * ld + c] - m;
            v += (double)counts[k] * ((double)var[k * ld + c] + e * e);
        }
        running_mean[c] += share * ((float)m - running_mean[c]);
        running_var[c] += share * ((float)(v / (rows - 1)) - running_var[c]);
    }
    return 1;
}

int EXPORT(vector_width)(void) { return VW; }
int EXPORT(job_size)(void) { return (int)sizeof(Job); }

/* torch's own OpenMP runtime: GOMP_parallel, omp_get_num_threads, omp_get_thread_num. */
void EXPORT(threads)(void *parallel, void *threads, void *thread) {
    *(void **)&omp_parallel = parallel;
    *(void **)&omp_threads = threads;
    *(void **)&omp_thread = thread;
}

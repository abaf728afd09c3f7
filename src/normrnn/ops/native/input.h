/* The product with a layer's input, and the gradients of the input and of weights. */
#include "columns.h"

enum { MANY_ROWS = 96 }; /* rows of a large product at a time: they stay in the cache */

/* Whether sequence-wise statistics are accumulated during the product with the input. */
INLINE int measures_in_product(const Job *J) {
    return J->I && J->outer == COLUMNS && J->batch && !J->per_step;
}
/* pre = x W_xᵀ in packed order; threads split rows, or panels if there are few rows. */
static void project_part(const Team *c, int id, int n) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t I = J->I, w = panel_width(o), P = panels(o), every = P * J->D, wide = every * w;
    const int Q = o.G * o.U;
    for (int64_t k = every * id / n; k < every * (id + 1) / n; k++)
        pack_rows(o, I, J->d[k / P].w_ih, c->buffer + k / P * P * I * w, k % P, k % P + 1);
    barrier_all(c, n);
    const int by_rows = J->N >= 4 * n * MOST_ROWS[Q];
    const int64_t r0 = by_rows ? J->N * id / n : 0, r1 = by_rows ? J->N * (id + 1) / n : J->N;
    const int64_t p0 = by_rows ? 0 : every * id / n, p1 = by_rows ? every : every * (id + 1) / n;
    double *M = c->totals + 2 * wide * id, *S = M + wide;
    for (int64_t r = r0; r < r1; r += MANY_ROWS)
        for (int64_t p = p0; p < p1; p++) {
            const int64_t rows = min64(MANY_ROWS, r1 - r);
            float *to = J->d[p / P].pre + r * J->ldx + p % P * w;
            panel_product(rows, I, Q, c->buffer + p * I * w, J->x + r * J->ldi, J->ldi, to, J->ldx, 0);
            for (int64_t i = 0; c->totals && i < rows; i += FEW)
                accumulate_rows(to + i * J->ldx, J->ldx, min64(FEW, rows - i), r - r0 + i, w, M + p * w,
                        S + p * w);
        }
    if (!c->totals) return;
    if (!by_rows) {
        write_statistics(J, 0, p0 * w, (p1 - p0) * w, J->N, M + p0 * w, S + p0 * w);
        return;
    }
    barrier_all(c, n);
    const int64_t from = every * id / n * w, to = every * (id + 1) / n * w;
    M = c->totals, S = M + wide; /* merge the other threads' moments into the first's */
    for (int t = 1; t < n; t++) {
        const double *m = c->totals + 2 * wide * t, *s = m + wide, before = (double)(J->N * t / n);
        const double rows = (double)(J->N * (t + 1) / n) - before, share = rows / (before + rows);
        for (int64_t k = from; k < to; k++) {
            const double e = m[k] - M[k];
            M[k] += e * share, S[k] += s[k] + e * e * before * share;
        }
    }
    write_statistics(J, 0, from, to - from, J->N, M + from, S + from);
}
/* Ready gate inputs (N, D·G·H) instead of a product, and their gradient. */
static void pack_gate_inputs(const Team *c, int id, int n) {
    const Job *J = c->J;
    for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++)
        for (int64_t d = 0; d < J->D; d++)
            pack_vector(gates_of(J), J->x + r * J->ldi + d * gates_of(J).G * J->H, 0.0f,
                        J->d[d].pre + r * J->ldx);
}
static void unpack_gate_gradients(const Team *c, int id, int n) {
    const Job *J = c->J;
    const int64_t C = gates_of(J).G * J->H;
    for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++)
        for (int64_t d = 0; d < J->D; d++)
            unpack_vector(gates_of(J), J->d[d].dx + r * J->ldx, J->dx_in + (r * J->D + d) * C);
}

static int project(const Job *J) {
    const int64_t wide = J->D * width_of(J);
    const int early = measures_in_product(J);
    float *packed = allocate(wide * J->I);
    double *sums = early ? malloc((size_t)(J->threads * 2 * wide) * 8) : NULL;
    const int failed = !packed || (early && !sums) || run_parallel(J, project_part, packed, sums);
    free(packed), free(sums);
    return failed;
}

/* dx_in = Σ over directions of dx W_x. */
static void input_gradient_part(const Team *c, int id, int n) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t I = J->I, C = packed_width(o), blocks = (I + BLOCK - 1) / BLOCK;
    for (int64_t d = 0; d < J->D; d++)
        pack_columns(o, I, J->d[d].w_ih, c->buffer + d * blocks * C * BLOCK, blocks * id / n,
                     blocks * (id + 1) / n);
    barrier_all(c, n);
    float part[MANY_ROWS * BLOCK] __attribute__((aligned(64)));
    const int by_rows = J->N >= 4 * n * MOST_ROWS[2];
    const int64_t r0 = by_rows ? J->N * id / n : 0, r1 = by_rows ? J->N * (id + 1) / n : J->N;
    const int64_t b0 = by_rows ? 0 : blocks * id / n;
    const int64_t b1 = by_rows ? blocks : blocks * (id + 1) / n;
    for (int64_t r = r0; r < r1; r += MANY_ROWS)
        for (int64_t b = b0; b < b1; b++) {
            const int64_t rows = min64(MANY_ROWS, r1 - r), have = min64(BLOCK, I - b * BLOCK);
            const int Q = block_vectors(I, b), whole = have == Q * VW;
            float *to = J->dx_in + r * I + b * BLOCK;
            for (int64_t d = 0; d < J->D; d++)
                panel_product(rows, C, Q, c->buffer + (d * blocks + b) * C * BLOCK,
                              J->d[d].dx + r * J->ldx, J->ldx, whole ? to : part,
                              whole ? I : BLOCK, d > 0);
            for (int64_t i = 0; i < rows && !whole; i++)
                memcpy(to + i * I, part + i * BLOCK, (size_t)have * 4);
        }
}
static int input_gradient(const Job *J) {
    const int64_t blocks = (J->I + BLOCK - 1) / BLOCK;
    float *packed = allocate(J->D * blocks * packed_width(gates_of(J)) * BLOCK);
    const int failed = !packed || run_parallel(J, input_gradient_part, packed, NULL);
    free(packed);
    return failed;
}

/* The state before row r of step t, as the loop read it; NULL means 0. */
INLINE const float *state_before(const Job *J, const Direction *d, int64_t t, int64_t r) {
    const int64_t p = d->reverse ? t + 1 : t - 1;
    if (p < 0 || p >= J->T || r >= J->sizes[p])
        return d->h0 && !(!d->reverse && is_reset(J, 0, r)) ? d->h0 + r * J->H : NULL;
    return is_reset(J, d->reverse ? p : t, r) ? NULL : d->out + (J->offsets[p] + r) * J->ldo;
}

/* Σ over rows of dᵀ x in the parameters' order, where x is the input or the previous state. Threads
 * split the columns of d; both are packed one slab of rows at a time, x in strips of R columns. */
enum { DEEP = 768, PAIR = 2 * VW, SLAB = 192 * 1024 };
INLINE int64_t strips_of(int64_t M) { return (M + MOST_ROWS[2] - 1) / MOST_ROWS[2]; }
static void pack_strips(const float *const *x, int64_t deep, int64_t M, float *to) {
    const int64_t strips = strips_of(M);
    for (int64_t i = 0; i < strips; i++) {
        const int64_t m = M * i / strips, R = M * (i + 1) / strips - m;
        if (R <= VW && m + VW <= M) /* the excess is overwritten */
            for (int64_t k = 0; k < deep; k++, to += R) store(to, load(x[k] + m));
        else
            for (int64_t k = 0; k < deep; k++, to += R)
                for (int64_t j = 0; j < R; j++) to[j] = x[k][m + j];
    }
}
/* Rows of d from `first` on, as [pair of vectors][row][2·VW]. With `undo` the backward pass of
 * sequence-wise normalisation is applied here, and written back if the input's gradient reads it. */
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
static void weight_gradient_part(const Team *team, const Direction *d, float *dg, int undo,
                                 int64_t M, const float *input, float *to, int id, int n) {
    const Job *J = team->J;
    float *sums = team->buffer;
    const Gates o = gates_of(J);
    const int64_t strips = strips_of(M), C = packed_width(o), pairs = (C + PAIR - 1) / PAIR;
    const int64_t ld = padded_stride(pairs * PAIR), from = pairs * id / n, end = pairs * (id + 1) / n;
    if (from == end) return;
    /* Sums of many weights leave the cache between slabs: then fewer slabs are better. */
    const int64_t most = M * C > 1 << 20 ? DEEP : DEEP / 4, some = SLAB / most / PAIR;
    const int64_t slabs = (J->N + most - 1) / most;
    const float *rows[DEEP];
    float *xs = allocate(M * most + VW), *ds = allocate(SLAB);
    float *none = calloc((size_t)M, sizeof(float));
    const int failed = !xs || !ds || !none;
    if (failed) fail(team);
    int64_t t = 0, r = 0;
    for (int64_t slab = 0; slab < slabs && !failed; slab++) {
        const int64_t k0 = J->N * slab / slabs, deep = J->N * (slab + 1) / slabs - k0;
        for (int64_t k = 0; k < deep; k++, r++) {
            while (r >= J->sizes[t]) r = 0, t++;
            const float *x = input ? input + (k0 + k) * J->ldi : state_before(J, d, t, r);
            rows[k] = x ? x : none;
        }
        pack_strips(rows, deep, M, xs);
        for (int64_t p0 = from; p0 < end; p0 += some) {
            const int64_t p1 = min64(p0 + some, end);
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
    if (failed) return;
    for (int64_t c = from * PAIR; c < min64(end * PAIR, C); c += VW) { /* transpose */
        int64_t row, m = 0;
        const int have = lanes_at(o, c, &row);
#if HAVE_SHUFFLE && VW >= 8
        if (have == VW)
            for (; m + 8 <= M; m += 8)
                for (int l = 0; l < VW; l += 8)
                    transpose8(sums + m * ld + c + l, ld, to + (row + l) * M + m, M);
#endif
        for (; m < M; m++)
            for (int l = 0; l < have; l++) to[(row + l) * M + m] = sums[m * ld + c + l];
    }
}
/* Whether the gradient of the input weights applies the backward pass of the normalisation. */
INLINE int norm_in_weight_gradient(const Job *J) {
    const int wanted = J->I && J->d[0].d_w_ih && J->d[J->D - 1].d_w_ih;
    return J->outer == COLUMNS && !J->per_step && wanted;
}
static void recurrent_weights_part(const Team *c, int id, int n) {
    const Job *J = c->J;
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        if (d->d_w_hh)
            weight_gradient_part(c, d, d->dp, 0, J->H, NULL, d->d_w_hh, id, n);
    }
}
static void input_weights_part(const Team *c, int id, int n) {
    const Job *J = c->J;
    for (int64_t i = 0; i < J->D; i++) {
        const Direction *d = &J->d[i];
        if (d->d_w_ih)
            weight_gradient_part(c, d, d->dx, norm_in_weight_gradient(J), J->I, J->x, d->d_w_ih, id, n);
    }
}
static int weight_gradients(const Job *J, task_t part, int64_t M) {
    float *sums = allocate(M * padded_stride(round_up(packed_width(gates_of(J)), PAIR)));
    const int failed = !sums || run_parallel(J, part, sums, NULL);
    free(sums);
    return failed;
}

/* A recurrent layer, all directions of it: the product with its input, normalisation, the loop
 * over time, and the backward pass. Functions for Python are at the end. */
#include "normalise.h"
#include "arguments.h"

#ifndef VARIANT
#define VARIANT plain
#endif
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define EXPORT(name) __attribute__((visibility("default"))) JOIN(normrnn_##name, VARIANT)

/* ---- the loops ---- */

#define EACH_INNER(run, mode)                                                       \
    case mode * INNER_KINDS + NO_NORM: run(mode, NO_NORM); break;                   \
    case mode * INNER_KINDS + OVER_ROWS: run(mode, OVER_ROWS); break;               \
    case mode * INNER_KINDS + OVER_FEATURES: run(mode, OVER_FEATURES); break;       \
    case mode * INNER_KINDS + PRODUCTS: run(mode, PRODUCTS); break;
#define DISPATCH(run)                           \
    switch (J->mode * INNER_KINDS + J->inner) { \
        EACH_INNER(run, RNN_TANH)               \
        EACH_INNER(run, RNN_RELU)               \
        EACH_INNER(run, LSTM)                   \
        EACH_INNER(run, GRU)                    \
    }

#define LANES(H) padded_stride((((H) + BLOCK - 1) / BLOCK) * BLOCK)

static void forward_part(const Team *c, int id, int threads) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t P = panels(o), B = J->B, H = J->H, lanes = LANES(H);
    const int64_t packed = packed_width(o) * H, states = B * lanes;
    float *buffer = c->buffer;
    const Share s = share_of(J, id, threads);
    ForwardLoop L = {.J = J, .s = s, .vectors = (H + VW - 1) / VW, .lanes = lanes};
    L.width = packed_width(o);
    for (int i = s.d0; i < s.d1; i++) {
        const Direction *d = &J->d[i];
        float *area = buffer + i * (packed + 3 * states), *h = area + packed;
        pack_rows(o, H, d->w_hh, area, P * s.me / s.of, P * (s.me + 1) / s.of);
        if (J->outer == SUMS)
            scale_rows(o, H, d->scale, area, P * s.me / s.of, P * (s.me + 1) / s.of);
        for (int64_t r = B * s.me / s.of; r < B * (s.me + 1) / s.of; r++) {
            memset(h + r * lanes, 0, (size_t)lanes * 4);
            memset(h + 2 * states + r * lanes, 0, (size_t)lanes * 4);
            const int cut = !d->reverse && is_reset(J, 0, r);
            if (d->h0 && !cut) memcpy(h + r * lanes, d->h0 + r * H, (size_t)H * 4);
            if (d->c0 && !cut)
                memcpy(h + 2 * states + r * lanes, d->c0 + r * H, (size_t)H * 4);
            memcpy(h + states + r * lanes, h + r * lanes, (size_t)lanes * 4);
        }
    }
    const int64_t row = J->inner == OVER_FEATURES ? padded_stride(L.width) : panel_width(o) + VW;
    float unused_trace[8 * VW] __attribute__((aligned(64)));
    L.scratch = allocate((B + 4) * row), L.unused_trace = unused_trace;
    if (!L.scratch) fail(c);
    barrier_all(c, threads);
    for (int i = s.d0; i < s.d1 && !has_failed(c); i++) {
        float *area = buffer + i * (packed + 3 * states);
        L.d = &J->d[i], L.packed = area;
        L.h[0] = area + packed, L.h[1] = L.h[0] + states, L.c = L.h[1] + states;
#define RUN(mode, inner) forward_loop(&L, &c->barriers[s.barrier], mode, inner)
        DISPATCH(RUN)
#undef RUN
    }
    free(L.scratch);
}
static int loop_forward(const Job *J) {
    float *buffer = allocate(J->D * (width_of(J) * J->H + 3 * J->B * LANES(J->H)));
    const int failed = !buffer || run_parallel(J, forward_part, buffer, NULL);
    free(buffer);
    return failed;
}

/* Whether zoneout passes gradients from h directly to the previous h: 1 or 0. */
INLINE int has_hidden_zoneout(const Job *J) { return has_zoneout(J->d[0].zone_h, J->d[0].share_h); }

static void backward_part(const Team *c, int id, int threads) {
    const Job *J = c->J;
    const Gates o = gates_of(J);
    const int64_t B = J->B, H = J->H, C = packed_width(o), lanes = LANES(H);
    const int64_t blocks = (H + BLOCK - 1) / BLOCK, packed = blocks * o.G * H * BLOCK;
    const int64_t states = B * lanes, sums = 2 * C + UNIT_SUMS * lanes;
    const int64_t each = packed + states * (1 + has_hidden_zoneout(J));
    float *buffer = c->buffer;
    const Share s = share_of(J, id, threads);
    BackwardLoop L = {.J = J, .s = s, .vectors = (H + VW - 1) / VW, .width = C, .lanes = lanes};
    for (int i = s.d0; i < s.d1; i++) {
        const Direction *d = &J->d[i];
        float *area = buffer + i * each, *carried = area + packed;
        pack_columns(o, H, d->w_hh, area, blocks * s.me / s.of, blocks * (s.me + 1) / s.of);
        for (int64_t r = B * s.me / s.of; r < B * (s.me + 1) / s.of; r++) {
            memset(carried + r * lanes, 0, (size_t)lanes * 4);
            if (has_hidden_zoneout(J)) memset(carried + states + r * lanes, 0, (size_t)lanes * 4);
            if (d->dcn && J->mode == LSTM)
                memcpy(carried + r * lanes, d->dcn + r * H, (size_t)H * 4);
        }
    }
    const int64_t row = J->inner == OVER_FEATURES ? lanes : J->inner == NO_NORM ? 0 : VW;
    L.scratch = allocate((B + 2) * (BLOCK + row));
    L.sums = allocate(sums);
    if (!L.scratch || !L.sums) fail(c);
    barrier_all(c, threads);
    for (int i = s.d0; i < s.d1 && !has_failed(c); i++) {
        float *area = buffer + i * each;
        memset(L.sums, 0, (size_t)sums * 4);
        L.d = &J->d[i], L.packed = area, L.carried = area + packed;
        L.zoneout_carried = has_hidden_zoneout(J) ? L.carried + states : NULL;
        L.totals = c->totals + (id * J->D + i) * sums;
#define RUN(mode, inner) backward_loop(&L, &c->barriers[s.barrier], mode, inner)
        DISPATCH(RUN)
#undef RUN
    }
    free(L.scratch), free(L.sums);
}
static int loop_backward(const Job *J) {
    const Gates o = gates_of(J);
    const int64_t B = J->B, H = J->H, C = packed_width(o), lanes = LANES(H);
    const int64_t blocks = (H + BLOCK - 1) / BLOCK, packed = blocks * o.G * H * BLOCK;
    const int64_t states = B * lanes, sums = 2 * C + UNIT_SUMS * lanes;
    const int64_t each = packed + states * (1 + has_hidden_zoneout(J));
    float *buffer = allocate(J->D * each), *single = allocate(2 * C);
    double *totals = calloc((size_t)(J->threads * J->D * sums), sizeof(double));
    const int failed =
        !buffer || !single || !totals || run_parallel(J, backward_part, buffer, totals);
    for (int64_t i = 0; i < J->D && !failed; i++) {
        const Direction *d = &J->d[i];
        double *all_ = totals + i * sums;
        for (int64_t id = 1; id < J->threads; id++)
            for (int64_t k = 0; k < sums; k++) all_[k] += totals[(id * J->D + i) * sums + k];
        for (int64_t k = 0; k < 2 * C; k++) single[k] = (float)all_[k];
        if (J->outer == COLUMNS && !J->per_step) {
            memcpy(d->level, single, (size_t)C * 4), memcpy(d->slope, single + C, (size_t)C * 4);
        } else {
            unpack_vector(o, single, d->d_beta);
            if (J->inner == OVER_ROWS) unpack_vector(o, single + C, d->d_gamma);
            if (J->inner == OVER_FEATURES || J->inner == PRODUCTS)
                unpack_vector(o, single + C, d->d_gamma_hh);
        }
        for (int64_t u = 0; u < UNIT_SUMS; u++)
            for (int64_t k = 0; k < H && d->d_unit[u]; k++)
                d->d_unit[u][k] = (float)all_[2 * C + u * lanes + k];
        if (d->dc0)
            for (int64_t r = 0; r < B; r++) {
                const int cut = !d->reverse && is_reset(J, 0, r);
                const float *carried = buffer + i * each + packed + r * lanes;
                for (int64_t k = 0; k < H; k++) d->dc0[r * H + k] = cut ? 0.0f : carried[k];
            }
    }
    free(buffer), free(single), free(totals);
    return failed;
}

/* ---- functions for Python ---- */

static int run_forward(const Job *J) {
    if (J->I ? project(J) : run_parallel(J, pack_gate_inputs, NULL, NULL)) return 1;
    if (J->outer == COLUMNS && J->batch && !measures_in_product(J) &&
        run_parallel(J, batch_statistics, NULL, NULL))
        return 1;
    prepare(J);
    if (J->outer == FEATURES) run_parallel(J, row_statistics_of_input, NULL, NULL);
    return loop_forward(J);
}

static int run_backward(const Job *J) {
    if (loop_backward(J)) return 1;
    /* Both gradients of weights at once, unless one needs `dx` as the loop left it. */
    const int is_apart = J->d[0].dp != J->d[0].dx;
    const int at_once = is_apart || J->outer == PLAIN || norm_in_weight_gradient(J);
    if (!at_once && weight_gradients(J, 1, 0)) return 1;
    if (J->outer == COLUMNS && J->per_step && frame_backward(J)) return 1;
    if (J->outer == COLUMNS && !J->per_step) sequence_backward(J);
    if (J->outer == FEATURES && apply_features(J)) return 1;
    if (weight_gradients(J, at_once, J->I > 0)) return 1;
    if (!J->dx_in) return 0;
    return J->I ? input_gradient(J) : run_parallel(J, unpack_gate_gradients, NULL, NULL);
}

static int run(const Arguments *a, int is_backward) {
    Job J;
    int64_t kept;
    const int64_t floats = lay_out(a, is_backward, NULL, &J, &kept);
    float *scratch = allocate(floats);
    if (!scratch) return 1;
    lay_out(a, is_backward, scratch, &J, &kept);
    if (!is_backward && a->keep) use_large_pages(a->kept, kept * 4);
    const int failed = is_backward ? run_backward(&J) : run_forward(&J);
    free(scratch);
    return failed;
}
/* Both return 1 if an allocation failed; the outputs are then undefined. */
int EXPORT(forward)(const Arguments *a) { return run(a, 0); }
int EXPORT(backward)(const Arguments *a) { return run(a, 1); }
/* The floats of `kept` that a call with `keep` needs. Pointers are not read. */
int64_t EXPORT(kept_floats)(const Arguments *a) {
    Job J;
    int64_t kept;
    lay_out(a, 0, NULL, &J, &kept);
    return kept;
}

#include "softmax.h"

/* One update of running statistics (C,) from K groups of a batch, mean and biased var (K, C) over
 * `counts` rows each, pooled. Of the first `inputs` columns, those of W_x x, groups whose rows are
 * all equal are left out; `counted` has space for K numbers. Returns 0, and leaves everything as it
 * was, if a value is not finite or no group has more than one row. */
int EXPORT(update)(int64_t K, int64_t C, int64_t ld, int64_t inputs, const float *counts,
                   float *counted, const float *mean, const float *var, float share,
                   float *running_mean, float *running_var) {
    double all_rows = 0, input_rows = 0;
    float check = 0, all_most = 0, input_most = 0;
    for (int64_t k = 0; k < K; k++) {
        const float n = counts[k];
        counted[k] = inputs && n > 1 && is_constant(inputs, mean + k * ld, var + k * ld) ? 0.0f : n;
        all_rows += (double)n, input_rows += (double)counted[k];
        if (n > all_most) all_most = n;
        if (counted[k] > input_most) input_most = counted[k];
        for (int64_t c = 0; c < C; c++) check += 0.0f * mean[k * ld + c] + 0.0f * var[k * ld + c];
    }
    if (check != 0.0f) return 0; /* 0 times NaN or infinity is NaN */
    int done = 0;
    for (int64_t c = 0; c < C; c++) {
        const int is_input = c < inputs;
        const float *n = is_input ? counted : counts;
        const double rows = is_input ? input_rows : all_rows;
        if ((is_input ? input_most : all_most) <= 1) continue;
        double m = 0, v = 0;
        for (int64_t k = 0; k < K; k++) m += (double)n[k] * (double)mean[k * ld + c];
        m /= rows;
        for (int64_t k = 0; k < K; k++) {
            const double e = (double)mean[k * ld + c] - m;
            v += (double)n[k] * ((double)var[k * ld + c] + e * e);
        }
        running_mean[c] += share * ((float)m - running_mean[c]);
        running_var[c] += share * ((float)(v / (rows - 1)) - running_var[c]);
        done = 1;
    }
    return done;
}

int EXPORT(arguments_size)(void) { return (int)sizeof(Arguments); }

/* torch's own OpenMP runtime: GOMP_parallel, omp_get_num_threads, omp_get_thread_num. */
void EXPORT(threads)(void *parallel, void *threads, void *thread) {
    *(void **)&omp_parallel = parallel;
    *(void **)&omp_threads = threads;
    *(void **)&omp_thread = thread;
}

/* A recurrent layer, all directions of it: the product with its input, normalisation, the loop
 * over time, and the backward pass. Functions for Python are at the end. */
#include "vector.h" /* in reading order: each file uses those before it */
#include "product.h"
#include "job.h"
#include "arguments.h"
#include "forward.h"
#include "backward.h"
#include "input.h"
#include "normalise.h"

#ifndef VARIANT
#define VARIANT plain
#endif
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define EXPORT(name) __attribute__((visibility("default"))) JOIN(normrnn_##name, VARIANT)

/* One compiled loop for each cell and kind of norm inside the loop. */
#define CASE(loop, mode, inner)      \
    case mode * INNER_KINDS + inner: \
        loop(&L, &team->barriers[s.barrier], mode, inner); break;
#define EACH_INNER(loop, mode)                                     \
    CASE(loop, mode, NO_NORM) CASE(loop, mode, OVER_ROWS)          \
    CASE(loop, mode, OVER_FEATURES) CASE(loop, mode, PRODUCTS)
#define DISPATCH(loop)                                             \
    switch (J->mode * INNER_KINDS + J->inner) {                    \
        EACH_INNER(loop, RNN_TANH) EACH_INNER(loop, RNN_RELU)      \
        EACH_INNER(loop, LSTM) EACH_INNER(loop, GRU)               \
        EACH_INNER(loop, LIGRU)                                    \
    }

/* The scratch memory of a loop, for each direction: its packed recurrent weights, then blocks of
 * states (B, lanes): forward h before and after a step, and c; backward the carried gradients. */
typedef struct {
    int64_t lanes, weights, states, floats; /* floats: of one direction */
} LoopMemory;
static LoopMemory loop_memory(const Job *J, int is_backward) {
    const int64_t lanes = padded_stride(round_up(J->H, BLOCK)), states = J->B * lanes;
    const int64_t weights = is_backward ? gates_of(J).G * J->H * round_up(J->H, BLOCK)
                                        : width_of(J) * J->H;
    const int64_t blocks = is_backward ? 1 + (J->d[0].zoneout_h.at != NULL) : 3;
    return (LoopMemory){lanes, weights, states, weights + blocks * states};
}

static void forward_part(const Team *team, int id, int threads) {
    const Job *J = team->J;
    const LoopMemory m = loop_memory(J, 0);
    const Gates o = gates_of(J);
    const int64_t P = panels(o), B = J->B, H = J->H;
    const Share s = share_of(J, id, threads);
    ForwardLoop L = {.J = J, .s = s, .vectors = (H + VW - 1) / VW, .lanes = m.lanes};
    L.width = packed_width(o);
    for (int i = s.d0; i < s.d1; i++) {
        const Direction *d = &J->d[i];
        float *weights = team->buffer + i * m.floats, *h = weights + m.weights;
        pack_rows(o, H, d->w_hh, weights, P * s.me / s.of, P * (s.me + 1) / s.of);
        for (int64_t r = B * s.me / s.of; r < B * (s.me + 1) / s.of; r++) {
            float *h_before = h + r * m.lanes, *c = h_before + 2 * m.states;
            memset(h_before, 0, (size_t)m.lanes * 4), memset(c, 0, (size_t)m.lanes * 4);
            const float *h0 = start_of(J, d, r, d->h0, d->reset_h);
            const float *c0 = start_of(J, d, r, d->c0, d->reset_c);
            if (h0) memcpy(h_before, h0, (size_t)H * 4);
            if (c0) memcpy(c, c0, (size_t)H * 4);
            memcpy(h_before + m.states, h_before, (size_t)m.lanes * 4);
        }
    }
    const int64_t row = J->inner == OVER_FEATURES ? padded_stride(L.width) + VW : panel_width(o) + VW;
    float unused_trace[8 * VW] __attribute__((aligned(64)));
    L.scratch = allocate((B + 4) * row), L.unused_trace = unused_trace;
    if (!L.scratch) fail(team);
    barrier_all(team, threads);
    for (int i = s.d0; i < s.d1 && !has_failed(team); i++) {
        L.d = &J->d[i], L.packed = team->buffer + i * m.floats;
        L.h[0] = L.packed + m.weights, L.h[1] = L.h[0] + m.states, L.c = L.h[1] + m.states;
        DISPATCH(forward_loop)
    }
    free(L.scratch);
}
static int loop_forward(const Job *J) {
    float *buffer = allocate(J->D * loop_memory(J, 0).floats);
    const int failed = !buffer || run_parallel(J, forward_part, buffer, NULL, NULL);
    free(buffer);
    return failed;
}

static void backward_part(const Team *team, int id, int threads) {
    const Job *J = team->J;
    const LoopMemory m = loop_memory(J, 1);
    const Gates o = gates_of(J);
    const int64_t B = J->B, H = J->H, blocks = (H + BLOCK - 1) / BLOCK;
    const int64_t carried = m.floats - m.weights;
    const Share s = share_of(J, id, threads);
    BackwardLoop L = {.J = J, .s = s, .vectors = (H + VW - 1) / VW, .lanes = m.lanes};
    L.width = packed_width(o);
    const int64_t sums = sum_floats(&L);
    for (int i = s.d0; i < s.d1; i++) {
        const Direction *d = &J->d[i];
        float *weights = team->buffer + i * m.floats, *first = weights + m.weights;
        pack_columns(o, H, d->w_hh, weights, blocks * s.me / s.of, blocks * (s.me + 1) / s.of);
        for (int64_t r = B * s.me / s.of; r < B * (s.me + 1) / s.of; r++) {
            for (int64_t block = 0; block < carried; block += m.states)
                memset(first + block + r * m.lanes, 0, (size_t)m.lanes * 4);
            if (d->dcn && J->mode == LSTM)
                memcpy(first + r * m.lanes, d->dcn + r * H, (size_t)H * 4);
        }
    }
    const int64_t row = J->inner == OVER_FEATURES ? m.lanes + 3 * VW : J->inner == NO_NORM ? 0 : VW;
    L.scratch = allocate((B + 2) * (BLOCK + row)), L.sums = allocate(sums);
    if (!L.scratch || !L.sums) fail(team);
    barrier_all(team, threads);
    for (int i = s.d0; i < s.d1 && !has_failed(team); i++) {
        memset(L.sums, 0, (size_t)sums * 4);
        L.d = &J->d[i], L.packed = team->buffer + i * m.floats, L.carried = L.packed + m.weights;
        L.zoneout_carried = carried > m.states ? L.carried + m.states : NULL;
        L.totals = team->totals + (id * J->D + i) * sums;
        DISPATCH(backward_loop)
    }
    free(L.scratch), free(L.sums);
}
/* Write a direction's gradients that are sums over rows, from the sums of all threads. */
static void write_sums(const Job *J, const Direction *d, int64_t lanes, const double *sums,
                       float *in_float) {
    const int64_t C = width_of(J);
    for (int64_t k = 0; k < 2 * C; k++) in_float[k] = (float)sums[k];
    if (J->outer == COLUMNS && !J->per_step) {
        memcpy(d->level, in_float, (size_t)C * 4), memcpy(d->slope, in_float + C, (size_t)C * 4);
    } else {
        unpack_vector(gates_of(J), in_float, d->d_beta);
        if (J->inner == OVER_ROWS) unpack_vector(gates_of(J), in_float + C, d->d_gamma);
        if (J->inner == OVER_FEATURES || J->inner == PRODUCTS)
            unpack_vector(gates_of(J), in_float + C, d->d_gamma_hh);
    }
    for (int64_t u = 0; u < UNIT_SUMS; u++)
        for (int64_t k = 0; k < J->H && d->d_unit[u]; k++)
            d->d_unit[u][k] = (float)sums[2 * C + u * lanes + k];
}
static int loop_backward(const Job *J) {
    const LoopMemory m = loop_memory(J, 1);
    const int64_t C = width_of(J), sums = 2 * C + UNIT_SUMS * m.lanes;
    float *buffer = allocate(J->D * m.floats), *in_float = allocate(2 * C);
    double *totals = calloc((size_t)(J->threads * J->D * sums), sizeof(double));
    const int failed =
        !buffer || !in_float || !totals || run_parallel(J, backward_part, buffer, totals, NULL);
    for (int64_t i = 0; i < J->D && !failed; i++) {
        const Direction *d = &J->d[i];
        const float *carried = buffer + i * m.floats + m.weights;
        for (int64_t id = 1; id < J->threads; id++)
            for (int64_t k = 0; k < sums; k++)
                totals[i * sums + k] += totals[(id * J->D + i) * sums + k];
        write_sums(J, d, m.lanes, totals + i * sums, in_float);
        for (int64_t r = 0; J->mode == LSTM && r < J->B; r++) {
            const int cut = !d->reverse && is_reset(J, 0, r);
            for (int64_t k = r * J->H, j = r * m.lanes; k < (r + 1) * J->H; k++, j++) {
                if (d->dc0) d->dc0[k] = cut ? 0.0f : carried[j];
                if (cut && d->d_reset_c) d->d_reset_c[k] += carried[j];
            }
        }
    }
    free(buffer), free(in_float), free(totals);
    return failed;
}

/* ---- functions for Python ---- */

static int run_forward(const Job *J) {
    if (J->I ? project(J) : run_parallel(J, convert_gates, NULL, NULL, NULL)) return 1;
    if (J->outer == COLUMNS && J->batch && !measures_in_product(J) &&
        run_parallel(J, batch_statistics, NULL, NULL, NULL))
        return 1;
    prepare(J);
    if (J->outer == FEATURES) run_parallel(J, row_statistics_of_input, NULL, NULL, NULL);
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
    return J->I ? input_gradient(J) : run_parallel(J, convert_gates, NULL, NULL, NULL);
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


/* One update of running statistics (C,) from K groups of a batch, mean and biased var (K, C) over
 * `counts` rows each, pooled. Of the first `inputs` columns, those of W_x x, groups whose rows are
 * all equal are left out; `counted` has space for K numbers. Groups without rows may hold anything.
 * Returns 0, and leaves everything as it was, if a value is not finite or no group has more than one
 * row. */
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
        for (int64_t c = 0; c < C && n > 0; c++)
            check += 0.0f * mean[k * ld + c] + 0.0f * var[k * ld + c];
    }
    if (check != 0.0f) return 0; /* 0 times NaN or infinity is NaN */
    int done = 0;
    for (int64_t c = 0; c < C; c++) {
        const int is_input = c < inputs;
        const float *n = is_input ? counted : counts;
        const double rows = is_input ? input_rows : all_rows;
        if ((is_input ? input_most : all_most) <= 1) continue;
        double m = 0, v = 0;
        for (int64_t k = 0; k < K; k++)
            if (n[k] > 0) m += (double)n[k] * (double)mean[k * ld + c];
        m /= rows;
        for (int64_t k = 0; k < K; k++) {
            if (n[k] <= 0) continue;
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

/* Addresses in torch's OpenMP runtime: GOMP_parallel, omp_get_num_threads, omp_get_thread_num. */
void EXPORT(threads)(void *parallel, void *threads, void *thread) {
    *(void **)&omp_parallel = parallel;
    *(void **)&omp_threads = threads;
    *(void **)&omp_thread = thread;
}

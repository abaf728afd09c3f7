/* Columns of gate inputs: conversion to and from packed order, and their statistics. */
#include "backward.h"

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

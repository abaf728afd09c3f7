/* What a call computes, as Python fills it in, and how threads share it out.
 *
 * Rows are the frames of a packed batch, N = Σ sizes, step by step. Inside, the columns of gates
 * lie in *packed order* (product.h): a vector of units has its gates side by side, padded with 0
 * to whole vectors. `ldx` is the distance between rows of such a buffer, all directions side by
 * side; a direction's pointers begin at its own columns. Fields are 8 bytes each.
 */
#ifndef NORMRNN_JOB_H
#define NORMRNN_JOB_H
#include "product.h"

enum { RNN_TANH, RNN_RELU, LSTM, GRU };
/* What is normalised before the loop: nothing, the columns of W_x x, or its rows ("layer"). SUMS:
 * those of W_x x + W_h h, by given statistics, the same at every step: W_h is scaled as it is
 * packed, and a step has nothing left to do. There is no way back. */
enum { PLAIN, COLUMNS, FEATURES, SUMS };
/* What is normalised inside a step: nothing, its sums over the rows of the step ("hidden"), the
 * recurrent product over the features of a row ("layer"), or over the rows of the step
 * ("recurrent"); with the last two the cell too. */
enum { NOTHING, OVER_ROWS, OVER_FEATURES, PRODUCTS, INNER_KINDS };
enum { SPLIT_UNITS, SPLIT_ROWS };
/* Sums over rows that belong to units: gradients of peepholes, bias_hn, γ and β of the cell. */
enum { PEEP_I, PEEP_F, PEEP_O, BIAS_HN, GAMMA_C, BETA_C, UNIT_SUMS };

typedef struct {
    int64_t reverse;
    const float *w_ih, *w_hh;           /* (G·H, I), (G·H, H) */
    const float *gamma, *beta;          /* (G·H) or NULL: 1, 0; beta is the bias of no norm */
    const float *gamma_hh;              /* (G·H) or NULL; of a normalised product */
    const float *gamma_c, *beta_c;      /* (H) or NULL; of a normalised cell */
    const float *bias_hn;               /* (H) or NULL */
    const float *peephole[3];           /* (H) or NULL */
    const uint8_t *zone_h, *zone_c;     /* (N, ldo) or NULL: 1 where the state before stays */
    const float *share_h, *share_c;     /* (H) or NULL: how much of it stays */
    const float *h0, *c0;               /* (B, H) or NULL: 0 */
    const float *fixed_mean, *fixed_var; /* (1 or T, ldc) or NULL: not the batch's */
    float *stat_mean, *stat_var;        /* (1 or T, ldc): of the batch; PRODUCTS: of W_x x, */
                                        /* then of the product, then of the cell */
    float *out, *hn, *cn;               /* (N, ldo); (B, H) each */
    /* Ours, kept for the way back: */
    float *pre;                         /* (N, ldx): W_x x */
    float *mean, *scale, *shift;        /* how a gate input is read: (x − mean)·scale + shift; */
                                        /* mean and scale (1 or T, width), shift (width) */
    float *gamma_h;                     /* gamma_hh in packed order */
    float *row_mean, *row_scale;        /* OVER_FEATURES: mean and 1/σ of each row of pre (N) */
    float *used_mean, *used_inv;        /* OVER_ROWS: (T, width) what a step was normalised by; */
                                        /* PRODUCTS: (T, width and a vector per vector of units) */
    float *trace, *hat;                 /* by step, vector of units and row */
    float *inv;                         /* OVER_FEATURES: 1/σ of products (N), of cells (N) */
    /* The way back: */
    const float *dout, *dhn, *dcn;      /* (N, ldo), (B, H), (B, H), or NULL */
    float *dx, *dp;                     /* (N, ldx): of gate inputs, of products; may be one */
    float *d_w_ih, *d_w_hh, *d_gamma, *d_beta, *d_gamma_hh, *d_units; /* (UNIT_SUMS, ldo) */
    float *dh0, *dc0;                   /* (B, H) or NULL */
    float *level, *slope;               /* (width): sequence-wise sums, then means */
} Direction;

typedef struct {
    int64_t T, B, N, H, I, D, threads, mode, outer, inner, split;
    int64_t ldi, ldx, ldo, ldc;   /* between rows of x, of packed buffers, of out, of statistics */
    int64_t per_step;             /* statistics of every step, not of all rows */
    int64_t batch;                /* normalise by the batch's own statistics */
    int64_t fixed_per_step;       /* fixed_mean and fixed_var have a row per step */
    int64_t keep;                 /* whether there will be a way back */
    double eps;
    const int64_t *sizes, *offsets; /* (T) */
    const uint8_t *resets;          /* (N) or NULL */
    const float *x;                 /* (N, I); with I = 0 ready gate inputs (N, D·G·H) */
    float *dx_in;                   /* like x, or NULL */
    Direction d[2];
} Job;

INLINE Gates gates_of(const Job *J) {
    return (Gates){J->H, J->mode == LSTM ? 4 : J->mode == GRU ? 3 : 1, J->mode <= RNN_RELU ? 2 : 1};
}

/* Waits a while, then lets others run: two processes may share the cores. */
typedef struct {
    int64_t waiting;
    char far[56];
    int64_t round;
    char away[56];
} Barrier;
INLINE void meet(Barrier *b, int n) {
    if (n <= 1) return;
    const int64_t round = __atomic_load_n(&b->round, __ATOMIC_ACQUIRE);
    if (__atomic_fetch_add(&b->waiting, 1, __ATOMIC_ACQ_REL) == n - 1) {
        __atomic_store_n(&b->waiting, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&b->round, __ATOMIC_ACQUIRE) == round; spins++) {
        PAUSE();
        if (spins > 2000) sched_yield();
    }
}

/* A call in parallel: the threads are those of torch's own OpenMP runtime, whose entries Python
 * hands over, so that no second runtime is ever linked; without them there is one thread. */
typedef struct Crew Crew;
typedef void (*part_t)(const Crew *, int id, int threads);
struct Crew {
    const Job *J;
    part_t part;
    float *room;
    double *totals;
    Barrier *barriers; /* one for each direction's team, one for everybody */
    const void *more;  /* what only this part knows of */
    int *failed;       /* set by a thread that was refused memory */
};
INLINE void fail(const Crew *c) { __atomic_store_n(c->failed, 1, __ATOMIC_RELAXED); }
INLINE int has_failed(const Crew *c) { return __atomic_load_n(c->failed, __ATOMIC_RELAXED); }
static void (*omp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_threads)(void);
static int (*omp_thread)(void);
static void enter(void *crew) {
    ((const Crew *)crew)->part(crew, omp_thread(), omp_threads());
}
/* Returns whether a thread was refused memory. */
static int together_about(const Job *J, part_t part, float *room, double *totals,
                          const void *more) {
    Barrier barriers[3] = {0};
    int failed = 0;
    Crew crew = {J, part, room, totals, barriers, more, &failed};
    if (omp_parallel && J->threads > 1) omp_parallel(enter, &crew, (unsigned)J->threads, 0);
    else part(&crew, 0, 1);
    return failed;
}
static int together(const Job *J, part_t part, float *room, double *totals) {
    return together_about(J, part, room, totals, NULL);
}
INLINE void everybody(const Crew *c, int threads) { meet(&c->barriers[2], threads); }

/* A thread's part: directions, rows row0, row0 + stride, … below row1, blocks of units [from, to).
 * Threads that split the rows never wait for each other inside the loop; those that split units
 * meet at every step. Neighbouring rows are one thread's, so that no two write side by side, but
 * for a ragged batch, where all are to have long ones and short ones. */
typedef struct {
    int d0, d1, team, barrier;
    int64_t row0, row1, stride, from, to;
    int me, of; /* of its direction's threads, for what is shared out evenly */
} Share;

INLINE Share share_of(const Job *J, int id, int threads) {
    const int64_t blocks = (J->H + BLOCK - 1) / BLOCK;
    Share s = {.d0 = 0, .d1 = (int)J->D, .team = threads, .row1 = J->B, .stride = 1, .to = blocks};
    int me = id;
    if (J->D == 2 && threads > 1) { /* a team for each direction */
        const int d = id * 2 / threads, lo = (threads * d + 1) / 2;
        s.d0 = d, s.d1 = d + 1, s.barrier = d, s.team = (threads * (d + 1) + 1) / 2 - lo;
        me = id - lo;
    }
    s.me = me, s.of = s.team;
    if (J->split == SPLIT_UNITS) {
        s.from = blocks * me / s.team, s.to = blocks * (me + 1) / s.team;
    } else {
        if (J->sizes[J->T - 1] < J->B) s.row0 = me, s.stride = s.team;
        else s.row0 = J->B * me / s.team, s.row1 = J->B * (me + 1) / s.team;
        s.team = 1;
    }
    return s;
}
INLINE int64_t rows_of(Share s, int64_t rows) {
    const int64_t end = least(rows, s.row1);
    return end > s.row0 ? (end - s.row0 + s.stride - 1) / s.stride : 0;
}
/* Zoneout: what a state becomes where something of the one before stays, and the way back, from
 * its gradient to that of the new one; *stays is that of the old one. `at` is a row in the mask,
 * v a vector of units of which n exist. */
INLINE int is_zoned(const uint8_t *zone, const float *share) { return zone || share; }
INLINE vec zoned(const uint8_t *zone, const float *share, int64_t at, int64_t v, int n, vec old,
                 vec new_) {
    if (zone) return choose(set_in(zone + at + v * VW, n), old, new_);
    return new_ + load_n(share + v * VW, n) * (old - new_);
}
INLINE vec zone_back(const uint8_t *zone, const float *share, int64_t at, int64_t v, int n, vec dy,
                     vec *stays) {
    if (zone) {
        const ivec m = set_in(zone + at + v * VW, n);
        *stays = choose(m, dy, (vec){0});
        return choose(m, (vec){0}, dy);
    }
    *stays = load_n(share + v * VW, n) * dy;
    return dy - *stays;
}
/* Whether the state that row r hands on after step t is cut off: by a reset at the later frame. */
INLINE int is_cut(const Job *J, int64_t later, int64_t r) {
    return J->resets && J->resets[J->offsets[later] + r];
}
#endif

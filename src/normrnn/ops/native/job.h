/* The work of one call (filled in by arguments.h), and how threads share it.
 *
 * T time steps, B sequences, N rows (unpadded frames, step by step: N = Σ sizes), I inputs, H units,
 * G gates, D directions; a letter in brackets is a dimension. Columns of gates are in *packed order*
 * (product.h): a vector of units has its gates side by side. A *gate buffer* is [panel][row][columns
 * of the panel], so that the rows of a time step lie side by side. */

enum { RNN_TANH, RNN_RELU, LSTM, GRU, LIGRU };
/* What is normalised before the loop: nothing, the columns of W_x x, or its rows ("layer", "rms"). */
enum { PLAIN, COLUMNS, FEATURES };
/* What is normalised inside a step: nothing, its sums over the rows of the step ("hidden"), the
 * recurrent product over the features of a row ("layer", "rms"), or over the rows of the step
 * ("recurrent"); with the last two the cell too. */
enum { NO_NORM, OVER_ROWS, OVER_FEATURES, PRODUCTS, INNER_KINDS };
enum { SPLIT_UNITS, SPLIT_ROWS };
/* Sums over rows that belong to units: gradients of peepholes, bias_hn, γ and β of the cell. */
enum { PEEP_I, PEEP_F, PEEP_O, BIAS_HN, GAMMA_C, BETA_C, UNIT_SUMS };

/* Zoneout: the share of a state that stays; its functions take vector v, of n units. */
typedef struct {
    const float *at; /* (1 or N, ldo) or NULL */
    int64_t ld;      /* 0: the same for all rows */
} Zoneout;

typedef struct {
    int64_t reverse;
    const float *w_ih, *w_hh;           /* (G·H, I), (G·H, H) */
    const float *gamma, *beta;          /* (G·H) or NULL: 1, 0; beta is the bias of no norm */
    const float *gamma_hh;              /* (G·H) or NULL; of a normalised product */
    const float *gamma_c, *beta_c;      /* (H) or NULL; of a normalised cell */
    const float *bias_hn;               /* (H) or NULL */
    const float *peephole[3];           /* (H) or NULL */
    Zoneout zoneout_h, zoneout_c;
    const float *h0, *c0;               /* (B, H) or NULL: 0 */
    const float *reset_h, *reset_c;     /* the same: the state that a reset starts from */
    const float *fixed_mean, *fixed_var; /* (1 or T, ldc) or NULL: not the batch's */
    float *stat_mean, *stat_var;        /* (1 or T, ldc): of the batch; PRODUCTS: of W_x x, */
                                        /* then of the product, then of the cell */
    float *out, *hn, *cn;               /* (N, ldo); (B, H) each */
    /* Buffers, kept for the backward pass: */
    float *pre;                         /* gate buffer: W_x x */
    float *mean, *scale, *shift;        /* a gate input becomes (x − mean)·scale + shift; */
                                        /* mean and scale (1 or T, width), shift (width) */
    float *gamma_h;                     /* gamma_hh in packed order */
    float *row_mean, *row_scale;        /* OVER_FEATURES: mean and 1/σ of each row of pre (N) */
    float *used_mean, *used_inv;        /* OVER_ROWS: (T, width) what a step was normalised by; */
                                        /* PRODUCTS: (T, width and a vector per vector of units) */
    float *trace, *hat;                 /* by step, vector of units and row */
    float *inv;                         /* OVER_FEATURES: 1/σ of products (N), of cells (N) */
    /* The backward pass: */
    const float *dout, *dhn, *dcn;      /* (N, ldo), (B, H), (B, H), or NULL */
    float *dx, *dp;                     /* gate buffers: of gate inputs, of products; may be one */
    float *d_w_ih, *d_w_hh, *d_gamma, *d_beta, *d_gamma_hh;
    float *d_unit[UNIT_SUMS];           /* (H) each, or NULL */
    float *dh0, *dc0;                   /* (B, H) or NULL */
    float *d_reset_h, *d_reset_c;       /* the same; the loop adds to them */
    float *level, *slope;               /* (width): sequence-wise sums, then means */
} Direction;

typedef struct {
    int64_t T, B, N, H, I, D, threads, mode, outer, inner, split;
    int64_t ldi, ldo, ldc;        /* between rows of x, of out, of statistics */
    int64_t per_step;             /* statistics of every step, not of all rows */
    int64_t batch;                /* normalise by the batch's own statistics */
    int64_t fixed_per_step;       /* fixed_mean and fixed_var have a row per step */
    int64_t centres;              /* FEATURES: subtract the mean ("layer"), or not ("rms") */
    int64_t keep;                 /* whether there will be a backward pass */
    double eps;
    const int64_t *sizes, *offsets; /* (T) */
    const uint8_t *resets;          /* (N) or NULL */
    const float *x;                 /* (N, I); with I = 0 ready gate inputs (N, D·G·H) */
    float *dx_in;                   /* like x, or NULL */
    Direction d[2];
} Job;

INLINE Gates gates(int64_t H, int mode) {
    static const int count[] = {1, 1, 4, 3, 2};
    return (Gates){H, count[mode], mode <= RNN_RELU ? 2 : 1};
}
INLINE Gates gates_of(const Job *J) { return gates(J->H, (int)J->mode); }

#define AT(pointer, offset) ((pointer) ? (pointer) + (offset) : NULL)

/* Rows of a gate buffer from packed column c on. */
typedef struct {
    float *at;
    int64_t ld;
} Columns;
INLINE Columns columns_at(const Job *J, Gates o, float *buffer, int64_t c) {
    const int64_t w = panel_width(o), p = c / w;
    return (Columns){buffer + (J->N - 1) * p * w + c, panel_vectors(o, p) * VW};
}
/* C (+)= A P, where the rows of A are those of a gate buffer, every `stride`-th from `row` on. */
INLINE void gate_product(const Job *J, const float *buffer, int64_t row, int64_t stride,
                         int64_t rows, int Q, const float *P, float *C, int64_t ldc, int add) {
    const Gates o = gates_of(J);
    const int64_t w = panel_width(o), full = o.H / (o.U * VW), rest = o.G * o.H - full * w;
    const int64_t narrow = round_up(rest, VW);
    const float *last = buffer + J->N * full * w + row * narrow;
    if (full)
        panel_product(rows, (Factor){buffer + row * w, stride * w, 1, w, full, J->N * w}, Q, P, C,
                      ldc, add);
    if (rest)
        panel_product(rows, matrix(last, stride * narrow, rest), Q, P + full * w * Q * VW, C, ldc,
                      add || full);
}

/* Vectors that the trace keeps for a row and vector of units (forward.h). */
INLINE int trace_vectors(int mode, int cell) {
    return mode == LSTM ? 6 + cell : mode == GRU ? 5 : mode == LIGRU ? 3 : 1;
}
/* Whether h is part of the next h directly, not by a product alone. */
INLINE int carries_state(int mode) { return mode == GRU || mode == LIGRU; }

/* A barrier that spins, then yields: two processes may share the cores. */
typedef struct {
    int64_t waiting;
    char far[56];
    int64_t round;
    char away[56];
} Barrier;
INLINE void barrier_wait(Barrier *b, int n) {
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

/* The threads of a task are those of torch's OpenMP runtime, whose functions Python passes, so that
 * no second runtime is linked; without it there is one thread. */
typedef struct Team Team;
typedef void (*task_t)(const Team *, int id, int threads);
struct Team {
    const Job *J;
    task_t task;
    float *buffer;
    double *totals;
    Barrier *barriers; /* one per direction, one for all threads */
    const void *more;  /* arguments of this task alone */
    int *failed;       /* set by a thread whose allocation failed */
};
INLINE void fail(const Team *c) { __atomic_store_n(c->failed, 1, __ATOMIC_RELAXED); }
INLINE int has_failed(const Team *c) { return __atomic_load_n(c->failed, __ATOMIC_RELAXED); }
static void (*omp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_threads)(void);
static int (*omp_thread)(void);
static void run_task(void *team) {
    ((const Team *)team)->task(team, omp_thread(), omp_threads());
}
/* Return whether an allocation failed in a thread. */
static int run_parallel(const Job *J, task_t task, float *buffer, double *totals,
                        const void *more) {
    Barrier barriers[3] = {0};
    int failed = 0;
    Team team = {J, task, buffer, totals, barriers, more, &failed};
    if (omp_parallel && J->threads > 1) omp_parallel(run_task, &team, (unsigned)J->threads, 0);
    else task(&team, 0, 1);
    return failed;
}
INLINE void barrier_all(const Team *c, int threads) { barrier_wait(&c->barriers[2], threads); }

/* A thread's share of the work: directions, rows row0, row0 + stride, … below row1, and blocks of
 * units [from, to). Threads that split rows do not wait inside the loop; those that split units
 * wait for each other at every step. A thread has neighbouring rows, against false sharing, or
 * every n-th row of a ragged batch, so that each has long and short sequences. */
typedef struct {
    int d0, d1, team, barrier;
    int64_t row0, row1, stride, from, to;
    int me, of; /* index and number of threads of its direction */
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
    const int64_t end = min64(rows, s.row1);
    return end > s.row0 ? (end - s.row0 + s.stride - 1) / s.stride : 0;
}
INLINE vec apply_zoneout(Zoneout z, int64_t row, int64_t v, int n, vec old, vec new_) {
    const vec stays = load_n(z.at + row * z.ld + v * VW, n);
    return select_lanes(stays == splat(1.0f), old, new_ + stays * (old - new_));
}
/* Return the gradient of the new state; *to_old is that of the old one. */
INLINE vec zoneout_backward(Zoneout z, int64_t row, int64_t v, int n, vec dy, vec *to_old) {
    *to_old = load_n(z.at + row * z.ld + v * VW, n) * dy;
    return dy - *to_old;
}
/* Whether the loop ends with step t for row r. */
INLINE int is_last(const Job *J, const Direction *d, int64_t t, int64_t r) {
    return d->reverse ? t == 0 : t + 1 == J->T || r >= J->sizes[t + 1];
}
/* Whether the state of row r is reset before the frame of step `later`. */
INLINE int is_reset(const Job *J, int64_t later, int64_t r) {
    return J->resets && J->resets[J->offsets[later] + r];
}
/* The state (H) that row r starts from, of `initial` and `reset`; NULL: 0. */
INLINE const float *start_of(const Job *J, const Direction *d, int64_t r, const float *initial,
                             const float *reset) {
    return AT(!d->reverse && is_reset(J, 0, r) ? reset : initial, r * J->H);
}

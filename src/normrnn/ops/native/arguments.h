/* What Python passes to a call: sizes, options and one pointer per tensor, 8 bytes each, packed by
 * `kernel.py` in this order. Everything else is computed here: a direction's part of a tensor, and
 * the blocks inside `kept` (which the backward pass reads) and inside the scratch memory. */

enum { NORM_NONE, NORM_INPUT, NORM_STEP, NORM_ROW, NORM_RECURRENT, NORM_RMS };

/* The input tensors of a call, or their gradients; NULL where there is none. */
typedef struct {
    float *x, *h0, *c0, *reset_h, *reset_c;
    uint8_t *resets;
    float *zoneout_h, *zoneout_c; /* shares that stay, (1 or N, D·H) */
    float *weight, *bias, *gamma_hh, *weight_c, *bias_c, *fixed_mean, *fixed_var;
    struct {
        float *w_ih, *w_hh, *bias_hn, *peephole[3], *w_hr;
    } cell[2];
} Tensors;

typedef struct {
    int64_t T, B, N, H, I, D, threads, mode, norm, reverse[2];
    int64_t per_step, batch, fixed_per_step, cell, zoneout_h_rows, zoneout_c_rows, keep;
    double eps;
    const int64_t *sizes, *offsets; /* (T) */
    Tensors in;
    float *out, *hn, *cn, *statistics, *kept; /* (N, D·H), (D, B, H) twice, (2, 1 or T, channels) */
    float *dout, *dhn, *dcn;
    Tensors grad;
} Arguments;

/* A block of memory that is handed out piece by piece; without memory it only counts. */
typedef struct {
    float *start;
    int64_t used;
} Block;
INLINE float *carve(Block *b, int64_t floats) {
    float *p = b->start ? b->start + b->used : NULL;
    b->used += floats;
    return p;
}

/* Rows need no waiting for each other, but every thread then reads all weights; over the features
 * of a row nothing else is possible. */
INLINE int64_t choose_split(const Job *J) {
    if (J->inner) return J->inner == OVER_FEATURES ? SPLIT_ROWS : SPLIT_UNITS;
    const int64_t team = (J->threads + J->D - 1) / J->D;
    return team > 1 && team <= J->B && J->H <= 200 ? SPLIT_ROWS : SPLIT_UNITS;
}

/* The parts of the tensors that belong to direction i. */
static void set_tensors(const Arguments *a, const Job *J, int64_t i, Direction *d) {
    const int64_t H = a->H, C = gates_of(J).G * H, state = i * a->B * H, channels = J->ldc / a->D;
    const Tensors *in = &a->in, *grad = &a->grad;
    d->reverse = a->reverse[i];
    d->w_ih = in->cell[i].w_ih, d->w_hh = in->cell[i].w_hh, d->bias_hn = in->cell[i].bias_hn;
    d->d_w_ih = grad->cell[i].w_ih, d->d_w_hh = grad->cell[i].w_hh;
    for (int k = 0; k < 3; k++) {
        d->peephole[k] = in->cell[i].peephole[k];
        d->d_unit[PEEP_I + k] = grad->cell[i].peephole[k];
    }
    d->d_unit[BIAS_HN] = grad->cell[i].bias_hn;
    d->d_unit[GAMMA_C] = AT(grad->weight_c, i * H), d->d_unit[BETA_C] = AT(grad->bias_c, i * H);
    d->gamma = AT(in->weight, i * C), d->beta = AT(in->bias, i * C);
    d->gamma_hh = AT(in->gamma_hh, i * C);
    d->d_gamma = AT(grad->weight, i * C), d->d_beta = AT(grad->bias, i * C);
    d->d_gamma_hh = AT(grad->gamma_hh, i * C);
    if (a->cell) d->gamma_c = AT(in->weight_c, i * H), d->beta_c = AT(in->bias_c, i * H);
    d->zoneout_h = (Zoneout){AT(in->zoneout_h, i * H), a->zoneout_h_rows ? J->ldo : 0};
    d->zoneout_c = (Zoneout){AT(in->zoneout_c, i * H), a->zoneout_c_rows ? J->ldo : 0};
    d->fixed_mean = AT(in->fixed_mean, i * channels);
    d->fixed_var = AT(in->fixed_var, i * channels);
    if (a->batch) {
        const int64_t groups = J->per_step || J->inner == OVER_ROWS ? a->T : 1;
        d->stat_mean = AT(a->statistics, i * channels);
        d->stat_var = AT(a->statistics, groups * J->ldc + i * channels);
    }
    d->h0 = AT(in->h0, state), d->c0 = AT(in->c0, state);
    d->dh0 = AT(grad->h0, state), d->dc0 = AT(grad->c0, state);
    d->reset_h = AT(in->reset_h, state), d->reset_c = AT(in->reset_c, state);
    d->d_reset_h = AT(grad->reset_h, state), d->d_reset_c = AT(grad->reset_c, state);
    d->out = AT(a->out, i * H), d->hn = AT(a->hn, state), d->cn = AT(a->cn, state);
    d->dout = AT(a->dout, i * H), d->dhn = AT(a->dhn, state), d->dcn = AT(a->dcn, state);
}

/* What a forward pass writes, with the blocks that a backward pass reads first. Sizes in `kept`
 * are linear in T and N, so that Python can compute them with symbolic sizes. */
static void carve_forward(const Arguments *a, Job *J, Block *kept, Block *scratch) {
    const Gates o = gates_of(J);
    const int64_t T = a->T, N = a->N, D = a->D, K = J->per_step ? T : 1, width = packed_width(o);
    const int64_t vectors = (a->H + VW - 1) / VW, units = N * vectors * VW;
    const int64_t trace = units * trace_vectors((int)a->mode, (int)a->cell);
    const int64_t used = width + (J->inner == PRODUCTS ? vectors * VW : 0);
    Block *b = a->keep ? kept : scratch;
    for (int64_t i = 0; i < D; i++) {
        Direction *d = &J->d[i];
        d->mean = carve(b, K * width), d->scale = carve(b, K * width);
        d->shift = carve(b, width), d->gamma_h = carve(b, width);
        if (J->inner == OVER_ROWS || J->inner == PRODUCTS)
            d->used_mean = carve(b, T * used), d->used_inv = carve(b, T * used);
        if (a->keep || a->cell) d->trace = carve(b, trace);
        if (J->inner) d->hat = carve(b, units * o.G);
        /* Without a normalised input the backward pass does not read the gate inputs. */
        d->pre = carve(J->outer == PLAIN ? scratch : b, N * width);
    }
    for (int64_t i = 0; i < D; i++) { /* last: these are no whole vectors */
        Direction *d = &J->d[i];
        if (J->outer == FEATURES) d->row_mean = carve(b, N), d->row_scale = carve(b, N);
        if (J->inner == OVER_FEATURES) d->inv = carve(b, 2 * N);
    }
    float *ones = a->cell && !a->in.weight_c ? carve(scratch, round_up(a->H, 16)) : NULL;
    for (int64_t k = 0; ones && k < a->H; k++) ones[k] = 1.0f;
    for (int64_t i = 0; i < D && ones; i++) J->d[i].gamma_c = ones;
}
static void carve_backward(const Arguments *a, Job *J, Block *scratch) {
    const int64_t width = packed_width(gates_of(J)), C = gates_of(J).G * a->H;
    const int is_apart = J->inner == OVER_FEATURES || J->inner == PRODUCTS || a->mode == GRU;
    for (int64_t i = 0; i < a->D; i++) {
        Direction *d = &J->d[i];
        d->dx = carve(scratch, a->N * width);
        d->dp = is_apart ? carve(scratch, a->N * width) : d->dx;
        d->level = carve(scratch, width), d->slope = carve(scratch, width);
        float **vectors[] = {&d->d_gamma, &d->d_beta, &d->d_gamma_hh};
        for (int k = 0; k < 3; k++)
            if (!*vectors[k]) *vectors[k] = carve(scratch, round_up(C, 16));
    }
}

/* The work that `a` describes. Returns the floats of scratch memory that it needs, which `scratch`
 * may be; *kept_floats are those of `kept`. */
static int64_t lay_out(const Arguments *a, int is_backward, float *scratch, Job *J,
                       int64_t *kept_floats) {
    *J = (Job){.T = a->T, .B = a->B, .N = a->N, .H = a->H, .I = a->I, .D = a->D};
    J->threads = a->threads, J->mode = a->mode, J->batch = a->batch, J->keep = a->keep;
    J->fixed_per_step = a->fixed_per_step, J->eps = a->eps;
    J->sizes = a->sizes, J->offsets = a->offsets, J->resets = a->in.resets;
    J->x = a->in.x, J->dx_in = a->grad.x;
    static const int outer[] = {PLAIN, COLUMNS, PLAIN, FEATURES, COLUMNS, FEATURES};
    static const int inner[] = {NO_NORM,  NO_NORM,  OVER_ROWS, OVER_FEATURES,
                                PRODUCTS, OVER_FEATURES};
    J->centres = a->norm != NORM_RMS;
    J->outer = outer[a->norm], J->inner = inner[a->norm];
    J->per_step = J->inner == PRODUCTS || (J->outer == COLUMNS &&
                                           (a->batch ? a->per_step : a->fixed_per_step));
    J->split = choose_split(J);
    const int64_t C = gates_of(J).G * a->H;
    const int64_t channels = J->inner == PRODUCTS ? 2 * C + (a->cell ? a->H : 0) : C;
    J->ldi = a->I ? a->I : a->D * C;
    J->ldo = a->D * a->H, J->ldc = a->D * channels;
    Block kept = {a->kept, 0}, work = {scratch, 0};
    for (int64_t i = 0; i < a->D; i++) set_tensors(a, J, i, &J->d[i]);
    carve_forward(a, J, &kept, &work);
    if (is_backward) {
        work.used = a->cell && !a->in.weight_c ? work.used : 0; /* no gate inputs, only ones */
        carve_backward(a, J, &work);
    }
    *kept_floats = kept.used;
    return work.used;
}

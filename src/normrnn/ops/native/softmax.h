/* Softmax cross entropy over many classes: a layer of one gate whose units are the classes, so that
 * its products are those of a recurrent layer. The loss is a sum, and its gradients are known up
 * to a factor as soon as it is: the buffer of logits becomes probabilities less one-hot targets. */

typedef struct {
    const int64_t *targets; /* (N) */
    double *nats;           /* (threads) */
    int64_t *wrong;         /* (threads): another class had more, or as much and came before */
} Classes;

INLINE vec exp_vec(vec x) {
    vec scale, p = exp2_parts(clamp(x, 87.0f), 1.0f, &scale);
    return scale * p + scale;
}

/* One row of C logits without their bias, in place; adds to the gradient of the bias. */
static double softmax_row(float *z, const float *bias, int64_t C, int64_t wide, int64_t target,
                          float *d_bias, int64_t *wrong) {
    vec top = splat(-INFINITY);
    for (int64_t c = 0; c < C; c += VW) {
        const int n = (int)min64(C - c, VW);
        vec x = load(z + c) + (bias ? load_n(bias + c, n) : (vec){0});
        for (int l = n; l < VW; l++) x[l] = -INFINITY;
        store(z + c, x);
        top = select_lanes(x > top, x, top);
    }
    float most = top[0];
    for (int l = 1; l < VW; l++) most = top[l] > most ? top[l] : most;
    const float own = z[target];
    int64_t first = 0;
    if (own == most)
        while (z[first] != most) first++;
    *wrong += own == most ? first != target : 1;
    vec sums = {0};
    for (int64_t c = 0; c < C; c += VW) {
        const vec e = exp_vec(load(z + c) - splat(most));
        store(z + c, e);
        if (c + VW <= C) sums += e;
        else
            for (int l = 0; l < C - c; l++) sums[l] += e[l];
    }
    const float total = sum_lanes(sums), share = 1.0f / total;
    for (int64_t c = 0; c < C; c += VW) store(z + c, load(z + c) * splat(share));
    for (int64_t c = C; c < wide; c++) z[c] = 0.0f;
    z[target] -= 1.0f;
    for (int64_t c = 0; c < C; c += VW)
        store(d_bias + c, load(d_bias + c) + load(z + c));
    return log((double)total) + (double)most - (double)own;
}

static void softmax_part(const Team *c, int id, int n) {
    const Job *J = c->J;
    const Classes *about = c->more;
    const int64_t wide = width_of(J);
    float *sums = c->buffer + id * wide;
    for (int64_t r = J->N * id / n; r < J->N * (id + 1) / n; r++)
        about->nats[id] += softmax_row(J->d[0].pre + r * J->ldx, J->d[0].beta, J->H, wide,
                                       about->targets[r], sums, &about->wrong[id]);
}

/* Nats of the targets under softmax(x Wᵀ + b), summed, and all gradients, of x (N, H), w (C, H) and
 * b (C). Returns how often another class was the most probable, or -1 if an allocation failed. */
int64_t EXPORT(classify)(int64_t N, int64_t H, int64_t C, int64_t threads, const float *x,
                         float *w, float *b, const int64_t *targets, float *d_x, float *d_w,
                         float *d_b, double *nats) {
    const int64_t offset = 0;
    Job J = {.T = 1, .B = N, .N = N, .H = C, .I = H, .D = 1, .threads = threads, .ldi = H};
    J.ldo = J.ldc = C, J.sizes = &N, J.offsets = &offset, J.x = x, J.dx_in = d_x;
    const int64_t wide = width_of(&J);
    J.ldx = padded_stride(wide);
    float *logits = allocate(N * J.ldx + VW), *sums = calloc((size_t)(threads * wide), 4);
    J.d[0] = (Direction){.w_ih = w, .beta = b, .pre = logits, .dx = logits, .d_w_ih = d_w};
    double *parts = calloc((size_t)threads, sizeof(double));
    int64_t *wrong = calloc((size_t)threads, sizeof(int64_t)), errors = 0;
    Classes about = {targets, parts, wrong};
    int failed = !logits || !sums || !parts || !wrong || project(&J);
    if (!failed) {
        run_parallel_with(&J, softmax_part, sums, NULL, &about);
        *nats = 0;
        for (int64_t t = 0; t < threads; t++) {
            *nats += parts[t], errors += wrong[t];
            for (int64_t k = 0; t && k < C; k++) sums[k] += sums[t * wide + k];
        }
        memcpy(d_b, sums, (size_t)C * 4);
        failed = weight_gradients(&J, input_weights_part, H) || input_gradient(&J);
    }
    free(logits), free(sums), free(parts), free(wrong);
    return failed ? -1 : errors;
}

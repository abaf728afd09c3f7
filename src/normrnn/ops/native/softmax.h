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

INLINE float *logit_at(const Job *J, int64_t row, int64_t class_) {
    const Columns z = columns_at(J, gates_of(J), J->d[0].pre, class_);
    return z.at + row * z.ld;
}

/* A few rows of logits without their bias, from row `first` on, in place; adds to the gradient of
 * the bias. Several at once, because rows of a panel lie side by side. */
enum { AT_ONCE = 8 };
static double softmax_rows(const Job *J, int64_t first, int rows, const int64_t *targets,
                           float *d_bias, int64_t *wrong) {
    const Gates o = gates_of(J);
    const int64_t C = J->H;
    float *logits = J->d[0].pre, most[AT_ONCE], at_target[AT_ONCE];
    vec top[AT_ONCE], sums[AT_ONCE];
    for (int r = 0; r < rows; r++) top[r] = splat(-INFINITY), sums[r] = (vec){0};
    for (int64_t c = 0; c < C; c += VW) {
        const Columns z = columns_at(J, o, logits, c);
        const int n = units_in(C, c / VW);
        const vec bias = J->d[0].beta ? load_n(J->d[0].beta + c, n) : (vec){0};
        for (int r = 0; r < rows; r++) {
            float *at = z.at + (first + r) * z.ld;
            vec x = load(at) + bias;
            for (int l = n; l < VW; l++) x[l] = -INFINITY;
            store(at, x);
            top[r] = select_lanes(x > top[r], x, top[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        const int64_t target = targets[first + r];
        most[r] = top[r][0];
        for (int l = 1; l < VW; l++) most[r] = top[r][l] > most[r] ? top[r][l] : most[r];
        at_target[r] = *logit_at(J, first + r, target);
        int is_wrong = at_target[r] != most[r];
        for (int64_t c = 0; c < target && !is_wrong; c++)
            is_wrong = *logit_at(J, first + r, c) == most[r];
        *wrong += is_wrong;
    }
    for (int64_t c = 0; c < C; c += VW) {
        const Columns z = columns_at(J, o, logits, c);
        for (int r = 0; r < rows; r++) {
            float *at = z.at + (first + r) * z.ld;
            const vec e = first_lanes(exp_vec(load(at) - splat(most[r])), units_in(C, c / VW));
            store(at, e);
            sums[r] += e;
        }
    }
    double nats = 0;
    for (int r = 0; r < rows; r++) {
        const float total = sum_lanes(sums[r]);
        nats += log((double)total) + (double)most[r] - (double)at_target[r];
        *logit_at(J, first + r, targets[first + r]) -= total;
        sums[r] = splat(1.0f / total);
    }
    for (int64_t c = 0; c < C; c += VW) {
        const Columns z = columns_at(J, o, logits, c);
        vec d = load(d_bias + c);
        for (int r = 0; r < rows; r++) {
            float *at = z.at + (first + r) * z.ld;
            const vec p = load(at) * sums[r];
            store(at, p);
            d += p;
        }
        store(d_bias + c, d);
    }
    return nats;
}

static void softmax_part(const Team *team, int id, int n) {
    const Job *J = team->J;
    const Classes *classes = team->more;
    const int64_t end = J->N * (id + 1) / n;
    for (int64_t r = J->N * id / n; r < end; r += AT_ONCE)
        classes->nats[id] += softmax_rows(J, r, (int)min64(AT_ONCE, end - r), classes->targets,
                                        team->buffer + id * width_of(J), &classes->wrong[id]);
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
    float *logits = allocate(N * wide), *sums = calloc((size_t)(threads * wide), 4);
    J.d[0] = (Direction){.w_ih = w, .beta = b, .pre = logits, .dx = logits, .d_w_ih = d_w};
    double *parts = calloc((size_t)threads, sizeof(double));
    int64_t *wrong = calloc((size_t)threads, sizeof(int64_t)), errors = 0;
    Classes classes = {targets, parts, wrong};
    int failed = !logits || !sums || !parts || !wrong || project(&J);
    if (!failed) {
        run_parallel_with(&J, softmax_part, sums, NULL, &classes);
        *nats = 0;
        for (int64_t t = 0; t < threads; t++) {
            *nats += parts[t], errors += wrong[t];
            for (int64_t k = 0; t && k < C; k++) sums[k] += sums[t * wide + k];
        }
        memcpy(d_b, sums, (size_t)C * 4);
        failed = weight_gradients(&J, 0, 1) || input_gradient(&J);
    }
    free(logits), free(sums), free(parts), free(wrong);
    return failed ? -1 : errors;
}

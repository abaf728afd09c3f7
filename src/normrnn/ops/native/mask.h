/* Masks of regularisers: entry i is dropped where a hash of i and of two keys lies below a limit.
 * A hash, not a random generator: entries are drawn in any order, by any number of threads, and the
 * backward pass draws them again. `ops/regularise.py` has the same in torch's operations. */

typedef struct {
    int64_t count;
    uint32_t key[2], limit;
    float scale;
    const float *from;
    float *to;
    uint8_t *mask;
} Drop;

INLINE uvec splat_u(uint32_t x) { return x - (uvec){0}; }

/* Two rounds of multiplying and shifting (Wellons' lowbias32), with a key before each. */
INLINE ivec is_dropped(const Drop *d, uvec x) {
    x ^= x >> 16;
    x *= splat_u(0x7feb352dU);
    x ^= x >> 15;
    x ^= splat_u(d->key[1]);
    x *= splat_u(0x846ca68bU);
    x ^= x >> 16;
    return x < splat_u(d->limit);
}
INLINE void drop_some(const Drop *d, uvec x, int64_t i, int n) {
    const ivec dropped = is_dropped(d, x);
    if (d->to) {
        const vec scaled = load_n(d->from + i, n) * splat(d->scale);
        store_n(d->to + i, select_lanes(dropped, (vec){0}, scaled), n);
        return;
    }
    const bvec ones = __builtin_convertvector(dropped & 1, bvec);
    if (n == VW) memcpy(d->mask + i, &ones, VW);
    else
        for (int l = 0; l < n; l++) d->mask[i + l] = ones[l];
}
static void drop_part(const Team *c, int id, int n) {
    const Drop d = *(const Drop *)c->more;
    const int64_t vectors = (d.count + VW - 1) / VW, full = d.count / VW;
    const int64_t from = vectors * id / n, to = vectors * (id + 1) / n;
    uvec x; /* the first key and the places of a vector's entries */
    for (int l = 0; l < VW; l++) x[l] = d.key[0] + (uint32_t)(from * VW) + (uint32_t)l;
    for (int64_t v = from; v < min64(to, full); v++, x += splat_u(VW))
        drop_some(&d, x, v * VW, VW);
    if (to > full) drop_some(&d, x, full * VW, (int)(d.count - full * VW));
}
/* `to` is `from` without what is dropped, the rest times `scale`; or `mask` is 1 there. */
void EXPORT(drop)(int64_t threads, int64_t count, uint32_t key0, uint32_t key1, uint32_t limit,
                  float scale, const float *from, float *to, uint8_t *mask) {
    const Drop drop = {count, {key0, key1}, limit, scale, from, to, mask};
    const Job team = {.threads = threads};
    run_parallel(&team, drop_part, NULL, NULL, &drop);
}

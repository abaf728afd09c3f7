/* Masks of regularisers: entry i is dropped where a hash of i and of two keys lies below a limit.
 * A hash instead of a generator's next number: entries are drawn in any order, by any number of
 * threads, and the way back draws them again. `normrnn/ops/drop.py` has the same in torch's
 * operations. */

typedef struct {
    int64_t count;
    uint32_t key[2], limit;
    float scale;
    const float *from;
    float *to;
    uint8_t *mask;
} Drop;

INLINE uvec all_u(uint32_t x) { return x - (uvec){0}; }

/* Two rounds of multiplying and shifting (Wellons' lowbias32), with a key before each. */
INLINE ivec is_dropped(const Drop *d, int64_t i) {
    uvec x = all_u((uint32_t)i + d->key[0]);
    for (int l = 0; l < VW; l++) x[l] += (uint32_t)l;
    x ^= x >> 16;
    x *= all_u(0x7feb352dU);
    x ^= x >> 15;
    x ^= all_u(d->key[1]);
    x *= all_u(0x846ca68bU);
    x ^= x >> 16;
    return x < all_u(d->limit);
}
static void drop_part(const Crew *c, int id, int n) {
    const Drop *d = c->more;
    const int64_t vectors = (d->count + VW - 1) / VW;
    for (int64_t v = vectors * id / n; v < vectors * (id + 1) / n; v++) {
        const int64_t i = v * VW;
        const int have = (int)least(d->count - i, VW);
        const ivec dropped = is_dropped(d, i);
        if (d->mask) {
            const bvec ones = __builtin_convertvector(dropped & 1, bvec);
            if (have == VW) memcpy(d->mask + i, &ones, VW);
            else
                for (int l = 0; l < have; l++) d->mask[i + l] = ones[l];
        } else {
            const vec x = load_n(d->from + i, have) * all(d->scale);
            store_n(d->to + i, choose(dropped, (vec){0}, x), have);
        }
    }
}
/* `to` is `from` without what is dropped, the rest times `scale`; or `mask` is 1 there. */
void EXPORT(drop)(int64_t threads, int64_t count, uint32_t key0, uint32_t key1, uint32_t limit,
                  float scale, const float *from, float *to, uint8_t *mask) {
    const Drop about = {count, {key0, key1}, limit, scale, from, to, mask};
    const Job crew = {.threads = threads};
    together_about(&crew, drop_part, NULL, NULL, &about);
}

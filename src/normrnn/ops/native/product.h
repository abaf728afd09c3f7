/* Matrix products, and the packed order of gates and weights.
 *
 * A product is made of tiles: R rows × Q vectors of columns, held in registers while the tile runs
 * over K. Weights are packed as [panel][k][Q·VW], so that a tile reads them straight through. */

/* The left factor of a product: entry (r, k) is at[r·rs + k·ks] for k < depth; K continues in more
 * blocks like it, `jump` apart. */
typedef struct {
    const float *at;
    int64_t rs, ks, depth, blocks, jump;
} Factor;

/* C[r][q] (+)= Σ_k A(r, k) P[k·ldp + q·VW]. Few tiles leave the multipliers idle: those keep two
 * sums, over even and odd k. */
#define TILE(R, Q)                                                                               \
    static __attribute__((noinline)) void tile_##R##_##Q(                                        \
        const Factor *f, const float *restrict P, int64_t ldp, float *restrict C, int64_t ldc,   \
        int add) {                                                                               \
        enum { TWO = (R) * (Q) < 8 };                                                            \
        const int64_t K = f->depth, rs = f->rs, ks = f->ks, jump = f->jump;                      \
        const float *restrict A = f->at;                                                         \
        vec s[R][Q], z[TWO ? R : 1][TWO ? Q : 1];                                                \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                     \
            _Pragma("GCC unroll 4") for (int q = 0; q < Q; q++) {                                \
                s[r][q] = add ? load(C + r * ldc + q * VW) : (vec){0};                           \
                if (TWO) z[TWO ? r : 0][TWO ? q : 0] = (vec){0};                                 \
            }                                                                                    \
        for (int64_t b = f->blocks; b > 0; b--, A += jump, P += K * ldp) {                       \
            int64_t k = 0;                                                                       \
            if (b > 1) /* the next block is too far for the hardware to foresee */               \
                for (int r = 0; r < R; r++)                                                      \
                    for (int64_t j = 0; j < K; j += 16)                                          \
                        __builtin_prefetch(A + jump + r * rs + j);                               \
            if (TWO)                                                                             \
                for (; k + 2 <= K; k += 2) {                                                     \
                    _Pragma("GCC unroll 4") for (int q = 0; q < Q; q++) {                        \
                        vec v = load(P + k * ldp + q * VW);                                      \
                        vec w = load(P + (k + 1) * ldp + q * VW);                                \
                        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                   \
                            s[r][q] += v * splat(A[r * rs + k * ks]);                            \
                            z[TWO ? r : 0][TWO ? q : 0] += w * splat(A[r * rs + (k + 1) * ks]);  \
                        }                                                                        \
                    }                                                                            \
                }                                                                                \
            for (; k < K; k++) {                                                                 \
                vec w[Q];                                                                        \
                _Pragma("GCC unroll 4") for (int q = 0; q < Q; q++) {                            \
                    w[q] = load(P + k * ldp + q * VW);                                           \
                    KEEP_IN_REGISTER(w[q]);                                                      \
                }                                                                                \
                _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                           \
                    vec y = splat(A[r * rs + k * ks]);                                           \
                    _Pragma("GCC unroll 4") for (int q = 0; q < Q; q++) s[r][q] += w[q] * y;     \
                }                                                                                \
            }                                                                                    \
        }                                                                                        \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                     \
            _Pragma("GCC unroll 4") for (int q = 0; q < Q; q++)                                  \
                store(C + r * ldc + q * VW,                                                      \
                      TWO ? s[r][q] + z[TWO ? r : 0][TWO ? q : 0] : s[r][q]);                    \
    }

typedef void (*tile_t)(const Factor *, const float *, int64_t, float *, int64_t, int);
/* The largest tiles fill the registers. */
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1) TILE(7, 1) TILE(8, 1)
TILE(1, 2) TILE(2, 2) TILE(3, 2) TILE(4, 2) TILE(5, 2) TILE(6, 2)
TILE(1, 3) TILE(2, 3) TILE(3, 3) TILE(4, 3)
TILE(1, 4) TILE(2, 4) TILE(3, 4)
#if MANY_REGISTERS
TILE(7, 2) TILE(8, 2) TILE(9, 2) TILE(10, 2) TILE(11, 2) TILE(12, 2)
TILE(5, 3) TILE(6, 3) TILE(7, 3) TILE(8, 3) TILE(4, 4) TILE(5, 4) TILE(6, 4)
#define MORE(...) __VA_ARGS__
static const int MOST_ROWS[5] = {0, 8, 12, 8, 6};
#else
#define MORE(...)
static const int MOST_ROWS[5] = {0, 8, 6, 4, 3};
#endif
static const tile_t TILES[5][13] = {
    {0},
    {0, tile_1_1, tile_2_1, tile_3_1, tile_4_1, tile_5_1, tile_6_1, tile_7_1, tile_8_1},
    {0, tile_1_2, tile_2_2, tile_3_2, tile_4_2, tile_5_2, tile_6_2,
     MORE(tile_7_2, tile_8_2, tile_9_2, tile_10_2, tile_11_2, tile_12_2)},
    {0, tile_1_3, tile_2_3, tile_3_3, tile_4_3, MORE(tile_5_3, tile_6_3, tile_7_3, tile_8_3)},
    {0, tile_1_4, tile_2_4, tile_3_4, MORE(tile_4_4, tile_5_4, tile_6_4)}};

/* rows × Q vectors into C, rows shared out evenly; a panel is read again for every tile, so a part
 * of K is taken that stays in the second cache. */
INLINE void panel_product(int64_t rows, Factor a, int Q, const float *P, float *C, int64_t ldc,
                          int add) {
    const int64_t deep = 65536 / (Q * VW), tiles = (rows + MOST_ROWS[Q] - 1) / MOST_ROWS[Q];
    const int64_t cuts = a.blocks > 1 ? a.blocks : a.depth; /* places where K can be cut */
    const int64_t parts = tiles == 1 ? 1 : min64((a.blocks * a.depth + deep - 1) / deep, cuts);
    for (int64_t i = 0; i < parts; i++) {
        const int64_t k = cuts * i / parts, count = cuts * (i + 1) / parts - k;
        Factor f = a;
        if (a.blocks > 1) f.blocks = count, f.at += k * a.jump;
        else f.depth = count, f.at += k * a.ks;
        const float *from = P + (a.blocks > 1 ? k * a.depth : k) * Q * VW, *at = f.at;
        for (int64_t j = 0; j < tiles; j++) {
            const int64_t r = rows * j / tiles, n = rows * (j + 1) / tiles - r;
            f.at = at + r * a.rs;
            TILES[Q][n](&f, from, Q * VW, C + r * ldc, ldc, add || k > 0);
        }
    }
}
/* The rows of a matrix with K columns as a factor. */
INLINE Factor matrix(const float *A, int64_t ld, int64_t K) {
    return (Factor){A, ld, 1, K, 1, 0};
}

/* The packed order of gates: units in panels of U vectors, and in a panel of n units gate g has the
 * columns from g·n on. All panels but the last are full, so the G·H columns have no gaps; the last
 * panel is padded with 0 to whole vectors. */
typedef struct {
    int64_t H;
    int G, U;
} Gates;
INLINE int64_t panels(Gates o) { return (o.H + o.U * VW - 1) / (o.U * VW); }
INLINE int64_t panel_width(Gates o) { return o.G * o.U * VW; }
INLINE int64_t packed_width(Gates o) { return round_up(o.G * o.H, VW); }
/* Vectors of columns of panel p. */
INLINE int panel_vectors(Gates o, int64_t p) {
    const int64_t w = panel_width(o);
    return (int)(min64(packed_width(o) - p * w, w) / VW);
}
/* Units in vector v of them. */
INLINE int units_in(int64_t H, int64_t v) { return (int)min64(H - v * VW, VW); }
/* Where gate g of vector v of units begins. */
INLINE int64_t column(int64_t H, int64_t v, int g, int G) {
    return v * G * VW + g * units_in(H, v);
}
/* The row of the parameters that packed column c < G·H is. */
INLINE int64_t row_of(Gates o, int64_t c) {
    const int64_t p = c / panel_width(o), first = p * o.U * VW, n = min64(o.H - first, o.U * VW);
    const int64_t in_panel = c % panel_width(o);
    return in_panel / n * o.H + first + in_panel % n;
}
/* Whether the VW packed columns from c on are neighbouring rows too. */
INLINE int is_one_run(Gates o, int64_t c) { return (c / panel_width(o) + 1) * o.U * VW <= o.H; }
/* A vector of packed columns from or to the parameters' order; there is nothing in the padding. */
INLINE vec load_columns(Gates o, const float *from, int64_t c) {
    if (is_one_run(o, c)) return load(from + row_of(o, c));
    vec x = {0};
    for (int l = 0; l < VW && c + l < o.G * o.H; l++) x[l] = from[row_of(o, c + l)];
    return x;
}
INLINE void store_columns(Gates o, float *to, int64_t c, vec x) {
    if (is_one_run(o, c)) store(to + row_of(o, c), x);
    else
        for (int l = 0; l < VW && c + l < o.G * o.H; l++) to[row_of(o, c + l)] = x[l];
}

#if VW >= 8 && (__GNUC__ >= 12 || defined(__clang__))
#define HAVE_SHUFFLE 1
typedef float v8 __attribute__((vector_size(32)));
typedef v8 v8_unaligned __attribute__((aligned(4), may_alias));
/* to[k·lt + l] = from[l·lf + k], 8 × 8 */
INLINE void transpose8(const float *from, int64_t lf, float *to, int64_t lt) {
    v8 r[8], t[8], u[8];
    for (int i = 0; i < 8; i++) r[i] = *(const v8_unaligned *)(from + i * lf);
    for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            u[i + j] = __builtin_shufflevector(t[i + j], t[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            u[i + j + 2] =
                __builtin_shufflevector(t[i + j], t[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int j = 0; j < 4; j++) {
        *(v8_unaligned *)(to + j * lt) =
            __builtin_shufflevector(u[j], u[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(v8_unaligned *)(to + (j + 4) * lt) =
            __builtin_shufflevector(u[j], u[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#endif

/* W (G·H, K) -> [panel][k][columns of the panel]: for products over K. */
static void pack_rows(Gates o, int64_t K, const float *W, float *P, int64_t from, int64_t to) {
    for (int64_t p = from; p < to; p++) {
        const int64_t w = panel_vectors(o, p) * VW, first = p * panel_width(o);
        for (int64_t c = 0; c < w; c++) {
            float *t = P + K * first + c;
            int64_t k = 0;
#if HAVE_SHUFFLE
            if (c % 8 == 0 && is_one_run(o, first + c)) {
                const float *f = W + row_of(o, first + c) * K;
                for (; k + 8 <= K; k += 8) transpose8(f + k, K, t + k * w, w);
                for (int64_t l = 0; l < 8; l++)
                    for (int64_t j = k; j < K; j++) t[j * w + l] = f[l * K + j];
                c += 7;
                continue;
            }
#endif
            const float *f = first + c < o.G * o.H ? W + row_of(o, first + c) * K : NULL;
            for (; k < K; k++) t[k * w] = f ? f[k] : 0.0f;
        }
    }
}

/* Blocks of two vectors of columns; the last may be one. */
enum { BLOCK = 2 * VW };
INLINE int block_vectors(int64_t columns, int64_t b) { return columns - b * BLOCK > VW ? 2 : 1; }

/* W (G·H, M) -> [block][c][2·VW], c in packed order: for products over the gates. */
static void pack_columns(Gates o, int64_t M, const float *W, float *P, int64_t from, int64_t to) {
    const int64_t C = o.G * o.H;
    for (int64_t c = 0; c < C; c++) {
        const float *f = W + row_of(o, c) * M;
        for (int64_t b = from; b < to; b++)
            for (int q = 0, Q = block_vectors(M, b); q < Q; q++) {
                const int64_t m = b * BLOCK + q * VW;
                store(P + b * C * BLOCK + (c * Q + q) * VW, load_n(f + m, (int)min64(M - m, VW)));
            }
    }
}

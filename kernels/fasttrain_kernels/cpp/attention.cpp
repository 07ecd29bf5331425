// Attention in float32: blocks of 64 queries against the blocks of keys that one of them sees, forward and backward.
//
// A query sees the keys [lo, hi); neither end ever decreases from one query to the next (attention/intervals.py). Keys
// and values of a head are packed once, and used by all queries of all heads of its group. A block's matmuls, 64 x 64
// x D, stay in L1 and L2, and skip what no query sees, by rows of tiles; rows beyond the end are zeros that see
// nothing.
//
//     forward     S = Q K^T, pivot = max S, P = exp(scale (S - pivot)), O = P V / sum P
//     backward    P = exp(scale (S - pivot)) / sum, dP = dO V^T, dS = P (dP - sum P dP),
//                 dV += P^T dO, dQ += dS K, dK += dS^T Q
//
// sum P dP is dO . O, but for its rounding: where P is nearly 1, dP minus that is far less than either, and only exact
// if both are the same matmuls (docs/kernels/attention.md).
//
// Letters as in attention/: T queries, H heads, G of them share a key head, D elements of a head, E of them with
// padding.
#include <algorithm>

#include "tile.h"

constexpr int R = 64;  // queries, or keys, of a block
constexpr int TILES = (R + ROWS - 1) / ROWS;

struct AttentionArgs {
    int64_t batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim;
    float scale;
    const int64_t *lo, *hi;  // (num_queries,)
    int threads;
};

namespace {

// [begin, end) of the other side's rows in a block, for each row of tiles. Whole columns of tiles.
struct Spans {
    int begin[TILES], end[TILES];
};

template <bool ADD>
inline void row_of_tiles(int t, int n0, int n1, int begin, int end, const float* A, int64_t ar, int64_t ac,
                         const float* B, int64_t ldb, float* C, int64_t ldc) {
    A += t * ROWS * ar;
    C += t * ROWS * ldc;
    for (int n = n0; n < n1; n += COLUMNS)
        if (t < R / ROWS)
            tile<ROWS, ADD>(begin, end, A, ar, ac, B + n, ldb, C + n, ldc);
        else
            tile<R % ROWS, ADD>(begin, end, A, ar, ac, B + n, ldb, C + n, ldc);
}

// S (R x R) = A B^T, within the spans: A (R x E) and B's transpose (E x R)
void scores(const Spans& seen, int E, const float* A, const float* B_t, float* S) {
    for (int t = 0; t < TILES; t++) row_of_tiles<false>(t, seen.begin[t], seen.end[t], 0, E, A, E, 1, B_t, R, S, R);
}

// C (R x E) += S B, for rows of S that are zero beyond the spans
void matmul_add(const Spans& seen, int E, const float* S, const float* B, float* C) {
    for (int t = 0; t < TILES; t++) row_of_tiles<true>(t, 0, E, seen.begin[t], seen.end[t], S, R, 1, B, E, C, E);
}

// C (R x E) += S^T B, for columns of S that are zero beyond the spans
void matmul_add_transposed(const Spans& seeing, int E, const float* S, const float* B, float* C) {
    for (int t = 0; t < TILES; t++) row_of_tiles<true>(t, 0, E, seeing.begin[t], seeing.end[t], S, 1, R, B, E, C, E);
}

// What all heads have in common
struct Layout {
    const AttentionArgs& p;
    const int64_t E, blocks;

    explicit Layout(const AttentionArgs& p)
        : p(p), E((p.head_dim + COLUMNS - 1) / COLUMNS * COLUMNS), blocks((p.num_keys + R - 1) / R) {}

    // Rows [first, first + R) of a head, as (R, E)
    void pack(const float* x, int64_t token, int64_t first, int64_t count, float* to) const {
        for (int64_t i = 0; i < R; i++, to += E) {
            const int64_t valid = first + i < count ? p.head_dim : 0;
            const float* from = x + (first + i) * token;
            for (int64_t e = 0; valid && e < E; e += 16) __builtin_prefetch(from + 8 * token + e);
            for (int64_t e = 0; e < valid; e++) to[e] = from[e];
            for (int64_t e = valid; e < E; e++) to[e] = 0;
        }
    }

    // All keys or values, block by block
    void pack_all(const float* x, int64_t token, float* to) const {
        for (int64_t b = 0; b < blocks; b++) pack(x, token, b * R, p.num_keys, to + b * R * E);
    }

    // Each block as (E, R)
    void transpose_all(const float* rows, float* to) const {
        for (int64_t b = 0; b < blocks; b++, rows += R * E, to += R * E)
            for (int64_t e0 = 0; e0 < E; e0 += 8)
                for (int64_t i0 = 0; i0 < R; i0 += 8) transpose(rows + i0 * E + e0, E, 8, to + e0 * R + i0, R);
    }

    Buffer for_keys() const { return buffer(blocks * R * E); }
    Buffer for_weights() const { return buffer(blocks * R * R); }
    Buffer for_block() const { return buffer(R * E); }
    void clear(float* keys) const { memset(keys, 0, blocks * R * E * 4); }

    // Blocks of keys [begin, end) that one of the queries [first, first + R) sees
    struct Range {
        int64_t begin, end;
    };
    Range range(int64_t first) const {
        const int64_t last = std::min(first + R, p.num_queries) - 1;
        return {p.lo[first] / R, (std::max(p.lo[first], p.hi[last]) + R - 1) / R};
    }
};

// What the queries [first, first + R) see of a block of keys
struct Sight {
    int lo[R], hi[R];
    Spans of_queries, of_keys;

    Sight(const AttentionArgs& p, int64_t first, int64_t block) {
        const int64_t last = first + R - 1, begin = block * R;
        if (last < p.num_queries && p.lo[last] <= begin && begin + R <= p.hi[first])
            *this = everything;
        else
            look(p, first, begin);
    }

   private:
    static const Sight everything;

    Sight() {
        std::fill(lo, lo + R, 0);
        std::fill(hi, hi + R, R);
        fill_spans();
    }

    void look(const AttentionArgs& p, int64_t first, int64_t begin) {
        for (int i = 0; i < R; i++) {
            const bool exists = first + i < p.num_queries;
            lo[i] = exists ? std::clamp<int64_t>(p.lo[first + i] - begin, 0, R) : R;
            hi[i] = exists ? std::clamp<int64_t>(p.hi[first + i] - begin, lo[i], R) : R;
        }
        fill_spans();
    }

    void fill_spans() {
        int seeing = 0, seen = 0;  // the first query that sees a key of the tile, the first that sees only later ones
        for (int t = 0; t < TILES; t++) {
            const int top = t * ROWS, bottom = std::min(top + ROWS, R);
            of_queries.begin[t] = lo[top] / COLUMNS * COLUMNS;
            of_queries.end[t] = std::max((hi[bottom - 1] + COLUMNS - 1) / COLUMNS * COLUMNS, of_queries.begin[t]);
            while (seeing < R && hi[seeing] <= top) seeing++;
            while (seen < R && lo[seen] < bottom) seen++;
            of_keys.begin[t] = seeing;
            of_keys.end[t] = std::max(seeing, seen);
        }
    }
};

const Sight Sight::everything;

// Overwrite the keys that query i does not see, which includes all that were not computed
inline void mask(const Sight& sight, int i, float* row, float with) {
    std::fill(row, row + sight.lo[i], with);
    std::fill(row + sight.hi[i], row + R, with);
}

// What a thread needs, for one key head after the other
struct Forward {
    const Layout& layout;
    Buffer keys, values, weights, query, made;  // keys as (E, R)

    explicit Forward(const Layout& layout)
        : layout(layout), keys(layout.for_keys()), values(layout.for_keys()), weights(layout.for_weights()),
          query(layout.for_block()), made(layout.for_block()) {}

    void take(const float* k, int64_t k_token, const float* v, int64_t v_token) {
        layout.pack_all(k, k_token, values.get());
        layout.transpose_all(values.get(), keys.get());
        layout.pack_all(v, v_token, values.get());
    }

    // Queries [first, first + R) of a head
    void block(int64_t first, const float* q, int64_t q_token, float* out, float* pivots, float* inverses) {
        const AttentionArgs& p = layout.p;
        const int64_t E = layout.E, D = p.head_dim, T = p.num_queries;
        const auto range = layout.range(first);
        float most[R];
        vec total[R] = {};
        std::fill(most, most + R, -INFINITY);
        layout.pack(q, q_token, first, T, query.get());
        float* S = weights.get();
        for (int64_t block = range.begin; block < range.end; block++, S += R * R) {
            const Sight sight(p, first, block);
            scores(sight.of_queries, E, query.get(), keys.get() + block * R * E, S);
            for (int i = 0; i < R; i++) {
                mask(sight, i, S + i * R, -INFINITY);
                vec top = all(most[i]);
                for (int j = 0; j < R; j += W) top = at_least(load(S + i * R + j), top);
                most[i] = greatest(top);
            }
        }
        for (int i = 0; i < R && first + i < T; i++)
            if (p.lo[first + i] >= p.hi[first + i]) most[i] = INFINITY;  // sees nothing: exponentials are 0
        memset(made.get(), 0, R * E * 4);
        float* P = weights.get();
        for (int64_t block = range.begin; block < range.end; block++, P += R * R) {
            for (int i = 0; i < R; i++)
                for (int j = i * R; j < (i + 1) * R; j += W) {
                    const vec e = exp_below_0((load(P + j) - most[i]) * p.scale);
                    total[i] += e;
                    store(P + j, e);
                }
            const Sight sight(p, first, block);
            matmul_add(sight.of_queries, E, P, values.get() + block * R * E, made.get());
        }
        for (int i = 0; i < R && first + i < T; i++) {
            const float all_of_it = sum(total[i]), inverse = 1 / (all_of_it == 0 ? 1 : all_of_it);
            pivots[first + i] = most[i];
            inverses[first + i] = inverse;
            float* to = out + (first + i) * p.num_heads * D;
            for (int64_t d = 0; d < D; d++) to[d] = made[i * E + d] * inverse;
        }
    }
};

struct Backward {
    const Layout& layout;
    Buffer keys, keys_t, values_t, dkeys, dvalues, weights, dweights, query, dquery, dmade;  // _t: as (E, R)

    explicit Backward(const Layout& layout)
        : layout(layout), keys(layout.for_keys()), keys_t(layout.for_keys()), values_t(layout.for_keys()),
          dkeys(layout.for_keys()), dvalues(layout.for_keys()), weights(layout.for_weights()),
          dweights(layout.for_weights()), query(layout.for_block()), dquery(layout.for_block()),
          dmade(layout.for_block()) {}

    void take(const float* k, int64_t k_token, const float* v, int64_t v_token) {
        layout.pack_all(v, v_token, keys.get());
        layout.transpose_all(keys.get(), values_t.get());
        layout.pack_all(k, k_token, keys.get());
        layout.transpose_all(keys.get(), keys_t.get());
    }

    void begin_head() {
        layout.clear(dkeys.get());
        layout.clear(dvalues.get());
    }

    // Queries [first, first + R) of a head: dq, and what they add to the gradients of keys and values
    void block(int64_t first, const float* q, int64_t q_token, const float* dout, int64_t dout_token,
               const float* pivots, const float* inverses, float* dq) {
        const AttentionArgs& p = layout.p;
        const int64_t E = layout.E, D = p.head_dim, T = p.num_queries;
        const auto range = layout.range(first);
        layout.pack(q, q_token, first, T, query.get());
        layout.pack(dout, dout_token, first, T, dmade.get());
        memset(dquery.get(), 0, R * E * 4);
        vec delta[R] = {};
        float *P = weights.get(), *dP = dweights.get();
        for (int64_t block = range.begin; block < range.end; block++, P += R * R, dP += R * R) {
            const Sight sight(p, first, block);
            scores(sight.of_queries, E, query.get(), keys_t.get() + block * R * E, P);
            scores(sight.of_queries, E, dmade.get(), values_t.get() + block * R * E, dP);
            for (int i = 0; i < R && first + i < T; i++) {
                mask(sight, i, P + i * R, -INFINITY);
                mask(sight, i, dP + i * R, 0);
                for (int j = i * R; j < (i + 1) * R; j += W) {
                    const vec e = exp_below_0((load(P + j) - pivots[first + i]) * p.scale) * inverses[first + i];
                    store(P + j, e);
                    delta[i] += e * load(dP + j);
                }
            }
        }
        P = weights.get(), dP = dweights.get();
        for (int64_t block = range.begin; block < range.end; block++, P += R * R, dP += R * R) {
            const Sight sight(p, first, block);
            float* dS = dP;
            for (int i = 0; i < R; i++) {
                const vec total = all(sum(delta[i]));
                for (int j = i * R; j < (i + 1) * R; j += W) store(dS + j, load(P + j) * (load(dP + j) - total));
            }
            matmul_add_transposed(sight.of_keys, E, P, dmade.get(), dvalues.get() + block * R * E);
            matmul_add_transposed(sight.of_keys, E, dS, query.get(), dkeys.get() + block * R * E);
            matmul_add(sight.of_queries, E, dS, keys.get() + block * R * E, dquery.get());
        }
        for (int i = 0; i < R && first + i < T; i++) {
            float* to = dq + (first + i) * p.num_heads * D;
            for (int64_t d = 0; d < D; d++) to[d] = dquery[i * E + d] * p.scale;
        }
    }

    // Head by head: one sum over all heads of a group rounds more
    void end_head(float* dk, float* dv) const {
        const int64_t D = layout.p.head_dim, token = layout.p.num_kv_heads * D;
        for (int64_t t = 0; t < layout.p.num_keys; t++)
            for (int64_t d = 0; d < D; d++) {
                dk[t * token + d] += dkeys[t * layout.E + d] * layout.p.scale;
                dv[t * token + d] += dvalues[t * layout.E + d];
            }
    }
};

}  // namespace

// out: (batch, num_queries, num_heads, head_dim), and pivot and 1 / sum: (num_heads, batch * num_queries)
extern "C" void attention_forward(const AttentionArgs* problem, const float* q, const Strides* qs, const float* k,
                                  const Strides* ks, const float* v, const Strides* vs, float* out, float* pivots,
                                  float* inverses) {
    const AttentionArgs& p = *problem;
    const Layout layout(p);
    const int64_t D = p.head_dim, G = p.num_heads / p.num_kv_heads, T = p.num_queries;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
    {
        Forward forward(layout);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < p.batch * p.num_kv_heads; item++) {
            const int64_t b = item / p.num_kv_heads, kv = item % p.num_kv_heads;
            forward.take(k + b * ks->batch + kv * ks->head, ks->token, v + b * vs->batch + kv * vs->head, vs->token);
            for (int64_t h = kv * G; h < (kv + 1) * G; h++) {
                const int64_t rows = (h * p.batch + b) * T;
                for (int64_t first = 0; first < T; first += R)
                    forward.block(first, q + b * qs->batch + h * qs->head, qs->token,
                                  out + (b * T * p.num_heads + h) * D, pivots + rows, inverses + rows);
            }
        }
    }
}

// dq, dk, dv: contiguous, as q, k and v; dk and dv are zeros, to be added to
extern "C" void attention_backward(const AttentionArgs* problem, const float* dout, const Strides* ds, const float* q,
                                   const Strides* qs, const float* k, const Strides* ks, const float* v,
                                   const Strides* vs, const float* pivots, const float* inverses, float* dq, float* dk,
                                   float* dv) {
    const AttentionArgs& p = *problem;
    const Layout layout(p);
    const int64_t D = p.head_dim, G = p.num_heads / p.num_kv_heads, T = p.num_queries;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
    {
        Backward backward(layout);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < p.batch * p.num_kv_heads; item++) {
            const int64_t b = item / p.num_kv_heads, kv = item % p.num_kv_heads;
            const int64_t keys = (b * p.num_keys * p.num_kv_heads + kv) * D;
            backward.take(k + b * ks->batch + kv * ks->head, ks->token, v + b * vs->batch + kv * vs->head, vs->token);
            for (int64_t h = kv * G; h < (kv + 1) * G; h++) {
                const int64_t rows = (h * p.batch + b) * T;
                backward.begin_head();
                for (int64_t first = 0; first < T; first += R)
                    backward.block(first, q + b * qs->batch + h * qs->head, qs->token,
                                   dout + b * ds->batch + h * ds->head, ds->token, pivots + rows, inverses + rows,
                                   dq + (b * T * p.num_heads + h) * D);
                backward.end_head(dk + keys, dv + keys);
            }
        }
    }
}

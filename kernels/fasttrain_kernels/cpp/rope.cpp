// RMSNorm of every head and rotary embedding, in one pass, and the gradients.
//
//     y = x * rstd * weight    out = (y1 cos - y2 sin, y2 cos + y1 sin, rest of y)    y1, y2: halves of what is rotated
#include "rows.h"

struct Heads {
    int64_t batch, tokens, heads, dim, half;  // half of the dimensions that are rotated
    const float *cos, *sin;                   // (table, half)
    const int64_t* positions;                 // null: 0, 1, ...
    int64_t positions_batch;                  // stride of positions
    float eps;
    int threads;

    int64_t row(int64_t b, int64_t t) const { return positions ? positions[b * positions_batch + t] : t; }
};

// The first position that is outside of the table, or -1
extern "C" int64_t outside(const int64_t* positions, int64_t count, int64_t table) {
    for (int64_t i = 0; i < count; i++)
        if (positions[i] < 0 || positions[i] >= table) return i;
    return -1;
}

extern "C" void qk_norm_rope_forward(const Heads* a, const float* x, const Strides* s, const float* weight,
                                     float* out) {
    const int64_t D = a->dim, half = a->half;
#pragma omp parallel for num_threads(a->threads) if (a->threads > 1)
    for (int64_t token = 0; token < a->batch * a->tokens; token++) {
        const int64_t b = token / a->tokens, t = token % a->tokens, row = a->row(b, t);
        const float *cos = a->cos + row * half, *sin = a->sin + row * half;
        for (int64_t h = 0; h < a->heads; h++) {
            const float* from = x + b * s->batch + t * s->token + h * s->head;
            float* to = out + (token * a->heads + h) * D;
            float rstd = 1;
            if (weight) {
                Sum squares;
                each(D, [&](int64_t i, auto kind) {
                    const auto v = get<decltype(kind)>(from + i);
                    squares.add(v * v);
                });
                rstd = 1 / std::sqrt(squares.total() / D + a->eps);
            }
            auto y = [&](int64_t i, auto kind) {
                using T = decltype(kind);
                return weight ? get<T>(from + i) * rstd * get<T>(weight + i) : get<T>(from + i);
            };
            each(half, [&](int64_t i, auto kind) {
                using T = decltype(kind);
                const T c = get<T>(cos + i), n = get<T>(sin + i), y1 = y(i, kind), y2 = y(half + i, kind);
                put(to + i, y1 * c - y2 * n);
                put(to + half + i, y2 * c + y1 * n);
            });
            each(D - 2 * half, [&](int64_t i, auto kind) { put(to + 2 * half + i, y(2 * half + i, kind)); });
        }
    }
}

// dx is contiguous; it may be null, and so may dweight. parts: (parts_of(batch * tokens * heads), dim).
extern "C" void qk_norm_rope_backward(const Heads* a, const float* dout, const Strides* ds, const float* x,
                                      const Strides* xs, const float* weight, float* dx, float* parts,
                                      float* dweight) {
    const int64_t D = a->dim, half = a->half, rows = a->batch * a->tokens * a->heads, count = parts_of(rows);
#pragma omp parallel for num_threads(a->threads) if (a->threads > 1)
    for (int64_t part = 0; part < count; part++) {
        float* dw = dweight ? parts + part * D : nullptr;
        if (dw) memset(dw, 0, D * sizeof(float));
        float turned[512];  // the gradient of y; dim is at most 512
        for (int64_t row = part * PART; row < rows && row < (part + 1) * PART; row++) {
            const int64_t token = row / a->heads, h = row % a->heads, b = token / a->tokens, t = token % a->tokens;
            const float *cos = a->cos + a->row(b, t) * half, *sin = a->sin + a->row(b, t) * half;
            const float* d = dout + b * ds->batch + t * ds->token + h * ds->head;
            float* to = dx ? dx + row * D : nullptr;
            float* g = weight || !to ? turned : to;
            each(half, [&](int64_t i, auto kind) {
                using T = decltype(kind);
                const T c = get<T>(cos + i), n = get<T>(sin + i), d1 = get<T>(d + i), d2 = get<T>(d + half + i);
                put(g + i, d1 * c + d2 * n);
                put(g + half + i, d2 * c - d1 * n);
            });
            each(D - 2 * half, [&](int64_t i, auto kind) {
                put(g + 2 * half + i, get<decltype(kind)>(d + 2 * half + i));
            });
            if (!weight) continue;
            const float* from = x + b * xs->batch + t * xs->token + h * xs->head;
            Sum squares;
            each(D, [&](int64_t i, auto kind) {
                const auto v = get<decltype(kind)>(from + i);
                squares.add(v * v);
            });
            const float rstd = 1 / std::sqrt(squares.total() / D + a->eps);
            Sum products;
            each(D, [&](int64_t i, auto kind) {
                using T = decltype(kind);
                const T gx = get<T>(g + i) * (get<T>(from + i) * rstd);
                if (dw) put(dw + i, get<T>(dw + i) + gx);
                products.add(gx * get<T>(weight + i));
            });
            if (!to) continue;
            const float mean = products.total() / D;
            each(D, [&](int64_t i, auto kind) {
                using T = decltype(kind);
                put(to + i, (get<T>(g + i) * get<T>(weight + i) - get<T>(from + i) * rstd * mean) * rstd);
            });
        }
    }
    if (dweight) add_parts(parts, count, D, dweight);
}

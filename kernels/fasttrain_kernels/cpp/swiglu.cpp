// silu(gate) * up and its gradients, row by row; rows begin `_row` floats after one another.
#include "rows.h"

// 1 / (1 + e^-x), from a power of e that cannot overflow
static inline vec sigmoid(vec x) {
    const vec e = exp_below_0(x < 0 ? x : -x), share = 1 / (1 + e);
    return x < 0 ? e * share : share;
}
static inline float sigmoid(float x) { return sigmoid(all(x))[0]; }

extern "C" void swiglu_forward(const float* gate, int64_t gate_row, const float* up, int64_t up_row, float* out,
                               int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *g = gate + row * gate_row, *u = up + row * up_row;
        float* to = out + row * n;
        each(n, [&](int64_t i, auto kind) {
            using T = decltype(kind);
            const T x = get<T>(g + i);
            put(to + i, x * sigmoid(x) * get<T>(u + i));
        });
    }
}

// dgate and dup, of which one may be null, have rows `grad_row` apart
extern "C" void swiglu_backward(const float* dout, int64_t dout_row, const float* gate, int64_t gate_row,
                                const float* up, int64_t up_row, float* dgate, float* dup, int64_t grad_row,
                                int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *d = dout + row * dout_row, *g = gate + row * gate_row, *u = up + row * up_row;
        float *dg = dgate ? dgate + row * grad_row : nullptr, *du = dup ? dup + row * grad_row : nullptr;
        each(n, [&](int64_t i, auto kind) {
            using T = decltype(kind);
            const T x = get<T>(g + i), s = sigmoid(x), silu = x * s;
            if (dg) put(dg + i, get<T>(d + i) * get<T>(u + i) * (s + silu * (1 - s)));
            if (du) put(du + i, get<T>(d + i) * silu);
        });
    }
}

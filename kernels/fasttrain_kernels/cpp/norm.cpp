// RMSNorm of rows, with an addition before it where there is a residual stream.
//
//     total = x + residual    rstd = 1 / sqrt(mean(total^2) + eps)    out = total * rstd * (offset + weight)
//
// A missing tensor is null; rows begin `_row` floats after one another, and are contiguous where nothing says so.
#include "rows.h"

extern "C" int64_t part_rows() { return PART; }

extern "C" void rms_norm_forward(const float* x, int64_t x_row, const float* residual, int64_t residual_row,
                                 const float* weight, float offset, float eps, float* total, float* out, float* rstd,
                                 int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float* h = x + row * x_row;
        Sum squares;
        if (residual) {
            const float* r = residual + row * residual_row;
            float* t = total + row * n;
            each(n, [&](int64_t i, auto kind) {
                using T = decltype(kind);
                const T s = get<T>(h + i) + get<T>(r + i);
                put(t + i, s);
                squares.add(s * s);
            });
            h = t;
        } else {
            each(n, [&](int64_t i, auto kind) {
                const auto s = get<decltype(kind)>(h + i);
                squares.add(s * s);
            });
        }
        const float scale = 1 / std::sqrt(squares.total() / n + eps);
        rstd[row] = scale;
        float* to = out + row * n;
        each(n, [&](int64_t i, auto kind) {
            using T = decltype(kind);
            const T xhat = get<T>(h + i) * scale;
            put(to + i, weight ? xhat * (offset + get<T>(weight + i)) : xhat);
        });
    }
}

// parts: (parts_of(rows), n), of dweight. dx and dweight may be null; dtotal is added to dx.
extern "C" void rms_norm_backward(const float* dout, int64_t dout_row, const float* dtotal, int64_t dtotal_row,
                                  const float* x, int64_t x_row, const float* weight, float offset, const float* rstd,
                                  float* dx, float* parts, float* dweight, int64_t rows, int64_t n, int threads) {
    const int64_t count = parts_of(rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < count; part++) {
        float* dw = dweight ? parts + part * n : nullptr;
        if (dw) memset(dw, 0, n * sizeof(float));
        for (int64_t row = part * PART; row < rows && row < (part + 1) * PART; row++) {
            const float *g = dout + row * dout_row, *h = x + row * x_row;
            const float scale = rstd[row];
            Sum products;
            each(n, [&](int64_t i, auto kind) {
                using T = decltype(kind);
                const T gx = get<T>(g + i) * (get<T>(h + i) * scale);
                if (dw) put(dw + i, get<T>(dw + i) + gx);
                products.add(weight ? gx * (offset + get<T>(weight + i)) : gx);
            });
            if (!dx) continue;
            const float mean = products.total() / n;
            float* to = dx + row * n;
            const float* added = dtotal ? dtotal + row * dtotal_row : nullptr;
            each(n, [&](int64_t i, auto kind) {
                using T = decltype(kind);
                const T scaled = weight ? get<T>(g + i) * (offset + get<T>(weight + i)) : get<T>(g + i);
                const T d = (scaled - get<T>(h + i) * scale * mean) * scale;
                put(to + i, added ? d + get<T>(added + i) : d);
            });
        }
    }
    if (dweight) add_parts(parts, count, n, dweight);
}

// Softmax of rows in place, with what a loss needs of it.
#include "simd.h"

// x: (rows, cols), `stride` floats from row to row. top: the maximum of a row; total: the sum of exp(x - top).
extern "C" void softmax_rows(float* x, int64_t rows, int64_t cols, int64_t stride, float* top, float* total,
                             int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        float* y = x + row * stride;
        int64_t whole = cols - cols % (4 * W);
        vec m[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
        for (int64_t i = 0; i < whole; i += 4 * W)
            for (int j = 0; j < 4; j++) m[j] = at_least(load(y + i + j * W), m[j]);
        float most = -INFINITY;
        for (int j = 0; j < 4; j++) most = greatest(m[j]) > most ? greatest(m[j]) : most;
        for (int64_t i = whole; i < cols; i++) most = y[i] > most ? y[i] : most;
        vec s[4] = {};
        float rest = 0;
        for (int64_t i = 0; i < whole; i += 4 * W)
            for (int j = 0; j < 4; j++) {
                vec e = exp_below_0(load(y + i + j * W) - most);
                s[j] += e;
                store(y + i + j * W, e);
            }
        for (int64_t i = whole; i < cols; i++) {
            y[i] = exp_below_0(all(y[i] - most))[0];
            rest += y[i];
        }
        float all_of_it = sum((s[0] + s[1]) + (s[2] + s[3])) + rest;
        float share = 1 / all_of_it;
        for (int64_t i = 0; i < whole; i += W) store(y + i, load(y + i) * share);
        for (int64_t i = whole; i < cols; i++) y[i] *= share;
        top[row] = most;
        total[row] = all_of_it;
    }
}

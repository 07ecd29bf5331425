// A matmul of tiles that stay in registers: what attention and larger matmuls are made of.
#pragma once
#include <cstdlib>
#include <memory>

#include "simd.h"

constexpr int ROWS = 6, COLUMNS = 2 * W;  // of a tile of sums: twelve registers

// C = A B or C += A B, over [begin, end): what is added is summed up first, which rounds less than one long sum
template <int N, bool ADD>
inline void tile(int64_t begin, int64_t end, const float* A, int64_t ar, int64_t ac, const float* B, int64_t ldb,
                 float* C, int64_t ldc) {
    vec c[N][2] = {};
#pragma GCC unroll 4
    for (int64_t k = begin; k < end; k++) {
        const vec b0 = load(B + k * ldb), b1 = load(B + k * ldb + W);
        for (int i = 0; i < N; i++) {
            const float a = A[i * ar + k * ac];
            c[i][0] += a * b0;
            c[i][1] += a * b1;
        }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < 2; j++) {
            float* to = C + i * ldc + j * W;
            store(to, ADD ? load(to) + c[i][j] : c[i][j]);
        }
}

struct Free {
    void operator()(float* p) const { free(p); }
};
typedef std::unique_ptr<float[], Free> Buffer;

inline Buffer buffer(int64_t size) { return Buffer((float*)aligned_alloc(64, (size * 4 / 64 + 1) * 64)); }

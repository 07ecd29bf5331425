// Vectors of as many floats as a register holds, in the compiler's own notation: one source for every instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX__
#include <immintrin.h>
#endif

#if defined __AVX512F__ || defined WIDE  // by tests, which a compiler then serves with two registers each
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
struct Strides {
    int64_t batch, token, head;  // in floats; elements of a head are contiguous
};

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));

static inline vec load(const float* p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline void store(float* p, vec x) { memcpy(p, &x, sizeof x); }

static inline vec all(float x) { return x - vec{}; }

static inline float sum(vec x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}

static inline float greatest(vec x) {
    float most = x[0];
    for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
    return most;
}

// Keeps NaN in x.
static inline vec at_least(vec x, vec least) { return x < least ? least : x; }

// e^x for x <= 0; 0 below -87.7; NaN stays NaN. x = n ln 2 + r, in two parts of ln 2, and Taylor's series of e^r,
// |r| <= 0.35, which leaves 5e-9.
static inline vec exp_below_0(vec x) {
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits
    x = at_least(x, all(-88.0f));
    vec t = x * 1.44269504f + shift;
    vec n = t - shift;
    vec r = x - n * 0.693145752f - n * 1.42860677e-6f;
    vec p = all(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (vec)(((ivec)t - (ivec)shift + 127) << 23);
}

// Eight columns of up to eight rows, each column as eight floats, zeros where there is no row; `step` from one to the
// next, which may be less than eight: the later one then overwrites the end of the earlier.
static inline void transpose(const float* from, int64_t row, int rows, float* to, int64_t step) {
#ifdef __AVX__
    __m256 r[8], pairs[8], fours[8];
    for (int i = 0; i < 8; i++) r[i] = i < rows ? _mm256_loadu_ps(from + i * row) : _mm256_setzero_ps();
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) _mm256_storeu_ps(to + i * step, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    for (int i = 0; i < 4; i++)
        _mm256_storeu_ps(to + (i + 4) * step, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
#else
    for (int c = 0; c < 8; c++)
        for (int i = 0; i < 8; i++) to[c * step + i] = i < rows ? from[i * row + c] : 0;
#endif
}

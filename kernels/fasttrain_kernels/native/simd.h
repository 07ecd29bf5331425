// Vectors of as many floats as a register holds, in the compiler's own notation: one source for every instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
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

// A row of floats, in vectors and then one by one: each(n, f) calls f(i, kind) with kind a vec or a float.
#pragma once
#include "simd.h"

template <class T>
inline T get(const float* p);
template <>
inline vec get<vec>(const float* p) { return load(p); }
template <>
inline float get<float>(const float* p) { return *p; }

static inline void put(float* p, vec x) { store(p, x); }
static inline void put(float* p, float x) { *p = x; }

template <class F>
inline void each(int64_t n, F f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) f(i, vec{});
    for (; i < n; i++) f(i, 0.0f);
}

// A sum over a row.
struct Sum {
    vec many = {};
    float rest = 0;

    void add(vec x) { many += x; }
    void add(float x) { rest += x; }
    float total() const { return sum(many) + rest; }
};

// Rows whose part of a weight's gradient is one sum. The parts are then added in pairs: as accurate as torch's sums, and
// the same on any number of threads.
constexpr int64_t PART = 16;

static inline int64_t parts_of(int64_t rows) { return (rows + PART - 1) / PART; }

// parts: (count, n), destroyed
static inline void add_parts(float* parts, int64_t count, int64_t n, float* to) {
    for (int64_t step = 1; step < count; step *= 2)
        for (int64_t part = 0; part + step < count; part += 2 * step)
            each(n, [&](int64_t i, auto kind) {
                using T = decltype(kind);
                float* sum = parts + part * n + i;
                put(sum, get<T>(sum) + get<T>(sum + step * n));
            });
    memcpy(to, parts, n * sizeof(float));
}

// C = A B or C += A B in float32, of matrices with any strides.
//
// Chunks of A and B are packed into panels: six rows of A, sixteen columns of B, element by element in the order in
// which tiles take them. A panel of B stays in L1 while all packed panels of A pass by, those in L2, and what is packed
// of B in L3.
//
//     for columns of B, BAND at a time
//         for their depth, DEPTH at a time           pack B
//             for rows of A, BLOCK at a time         pack A
//                 for panels of B, for panels of A   a tile of C
//
// An element of C is the sum of its parts of the depth, in order. It depends on its row of A and its column of B, not
// on how many others there are, nor on threads.
#include <algorithm>

#include "tile.h"

constexpr int64_t DEPTH = 192;  // x COLUMNS floats: 12 KB of an L1 of 32; more would be faster, and round more
constexpr int64_t BLOCK = 192;  // x DEPTH: 147 KB of an L2 of 512
constexpr int64_t BAND = 2048;  // x DEPTH: 1.5 MB

struct Matrix {
    const float* x;
    int64_t row, column;  // strides, in floats

    Matrix from(int64_t r, int64_t c) const { return {x + r * row + c * column, row, column}; }
    Matrix transposed() const { return {x, column, row}; }
};

namespace {

// Whole panels of a matrix whose columns are contiguous: all of a column at once, as its next one may lie in the same
// set of the cache
template <int N>
void pack_columns(const Matrix& x, int64_t rows, int64_t columns, float* to) {
    const int64_t whole = rows - rows % N;
    for (int64_t c = 0; c < columns; c++) {
        const float* from = x.x + c * x.column;
        for (int64_t r = 0; r < rows; r += 16) __builtin_prefetch(from + 4 * x.column + r);
        for (int64_t r = 0; r < whole; r += N) memcpy(to + r * columns + c * N, from + r, N * 4);
    }
}

// Rows of x, N at a time, as (columns, N): a panel after the other; the last one filled up with zeros
template <int N>
void pack(const Matrix& x, int64_t rows, int64_t columns, float* to) {
    int64_t first = 0;
    if (x.row == 1) {
        pack_columns<N>(x, rows, columns, to);
        first = rows - rows % N;
    }
    for (int64_t r = first; r < rows; r += N) {
        float* panel = to + r * columns;
        int64_t c = 0;
        if (r + N <= rows && x.column == 1)
            for (; c + 8 <= columns; c += 8) {
                if (c % 16 == 0)
                    for (int i = 0; i < N; i++) __builtin_prefetch(x.x + (r + N + i) * x.row + c);
                for (int i = 0; i < N; i += 8)
                    transpose(x.x + (r + i) * x.row + c, x.row, std::min(8, N - i), panel + c * N + i, N);
            }
        for (; c < columns; c++)
            for (int i = 0; i < N; i++) panel[c * N + i] = r + i < rows ? x.x[(r + i) * x.row + c * x.column] : 0;
    }
}

struct Packed {
    Buffer a = buffer(BLOCK * DEPTH + W), b = buffer(BAND * DEPTH + W);  // W: transposed stores reach beyond the end
};

void tile_of(int64_t rows, int64_t columns, int64_t depth, const float* a, const float* b, bool add, float* C,
             int64_t ldc) {
    if (rows >= ROWS && columns >= COLUMNS) {
        if (add)
            tile<ROWS, true>(0, depth, a, 1, ROWS, b, COLUMNS, C, ldc);
        else
            tile<ROWS, false>(0, depth, a, 1, ROWS, b, COLUMNS, C, ldc);
        return;
    }
    float c[ROWS * COLUMNS];
    tile<ROWS, false>(0, depth, a, 1, ROWS, b, COLUMNS, c, COLUMNS);
    for (int64_t i = 0; i < std::min<int64_t>(rows, ROWS); i++)
        for (int64_t j = 0; j < std::min<int64_t>(columns, COLUMNS); j++)
            C[i * ldc + j] = add ? C[i * ldc + j] + c[i * COLUMNS + j] : c[i * COLUMNS + j];
}

void matmul_serial(int64_t M, int64_t N, int64_t K, const Matrix& A, const Matrix& B, float* C, int64_t ldc, bool add) {
    if (!M) return;
    static thread_local const Packed packed;
    const int64_t parts = (K + DEPTH - 1) / DEPTH, step = (K + parts - 1) / parts;
    for (int64_t n = 0; n < N; n += BAND) {
        const int64_t columns = std::min(BAND, N - n);
        for (int64_t k = 0; k < K; k += step) {
            const int64_t depth = std::min(step, K - k);
            pack<COLUMNS>(B.from(k, n).transposed(), columns, depth, packed.b.get());
            for (int64_t m = 0; m < M; m += BLOCK) {
                const int64_t rows = std::min(BLOCK, M - m);
                pack<ROWS>(A.from(m, k), rows, depth, packed.a.get());
                for (int64_t j = 0; j < columns; j += COLUMNS)
                    for (int64_t i = 0; i < rows; i += ROWS)
                        tile_of(rows - i, columns - j, depth, packed.a.get() + i * depth, packed.b.get() + j * depth,
                                add || k, C + (m + i) * ldc + n + j, ldc);
            }
        }
    }
}

int64_t share(int64_t size, int64_t part, int64_t parts, int64_t unit) {  // where a part begins
    return std::min(size, (size + unit - 1) / unit * part / parts * unit);
}

}  // namespace

// A: (M, K), B: (K, N), C: (M, N) with contiguous rows; K at least 1
extern "C" void matmul(int64_t M, int64_t N, int64_t K, const Matrix* A, const Matrix* B, float* C, int64_t ldc,
                       int add, int threads) {
    int down = 1;  // so many parts of the rows, the others of the columns: those with which a thread packs the least
    for (int parts = 2; parts <= threads; parts++)
        if (threads % parts == 0 && M / parts + N / (threads / parts) < M / down + N / (threads / down)) down = parts;
    const int across = threads / down;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const int64_t top = share(M, part / across, down, ROWS), bottom = share(M, part / across + 1, down, ROWS);
        const int64_t left = share(N, part % across, across, COLUMNS);
        const int64_t right = share(N, part % across + 1, across, COLUMNS);
        matmul_serial(bottom - top, right - left, K, A->from(top, 0), B->from(0, left), C + top * ldc + left, ldc, add);
    }
}

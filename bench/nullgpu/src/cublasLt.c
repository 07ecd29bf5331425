// libcublasLt of the null GPU: one algorithm for everything, that needs no workspace.
#include <stdlib.h>
#include <string.h>

#include "nullgpu.h"

typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } heuristic;
enum { CUBLAS_SUCCESS, CUBLAS_EXECUTION_FAILED = 13 };

static int make(void **out) {
    *out = calloc(1, 64);
    return CUBLAS_SUCCESS;
}
static int destroy(void *made) {
    free(made);
    return CUBLAS_SUCCESS;
}
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **out, int compute, int scale) { return make(out); }
int cublasLtMatmulDescDestroy(void *made) { return destroy(made); }
int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return make(out);
}
int cublasLtMatrixLayoutDestroy(void *made) { return destroy(made); }
int cublasLtMatmulPreferenceCreate(void **out) { return make(out); }
int cublasLtMatmulPreferenceDestroy(void *made) { return destroy(made); }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *matmul, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, heuristic *out, int *count) {
    memset(out, 0, sizeof *out);
    *count = 1;
    return CUBLAS_SUCCESS;
}
int cublasLtMatmul(void *handle, void *matmul, const void *alpha, const void *a, void *a_layout, const void *b,
                   void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                   const void *algorithm, void *workspace, size_t workspace_size, void *stream) {
    return nullgpu_launch(stream, "cublasLtMatmul", CUBLAS) ? CUBLAS_EXECUTION_FAILED : CUBLAS_SUCCESS;
}

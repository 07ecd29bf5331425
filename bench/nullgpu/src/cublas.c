// libcublas of the null GPU: handles that exist, and matmuls that are launched and compute nothing.
#include <stdlib.h>

#include "nullgpu.h"

typedef struct { void *stream; int math_mode, pointer_mode; } handle;
enum { CUBLAS_SUCCESS, CUBLAS_EXECUTION_FAILED = 13 };

int cublasCreate_v2(handle **out) {
    *out = calloc(1, sizeof **out);
    return CUBLAS_SUCCESS;
}
int cublasDestroy_v2(handle *h) {
    free(h);
    return CUBLAS_SUCCESS;
}
int cublasSetStream_v2(handle *h, void *stream) {
    h->stream = stream;
    return CUBLAS_SUCCESS;
}
int cublasGetStream_v2(handle *h, void **stream) {
    *stream = h->stream;
    return CUBLAS_SUCCESS;
}
int cublasGetMathMode(handle *h, int *mode) {
    *mode = h->math_mode;
    return CUBLAS_SUCCESS;
}
int cublasSetMathMode(handle *h, int mode) {
    h->math_mode = mode;
    return CUBLAS_SUCCESS;
}
int cublasGetPointerMode_v2(handle *h, int *mode) {
    *mode = h->pointer_mode;
    return CUBLAS_SUCCESS;
}
int cublasSetPointerMode_v2(handle *h, int mode) {
    h->pointer_mode = mode;
    return CUBLAS_SUCCESS;
}

// Of their arguments only the first is looked at.
#define LAUNCH(name) \
    int name(handle *h) { return nullgpu_launch(h->stream, #name, CUBLAS) ? CUBLAS_EXECUTION_FAILED : CUBLAS_SUCCESS; }
LAUNCH(cublasGemmEx)
LAUNCH(cublasGemmStridedBatchedEx)
LAUNCH(cublasSgemm_v2)
LAUNCH(cublasDgemm_v2)
LAUNCH(cublasSgemmEx)
LAUNCH(cublasSgemmStridedBatched)
LAUNCH(cublasDgemmStridedBatched)
LAUNCH(cublasSgemmBatched)
LAUNCH(cublasSgemv_v2)
LAUNCH(cublasDgemv_v2)
LAUNCH(cublasDotEx)
LAUNCH(cublasSdot_v2)
LAUNCH(cublasDdot_v2)

// libcudnn of the null GPU: its graph API, with one engine for everything, that needs no workspace.
#include <stdlib.h>

#include "nullgpu.h"

typedef struct { int type; } descriptor;
typedef struct { void *stream; } handle;
enum { CUDNN_SUCCESS, CUDNN_EXECUTION_FAILED = 5000 };
enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, EXECUTION_PLAN = 4 };  // as in cudnn_graph.h

int cudnnCreate(handle **out) {
    *out = calloc(1, sizeof **out);
    return CUDNN_SUCCESS;
}
int cudnnSetStream(handle *h, void *stream) {
    h->stream = stream;
    return CUDNN_SUCCESS;
}
size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int error) { return error ? "CUDNN_STATUS_EXECUTION_FAILED" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *out, size_t size) {
    if (size) *out = 0;
}
int cudnnGetProperty(int which, int *value) {
    static const int version[] = {9, 20, 0};
    *value = which >= 0 && which < 3 ? version[which] : 0;
    return CUDNN_SUCCESS;
}
int cudnnBackendCreateDescriptor(int type, descriptor **out) {
    *out = calloc(1, 64);
    (*out)->type = type;
    return CUDNN_SUCCESS;
}
int cudnnBackendDestroyDescriptor(descriptor *d) {
    free(d);
    return CUDNN_SUCCESS;
}
int cudnnBackendFinalize(descriptor *d) {
    if (d->type == EXECUTION_PLAN) COUNT("cuDNN plans built");  // a real one takes 10 to 1000 ms
    return CUDNN_SUCCESS;
}
int cudnnBackendGetAttribute(descriptor *d, int name, int type, int64_t wanted, int64_t *count, void *elements) {
    if (type == TYPE_INT64 && elements) *(int64_t *)elements = 0;  // the size of a workspace
    if (count) *count = type == TYPE_INT64 || type == TYPE_DESCRIPTOR;
    return CUDNN_SUCCESS;
}
int cudnnBackendExecute(handle *h, descriptor *plan, descriptor *pack) {
    return nullgpu_launch(h->stream, "cudnn", CUDNN) ? CUDNN_EXECUTION_FAILED : CUDNN_SUCCESS;
}

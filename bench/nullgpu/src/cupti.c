// libcupti of the null GPU: a profiler that never has a record.
#include <stdlib.h>

#include "nullgpu.h"

enum { CUPTI_SUCCESS, CUPTI_MAX_LIMIT_REACHED = 12 };

int cuptiGetVersion(uint32_t *version) {
    *version = 130000;
    return CUPTI_SUCCESS;
}
int cuptiActivityGetNextRecord(uint8_t *buffer, size_t size, void **record) {
    *record = NULL;
    return CUPTI_MAX_LIMIT_REACHED;
}
int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped) {
    *dropped = 0;
    return CUPTI_SUCCESS;
}
int cuptiGetResultString(int result, const char **text) {
    *text = "an error of the null GPU";
    return CUPTI_SUCCESS;
}
int cuptiSubscribe(void **subscriber, void *callback, void *data) {
    *subscriber = malloc(1);
    return CUPTI_SUCCESS;
}
int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *id) {
    if (id) *id = 0;
    return CUPTI_SUCCESS;
}
int cuptiGetCallbackName(int domain, uint32_t id, const char **name) {
    *name = "nullgpu";
    return CUPTI_SUCCESS;
}

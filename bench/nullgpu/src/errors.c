// Errors by the names and in the words of CUDA, which programs look for.
#include "nullgpu.h"

static const struct { int number; const char *name, *text; } errors[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {ILLEGAL_STATE, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {CAPTURE_MERGE, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {CAPTURE_UNJOINED, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CAPTURE_WRONG_THREAD, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

const char *nullgpu_error_name(int error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].number == error) return errors[i].name;
    return "cudaErrorUnknown";
}

const char *nullgpu_error_text(int error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].number == error) return errors[i].text;
    return "an error that the null GPU has no words for";
}

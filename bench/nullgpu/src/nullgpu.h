// What the null GPU's libraries share: one process's memory, streams, events, graphs and counters, in libnullgpu.so.
// A function that can fail returns one of the numbers below, which CUDA's runtime and driver have in common.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};
const char *nullgpu_error_name(int error);         // as the runtime names it
const char *nullgpu_error_text(int error);

// ---- settings.c: from the environment, read once
typedef struct {
    int devices;       // NULLGPU_DEVICES=1: devices of this process
    int major, minor;  // NULLGPU_CC=9.0: compute capability; 8.0, 9.0 and 10.0 have their SMs and shared memory
    size_t memory;     // NULLGPU_MEM=84.93: GB of each device; an allocation beyond it fails as on a real one
    int zero;          // NULLGPU_ZERO=0; 1: nothing is ever written to a device: all of it reads as zeros. Kernels
                       // write no results; without this, those hold what was there before: bytes of copies
    int lazy;          // NULLGPU_LAZY=0; 1: asynchronous copies happen when something waits for them, not before; a
                       // pinned source changed in between is reported, and a destination holds 0xAA until then
    int kernels;       // NULLGPU_KERNELS=0; 1: launches are counted by kernel, too
} nullgpu_settings_t;
const nullgpu_settings_t *nullgpu_settings(void);

// ---- card.c: what the device is
int nullgpu_device(void);                          // of this thread
void nullgpu_set_device(int device);
int nullgpu_attribute(int attribute);              // cudaDevAttr* and CU_DEVICE_ATTRIBUTE_* have the same numbers
const char *nullgpu_device_name(void);
void nullgpu_device_uuid(int device, unsigned char out[16]);
int nullgpu_launch_fits(const unsigned grid[3], const unsigned block[3], size_t shared, const char *kernel);

// ---- counters.c
long *nullgpu_counter(const char *name);           // made at its first call
void nullgpu_count(const char *kind, const char *name, const char *suffix, long n);  // of all three, joined
#define COUNT(name)                                       \
    do {                                                  \
        static long *counter;                             \
        if (!counter) counter = nullgpu_counter(name);    \
        __atomic_add_fetch(counter, 1, __ATOMIC_RELAXED); \
    } while (0)
void nullgpu_wait(const char *name, size_t bytes); // the host waits for the device: counted, its stack written
void nullgpu_pageable_copy(size_t bytes);
void nullgpu_python_stack(int descriptor);
// For ctypes (program.py): all counters as JSON, and where Python stacks of waits are written (-1: nowhere).
int nullgpu_json(char *out, size_t size);
void nullgpu_trace(int descriptor);

// ---- memory.c: device addresses have no access rights: a host that reads through one dies as on a real machine
int nullgpu_malloc(void **out, size_t size, int charged);  // charged: to the device's memory
int nullgpu_free(void *address);
int nullgpu_charge(size_t size);                   // for memory without an address of its own (cuMemCreate)
void nullgpu_discharge(size_t size);
size_t nullgpu_memory_used(void);
size_t nullgpu_memory_peak(void);
size_t nullgpu_extent(const void *address, void **base);  // of the allocation at this address; 0: not device memory
int nullgpu_is_device(const void *address);
int nullgpu_is_pinned(const void *address);
int nullgpu_pinned_malloc(void **out, size_t size);
int nullgpu_pinned_free(void *address);
void nullgpu_pin(void *address, size_t size);
void nullgpu_unpin(void *address);
void nullgpu_forget(void *address, size_t size);   // its bytes are zero again, and take no RAM

// ---- streams.c: a stream's handle, or 0 and 1 for the legacy default stream, 2 for the thread's own
void *nullgpu_stream(int priority, int blocking);  // blocking: ordered with the legacy default stream
int nullgpu_stream_priority(void *stream);
void nullgpu_stream_delete(void *stream);
int nullgpu_stream_query(void *stream);
int nullgpu_stream_synchronize(void *stream, const char *caller);
int nullgpu_device_synchronize(const char *caller);
void nullgpu_drain(void);                          // all that is queued happens
enum nullgpu_library { TORCH, TRITON, CUBLAS, CUDNN };  // whose kernel it is
int nullgpu_launch(void *stream, const char *kernel, enum nullgpu_library library);
int nullgpu_collective(void *stream, const char *name, size_t bytes, void *to, const void *from, size_t moved);
int nullgpu_copy(void *stream, void *to, const void *from, size_t bytes, int asynchronous);
int nullgpu_fill(void *stream, void *to, int value, size_t bytes, size_t width);
int nullgpu_host_function(void *stream, void (*function)(void *), void *data);
void *nullgpu_event(void);
void nullgpu_event_delete(void *event);
int nullgpu_event_record(void *event, void *stream, int external);
int nullgpu_event_wait(void *stream, void *event, int external);
int nullgpu_event_query(void *event);
int nullgpu_event_synchronize(void *event);
int nullgpu_event_elapsed(void *start, void *end, float *milliseconds);

// ---- capture.c: graphs of work that was captured
int nullgpu_unsafe_call(void);                     // a call that captures of this thread, or of others, may prohibit
int nullgpu_capture_refuses(void *stream);         // a call that no capturing stream can be part of
int nullgpu_capture_begin(void *stream, int mode);
int nullgpu_capture_end(void *stream, void **graph);
int nullgpu_capture_info(void *stream, int *status, unsigned long long *id, void **graph, void ***nodes, size_t *count);
int nullgpu_capture_depend(void *stream, void **nodes, size_t count, int replace);
int nullgpu_capture_exchange_mode(int mode);       // of this thread; the one before
int nullgpu_capture_node(void *stream);            // some work that has no effect here, if the stream is capturing
size_t nullgpu_graph_nodes(void *graph, void **nodes, size_t most);
size_t nullgpu_node_dependencies(void *node, void **nodes, size_t most);
int nullgpu_graph_dot(void *graph, const char *path);
void *nullgpu_graph_hold(void *graph);             // one more owner
void nullgpu_graph_release(void *graph);
int nullgpu_graph_launch(void *graph, void *stream);

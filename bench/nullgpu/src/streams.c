// Streams and events: the order of work, and when it happens.
//
// Work happens at once; under NULLGPU_LAZY when somebody waits for it. On a stream that is capturing, it becomes a node
// of a graph (capture.c) and happens, and is counted, when the graph is launched.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "memory.h"
#include "queue.h"

enum { PAGE = 4096 };
pthread_mutex_t nullgpu_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
stream nullgpu_legacy = {.blocking = 1};
stream *nullgpu_streams = &nullgpu_legacy;

void *nullgpu_stream(int priority, int blocking) {
    stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    made->blocking = blocking;
    LOCKED {
        made->next = nullgpu_streams;
        nullgpu_streams = made;
    }
    return made;
}

stream *stream_of(void *handle) {
    static __thread stream *own;
    if ((uintptr_t)handle > 2) return handle;
    if ((uintptr_t)handle < 2) return &nullgpu_legacy;
    return own ? own : (own = nullgpu_stream(0, 1));
}

int nullgpu_stream_priority(void *handle) { return stream_of(handle)->priority; }

// ---------------------------------------------------------------------------------------------------- what work does

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static uint64_t checksum(const char *bytes, size_t n) {
    uint64_t sum = n;
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, 8);
        sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
    }
    return sum;
}

static void move(char *to, const char *from, size_t n) {
    if (nullgpu_settings()->zero && nullgpu_is_device(to)) return;
    char *target = bytes_of(to);
    const char *source = bytes_of(from);
    if (!nullgpu_is_device(to) || !nullgpu_is_device(from)) {
        memmove(target, source, n);
        return;
    }
    static const char zeros[PAGE];  // zeros onto zeros are not written: a page that nobody wrote takes no RAM
    for (size_t i = 0; i < n; i += PAGE) {
        size_t part = n - i < PAGE ? n - i : PAGE;
        if (memcmp(source + i, zeros, part) || memcmp(target + i, zeros, part)) memmove(target + i, source + i, part);
    }
}

static void fill(char *to, int value, size_t n, size_t width) {
    if (nullgpu_settings()->zero && nullgpu_is_device(to)) return;
    char *target = bytes_of(to);
    if (!value && nullgpu_is_device(to) && n > 16 * PAGE) {  // whole pages of zeros are given back
        char *begin = (char *)(((uintptr_t)target + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
        char *end = (char *)((uintptr_t)(target + n) & ~(uintptr_t)(PAGE - 1));
        memset(target, 0, begin - target);
        madvise(begin, end - begin, MADV_DONTNEED);
        memset(end, 0, target + n - end);
    } else if (width == 4) {
        for (size_t i = 0; i < n / 4; i++) memcpy(target + 4 * i, &value, 4);
    } else {
        memset(target, value, n);
    }
}

static void copy(operation *o) {
    if (o->checksum && checksum(o->from, o->bytes) != o->checksum) {
        COUNT("race: pinned source changed before its copy");
        fprintf(stderr, "nullgpu: RACE: %zu bytes at %p were changed after cudaMemcpyAsync and before the copy\n",
                o->bytes, (void *)o->from);
        if (o->stack) fputs(o->stack, stderr);
    }
    move(o->to, o->staged ? o->staged : o->from, o->bytes);
    free(o->staged);
    free(o->stack);
}

static void perform(operation *o) {
    switch (o->kind) {
        case COPY: copy(o); break;
        case COLLECTIVE: if (o->to != o->from) move(o->to, o->from, o->moved); break;
        case FILL: fill(o->to, o->value, o->bytes, o->width); break;
        case HOST_FUNCTION: o->function(o->data); break;
        case RECORD:
            o->event->at = now();
            if (o->event->done < o->generation) o->event->done = o->generation;
            break;
        case KERNEL: case WAIT: case CHILD: case OTHER: break;  // kernels compute nothing; a graph's nodes are executed
    }
}

// -------------------------------------------------------------------------------------------------- when it happens

static void advance(stream *s) {
    operation *o = s->first;
    if (!(s->first = o->next)) s->last = NULL;
    if (o->kind == WAIT)
        while (o->event->done < o->generation && o->event->on && o->event->on->first) advance(o->event->on);
    perform(o);
    free(o);
}

static void drain(stream *s) { LOCKED while (s->first) advance(s); }

void nullgpu_drain(void) { LOCKED for (stream *s = nullgpu_streams; s; s = s->next) drain(s); }

// Under NULLGPU_LAZY: what the bytes of a copy may not be used for in between is made visible.
static void arm(operation *o) {
    int to_device = nullgpu_is_device(o->to), from_device = nullgpu_is_device(o->from);
    if (from_device && !to_device) memset(o->to, 0xAA, o->bytes);
    if (from_device || !to_device) return;
    if (!nullgpu_is_pinned(o->from)) {
        o->staged = malloc(o->bytes);
        memcpy(o->staged, o->from, o->bytes);
        return;
    }
    o->checksum = checksum(o->from, o->bytes);
    FILE *file = tmpfile();
    if (!file) return;
    nullgpu_python_stack(fileno(file));
    fseek(file, 0, SEEK_END);
    size_t length = ftell(file);
    rewind(file);
    o->stack = calloc(1, length + 1);
    if (fread(o->stack, 1, length, file) != length) o->stack[0] = 0;
    fclose(file);
}

static void queue(stream *s, operation work) {
    if (!nullgpu_settings()->lazy) {
        perform(&work);
        return;
    }
    if (work.kind == COPY) arm(&work);
    operation *made = malloc(sizeof *made);
    *made = work;
    made->next = NULL;
    LOCKED {
        if (!s->first) s->last = &s->first;
        *s->last = made;
        s->last = &made->next;
    }
}

static const char *direction(const operation *o) {
    int to_device = nullgpu_is_device(o->to), from_device = nullgpu_is_device(o->from);
    return from_device && !to_device ? "d2h" : !from_device && to_device ? "h2d" : "d2d";
}

static long *library_counter(enum nullgpu_library library, int in_graph) {
    static const char *names[][2] = {
        {"launches of torch's kernels", "launches of torch's kernels in graphs"},
        {"launches of Triton's kernels", "launches of Triton's kernels in graphs"},
        {"launches of cuBLAS", "launches of cuBLAS in graphs"},
        {"launches of cuDNN", "launches of cuDNN in graphs"},
    };
    static long *counters[4][2];
    long **counter = &counters[library][in_graph];
    return *counter ? *counter : (*counter = nullgpu_counter(names[library][in_graph]));
}

static void count(const operation *o, int in_graph) {
    const char *suffix = in_graph ? " in graphs" : "";
    switch (o->kind) {
        case KERNEL:
            if (in_graph) COUNT("launches in graphs");
            else COUNT("launches");
            __atomic_add_fetch(library_counter(o->library, in_graph), 1, __ATOMIC_RELAXED);
            if (nullgpu_settings()->kernels && o->name)
                nullgpu_count(in_graph ? "kernel in graphs:" : "kernel:", o->name, "", 1);
            break;
        case COLLECTIVE:
            nullgpu_count("nccl:", o->name, suffix, 1);
            nullgpu_count("nccl bytes:", o->name, suffix, (long)o->bytes);
            break;
        case COPY: nullgpu_count("copies ", direction(o), suffix, 1); break;
        case FILL: nullgpu_count("fills", suffix, "", 1); break;
        case CHILD: case HOST_FUNCTION: case RECORD: case WAIT: case OTHER: break;
    }
}

void execute(stream *s, operation work) {
    count(&work, 0);
    if (work.kind != KERNEL) queue(s, work);
}

void execute_in_graph(stream *s, operation work) {
    count(&work, 1);
    if (work.kind == RECORD || work.kind == WAIT) LOCKED {  // external events: this launch is their generation
        if (work.kind == RECORD) work.event->on = s, work.event->recorded++;
        work.generation = work.event->recorded;
    }
    if (work.kind != KERNEL) queue(s, work);
}

static int submit(void *handle, operation work) {
    stream *s = stream_of(handle);
    if (!__atomic_load_n(&captures_open, __ATOMIC_RELAXED)) {
        execute(s, work);
        return SUCCESS;
    }
    int status = SUCCESS;
    capture *into = NULL;
    LOCKED {
        status = capture_of(s, &into);
        if (!status && into) capture_add(s, work);
    }
    if (!status && !into) execute(s, work);
    return status;
}

// ------------------------------------------------------------------------------------------------------ kinds of work

int nullgpu_launch(void *stream, const char *kernel, enum nullgpu_library library) {
    return submit(stream, (operation){.kind = KERNEL, .name = kernel, .library = library});
}

int nullgpu_collective(void *stream, const char *name, size_t bytes, void *to, const void *from, size_t moved) {
    operation work = {.kind = COLLECTIVE, .name = name, .bytes = bytes, .to = to, .from = (char *)from, .moved = moved};
    return submit(stream, work);
}

int nullgpu_copy(void *handle, void *to, const void *from, size_t bytes, int asynchronous) {
    if (!bytes) return SUCCESS;
    stream *s = stream_of(handle);
    operation work = {.kind = COPY, .to = to, .from = (char *)from, .bytes = bytes};
    const char *way = direction(&work);
    int to_host = !strcmp(way, "d2h"), to_device = !strcmp(way, "h2d");
    int pageable = (to_host && !nullgpu_is_pinned(to)) || (to_device && !nullgpu_is_pinned(from));
    int status = asynchronous ? SUCCESS : nullgpu_unsafe_call();
    // A pageable copy is done with the host's help, which no graph has.
    if (!status && (!asynchronous || pageable)) status = nullgpu_capture_refuses(handle);
    if (status) return status;
    if (asynchronous && to_device && pageable) nullgpu_pageable_copy(bytes);
    if (asynchronous && !(to_host && pageable)) return submit(handle, work);
    count(&work, 0);
    char name[64];
    snprintf(name, sizeof name, "%s%s%s", asynchronous ? "memcpyasync" : "memcpy",
             to_host ? " d2h" : to_device ? " h2d" : "", asynchronous ? " pageable" : "");
    nullgpu_wait(name, bytes);
    drain(s);
    move(to, from, bytes);
    return SUCCESS;
}

int nullgpu_fill(void *stream, void *to, int value, size_t bytes, size_t width) {
    return submit(stream, (operation){.kind = FILL, .to = to, .value = value, .bytes = bytes, .width = width});
}

int nullgpu_host_function(void *stream, void (*function)(void *), void *data) {
    return submit(stream, (operation){.kind = HOST_FUNCTION, .function = function, .data = data});
}

// ------------------------------------------------------------------------------------------- the host asks and waits

static int ask(stream *s) {
    int status = SUCCESS;
    if (__atomic_load_n(&captures_open, __ATOMIC_RELAXED)) LOCKED status = capture_synchronize(s);
    return status;
}

int nullgpu_stream_query(void *handle) {
    stream *s = stream_of(handle);
    int status = ask(s);
    if (!status) LOCKED {
        status = s->first ? NOT_READY : SUCCESS;
        if (s->first) advance(s);  // who asks often enough is answered yes
    }
    return status;
}

int nullgpu_stream_synchronize(void *handle, const char *caller) {
    int status = ask(stream_of(handle));
    if (status) return status;
    nullgpu_wait(caller, 0);
    drain(stream_of(handle));
    return SUCCESS;
}

int nullgpu_device_synchronize(const char *caller) {
    int status = ask(NULL);
    if (status) return status;
    nullgpu_wait(caller, 0);
    nullgpu_drain();
    return SUCCESS;
}

void nullgpu_stream_delete(void *handle) {
    stream *s = stream_of(handle);
    if (s == &nullgpu_legacy) return;
    drain(s);
    LOCKED {
        if (s->capture) capture_invalidate(s->capture);
        stream **link = &nullgpu_streams;
        while (*link && *link != s) link = &(*link)->next;
        if (*link) *link = s->next;
    }
}  // not freed: events remember it

// ------------------------------------------------------------------------------------------------------------ events

void *nullgpu_event(void) { return calloc(1, sizeof(event)); }
void nullgpu_event_delete(void *handle) { (void)handle; }  // not freed: queues may name it; 100 bytes each

int nullgpu_event_record(void *handle, void *where, int external) {
    event *e = handle;
    stream *s = stream_of(where);
    int status = SUCCESS;
    capture *into = NULL;
    if (__atomic_load_n(&captures_open, __ATOMIC_RELAXED)) LOCKED {
        status = capture_of(s, &into);
        if (!status && into && external) capture_add(s, (operation){.kind = RECORD, .event = e});
        else if (!status && into) capture_event_record(e, s);
    }
    if (status || into) return status;
    LOCKED {
        e->on = s;
        e->recorded++;
        e->asked = 0;
        e->capture = NULL;
    }
    queue(s, (operation){.kind = RECORD, .event = e, .generation = e->recorded});
    return SUCCESS;
}

int nullgpu_event_wait(void *handle, void *which, int external) {
    event *e = which;
    stream *s = stream_of(handle);
    int status = SUCCESS, handled = 0;
    if (__atomic_load_n(&captures_open, __ATOMIC_RELAXED) || e->capture)
        LOCKED status = capture_event_wait(s, e, external, &handled);
    if (status || handled) return status;
    if (e->recorded) queue(s, (operation){.kind = WAIT, .event = e, .generation = e->recorded});
    return SUCCESS;
}

static int ask_event(event *e) {
    int status = SUCCESS;
    if (__atomic_load_n(&captures_open, __ATOMIC_RELAXED) || e->capture) LOCKED status = capture_event_status(e);
    return status;
}

static void drain_event(event *e) { LOCKED while (e->done < e->recorded && e->on && e->on->first) advance(e->on); }

int nullgpu_event_query(void *handle) {
    event *e = handle;
    int status = ask_event(e);
    if (status || e->done >= e->recorded) return status;
    if (++e->asked <= 2) return NOT_READY;  // under NULLGPU_LAZY no at first; who asks often enough is answered yes
    drain_event(e);
    return SUCCESS;
}

int nullgpu_event_synchronize(void *handle) {
    int status = ask_event(handle);
    if (status) return status;
    nullgpu_wait("cudaEventSynchronize", 0);
    drain_event(handle);
    return SUCCESS;
}

int nullgpu_event_elapsed(void *start, void *end, float *milliseconds) {
    event *a = start, *b = end;
    int status = a->capture ? capture_event_status(a) : b->capture ? capture_event_status(b) : SUCCESS;
    if (status) return status;
    if (!a->recorded || !b->recorded) return INVALID_HANDLE;
    if (a->done < a->recorded || b->done < b->recorded) return NOT_READY;
    float took = (b->at - a->at) / 1e6f;
    *milliseconds = took > 0.001f ? took : 0.001f;
    return SUCCESS;
}

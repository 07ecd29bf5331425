// What a program asked of the device, by name.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "queue.h"

enum { COUNTERS = 1 << 14 };  // a hash table; a program has some hundreds of names
static struct { char *name; long count; } counters[COUNTERS];
static int trace = -1;

long *nullgpu_counter(const char *name) {
    long *found = NULL;
    unsigned hash = 2166136261u;  // FNV-1a
    for (const char *c = name; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    LOCKED for (unsigned i = hash % COUNTERS; !found; i = (i + 1) % COUNTERS) {
        if (!counters[i].name) counters[i].name = strdup(name);
        if (!strcmp(counters[i].name, name)) found = &counters[i].count;
    }
    return found;
}

void nullgpu_count(const char *kind, const char *name, const char *suffix, long n) {
    char joined[1024];
    snprintf(joined, sizeof joined, "%s%.900s%s", kind, name, suffix);
    __atomic_add_fetch(nullgpu_counter(joined), n, __ATOMIC_RELAXED);
}

int nullgpu_json(char *out, size_t size) {
    size_t at = snprintf(out, size, "{\"used\": %zu, \"peak\": %zu", nullgpu_memory_used(), nullgpu_memory_peak());
    for (int i = 0; i < COUNTERS; i++) {
        if (!counters[i].name || !counters[i].count || at + 2 * strlen(counters[i].name) + 40 > size) continue;
        at += snprintf(out + at, size - at, ", \"");
        for (const char *c = counters[i].name; *c; c++) {
            if (*c == '"' || *c == '\\') out[at++] = '\\';
            out[at++] = *c;
        }
        at += snprintf(out + at, size - at, "\": %ld", counters[i].count);
    }
    return (int)(at + snprintf(out + at, size - at, "}\n"));
}

void nullgpu_trace(int descriptor) { trace = descriptor; }

void nullgpu_python_stack(int descriptor) {
    // By dlsym: the process need not be Python's, nor this thread one of Python's.
    void *(*thread_state)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    void (*dump)(int, void *) = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
    void *state = thread_state ? thread_state() : NULL;
    if (state && dump) dump(descriptor, state);
    else dprintf(descriptor, "  (a thread without Python)\n");
}

static void note(const char *what, const char *name, size_t bytes) {
    if (trace >= 0) LOCKED {
        dprintf(trace, "%s %s %zu\n", what, name, bytes);
        nullgpu_python_stack(trace);
    }
}

void nullgpu_wait(const char *name, size_t bytes) {
    nullgpu_count("sync:", name, "", 1);
    note("==", name, bytes);
}

void nullgpu_pageable_copy(size_t bytes) {
    COUNT("copies h2d pageable");
    note("--", "pageable h2d", bytes);
}

// Work on its way: queued in a stream, or a node of a captured graph. For streams.c and capture.c.
#pragma once
#include <pthread.h>

#include "nullgpu.h"

typedef struct stream stream;
typedef struct event event;
typedef struct graph graph;
typedef struct node node;
typedef struct capture capture;
typedef enum { KERNEL, COLLECTIVE, COPY, FILL, HOST_FUNCTION, RECORD, WAIT, CHILD, OTHER } operation_kind;

typedef struct operation {
    operation_kind kind;
    const char *name;          // of a kernel or collective; lives as long as the process
    enum nullgpu_library library;
    char *to, *from;           // bytes are moved; a collective's are those that this rank gave
    size_t bytes, moved, width;
    int value;
    char *staged;              // a copy of pageable bytes, which the host may change at once
    uint64_t checksum;         // of pinned bytes, which it may not
    char *stack;               // who gave them
    event *event;
    long generation;
    void (*function)(void *);
    void *data;
    graph *child;
    struct operation *next;    // of its stream
} operation;

typedef struct { node **at; size_t count; } nodes;
struct node { operation work; nodes dependencies; int reached; };
struct graph { nodes all; int owners; };

struct stream {
    int priority, blocking;
    operation *first, **last;
    capture *capture;          // that this stream is part of, or NULL
    nodes tails;               // what the next node depends on
    stream *next;
};
struct event {
    stream *on;
    int64_t at;
    long recorded, done;       // generations
    int asked;
    capture *capture;          // in which it was recorded last, or NULL
    nodes tails;
};
struct capture {
    unsigned long long id;
    int mode;
    enum { ENDED, ACTIVE, INVALIDATED } status;
    pthread_t thread;
    stream *origin;
    graph *graph;
    capture *next;
};

extern pthread_mutex_t nullgpu_lock;
// A block under the lock, which may be left at its end only.
#define LOCKED                                                                  \
    for (int once = (pthread_mutex_lock(&nullgpu_lock), 1); once; \
         once = (pthread_mutex_unlock(&nullgpu_lock), 0))

// streams.c
extern stream nullgpu_legacy, *nullgpu_streams;
stream *stream_of(void *handle);
void execute(stream *s, operation work);           // counts it, and does it or queues it
void execute_in_graph(stream *s, operation work);  // counted as "in graphs"

// capture.c; under the lock
extern int captures_open;                          // 0: nobody captures, and no question below has to be asked
int capture_of(stream *s, capture **found);        // that work on this stream belongs to, or NULL: it is executed
void capture_invalidate(capture *c);
void capture_add(stream *s, operation work);
int capture_event_status(event *e);                // 0, or why the host may not ask for it
void capture_event_record(event *e, stream *s);
int capture_event_wait(stream *s, event *e, int external, int *handled);
int capture_synchronize(stream *s);                // the host asks for this stream's state; NULL: for the device's

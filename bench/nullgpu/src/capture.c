// Stream capture and graphs, with the rules that CUDA enforces: what a capture cannot hold is an error at once, and
// invalidates it. The modes are CUDA's: 0 global, 1 thread-local, 2 relaxed.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "queue.h"

enum { GLOBAL, THREAD_LOCAL, RELAXED };
int captures_open;
static capture *captures;
static unsigned long long last_id;
static __thread int thread_mode = GLOBAL;

// ----------------------------------------------------------------------------------------------------- sets of nodes

static void add_node(nodes *set, node *one) {
    for (size_t i = 0; i < set->count; i++)
        if (set->at[i] == one) return;
    set->at = realloc(set->at, (set->count + 1) * sizeof *set->at);
    set->at[set->count++] = one;
}

static void empty(nodes *set) {
    free(set->at);
    *set = (nodes){0};
}

static void replace(nodes *set, nodes other) {
    empty(set);
    for (size_t i = 0; i < other.count; i++) add_node(set, other.at[i]);
}

// ------------------------------------------------------------------------------------------------------------ graphs

void *nullgpu_graph_hold(void *handle) {
    graph *g = handle;
    LOCKED g->owners++;
    return g;
}

void nullgpu_graph_release(void *handle) {
    graph *g = handle;
    int left = 0;
    LOCKED left = --g->owners;
    if (left) return;
    for (size_t i = 0; i < g->all.count; i++) {
        node *gone = g->all.at[i];
        if (gone->work.kind == CHILD) nullgpu_graph_release(gone->work.child);
        empty(&gone->dependencies);
        free(gone);
    }
    empty(&g->all);
    free(g);
}

static size_t give(nodes set, void **out, size_t most) {
    if (!out) return set.count;
    size_t given = set.count < most ? set.count : most;
    memcpy(out, set.at, given * sizeof *out);
    return given;
}

size_t nullgpu_graph_nodes(void *handle, void **out, size_t most) { return give(((graph *)handle)->all, out, most); }
size_t nullgpu_node_dependencies(void *handle, void **out, size_t most) {
    return give(((node *)handle)->dependencies, out, most);
}

static const char *label(const operation *o) {
    static const char *kinds[] = {"kernel", "collective", "copy", "fill", "host function", "event record",
                                  "event wait", "child graph", "other"};
    return o->name ? o->name : kinds[o->kind];
}

int nullgpu_graph_dot(void *handle, const char *path) {
    graph *g = handle;
    FILE *file = fopen(path, "w");
    if (!file) return INVALID_VALUE;
    fprintf(file, "digraph captured {\n");
    for (size_t i = 0; i < g->all.count; i++) {
        node *n = g->all.at[i];
        fprintf(file, "  \"%p\" [label=\"%s\"];\n", (void *)n, label(&n->work));
        for (size_t j = 0; j < n->dependencies.count; j++)
            fprintf(file, "  \"%p\" -> \"%p\";\n", (void *)n->dependencies.at[j], (void *)n);
    }
    fprintf(file, "}\n");
    fclose(file);
    return SUCCESS;
}

static void launch(graph *g, stream *s) {
    for (size_t i = 0; i < g->all.count; i++) {  // the order of capture is one that dependencies allow
        operation work = g->all.at[i]->work;
        if (work.kind == CHILD) launch(work.child, s);
        else execute_in_graph(s, work);
    }
}

int nullgpu_graph_launch(void *handle, void *where) {
    stream *s = stream_of(where);
    int status = SUCCESS;
    capture *into = NULL;
    LOCKED {
        status = capture_of(s, &into);
        if (!status && into) capture_add(s, (operation){.kind = CHILD, .child = nullgpu_graph_hold(handle)});
    }
    if (status || into) return status;
    COUNT("graph launches");
    launch(handle, s);
    return SUCCESS;
}

// --------------------------------------------------------------------------------------------- what a capture forbids

void capture_invalidate(capture *c) { c->status = INVALIDATED; }

static int invalidate(capture *c, int status) {
    capture_invalidate(c);
    return status;
}

// Whether a call on this handle touches a capture though its stream has none: the legacy stream waits for all blocking
// streams, also those that capture.
static capture *behind_legacy(stream *s) {
    if (s == &nullgpu_legacy)
        for (stream *other = nullgpu_streams; other; other = other->next)
            if (other->blocking && other->capture) return other->capture;
    return NULL;
}

int capture_of(stream *s, capture **found) {
    capture *implicit = behind_legacy(s);
    *found = s->capture;
    if (implicit) return invalidate(implicit, CAPTURE_IMPLICIT);
    return s->capture && s->capture->status == INVALIDATED ? CAPTURE_INVALIDATED : SUCCESS;
}

int nullgpu_capture_refuses(void *handle) {
    int status = SUCCESS;
    capture *found = NULL;
    if (__atomic_load_n(&captures_open, __ATOMIC_RELAXED)) LOCKED {
        status = capture_of(stream_of(handle), &found);
        if (!status && found) status = invalidate(found, CAPTURE_UNSUPPORTED);
    }
    return status;
}

int nullgpu_unsafe_call(void) {
    if (!__atomic_load_n(&captures_open, __ATOMIC_RELAXED) || thread_mode == RELAXED) return SUCCESS;
    int status = SUCCESS;
    LOCKED for (capture *c = captures; c; c = c->next) {
        int ours = pthread_equal(c->thread, pthread_self());
        if ((ours && c->mode != RELAXED) || (!ours && c->mode == GLOBAL && thread_mode == GLOBAL))
            status = invalidate(c, CAPTURE_UNSUPPORTED);
    }
    return status;
}

int capture_synchronize(stream *s) {
    if (s) {
        capture *found = NULL;
        int status = capture_of(s, &found);
        return status || !found ? status : invalidate(found, CAPTURE_UNSUPPORTED);
    }
    for (capture *c = captures; c; c = c->next) capture_invalidate(c);  // a device has all of its streams
    return captures ? CAPTURE_UNSUPPORTED : SUCCESS;
}

int capture_event_status(event *e) {
    if (!e->capture) return nullgpu_unsafe_call();
    if (e->capture->status != ENDED) capture_invalidate(e->capture);
    return CAPTURED_EVENT;
}

// ----------------------------------------------------------------------------------------------------- what it holds

void capture_add(stream *s, operation work) {
    node *made = calloc(1, sizeof *made);
    made->work = work;
    made->dependencies = s->tails;  // handed over
    s->tails = (nodes){0};
    add_node(&s->tails, made);
    nodes *all = &s->capture->graph->all;
    if (!(all->count & (all->count - 1)))  // room doubles: a graph has thousands
        all->at = realloc(all->at, (all->count ? 2 * all->count : 1) * sizeof *all->at);
    all->at[all->count++] = made;
}

int nullgpu_capture_node(void *handle) {
    int status = SUCCESS;
    capture *into = NULL;
    if (__atomic_load_n(&captures_open, __ATOMIC_RELAXED)) LOCKED {
        status = capture_of(stream_of(handle), &into);
        if (!status && into) capture_add(stream_of(handle), (operation){.kind = OTHER});
    }
    return status;
}

void capture_event_record(event *e, stream *s) {
    e->capture = s->capture;
    replace(&e->tails, s->tails);
}

static int may_wait(stream *s, event *e, int external) {
    capture *ours = NULL, *theirs = e->capture;
    int status = capture_of(s, &ours);
    if (status) return status;
    if (!theirs) return ours && e->recorded && !external ? invalidate(ours, CAPTURE_ISOLATION) : SUCCESS;
    if (theirs->status == ENDED) return ours ? invalidate(ours, CAPTURE_ISOLATION) : CAPTURED_EVENT;
    if (theirs->status == INVALIDATED) return CAPTURE_INVALIDATED;
    if (ours && ours != theirs) return capture_invalidate(ours), invalidate(theirs, CAPTURE_MERGE);
    return s == &nullgpu_legacy ? invalidate(theirs, CAPTURE_IMPLICIT) : SUCCESS;
}

int capture_event_wait(stream *s, event *e, int external, int *handled) {
    int status = may_wait(s, e, external);
    *handled = s->capture || e->capture;
    if (status) return status;
    if (e->capture) {  // its nodes come before what follows; a stream that did not capture does now
        s->capture = e->capture;
        for (size_t i = 0; i < e->tails.count; i++) add_node(&s->tails, e->tails.at[i]);
    } else if (s->capture && e->recorded) {
        capture_add(s, (operation){.kind = WAIT, .event = e});
    }
    return SUCCESS;
}

// ------------------------------------------------------------------------------------------------- its begin and end

int nullgpu_capture_exchange_mode(int mode) {
    int before = thread_mode;
    thread_mode = mode;
    return before;
}

int nullgpu_capture_begin(void *handle, int mode) {
    stream *s = stream_of(handle);
    int status = SUCCESS;
    if (s == &nullgpu_legacy) return CAPTURE_UNSUPPORTED;
    if (mode < GLOBAL || mode > RELAXED) return INVALID_VALUE;
    LOCKED {
        if (s->capture) status = ILLEGAL_STATE;
        else {
            graph *made = calloc(1, sizeof *made);
            made->owners = 1;
            capture *begun = calloc(1, sizeof *begun);
            *begun = (capture){.id = ++last_id, .mode = mode, .status = ACTIVE, .thread = pthread_self(), .origin = s,
                               .graph = made, .next = captures};
            captures = begun;
            s->capture = begun;
            captures_open++;
        }
    }
    return status;
}

// Marks what comes before these nodes; without recursion: a chain can be as long as a training step.
static void reach(nodes from) {
    nodes open = {0};
    replace(&open, from);
    while (open.count) {
        node *one = open.at[--open.count];
        if (one->reached) continue;
        one->reached = 1;
        for (size_t i = 0; i < one->dependencies.count; i++)
            if (!one->dependencies.at[i]->reached) add_node(&open, one->dependencies.at[i]);
    }
    empty(&open);
}

static int is_joined(capture *c) {
    reach(c->origin->tails);
    for (size_t i = 0; i < c->graph->all.count; i++)
        if (!c->graph->all.at[i]->reached) return 0;
    return 1;
}

static void end(capture *c) {
    capture **link = &captures;
    while (*link != c) link = &(*link)->next;
    *link = c->next;
    captures_open--;
    c->status = ENDED;  // not freed: events remember it
    for (stream *s = nullgpu_streams; s; s = s->next)
        if (s->capture == c) {
            s->capture = NULL;
            empty(&s->tails);
        }
}

int nullgpu_capture_end(void *handle, void **out) {
    stream *s = stream_of(handle);
    int status = SUCCESS;
    *out = NULL;
    LOCKED {
        capture *c = s->capture;
        if (!c) status = ILLEGAL_STATE;
        else if (c->origin != s) status = invalidate(c, CAPTURE_UNMATCHED);
        else if (c->mode != RELAXED && !pthread_equal(c->thread, pthread_self())) status = CAPTURE_WRONG_THREAD;
        else {
            status = c->status == INVALIDATED ? CAPTURE_INVALIDATED : is_joined(c) ? SUCCESS : CAPTURE_UNJOINED;
            end(c);
            if (status) nullgpu_graph_release(c->graph);
            else *out = c->graph;
        }
    }
    return status;
}

int nullgpu_capture_info(void *handle, int *status, unsigned long long *id, void **graph, void ***tails,
                         size_t *count) {
    stream *s = stream_of(handle);
    int refused = SUCCESS;
    LOCKED {
        capture *c = s->capture;
        if (behind_legacy(s)) refused = CAPTURE_IMPLICIT;  // asking does not invalidate
        *status = !c ? 0 : c->status == ACTIVE ? 1 : 2;
        if (c && id) *id = c->id;
        if (c && graph) *graph = c->graph;
        if (c && tails) *tails = (void **)s->tails.at;
        if (c && count) *count = s->tails.count;
    }
    return refused;
}

int nullgpu_capture_depend(void *handle, void **on, size_t count, int instead) {
    stream *s = stream_of(handle);
    int status = SUCCESS;
    LOCKED {
        if (!s->capture) status = ILLEGAL_STATE;
        else if (s->capture->status == INVALIDATED) status = CAPTURE_INVALIDATED;
        else {
            if (instead) empty(&s->tails);
            for (size_t i = 0; i < count; i++) add_node(&s->tails, on[i]);
        }
    }
    return status;
}

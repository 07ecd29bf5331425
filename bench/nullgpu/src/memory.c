// Memory of the device, and pinned memory of the host.
//
// A device address lies in a region without access rights; its bytes are at the same offset of a shadow, which takes
// RAM only where something was written.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "memory.h"
#include "queue.h"

#define SPAN ((size_t)4 << 40)   // of addresses: more than any card has
#define GRAIN ((size_t)2 << 20)  // of allocations, as the driver's
typedef struct block { char *at; size_t size, asked; int charged; struct block *next; } block;
typedef struct pinned { char *at; size_t size; int ours; struct pinned *next; } pinned;
static char *region, *shadow;
static block *blocks;  // in the order of addresses
static pinned *pins;
static size_t used, peak;

static void reserve(void) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *addresses = mmap(NULL, SPAN, PROT_NONE, flags, -1, 0);
    shadow = mmap(NULL, SPAN, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (addresses == MAP_FAILED || shadow == MAP_FAILED) {
        perror("nullgpu: mmap");
        abort();
    }
    madvise(shadow, SPAN, MADV_NOHUGEPAGE);
    madvise(shadow, SPAN, MADV_DONTDUMP);
    region = addresses;
}

int nullgpu_charge(size_t size) {
    int status = SUCCESS;
    LOCKED {
        if (used + size > nullgpu_settings()->memory) status = OUT_OF_MEMORY;
        else if ((used += size) > peak) peak = used;
    }
    return status;
}
void nullgpu_discharge(size_t size) { LOCKED used -= size; }
size_t nullgpu_memory_used(void) { return used; }
size_t nullgpu_memory_peak(void) { return peak; }

int nullgpu_malloc(void **out, size_t size, int charged) {
    int status = SUCCESS;
    size_t rounded = (size + GRAIN - 1) / GRAIN * GRAIN;
    LOCKED {
        if (!region) reserve();
        if (charged) status = nullgpu_charge(rounded);
        if (!status) {
            char *at = region + GRAIN;
            block **link = &blocks;
            for (; *link && (size_t)((*link)->at - at) < rounded; link = &(*link)->next)
                at = (*link)->at + (*link)->size;
            block *made = malloc(sizeof *made);
            *made = (block){at, rounded, size, charged, *link};
            *link = made;
            *out = at;
        }
    }
    return status;
}

int nullgpu_free(void *address) {
    block *gone = NULL;
    LOCKED {
        block **link = &blocks;
        while (*link && (*link)->at != address) link = &(*link)->next;
        if ((gone = *link)) {
            *link = gone->next;
            nullgpu_forget(gone->at, gone->size);
            if (gone->charged) nullgpu_discharge(gone->size);
        }
    }
    free(gone);
    return gone ? SUCCESS : INVALID_VALUE;
}

void nullgpu_forget(void *address, size_t size) { madvise(bytes_of(address), size, MADV_DONTNEED); }

size_t nullgpu_extent(const void *address, void **base) {
    size_t found = 0;
    LOCKED for (block *b = blocks; b && !found; b = b->next)
        if ((char *)address >= b->at && (char *)address < b->at + b->size) {
            *base = b->at;
            found = b->asked;
        }
    return found;
}

int nullgpu_is_device(const void *address) {
    return region && (char *)address >= region && (char *)address < region + SPAN;
}

void *bytes_of(const void *address) {
    return nullgpu_is_device(address) ? shadow + ((char *)address - region) : (void *)address;
}

static void pin(void *address, size_t size, int ours) {
    pinned *made = malloc(sizeof *made);
    LOCKED {
        *made = (pinned){address, size, ours, pins};
        pins = made;
    }
}

static int unpin(void *address) {
    pinned *gone = NULL;
    LOCKED {
        pinned **link = &pins;
        while (*link && (*link)->at != address) link = &(*link)->next;
        if ((gone = *link)) *link = gone->next;
    }
    if (gone && gone->ours) munmap(gone->at, gone->size);
    free(gone);
    return gone ? SUCCESS : INVALID_VALUE;
}

int nullgpu_is_pinned(const void *address) {
    int found = 0;
    LOCKED for (pinned *p = pins; p && !found; p = p->next)
        found = (char *)address >= p->at && (char *)address < p->at + p->size;
    return found;
}

int nullgpu_pinned_malloc(void **out, size_t size) {
    size = (size + 4095) / 4096 * 4096;
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    pin(at, size, 1);
    *out = at;
    return SUCCESS;
}

int nullgpu_pinned_free(void *address) { return unpin(address); }
void nullgpu_pin(void *address, size_t size) { pin(address, size, 0); }
void nullgpu_unpin(void *address) { unpin(address); }

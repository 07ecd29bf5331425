// Settings of the null GPU, each described in nullgpu.h.
#include <pthread.h>
#include <stdlib.h>

#include "nullgpu.h"

static nullgpu_settings_t settings;

static double number(const char *name, double otherwise) {
    const char *value = getenv(name);
    return value && *value ? atof(value) : otherwise;
}

static void read_all(void) {
    double capability = number("NULLGPU_CC", 9.0);
    settings.devices = (int)number("NULLGPU_DEVICES", 1);
    settings.major = (int)capability;
    settings.minor = (int)((capability - settings.major) * 10 + 0.5);
    settings.memory = (size_t)(number("NULLGPU_MEM", 84.93) * 1e9);
    settings.zero = (int)number("NULLGPU_ZERO", 0);
    settings.lazy = (int)number("NULLGPU_LAZY", 0);
    settings.kernels = (int)number("NULLGPU_KERNELS", 0);
}

const nullgpu_settings_t *nullgpu_settings(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_all);
    return &settings;
}

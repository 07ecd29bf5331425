// libnvidia-ml of the null GPU: a healthy, busy card. What a driver may not support is a stub of build.py that says so.
#include <stdio.h>
#include <string.h>

#include "nullgpu.h"

typedef struct { int number; } device;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned gpu, memory; } utilization;
enum { NVML_SUCCESS, NVML_ERROR_NOT_FOUND = 6, NVML_CLOCK_MEMORY = 2, NVLINKS = 18, DEVICES = 64 };
static device devices[DEVICES];

static int give(unsigned *out, unsigned value) {
    *out = value;
    return NVML_SUCCESS;
}
int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlInit(void) { return NVML_SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return NVML_SUCCESS; }
int nvmlShutdown(void) { return NVML_SUCCESS; }
const char *nvmlErrorString(int error) { return error ? "Not Supported" : "Success"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    snprintf(out, size, "580.65.06");
    return NVML_SUCCESS;
}
int nvmlSystemGetNVMLVersion(char *out, unsigned size) {
    snprintf(out, size, "13.580.65.06");
    return NVML_SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return NVML_SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) { return give(count, nullgpu_settings()->devices); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) {
    if (index >= (unsigned)nullgpu_settings()->devices || index >= DEVICES) return NVML_ERROR_NOT_FOUND;
    *out = &devices[index];
    (*out)->number = (int)index;
    return NVML_SUCCESS;
}
int nvmlDeviceGetUUID(device *d, char *out, unsigned size) {
    unsigned char b[16];
    char hex[33];
    nullgpu_device_uuid(d->number, b);
    for (int i = 0; i < 16; i++) snprintf(hex + 2 * i, 3, "%02x", b[i]);
    snprintf(out, size, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", hex, hex + 8, hex + 12, hex + 16, hex + 20);
    return NVML_SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device **out) {
    char text[64];
    for (unsigned i = 0; !nvmlDeviceGetHandleByIndex_v2(i, out); i++)
        if (!nvmlDeviceGetUUID(*out, text, sizeof text) && !strcmp(uuid, text)) return NVML_SUCCESS;
    return NVML_ERROR_NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, device **out) {
    unsigned domain = 0, bus = 1;  // bus 1 is device 0, as cudaDeviceGetPCIBusId says
    sscanf(id, "%x:%x", &domain, &bus);
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, out);
}
int nvmlDeviceGetName(device *d, char *out, unsigned size) {
    snprintf(out, size, "%s", nullgpu_device_name());
    return NVML_SUCCESS;
}
int nvmlDeviceGetMemoryInfo(device *d, memory_info *out) {
    size_t total = nullgpu_settings()->memory, used = nullgpu_memory_used();
    *out = (memory_info){total, total - used, used};
    return NVML_SUCCESS;
}
int nvmlDeviceGetUtilizationRates(device *d, utilization *out) {
    *out = (utilization){97, 40};
    return NVML_SUCCESS;
}
int nvmlDeviceGetTemperature(device *d, int sensor, unsigned *celsius) { return give(celsius, 60); }
int nvmlDeviceGetPowerUsage(device *d, unsigned *milliwatts) { return give(milliwatts, 500000); }
int nvmlDeviceGetEnforcedPowerLimit(device *d, unsigned *milliwatts) { return give(milliwatts, 700000); }
int nvmlDeviceGetPowerManagementLimit(device *d, unsigned *milliwatts) { return give(milliwatts, 700000); }
int nvmlDeviceGetPowerManagementDefaultLimit(device *d, unsigned *milliwatts) { return give(milliwatts, 700000); }
int nvmlDeviceGetClockInfo(device *d, int type, unsigned *mhz) {
    return give(mhz, type == NVML_CLOCK_MEMORY ? 2619 : 1980);
}
int nvmlDeviceGetMaxClockInfo(device *d, int type, unsigned *mhz) { return nvmlDeviceGetClockInfo(d, type, mhz); }
int nvmlDeviceGetCurrentClocksEventReasons(device *d, unsigned long long *reasons) {
    *reasons = 0;
    return NVML_SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device *d, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(d, reasons);
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, void *out) { return give(count, 0); }
int nvmlDeviceGetComputeRunningProcesses(device *d, unsigned *count, void *out) { return give(count, 0); }
int nvmlDeviceGetNvLinkState(device *d, unsigned link, unsigned *active) { return give(active, link < NVLINKS); }
int nvmlDeviceGetGpuFabricInfoV(device *d, void *out) { return NVML_SUCCESS; }  // state 0: no fabric
int nvmlDeviceGetP2PStatus(device *a, device *b, int what, int *status) {
    *status = 0;
    return NVML_SUCCESS;
}

// What the device is: an H100, or what NULLGPU_CC names.
#include <stdio.h>
#include <string.h>

#include "nullgpu.h"

static const struct { int major, minor, sms, shared; const char *name; } cards[] = {
    // SMs, and KiB of shared memory that a block can ask for
    {8, 0, 108, 163, "NVIDIA A100-SXM4-80GB"},
    {8, 6, 82, 99, "NVIDIA GeForce RTX 3090"},
    {8, 9, 128, 99, "NVIDIA GeForce RTX 4090"},
    {9, 0, 132, 227, "NVIDIA H100 80GB HBM3"},
    {10, 0, 148, 227, "NVIDIA B200"},
    {12, 0, 170, 99, "NVIDIA GeForce RTX 5090"},
};
static __thread int device;

int nullgpu_device(void) { return device; }
void nullgpu_set_device(int wanted) { device = wanted; }

static int card(void) {
    int found = 3, count = sizeof cards / sizeof *cards;
    for (int i = 0; i < count; i++)
        if (cards[i].major == nullgpu_settings()->major && cards[i].minor == nullgpu_settings()->minor) found = i;
    return found;
}

const char *nullgpu_device_name(void) { return cards[card()].name; }

void nullgpu_device_uuid(int of, unsigned char out[16]) {
    for (int i = 0; i < 16; i++) out[i] = (unsigned char)(0x11 * i);
    out[15] = (unsigned char)of;
}

int nullgpu_attribute(int attribute) {
    int shared = cards[card()].shared * 1024;
    switch (attribute) {
        case 1: case 2: case 3: return 1024;   // threads of a block, and its x and y
        case 4: return 64;                     // its z
        case 5: return 2147483647;             // blocks of a grid: x, then y and z
        case 6: case 7: return 65535;
        case 8: return 49152;                  // shared memory of a block that does not ask for more
        case 9: return 65536;                  // constant memory
        case 10: return 32;                    // threads of a warp
        case 11: return 2147483647;            // pitch
        case 12: case 82: return 65536;        // registers of a block and an SM
        case 13: return 1980000;               // kHz
        case 14: return 512;                   // alignment of textures
        case 15: case 19: case 31: case 33: return 1;  // overlap, mapped memory, kernels at once
        case 16: return cards[card()].sms;
        case 36: return nullgpu_settings()->major == 8 ? 1593000 : 2619000;  // kHz of the memory
        case 37: return 5120;                  // bits of its bus
        case 38: return 50 << 20;              // L2
        case 39: return 2048;                  // threads of an SM
        case 40: return 3;                     // copy engines
        case 41: case 78: case 83: case 89: case 95: return 1;  // unified addresses, priorities, managed, cooperative
        case 75: return nullgpu_settings()->major;
        case 76: return nullgpu_settings()->minor;
        case 81: return shared + 1024;         // shared memory of an SM
        case 97: return shared;                // and of a block that asks for it
        case 102: case 115: return 1;          // virtual memory, memory pools
        case 106: return 32;                   // blocks of an SM
        case 111: return 1024;                 // shared memory that the driver keeps
        case 120: return nullgpu_settings()->major >= 9;  // clusters
        default: return 0;
    }
}

int nullgpu_launch_fits(const unsigned grid[3], const unsigned block[3], size_t shared, const char *kernel) {
    int fits = shared <= (size_t)nullgpu_attribute(97);
    for (int i = 0; i < 3; i++)
        fits &= grid[i] && block[i] && grid[i] <= (unsigned)nullgpu_attribute(5 + i) &&
                block[i] <= (unsigned)nullgpu_attribute(2 + i);
    fits &= (unsigned long)block[0] * block[1] * block[2] <= 1024;
    if (!fits) {
        COUNT("invalid launches");
        fprintf(stderr, "nullgpu: invalid launch of %s: grid %u %u %u, block %u %u %u, shared %zu\n",
                kernel ? kernel : "an unknown kernel", grid[0], grid[1], grid[2], block[0], block[1], block[2], shared);
    }
    return fits;
}

/* CUDA's runtime and driver library of a machine without a GPU, as far as torch asks it for GPUs: PRETENDED_GPUS of them,
   PRETENDED_ERROR instead, and a driver for the CUDA of PRETENDED_DRIVER (13000 is 13.0). */
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

static int number(const char *name, int usual) {
    const char *value = getenv(name);
    return value ? atoi(value) : usual;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = number("PRETENDED_GPUS", 0);
    return number("PRETENDED_ERROR", 0);
}

#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, device ? "Tesla V100-SXM2-16GB" : "NVIDIA H100 80GB HBM3");
    found->major = device ? 7 : 9;
    found->totalGlobalMem = (device ? 16ull : 80ull) << 30;
    found->uuid.bytes[0] = 0x11 + device;
    return 0;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = number("PRETENDED_DRIVER", 13000);
    return 0;
}

cudaError_t cudaGetDevice(int *device) { *device = 0; return 0; }
cudaError_t cudaSetDevice(int device) { return 0; }
cudaError_t cudaGetLastError(void) { return 0; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) { *value = 1; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return 0; }

static int nothing(void) { return 0; }
#undef cudaGetDriverEntryPointByVersion
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *found = (void *)nothing;
    if (result) *result = 0;
    return 0;
}

/* torch loads these of the driver by name, and fails where one is missing; none is called before a context is made. */
int cuDevicePrimaryCtxGetState(void) { return 0; }

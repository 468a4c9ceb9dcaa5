/* A GPU that is not there: what torch asks of CUDA's runtime before and between kernels.
 *
 * Preloaded into a process it answers that there are NULL_GPUS H100s. Memory is the host's, copies are memcpy, streams
 * and events are numbers, and a kernel is launched into nothing: operators run on FakeTensorMode, which has no values.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#define OK(name, ...) cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define OPENS(name, ...) cudaError_t name(__VA_ARGS__) { open_current(); return cudaSuccess; }
#undef cudaGetDeviceProperties
#define GIB (1ull << 30)

static _Thread_local int current;
static long handles = 1;

/* A process opens a GPU, for some 500 MB of its memory, by the first call for memory, streams, events or kernels while
 * this GPU is the current one. So does cudaSetDevice since CUDA 12. Questions about devices open none. */
static int opened[64];
static void open_current(void) { opened[current & 63] = 1; }
int null_gpu_is_open(int device) { return opened[device & 63]; }

/* devices */
cudaError_t cudaGetDeviceCount(int *count) {
    const char *gpus = getenv("NULL_GPUS");
    *count = gpus ? atoi(gpus) : 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; open_current(); return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "NVIDIA H100 80GB HBM3");
    found->major = 9;
    found->totalGlobalMem = 80 * GIB;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 49152;
    found->l2CacheSize = 50 << 20;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrComputeCapabilityMinor ? 0 : 1;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }
OK(cudaDeviceEnablePeerAccess, int peer, unsigned flags)
OPENS(cudaDeviceSynchronize, void)
OK(cudaGetLastError, void)
OK(cudaPeekAtLastError, void)

/* memory */
static size_t used;
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    open_current();
    *total = 80 * GIB;
    *left = *total - used;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **memory, size_t bytes) {
    open_current();
    if (bytes > 80 * GIB - used) return cudaErrorMemoryAllocation;
    *memory = malloc(bytes ? bytes : 1); /* of which the host gives only what is written */
    used += malloc_usable_size(*memory);
    return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
    open_current();
    used -= memory ? malloc_usable_size(memory) : 0;
    free(memory);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags) {
    open_current();
    *memory = malloc(bytes);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *memory) { free(memory); return cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    open_current();
    memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy(to, from, bytes, kind);
}
OPENS(cudaMemset, void *memory, int value, size_t bytes)
OPENS(cudaMemsetAsync, void *memory, int value, size_t bytes, cudaStream_t stream)

/* memory that is registered: null_gpu_registered finds it, and counts it with memory = 0 */
static struct { char *memory; size_t bytes; } registered[4096];
int null_gpu_registered(const char *memory) {
    int found = 0;
    for (int i = 0; i < 4096; i++) {
        char *first = registered[i].memory;
        if (first && (!memory || (memory >= first && memory < first + registered[i].bytes))) found++;
    }
    return found;
}
cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags) {
    open_current();
    if (getenv("NULL_GPU_REFUSES")) return cudaErrorMemoryAllocation;
    for (int i = 0; i < 4096; i++) {
        if (!registered[i].memory) {
            registered[i].memory = memory;
            registered[i].bytes = bytes;
            return cudaSuccess;
        }
    }
    return cudaErrorMemoryAllocation;
}
cudaError_t cudaHostUnregister(void *memory) {
    open_current();
    for (int i = 0; i < 4096; i++) {
        if (registered[i].memory == memory) {
            registered[i].memory = 0;
            return cudaSuccess;
        }
    }
    return cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *memory) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeUnregistered;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = (void *)1; return cudaSuccess; }

/* streams and events */
static cudaError_t made(void **handle) {
    open_current();
    *handle = (void *)++handles;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return made((void **)stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return made((void **)stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return made((void **)stream);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return made((void **)event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return made((void **)event); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    open_current();
    *ms = 1;
    return cudaSuccess;
}
OPENS(cudaStreamDestroy, cudaStream_t stream)
OPENS(cudaStreamQuery, cudaStream_t stream)
OPENS(cudaStreamSynchronize, cudaStream_t stream)
OPENS(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
OPENS(cudaEventDestroy, cudaEvent_t event)
static int hangs; /* the GPU comes to no event any more */
void null_gpu_hangs(int whether) { hangs = whether; }
cudaError_t cudaEventQuery(cudaEvent_t event) {
    open_current();
    return hangs ? cudaErrorNotReady : cudaSuccess;
}
OPENS(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
OPENS(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
OPENS(cudaEventSynchronize, cudaEvent_t event)
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
OK(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)

/* kernels */
OPENS(cudaLaunchKernel, const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
OPENS(cudaFuncSetAttribute, const void *kernel, enum cudaFuncAttribute attribute, int value)
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    open_current();
    memset(found, 0, sizeof *found);
    return cudaSuccess;
}
static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
    *function = (void *)nothing;
    if (result) *result = 0;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPoint(name, function, flags, result);
}

/* the driver (libcuda.so.1) */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = null_gpu_is_open(device);
    return 0;
}

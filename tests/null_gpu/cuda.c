/* A GPU that is not there: what torch asks of CUDA's runtime before and between kernels.
 *
 * Preloaded into a process it answers that there are NULL_GPUS H100s. Memory is the host's, copies are memcpy, streams
 * and events are numbers, and a kernel is launched into nothing: operators run on FakeTensorMode, which has no values.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define OK(name, ...) cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#undef cudaGetDeviceProperties
#define GIB (1ull << 30)

static _Thread_local int current;
static long handles = 1;

/* devices */
cudaError_t cudaGetDeviceCount(int *count) {
    const char *gpus = getenv("NULL_GPUS");
    *count = gpus ? atoi(gpus) : 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }
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
OK(cudaDeviceSynchronize, void)
OK(cudaGetLastError, void)
OK(cudaPeekAtLastError, void)

/* memory */
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) { *left = *total = 80 * GIB; return cudaSuccess; }
cudaError_t cudaMalloc(void **memory, size_t bytes) { *memory = malloc(bytes ? bytes : 1); return cudaSuccess; }
cudaError_t cudaFree(void *memory) { free(memory); return cudaSuccess; }
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags) { *memory = malloc(bytes); return cudaSuccess; }
cudaError_t cudaFreeHost(void *memory) { free(memory); return cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy(to, from, bytes, kind);
}
OK(cudaMemset, void *memory, int value, size_t bytes)
OK(cudaMemsetAsync, void *memory, int value, size_t bytes, cudaStream_t stream)

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
static cudaError_t made(void **handle) { *handle = (void *)++handles; return cudaSuccess; }
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
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) { *ms = 1; return cudaSuccess; }
OK(cudaStreamDestroy, cudaStream_t stream)
OK(cudaStreamQuery, cudaStream_t stream)
OK(cudaStreamSynchronize, cudaStream_t stream)
OK(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
OK(cudaEventDestroy, cudaEvent_t event)
OK(cudaEventQuery, cudaEvent_t event)
OK(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
OK(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
OK(cudaEventSynchronize, cudaEvent_t event)
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
OK(cudaLaunchKernel, const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
OK(cudaFuncSetAttribute, const void *kernel, enum cudaFuncAttribute attribute, int value)
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
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
    *active = device == current;
    return 0;
}

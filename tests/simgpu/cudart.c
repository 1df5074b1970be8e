// A CUDA runtime over host memory: what torch asks of libcudart, without a card.
//
// Device memory is malloc's, copies are memcpy's, streams and events are numbers, kernels do nothing and are counted
// (there must be none: cards.py runs every operation with a CPU's kernels). A capture of a stream is known, as are the
// calls that CUDA forbids while one is under way.
//
// SIM_DEVICES: number of cards (1). SIM_TOTAL: bytes of a card (8 GiB).
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cudaGetDeviceProperties

#define CALL cudaError_t
#define DONE return cudaSuccess
enum { MOST_DEVICES = 8 };

static size_t number(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text ? strtoull(text, 0, 10) : otherwise;
}
static size_t total(void) { return number("SIM_TOTAL", (size_t)8 << 30); }
static int devices(void) { return (int)number("SIM_DEVICES", 1); }
static __thread int device;

// What Python reads and sets (cards.py).
unsigned long long sim_kernels, sim_synchronisations;
// Called when a capture begins (0), when it ends (1; returns how many operations it holds), for a replay (2; returns
// whether it failed), when a graph is destroyed (3).
typedef int (*Hook)(int event, unsigned long long graph);
static Hook hook;
void sim_set_hook(Hook given) { hook = given; }

// ---- Captures -------------------------------------------------------------------------------------------------------

static struct {
  cudaStream_t stream;
  enum cudaStreamCaptureMode mode;
  pthread_t thread;
  unsigned long long graph;
  int valid;
} capture;  // one at a time; stream 0: none
static unsigned long long graphs;
static size_t nodes_of_last;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// The rule of cudaThreadExchangeStreamCaptureMode: may this thread make a call that can break a capture?
static int forbidden(void) {
  if (!capture.stream || thread_mode == cudaStreamCaptureModeRelaxed) return 0;
  int own = pthread_equal(capture.thread, pthread_self()) && capture.mode != cudaStreamCaptureModeRelaxed;
  int others = thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
  if (own || others) capture.valid = 0;
  return own || others;
}
int sim_forbidden(void) { return forbidden(); }
#define UNSAFE if (forbidden()) return cudaErrorStreamCaptureUnsupported

CALL cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  if (!s || capture.stream) return cudaErrorStreamCaptureUnsupported;
  capture.mode = mode, capture.thread = pthread_self(), capture.graph = ++graphs, capture.valid = 1;
  capture.stream = s;
  if (hook) hook(0, capture.graph);
  DONE;
}
CALL cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
  if (capture.stream != s) return cudaErrorIllegalState;
  nodes_of_last = hook ? hook(1, capture.graph) : 0;
  capture.stream = 0;
  *graph = capture.valid ? (cudaGraph_t)capture.graph : 0;
  return capture.valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
}
CALL cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = s && s == capture.stream ? capture.valid ? cudaStreamCaptureStatusActive
                                                     : cudaStreamCaptureStatusInvalidated
                                     : cudaStreamCaptureStatusNone;
  DONE;
}
CALL cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                              cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                              size_t *count) {
  cudaStreamIsCapturing(s, status);
  int active = *status == cudaStreamCaptureStatusActive;
  if (id) *id = active ? capture.graph : 0;
  if (graph) *graph = active ? (cudaGraph_t)capture.graph : 0;
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (count) *count = 0;
  DONE;
}
CALL cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  enum cudaStreamCaptureMode before = thread_mode;
  thread_mode = *mode, *mode = before;
  DONE;
}
CALL cudaStreamUpdateCaptureDependencies(cudaStream_t s, cudaGraphNode_t *nodes, const cudaGraphEdgeData *edges,
                                         size_t count, unsigned flags) { DONE; }
CALL cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { *count = nodes_of_last; DONE; }
CALL cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  *exec = (cudaGraphExec_t)graph;
  DONE;
}
CALL cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}
CALL cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  return hook && hook(2, (unsigned long long)exec) ? cudaErrorIllegalAddress : cudaSuccess;
}
CALL cudaGraphDestroy(cudaGraph_t graph) { DONE; }
CALL cudaGraphExecDestroy(cudaGraphExec_t exec) {
  if (hook) hook(3, (unsigned long long)exec);
  DONE;
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

typedef struct {
  char *start;
  size_t size;
  int device;  // -1: pinned host memory
} Block;
static Block *blocks;
static size_t block_count, block_room, used[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static CALL reserve(void **p, size_t size, int where) {
  CALL answer = cudaErrorMemoryAllocation;
  pthread_mutex_lock(&lock);
  *p = 0;
  if ((where < 0 || used[where] + size <= total()) && !posix_memalign(p, 512, size ? size : 1)) {
    memset(*p, 0xFF, size);  // NaN: memory that was never written shows
    if (block_count == block_room) blocks = realloc(blocks, (block_room = 2 * block_room + 64) * sizeof *blocks);
    blocks[block_count++] = (Block){*p, size, where};
    if (where >= 0) used[where] += size;
    answer = cudaSuccess;
  }
  pthread_mutex_unlock(&lock);
  return answer;
}
static CALL release(void *p) {
  CALL answer = p ? cudaErrorInvalidValue : cudaSuccess;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < block_count; i++)
    if (blocks[i].start == p) {
      if (blocks[i].device >= 0) used[blocks[i].device] -= blocks[i].size;
      blocks[i] = blocks[--block_count];
      free(p);
      answer = cudaSuccess;
      break;
    }
  pthread_mutex_unlock(&lock);
  return answer;
}
static int find(const void *p, Block *found) {
  int known = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < block_count && !known; i++)
    if ((known = (char *)p >= blocks[i].start && (char *)p < blocks[i].start + (blocks[i].size ? blocks[i].size : 1)))
      *found = blocks[i];
  pthread_mutex_unlock(&lock);
  return known;
}

CALL cudaMalloc(void **p, size_t n) { UNSAFE; return reserve(p, n, device); }
CALL cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return reserve(p, n, device); }
CALL cudaMallocManaged(void **p, size_t n, unsigned f) { UNSAFE; return reserve(p, n, device); }
CALL cudaFree(void *p) { UNSAFE; return release(p); }
CALL cudaFreeAsync(void *p, cudaStream_t s) { return release(p); }
CALL cudaHostAlloc(void **p, size_t n, unsigned f) { UNSAFE; return reserve(p, n, -1); }
CALL cudaMallocHost(void **p, size_t n) { UNSAFE; return reserve(p, n, -1); }
CALL cudaFreeHost(void *p) { UNSAFE; return release(p); }
CALL cudaHostRegister(void *p, size_t n, unsigned f) { DONE; }
CALL cudaHostUnregister(void *p) { DONE; }
CALL cudaHostGetDevicePointer(void **d, void *h, unsigned f) { *d = h; DONE; }
CALL cudaMemGetInfo(size_t *free_bytes, size_t *all) { *all = total(), *free_bytes = total() - used[device]; DONE; }
CALL cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
  UNSAFE;
  sim_synchronisations++;
  memmove(to, from, n);
  DONE;
}
CALL cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
  memmove(to, from, n);
  DONE;
}
CALL cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) {
  memmove(to, from, n);
  DONE;
}
CALL cudaMemset(void *p, int v, size_t n) { memset(p, v, n); DONE; }
CALL cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { memset(p, v, n); DONE; }
CALL cudaMemcpyToSymbol(const void *to, const void *from, size_t n, size_t at, enum cudaMemcpyKind k) { DONE; }
CALL cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  Block block;
  memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeUnregistered, a->device = -2;
  if (find(p, &block)) {
    a->type = block.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = block.device < 0 ? 0 : block.device;
    a->devicePointer = (void *)p, a->hostPointer = block.device < 0 ? (void *)p : 0;
  }
  DONE;
}

// ---- Devices --------------------------------------------------------------------------------------------------------

CALL cudaGetDeviceCount(int *n) { *n = devices(); DONE; }
CALL cudaGetDevice(int *d) { *d = device; DONE; }
CALL cudaSetDevice(int d) {
  if (d < 0 || d >= devices()) return cudaErrorInvalidDevice;
  device = d;
  DONE;
}
CALL cudaDriverGetVersion(int *v) { *v = 13020; DONE; }
CALL cudaRuntimeGetVersion(int *v) { *v = 13020; DONE; }
CALL cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {  // of an H100
  memset(p, 0, sizeof *p);
  strcpy(p->name, "simulated");
  p->totalGlobalMem = total(), p->major = 9, p->minor = 0, p->multiProcessorCount = 132, p->warpSize = 32;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->sharedMemPerBlock = 49152, p->sharedMemPerMultiprocessor = 233472, p->sharedMemPerBlockOptin = 232448;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->l2CacheSize = 52428800;
  p->unifiedAddressing = p->managedMemory = p->concurrentManagedAccess = 1;
  for (int i = 0; i < 3; i++) p->maxGridSize[i] = i ? 65535 : 2147483647, p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
  DONE;
}
CALL cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr attribute, int d) {
  *v = attribute == cudaDevAttrMultiProcessorCount          ? 132
       : attribute == cudaDevAttrComputeCapabilityMajor     ? 9
       : attribute == cudaDevAttrWarpSize                   ? 32
       : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448
       : attribute == cudaDevAttrMaxThreadsPerBlock         ? 1024
                                                            : 0;
  DONE;
}
CALL cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02d:00.0", d); DONE; }
CALL cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  DONE;
}
CALL cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; DONE; }
CALL cudaDeviceEnablePeerAccess(int a, unsigned f) { DONE; }
CALL cudaDeviceSynchronize(void) { UNSAFE; sim_synchronisations++; DONE; }
CALL cudaGetLastError(void) { DONE; }
CALL cudaPeekAtLastError(void) { DONE; }
CALL cudaProfilerStart(void) { DONE; }
CALL cudaProfilerStop(void) { DONE; }

// ---- Streams and events: all work is done when it is queued ---------------------------------------------------------

CALL cudaStreamCreate(cudaStream_t *s) { *s = calloc(1, 64); DONE; }
CALL cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return cudaStreamCreate(s); }
CALL cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return cudaStreamCreate(s); }
CALL cudaStreamDestroy(cudaStream_t s) { DONE; }
CALL cudaStreamSynchronize(cudaStream_t s) { UNSAFE; sim_synchronisations++; DONE; }
CALL cudaStreamQuery(cudaStream_t s) { DONE; }
CALL cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { DONE; }
CALL cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; DONE; }
CALL cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *u, unsigned g) { f(s, cudaSuccess, u); DONE; }
CALL cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) { f(u); DONE; }
CALL cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = calloc(1, 64); DONE; }
CALL cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
CALL cudaEventDestroy(cudaEvent_t e) { free(e); DONE; }
CALL cudaEventRecord(cudaEvent_t e, cudaStream_t s) { DONE; }
CALL cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { DONE; }
CALL cudaEventQuery(cudaEvent_t e) { DONE; }
CALL cudaEventSynchronize(cudaEvent_t e) { UNSAFE; sim_synchronisations++; DONE; }
CALL cudaEventElapsedTime(float *t, cudaEvent_t a, cudaEvent_t b) { *t = 1; DONE; }

// ---- Kernels --------------------------------------------------------------------------------------------------------

CALL cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **a, size_t shared, cudaStream_t s) {
  sim_kernels++;
  if (getenv("SIM_TRAP")) abort();  // for a debugger: who launched it?
  DONE;
}
CALL cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
  return cudaLaunchKernel(f, c->gridDim, c->blockDim, a, 0, c->stream);
}
CALL cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = 90;
  DONE;
}
CALL cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { DONE; }
CALL cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 2; DONE; }
CALL cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) {
  *n = 2;
  DONE;
}

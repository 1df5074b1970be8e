// The CUDA driver, as far as torch looks for it: calls that succeed and do nothing. cudart.c does the work.
#include <string.h>
typedef int R;
#define DONE return 0

R cuInit(unsigned f) { DONE; }
R cuDriverGetVersion(int *v) { *v = 13020; DONE; }
R cuDeviceGet(int *d, int ordinal) { *d = ordinal; DONE; }
R cuDeviceGetCount(int *n) { *n = 1; DONE; }
R cuDeviceGetAttribute(int *v, int attribute, int d) { *v = 0; DONE; }
R cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { *f = 0, *active = 1; DONE; }
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; DONE; }
R cuCtxGetCurrent(void **c) { *c = (void *)1; DONE; }
R cuCtxSetCurrent(void *c) { DONE; }
R cuGetErrorString(int e, const char **s) { *s = "simulated"; DONE; }
R cuPointerGetAttribute(void) { return 1; }

#define NOTHING(name) R name(void) { DONE; }
NOTHING(cuFuncGetAttribute) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuLaunchCooperativeKernel) NOTHING(cuLaunchKernel) NOTHING(cuTensorMapEncodeTiled)
NOTHING(cuLinkAddData_v2) NOTHING(cuLinkComplete) NOTHING(cuLinkCreate_v2)
NOTHING(cuModuleGetFunction) NOTHING(cuModuleLoad) NOTHING(cuModuleLoadData) NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload) NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)

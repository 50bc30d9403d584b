/* A libcuda.so.1 without a device: what the libraries of the pack link against, and cuInit for CUDA's runtime. */

#define NO_DEVICE 100
#define NONE(name) int name(void) { return NO_DEVICE; }

NONE(cuInit)
NONE(cuCtxGetCurrent)
NONE(cuCtxSetCurrent)
NONE(cuDeviceGetAttribute)
NONE(cuDevicePrimaryCtxRetain)
NONE(cuGetErrorString)
NONE(cuGetProcAddress_v2)
NONE(cuMemAddressFree)
NONE(cuMemAddressReserve)
NONE(cuMemCreate)
NONE(cuMemGetAllocationGranularity)
NONE(cuMemMap)
NONE(cuMemRelease)
NONE(cuMemSetAccess)
NONE(cuMemUnmap)
NONE(cuPointerGetAttribute)
NONE(cuTensorMapEncodeTiled)

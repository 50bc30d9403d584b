/* A libnvidia-ml.so.1 that tells of one H100. */

#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned long long total, free, used;
} Memory;

static int device;

static int text(char *to, unsigned length, const char *from)
{
    snprintf(to, length, "%s", from);
    return 0;
}

/* torch calls this one, vLLM the second version. */
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "an error"; }
int nvmlSystemGetDriverVersion(char *to, unsigned length) { return text(to, length, "580.0"); }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = 1;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    *handle = &device;
    return index ? 2 : 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    *handle = &device;
    return 0;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index)
{
    *index = 0;
    return 0;
}

int nvmlDeviceGetName(void *handle, char *to, unsigned length) { return text(to, length, "NVIDIA H100 80GB HBM3"); }

int nvmlDeviceGetUUID(void *handle, char *to, unsigned length)
{
    return text(to, length, "GPU-00000000-0000-0000-0000-000000000000");
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    *major = 9;
    *minor = 0;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory)
{
    memory->total = memory->free = 80ull << 30;
    memory->used = 0;
    return 0;
}

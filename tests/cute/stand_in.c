/* Stands for CUDA's runtime where there is no GPU: a kernel's library calls it as it would the other, up to the launch,
 * of which this tells: whoever asked for it, or by a line. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned grid[3], block[3];
    size_t shared_bytes;
    void *stream, *attributes;
    unsigned attribute_count;
} Launch;

enum { OPT_IN = 232448 };  /* bytes of shared memory that a block of Hopper may ask for */

static int device_get(int *device, int number) { *device = number; return 0; }
static int kernel_get_attribute(int *value, int attribute, void *kernel, int device) { *value = 0; return 0; }

int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags, int *how) {
    *found = !strcmp(name, "cuDeviceGet") ? (void *)device_get : !strcmp(name, "cuKernelGetAttribute") ? (void *)kernel_get_attribute : NULL;
    if (how) *how = *found ? 0 : 1;
    return *found ? 0 : 1;
}

int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = OPT_IN; return 0; }
int cudaLibraryLoadData(void **library) { *library = (void *)1; return 0; }
int cudaLibraryUnload(void *library) { return 0; }
int cudaLibraryGetKernel(void **kernel) { *kernel = (void *)2; return 0; }
int cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int cudaGetLastError(void) { return 0; }
const char *cudaGetErrorName(int error) { return "an error"; }
const char *cudaGetErrorString(int error) { return "an error of the stand-in"; }

static void (*told)(const Launch *, void **);
void tell(void (*wanted)(const Launch *, void **)) { told = wanted; }

/* A tensor map begins with the address of its array, which is how the arguments' order is told. */
int cudaLaunchKernelExC(const Launch *launch, void *kernel, void **arguments) {
    if (told) return told(launch, arguments), 0;
    printf("[%u, %u, %zu, [", launch->grid[0], launch->block[0], launch->shared_bytes);
    for (int i = 0; i < 3; i++) printf("%s%llu", i ? ", " : "", *(unsigned long long *)arguments[i]);
    printf("]]\n");
    return fflush(stdout), 0;
}

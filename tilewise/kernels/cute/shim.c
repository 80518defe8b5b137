/* What a kernel's library asks of the DSL's own runtime, 43 MB, and the archive of 52 KB that stands for it lacks: to
 * tell the caller of an error of CUDA. */
#include <stdio.h>

extern const char *cudaGetErrorString(int);
typedef void (*set_raised)(const char *kind, const char **parts, int count);

void CuteDSLRT_TVMFFISetRaisedCudaError(set_raised set, int error) {
    char text[256];
    const char *parts[1] = {text};
    snprintf(text, sizeof text, "CUDA error %d: %s", error, cudaGetErrorString(error));
    if (set) set("RuntimeError", parts, 1);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(set_raised set, int error) { CuteDSLRT_TVMFFISetRaisedCudaError(set, error); }

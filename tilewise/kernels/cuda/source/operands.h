// What kernels for sm_90a tell the copy engine and wgmma about where numbers lie.
#pragma once

typedef unsigned int uint32;
typedef unsigned long long uint64;

template <class T> struct IsBFloat {
    static constexpr bool value = false;
};
template <> struct IsBFloat<BFloat> {
    static constexpr bool value = true;
};

struct alignas(64) TensorMap {  // how the copy engine sees an array; made on the host (tensor_map.py)
    unsigned char opaque[128];
};

// How wgmma finds an operand in shared memory, 128-byte swizzled: steps in bytes from 8 rows to the next 8 (stride), and
// between parts of 64 columns (leading).
__device__ __forceinline__ uint64 swizzled_128(uint32 at, int stride, int leading) {
    return uint64((at & 0x3ffff) >> 4 | uint32(leading >> 4) << 16) | uint64(stride >> 4) << 32 | uint64(1) << 62;
}
// The same so many bytes further. Only the lower half changes, and one addition does.
__device__ __forceinline__ uint64 further(uint64 operand, int bytes) {
    return operand + uint32(bytes / 16);
}

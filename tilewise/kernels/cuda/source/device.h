// What a compiler at run time does not declare by itself. The simulator has its own version of this file.
#pragma once
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// Dynamic shared memory, aligned as vectors of four floats need it.
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ __forceinline__ unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// What the special function unit gives, right to about two units in the last place; numbers below 2^-126 become 0.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_approximate(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_approximate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// On the simulator these find mistakes and tell the line; here they are nothing.
#define WHERE
#define HERE
#define CHECK(condition, message)
#define READS(from, count)
#define WRITES(to, count)

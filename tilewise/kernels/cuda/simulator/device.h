// device.h for the CPU: a kernel's source compiles with a C++ compiler, and runtime.cpp runs it, a fiber a thread.
// No header of the standard library is read here: hundreds of small kernels are compiled.
#pragma once

// -- the language -----------------------------------------------------------------------------------------------------
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define INFINITY __builtin_inff()

struct int2 {
    int x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// -- mistakes: where one is, in the kernel's own source ---------------------------------------------------------------
// A function that takes WHERE knows the line it was called from, and passes it on with HERE.
struct SourceLine {
    const char* file;
    int line;
};
inline SourceLine line_of_call(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
#define CALLED_FROM SourceLine where = line_of_call()
#define WHERE , CALLED_FROM
#define HERE , where

namespace simulator {
struct Thread {
    uint3 index;
};
extern Thread* running;  // the thread whose turn it is
extern uint3 block, block_size, grid_size;
extern unsigned char* shared_memory;

[[noreturn]] void fail(SourceLine where, const char* message);
void reads(const void* from, int bytes, SourceLine where);
void writes(const void* to, int bytes, SourceLine where);
void barrier(int id, int threads, bool waits, SourceLine where);  // threads: 0 for all that are left
void warp_barrier(unsigned lanes, SourceLine where);
void* shuffle_slot(int lane);  // 8 bytes of a lane, for the exchange under way
void end_exchange();
}  // namespace simulator

#define CHECK(condition, message) \
    if (!(condition)) simulator::fail(where, message)
#define READS(from, count) simulator::reads(from, count * int(sizeof *(from)), where)
#define WRITES(to, count) simulator::writes(to, count * int(sizeof *(to)), where)

// -- threads ----------------------------------------------------------------------------------------------------------
#define threadIdx (simulator::running->index)
#define blockIdx simulator::block
#define blockDim simulator::block_size
#define gridDim simulator::grid_size
#define SHARED_MEMORY(name) unsigned char* const name = simulator::shared_memory

inline void __syncthreads(CALLED_FROM) { simulator::barrier(0, 0, true, where); }
inline void __syncwarp(unsigned lanes = ~0u, CALLED_FROM) { simulator::warp_barrier(lanes, where); }

inline int lane_of_thread() {
    const uint3 at = threadIdx;
    return (at.x + blockDim.x * (at.y + blockDim.y * at.z)) % 32;
}
template <class T> T __shfl_sync(unsigned lanes, T value, int from, CALLED_FROM) {
    static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
    __builtin_memcpy(simulator::shuffle_slot(lane_of_thread()), &value, sizeof(T));
    simulator::warp_barrier(lanes, where);
    if (!(lanes >> (from & 31) & 1)) simulator::fail(where, "a shuffle reads a lane that does not take part");
    __builtin_memcpy(&value, simulator::shuffle_slot(from & 31), sizeof(T));
    simulator::end_exchange();
    return value;
}
template <class T> T __ldg(const T* at) { return *at; }
template <class T> T __shfl_xor_sync(unsigned lanes, T value, int mask, CALLED_FROM) {
    return __shfl_sync(lanes, value, lane_of_thread() ^ mask, where);
}
template <class T> T __shfl_up_sync(unsigned lanes, T value, int by, CALLED_FROM) {
    const int lane = lane_of_thread();
    return __shfl_sync(lanes, value, lane < by ? lane : lane - by, where);
}
template <class T> T __shfl_down_sync(unsigned lanes, T value, int by, CALLED_FROM) {
    const int lane = lane_of_thread();
    return __shfl_sync(lanes, value, lane + by > 31 ? lane : lane + by, where);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __ballot_sync(unsigned lanes, bool value, CALLED_FROM) {
    const bool mine = value;
    __builtin_memcpy(simulator::shuffle_slot(lane_of_thread()), &mine, 1);
    simulator::warp_barrier(lanes, where);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++) {
        bool vote = false;
        if (lanes >> lane & 1) __builtin_memcpy(&vote, simulator::shuffle_slot(lane), 1);
        votes |= unsigned(vote) << lane;
    }
    simulator::end_exchange();
    return votes;
}
inline bool __any_sync(unsigned lanes, bool value, CALLED_FROM) { return __ballot_sync(lanes, value, where) != 0; }

// Fibers take turns at barriers alone, so plain memory operations are atomic.
template <class T> T atomicAdd(T* to, T value) {
    const T before = *to;
    *to = before + value;
    return before;
}

// -- numbers ----------------------------------------------------------------------------------------------------------
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
inline float fminf(float a, float b) { return a < b || b != b ? a : b; }
inline float expf(float x) { return __builtin_expf(x); }
inline float exp2f(float x) { return __builtin_exp2f(x); }
inline float exp2_approximate(float x) { return exp2f(x); }
inline float log2_approximate(float x) { return __builtin_log2f(x); }
inline float reciprocal_approximate(float x) { return 1 / x; }
inline float copysignf(float size, float sign) { return __builtin_copysignf(size, sign); }
inline float logf(float x) { return __builtin_logf(x); }
inline float log1pf(float x) { return __builtin_log1pf(x); }
inline float log2f(float x) { return __builtin_log2f(x); }
inline float tanhf(float x) { return __builtin_tanhf(x); }
inline float rintf(float x) { return __builtin_rintf(x); }
inline float floorf(float x) { return __builtin_floorf(x); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline float half_to_float(unsigned short half) {
    const unsigned sign = unsigned(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(fraction) * 0x1p-24f;
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}
inline unsigned short float_to_half(float x) {  // to nearest, ties to even
    const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7fff;
    if (size >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more
    if (size < 0x38800000) {  // subnormal: added to 0.5, the last bit of the fraction is worth 2^-24
        return sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000);
    }
    return sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
}

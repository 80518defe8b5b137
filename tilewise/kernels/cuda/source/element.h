// Numbers as they are stored, and the float32 they are computed in. No headers of CUDA's: a compiler at run time has none.
#pragma once

struct Half {
    unsigned short bits;
};
struct BFloat {
    unsigned short bits;
};
struct Truth {  // a condition: anything but 0 is true
    unsigned char byte;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(double x) { return float(x); }
__device__ __forceinline__ float widen(Half x) { return half_to_float(x.bits); }
__device__ __forceinline__ float widen(BFloat x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ int widen(signed char x) { return x; }
__device__ __forceinline__ int widen(unsigned char x) { return x; }
__device__ __forceinline__ int widen(short x) { return x; }
__device__ __forceinline__ int widen(int x) { return x; }
__device__ __forceinline__ long long widen(long long x) { return x; }
__device__ __forceinline__ bool widen(Truth x) { return x.byte != 0; }

// To nearest, ties to even.
template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ Half narrow<Half>(float x) { return {float_to_half(x)}; }
template <> __device__ __forceinline__ BFloat narrow<BFloat>(float x) {
    unsigned bits = __float_as_uint(x);
    unsigned rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return {(unsigned short)(x == x ? rounded : 0x7fc0)};
}

// What rounding took from a number; 0 where there is no telling.
template <class T> __device__ __forceinline__ float lost(float x, T stored) {
    const float rest = x - widen(stored);
    return rest - rest == 0 ? rest : 0.0f;
}

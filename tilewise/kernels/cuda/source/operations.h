// The operations of expressions that C++ has not, or has otherwise: what they give is what NumPy gives.
#pragma once

template <class T> __device__ __forceinline__ T minimum(T a, T b) { return a < b || a != a ? a : b; }
template <class T> __device__ __forceinline__ T maximum(T a, T b) { return a > b || a != a ? a : b; }
template <class T> __device__ __forceinline__ T absolute(T a) { return a < 0 ? -a : a; }
template <> __device__ __forceinline__ float absolute<float>(float a) { return fabsf(a); }

// Division floors; whole numbers divided by 0 give 0.
template <class T> __device__ __forceinline__ T floordiv(T a, T b) {
    if (b == 0) return 0;
    T quotient = a / b;
    return quotient - T(quotient * b != a && (a < 0) != (b < 0));
}
template <class T> __device__ __forceinline__ T floormod(T a, T b) {
    if (b == 0) return 0;
    T rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <> __device__ __forceinline__ float floordiv<float>(float a, float b) { return floorf(a / b); }
template <> __device__ __forceinline__ float floormod<float>(float a, float b) { return a - b * floorf(a / b); }

// Where a load reads: each index is clamped to the array, so that nothing is ever read outside it.
__device__ __forceinline__ int64 cell_of(const Slot&, int) { return 0; }
template <class... Rest>
__device__ __forceinline__ int64 cell_of(const Slot& slot, int axis, int64 index, Rest... rest) {
    int64 last = slot.size[axis] - 1;
    int64 inside = index < 0 ? 0 : index > last ? last : index;
    return inside * slot.step[axis] + cell_of(slot, axis + 1, rest...);
}
template <class Stored, class... Index>
__device__ __forceinline__ auto load(const Slot& slot, Index... index) {
    return widen(reinterpret_cast<const Stored*>(slot.data)[cell_of(slot, 0, index...)]);
}

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

// In half precision a quotient need not be right in the last place; that of a constant is a product.
__device__ __forceinline__ float quotient(float a, float b) {
    return sizeof(Element) == 4 ? a / b : a * reciprocal_approximate(b);
}
__device__ __forceinline__ float quotient(float a, float b, float reciprocal) {
    return sizeof(Element) == 4 ? a / b : a * reciprocal;
}

// tanhf takes its time to be right in the last place. In half precision this does: a polynomial near 0, where the quotient
// would lose digits, and off by less than three units in the last place everywhere.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
    if (sizeof(Element) == 4) return tanhf(x);
    const float square = x * x, size = fabsf(x);
    const float small = fmaf(fmaf(fmaf(0.016157843f, square, -0.05250495f), square, 0.13317497f), square, -0.33332726f);
    const float growth = exp2_approximate(size * 2.885390082f);  // exp(2 |x|)
    const float large = fmaf(-2, reciprocal_approximate(1 + growth), 1);
    return size < 0.55f ? fmaf(small, square * x, x) : copysignf(large, x);
}

// Cells of an array, from a place in it on.
template <class Stored> struct Cells {
    const Stored* first;
    __device__ __forceinline__ Cells moved(int64 cells) const { return {first + cells}; }
    template <class Index> __device__ __forceinline__ auto read(Index cell) const { return widen(first[cell]); }
    // Two cells, in one go if they are neighbours and lie so that they can be.
    template <class Value> __device__ __forceinline__ void read_two(int a, int b, Value& x, Value& y) const {
        struct alignas(2 * sizeof(Stored)) Two {
            Stored x, y;
        };
        Two two;
        if (b == a + 1 && reinterpret_cast<unsigned long long>(first + a) % sizeof(Two) == 0) {
            two = *reinterpret_cast<const Two*>(first + a);
        } else {
            two.x = first[a];
            two.y = first[b];
        }
        x = widen(two.x);
        y = widen(two.y);
    }
};
template <class Stored> __device__ __forceinline__ Cells<Stored> cells_of(const Slot& slot) {
    return {reinterpret_cast<const Stored*>(slot.data)};
}
// Where an index leads along an axis. It is clamped to the array, so that nothing is ever read outside it.
template <class Index> __device__ __forceinline__ Index clamped(const Slot& slot, int axis, Index index) {
    const int64 end = slot.size[axis] - 1;
    const Index last = sizeof(Index) == 4 && end > 0x7fffffff ? Index(0x7fffffff) : Index(end);
    return index < 0 ? 0 : index > last ? last : index;
}
template <class Index> __device__ __forceinline__ int64 along(const Slot& slot, int axis, Index index) {
    return int64(clamped(slot, axis, index)) * slot.step[axis];
}

// The micro-kernel: MR rows by NR columns of a product, kept in registers over the whole depth.
#pragma once
#include "simd.h"

namespace {

// What becomes of a row of sums (two vectors a, b) when the depth is done.
template <class T> struct Put {
    T* c;
    int64_t ld;
    INLINE void operator()(int r, Vec<T> a, Vec<T> b) const {
        store(c + r * ld, a);
        store(c + r * ld + VL<T>, b);
    }
};
template <class T> struct PutMax {  // and keep each row's largest, lane by lane
    T* c;
    int64_t ld;
    Vec<T>* largest;
    INLINE void operator()(int r, Vec<T> a, Vec<T> b) const {
        store(c + r * ld, a);
        store(c + r * ld + VL<T>, b);
        largest[r] = vmax(largest[r], vmax(a, b));
    }
};
template <class T> struct Add {
    T* c;
    int64_t ld;
    INLINE void operator()(int r, Vec<T> a, Vec<T> b) const {
        store(c + r * ld, load(c + r * ld) + a);
        store(c + r * ld + VL<T>, load(c + r * ld + VL<T>) + b);
    }
};
template <class T> struct RescaleAdd {
    T* c;
    int64_t ld;
    const T* rescale;
    INLINE void operator()(int r, Vec<T> a, Vec<T> b) const {
        Vec<T> by = splat(rescale[r]);
        store(c + r * ld, load(c + r * ld) * by + a);
        store(c + r * ld + VL<T>, load(c + r * ld + VL<T>) * by + b);
    }
};

// a[r * ROW + k * STEP], one of which is known when compiling; b is (depth, NR), packed.
template <int ROW, int STEP, class T, class Finish>
INLINE void product(int64_t depth, const T* a, const T* b, const Finish& finish) {
    Vec<T> left[MR], right[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) left[r] = right[r] = Vec<T>{};
    for (int64_t k = 0; k < depth; k++) {
        Vec<T> b0 = load(b), b1 = load(b + VL<T>);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            left[r] += a[r * ROW] * b0;
            right[r] += a[r * ROW] * b1;
        }
        a += STEP;
        b += NR<T>;
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) finish(r, left[r], right[r]);
}

}  // namespace

// What the machine can do at most: the loops that its limits are measured with.
#pragma once
#include "simd.h"

namespace {

// Fused multiplications and additions on registers alone; returns how many there were.
template <class T> double multiply_add(int64_t rounds, T* result) {
    constexpr int SUMS = VECTOR_BYTES == 64 ? 24 : 12;  // enough to hide the latency, few enough for the registers
    Vec<T> sum[SUMS];
    for (int i = 0; i < SUMS; i++) sum[i] = splat(T(i));
    Vec<T> a = splat(T(0.999)), b = splat(T(0.001));
    for (int64_t k = 0; k < rounds; k++)
#pragma GCC unroll 32
        for (int i = 0; i < SUMS; i++) sum[i] = sum[i] * a + b;
    Vec<T> all{};
    for (int i = 0; i < SUMS; i++) all += sum[i];
    *result = sum_of(all);
    return 2.0 * double(rounds) * SUMS * VL<T>;
}

// Every byte of [p, p + n), n a multiple of 8 vectors.
uint64_t read_bytes(const char* p, int64_t n) {
    Vec<int64_t> sum[8] = {};
    for (int64_t i = 0; i < n; i += 8 * VECTOR_BYTES)
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) sum[k] ^= load(reinterpret_cast<const int64_t*>(p + i + k * VECTOR_BYTES));
    Vec<int64_t> all{};
    for (int k = 0; k < 8; k++) all ^= sum[k];
    return uint64_t(all[0]);
}

}  // namespace

// hopper.h for the simulator: the same names over hopper.cpp, which keeps account of what is asynchronous.
#pragma once

#include "operands.h"

namespace simulator {
uint32 shared_address(const void* at, SourceLine where);
void mbarrier_init(uint32 bar, int arrivals, SourceLine where);
void mbarrier_arrive(uint32 bar, SourceLine where);
void mbarrier_expect(uint32 bar, int bytes, SourceLine where);
void mbarrier_wait(uint32 bar, int parity, SourceLine where);
void fence_mbarrier_init();
void fence_async();
void registers(int count, bool more, SourceLine where);
void tma_load(uint32 to, const void* map, uint32 bar, int rank, const int* at, SourceLine where);
void tma_store(const void* map, uint32 from, int rank, const int* at, SourceLine where);
void bulk_load(uint32 to, const void* from, int bytes, uint32 bar, SourceLine where);
void bulk_add(void* to, uint32 from, int bytes, SourceLine where);
void bulk_store(void* to, uint32 from, int bytes, SourceLine where);
void tma_store_commit();
void tma_store_wait(int groups, SourceLine where);
void bulk_wait_done(int groups, SourceLine where);
int load_acquire(const int* at, SourceLine where);
void add_release(int* at, int value);
void wgmma_fence(SourceLine where);
void wgmma_commit(SourceLine where);
void wgmma_wait(int groups, SourceLine where);
struct Product {
    int columns;
    bool add, a_transposed, b_transposed, bfloat;
    uint64 a, b;
    const uint32* registers;  // of a, if it comes from there
};
void wgmma(float* d, const Product& product, SourceLine where);
void load_matrices(uint32* to, uint32 row, SourceLine where);
void load_matrices_turned(uint32* to, uint32 row, SourceLine where);
void store_matrices(uint32 row, const uint32* from, SourceLine where);
void store_matrices_turned(uint32 row, const uint32* from, SourceLine where);
void mma(float* d, const uint32* a, const uint32* b, bool bfloat, SourceLine where);
}  // namespace simulator

namespace hw {
inline uint32 shared_address(const void* at, CALLED_FROM) { return simulator::shared_address(at, where); }
inline void barrier_sync(int id, int threads, CALLED_FROM) { simulator::barrier(id, threads, true, where); }
inline void barrier_arrive(int id, int threads, CALLED_FROM) { simulator::barrier(id, threads, false, where); }
inline void mbarrier_init(uint32 bar, int arrivals, CALLED_FROM) { simulator::mbarrier_init(bar, arrivals, where); }
inline void mbarrier_arrive(uint32 bar, CALLED_FROM) { simulator::mbarrier_arrive(bar, where); }
inline void mbarrier_arrive_expect(uint32 bar, int bytes, CALLED_FROM) {
    simulator::mbarrier_expect(bar, bytes, where);
    simulator::mbarrier_arrive(bar, where);
}
inline void mbarrier_wait(uint32 bar, int parity, CALLED_FROM) { simulator::mbarrier_wait(bar, parity, where); }
inline void fence_mbarrier_init() { simulator::fence_mbarrier_init(); }
inline void fence_async() { simulator::fence_async(); }
template <int N> void registers_give_back(CALLED_FROM) { simulator::registers(N, false, where); }
template <int N> void registers_take(CALLED_FROM) { simulator::registers(N, true, where); }

inline void tma_prefetch(const TensorMap*) {}
inline void tma_prefetch_4d(const TensorMap*, int, int, int, int) {}
inline void tma_load_3d(uint32 to, const TensorMap* map, uint32 bar, int x, int y, int z, CALLED_FROM) {
    const int at[] = {x, y, z};
    simulator::tma_load(to, map, bar, 3, at, where);
}
inline void tma_load_4d(uint32 to, const TensorMap* map, uint32 bar, int x, int y, int z, int w, CALLED_FROM) {
    const int at[] = {x, y, z, w};
    simulator::tma_load(to, map, bar, 4, at, where);
}
inline void tma_store_3d(const TensorMap* map, uint32 from, int x, int y, int z, CALLED_FROM) {
    const int at[] = {x, y, z};
    simulator::tma_store(map, from, 3, at, where);
}
inline void tma_store_4d(const TensorMap* map, uint32 from, int x, int y, int z, int w, CALLED_FROM) {
    const int at[] = {x, y, z, w};
    simulator::tma_store(map, from, 4, at, where);
}
inline void bulk_load(uint32 to, const void* from, int bytes, uint32 bar, CALLED_FROM) {
    simulator::bulk_load(to, from, bytes, bar, where);
}
inline void bulk_add(void* to, uint32 from, int bytes, CALLED_FROM) { simulator::bulk_add(to, from, bytes, where); }
inline void bulk_store(void* to, uint32 from, int bytes, CALLED_FROM) { simulator::bulk_store(to, from, bytes, where); }
inline void tma_store_commit() { simulator::tma_store_commit(); }
template <int N> void tma_store_wait(CALLED_FROM) { simulator::tma_store_wait(N, where); }
template <int N> void bulk_wait_done(CALLED_FROM) { simulator::bulk_wait_done(N, where); }

inline int load_acquire(const int* at, CALLED_FROM) { return simulator::load_acquire(at, where); }
inline void wait_for_number(const int* at, int number, CALLED_FROM) {
    while (simulator::load_acquire(at, where) != number) {
    }
}
inline void fence_async_global() {}  // what threads and the copy engine write to global memory is in order here
inline void add_release(int* at, int value) { simulator::add_release(at, value); }

inline void wgmma_fence(CALLED_FROM) { simulator::wgmma_fence(where); }
inline void wgmma_commit(CALLED_FROM) { simulator::wgmma_commit(where); }
template <int N> void wgmma_wait(CALLED_FROM) { simulator::wgmma_wait(N, where); }
template <int N> void wgmma_wait_in_place(bool, CALLED_FROM) { simulator::wgmma_wait(N, where); }
inline void wgmma_wait_together(CALLED_FROM) { simulator::wgmma_wait(0, where); }
template <class T, int N> void pin(T (&)[N]) {}
inline int anew(int x) { return x; }
inline float largest_of_three(float a, float b, float c) { return fmaxf(fmaxf(a, b), c); }
inline void mma(float* d, const uint32 (&a)[4], uint32 b0, uint32 b1, CALLED_FROM) {
    const uint32 b[2] = {b0, b1};
    simulator::mma(d, a, b, IsBFloat<Element>::value, where);
}
template <class T> uint32 packed(float low, float high) {
    return narrow<T>(low).bits | uint32(narrow<T>(high).bits) << 16;
}
inline void load_matrices(uint32 (&to)[4], uint32 row, CALLED_FROM) { simulator::load_matrices(to, row, where); }
inline void load_matrices_turned(uint32 (&to)[4], uint32 row, CALLED_FROM) {
    simulator::load_matrices_turned(to, row, where);
}
inline void store_matrices(uint32 row, const uint32 (&from)[4], CALLED_FROM) { simulator::store_matrices(row, from, where); }
inline void store_matrices_turned(uint32 row, const uint32 (&from)[4], CALLED_FROM) {
    simulator::store_matrices_turned(row, from, where);
}

constexpr bool BFLOAT = IsBFloat<Element>::value;
template <int N, bool ADD, bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>
void wgmma(float (&d)[N / 2], uint64 a, uint64 b, CALLED_FROM) {
    static_assert(N % 8 == 0 && N <= 256, "a product has 8 to 256 columns, a multiple of 8");
    simulator::wgmma(d, {N, ADD, A_TRANSPOSED, B_TRANSPOSED, BFLOAT, a, b, nullptr}, where);
}
template <int N, bool ADD, bool B_TRANSPOSED = false>
void wgmma(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, CALLED_FROM) {
    static_assert(N % 8 == 0 && N <= 256, "a product has 8 to 256 columns, a multiple of 8");
    simulator::wgmma(d, {N, ADD, false, B_TRANSPOSED, BFLOAT, 0, b, a}, where);
}
}  // namespace hw

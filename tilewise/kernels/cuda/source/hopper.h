// What sm_90a has and C++ has no words for: barriers in shared memory, the copy engine (TMA), asynchronous products of
// matrices (wgmma), registers that change hands. The simulator has its own version of this file, with the same names.
#pragma once

#include "operands.h"

namespace hw {
#define INLINE __device__ __forceinline__

INLINE uint32 shared_address(const void* at) { return uint32(__cvta_generic_to_shared(at)); }

// -- named barriers: 0 is __syncthreads's own -------------------------------------------------------------------------
INLINE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
INLINE void barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// -- mbarriers: a phase is over when all have arrived and all expected bytes are there --------------------------------
INLINE void mbarrier_init(uint32 bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
INLINE void mbarrier_arrive(uint32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
INLINE void mbarrier_arrive_expect(uint32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Until the phase of that parity is over. Lanes that wait together look at one barrier at one time, and see the same: so says
// the branch, and what follows may be reckoned once a warp.
INLINE void mbarrier_wait(uint32 bar, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra.uni WAIT;\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
INLINE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// What threads wrote to shared memory becomes visible to the copy engine and to wgmma.
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// -- registers: a warpgroup gives some back, another takes more -------------------------------------------------------
template <int N> INLINE void registers_give_back() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> INLINE void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// -- the copy engine --------------------------------------------------------------------------------------------------
INLINE void tma_prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
INLINE void tma_load_3d(uint32 to, const TensorMap* map, uint32 bar, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
        : "memory");
}
INLINE void tma_load_4d(uint32 to, const TensorMap* map, uint32 bar, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
// To the L2 cache: a hint that it will be loaded.
INLINE void tma_prefetch_4d(const TensorMap* map, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
INLINE void tma_store_3d(const TensorMap* map, uint32 from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
                 "r"(x), "r"(y), "r"(z)
                 : "memory");
}
INLINE void tma_store_4d(const TensorMap* map, uint32 from, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
// Bytes as they lie, without a map: both addresses and the size are multiples of 16.
INLINE void bulk_load(uint32 to, const void* from, int bytes, uint32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
// The way back; it is in a group, as stores of tiles are.
INLINE void bulk_store(void* to, uint32 from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Adds float32 numbers of shared memory to those in global memory; it is in a group too.
INLINE void bulk_add(void* to, uint32 from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
INLINE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> INLINE void tma_store_wait() {  // until shared memory is read by all but the last N groups
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N> INLINE void bulk_wait_done() {  // until what all but the last N groups write is in global memory
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// -- order between blocks: who sees the number of add_release sees what was written before it -------------------------
INLINE int load_acquire(const int* at) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
// Until the number is this one. What is asked for again and again is not to empty the multiprocessor's cache each time.
INLINE void wait_for_number(const int* at, int number) {
    int value = load_acquire(at);
    while (value != number) {
        do asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
        while (value != number);
        load_acquire(at);
    }
}
// Between such a number and what the copy engine does in global memory.
INLINE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
INLINE void add_release(int* at, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// -- products of matrices; the products themselves are in wgmma.h -----------------------------------------------------
INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> INLINE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Waits for all products but the last N groups, just here: a compiler that finds a plain wait moves it up, above the work
// that should hide it. A branch holds it in place, as long as its sides differ, if only by a remark. `always` must be beyond
// what it can know.
template <int N> INLINE void wgmma_wait_in_place(bool always) {
    if (always) asm volatile("wgmma.wait_group.sync.aligned %0; // as always" ::"n"(N) : "memory");
    else asm volatile("wgmma.wait_group.sync.aligned %0; // never" ::"n"(N) : "memory");
}

// The same without the branch: a compiler moves it up some way, and what follows with it.
INLINE void wgmma_wait_together() {
    __syncwarp();
    wgmma_wait<0>();
}

// The same product for one warp, and at once: d (16 x 8) += a (16 x 16) @ b (16 x 8).
INLINE void mma(float* d, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    if constexpr (IsBFloat<Element>::value)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two numbers, narrowed, in one register; the first in its lower half.
template <class T> INLINE uint32 packed(float low, float high) {
    uint32 both;
    if constexpr (IsBFloat<T>::value) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Of numbers that are not negative, whose bits compare as they do: one instruction, where floats take two.
INLINE float largest_of_three(float a, float b, float c) {
    return __uint_as_float(max(max(__float_as_uint(a), __float_as_uint(b)), __float_as_uint(c)));
}

// The compiler may not move these registers' values across this place.
template <int N> INLINE void pin(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}
template <int N, int M> INLINE void pin(uint32 (&values)[N][M]) {
#pragma unroll
    for (int i = 0; i < N * M; i++) asm volatile("" : "+r"(values[i / M][i % M])::"memory");
}

// The same value, though the compiler does not know: what depends on it is computed again.
INLINE int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Four 8 x 8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8.
INLINE void load_matrices(uint32 (&to)[4], uint32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}
// The same with rows and columns exchanged.
INLINE void load_matrices_turned(uint32 (&to)[4], uint32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}
// Four matrices the way back. Other lanes find the rows after a __syncwarp.
INLINE void store_matrices(uint32 row, const uint32 (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]), "r"(from[1]),
                 "r"(from[2]), "r"(from[3])
                 : "memory");
}

INLINE void store_matrices_turned(uint32 row, const uint32 (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

#undef INLINE
}  // namespace hw

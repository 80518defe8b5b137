// Blocks add up their numbers, one after the other: bulk copies and adds, matrices stored by warps, order between blocks.
// The tests of the simulator break it, one line at a time.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "hopper.h"

constexpr int THREADS = 64, NUMBERS = 256, PARTS = 2, BYTES = NUMBERS * 4;
constexpr int STAGING_AT = PARTS * BYTES, BARRIER_AT = STAGING_AT + BYTES;

struct Bulk {
    const float* x;  // of each block: PARTS * NUMBERS
    float* sum;      // of all blocks: NUMBERS
    float* found;    // by each block, when its turn came: NUMBERS of sum
    int* turn;
};

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Bulk params) {
    SHARED_MEMORY(memory);
    const uint32 base = hw::shared_address(memory), staging = base + STAGING_AT, bar = base + BARRIER_AT;
    const float* const numbers = reinterpret_cast<const float*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;

    if (threadIdx.x == 0) {
        hw::mbarrier_init(bar, 1);
        hw::fence_mbarrier_init();
        hw::mbarrier_arrive_expect(bar, PARTS * BYTES);
        for (int part = 0; part < PARTS; part++)
            hw::bulk_load(base + part * BYTES, params.x + (block * PARTS + part) * NUMBERS, BYTES, bar);
        while (hw::load_acquire(params.turn) != block) {
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NUMBERS; i += THREADS) params.found[block * NUMBERS + i] = params.sum[i];
    hw::mbarrier_wait(bar, 0);

    for (int part = 0; part < PARTS; part++) {
        // Two 16-bit numbers of a matrix are one float here: a row has four of them, a warp 32 rows.
        uint32 doubled[4];
        for (int i = 0; i < 4; i++)
            doubled[i] = __float_as_uint(2 * numbers[part * NUMBERS + warp * 128 + (i * 8 + lane / 4) * 4 + lane % 4]);
        if (threadIdx.x == 0) hw::tma_store_wait<0>();
        __syncthreads();  // the part before is no longer in the way
        hw::store_matrices(staging + warp * 512 + lane * 16, doubled);
        hw::fence_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            hw::bulk_add(params.sum, staging, BYTES);
            hw::tma_store_commit();
        }
    }
    if (threadIdx.x == 0) {
        hw::bulk_wait_done<0>();
        hw::add_release(params.turn, 1);
    }
}

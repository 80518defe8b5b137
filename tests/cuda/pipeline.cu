// A small attention kernel in the manner of Hopper: one warp feeds the copy engine, a warpgroup multiplies. It has most
// of what can go wrong there, and the tests of the simulator break it, one line at a time. D is 64, all of Q, K fits.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "hopper.h"
#include "wgmma.h"

constexpr int ROWS = 64, KEYS = 64, STAGES = 2, TILE_BYTES = 64 * D * 2;
constexpr int Q_AT = 0, K_AT = TILE_BYTES, V_AT = K_AT + STAGES * TILE_BYTES, OUT_AT = V_AT + STAGES * TILE_BYTES;
constexpr int BARRIERS_AT = OUT_AT + TILE_BYTES;

struct Pipeline {
    TensorMap q, k, v, out;
    int keys;
    float scale;  // times log2(e)
};

__device__ __forceinline__ uint32 two(float a, float b) {
    return uint32(narrow<Element>(a).bits) | uint32(narrow<Element>(b).bits) << 16;
}

extern "C" __global__ void __launch_bounds__(256, 1) attention(const __grid_constant__ Pipeline params) {
    SHARED_MEMORY(memory);
    const uint32 base = (hw::shared_address(memory) + 1023) & ~1023u;
    unsigned char* const aligned = memory + (base - hw::shared_address(memory));
    const uint32 q = base + Q_AT, k = base + K_AT, v = base + V_AT;
    const uint32 q_full = base + BARRIERS_AT, full = q_full + 8, empty = full + 8 * STAGES;
    const int first_row = blockIdx.x * ROWS, tiles = (params.keys + KEYS - 1) / KEYS;

    if (threadIdx.x == 0) {
        hw::mbarrier_init(q_full, 1);
        for (int i = 0; i < STAGES; i++) {
            hw::mbarrier_init(full + 8 * i, 1);
            hw::mbarrier_init(empty + 8 * i, 4);
        }
        hw::fence_mbarrier_init();
    }
    __syncthreads();

    if (threadIdx.x >= 128) {  // the producer
        hw::registers_give_back<24>();
        if (threadIdx.x == 128) {
            // 1 load q
            hw::mbarrier_arrive_expect(q_full, TILE_BYTES);
            hw::tma_load_3d(q, &params.q, q_full, 0, first_row, 0);
            for (int i = 0; i < tiles; i++) {
                const int stage = i % STAGES;
                hw::mbarrier_wait(empty + 8 * stage, (i / STAGES & 1) ^ 1);
                hw::mbarrier_arrive_expect(full + 8 * stage, 2 * TILE_BYTES);
                hw::tma_load_3d(k + stage * TILE_BYTES, &params.k, full + 8 * stage, 0, i * KEYS, 0);
                hw::tma_load_3d(v + stage * TILE_BYTES, &params.v, full + 8 * stage, 0, i * KEYS, 0);
            }
        }
        return;
    }

    hw::registers_take<248>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[D / 2], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0, 0};
    for (int i = 0; i < D / 2; i++) acc[i] = 0;
    hw::mbarrier_wait(q_full, 0);
    uint32 q_part[D / 16][4];
    const uint32 q_row = q + (warp * 16 + lane % 16) * 128;
    for (int c = 0; c < D / 16; c++) hw::load_matrices(q_part[c], q_row + ((c * 2 + lane / 16) ^ (lane & 7)) * 16);

    // for each kv tile of the schedule:
    for (int i = 0; i < tiles; i++) {
        const int stage = i % STAGES;
        hw::mbarrier_wait(full + 8 * stage, i / STAGES & 1);
        // 2 s = q @ k.T: the first half of q from shared memory, the second from registers
        float s[KEYS / 2];
        const uint64 q_at = swizzled_128(q, 1024, 16), k_at = swizzled_128(k + stage * TILE_BYTES, 1024, 16);
        hw::wgmma_fence();
        hw::wgmma<KEYS, false>(s, q_at, k_at);
        hw::wgmma<KEYS, true>(s, q_at + 2, k_at + 2);
        hw::wgmma<KEYS, true>(s, q_part[2], k_at + 4);
        hw::wgmma<KEYS, true>(s, q_part[3], k_at + 6);
        hw::wgmma_commit();
        hw::wgmma_wait<0>();
        // 4 mask: keys there are not
        // 5 row_max, rescale, p, row_sum
        uint32 p[KEYS / 16][4];
        for (int half = 0; half < 2; half++) {
            float new_max = row_max[half];
            for (int n = 0; n < KEYS / 8; n++)
                for (int e = 0; e < 2; e++) {
                    float& x = s[n * 4 + half * 2 + e];
                    x = i * KEYS + n * 8 + lane % 4 * 2 + e < params.keys ? x * params.scale : -INFINITY;
                    new_max = fmaxf(new_max, x);
                }
            new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 1));
            new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 2));
            const float rescale = exp2f(row_max[half] - new_max);
            row_max[half] = new_max;
            row_sum[half] *= rescale;
            for (int n = 0; n < KEYS / 8; n++) {
                float& x = s[n * 4 + half * 2];
                float& y = s[n * 4 + half * 2 + 1];
                x = exp2f(x - new_max);
                y = exp2f(y - new_max);
                row_sum[half] += x + y;
                p[n / 2][n % 2 * 2 + half] = two(x, y);
                acc[n * 4 + half * 2] *= rescale;
                acc[n * 4 + half * 2 + 1] *= rescale;
            }
        }
        // 6 acc = acc * rescale + p @ v
        hw::wgmma_fence();
        for (int c = 0; c < KEYS / 16; c++)
            hw::wgmma<D, true, true>(acc, p[c], swizzled_128(v + stage * TILE_BYTES + c * 2048, 1024, 8192));
        hw::wgmma_commit();
        hw::wgmma_wait<0>();
        if (lane == 0) hw::mbarrier_arrive(empty + 8 * stage);
    }

    // 7 finish: acc / row_sum
    for (int half = 0; half < 2; half++) {
        row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 1);
        row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 2);
        const int row = warp * 16 + lane / 4 + half * 8;
        for (int n = 0; n < D / 8; n++) {
            const uint32 at = (row * 128 + n * 16 + lane % 4 * 4) ^ ((row & 7) << 4);
            const float x = acc[n * 4 + half * 2] / row_sum[half], y = acc[n * 4 + half * 2 + 1] / row_sum[half];
            *reinterpret_cast<uint32*>(aligned + OUT_AT + at) = two(x, y);
        }
    }
    hw::fence_async();
    hw::barrier_sync(1, 128);
    if (threadIdx.x == 0) {
        hw::tma_store_3d(&params.out, base + OUT_AT, 0, first_row, 0);
        hw::tma_store_commit();
        hw::tma_store_wait<0>();
    }
}

// How tiles of 16-bit numbers lie in shared memory, for the copy engine and for wgmma, and how pipelines of them go round.
#pragma once

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Parts of 64 columns, whose rows have 128 bytes, as the copy engine swizzles them.
constexpr int PART = 64, ROW_BYTES = 128;
constexpr int Q_PARTS = ceil_div(D, PART), V_PARTS = ceil_div(D_V, PART);
constexpr int DEPTH = ceil_div(D, 16) * 16, COLUMNS = ceil_div(D_V, 16) * 16;  // as wgmma takes them; what is beyond is 0

// Where a pipeline stands: a stage, and the parity of its barriers' phase.
template <int N> struct Ring {
    int stage = 0;
    uint32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == N) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// A lane that lags behind must not miss a phase: the others go on only with it.
__device__ __forceinline__ void wait_together(uint32 bar, uint32 parity) {
    hw::mbarrier_wait(bar, parity);
    __syncwarp();
}

// Thread i of a quad has words i of four groups of four; after this it has group i.
__device__ __forceinline__ void transpose_in_quad(uint32 (&words)[4], int i) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = i & step;
        const int other = 3 - step;
#pragma unroll
        for (int j = 0; j <= other; j += other) {  // pairs j, j + step
            uint32& low = words[j];
            uint32& high = words[j + step];
            const uint32 given = __shfl_xor_sync(~0u, upper ? low : high, step);
            if (upper) low = given;
            else high = given;
        }
    }
}
__device__ __forceinline__ void store_16_bytes(Element* to, const uint32 (&words)[4]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

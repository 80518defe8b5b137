// What a warpgroup of Hopper's backward pass has the copy engine store: by way of the places of d_s, of each of which it has the
// part where its own keys are. Threads that stored it themselves would wait for the way to memory. Wide heads have no room.
#pragma once

struct Outbox {
    const Shared& shared;
    const int number, thread;  // of the warpgroup; in it

    // Places for 64 rows of 64 columns.
    static constexpr int IN_ONE = TILE_Q / 64, PLACES = S_STAGES * IN_ONE;
    __device__ __forceinline__ uint32 place(int i) const {
        return shared.d_s(i % PLACES / IN_ONE) + (number * TILE_Q + i % IN_ONE * 64) * ROW_BYTES;
    }
    // Until all but some that were sent are read, so that their places can be written to. All threads know it then.
    template <int BUT> __device__ __forceinline__ void await() const {
        if (thread == 0) hw::tma_store_wait<BUT>();
        meet();
    }
    // The rows that the warps have of a product, of columns from first on: 64 of them, or as many as there are.
    template <int N>
    __device__ __forceinline__ void write(uint32 to, const float (&held)[N], int first, float scale) const {
        const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
        for (int k = first / 16; k < first / 16 + 4 && 8 * k < N; k++) {
            uint32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = hw::packed<Element>(held[8 * k + 2 * i] * scale, held[8 * k + 2 * i + 1] * scale);
            hw::store_matrices(to + row * ROW_BYTES + ((k % 4 * 2 + thread % 32 / 16) ^ row % 8) * 16, words);
        }
    }
    // When all threads have written it.
    __device__ __forceinline__ void send(const TensorMap* to, uint32 from, int column, int row, int h, int b) const {
        hw::fence_async();
        meet();
        if (thread != 0) return;
        hw::tma_store_4d(to, from, column, row, h, b);
        hw::tma_store_commit();
    }
    __device__ __forceinline__ void meet() const { hw::barrier_sync(Shared::to_store(number), 128); }
};

// How tiles of 16-bit numbers lie in shared memory, for the copy engine and for wgmma, and how pipelines of them go round.
#pragma once

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

// Which head an item is of, and which of its tiles: the heads of a section take turns, their tiles in order; the last section
// has the rest.
struct HeadAndTile {
    int head, tile;
};
__device__ __forceinline__ HeadAndTile in_turns(int index, int items, int tiles, int section, int sections) {
    const int number = min(index / (section * tiles), sections - 1), before = number * section;
    const int heads = number == sections - 1 ? items / tiles - before : section;
    const int rest = index - before * tiles;
    return {before + rest % heads, rest / heads};
}

// Rows of a tile, from one on, become 0, by a warp. Beyond the end of a packed sequence lie the next one's, which may be
// anything: 0 * NaN would be NaN.
template <int ROWS, int PARTS> __device__ __forceinline__ void clear_rows(unsigned char* tile, int from, int lane) {
    for (int part = 0; part < PARTS; part++)
#pragma unroll 1
        for (int i = from * ROW_BYTES / 16 + lane; i < ROWS * ROW_BYTES / 16; i += 32)
            reinterpret_cast<uint4*>(tile + part * ROWS * ROW_BYTES)[i] = make_uint4(0, 0, 0, 0);
}

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
// Two numbers, narrowed, or what that takes from them.
template <bool REMAINDER> __device__ __forceinline__ uint32 narrowed(float low, float high) {
    const uint32 both = hw::packed<Element>(low, high);
    if (!REMAINDER) return both;
    return hw::packed<Element>(lost(low, Element{(unsigned short)(both & 0xffff)}),
                               lost(high, Element{(unsigned short)(both >> 16)}));
}
// One of the two rows that a quad holds of a product: of each eight columns a thread has two, held[n * 4] and the next. They
// are scaled, narrowed and stored 16 bytes at a time, as far as the row is wide; or what that takes from them.
template <int COUNT, bool REMAINDER = false>
__device__ __forceinline__ void store_row(Element* row, const float* held, float scale, int quarter, bool inside, int width) {
#pragma unroll
    for (int n = 0; n < COUNT / 8; n += 4) {
        uint32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (n + i < COUNT / 8) words[i] = narrowed<REMAINDER>(held[(n + i) * 4] * scale, held[(n + i) * 4 + 1] * scale);
        transpose_in_quad(words, quarter);
        if (inside && (n + quarter) * 8 < width)
            *reinterpret_cast<uint4*>(row + (n + quarter) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
// The same of float32: what a quad has of eight columns is 32 bytes as it is.
template <int COUNT>
__device__ __forceinline__ void store_row(float* row, const float* held, float scale, int quarter, bool inside, int width) {
#pragma unroll
    for (int n = 0; n < COUNT / 8; n++)
        if (inside && n * 8 < width)
            *reinterpret_cast<float2*>(row + n * 8 + quarter * 2) = float2{held[n * 4] * scale, held[n * 4 + 1] * scale};
}

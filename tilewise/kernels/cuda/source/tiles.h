// Tiles in shared memory: rows of floats, four more than there are columns, so that neighbouring rows differ in banks.
#pragma once

template <int ROWS, int COLUMNS> struct Tile {
    static constexpr int STEP = COLUMNS + 4, BYTES = ROWS * STEP * 4;
    float* data;

    __device__ __forceinline__ explicit Tile(unsigned char* at) : data(reinterpret_cast<float*>(at)) {}
    __device__ __forceinline__ float* at(int row, int column, int width WHERE) const {
        CHECK(row >= 0 && row < ROWS && column >= 0 && column + width <= COLUMNS, "outside the tile");
        return data + row * STEP + column;
    }
    __device__ __forceinline__ void set(int row, int column, float value WHERE) const {
        float* to = at(row, column, 1 HERE);
        WRITES(to, 1);
        *to = value;
    }
    __device__ __forceinline__ float one(int row, int column WHERE) const {
        const float* from = at(row, column, 1 HERE);
        READS(from, 1);
        return *from;
    }
    __device__ __forceinline__ float2 two(int row, int column WHERE) const {
        const float* from = at(row, column, 2 HERE);
        READS(from, 2);
        return *reinterpret_cast<const float2*>(from);
    }
    __device__ __forceinline__ float4 four(int row, int column WHERE) const {
        const float* from = at(row, column, 4 HERE);
        READS(from, 4);
        return *reinterpret_cast<const float4*>(from);
    }
};

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// s += rows @ keys.T, of a slice that begins at these columns: a thread has rows group, group + GROUPS ... and keys lane,
// lane + LANES ...
template <int GROUPS, int LANES, int SLICE, int ROWS, int KEYS, class RowTile, class KeyTile>
__device__ __forceinline__ void multiply(float (&s)[ROWS][KEYS], const RowTile& rows, int row_column, const KeyTile& keys,
                                         int key_column, int group, int lane WHERE) {
#pragma unroll
    for (int c = 0; c < SLICE; c += 4) {
        float4 key_part[KEYS];
#pragma unroll
        for (int j = 0; j < KEYS; j++) key_part[j] = keys.four(lane + j * LANES, key_column + c HERE);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float4 row_part = rows.four(group + i * GROUPS, row_column + c HERE);
#pragma unroll
            for (int j = 0; j < KEYS; j++) s[i][j] += dot(row_part, key_part[j]);
        }
    }
}

// sums += weights @ rows, of a slice: a thread has sums group, group + GROUPS ... and of each two columns.
template <int GROUPS, int COUNT, int SUMS, class WeightTile, class RowTile>
__device__ __forceinline__ void add_weighted(float (&sums)[SUMS][2], const WeightTile& weights, const RowTile& rows, int group,
                                             int lane WHERE) {
#pragma unroll 2
    for (int row = 0; row < COUNT; row += 4) {
        float2 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = rows.two(row + j, 2 * lane HERE);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const float4 w = weights.four(group + i * GROUPS, row HERE);
            sums[i][0] += w.x * x[0].x + w.y * x[1].x + w.z * x[2].x + w.w * x[3].x;
            sums[i][1] += w.x * x[0].y + w.y * x[1].y + w.z * x[2].y + w.w * x[3].y;
        }
    }
}

// Two columns of a row, those there are; or what rounding takes from them.
template <bool REMAINDER = false, class Stored>
__device__ __forceinline__ void store_two(Stored* row, const float (&values)[2], int column, int columns, float factor) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const float x = values[e] * factor;
        const Stored rounded = narrow<Stored>(x);
        if (column + e < columns) row[column + e] = REMAINDER ? narrow<Stored>(lost(x, rounded)) : rounded;
    }
}

// All threads together: rows and columns of global memory times a factor, 0 where there are none.
template <int THREADS, class Stored, int ROWS, int COLUMNS>
__device__ __forceinline__ void fill(const Tile<ROWS, COLUMNS>& tile, const Stored* from, int64 step, int rows,
                                     int columns, float factor WHERE) {
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const bool inside = row < rows && column < columns;
        tile.set(row, column, inside ? widen(from[row * step + column]) * factor : 0.0f HERE);
    }
}

// What rows or distances have, as sums of the cells that they read: a warp has a cell of one head, and adds up in double
// precision what its readers have.
#include "device.h"

struct Gathering {  // what the kernel is told, field by field as in ../structs.py
    const float* sums;  // (heads, readers), of all batch indices
    double* cells;  // (heads, n_cells)
    const int* order;  // readers, one cell's after another's
    const int* begins;  // where each cell's begin, and the last one's end
    int heads, n_readers, n_cells;
};

constexpr int WARP = 32;

extern "C" __global__ void attention(const __grid_constant__ Gathering told) {
    const int cells_of_block = blockDim.x / WARP, lane = threadIdx.x % WARP;
    const long long number = (long long)(blockIdx.x) * cells_of_block + threadIdx.x / WARP;
    const int head = int(number / told.n_cells), cell = int(number % told.n_cells);
    if (head >= told.heads) return;
    const float* sums = told.sums + (long long)(head) * told.n_readers;
    double total = 0;
    for (int i = told.begins[cell] + lane; i < told.begins[cell + 1]; i += WARP) total += sums[told.order[i]];
#pragma unroll
    for (int apart = WARP / 2; apart > 0; apart /= 2) total += __shfl_xor_sync(~0u, total, apart);
    if (lane == 0) told.cells[number] = total;
}

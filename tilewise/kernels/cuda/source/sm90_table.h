// Tiles of an array of which a score reads the cell of its query and its key: they come along with tiles of keys.
#pragma once

// Of all queries of a tile, in parts of 128 bytes a row.
constexpr int TABLE_COLUMNS = ROW_BYTES / sizeof(variant::TableCell), TABLE_PARTS = ceil_div(TILE_K, TABLE_COLUMNS),
              TABLE_BYTES = TABLE_PARTS * TILE_Q * ROW_BYTES;

// A thread's two rows of the table's tile, swizzled as the copy engine does: chunks of 16 bytes change places by row.
struct TableRows {
    const unsigned char* first;  // the tile
    int row, lane;

    // Cells of columns n * 8 + lane % 4 * 2 and the next, of the row or of that 8 below.
    __device__ __forceinline__ void read_two(int n, int half, float& x, float& y) const {
        struct alignas(2 * sizeof(variant::TableCell)) Two {
            variant::TableCell x, y;
        };
        const int byte = (n * 8 + lane % 4 * 2) * sizeof(variant::TableCell), column = byte % ROW_BYTES;
        const int chunk = (column / 16) ^ row % 8;
        const unsigned char* const at = first + byte / ROW_BYTES * (TILE_Q * ROW_BYTES) + (row + half * 8) * ROW_BYTES;
        const Two two = *reinterpret_cast<const Two*>(at + chunk * 16 + column % 16);
        x = widen(two.x);
        y = widen(two.y);
    }
};

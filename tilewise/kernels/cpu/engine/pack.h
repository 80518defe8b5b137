// Operands of the micro-kernel in the order it reads them: widened, scaled, padded with zeros.
#pragma once
#include "simd.h"

namespace {

#if defined(__AVX2__)
// An 8 x 8 block of floats, turned.
INLINE void turn_block(const float* from, int64_t ld, float* to, int64_t ld_to) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(from + i * ld);
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * ld_to, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * ld_to, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

// A 4 x 4 block.
INLINE void turn_small_block(const float* from, int64_t ld, float* to, int64_t ld_to) {
    __m128 r[4];
    for (int i = 0; i < 4; i++) r[i] = _mm_loadu_ps(from + i * ld);
    _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
    for (int i = 0; i < 4; i++) _mm_storeu_ps(to + i * ld_to, r[i]);
}
#endif

// to[c][r] = from[r][c] for rows x cols numbers.
template <class T> void turn(const T* from, int64_t ld, int rows, int cols, T* to, int64_t ld_to) {
    int r = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(T) == 4) {
        for (; r + 8 <= rows; r += 8) {
            int c = 0;
            for (; c + 8 <= cols; c += 8) turn_block(from + r * ld + c, ld, to + c * ld_to + r, ld_to);
            for (; c < cols; c++)
                for (int i = r; i < r + 8; i++) to[c * ld_to + i] = from[i * ld + c];
        }
        for (; r + 4 <= rows; r += 4) {
            int c = 0;
            for (; c + 4 <= cols; c += 4) turn_small_block(from + r * ld + c, ld, to + c * ld_to + r, ld_to);
            for (; c < cols; c++)
                for (int i = r; i < r + 4; i++) to[c * ld_to + i] = from[i * ld + c];
        }
    }
#endif
    for (; r < rows; r++)
        for (int c = 0; c < cols; c++) to[c * ld_to + r] = from[r * ld + c];
}

// Rows (n, d) as panels of `width` rows, each panel (d, width); rows are missing at the end of the last panel.
// `rows` is room for width x d numbers.
template <class T, class Stored>
void pack_turned(const Stored* from, int64_t ld, int64_t n, int d, int width, T factor, T* to, T* rows) {
    for (int64_t begin = 0; begin < n; begin += width, to += int64_t(width) * d) {
        int have = int(smaller<int64_t>(width, n - begin));
        for (int r = 0; r < have; r++) widen_row(from + (begin + r) * ld, rows + int64_t(r) * d, d, factor);
        memset(rows + int64_t(have) * d, 0, size_t(width - have) * d * sizeof(T));
        turn(rows, d, width, d, to, width);
    }
}

// Rows (n, d) as panels of NR columns; a panel has `keys` rows of NR numbers, of which these are the first n.
template <class T, class Stored>
void pack_columns(const Stored* from, int64_t ld, int64_t n, int d, int64_t keys, T factor, T* to) {
    for (int c = 0; c < d; c += NR<T>, to += keys * NR<T>) {
        int have = smaller(NR<T>, d - c);
        for (int64_t r = 0; r < n; r++) {
            widen_row(from + r * ld + c, to + r * NR<T>, have, factor);
            for (int i = have; i < NR<T>; i++) to[r * NR<T> + i] = 0;
        }
    }
}

}  // namespace

// The softmax of a warpgroup's rows. A thread has two rows (g and g + 8) and, of each eight columns, two; four threads (a
// quad) have a whole row together. s[n * 4 + half * 2 + e] is row g + half * 8, column n * 8 + lane % 4 * 2 + e.
#pragma once

constexpr float LN_2 = 0.6931471805599453f;
constexpr bool SCORED = variant::HAS_SCORE || !RAW_SCORES;  // whether scores change before the softmax, in every tile

// Weights are safe up to here, and can be rescaled up to there: a weight of 2^x is off by a rounding of x. In float16 they
// must stay below 65504.
constexpr float SAFE_SUM = IsBFloat<Element>::value ? 0x1p31f : 0x1p14f, FINITE_SUM = 0x1p120f;
// Powers of 2 that a row's sum is brought below 1. In float16, whose small weights would lose digits, it stays above.
constexpr int ROOM_TO_GROW = IsBFloat<Element>::value ? 32 : -4;
// Where the maximum is looked for, a weight that is more than so much of its row's sum becomes 1, which is not rounded.
constexpr float HEAVY = 0.375f;
// A row's first keys under a mask may be few, and then the next tile's sums say little: so much more is let pass.
constexpr float LENIENCE = 16;
// How far narrowing one weight may turn out to its v or away from it, for good: a fifth of the largest rounding, of which a
// weight of half of its row has a quarter.
constexpr float MOST_TURNED = 0.2f * (IsBFloat<Element>::value ? 0x1p-9f : 0x1p-12f);
constexpr float FAR_BELOW = 0x1p-80f;
constexpr int FAR_LANES = 7;  // of a warp: scores of 64 times the usual size have as many, those of 32 times hardly ever

struct Places {  // the values of the variant that do not change from key to key
    variant::Head head;
    variant::Row rows[2];
};
__device__ __forceinline__ Places places_of(const Params& params, const Item& item, int first_row) {
    const variant::Head head = variant::head(params, item.work);
    const int query = item.work.first_query + first_row;
    return {head, {variant::row(params, head, query), variant::row(params, head, query + 8)}};
}

__device__ __forceinline__ float sum_of_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float largest_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ int exponent_of(float x) { return int(__float_as_uint(x) >> 23) - 127; }
__device__ __forceinline__ float power_of_2(int exponent) { return __uint_as_float(unsigned(127 + exponent) << 23); }

template <int KEYS> struct Softmax {
    float s[KEYS / 2];
    float row_max[2];  // as exponents of 2
    float row_sum[2];  // of the thread's own columns; the quad's are added up at the end
    float narrowing[2];  // of the heaviest weights in it, a thread's share
    float limit[2];  // of a thread's sum of a tile, up to which nobody looks at its weights: about what the row had

    // 3 score, 4 mask. What a score reads is read for several groups of columns at once, as each takes its time.
    static constexpr int BATCH = 4;
    template <bool MASKED>
    __device__ __forceinline__ void score(const Params& params, const Places& places, int tile, int lane,
                                          const TableRows& table) {
        const int first_key = tile * KEYS + lane % 4 * 2;  // so that columns below are constants
        const variant::RowInTile rows[2] = {variant::seen_from(places.rows[0], first_key),
                                            variant::seen_from(places.rows[1], first_key)};
#pragma unroll
        for (int first = 0; first < KEYS / 8; first += BATCH) {
            variant::Key keys[BATCH][2];
            variant::Near near[BATCH][2][2];
#pragma unroll
            for (int i = 0; i < BATCH && first + i < KEYS / 8; i++) {
#pragma unroll
                for (int e = 0; e < 2; e++)
                    keys[i][e] = variant::key(params, places.head, first_key, (first + i) * 8 + e);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    variant::near_cells(rows[half], keys[i][0], keys[i][1], near[i][half]);
                    if constexpr (USES_TABLE) {
                        float cells[2];
                        table.read_two(first + i, half, cells[0], cells[1]);
                        variant::set_table_cell(near[i][half][0], cells[0]);
                        variant::set_table_cell(near[i][half][1], cells[1]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4 * BATCH && first + i / 4 < KEYS / 8; i++) {
                const int n = i / 4, half = i / 2 % 2, e = i % 2;
                float& x = s[first * 4 + i];
                const auto& at = near[n][half][e];
                if (SCORED) x = variant::score(params, places.head, rows[half], keys[n][e], at, x * params.scale);
                if (MASKED && !variant::mask(params, places.head, rows[half], keys[n][e], at)) x = -INFINITY;
            }
        }
    }

    // 5 row_max, rescale, p, row_sum
    __device__ __forceinline__ void begin(const Launch& launch, bool masked) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float here = largest(half);
            row_max[half] = here * launch.binary_scale;
            narrowing[half] = narrowing_of(launch, here, row_max[half]) / 4;
            row_sum[half] = 0;
        }
        exponentiate(launch, row_sum);
#pragma unroll
        for (int half = 0; half < 2; half++)  // by a quarter of the row, and its heaviest weight: nobody is asked
            limit[half] = fmaxf(4 * row_sum[half], 1.0f) * (masked ? LENIENCE : 1.0f);
    }
    // Whether a row's first scores lie so far apart that speculation would fail again and again: a thread's own columns are
    // as good as nothing beside the largest. (None at all may be masked ones.)
    __device__ __forceinline__ bool far_apart(int rows_left) const {
        const bool first = 0 < row_sum[0] && row_sum[0] < FAR_BELOW, second = 0 < row_sum[1] && row_sum[1] < FAR_BELOW;
        return __popc(__ballot_sync(~0u, (first && rows_left > 0) || (second && rows_left > 8))) >= FAR_LANES;
    }
    // True if acc must be rescaled. A row may be above its row_max where that is not heavy.
    __device__ __forceinline__ bool exact(const Launch& launch, float (&rescale)[2]) {
        const float here[2] = {largest(0), largest(1)};
        bool needed = false;
#pragma unroll
        for (int half = 0; half < 2; half++) {  // each row by itself: its bits must not depend on its neighbours
            const float new_max = here[half] * launch.binary_scale;
            const float before = fminf(sum_of_quad(row_sum[half]), SAFE_SUM), weight = exp2_approximate(new_max - row_max[half]);
            const bool rises = new_max > row_max[half] && (1 - HEAVY) * weight > HEAVY * before;
            const float larger = rises ? new_max : row_max[half];
            rescale[half] = rises ? exp2_approximate(row_max[half] - larger) : 1.0f;
            row_max[half] = larger;
            if (rises) narrowing[half] = narrowing[half] * rescale[half] + narrowing_of(launch, here[half], larger) / 4;
            row_sum[half] *= rescale[half];
            if (rises) limit[half] = fmaxf(limit[half] * rescale[half], 1.0f);
            needed |= rises;
        }
        exponentiate(launch, row_sum);
        return __any_sync(~0u, needed);
    }
    __device__ __forceinline__ float largest(int half) const {
        float even = s[half * 2], odd = s[half * 2 + 1];
#pragma unroll
        for (int n = 1; n < KEYS / 8; n++) {
            even = fmaxf(even, s[n * 4 + half * 2]);
            odd = fmaxf(odd, s[n * 4 + half * 2 + 1]);
        }
        return largest_of_quad(fmaxf(even, odd));
    }
    // By how much the weight of the largest score changes before it is multiplied. It is 1, unless scores are so large that
    // row_max was rounded by much. Of a row whose weight is all on one key the result is that key's v, to the last bit:
    // gradients are differences of such numbers.
    __device__ __forceinline__ static float narrowing_of(const Launch& launch, float largest, float row_max) {
        const float heaviest = exp2_approximate(fmaf(finite(largest), launch.binary_scale, -finite(row_max)));
        return widen(narrow<Element>(heaviest)) - heaviest;
    }
    __device__ __forceinline__ void exponentiate(const Launch& launch, float (&sums)[2]) {
        const float scale = launch.binary_scale, shift[2] = {-finite(row_max[0]), -finite(row_max[1])};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            s[i] = exp2_approximate(fmaf(s[i], scale, shift[i / 2 % 2]));
            sums[i / 2 % 2] += s[i];
        }
    }

    // p with the row_max of the tiles before: no maximum, no exchange between threads. A row that had no key yet comes to
    // infinity. The first part is done while products are under way, the rest after they were waited for.
    __device__ __forceinline__ void speculate_first(const Launch& launch, float (&sums)[2]) {
        sums[0] = sums[1] = 0;
        speculate<0, KEYS / 16 * EIGHTHS_BEFORE_WAIT>(launch, sums);
    }
    __device__ __forceinline__ void speculate_rest(const Launch& launch, float (&sums)[2]) {
        speculate<KEYS / 16 * EIGHTHS_BEFORE_WAIT, KEYS / 2>(launch, sums);
    }
    template <int FIRST, int LAST> __device__ __forceinline__ void speculate(const Launch& launch, float (&sums)[2]) {
        const float scale = launch.binary_scale, shift[2] = {-row_max[0], -row_max[1]};
#pragma unroll
        for (int i = FIRST; i < LAST; i++) {
            s[i] = exp2_approximate(fmaf(s[i], scale, shift[i / 2 % 2]));
            sums[i / 2 % 2] += s[i];
        }
    }
    // Whether no row of the warp needs a closer look: those beyond the last query may be anything.
    __device__ __forceinline__ bool is_ordinary(const float (&sums)[2], int rows_left) const {
        return all_below(limit, sums, rows_left);
    }
    __device__ __forceinline__ static bool is_safe(const float (&sums)[2], int rows_left) {
        return all_below({SAFE_SUM, SAFE_SUM}, sums, rows_left);
    }
    __device__ __forceinline__ static bool is_finite(const float (&sums)[2], int rows_left) {
        return all_below({FINITE_SUM, FINITE_SUM}, sums, rows_left);
    }
    __device__ __forceinline__ static bool all_below(const float (&limits)[2], const float (&sums)[2], int rows_left) {
        const bool first = !(sums[0] <= limits[0]), second = !(sums[1] <= limits[1]);
        return !__any_sync(~0u, (first && rows_left > 0) || (second && rows_left > 8));
    }
    // The closer look: of a row that few weights make up acc has them as they are narrowed, and so must the sum that it is
    // divided by. The heaviest of a thread's own are enough. True if acc must be rescaled.
    __device__ __forceinline__ bool correct(const float (&sums)[2], float (&rescale)[2]) {
        float turning[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float heaviest = largest_weight(half), gained = widen(narrow<Element>(heaviest)) - heaviest;
            narrowing[half] += gained;
            row_sum[half] += sums[half];
            const float total = sum_of_quad(row_sum[half]);
            limit[half] = fminf(total, SAFE_SUM);
            turning[half] = fabsf(gained) * (total - heaviest) > MOST_TURNED * total * total ? heaviest : 0.0f;
        }
        if (!__any_sync(~0u, turning[0] > 0 || turning[1] > 0)) return false;
#pragma unroll
        for (int half = 0; half < 2; half++) follow(half, largest_of_quad(turning[half]), sums[half], rescale[half]);
        return true;
    }
    // A new weight of about half of its row: what the row had is multiplied as narrowing multiplied the weight, so that their
    // ratio is right. The tile's other weights stay, off by no more than their own narrowing; later ones follow row_max.
    __device__ __forceinline__ void follow(int half, float heaviest, float sum, float& rescale) {
        const float narrowed = widen(narrow<Element>(heaviest)) * reciprocal_approximate(heaviest), before = row_max[half];
        row_max[half] -= heaviest > 0 ? log2_approximate(narrowed) : 0.0f;
        const float factor = exp2_approximate(before - row_max[half]);
        rescale *= factor;
        row_sum[half] *= factor;
        narrowing[half] = narrowing[half] * factor + sum * (1 - factor);
    }
    // Of a thread's own.
    __device__ __forceinline__ float largest_weight(int half) const {
        float found[2] = {0, 0};  // by turns: neither waits for the other
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            found[n % 2] = hw::largest_of_three(found[n % 2], s[n * 4 + half * 2], s[n * 4 + half * 2 + 1]);
        return fmaxf(found[0], found[1]);
    }
    // Weights too large, but numbers: a power of 2 brings them down again, further than needed, as they may go on growing.
    __device__ __forceinline__ void tame(float (&sums)[2], float (&rescale)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int exponent = exponent_of(sum_of_quad(sums[half]));
            const int lowered = exponent > 0 ? max(min(exponent + ROOM_TO_GROW, 126), 0) : 0;
            rescale[half] = power_of_2(-lowered);
            row_max[half] += float(lowered);
            sums[half] *= rescale[half];
            row_sum[half] *= rescale[half];
            narrowing[half] *= rescale[half];
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] *= rescale[i / 2 % 2];
    }
};

// As in softmax.h, of a row_max that is an exponent of 2. It may be far from what the sum has grown to, so the sum's own
// power joins it first: lse must not be the difference of two large numbers. Nor may a large one be rounded on the way: the
// gradients' weights are powers of e of its difference to a score.
__device__ __forceinline__ Finished finished(const Launch& launch, float row_max, float row_sum, float narrowing, float sink) {
    if (row_sum == 0) return {0.0f, sink};
    const float exponent = float(exponent_of(row_sum)), whole = row_max + exponent, joined = whole - row_max;
    const float rest = (row_max - (whole - joined)) + (exponent - joined);  // what that sum was rounded by
    const float fraction = rest + log2_approximate(row_sum * power_of_2(-exponent_of(row_sum)));
    const float lse = fmaf(whole, launch.natural, fmaf(whole, launch.natural_rest, fraction * LN_2));
    const float multiplied = row_sum + narrowing;  // 0 or infinite, where row_max was rounded by more than Element holds
    const float weight = reciprocal_approximate(0 < multiplied && multiplied < INFINITY ? multiplied : row_sum);
    if (!HAS_SINKS || sink == -INFINITY) return {weight, lse};
    const float larger = fmaxf(lse, sink), joint = larger + log1pf(expf(fminf(lse, sink) - larger));
    return {expf(lse - joint) * weight, joint};
}

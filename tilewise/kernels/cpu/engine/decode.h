// One query a head: nothing is packed, keys and values are read once, where they are, for all query heads that share
// them. Memory is the limit here, and the processor fetches ahead best where rows are read whole, one after the other.
#pragma once
#include "forward.h"

namespace {

constexpr int DECODE_KEYS = 256;  // whose weights are computed at a time
constexpr int BATCH_KEYS = 32;    // whose rows stay in L1 while all heads of the group read them

// Sums of VL vectors, as one vector.
template <class T> INLINE void sums_of(const Vec<T>* v, T* to) {
    for (int i = 0; i < VL<T>; i++) to[i] = sum_of(v[i]);
}
#if defined(__AVX2__)
INLINE __m256 sums_of_8(const __m256* v) {
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
template <> INLINE void sums_of<float>(const Vec<float>* v, float* to) {
#if defined(__AVX512F__)
    __m256 half[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        __m512 x = (__m512)v[i];
        half[i] = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    }
    _mm256_storeu_ps(to, sums_of_8(half));
    _mm256_storeu_ps(to + 8, sums_of_8(half + 8));
#else
    __m256 x[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) x[i] = (__m256)v[i];
    _mm256_storeu_ps(to, sums_of_8(x));
#endif
}
#endif

// s[g][j] = q[g] . k[j] for G heads and n keys; d is a multiple of VL, and D where the compiler is to know it.
template <int G, int D, class T, class Stored>
void dots(const T* q, int any_d, const Stored* k, int64_t ld, int n, T* s, int64_t ld_s) {
    constexpr int KEYS = VL<T> / G;
    // One row after the other is how memory is read fastest; with many heads it is the loads of q that count.
    constexpr int AT_ONCE = G >= 8 && KEYS >= 2 ? 2 : 1;
    const int d = D > 0 ? D : any_d;
    for (int j = 0; j < n; j += KEYS) {
        Vec<T> sums[VL<T>];
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i += AT_ONCE) {
            const Stored* rows[AT_ONCE];  // beyond the last key: its own again, and not kept
            for (int r = 0; r < AT_ONCE; r++) rows[r] = k + smaller(j + i + r, n - 1) * ld;
            Vec<T> sum[AT_ONCE][G] = {};
#pragma GCC unroll 8
            for (int x = 0; x < d; x += VL<T>)
#pragma GCC unroll 2
                for (int r = 0; r < AT_ONCE; r++) {
                    Vec<T> key = load_wide(rows[r] + x);
#pragma GCC unroll 16
                    for (int g = 0; g < G; g++) sum[r][g] += load(q + g * d + x) * key;
                }
#pragma GCC unroll 2
            for (int r = 0; r < AT_ONCE; r++)
#pragma GCC unroll 16
                for (int g = 0; g < G; g++) sums[g * KEYS + i + r] = sum[r][g];
        }
        T done[VL<T>];
        sums_of<T>(sums, done);
        if (j + KEYS <= n)
            for (int g = 0; g < G; g++) memcpy(s + g * ld_s + j, done + g * KEYS, KEYS * sizeof(T));
        else
            for (int g = 0; g < G; g++) memcpy(s + g * ld_s + j, done + g * KEYS, size_t(n - j) * sizeof(T));
    }
}

// acc[g] = acc[g] * rescale[g] + sum of p[g][j] * v[j], for G heads and C vectors of columns.
template <int G, int C, class T, class Stored>
void weigh(const T* p, int64_t ld_p, const Stored* v, int64_t ld, int n, int d_v, T* acc, const T* rescale) {
    Vec<T> sum[G][C] = {};
    for (int j = 0; j < n; j++, v += ld) {
        Vec<T> value[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) value[c] = load_wide(v + c * VL<T>);
#pragma GCC unroll 16
        for (int g = 0; g < G; g++)
#pragma GCC unroll 16
            for (int c = 0; c < C; c++) sum[g][c] += p[g * ld_p + j] * value[c];
    }
#pragma GCC unroll 16
    for (int g = 0; g < G; g++)
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) {
            T* at = acc + g * d_v + c * VL<T>;
            store(at, load(at) * rescale[g] + sum[g][c]);
        }
}

// -- one split of the keys of one key head ----------------------------------------------------------------------------

// What a split leaves for each of its query heads: row_max, row_sum, acc.
template <class T> int64_t partial_size(const Call& call) { return 2 + round_up(call.d_v, VL<T>); }

template <class T> class DecodeSplit {
   public:
    DecodeSplit(const Call& call, Scratch& scratch)
        : call_(call), group_(group_of(call)), d_(int(round_up(call.d, VL<T>))),
          d_v_(int(round_up(call.d_v, VL<T>))), mask_(call.mask, 1, DECODE_KEYS, scratch),
          score_(call.score, 1, DECODE_KEYS, scratch) {
        q_ = scratch.take<T>(group_ * d_);
        acc_ = scratch.take<T>(group_ * d_v_);
        s_ = scratch.take<T>(group_ * DECODE_KEYS);
        row_max_ = scratch.take<T>(group_);
        row_sum_ = scratch.take<T>(group_);
        rescale_ = scratch.take<T>(group_);
        rows_ = scratch.take<T>(int64_t(DECODE_KEYS) * larger(d_, d_v_));
    }

    template <class Stored> void run(const Packed& head, int64_t begin, int64_t end, T* partials) {
        head_ = &head;
        const Sequence& seq = *head.sequence;
        // 1 load q
        for (int64_t g = 0; g < group_; g++) {
            for (int64_t i = call_.d; i < d_; i++) q_[g * d_ + i] = 0;
            widen_row(row_of<Stored>(call_.q, head.b, head.hk * group_ + g, seq.q_begin), q_ + g * d_, int(call_.d), T(call_.scale));
            row_max_[g] = -INF<T>;
            row_sum_[g] = 0;
        }
        memset(acc_, 0, size_t(group_ * d_v_) * sizeof(T));
        // for each kv tile of the schedule, head by head only where their plans differ:
        if (seq.by_query.head == 0) {
            visit<Stored>(0, group_, begin, end);
        } else {
            for (int64_t g = 0; g < group_; g++) visit<Stored>(g, 1, begin, end);
        }
        for (int64_t g = 0; g < group_; g++, partials += partial_size<T>(call_)) {
            partials[0] = row_max_[g];
            partials[1] = row_sum_[g];
            memcpy(partials + 2, acc_ + g * d_v_, size_t(d_v_) * sizeof(T));
        }
    }

   private:
    template <class Stored> void visit(int64_t g, int64_t heads, int64_t begin, int64_t end) {
        const Runs& runs = head_->sequence->by_query;
        const int64_t* offsets = runs.offsets + head_->b * runs.batch + (head_->hk * group_ + g) * runs.head;
        for (int64_t i = offsets[0]; i < offsets[1]; i++) {
            int64_t from = larger(begin, runs.table[i][0] * call_.tile_k);
            int64_t to = smaller(end, runs.table[i][1] * call_.tile_k);
            bool masked = runs.table[i][2] == PARTIAL && !mask_.empty();
            for (; from < to; from += DECODE_KEYS)
                chunk<Stored>(g, heads, from, int(smaller<int64_t>(DECODE_KEYS, to - from)), masked);
        }
    }

    template <class Stored> void chunk(int64_t g, int64_t heads, int64_t begin, int n, bool masked) {
        const Stored* k = row_of<Stored>(call_.k, head_->b, head_->hk, head_->sequence->k_begin + begin);
        const Stored* v = row_of<Stored>(call_.v, head_->b, head_->hk, head_->sequence->k_begin + begin);
        // 2 s = q @ k.T
        if (d_ == call_.d) {
            all_dots(g, heads, k, call_.k.row, n);
        } else {  // a row that ends within a vector is copied, and filled up with zeros
            widen_rows(k, call_.k.row, n, int(call_.d), d_, rows_);
            all_dots(g, heads, rows_, int64_t(d_), n);
        }
        for (int64_t i = g; i < g + heads; i++) softmax(i, begin, n, masked);
        // 6 acc = acc * rescale + p @ v
        if (d_v_ == call_.d_v) {
            weigh_all(g, heads, v, call_.v.row, n);
        } else {
            widen_rows(v, call_.v.row, n, int(call_.d_v), d_v_, rows_);
            weigh_all(g, heads, rows_, int64_t(d_v_), n);
        }
    }

    template <class Stored> static void widen_rows(const Stored* from, int64_t ld, int n, int d, int padded, T* to) {
        for (int j = 0; j < n; j++) {
            widen_row(from + j * ld, to + j * padded, d, T(1));
            for (int i = d; i < padded; i++) to[j * padded + i] = 0;
        }
    }

    // The heads of a group, as many at a time as there are sums in registers for.
    template <class Stored> void all_dots(int64_t first, int64_t heads, const Stored* k, int64_t ld, int n) {
        for (int j = 0; j < n; j += BATCH_KEYS, k += BATCH_KEYS * ld) {
            const int keys = smaller(BATCH_KEYS, n - j);
            int64_t g = first, end = first + heads;
            if constexpr (VL<T> >= 8)
                for (; g + 8 <= end; g += 8) dots_of<8>(g, j, k, ld, keys);
            if constexpr (VL<T> >= 4)
                for (; g + 4 <= end; g += 4) dots_of<4>(g, j, k, ld, keys);
            for (; g + 2 <= end; g += 2) dots_of<2>(g, j, k, ld, keys);
            for (; g < end; g++) dots_of<1>(g, j, k, ld, keys);
        }
    }
    template <int G, class Stored> void dots_of(int64_t g, int j, const Stored* k, int64_t ld, int keys) {
        T *q = q_ + g * d_, *s = s_ + g * DECODE_KEYS + j;
        if (d_ == 64) dots<G, 64>(q, d_, k, ld, keys, s, DECODE_KEYS);
        else if (d_ == 128) dots<G, 128>(q, d_, k, ld, keys, s, DECODE_KEYS);
        else dots<G, 0>(q, d_, k, ld, keys, s, DECODE_KEYS);
    }

    template <class Stored> void weigh_all(int64_t first, int64_t heads, const Stored* v, int64_t ld, int n) {
        for (int j = 0; j < n; j += BATCH_KEYS, v += BATCH_KEYS * ld) {
            const int keys = smaller(BATCH_KEYS, n - j);
            int64_t g = first;
            for (; g + 2 <= first + heads; g += 2) weigh_of<2>(g, j, v, ld, keys);
            for (; g < first + heads; g++) weigh_of<1>(g, j, v, ld, keys);
            for (int64_t i = first; i < first + heads; i++) rescale_[i] = 1;
        }
    }
    template <int G, class Stored> void weigh_of(int64_t g, int j, const Stored* v, int64_t ld, int keys) {
        constexpr int C = VECTOR_BYTES == 64 ? 8 : 4;  // two heads' sums of whole rows, or of what the registers hold
        const T* p = s_ + g * DECODE_KEYS + j;
        int c = 0;
        for (; c + C * VL<T> <= d_v_; c += C * VL<T>)
            weigh<G, C>(p, DECODE_KEYS, v + c, ld, keys, d_v_, acc_ + g * d_v_ + c, rescale_ + g);
        for (; c < d_v_; c += VL<T>)
            weigh<G, 1>(p, DECODE_KEYS, v + c, ld, keys, d_v_, acc_ + g * d_v_ + c, rescale_ + g);
    }

    void softmax(int64_t g, int64_t begin, int n, bool masked) {
        T* s = s_ + g * DECODE_KEYS;
        QueryHead head = {head_->sequence, head_->b, head_->hk * group_ + g, head_->hk};
        // 3 score
        if (!score_.empty()) {
            enter(score_, head, begin, n, s);
            score_.take(call_.score_at, 0, 0, n, s);
        }
        // 4 mask (PARTIAL tiles only)
        if (masked) {
            enter(mask_, head, begin, n, nullptr);
            const Int<T>* holds = mask_.template at<Int<T>>(call_.mask_at, 0, 0);
            bool varies = mask_.varies(call_.mask_at);
            for (int j = 0; j < n; j++) s[j] = holds[varies ? j : 0] ? s[j] : -INF<T>;
        }
        // 5 row_max, rescale, p, row_sum
        for (int j = n; j < round_up(n, VL<T>); j++) s[j] = -INF<T>;
        Vec<T> largest = splat(-INF<T>), sum{};
        for (int j = 0; j < n; j += VL<T>) largest = vmax(largest, load(s + j));
        T now = larger(row_max_[g], max_of(largest)), shift = now == -INF<T> ? T(0) : now;
        for (int j = 0; j < n; j += VL<T>) {
            Vec<T> p = exp_of(load(s + j) - shift);
            store(s + j, p);
            sum += p;
        }
        rescale_[g] = exp_of(splat(row_max_[g] - shift))[0];
        row_sum_[g] = row_sum_[g] * rescale_[g] + sum_of(sum);
        row_max_[g] = now;
    }
    static void enter(Interpreter<T>& interpreter, const QueryHead& head, int64_t begin, int n, const T* s) {
        interpreter.enter(head);
        interpreter.enter_queries(0, 1);
        interpreter.enter_keys(begin, n);
        interpreter.enter_scores(0, 0, n, s);
    }

    const Call& call_;
    const int64_t group_;
    const int d_, d_v_;
    Interpreter<T> mask_, score_;
    T *q_, *acc_, *s_, *row_max_, *row_sum_, *rescale_, *rows_;
    const Packed* head_ = nullptr;
};

template <class T> size_t decode_scratch(const Call& call) {
    Scratch count(nullptr);
    DecodeSplit<T> split(call, count);
    return count.used();
}
template <class T> size_t decode_partial_bytes(const Call& call) {
    return sizeof(T) * size_t(group_of(call)) * size_t(partial_size<T>(call));
}
template <class T, class Stored>
void decode_split(const Call& call, const Packed& head, int64_t begin, int64_t end, void* partials, void* scratch) {
    Scratch room(scratch);
    DecodeSplit<T>(call, room).template run<Stored>(head, begin, end, static_cast<T*>(partials));
}

// The splits of one key head, merged in their order.
template <class T, class Stored>
void decode_merge(const Call& call, const Packed& head, int64_t splits, void* partials) {
    int64_t group = group_of(call), size = partial_size<T>(call);
    for (int64_t g = 0; g < group; g++) {
        const T* first = static_cast<T*>(partials) + g * size;
        T row_max = -INF<T>, row_sum = 0;
        for (int64_t s = 0; s < splits; s++) row_max = larger(row_max, first[s * group * size]);
        T shift = row_max == -INF<T> ? T(0) : row_max;
        T* acc = static_cast<T*>(partials) + g * size + 2;  // the first split's becomes the sum of all
        for (int64_t s = 0; s < splits; s++) {
            T* part = static_cast<T*>(partials) + (s * group + g) * size;
            T rescale = scalar_exp(part[0] - shift);
            row_sum += part[1] * rescale;
            for (int64_t c = 0; c < call.d_v; c++) acc[c] = (s == 0 ? T(0) : acc[c]) + part[2 + c] * rescale;
        }
        int64_t h = head.hk * group + g, row = head.sequence->q_begin;
        // 7 finish: acc / row_sum, lse
        finish_row<T, Stored>(call, head.b, h, row, row_max, row_sum, acc);
    }
}

}  // namespace

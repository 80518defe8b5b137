// One query a head: nothing is packed, keys and values come from memory once, from where they are, for all query heads
// that share them (and a plan). Memory is the limit here, and the processor fetches ahead best where whole rows are
// read one after the other, a few of the keys and then as many of the values: each stream is fetched on while the other
// is computed with.
#pragma once
#include "forward.h"

namespace {

constexpr int MOST_FEW = 4;       // heads that are computed with at a time
constexpr int BATCH_KEYS = 16;    // read at a time by few heads
constexpr int MANY_KEYS = 64;     // by many, which have more to do with each key than to wait for it
constexpr int BATCHES_AHEAD = 2;  // are fetched where the processor has to be told to
constexpr int DECODE_KEYS = 256;  // at a time where a program runs on their scores, for a program costs much to start

// to[i] = the sum of v[i], for VL vectors.
template <class T> INLINE void sums_of(const Vec<T>* v, T* to) {
    for (int i = 0; i < VL<T>; i++) to[i] = sum_of(v[i]);
}
#if defined(__AVX512F__)
INLINE __m512 add_pairs(__m512 a, __m512 b) {  // in each quarter: a, b, a, b
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
INLINE __m512 add_fours(__m512 ab, __m512 cd) {  // in each quarter: a, b, c, d
    __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
INLINE __m512 add_halves(__m512 a, __m512 b) {  // two quarters of a, two of b
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
template <> INLINE void sums_of<float>(const Vec<float>* v, float* to) {
    __m512 four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        four[i] = add_fours(add_pairs((__m512)v[4 * i], (__m512)v[4 * i + 1]),
                            add_pairs((__m512)v[4 * i + 2], (__m512)v[4 * i + 3]));
    __m512 low = add_halves(four[0], four[1]), high = add_halves(four[2], four[3]);
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd)));
}
#elif defined(__AVX2__)
template <> INLINE void sums_of<float>(const Vec<float>* v, float* to) {
    __m256 x[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) x[i] = (__m256)v[i];
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    _mm256_storeu_ps(to, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
}
#endif

// G heads of a group, from head `first` of it. Their scores come in vectors of KEYS keys, head by head: the sums of the
// products fill one such vector, and maxima, exponentials and sums of all G heads are taken lane by lane.
template <int G, class T> struct Few {
    static constexpr int KEYS = VL<T> / G;
    int64_t first;
};
// Where key j of the first of G heads stands among such vectors; of head g, g * KEYS further on.
template <int G, class T> INLINE int lane_of(int j) { return j + (j & -Few<G, T>::KEYS) * (G - 1); }

// What is fetched into the second cache while a row is computed with: the row `further` on, its columns from `from` to
// `to`. Many heads keep the processor busy for so long that it has to be told to; each few of them fetch their part.
struct Ahead {
    int64_t further, from, to;

    // row: at column `begin` of those that are computed with, up to `end`.
    template <class Stored> INLINE void fetch(const Stored* row, int64_t begin, int64_t end) const {
        constexpr int LINE = 64 / int(sizeof(Stored));
        for (int64_t c = round_up(larger(from, begin), LINE); c < smaller(to, end); c += LINE)
            __builtin_prefetch(row + further + c - begin, 0, 2);
    }
};

// One vector of such scores, q[g] . k[i]; d is a multiple of VL.
template <int G, class T, class Stored>
INLINE void few_dots(const T* q, int d, const Stored* const* rows, const Ahead& ahead, T* s) {
    constexpr int KEYS = Few<G, T>::KEYS;
    Vec<T> sums[VL<T>];
#pragma GCC unroll 16
    for (int i = 0; i < KEYS; i++) {
        if (ahead.further > 0) ahead.fetch(rows[i], 0, d);
        Vec<T> sum[G] = {};
#pragma GCC unroll 8
        for (int x = 0; x < d; x += VL<T>) {
            Vec<T> key = load_wide(rows[i] + x);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) sum[g] += load(q + g * d + x) * key;
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) sums[g * KEYS + i] = sum[g];
    }
    sums_of<T>(sums, s);
}

// All of them, for n keys; D is d where the compiler is to know it.
template <int G, int D, class T, class Stored>
void dots(const T* q, int any_d, const Stored* k, int64_t ld, int n, const Ahead& ahead, T* s) {
    constexpr int KEYS = Few<G, T>::KEYS;
    const int d = D > 0 ? D : any_d;
    const Stored* rows[KEYS];
    int j = 0;
    for (; j + KEYS <= n; j += KEYS, s += VL<T>) {
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++) rows[i] = k + (j + i) * ld;
        few_dots<G>(q, d, rows, ahead, s);
    }
    if (j == n) return;
    for (int i = 0; i < KEYS; i++) rows[i] = k + smaller(j + i, n - 1) * ld;
    few_dots<G>(q, d, rows, ahead, s);
    for (int i = n - j; i < KEYS; i++)  // beyond the last key
        for (int g = 0; g < G; g++) s[g * KEYS + i] = -INF<T>;
}

// acc[h] = acc[h] * rescale[h] + sum of p[h][j] * v[j], for H of G heads and C vectors of columns from column c0 on.
template <int G, int H, int C, class T, class Stored>
void weigh(const T* p, const Stored* v, int64_t ld, int n, int c0, int d_v, const Ahead& ahead, T* acc,
           const T* rescale) {
    constexpr int KEYS = Few<G, T>::KEYS;
    v += c0;
    acc += c0;
    Vec<T> sum[H][C] = {};
    for (int j = 0; j < n; j++, v += ld) {
        if (ahead.further > 0) ahead.fetch(v, c0, c0 + C * VL<T>);
        const T* weight = p + lane_of<G, T>(j);
        Vec<T> value[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) value[c] = load_wide(v + c * VL<T>);
#pragma GCC unroll 16
        for (int h = 0; h < H; h++)
#pragma GCC unroll 16
            for (int c = 0; c < C; c++) sum[h][c] += weight[h * KEYS] * value[c];
    }
#pragma GCC unroll 16
    for (int h = 0; h < H; h++)
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) {
            T* at = acc + h * d_v + c * VL<T>;
            store(at, load(at) * rescale[h] + sum[h][c]);
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
        row_max_ = scratch.take<T>(group_ * VL<T>);
        row_sum_ = scratch.take<T>(group_ * VL<T>);
        rescale_ = scratch.take<T>(group_);
        rows_ = scratch.take<T>(int64_t(DECODE_KEYS) * larger(d_, d_v_));
        row_ = scratch.take<T>(DECODE_KEYS);
    }

    template <class Stored> void run(const Packed& head, int64_t begin, int64_t end, T* partials) {
        head_ = &head;
        const Sequence& seq = *head.sequence;
        // 1 load q
        for (int64_t g = 0; g < group_; g++) {
            for (int64_t i = call_.d; i < d_; i++) q_[g * d_ + i] = 0;
            widen_row(row_of<Stored>(call_.q, head.b, head.hk * group_ + g, seq.q_begin), q_ + g * d_, int(call_.d),
                      T(call_.scale));
        }
        for (int64_t i = 0; i < group_ * VL<T>; i++) row_max_[i] = -INF<T>;
        memset(row_sum_, 0, size_t(group_ * VL<T>) * sizeof(T));
        memset(acc_, 0, size_t(group_ * d_v_) * sizeof(T));
        // for each kv tile of the schedule, head by head only where their plans differ:
        if (seq.by_query.head == 0) {
            visit<Stored>(0, group_, begin, end, partials);
        } else {
            for (int64_t g = 0; g < group_; g++) visit<Stored>(g, 1, begin, end, partials);
        }
    }

   private:
    // Some keys, for some heads of the group.
    struct Batch {
        int64_t g, heads, begin;
        int n;
        bool masked, last;  // last: nothing is left to fetch
    };

    template <class Stored> void visit(int64_t g, int64_t heads, int64_t begin, int64_t end, T* partials) {
        const Runs& runs = head_->sequence->by_query;
        const int64_t* offsets = runs.offsets + head_->b * runs.batch + (head_->hk * group_ + g) * runs.head;
        for (int64_t i = offsets[0]; i < offsets[1]; i++) {
            int64_t from = larger(begin, runs.table[i][0] * call_.tile_k);
            int64_t to = smaller(end, runs.table[i][1] * call_.tile_k);
            bool masked = runs.table[i][2] == PARTIAL && !mask_.empty();
            const int64_t keys = masked || !score_.empty() ? DECODE_KEYS : heads > MOST_FEW ? MANY_KEYS : BATCH_KEYS;
            for (; from < to; from += keys) {
                Batch batch = {g, heads, from, int(smaller(keys, to - from)), masked,
                               from + BATCHES_AHEAD * keys >= to};
                score<Stored>(batch);
                by_few(g, heads, [&](auto few) { softmax(few, batch); });
                add_values<Stored>(batch);
            }
        }
        by_few(g, heads, [&](auto few) { leave(few, partials); });
    }

    // The heads of a group, as many at a time as there are sums in registers for.
    template <class Do> static void by_few(int64_t g, int64_t heads, const Do& act) {
        const int64_t end = g + heads;
        if constexpr (VL<T> >= MOST_FEW)
            for (; g + MOST_FEW <= end; g += MOST_FEW) act(Few<MOST_FEW, T>{g});
        for (; g + 2 <= end; g += 2) act(Few<2, T>{g});
        for (; g < end; g++) act(Few<1, T>{g});
    }

    // Up to 4 heads in float32, 2 in half precision: rows come by themselves as fast as memory gives them, and fetching
    // would only disturb.
    template <class Stored, int G> static Ahead ahead(Few<G, T> few, const Batch& batch, const Array& rows, int64_t d) {
        if (batch.heads <= int64_t(sizeof(Stored)) || batch.last) return {};
        const int64_t before = few.first - batch.g;
        return {BATCHES_AHEAD * batch.n * rows.row, d * before / batch.heads, d * (before + G) / batch.heads};
    }

    // 2 s = q @ k.T
    template <class Stored> void score(const Batch& batch) {
        const Stored* k = row_of<Stored>(call_.k, head_->b, head_->hk, head_->sequence->k_begin + batch.begin);
        if (d_ == call_.d) {
            by_few(batch.g, batch.heads, [&](auto few) {
                dots_of(few, k, call_.k.row, batch, ahead<Stored>(few, batch, call_.k, call_.d));
            });
        } else {
            widen_rows(k, call_.k.row, batch.n, int(call_.d), d_);
            by_few(batch.g, batch.heads, [&](auto few) { dots_of(few, rows_, int64_t(d_), batch, Ahead{}); });
        }
    }
    template <int G, class Stored>
    void dots_of(Few<G, T> few, const Stored* k, int64_t ld, const Batch& batch, const Ahead& ahead) {
        T *q = q_ + few.first * d_, *s = s_ + few.first * DECODE_KEYS;
        if (d_ == 64) dots<G, 64>(q, d_, k, ld, batch.n, ahead, s);
        else if (d_ == 128) dots<G, 128>(q, d_, k, ld, batch.n, ahead, s);
        else dots<G, 0>(q, d_, k, ld, batch.n, ahead, s);
    }

    // 6 acc = acc * rescale + p @ v
    template <class Stored> void add_values(const Batch& batch) {
        const Stored* v = row_of<Stored>(call_.v, head_->b, head_->hk, head_->sequence->k_begin + batch.begin);
        if (d_v_ == call_.d_v) {
            by_few(batch.g, batch.heads, [&](auto few) {
                weigh_few(few, v, call_.v.row, batch, ahead<Stored>(few, batch, call_.v, call_.d_v));
            });
        } else {
            widen_rows(v, call_.v.row, batch.n, int(call_.d_v), d_v_);
            by_few(batch.g, batch.heads, [&](auto few) { weigh_few(few, rows_, int64_t(d_v_), batch, Ahead{}); });
        }
    }
    template <int G, class Stored>
    void weigh_few(Few<G, T> few, const Stored* v, int64_t ld, const Batch& batch, const Ahead& ahead) {
        constexpr int SUMS = MR >= 12 ? 16 : 8;  // that registers hold, beside the values
        // Whole rows, two heads at a time, come faster from memory than parts of rows; later heads find them in the
        // cache, and half as many bytes matter less.
        const bool whole_rows = few.first == batch.g && sizeof(Stored) == sizeof(T);
        if (G < MOST_FEW || !whole_rows) {
            weigh_of<G, 0, G, SUMS / larger(G, 2)>(few.first, v, ld, batch.n, ahead);
        } else if constexpr (G == MOST_FEW) {
            weigh_of<G, 0, 2, SUMS / 2>(few.first, v, ld, batch.n, ahead);
            weigh_of<G, 2, 2, SUMS / 2>(few.first, v, ld, batch.n, Ahead{});
        }
    }
    // For heads `from` to `from` + H of G.
    template <int G, int from, int H, int C, class Stored>
    void weigh_of(int64_t first, const Stored* v, int64_t ld, int n, const Ahead& ahead) {
        constexpr int FEWER = 4;  // vectors of columns, where C are too many and before it is one after the other
        const T *p = s_ + first * DECODE_KEYS + from * Few<G, T>::KEYS, *rescale = rescale_ + first + from;
        T* acc = acc_ + (first + from) * d_v_;
        int c = 0;
        for (; c + C * VL<T> <= d_v_; c += C * VL<T>) weigh<G, H, C>(p, v, ld, n, c, d_v_, ahead, acc, rescale);
        if constexpr (C > FEWER)
            for (; c + FEWER * VL<T> <= d_v_; c += FEWER * VL<T>)
                weigh<G, H, FEWER>(p, v, ld, n, c, d_v_, ahead, acc, rescale);
        for (; c < d_v_; c += VL<T>) weigh<G, H, 1>(p, v, ld, n, c, d_v_, ahead, acc, rescale);
    }

    // Copies rows; one that ends within a vector is filled up with zeros.
    template <class Stored> void widen_rows(const Stored* from, int64_t ld, int n, int d, int padded) {
        for (int j = 0; j < n; j++) {
            widen_row(from + j * ld, rows_ + j * padded, d, T(1));
            for (int i = d; i < padded; i++) rows_[j * padded + i] = 0;
        }
    }

    template <int G> void softmax(Few<G, T> few, const Batch& batch) {
        T* s = s_ + few.first * DECODE_KEYS;
        T *row_max = row_max_ + few.first * VL<T>, *row_sum = row_sum_ + few.first * VL<T>;
        if (batch.masked || !score_.empty())
            for (int g = 0; g < G; g++) run_programs(few, g, batch);
        // 5 row_max, rescale, p, row_sum
        T* const end = s + round_up(batch.n, few.KEYS) * G;
        Vec<T> largest = load(s);
        for (T* at = s + VL<T>; at < end; at += VL<T>) largest = vmax(largest, load(at));
        for (int g = 0; g < G; g++) rescale_[few.first + g] = 1;
        if (any_above(largest, load(row_max))) raise(few, largest);
        Vec<T> shift = load(row_max), sum = load(row_sum);
        shift = shift == -INF<T> ? Vec<T>{} : shift;
        for (T* at = s; at < end; at += VL<T>) {
            Vec<T> p = exp_of(load(at) - shift);
            store(at, p);
            sum += p;
        }
        store(row_sum, sum);
    }
    // Seldom, after the first keys: some head has a new maximum.
    template <int G> void raise(Few<G, T> few, Vec<T> largest) {
        T *row_max = row_max_ + few.first * VL<T>, *row_sum = row_sum_ + few.first * VL<T>;
        for (int g = 0; g < G; g++, row_max += few.KEYS, row_sum += few.KEYS) {
            T before = row_max[0], now = before;
            for (int i = 0; i < few.KEYS; i++) now = larger(now, T(largest[g * few.KEYS + i]));
            if (now == before) continue;
            T rescale = rescale_[few.first + g] = scalar_exp(before - now);
            for (int i = 0; i < few.KEYS; i++) {
                row_max[i] = now;
                row_sum[i] *= rescale;
            }
        }
    }
    template <int G> void leave(Few<G, T> few, T* partials) {
        const T *row_max = row_max_ + few.first * VL<T>, *row_sum = row_sum_ + few.first * VL<T>;
        for (int64_t g = 0; g < G; g++, row_max += few.KEYS, row_sum += few.KEYS) {
            T* to = partials + (few.first + g) * partial_size<T>(call_);
            to[0] = row_max[0];
            to[1] = 0;
            for (int i = 0; i < few.KEYS; i++) to[1] += row_sum[i];
            memcpy(to + 2, acc_ + (few.first + g) * d_v_, size_t(d_v_) * sizeof(T));
        }
    }

    // The programs see one head's scores in a row.
    template <int G> void run_programs(Few<G, T> few, int g, const Batch& batch) {
        T* s = s_ + few.first * DECODE_KEYS + g * few.KEYS;
        for (int j = 0; j < batch.n; j++) row_[j] = s[lane_of<G, T>(j)];
        QueryHead head = {head_->sequence, head_->b, head_->hk * group_ + few.first + g, head_->hk};
        // 3 score
        if (!score_.empty()) {
            enter(score_, head, batch, row_);
            score_.take(call_.score_at, 0, 0, batch.n, row_);
        }
        // 4 mask (PARTIAL tiles only)
        if (batch.masked) {
            enter(mask_, head, batch, nullptr);
            const Int<T>* holds = mask_.template at<Int<T>>(call_.mask_at, 0, 0);
            bool varies = mask_.varies(call_.mask_at);
            for (int j = 0; j < batch.n; j++) row_[j] = holds[varies ? j : 0] ? row_[j] : -INF<T>;
        }
        for (int j = 0; j < batch.n; j++) s[lane_of<G, T>(j)] = row_[j];
    }
    static void enter(Interpreter<T>& interpreter, const QueryHead& head, const Batch& batch, const T* s) {
        interpreter.enter(head);
        interpreter.enter_queries(0, 1);
        interpreter.enter_keys(batch.begin, batch.n);
        interpreter.enter_scores(0, 0, batch.n, s);
    }

    const Call& call_;
    const int64_t group_;
    const int d_, d_v_;
    Interpreter<T> mask_, score_;
    T *q_, *acc_, *s_, *row_max_, *row_sum_, *rescale_, *rows_, *row_;
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

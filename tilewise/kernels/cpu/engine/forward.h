// The forward pass of one tile of queries: the seven steps of kernels/numpy/forward.py.
#pragma once
#include "mask.h"
#include "pack.h"
#include "paths.h"
#include "product.h"

namespace {

constexpr int ROWS = 24;             // queries whose scores are worked on at a time; a multiple of every MR
constexpr int MAX_KEYS = 512;        // keys of a chunk: scores of ROWS queries stay in L1
// A row of scores, with room for a chunk that begins within a panel; not a power of two, so that rows do not meet in a
// cache set.
constexpr int LD = MAX_KEYS + NR<float> + 16;
constexpr int CHUNK_BYTES = 1 << 18; // a chunk's keys and values, which stay in L2

template <class T> int64_t padded_columns(int64_t d) { return round_up(d, NR<T>); }

template <class T> int chunk_keys(const Call& call) {
    int64_t fit = CHUNK_BYTES / (int64_t(sizeof(T)) * (call.d + padded_columns<T>(call.d_v)));
    return int(smaller<int64_t>(MAX_KEYS, larger<int64_t>(64, fit / 64 * 64)));
}

template <class T> const T* row_of(const Array& x, int64_t b, int64_t h, int64_t row) {
    return static_cast<const T*>(x.data) + b * x.batch + h * x.head + row * x.row;
}
template <class T> T* mutable_row_of(const Array& x, int64_t b, int64_t h, int64_t row) {
    return static_cast<T*>(x.data) + b * x.batch + h * x.head + row * x.row;
}

// -- keys and values, packed once and read by every tile of queries ---------------------------------------------------

template <class T> size_t lay_out(const Call& call, Packed& packed, void* memory) {
    Scratch room(memory);
    packed.k = room.take<T>(round_up(packed.sequence->n_k, NR<T>) * call.d);
    packed.v = room.take<T>(packed.sequence->n_k * padded_columns<T>(call.d_v));
    return room.used();
}
template <class T> size_t pack_scratch(const Call& call) { return sizeof(T) * size_t(NR<T>) * size_t(call.d); }

template <class T, class Stored>
void pack_keys(const Call& call, const Packed& packed, int64_t begin, int64_t end, void* scratch) {
    const Sequence& seq = *packed.sequence;
    const Stored* k = row_of<Stored>(call.k, packed.b, packed.hk, seq.k_begin + begin);
    const Stored* v = row_of<Stored>(call.v, packed.b, packed.hk, seq.k_begin + begin);
    T* to = static_cast<T*>(packed.k) + begin * call.d;
    pack_turned(k, call.k.row, end - begin, int(call.d), NR<T>, T(1), to, static_cast<T*>(scratch));
    pack_columns(v, call.v.row, end - begin, int(call.d_v), seq.n_k, T(1), static_cast<T*>(packed.v) + begin * NR<T>);
}

// lse with a sink's logit in it, as NumPy's logaddexp has it; returns what the output is to be multiplied with.
template <class T> T add_sink(T& lse, T sink) {
    T top = larger(lse, sink), apart = lse > sink ? sink - lse : lse - sink;
    if (lse == sink) apart = 0;  // infinities too
    T with = top + log_of(1 + scalar_exp(apart));
    if (lse != lse || sink != sink) with = lse + sink;
    T factor = with == -INF<T> ? T(0) : scalar_exp(lse - with);
    lse = with;
    return factor;
}

// Output and lse of one query; without a key they are 0 and -inf.
template <class T, class Stored>
void finish_row(const Call& call, int64_t b, int64_t h, int64_t row, T row_max, T row_sum, const T* acc) {
    const T* sinks = static_cast<const T*>(call.sinks);
    T* lse = mutable_row_of<T>(call.lse, b, h, row);
    T factor = row_sum == 0 ? T(0) : 1 / row_sum;
    // In double: the backward pass takes every weight of the row from lse.
    *lse = row_sum == 0 ? -INF<T> : T(double(row_max) + __builtin_log(double(row_sum)));
    if (sinks != nullptr) factor *= add_sink(*lse, sinks[h]);
    Stored* out = mutable_row_of<Stored>(call.out, b, h, row);
    for (int64_t c = 0; c < call.d_v; c++) narrow(acc[c] * factor, out + c);
    if (call.remainder.data == nullptr) return;
    Stored* remainder = mutable_row_of<Stored>(call.remainder, b, h, row);
    for (int64_t c = 0; c < call.d_v; c++) {
        T lost = acc[c] * factor - widened(out[c]);
        narrow(lost - lost == 0 ? lost : T(0), remainder + c);  // what is not finite has none
    }
}

// -- one tile of queries ----------------------------------------------------------------------------------------------

template <class T> class ForwardTile {
   public:
    ForwardTile(const Call& call, Scratch& scratch)
        : call_(call), keys_(chunk_keys<T>(call)), columns_(padded_columns<T>(call.d_v)),
          mask_(call.mask, call.tile_q, keys_, scratch), score_(call.score, call.tile_q, keys_, scratch) {
        int64_t rows = round_up(call.tile_q, ROWS);
        q_ = scratch.take<T>(rows * call.d);
        acc_ = scratch.take<T>(rows * columns_);
        row_max_ = scratch.take<T>(rows);
        row_sum_ = scratch.take<Vec<T>>(rows);
        s_ = scratch.take<T>(int64_t(ROWS) * LD);
        counts_ = scratch.take<uint8_t>(int64_t(ROWS) * MAX_KEYS);
        turned_ = scratch.take<T>(MR * call.d);
    }

    template <class Stored> void run(const Packed& packed, int64_t h, int64_t tile) {
        packed_ = &packed;
        const Sequence& seq = *packed.sequence;
        int64_t first = tile * call_.tile_q;
        n_q_ = int(smaller(call_.tile_q, seq.n_q - first));
        // 1 load q
        const Stored* q = row_of<Stored>(call_.q, packed.b, h, seq.q_begin + first);
        pack_turned(q, call_.q.row, n_q_, int(call_.d), MR, T(call_.scale), q_, turned_);
        int64_t rows = round_up(n_q_, ROWS);
        memset(acc_, 0, size_t(rows * columns_) * sizeof(T));
        for (int64_t r = 0; r < rows; r++) row_max_[r] = -INF<T>, row_sum_[r] = Vec<T>{};
        QueryHead head = {&seq, packed.b, h, packed.hk};
        mask_.enter(head);
        score_.enter(head);
        mask_.enter_queries(first, n_q_);
        score_.enter_queries(first, n_q_);
        // for each kv tile of the schedule, as many at a time as make a chunk:
        const Runs& runs = seq.by_query;
        const int64_t* offsets = runs.offsets + packed.b * runs.batch + h * runs.head + tile;
        for (int64_t i = offsets[0]; i < offsets[1]; i++) {
            int64_t begin = runs.table[i][0] * call_.tile_k;
            int64_t end = smaller(runs.table[i][1] * call_.tile_k, seq.n_k);
            bool masked = runs.table[i][2] == PARTIAL && !mask_.empty();
            for (; begin < end; begin += keys_) chunk(begin, smaller<int64_t>(begin + keys_, end), masked);
        }
        // 7 finish: acc / row_sum, lse
        for (int r = 0; r < n_q_; r++)
            finish_row<T, Stored>(call_, packed.b, h, seq.q_begin + first + r, row_max_[r], sum_of(row_sum_[r]), acc_ + r * columns_);
    }

   private:
    void chunk(int64_t begin, int64_t end, bool masked) {
        if (masked) mask_.enter_keys(begin, int(end - begin));
        if (!score_.empty()) score_.enter_keys(begin, int(end - begin));
        for (int row = 0; row < n_q_; row += ROWS) {
            int rows = smaller(ROWS, n_q_ - row);
            Range keys = {0, int(end - begin)};
            if (masked) keys = counting_keys<MAX_KEYS>(mask_, call_.mask_at, row, rows, keys.to, counts_);
            if (keys.empty()) continue;
            scores(row, rows, begin, keys, masked);
            softmax(row, rows);
            weigh(row, rows, begin + keys.from, begin + keys.to);
        }
    }

    // Of some keys of the chunk that begins there.
    void scores(int row, int rows, int64_t begin, Range keys, bool masked) {
        int64_t from = begin + keys.from, to = begin + keys.to;
        int64_t first = from / NR<T> * NR<T>;  // panels are whole; what they have outside [from, to) does not count
        offset_ = int(from - first);
        width_ = int(round_up(to - first, NR<T>));
        bool plain = score_.empty() && !masked;
        // 2 s = q @ k.T
        const T* k = static_cast<const T*>(packed_->k) + first * call_.d;
        int inside = int(to - first) / NR<T> * NR<T>;  // the columns up to here are in whole panels
        for (int r = 0; r < rows; r++) largest_[r] = splat(-INF<T>);
        for (int j = 0; j < width_; j += NR<T>, k += NR<T> * call_.d)
            for (int r = 0; r < rows; r += MR) {
                const T* q = q_ + (row + r) * call_.d;
                if (plain && j >= offset_ && j < inside)
                    product<1, MR>(call_.d, q, k, PutMax<T>{s_ + r * LD + j, LD, largest_ + r});
                else
                    product<1, MR>(call_.d, q, k, Put<T>{s_ + r * LD + j, LD});
            }
        if (plain && offset_ == 0 && inside == width_) return;
        for (int r = 0; r < rows; r++) {
            T* s = s_ + r * LD;
            // 3 score
            if (!score_.empty()) apply_score(row + r, keys.from, keys.to - keys.from, s + offset_);
            // 4 mask (PARTIAL tiles only)
            if (masked) hide(counts_ + r * MAX_KEYS + keys.from, keys.to - keys.from, s + offset_);
            for (int j = 0; j < offset_; j++) s[j] = -INF<T>;
            for (int j = int(to - first); j < width_; j++) s[j] = -INF<T>;
            for (int j = 0; j < width_; j += VL<T>) largest_[r] = vmax(largest_[r], load(s + j));
        }
    }

    void apply_score(int row, int j, int n, T* s) {
        for (int done = 0; done < n; done += LANES) {
            int m = smaller(LANES, n - done);
            score_.enter_scores(row, j + done, m, s + done);
            score_.take(call_.score_at, row, j + done, m, s + done);
        }
    }

    // 5 row_max, rescale, p, row_sum
    void softmax(int row, int rows) {
        alignas(ALIGNMENT) T shift[ROWS + VL<T>];
        changed_ = false;
        for (int r = 0; r < rows; r++) {
            T old = row_max_[row + r], now = larger(old, max_of(largest_[r]));
            changed_ |= now != old;
            shift[r] = now == -INF<T> ? T(0) : now;  // no key yet: -inf - -inf would be NaN
            rescale_[r] = old - shift[r];
            row_max_[row + r] = now;
        }
        for (int r = 0; r < rows; r += VL<T>) store(rescale_ + r, exp_of(load(rescale_ + r)));
        for (int r = 0; r < rows; r++) {
            T* s = s_ + r * LD;
            Vec<T> by = splat(shift[r]), left{}, right{};
            for (int j = 0; j < width_; j += NR<T>) {
                Vec<T> p0 = exp_of(load(s + j) - by), p1 = exp_of(load(s + j + VL<T>) - by);
                store(s + j, p0);
                store(s + j + VL<T>, p1);
                left += p0;
                right += p1;
            }
            row_sum_[row + r] = row_sum_[row + r] * splat(rescale_[r]) + (left + right);
        }
    }

    // 6 acc = acc * rescale + p @ v
    void weigh(int row, int rows, int64_t from, int64_t to) {
        const T* v = static_cast<const T*>(packed_->v) + from * NR<T>;
        for (int64_t c = 0; c < columns_; c += NR<T>, v += packed_->sequence->n_k * NR<T>)
            for (int r = 0; r < rows; r += MR) {
                T* acc = acc_ + (row + r) * columns_ + c;
                const T* p = s_ + r * LD + offset_;
                if (changed_)
                    product<LD, 1>(to - from, p, v, RescaleAdd<T>{acc, columns_, rescale_ + r});
                else
                    product<LD, 1>(to - from, p, v, Add<T>{acc, columns_});
            }
    }

    const Call& call_;
    const int keys_;
    const int64_t columns_;
    Interpreter<T> mask_, score_;
    T *q_, *acc_, *row_max_, *s_, *turned_;
    Vec<T>* row_sum_;
    uint8_t* counts_;
    const Packed* packed_ = nullptr;
    int n_q_ = 0, offset_ = 0, width_ = 0;
    bool changed_ = false;
    Vec<T> largest_[ROWS];
    alignas(ALIGNMENT) T rescale_[ROWS + VL<T>] = {};
};

template <class T> size_t forward_scratch(const Call& call) {
    Scratch count(nullptr);
    ForwardTile<T> tile(call, count);
    return count.used();
}
template <class T, class Stored>
void forward_tile(const Call& call, const Packed& packed, int64_t h, int64_t tile, void* scratch) {
    Scratch room(scratch);
    ForwardTile<T>(call, room).template run<Stored>(packed, h, tile);
}

}  // namespace

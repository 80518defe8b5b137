// The backward pass of some keys of one key head: the steps of kernels/numpy/backward.py, a key tile at a time.
#pragma once
#include "forward.h"

namespace {

constexpr int BLOCK_ROWS = 96;               // queries worked on at a time; a multiple of every MR
constexpr int BLOCK_KEYS = 256;              // keys worked on at a time
constexpr int BLOCK_LD = BLOCK_KEYS + 2 * 32 + 16;  // a row of p or d_s, with room for whole panels at both ends

// -- what is packed once: each operand in the orders its products read it ---------------------------------------------

template <class T> size_t lay_out_backward(const BackwardCall& call, PackedBackward& packed, void* memory) {
    const Call& f = call.forward;
    const Sequence& seq = *packed.sequence;
    Scratch room(memory);
    int64_t keys = round_up(seq.n_k, NR<T>), rows = round_up(seq.n_q, MR), group = group_of(f);
    int64_t columns = padded_columns<T>(f.d), columns_v = padded_columns<T>(f.d_v);
    packed.k = room.take<T>(keys * f.d);
    packed.v = room.take<T>(keys * f.d_v);
    packed.k_columns = room.take<T>(seq.n_k * columns);
    packed.q = room.take<T>(group * rows * f.d);
    packed.d_out = room.take<T>(group * rows * f.d_v);
    packed.q_columns = room.take<T>(group * rows * columns);
    packed.d_out_columns = room.take<T>(group * rows * columns_v);
    packed.d_q = room.take<T>(packed.splits * group * rows * columns);
    return room.used();
}

template <class T> size_t pack_backward_scratch(const BackwardCall& call) {
    const Call& f = call.forward;
    return sizeof(T) * size_t(larger(NR<T>, MR)) * size_t(larger(f.d, f.d_v));
}

template <class T, class Stored>
void pack_backward_keys(const BackwardCall& call, const PackedBackward& packed, int64_t begin, int64_t end, void* scratch) {
    const Call& f = call.forward;
    const Sequence& seq = *packed.sequence;
    const Stored* k = row_of<Stored>(f.k, packed.b, packed.hk, seq.k_begin + begin);
    const Stored* v = row_of<Stored>(f.v, packed.b, packed.hk, seq.k_begin + begin);
    T *turned_k = static_cast<T*>(packed.k), *turned_v = static_cast<T*>(packed.v), *room = static_cast<T*>(scratch);
    T* columns = static_cast<T*>(packed.k_columns);
    pack_turned(k, f.k.row, end - begin, int(f.d), NR<T>, T(1), turned_k + begin * f.d, room);
    pack_turned(v, f.v.row, end - begin, int(f.d_v), NR<T>, T(1), turned_v + begin * f.d_v, room);
    pack_columns(k, f.k.row, end - begin, int(f.d), seq.n_k, T(f.scale), columns + begin * NR<T>);
}

template <class T, class Stored>
void pack_backward_queries(const BackwardCall& call, const PackedBackward& packed, int64_t g, int64_t begin, int64_t end, void* scratch) {
    const Call& f = call.forward;
    const Sequence& seq = *packed.sequence;
    int64_t h = packed.hk * group_of(f) + g, rows = round_up(seq.n_q, MR), first = seq.q_begin + begin;
    const Stored* q = row_of<Stored>(f.q, packed.b, h, first);
    const Stored* d_out = row_of<Stored>(call.d_out, packed.b, h, first);
    T* room = static_cast<T*>(scratch);
    int64_t columns = padded_columns<T>(f.d), columns_v = padded_columns<T>(f.d_v);
    T* q_columns = static_cast<T*>(packed.q_columns) + g * rows * columns;
    T* d_out_columns = static_cast<T*>(packed.d_out_columns) + g * rows * columns_v;
    pack_turned(q, f.q.row, end - begin, int(f.d), MR, T(f.scale), static_cast<T*>(packed.q) + (g * rows + begin) * f.d, room);
    pack_turned(d_out, call.d_out.row, end - begin, int(f.d_v), MR, T(1),
                static_cast<T*>(packed.d_out) + (g * rows + begin) * f.d_v, room);
    pack_columns(q, f.q.row, end - begin, int(f.d), rows, T(f.scale), q_columns + begin * NR<T>);
    pack_columns(d_out, call.d_out.row, end - begin, int(f.d_v), rows, T(1), d_out_columns + begin * NR<T>);
    if (end == seq.n_q) {  // rows that fill the last block up have weight 0, and so must be numbers
        for (int64_t c = 0; c < columns; c += NR<T>)
            memset(q_columns + c * rows + end * NR<T>, 0, size_t((rows - end) * NR<T>) * sizeof(T));
        for (int64_t c = 0; c < columns_v; c += NR<T>)
            memset(d_out_columns + c * rows + end * NR<T>, 0, size_t((rows - end) * NR<T>) * sizeof(T));
    }
}

// -- delta ------------------------------------------------------------------------------------------------------------

constexpr int DELTA_ROWS = 8;

#if defined(__FP_FAST_FMAF) && defined(__FP_FAST_FMA)
constexpr bool FUSES = true;
#else
constexpr bool FUSES = false;
#endif

// a * b + c as the micro-kernel rounds it: once, where the processor fuses the two. Said by name, since whether a
// compiler fuses them in a loop like the one below depends on how it vectorises that.
INLINE float fused(float a, float b, float c) { return FUSES ? __builtin_fmaf(a, b, c) : a * b + c; }
INLINE double fused(double a, double b, double c) { return FUSES ? __builtin_fma(a, b, c) : a * b + c; }

// Rows as they were stored, widened.
template <class Stored> struct Rows {
    const Stored* first;
    int64_t ld;
    INLINE auto at(int r, int c) const { return widened(first[r * ld + c]); }
};

// Rows that were stored in two halves.
template <class Stored> struct Halves {
    Rows<Stored> rounded, remainder;
    INLINE auto at(int r, int c) const { return rounded.at(r, c) + remainder.at(r, c); }
};

// to[r] += a[r] . b[r], each in the order of d_out @ v.T, so that the two round alike: they are subtracted. Some rows at
// a time, as one sum alone would wait for itself.
template <class T, class A, class B> void add_products(A a, B b, int rows, int d, T* to) {
    T sums[DELTA_ROWS] = {};
    if (rows == DELTA_ROWS)
        for (int c = 0; c < d; c++)
#pragma GCC unroll 8
            for (int r = 0; r < DELTA_ROWS; r++) sums[r] = fused(T(b.at(r, c)), T(a.at(r, c)), sums[r]);
    else
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < d; c++) sums[r] = fused(T(b.at(r, c)), T(a.at(r, c)), sums[r]);
    for (int r = 0; r < rows; r++) to[r] += sums[r];
}

// 0 delta = sum(d_out * out) - d_lse of each row, of out before it was rounded; the caller has put -d_lse there.
template <class T, class Stored>
void add_delta(const BackwardCall& call, const PackedBackward& packed, int64_t g, int64_t begin, int64_t end) {
    const Call& f = call.forward;
    int64_t h = packed.hk * group_of(f) + g, first = packed.sequence->q_begin;
    T* delta = mutable_row_of<T>(call.delta, packed.b, h, first);
    for (int64_t r = begin; r < end; r += DELTA_ROWS) {
        Rows<Stored> out = {row_of<Stored>(f.out, packed.b, h, first + r), f.out.row};
        Rows<Stored> d_out = {row_of<Stored>(call.d_out, packed.b, h, first + r), call.d_out.row};
        int rows = int(smaller<int64_t>(DELTA_ROWS, end - r));
        if (f.remainder.data == nullptr) {
            add_products(out, d_out, rows, int(f.d_v), delta + r);
        } else {
            Rows<Stored> remainder = {row_of<Stored>(f.remainder, packed.b, h, first + r), f.remainder.row};
            add_products(Halves<Stored>{out, remainder}, d_out, rows, int(f.d_v), delta + r);
        }
    }
}

// -- the keys of one split --------------------------------------------------------------------------------------------

template <class T> class BackwardSplit {
   public:
    BackwardSplit(const BackwardCall& call, Scratch& scratch)
        : call_(call), f_(call.forward), columns_(padded_columns<T>(f_.d)), columns_v_(padded_columns<T>(f_.d_v)),
          mask_(f_.mask, BLOCK_ROWS, BLOCK_KEYS, scratch), score_(f_.score, BLOCK_ROWS, BLOCK_KEYS, scratch) {
        p_ = scratch.take<T>(int64_t(BLOCK_ROWS) * BLOCK_LD);
        d_s_ = scratch.take<T>(int64_t(BLOCK_ROWS) * BLOCK_LD);
        d_k_ = scratch.take<T>((BLOCK_KEYS + MR) * columns_);
        d_v_ = scratch.take<T>((BLOCK_KEYS + MR) * columns_v_);
        counts_ = scratch.take<uint8_t>(int64_t(BLOCK_ROWS) * BLOCK_KEYS);
    }

    template <class Stored> void run(const PackedBackward& packed, int64_t split, const Pause& pause) {
        packed_ = &packed;
        seq_ = packed.sequence;
        split_ = split;
        group_ = group_of(f_);
        rows_ = round_up(seq_->n_q, MR);
        memset(d_q_of(0), 0, size_t(group_ * rows_ * columns_) * sizeof(T));
        int64_t tiles = (seq_->n_k + f_.tile_k - 1) / f_.tile_k;
        for (int64_t j = tiles * split / packed.splits; j < tiles * (split + 1) / packed.splits; j++) {
            int64_t end = smaller((j + 1) * f_.tile_k, seq_->n_k);
            for (int64_t k = j * f_.tile_k; k < end; k += BLOCK_KEYS) {
                key_block<Stored>(j, k, smaller<int64_t>(k + BLOCK_KEYS, end));
                if (pause()) return;
            }
        }
    }

   private:
    T* d_q_of(int64_t g) const {
        return static_cast<T*>(packed_->d_q) + (split_ * group_ + g) * rows_ * columns_;
    }

    template <class Stored> void key_block(int64_t tile, int64_t begin, int64_t end) {
        // 1 load k, v: they are packed; what is summed begins at 0
        k_begin_ = begin;
        n_k_ = int(end - begin);
        first_ = begin / NR<T> * NR<T>;
        offset_ = int(begin - first_);
        memset(d_k_, 0, size_t((n_k_ + MR) * columns_) * sizeof(T));
        memset(d_v_, 0, size_t((n_k_ + MR) * columns_v_) * sizeof(T));
        // for each q tile of the schedule:
        const Runs& runs = seq_->by_key;
        for (int64_t g = 0; g < group_; g++) {
            g_ = g;
            h_ = packed_->hk * group_ + g;
            QueryHead head = {seq_, packed_->b, h_, packed_->hk};
            mask_.enter(head);
            score_.enter(head);
            mask_.enter_keys(begin, n_k_);
            score_.enter_keys(begin, n_k_);
            const int64_t* offsets = runs.offsets + packed_->b * runs.batch + h_ * runs.head + tile;
            for (int64_t i = offsets[0]; i < offsets[1]; i++) {
                int64_t q = runs.table[i][0] * f_.tile_q, q_end = smaller(runs.table[i][1] * f_.tile_q, seq_->n_q);
                bool masked = runs.table[i][2] == PARTIAL && !mask_.empty();
                while (q < q_end) {  // blocks begin where packed rows do
                    int64_t next = smaller<int64_t>(q / MR * MR + BLOCK_ROWS, q_end);
                    query_block(q, next, masked);
                    q = next;
                }
            }
        }
        for (int j = 0; j < n_k_; j++) {
            Stored* d_k = mutable_row_of<Stored>(call_.d_k, packed_->b, packed_->hk, seq_->k_begin + begin + j);
            Stored* d_v = mutable_row_of<Stored>(call_.d_v, packed_->b, packed_->hk, seq_->k_begin + begin + j);
            for (int64_t c = 0; c < f_.d; c++) narrow(d_k_[j * columns_ + c], d_k + c);
            for (int64_t c = 0; c < f_.d_v; c++) narrow(d_v_[j * columns_v_ + c], d_v + c);
        }
    }

    // Queries [begin, end), in blocks of MR rows as they are packed: the first block may begin before, the last end after.
    void query_block(int64_t begin, int64_t end, bool masked) {
        q_first_ = begin / MR * MR;
        q_begin_ = begin;
        n_q_ = int(end - begin);
        above_ = int(begin - q_first_);
        blocks_ = int((end - q_first_ + MR - 1) / MR);
        if (masked) mask_.enter_queries(begin, n_q_);
        if (!score_.empty()) score_.enter_queries(begin, n_q_);
        if (!find_ranges(masked)) return;
        for (int i = 0; i < blocks_; i++) scores(i, masked);
        add_keys();
        add_queries();
    }

    // For each block of MR rows the keys that count, from the first to the last; false: none at all.
    bool find_ranges(bool masked) {
        bool some = false;
        for (int i = 0; i < blocks_; i++) {
            int row = larger(i * MR - above_, 0), rows = smaller((i + 1) * MR - above_, n_q_) - row;
            ranges_[i] = {0, n_k_};
            if (masked) ranges_[i] = counting_keys<BLOCK_KEYS>(mask_, f_.mask_at, row, rows, n_k_, counts_ + row * BLOCK_KEYS);
            some |= !ranges_[i].empty();
        }
        return some;
    }

    // p and d_s of block i of rows. Where no key counts both are 0, as the products read whole rectangles.
    void scores(int i, bool masked) {
        Range keys = ranges_[i];
        T *p = p_ + int64_t(i) * MR * BLOCK_LD, *d_s = d_s_ + int64_t(i) * MR * BLOCK_LD;
        int from = (offset_ + keys.from) / NR<T> * NR<T>, to = int(round_up(offset_ + keys.to, NR<T>));
        if (keys.empty()) from = to = offset_;
        const T* q = static_cast<T*>(packed_->q) + (g_ * rows_ + q_first_ + i * MR) * f_.d;
        const T* d_out = static_cast<T*>(packed_->d_out) + (g_ * rows_ + q_first_ + i * MR) * f_.d_v;
        for (int j = from; j < to; j += NR<T>) {
            // 2 s = q @ k.T, and d_p = d_out @ v.T
            const T* k = static_cast<T*>(packed_->k) + (first_ + j) * f_.d;
            const T* v = static_cast<T*>(packed_->v) + (first_ + j) * f_.d_v;
            product<1, MR>(f_.d, q, k, Put<T>{p + j, BLOCK_LD});
            product<1, MR>(f_.d_v, d_out, v, Put<T>{d_s + j, BLOCK_LD});
        }
        const T* lse = row_of<T>(f_.lse, packed_->b, h_, seq_->q_begin);
        const T* delta = row_of<T>(call_.delta, packed_->b, h_, seq_->q_begin);
        for (int r = 0; r < MR; r++, p += BLOCK_LD, d_s += BLOCK_LD) {
            int row = i * MR + r - above_;
            int live_from = offset_ + keys.from, live_to = offset_ + keys.to;
            if (row < 0 || row >= n_q_) live_to = live_from;
            if (live_from < live_to)
                row_of_scores(row, keys, masked, lse[q_begin_ + row], delta[q_begin_ + row], p + live_from, d_s + live_from);
            clear(p, live_from, live_to);
            clear(d_s, live_from, live_to);
        }
    }
    void clear(T* row, int from, int to) {
        for (int j = offset_; j < from; j++) row[j] = 0;
        for (int j = larger(to, offset_); j < offset_ + n_k_ + MR; j++) row[j] = 0;
    }

    void row_of_scores(int row, Range keys, bool masked, T lse, T delta, T* p, T* d_s) {
        const int n = keys.to - keys.from;
        // 3 score
        if (!score_.empty()) {
            memcpy(plain_, p, size_t(n) * sizeof(T));
            score_.enter_scores(row, keys.from, n, plain_);
            score_.take(f_.score_at, row, keys.from, n, p);
        }
        // 4 mask (PARTIAL tiles only)
        if (masked) hide(counts_ + row * BLOCK_KEYS + keys.from, n, p);
        weights(n, lse, delta, p, d_s);
        for (int i = 0; i < call_.n_grads; i++) add_to_array(call_.grads[i], row, keys.from, n, d_s);
        if (call_.slope_at < 0) return;
        // 6 d_s = d_score * slope; a key of weight 0 passes nothing on, whatever its slope
        score_.take(call_.slope_at, row, keys.from, n, plain_);
        for (int j = 0; j < n; j++) d_s[j] = d_s[j] == 0 ? T(0) : d_s[j] * plain_[j];
    }

    // 5 p, from the lse that forward saved
    // 6 d_score = p * (d_p - delta)
    void weights(int n, T lse, T delta, T* p, T* d_s) const {
        const T shift = lse == -INF<T> ? T(0) : lse;
        int j = 0;
        for (; j + VL<T> <= n; j += VL<T>) {
            Vec<T> weight = exp_of(vmin(Vec<T>{}, load(p + j) - shift));  // a weight is 1 at most, whatever was rounded
            store(p + j, weight);
            store(d_s + j, weight * (load(d_s + j) - delta));
        }
        for (; j < n; j++) {
            T weight = exp_of(vmin(Vec<T>{}, splat(p[j] - shift)))[0];
            p[j] = weight;
            d_s[j] = weight * (d_s[j] - delta);
        }
    }

    // 6 grad[cell] += d_score * slope
    void add_to_array(const ArrayGrad& grad, int row, int j, int n, const T* d_score) {
        T slope[BLOCK_KEYS];
        score_.take(grad.slope, row, j, n, slope);
        double* total = grad.total + (grad.copies > 1 ? packed_->first_copy + split_ : 0) * grad.cells;
        for (int i = 0; i < n; i++) slope[i] = d_score[i] == 0 ? T(0) : d_score[i] * slope[i];
        int64_t cells[BLOCK_KEYS];
        score_.cells(grad.load, grad.grid, row, j, n, cells);
        if (score_.varies(grad.load)) {
            for (int i = 0; i < n; i++) total[cells[i]] += slope[i];
        } else {
            double sum = 0;
            for (int i = 0; i < n; i++) sum += slope[i];
            total[cells[0]] += sum;
        }
    }

    // 6 d_v += p.T @ d_out, d_k += d_s.T @ q
    void add_keys() {
        for (int j = 0; j < n_k_; j += MR) {
            int first = blocks_, last = 0;  // the blocks of rows in which one of these keys counts
            for (int i = 0; i < blocks_; i++)
                if (ranges_[i].from < j + MR && ranges_[i].to > j) first = smaller(first, i), last = i + 1;
            if (first >= last) continue;
            int64_t depth = int64_t(last - first) * MR, row = g_ * rows_, from = q_first_ + first * MR;
            const T* p = p_ + int64_t(first) * MR * BLOCK_LD + offset_ + j;
            const T* d_s = d_s_ + int64_t(first) * MR * BLOCK_LD + offset_ + j;
            const T* d_out = static_cast<T*>(packed_->d_out_columns) + row * columns_v_ + from * NR<T>;
            const T* q = static_cast<T*>(packed_->q_columns) + row * columns_ + from * NR<T>;
            for (int64_t c = 0; c < columns_v_; c += NR<T>)
                product<1, BLOCK_LD>(depth, p, d_out + c * rows_, Add<T>{d_v_ + j * columns_v_ + c, columns_v_});
            for (int64_t c = 0; c < columns_; c += NR<T>)
                product<1, BLOCK_LD>(depth, d_s, q + c * rows_, Add<T>{d_k_ + j * columns_ + c, columns_});
        }
    }

    // 6 d_q += d_s @ k
    void add_queries() {
        for (int64_t c = 0; c < columns_; c += NR<T>)
            for (int i = 0; i < blocks_; i++) {
                Range keys = ranges_[i];
                if (keys.empty()) continue;
                const T* d_s = d_s_ + int64_t(i) * MR * BLOCK_LD + offset_ + keys.from;
                const T* k = static_cast<T*>(packed_->k_columns) + c * seq_->n_k + (k_begin_ + keys.from) * NR<T>;
                T* d_q = d_q_of(g_) + (q_first_ + i * MR) * columns_ + c;
                product<BLOCK_LD, 1>(keys.to - keys.from, d_s, k, Add<T>{d_q, columns_});
            }
    }

    const BackwardCall& call_;
    const Call& f_;
    const int64_t columns_, columns_v_;
    Interpreter<T> mask_, score_;
    T *p_, *d_s_, *d_k_, *d_v_;
    uint8_t* counts_;
    T plain_[BLOCK_KEYS];
    const PackedBackward* packed_ = nullptr;
    const Sequence* seq_ = nullptr;
    int64_t split_ = 0, group_ = 0, rows_ = 0, g_ = 0, h_ = 0;
    int64_t k_begin_ = 0, first_ = 0, q_first_ = 0, q_begin_ = 0;
    int n_k_ = 0, offset_ = 0, n_q_ = 0, above_ = 0, blocks_ = 0;
    Range ranges_[BLOCK_ROWS / MR + 1];
};

template <class T> size_t backward_scratch(const BackwardCall& call) {
    Scratch count(nullptr);
    BackwardSplit<T> split(call, count);
    return count.used();
}
template <class T, class Stored>
void backward_split(const BackwardCall& call, const PackedBackward& packed, int64_t split, void* scratch, const Pause& pause) {
    Scratch room(scratch);
    BackwardSplit<T>(call, room).template run<Stored>(packed, split, pause);
}

// d_q of the splits, added in their order into the first one's.
template <class T, class Stored>
void sum_splits(const BackwardCall& call, const PackedBackward& packed, int64_t g, int64_t begin, int64_t end) {
    const Call& f = call.forward;
    int64_t rows = round_up(packed.sequence->n_q, MR), columns = padded_columns<T>(f.d), group = group_of(f);
    for (int64_t r = begin; r < end; r++) {
        Stored* to = mutable_row_of<Stored>(call.d_q, packed.b, packed.hk * group + g, packed.sequence->q_begin + r);
        T* sum = static_cast<T*>(packed.d_q) + (g * rows + r) * columns;
        for (int64_t s = 1; s < packed.splits; s++) {
            const T* more = sum + s * group * rows * columns;
            for (int64_t c = 0; c < columns; c += VL<T>) store(sum + c, load(sum + c) + load(more + c));
        }
        for (int64_t c = 0; c < f.d; c++) narrow(sum[c], to + c);
    }
}

}  // namespace

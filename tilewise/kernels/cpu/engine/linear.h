// Linear attention, a chunk of rows at a time: weights within a chunk, and what came before it in the state. One task has
// a key head of a sequence, and the query heads that share it. tilewise/linear/kernels/numpy.py has the same in words.
//
// v is extended by a column of ones, so that the last column of a product with it is the sum of a row's weights, and the
// last column of the state is z.
#pragma once
#include "linear_call.h"
#include "pack.h"
#include "product.h"
#include "program.h"
#include "scratch.h"

namespace {

// A matrix wherever it lies; turned(a) is the same memory.
template <class T> struct Matrix {
    const T* data;
    int64_t row, column;
};
template <class T> INLINE Matrix<T> turned(Matrix<T> a) { return {a.data, a.column, a.row}; }

// Room for products of matrices up to `most` on each side, and the products.
template <class T> class Multiplier {
   public:
    Multiplier(int64_t most, Scratch& scratch)
        : a_(scratch.take<T>(round_up(most, MR) * most)), b_(scratch.take<T>(round_up(most, NR<T>) * most)) {}

    // c (m, n) = a (m, depth) b (depth, n), added to it or instead of it. c's rows are padded to NR, and there are MR more.
    void run(int64_t m, int64_t n, int64_t depth, Matrix<T> a, Matrix<T> b, T* c, int64_t ld, bool add) {
        pack(m, depth, a, MR, a_);
        pack(n, depth, turned(b), NR<T>, b_);
        for (int64_t j = 0; j < n; j += NR<T>)
            for (int64_t i = 0; i < m; i += MR) {
                const T *left = a_ + i * depth, *right = b_ + j * depth;
                if (add) product<1, MR>(depth, left, right, Add<T>{c + i * ld + j, ld});
                else product<1, MR>(depth, left, right, Put<T>{c + i * ld + j, ld});
            }
    }

   private:
    // Panels of `width` rows, each (depth, width), filled up with zeros.
    static void pack(int64_t n, int64_t depth, Matrix<T> from, int width, T* to) {
        for (int64_t i = 0; i < n; i += width, to += depth * width) {
            int have = int(smaller<int64_t>(width, n - i));
            const T* at = from.data + i * from.row;
            if (from.column == 1) turn(at, from.row, have, int(depth), to, width);
            else
                for (int64_t k = 0; k < depth; k++)
                    for (int r = 0; r < have; r++) to[k * width + r] = at[k * from.column + r * from.row];
            for (int64_t k = 0; have < width && k < depth; k++)
                for (int r = have; r < width; r++) to[k * width + r] = 0;
        }
    }
    T *a_, *b_;
};

// What all passes over a head have: its rows as features, decays, and the products of a chunk's.
template <class T> class LinearHead {
   public:
    LinearHead(const LinearCall& call, Scratch& scratch)
        : call_(call), feature_(call.feature, 1, 1, scratch), slope_(call.slope, 1, 1, scratch),
          multiply_(larger(larger(call.chunk, call.d), call.d_v + 1), scratch) {
        d_ = padded(call.d), e_ = padded(call.d_v + 1), n_ = padded(call.chunk);
        rows_ = round_up(call.chunk, MR) + MR;
        f_q = take(scratch, d_), f_k = take(scratch, d_), v = take(scratch, e_), w = take(scratch, n_);
        c = scratch.take<T>(call.chunk);
    }

    void enter() {
        feature_.enter({});
        slope_.enter({});
    }
    int64_t padded(int64_t n) const { return round_up(n, NR<T>); }
    T* take(Scratch& scratch, int64_t width) const { return scratch.take<T>(rows_ * width); }
    T* take_state(Scratch& scratch) const { return scratch.take<T>((round_up(call_.d, MR) + MR) * e_); }

    // Features of n rows, (n, d) with rows of d_ numbers.
    void features(const Array& x, int64_t b, int64_t h, int64_t first, int64_t n, T factor, T* to) {
        for (int64_t i = 0; i < n; i++) {
            map(feature_, call_.feature_at, row_of(x, b, h, first + i), to + i * d_);
            for (int64_t j = 0; j < call_.d; j++) to[i * d_ + j] *= factor;
        }
    }
    void values(int64_t b, int64_t hk, int64_t first, int64_t n) {
        for (int64_t i = 0; i < n; i++) {
            memcpy(v + i * e_, row_of(call_.v, b, hk, first + i), size_t(call_.d_v) * sizeof(T));
            v[i * e_ + call_.d_v] = 1;
        }
    }
    // Logs of decay, summed up to each row of the chunk.
    void decays(int64_t b, int64_t hk, int64_t first, int64_t n) {
        T sum = 0;
        for (int64_t i = 0; i < n; i++) c[i] = sum += call_.decay.data == nullptr ? T(0) : *row_of(call_.decay, b, hk, first + i);
    }
    // w = a b^T, decayed, 0 for later keys.
    void weights(const T* a, const T* b, int64_t ld, int64_t depth, int64_t n) {
        multiply_.run(n, n, depth, {a, ld, 1}, {b, 1, ld}, w, n_, false);
        bool decayed = call_.decay.data != nullptr;
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; decayed && j <= i; j++) w[i * n_ + j] *= scalar_exp(c[i] - c[j]);
            for (int64_t j = i + 1; j < n; j++) w[i * n_ + j] = 0;
        }
    }
    // A state of (d, d_v + 1) after a chunk: what is left of it, and a^T b. The rows of a are spoiled.
    void advance(T* state, T* a, const T* b, int64_t n) {
        T kept = scalar_exp(c[n - 1]);
        for (int64_t i = 0; i < call_.d; i++)
            for (int64_t j = 0; j <= call_.d_v; j++) state[i * e_ + j] *= kept;
        multiply_.run(call_.d, call_.d_v + 1, n, {a, 1, d_}, {b, e_, 1}, state, e_, true);
    }
    // Each row times exp(by(i)).
    template <class By> void scale_rows(T* x, int64_t ld, int64_t width, int64_t n, By by) {
        for (int64_t i = 0; call_.decay.data != nullptr && i < n; i++) {
            T factor = scalar_exp(by(i));
            for (int64_t j = 0; j < width; j++) x[i * ld + j] *= factor;
        }
    }
    void scale_by_end(T* x, int64_t ld, int64_t width, int64_t n) {
        scale_rows(x, ld, width, n, [&](int64_t i) { return c[n - 1] - c[i]; });
    }
    void scale_by_past(T* x, int64_t ld, int64_t width, int64_t n) {
        scale_rows(x, ld, width, n, [&](int64_t i) { return c[i]; });
    }
    void load_state(const T* from, T* state) const {
        for (int64_t i = 0; i < call_.d; i++) memcpy(state + i * e_, from + i * (call_.d_v + 1), size_t(call_.d_v + 1) * sizeof(T));
    }
    void store_state(const T* state, T* to) const {
        for (int64_t i = 0; i < call_.d; i++) memcpy(to + i * (call_.d_v + 1), state + i * e_, size_t(call_.d_v + 1) * sizeof(T));
    }
    // to = from * slope(x) * factor, a row.
    void through_feature(const T* from, const T* x, T factor, T* to) {
        map(slope_, call_.slope_at, x, to);
        for (int64_t j = 0; j < call_.d; j++) to[j] *= from[j] * factor;
    }
    static T dot(const T* a, const T* b, int64_t n) {
        T sum = 0;
        for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
        return sum;
    }
    static T* row_of(const Array& x, int64_t b, int64_t h, int64_t i) {
        return static_cast<T*>(x.data) + b * x.batch + h * x.head + i * x.row;
    }

    const LinearCall& call_;
    int64_t d_, e_, n_, rows_;  // padded: d, d_v + 1, a chunk; the rows of a matrix
    T *f_q, *f_k, *v, *w, *c;

   protected:
    void map(Interpreter<T>& program, int at, const T* x, T* to) {
        for (int64_t j = 0; j < call_.d; j += LANES) {
            int n = int(smaller<int64_t>(LANES, call_.d - j));
            program.enter_scores(0, 0, n, x + j);
            program.take(at, 0, 0, n, to + j);
        }
    }
    Interpreter<T> feature_, slope_;
    Multiplier<T> multiply_;
};

template <class T> class LinearForward : LinearHead<T> {
    using Head = LinearHead<T>;
    using Head::call_, Head::d_, Head::e_, Head::n_, Head::f_q, Head::f_k, Head::v, Head::w, Head::multiply_;

   public:
    LinearForward(const LinearCall& call, Scratch& scratch)
        : Head(call, scratch), acc_(this->take(scratch, e_)), state_(this->take_state(scratch)) {}

    void run(const LinearTask& task, const Pause& pause) {
        this->enter();
        T* kept = static_cast<T*>(call_.states) + task.state * call_.d * (call_.d_v + 1);
        this->load_state(kept, state_);
        for (int64_t first = task.begin; !call_.causal && first < task.end && !pause(); first += call_.chunk) advance(task, first);
        for (int64_t first = task.begin; first < task.end && !pause(); first += call_.chunk) {
            int64_t n = smaller(call_.chunk, task.end - first), group = call_.heads / call_.heads_k;
            this->decays(task.b, task.hk, first, n);
            if (call_.causal) {
                this->features(call_.k, task.b, task.hk, first, n, T(1), f_k);
                this->values(task.b, task.hk, first, n);
            }
            for (int64_t h = task.hk * group; h < (task.hk + 1) * group; h++) one_head(task.b, h, first, n);
            if (call_.causal) absorb(n);
        }
        this->store_state(state_, kept);
    }

   private:
    void advance(const LinearTask& task, int64_t first) {
        int64_t n = smaller(call_.chunk, task.end - first);
        this->decays(task.b, task.hk, first, n);
        this->features(call_.k, task.b, task.hk, first, n, T(1), f_k);
        this->values(task.b, task.hk, first, n);
        absorb(n);
    }
    void absorb(int64_t n) {
        this->scale_by_end(f_k, d_, call_.d, n);
        Head::advance(state_, f_k, v, n);
    }
    void one_head(int64_t b, int64_t h, int64_t first, int64_t n) {
        this->features(call_.q, b, h, first, n, T(call_.scale), f_q);
        multiply_.run(n, call_.d_v + 1, call_.d, {f_q, d_, 1}, {state_, e_, 1}, acc_, e_, false);
        if (call_.causal) {
            this->scale_by_past(acc_, e_, call_.d_v + 1, n);
            this->weights(f_q, f_k, d_, call_.d, n);
            multiply_.run(n, call_.d_v + 1, n, {w, n_, 1}, {v, e_, 1}, acc_, e_, true);
        }
        for (int64_t i = 0; i < n; i++) {
            T sum = acc_[i * e_ + call_.d_v], share = sum == 0 ? T(0) : 1 / sum;
            if (call_.normalize) *Head::row_of(call_.norm, b, h, first + i) = sum;
            T* to = Head::row_of(call_.out, b, h, first + i);
            for (int64_t j = 0; j < call_.d_v; j++) to[j] = acc_[i * e_ + j] * (call_.normalize ? share : T(1));
        }
    }
    T *acc_, *state_;
};

template <class T> class LinearBackward : LinearHead<T> {
    using Head = LinearHead<T>;
    using Head::call_, Head::d_, Head::e_, Head::n_, Head::f_q, Head::f_k, Head::v, Head::w, Head::multiply_;

   public:
    LinearBackward(const LinearBackwardCall& call, Scratch& scratch)
        : Head(call.forward, scratch), backward_(call), g_(this->take(scratch, e_)), d_f_(this->take(scratch, d_)),
          d_v_(this->take(scratch, e_)), state_(this->take_state(scratch)), d_state_(this->take_state(scratch)) {}

    void run(const LinearTask& task, const Pause& pause) {
        this->enter();
        const int64_t at = task.state * call_.d * (call_.d_v + 1);
        this->load_state(static_cast<T*>(call_.states) + at, state_);
        this->load_state(static_cast<T*>(backward_.d_states) + at, d_state_);
        if (!call_.causal) {  // all rows have seen the state after the last
            for (int64_t first = task.begin; first < task.end && !pause(); first += call_.chunk) add_rows(task, first);
        }
        for (int64_t first = task.begin; first < task.end && !pause(); first += call_.chunk) queries(task, first);
        for (int64_t end = task.end; end > task.begin && !pause();) {
            int64_t n = (end - task.begin - 1) % call_.chunk + 1;
            keys(task, end - n, n);
            end -= n;
        }
        this->store_state(d_state_, static_cast<T*>(backward_.d_states) + at);
    }

   private:
    int64_t group() const { return call_.heads / call_.heads_k; }
    void rows(int64_t b, int64_t h, int64_t first, int64_t n) {
        for (int64_t i = 0; i < n; i++)
            memcpy(g_ + i * e_, Head::row_of(backward_.g, b, h, first + i), size_t(call_.d_v + 1) * sizeof(T));
    }
    void chunk(const LinearTask& task, int64_t first, int64_t n) {
        this->decays(task.b, task.hk, first, n);
        this->features(call_.k, task.b, task.hk, first, n, T(1), f_k);
        this->values(task.b, task.hk, first, n);
    }
    void add_rows(const LinearTask& task, int64_t first) {
        int64_t n = smaller(call_.chunk, task.end - first);
        this->decays(task.b, task.hk, first, n);
        for (int64_t h = task.hk * group(); h < (task.hk + 1) * group(); h++) {
            this->features(call_.q, task.b, h, first, n, T(call_.scale), f_q);
            rows(task.b, h, first, n);
            Head::advance(d_state_, f_q, g_, n);
        }
    }

    // d_q of a chunk, forwards, with the state before it.
    void queries(const LinearTask& task, int64_t first) {
        int64_t n = smaller(call_.chunk, task.end - first);
        chunk(task, first, n);
        for (int64_t h = task.hk * group(); h < (task.hk + 1) * group(); h++) {
            rows(task.b, h, first, n);
            multiply_.run(n, call_.d, call_.d_v + 1, {g_, e_, 1}, {state_, 1, e_}, d_f_, d_, false);
            if (call_.causal) {
                this->scale_by_past(d_f_, d_, call_.d, n);
                this->weights(g_, v, e_, call_.d_v + 1, n);
                multiply_.run(n, call_.d, n, {w, n_, 1}, {f_k, d_, 1}, d_f_, d_, true);
            }
            this->features(call_.q, task.b, h, first, n, T(call_.scale), f_q);
            for (int64_t i = 0; i < n; i++) {
                *Head::row_of(backward_.d_c, task.b, task.hk, first + i) += Head::dot(f_q + i * d_, d_f_ + i * d_, call_.d);
                this->through_feature(d_f_ + i * d_, Head::row_of(call_.q, task.b, h, first + i), T(call_.scale),
                                      Head::row_of(backward_.d_q, task.b, h, first + i));
            }
        }
        if (!call_.causal) return;
        this->scale_by_end(f_k, d_, call_.d, n);
        Head::advance(state_, f_k, v, n);
    }

    // d_k and d_v of a chunk, backwards, with the gradient of the state behind it.
    void keys(const LinearTask& task, int64_t first, int64_t n) {
        chunk(task, first, n);
        multiply_.run(n, call_.d, call_.d_v + 1, {v, e_, 1}, {d_state_, 1, e_}, d_f_, d_, false);
        multiply_.run(n, call_.d_v + 1, call_.d, {f_k, d_, 1}, {d_state_, e_, 1}, d_v_, e_, false);
        this->scale_by_end(d_f_, d_, call_.d, n);
        this->scale_by_end(d_v_, e_, call_.d_v + 1, n);
        T kept = scalar_exp(this->c[n - 1]);
        for (int64_t i = 0; call_.causal && i < call_.d * e_; i++) d_state_[i] *= kept;
        for (int64_t h = task.hk * group(); call_.causal && h < (task.hk + 1) * group(); h++) {
            this->features(call_.q, task.b, h, first, n, T(call_.scale), f_q);
            rows(task.b, h, first, n);
            this->weights(f_q, f_k, d_, call_.d, n);
            multiply_.run(n, call_.d_v + 1, n, {w, 1, n_}, {g_, e_, 1}, d_v_, e_, true);
            this->weights(g_, v, e_, call_.d_v + 1, n);
            multiply_.run(n, call_.d, n, {w, 1, n_}, {f_q, d_, 1}, d_f_, d_, true);
            this->scale_by_past(f_q, d_, call_.d, n);
            multiply_.run(call_.d, call_.d_v + 1, n, {f_q, 1, d_}, {g_, e_, 1}, d_state_, e_, true);
        }
        for (int64_t i = 0; i < n; i++) {
            *Head::row_of(backward_.d_c, task.b, task.hk, first + i) -= Head::dot(f_k + i * d_, d_f_ + i * d_, call_.d);
            this->through_feature(d_f_ + i * d_, Head::row_of(call_.k, task.b, task.hk, first + i), T(1),
                                  Head::row_of(backward_.d_k, task.b, task.hk, first + i));
            memcpy(Head::row_of(backward_.d_v, task.b, task.hk, first + i), d_v_ + i * e_, size_t(call_.d_v) * sizeof(T));
        }
    }

    const LinearBackwardCall& backward_;
    T *g_, *d_f_, *d_v_, *state_, *d_state_;
};

template <class Pass, class Call> size_t linear_scratch(const Call& call) {
    Scratch counted(nullptr);
    Pass pass(call, counted);
    return counted.used();
}
template <class Pass, class Call> void linear_run(const Call& call, const LinearTask& task, void* scratch, const Pause& pause) {
    Scratch room(scratch);
    Pass(call, room).run(task, pause);
}

}  // namespace

// Runs an expression on a tile. Values that vary along queries or keys alone are computed once a tile; the rest a row
// of the tile at a time, so that the cost of decoding an instruction is spread over a row of scores.
#pragma once
#include "engine.h"
#include "scratch.h"
#include "simd.h"

namespace {

constexpr int LANES = 256;  // scores of a row that the interpreter takes at a time: its registers stay in L1

struct QueryHead {  // of a sequence: what the variables B, H, HK and the lengths are read from
    const Sequence* sequence;
    int64_t b, h, hk;
};

// -- what instructions do ---------------------------------------------------------------------------------------------

typedef void (*Run)(int n, void* to, const void* a, const void* b, const void* c);

// The loops below are written for the compiler to vectorise: a vector operand advances, any other stays where it is.
template <class R, class A, class F, bool AV, bool BV> void binary(int n, void* to, const void* a, const void* b, const void*) {
    R* __restrict r = static_cast<R*>(to);
    const A *x = static_cast<const A*>(a), *y = static_cast<const A*>(b);
    for (int i = 0; i < n; i++) r[i] = F::of(x[AV ? i : 0], y[BV ? i : 0]);
}
template <class R, class A, class F> void unary(int n, void* to, const void* a, const void*, const void*) {
    R* __restrict r = static_cast<R*>(to);
    const A* x = static_cast<const A*>(a);
    for (int i = 0; i < n; i++) r[i] = F::of(x[i]);
}
template <class R, class I, bool CV, bool AV, bool BV>
void where(int n, void* to, const void* c, const void* a, const void* b) {
    R* __restrict r = static_cast<R*>(to);
    const I* test = static_cast<const I*>(c);
    const R *x = static_cast<const R*>(a), *y = static_cast<const R*>(b);
    for (int i = 0; i < n; i++) r[i] = test[CV ? i : 0] ? x[AV ? i : 0] : y[BV ? i : 0];
}

INLINE float floor_of(float x) { return __builtin_floorf(x); }
INLINE double floor_of(double x) { return __builtin_floor(x); }
INLINE float scalar_exp(float x) { return __builtin_expf(x); }
INLINE double scalar_exp(double x) { return __builtin_exp(x); }

// Integers wrap as unsigned ones do, and division floors; by 0 it gives 0.
template <class I> struct UnsignedOf;
template <> struct UnsignedOf<int32_t> { typedef uint32_t type; };
template <> struct UnsignedOf<int64_t> { typedef uint64_t type; };
template <class I> using Unsigned = typename UnsignedOf<I>::type;
template <class A> constexpr bool IS_FLOAT = A(0.5) != A(0);

template <class A> INLINE A floordiv_of(A a, A b) {
    if constexpr (IS_FLOAT<A>) {
        return floor_of(a / b);
    } else {
        if (b == 0) return 0;
        if (b == -1) return A(-Unsigned<A>(a));  // the smallest integer divided by -1 would trap
        A q = a / b;
        return q - A(a % b != 0 && (a < 0) != (b < 0));
    }
}
template <class A> INLINE A mod_of(A a, A b) {
    if constexpr (IS_FLOAT<A>) {
        return a - b * floor_of(a / b);
    } else {
        if (b == 0 || b == -1) return 0;
        A r = a % b;
        return r != 0 && (r < 0) != (b < 0) ? r + b : r;
    }
}

#define WRAPPING(NAME, SIGN)                                                                  \
    struct NAME {                                                                             \
        template <class A> static INLINE A of(A a, A b) {                                     \
            if constexpr (IS_FLOAT<A>) return a SIGN b;                                       \
            else return A(Unsigned<A>(a) SIGN Unsigned<A>(b));                                \
        }                                                                                     \
    }
WRAPPING(AddOp, +);
WRAPPING(SubOp, -);
WRAPPING(MulOp, *);
#undef WRAPPING
struct DivOp { template <class A> static INLINE A of(A a, A b) { return a / b; } };
struct FloorDivOp { template <class A> static INLINE A of(A a, A b) { return floordiv_of(a, b); } };
struct ModOp { template <class A> static INLINE A of(A a, A b) { return mod_of(a, b); } };
struct MinOp { template <class A> static INLINE A of(A a, A b) { return a < b || a != a ? a : b; } };
struct MaxOp { template <class A> static INLINE A of(A a, A b) { return a > b || a != a ? a : b; } };
struct LtOp { template <class A> static INLINE bool of(A a, A b) { return a < b; } };
struct LeOp { template <class A> static INLINE bool of(A a, A b) { return a <= b; } };
struct GtOp { template <class A> static INLINE bool of(A a, A b) { return a > b; } };
struct GeOp { template <class A> static INLINE bool of(A a, A b) { return a >= b; } };
struct EqOp { template <class A> static INLINE bool of(A a, A b) { return a == b; } };
struct NeOp { template <class A> static INLINE bool of(A a, A b) { return a != b; } };
struct AndOp { template <class A> static INLINE A of(A a, A b) { return a & b; } };
struct OrOp { template <class A> static INLINE A of(A a, A b) { return a | b; } };
struct NotOp { template <class A> static INLINE A of(A a) { return a ^ 1; } };
struct NegOp {
    template <class A> static INLINE A of(A a) {
        if constexpr (IS_FLOAT<A>) return -a;
        else return A(-Unsigned<A>(a));
    }
};
struct AbsOp {
    template <class A> static INLINE A of(A a) {
        if constexpr (IS_FLOAT<A>) return a < 0 ? -a : a == 0 ? A(0) : a;
        else return a < 0 ? A(-Unsigned<A>(a)) : a;
    }
};
struct NarrowOp {  // an index leads to the same cell: it is clamped to an array, which has at most 2^31 in a dimension
    static INLINE int32_t of(int64_t a) { return int32_t(larger<int64_t>(INT32_MIN, smaller<int64_t>(a, INT32_MAX))); }
};
struct SameOp { template <class A> static INLINE A of(A a) { return a; } };
struct ExpOp { template <class A> static INLINE A of(A a) { return scalar_exp(a); } };
struct LogOp { template <class A> static INLINE A of(A a) { return log_of(a); } };

// tanh: near 0 an odd polynomial, elsewhere (1 - e) / (1 + e) with e = exp(-2 |x|).
INLINE Vec<float> tanh_of(Vec<float> x) {
    Vec<float> size = (Vec<float>)((Vec<int32_t>)x & 0x7fffffff);
    Vec<float> e = exp_of(-2 * size);
    Vec<float> far = (1 - e) / (1 + e);
    Vec<float> z = x * x;
    Vec<float> p = splat(-5.6973794e-3f);
    p = p * z + 2.0632543e-2f;
    p = p * z - 5.3737797e-2f;
    p = p * z + 1.333142e-1f;
    p = p * z - 3.333328e-1f;
    Vec<float> near = size + size * z * p;
    Vec<float> magnitude = size < 0.625f ? near : far;
    Vec<int32_t> sign = (Vec<int32_t>)x & int32_t(0x80000000);
    return (Vec<float>)((Vec<int32_t>)magnitude | sign);
}
template <class T> void tanh_row(int n, void* to, const void* a, const void*, const void*) {
    T* r = static_cast<T*>(to);
    const T* x = static_cast<const T*>(a);
    if constexpr (sizeof(T) == 4) {
        int i = 0;
        for (; i + VL<T> <= n; i += VL<T>) store(r + i, tanh_of(load(x + i)));
        if (i < n) {
            T rest[VL<T>] = {};
            memcpy(rest, x + i, size_t(n - i) * sizeof(T));
            store(rest, tanh_of(load(rest)));
            memcpy(r + i, rest, size_t(n - i) * sizeof(T));
        }
    } else {
        for (int i = 0; i < n; i++) r[i] = __builtin_tanh(x[i]);
    }
}

// -- loads ------------------------------------------------------------------------------------------------------------

template <class T> struct Index {  // of one dimension
    const Int<T>* at;
    bool varies;
};

// Where a load reads: each index is clamped to the array, so nothing is ever read outside.
template <class T> INLINE int64_t cell_of(const Slot& slot, const Index<T>* index, int i) {
    int64_t cell = 0;
    for (int k = 0; k < slot.rank; k++) {
        int64_t at = index[k].at[index[k].varies ? i : 0];
        cell += larger<int64_t>(0, smaller<int64_t>(at, slot.size[k] - 1)) * slot.stride[k];
    }
    return cell;
}
struct Truth { uint8_t byte; };  // of a condition: anything but 0 is true
INLINE int widened(Truth x) { return x.byte != 0; }

// Whether n cells are consecutive along the last dimension, as a dense mask or bias is read.
template <class T> bool is_ramp(const Slot& slot, const Index<T>* index, int n) {
    int last = slot.rank - 1;
    if (last < 0 || !index[last].varies) return false;
    for (int k = 0; k < last; k++)
        if (index[k].varies) return false;
    const Int<T>* at = index[last].at;
    const int64_t most = sizeof(Int<T>) == 4 ? INT32_MAX : INT64_MAX;  // a ramp up to there has no sum beyond it
    if (at[0] < 0 || at[0] > smaller(slot.size[last], most) - n) return false;
    bool consecutive = true;
    for (int i = 1; i < n; i++) consecutive &= at[i] == at[0] + i;
    return consecutive;
}
template <class R, class Stored> INLINE void copy_row(const Stored* from, R* to, int n) {
    for (int i = 0; i < n; i++) to[i] = R(widened(from[i]));
}
#if defined(__F16C__)  // the compiler makes no vectors of the instruction that widens one number
INLINE void copy_row(const Half* from, float* to, int n) { widen_row(from, to, n, 1.0f); }
#endif
template <class R, class T, class Stored> void gather(const Slot& slot, const Index<T>* index, int n, R* to) {
    const Stored* data = static_cast<const Stored*>(slot.data);
    if (n > 0 && is_ramp(slot, index, n)) {
        const Stored* from = data + cell_of<T>(slot, index, 0);
        int64_t step = slot.stride[slot.rank - 1];
        if (step == 1)
            copy_row(from, to, n);
        else
            for (int i = 0; i < n; i++) to[i] = R(widened(from[i * step]));
        return;
    }
    for (int i = 0; i < n; i++) to[i] = R(widened(data[cell_of<T>(slot, index, i)]));
}

template <class R, class T> void read_integers(const Slot& slot, const Index<T>* index, int n, R* to) {
    switch (slot.type) {
        case INT8: return gather<R, T, int8_t>(slot, index, n, to);
        case INT16: return gather<R, T, int16_t>(slot, index, n, to);
        case INT32: return gather<R, T, int32_t>(slot, index, n, to);
        case INT64: return gather<R, T, int64_t>(slot, index, n, to);
        default: return gather<R, T, uint8_t>(slot, index, n, to);
    }
}
template <class T> void read(const Slot& slot, const Index<T>* index, int n, bool wide, void* to) {
    T* f = static_cast<T*>(to);
    switch (slot.type) {
        case FLOAT32: return gather<T, T, float>(slot, index, n, f);
        case FLOAT64: return gather<T, T, double>(slot, index, n, f);
        case FLOAT16: return gather<T, T, Half>(slot, index, n, f);
        case BFLOAT16: return gather<T, T, BFloat>(slot, index, n, f);
        case BOOL: return gather<Int<T>, T, Truth>(slot, index, n, static_cast<Int<T>*>(to));
        default: return wide ? read_integers(slot, index, n, static_cast<int64_t*>(to)) : read_integers(slot, index, n, static_cast<Int<T>*>(to));
    }
}

// -- choosing them ----------------------------------------------------------------------------------------------------

template <class R, class A, class F> Run pick_binary(bool av, bool bv) {
    return av && bv ? binary<R, A, F, true, true> : av ? binary<R, A, F, true, false> : binary<R, A, F, false, true>;
}
template <class T, class F> Run arithmetic(Number of, bool av, bool bv) {
    if (of == WIDE) return pick_binary<int64_t, int64_t, F>(av, bv);
    return of == REAL ? pick_binary<T, T, F>(av, bv) : pick_binary<Int<T>, Int<T>, F>(av, bv);
}
template <class T, class F> Run comparison(Number of, bool av, bool bv) {
    if (of == WIDE) return pick_binary<Int<T>, int64_t, F>(av, bv);
    return of == REAL ? pick_binary<Int<T>, T, F>(av, bv) : pick_binary<Int<T>, Int<T>, F>(av, bv);
}
template <class T, class F> Run sign(Number of) {
    return of == WIDE ? unary<int64_t, int64_t, F> : of == REAL ? unary<T, T, F> : unary<Int<T>, Int<T>, F>;
}
template <class R, class I> Run pick_where(bool c, bool a, bool b) {
    static const Run all[8] = {
        where<R, I, true, true, true>,   where<R, I, false, false, true>, where<R, I, false, true, false>,
        where<R, I, false, true, true>,  where<R, I, true, false, false>, where<R, I, true, false, true>,
        where<R, I, true, true, false>,  where<R, I, true, true, true>,
    };
    return all[4 * c + 2 * a + b];
}

// The loop for an instruction whose operands vary (or not) in the section it runs in; null for const, var and load.
template <class T> Run pick(const Instruction& in, bool a, bool b, bool c) {
    typedef Int<T> I;
    const Number of = in.operands;
    switch (in.op) {
        case OP_FLOAT: return of == WIDE ? unary<T, int64_t, SameOp> : unary<T, I, SameOp>;
        case OP_ADD: return arithmetic<T, AddOp>(of, a, b);
        case OP_SUB: return arithmetic<T, SubOp>(of, a, b);
        case OP_MUL: return arithmetic<T, MulOp>(of, a, b);
        case OP_DIV: return pick_binary<T, T, DivOp>(a, b);
        case OP_FLOORDIV: return arithmetic<T, FloorDivOp>(of, a, b);
        case OP_MOD: return arithmetic<T, ModOp>(of, a, b);
        case OP_MINIMUM: return arithmetic<T, MinOp>(of, a, b);
        case OP_MAXIMUM: return arithmetic<T, MaxOp>(of, a, b);
        case OP_NEG: return sign<T, NegOp>(of);
        case OP_ABS: return sign<T, AbsOp>(of);
        case OP_EXP: return unary<T, T, ExpOp>;
        case OP_LOG: return unary<T, T, LogOp>;
        case OP_TANH: return tanh_row<T>;
        case OP_LT: return comparison<T, LtOp>(of, a, b);
        case OP_LE: return comparison<T, LeOp>(of, a, b);
        case OP_GT: return comparison<T, GtOp>(of, a, b);
        case OP_GE: return comparison<T, GeOp>(of, a, b);
        case OP_EQ: return comparison<T, EqOp>(of, a, b);
        case OP_NE: return comparison<T, NeOp>(of, a, b);
        case OP_AND: return pick_binary<I, I, AndOp>(a, b);
        case OP_OR: return pick_binary<I, I, OrOp>(a, b);
        case OP_NOT: return unary<I, I, NotOp>;
        case OP_WHERE: return of == WIDE ? pick_where<int64_t, I>(a, b, c) : of == REAL ? pick_where<T, I>(a, b, c) : pick_where<I, I>(a, b, c);
        case OP_WIDEN: return unary<int64_t, I, SameOp>;
        case OP_NARROW: return unary<I, int64_t, NarrowOp>;
        default: return nullptr;
    }
}

// -- the interpreter --------------------------------------------------------------------------------------------------

template <class T> class Interpreter {
   public:
    // Registers for tiles of up to `rows` queries and `keys` keys.
    Interpreter(const Program& program, int64_t rows, int64_t keys, Scratch& scratch) : program_(program) {
        const int64_t lanes[PLACES] = {1, rows, keys, LANES};
        registers_ = scratch.take<char*>(program.n_code);
        runs_ = scratch.take<Run>(program.n_code);
        for (int i = 0; i < program.n_code; i++) {
            char* memory = scratch.take<char>(lanes[program.code[i].place] * width(program.code[i]));
            if (registers_ == nullptr) continue;
            registers_[i] = memory;
            bool varies[3] = {true, true, true};
            for (int k = 0; k < program.code[i].n_args && k < 3; k++)
                varies[k] = varies_in(program.code[i].place, program.code[i].args[k]);
            runs_[i] = pick<T>(program.code[i], varies[0], varies[1], varies[2]);
        }
    }
    bool empty() const { return program_.n_code == 0; }

    void enter(const QueryHead& head) {
        head_ = head;
        section(UNIFORM, 1, 0, 0);
    }
    void enter_queries(int64_t first, int n) {
        first_q_ = first;
        section(ALONG_Q, n, 0, 0);
    }
    void enter_keys(int64_t first, int n) {
        first_k_ = first;
        section(ALONG_K, n, 0, 0);
    }
    // Scores s of query `row` of the tile with keys j to j + n of the tile, n at most LANES.
    void enter_scores(int row, int j, int n, const T* s) {
        s_ = s;
        section(EVERYWHERE, n, row, j);
    }

    // A register's value at those scores: a vector along the keys, or one number for all of them.
    bool varies(int reg) const { return program_.code[reg].place >= ALONG_K; }
    template <class V> const V* at(int reg, int row, int j) const {
        return static_cast<const V*>(operand(reg, EVERYWHERE, row, j));
    }
    // The same, one number for each of n scores. It may be the scores themselves that are taken, where they are.
    void take(int reg, int row, int j, int n, T* to) const {
        const T* value = at<T>(reg, row, j);
        if (varies(reg))
            memmove(to, value, size_t(n) * sizeof(T));
        else
            for (int i = 0; i < n; i++) to[i] = *value;
    }
    // A condition: 1 where it holds.
    void take(int reg, int row, int j, int n, uint8_t* to) const {
        const Int<T>* holds = at<Int<T>>(reg, row, j);
        if (varies(reg))
            for (int i = 0; i < n; i++) to[i] = uint8_t(holds[i]);
        else
            memset(to, int(*holds), size_t(n));
    }
    // The cells of `grid` that a load reads at n of those scores; one, if it reads the same for all of them.
    void cells(int load, const Slot& grid, int row, int j, int n, int64_t* to) const {
        Index<T> index[MAX_RANK];
        indices(program_.code[load], EVERYWHERE, row, j, index);
        to[0] = cell_of<T>(grid, index, 0);
        if (!varies(load)) return;
        if (is_ramp(grid, index, n))
            for (int i = 1; i < n; i++) to[i] = to[0] + i * grid.stride[grid.rank - 1];
        else
            for (int i = 1; i < n; i++) to[i] = cell_of<T>(grid, index, i);
    }

   private:
    // Whether a register's value advances with the lanes of a section.
    bool varies_in(int where, int reg) const {
        int place = program_.code[reg].place;
        return where == EVERYWHERE ? place >= ALONG_K : place == where;
    }
    const void* operand(int reg, int where, int row, int j) const {
        const Instruction& in = program_.code[reg];
        if (in.op == OP_VAR && in.slot == VAR_S) return s_;
        if (where != EVERYWHERE || in.place == UNIFORM || in.place == EVERYWHERE) return registers_[reg];
        return registers_[reg] + (in.place == ALONG_Q ? row : j) * width(in);
    }
    static int64_t width(const Instruction& in) { return in.result == WIDE ? sizeof(int64_t) : sizeof(T); }
    void indices(const Instruction& in, int where, int row, int j, Index<T>* index) const {
        for (int k = 0; k < in.n_args; k++)
            index[k] = {static_cast<const Int<T>*>(operand(in.args[k], where, row, j)), varies_in(where, in.args[k])};
    }

    void section(int place, int n, int row, int j) {
        for (int i = 0; i < program_.n_code; i++) {
            const Instruction& in = program_.code[i];
            if (in.place != place) continue;
            if (in.op == OP_CONST) {
                constant(in, registers_[i]);
            } else if (in.op == OP_VAR) {
                variable(in.slot, n, registers_[i]);
            } else if (in.op == OP_LOAD) {
                Index<T> index[MAX_RANK];
                indices(in, place, row, j, index);
                read<T>(program_.slots[in.slot], index, n, in.result == WIDE, registers_[i]);
            } else {
                const void* args[3] = {};
                for (int k = 0; k < in.n_args; k++) args[k] = operand(in.args[k], place, row, j);
                runs_[i](n, registers_[i], args[0], args[1], args[2]);
            }
        }
    }
    static void constant(const Instruction& in, char* to) {
        if (in.result == REAL) *reinterpret_cast<T*>(to) = T(in.value);
        else *reinterpret_cast<Int<T>*>(to) = Int<T>(in.value);
    }
    void variable(int which, int n, char* memory) const {
        if (which == VAR_S) return;  // read where it is
        const Sequence& seq = *head_.sequence;
        Int<T>* to = reinterpret_cast<Int<T>*>(memory);
        int64_t first = 0;
        switch (which) {
            case VAR_B: first = seq.first_batch + head_.b; break;
            case VAR_H: first = head_.h; break;
            case VAR_HK: first = head_.hk; break;
            case VAR_NQ: first = seq.total_q; break;
            case VAR_NK: first = seq.total_k; break;
            case VAR_Q: first = seq.origin_q + first_q_; break;
            case VAR_QP: first = seq.packed_q + first_q_; break;
            case VAR_K: first = seq.origin_k + first_k_; break;
            default: first = seq.packed_k + first_k_;
        }
        for (int i = 0; i < n; i++) to[i] = Int<T>(first + i);
    }

    const Program& program_;
    char** registers_;
    Run* runs_;
    QueryHead head_ = {};
    int64_t first_q_ = 0, first_k_ = 0;
    const T* s_ = nullptr;
};

}  // namespace

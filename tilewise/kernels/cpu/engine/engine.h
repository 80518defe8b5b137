// What crosses from Python to the engine: plain structures. ../structs.py has them once more, field by field in the same
// order, and ../ops.py the operations; ../marshal.py fills them in.
#pragma once
#include <stdint.h>

enum Type : int32_t { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, INT16, INT32, INT64, UINT8, BOOL };
enum Kind : int64_t { EMPTY, PARTIAL, FULL };  // of a tile; a plan has no EMPTY ones
enum Status : int32_t { DONE, NO_MEMORY, INTERRUPTED, NOT_ROWS };  // NOT_ROWS: a sequence is not within the arrays

// (batch, head, row, d) numbers, the last contiguous. Strides are in numbers.
struct Array {
    void* data;
    int64_t batch, head, row;
};

// Runs of tiles: those of row i of (b, h) are table[offsets[b * batch + h * head + i]] up to the next offset.
struct Runs {
    const int64_t (*table)[3];  // first tile, last tile (exclusive), kind
    const int64_t* offsets;
    int64_t batch, head;  // 0 where the plan is the same for all
};

// One packed sequence, or a whole dense call.
struct Sequence {
    int64_t q_begin, k_begin;  // rows of the arrays
    int64_t n_q, n_k;
    int64_t first_batch, origin_q, origin_k, total_q, total_k, packed_q, packed_k;  // as in Shape
    int64_t splits;  // of the keys: each is a task of the backward pass
    Runs by_query, by_key;
};

// -- expressions as programs ------------------------------------------------------------------------------------------

enum Op : int32_t {
    OP_CONST, OP_VAR, OP_LOAD, OP_FLOAT, OP_ADD, OP_SUB, OP_MUL, OP_DIV, OP_FLOORDIV, OP_MOD, OP_NEG, OP_ABS,
    OP_MINIMUM, OP_MAXIMUM, OP_WHERE, OP_EXP, OP_LOG, OP_TANH, OP_LT, OP_LE, OP_GT, OP_GE, OP_EQ, OP_NE, OP_AND,
    OP_OR, OP_NOT, OP_WIDEN, OP_NARROW
};
enum Variable : int32_t { VAR_S, VAR_B, VAR_H, VAR_HK, VAR_NQ, VAR_NK, VAR_Q, VAR_QP, VAR_K, VAR_KP };

// Where a value varies: nowhere, along the queries of a tile, along its keys, or from score to score.
enum Place : int32_t { UNIFORM, ALONG_Q, ALONG_K, EVERYWHERE, PLACES };

// What a register holds: integers and conditions as wide as the type computed with, floats of it, or integers of 64 bits.
enum Number : int32_t { WHOLE, REAL, WIDE };

constexpr int MAX_RANK = 8;

struct Slot {  // an array that an expression reads
    const void* data;
    int32_t type, rank;
    int64_t size[MAX_RANK], stride[MAX_RANK];
};

// Its number is the register it writes; args are the numbers of earlier instructions.
struct Instruction {
    int32_t op;
    int32_t place;
    Number operands;  // of a choice: what is chosen from
    Number result;
    int32_t n_args;
    int32_t args[MAX_RANK];
    int32_t slot;  // of a load; the variable of a var
    double value;  // of a const
};

struct Program {
    const Instruction* code;
    int32_t n_code;
    const Slot* slots;
};

// A loaded array's gradient: at each score, d_score * slope is added to the cell that a load reads.
struct ArrayGrad {
    int32_t slope, load;  // registers of the score's program
    Slot grid;            // the array's sizes, with the strides of `total`
    double* total;        // sums: one for all tasks, or one for each
    int64_t cells;
    int32_t copies;
};

// Which tasks of a backward pass may run at the same time: those that add to the same cells of a total may not.
enum Turns : int32_t { AT_ONCE, HEADS_IN_TURN, ALL_IN_TURN };

// -- calls ------------------------------------------------------------------------------------------------------------

struct Call {
    int32_t type;
    int32_t n_sequences;
    int64_t batch, heads, heads_k, d, d_v;
    int64_t rows_q, rows_k;  // of the arrays: what sequences are within
    int64_t tile_q, tile_k;
    double scale;
    Array q, k, v, out, lse;  // lse's rows are contiguous numbers of the type computed with
    Array remainder;          // what rounding takes from out, of the type of q; no data: it is not kept
    const Sequence* sequences;
    Program mask, score;  // no code: none
    int32_t mask_at, score_at;  // the registers that hold the results
    const void* sinks;          // (heads,) of the type computed with, or null
};

// Query heads that share a key head. Static: the objects of all instruction sets have their own.
static inline int64_t group_of(const Call& call) { return call.heads / call.heads_k; }

struct BackwardCall {
    Call forward;
    Array d_out, delta, d_q, d_k, d_v;  // delta: as lse, -d_lse when it comes in
    int32_t slope_at;  // register of the score's program: d score / d S; -1: it is 1
    int32_t n_grads;
    const ArrayGrad* grads;
    int32_t turns;
};

// One instruction set's path: compiled once for each, with the compiler told which (see build.py).
#include "backward.h"
#include "decode.h"
#include "limits.h"
#include "linear.h"

namespace {

#define BY_COMPUTE(NAME, ...) (call.type == FLOAT64 ? NAME<double>(__VA_ARGS__) : NAME<float>(__VA_ARGS__))
#define BY_STORED(NAME, ...)                                                  \
    switch (call.type) {                                                      \
        case FLOAT64: return NAME<double, double>(__VA_ARGS__);               \
        case FLOAT16: return NAME<float, Half>(__VA_ARGS__);                  \
        case BFLOAT16: return NAME<float, BFloat>(__VA_ARGS__);               \
        default: return NAME<float, float>(__VA_ARGS__);                      \
    }

size_t any_lay_out(const Call& call, Packed& packed, void* memory) { return BY_COMPUTE(lay_out, call, packed, memory); }
size_t any_pack_scratch(const Call& call) { return BY_COMPUTE(pack_scratch, call); }
void any_pack(const Call& call, const Packed& packed, int64_t begin, int64_t end, void* scratch) {
    BY_STORED(pack_keys, call, packed, begin, end, scratch)
}
size_t any_forward_scratch(const Call& call) { return BY_COMPUTE(forward_scratch, call); }
void any_forward(const Call& call, const Packed& packed, int64_t h, int64_t tile, void* scratch) {
    BY_STORED(forward_tile, call, packed, h, tile, scratch)
}

size_t any_decode_scratch(const Call& call) { return BY_COMPUTE(decode_scratch, call); }
size_t any_decode_partial_bytes(const Call& call) { return BY_COMPUTE(decode_partial_bytes, call); }
void any_decode(const Call& call, const Packed& head, int64_t begin, int64_t end, void* partials, void* scratch) {
    BY_STORED(decode_split, call, head, begin, end, partials, scratch)
}
void any_decode_merge(const Call& call, const Packed& head, int64_t splits, void* partials) {
    BY_STORED(decode_merge, call, head, splits, partials)
}

#define BACKWARD_BY_COMPUTE(NAME, ...) (call.forward.type == FLOAT64 ? NAME<double>(__VA_ARGS__) : NAME<float>(__VA_ARGS__))
size_t any_lay_out_backward(const BackwardCall& call, PackedBackward& packed, void* memory) {
    return BACKWARD_BY_COMPUTE(lay_out_backward, call, packed, memory);
}
size_t any_pack_backward_scratch(const BackwardCall& call) { return BACKWARD_BY_COMPUTE(pack_backward_scratch, call); }
void any_pack_backward_keys(const BackwardCall& backward, const PackedBackward& packed, int64_t begin, int64_t end, void* scratch) {
    const Call& call = backward.forward;
    BY_STORED(pack_backward_keys, backward, packed, begin, end, scratch)
}
void any_pack_backward_queries(const BackwardCall& backward, const PackedBackward& packed, int64_t g, int64_t begin, int64_t end, void* scratch) {
    const Call& call = backward.forward;
    BY_STORED(pack_backward_queries, backward, packed, g, begin, end, scratch)
}
void any_add_delta(const BackwardCall& backward, const PackedBackward& packed, int64_t g, int64_t begin, int64_t end) {
    const Call& call = backward.forward;
    BY_STORED(add_delta, backward, packed, g, begin, end)
}
size_t any_backward_scratch(const BackwardCall& call) { return BACKWARD_BY_COMPUTE(backward_scratch, call); }
void any_backward(const BackwardCall& backward, const PackedBackward& packed, int64_t split, void* scratch, const Pause& pause) {
    const Call& call = backward.forward;
    BY_STORED(backward_split, backward, packed, split, scratch, pause)
}
void any_sum_splits(const BackwardCall& backward, const PackedBackward& packed, int64_t g, int64_t begin, int64_t end) {
    const Call& call = backward.forward;
    BY_STORED(sum_splits, backward, packed, g, begin, end)
}

size_t any_linear_forward_scratch(const LinearCall& call) {
    return call.type == FLOAT64 ? linear_scratch<LinearForward<double>>(call) : linear_scratch<LinearForward<float>>(call);
}
void any_linear_forward(const LinearCall& call, const LinearTask& task, void* scratch, const Pause& pause) {
    if (call.type == FLOAT64) linear_run<LinearForward<double>>(call, task, scratch, pause);
    else linear_run<LinearForward<float>>(call, task, scratch, pause);
}
size_t any_linear_backward_scratch(const LinearBackwardCall& call) {
    return call.forward.type == FLOAT64 ? linear_scratch<LinearBackward<double>>(call) : linear_scratch<LinearBackward<float>>(call);
}
void any_linear_backward(const LinearBackwardCall& call, const LinearTask& task, void* scratch, const Pause& pause) {
    if (call.forward.type == FLOAT64) linear_run<LinearBackward<double>>(call, task, scratch, pause);
    else linear_run<LinearBackward<float>>(call, task, scratch, pause);
}

double any_multiply_add(bool is_double, int64_t rounds) {
    volatile double result;  // or the compiler would find that nobody needs it
    float f = 0;
    double d = 0, flops = is_double ? multiply_add(rounds, &d) : multiply_add(rounds, &f);
    result = d + f;
    (void)result;
    return flops;
}
uint64_t any_read_bytes(const char* p, int64_t n) { return read_bytes(p, n); }

}  // namespace

#define NAMED(PREFIX, NAME) NAMED_(PREFIX, NAME)
#define NAMED_(PREFIX, NAME) PREFIX##NAME
#define TEXT(NAME) TEXT_(NAME)
#define TEXT_(NAME) #NAME

extern const Path NAMED(path_, TILEWISE_ISA);
const Path NAMED(path_, TILEWISE_ISA) = {
    TEXT(TILEWISE_ISA), any_lay_out, any_pack_scratch, any_pack, any_forward_scratch, any_forward,
    any_decode_scratch, any_decode_partial_bytes, any_decode, any_decode_merge,
    any_lay_out_backward, any_pack_backward_scratch, any_pack_backward_keys, any_pack_backward_queries, any_add_delta,
    any_backward_scratch, any_backward, any_multiply_add, any_read_bytes, any_sum_splits,
    any_linear_forward_scratch, any_linear_forward, any_linear_backward_scratch, any_linear_backward,
};

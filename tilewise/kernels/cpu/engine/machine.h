// The machine's limits, measured with all threads at once: what a kernel's speed is compared with.
#pragma once
#include "paths.h"

struct Span {
    const char* data;
    int64_t bytes;
};

double peak_flops(const Path& path, bool is_double);             // multiplications and additions a second
double read_rate(const Path& path, const Span* spans, int n);    // bytes a second, of these

// The machine's limits, measured: what a kernel's speed is compared with.
#pragma once
#include "paths.h"

double peak_flops(const Path& path, bool is_double);  // multiplications and additions a second
double read_rate(const Path& path);                   // bytes a second

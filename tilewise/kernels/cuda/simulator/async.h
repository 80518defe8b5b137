// Shared memory as Hopper's asynchronous instructions address it, for barriers, copies and products.
#pragma once
#include "runtime.h"

typedef unsigned int uint32;
typedef unsigned long long uint64;

namespace simulator {

// Addresses in shared memory are not multiples of more than 16 by themselves: kernels must align what needs it.
constexpr uint32 BASE = 1024 + 16;

unsigned char* memory_at(uint32 address, size_t bytes, SourceLine where);
// What the copy engine and wgmma see: what they wrote, and what was fenced.
const unsigned char* async_read(uint32 address, size_t bytes, SourceLine where);

}  // namespace simulator

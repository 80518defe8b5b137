// Room for one task, handed out piece by piece. Counted first with no memory behind it, then taken for real.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace {

constexpr size_t ALIGNMENT = 64;

class Scratch {
   public:
    explicit Scratch(void* memory) : begin_(static_cast<char*>(memory)) {}
    template <class T> T* take(int64_t n) {
        size_t at = used_;
        used_ += (size_t(n) * sizeof(T) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        return begin_ == nullptr ? nullptr : reinterpret_cast<T*>(begin_ + at);
    }
    size_t used() const { return used_; }

   private:
    char* begin_;
    size_t used_ = 0;
};

}  // namespace

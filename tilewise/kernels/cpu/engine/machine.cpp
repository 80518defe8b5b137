// The machine's limits, measured with all threads at once.
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <chrono>
#include <vector>

#include "machine.h"
#include "pool.h"

namespace {

typedef std::chrono::steady_clock Clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr int64_t READ_BYTES = int64_t(256) << 20;  // beyond any cache
constexpr int64_t PIECE = int64_t(1) << 20;
constexpr int REPEATS = 5;

// The best of a few repetitions of `work` units done by all threads.
double best_rate(double work, int64_t tasks, const std::function<void(int64_t, void*)>& task) {
    double best = 0;
    for (int i = 0; i < REPEATS; i++) {
        auto start = Clock::now();
        if (run_tasks(tasks, 0, nullptr, task) != 0) return 0;
        best = std::max(best, work / seconds_since(start));
    }
    return best;
}

}  // namespace

double peak_flops(const Path& path, bool is_double) {
    const int64_t rounds = 2000000, tasks = 8 * int64_t(threads());
    double flops = path.multiply_add(is_double, 1);
    return best_rate(flops * double(rounds) * double(tasks), tasks,
                     [&](int64_t, void*) { path.multiply_add(is_double, rounds); });
}

double read_rate(const Path& path) {
    char* memory = static_cast<char*>(aligned_alloc(size_t(2) << 20, size_t(READ_BYTES)));
    if (memory == nullptr) return 0;
#if defined(__linux__)
    madvise(memory, size_t(READ_BYTES), MADV_HUGEPAGE);  // as NumPy asks for its large arrays
#endif
    memset(memory, 1, size_t(READ_BYTES));
    double rate = best_rate(double(READ_BYTES), READ_BYTES / PIECE,
                            [&](int64_t i, void*) { path.read_bytes(memory + i * PIECE, PIECE); });
    free(memory);
    return rate;
}

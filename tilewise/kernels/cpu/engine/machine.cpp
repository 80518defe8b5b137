// The machine's limits, measured with all threads at once.
#include <algorithm>
#include <chrono>
#include <vector>

#include "machine.h"
#include "pool.h"

namespace {

typedef std::chrono::steady_clock Clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr int64_t PIECE = int64_t(1) << 20;
constexpr int64_t ROUND = 512;  // what the loop over vectors reads at a time
constexpr int REPEATS = 5;

// The best of a few repetitions of `work` units done by all threads.
double best_rate(double work, int64_t tasks, const Task& task) {
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
                     [&](int64_t, void*, const Pause&) { path.multiply_add(is_double, rounds); });
}

double read_rate(const Path& path, const Span* spans, int n) {
    std::vector<Span> pieces;
    double bytes = 0;
    for (int i = 0; i < n; i++)
        for (int64_t at = 0; at + ROUND <= spans[i].bytes; at += PIECE) {
            int64_t size = std::min(PIECE, spans[i].bytes - at) / ROUND * ROUND;
            pieces.push_back({spans[i].data + at, size});
            bytes += double(size);
        }
    return best_rate(bytes, int64_t(pieces.size()),
                     [&](int64_t i, void*, const Pause&) { path.read_bytes(pieces[size_t(i)].data, pieces[size_t(i)].bytes); });
}

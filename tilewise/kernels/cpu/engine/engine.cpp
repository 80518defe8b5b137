// The entry points: which path, what memory, which tasks in which order.
#include "engine.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "machine.h"
#include "paths.h"
#include "pool.h"

#define API extern "C" __attribute__((visibility("default")))

extern const Path path_portable;
#if defined(TILEWISE_HAVE_AVX2)
extern const Path path_avx2;
#endif
#if defined(TILEWISE_HAVE_AVX512)
extern const Path path_avx512;
#endif

namespace {

// -- instruction sets -------------------------------------------------------------------------------------------------

// Those this processor has, best first.
std::vector<const Path*> find_paths() {
    std::vector<const Path*> found;
#if defined(TILEWISE_HAVE_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        found.push_back(&path_avx512);
#endif
#if defined(TILEWISE_HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        found.push_back(&path_avx2);
#endif
    found.push_back(&path_portable);
    return found;
}
const std::vector<const Path*>& paths() {
    static const auto* found = new std::vector<const Path*>(find_paths());  // never destroyed: threads may outlive main
    return *found;
}
std::atomic<const Path*> chosen{nullptr};
const Path& path() {
    const Path* found = chosen;
    return found == nullptr ? *paths().front() : *found;
}

// -- memory -----------------------------------------------------------------------------------------------------------

constexpr size_t WAVE_BYTES = size_t(48) << 20;  // packed keys and values at a time
constexpr size_t KEPT_BYTES = size_t(64) << 20;  // a block that is kept for the next call: fresh pages are slow

class Block {
   public:
    explicit Block(size_t bytes) : kept_(spare.exchange(nullptr)) {
        if (kept_ != nullptr && kept_->bytes >= bytes) return;
        delete kept_;
        kept_ = nullptr;  // or a failure below would free it again
        kept_ = new Kept(bytes);
    }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() {
        if (kept_->bytes <= KEPT_BYTES) kept_ = spare.exchange(kept_);
        delete kept_;
    }
    char* data() const { return static_cast<char*>(kept_->memory); }

   private:
    struct Kept {
        explicit Kept(size_t wanted) : bytes(wanted), memory(aligned_alloc(4096, wanted / 4096 * 4096 + 4096)) {
            if (memory == nullptr) throw std::bad_alloc();
        }
        ~Kept() { free(memory); }
        size_t bytes;
        void* memory;
    };
    static std::atomic<Kept*> spare;  // without a lock, which a fork could leave locked
    Kept* kept_;
};
std::atomic<Block::Kept*> Block::spare{nullptr};

// -- tasks ------------------------------------------------------------------------------------------------------------

// Whether rows begin to begin + n are among all of them; no sum is taken that could wrap around.
bool are_rows(int64_t begin, int64_t n, int64_t all) { return begin >= 0 && n >= 0 && n <= all && begin <= all - n; }

bool are_rows(const Call& call) {
    return std::all_of(call.sequences, call.sequences + call.n_sequences, [&](const Sequence& s) {
        return are_rows(s.q_begin, s.n_q, call.rows_q) && are_rows(s.k_begin, s.n_k, call.rows_k);
    });
}
bool are_rows(const LinearCall& call) {
    if (!call.packed) return true;
    const int64_t *first = call.lengths, *last = first + call.n_states;
    return *first >= 0 && *last <= call.n && std::is_sorted(first, last + 1);
}

// Every (sequence, batch, key head), in order.
std::vector<Packed> key_heads(const Call& call) {
    std::vector<Packed> all;
    for (int s = 0; s < call.n_sequences; s++)
        for (int64_t b = 0; b < call.batch; b++)
            for (int64_t hk = 0; hk < call.heads_k; hk++) all.push_back({call.sequences + s, b, hk, nullptr, nullptr});
    return all;
}

// For tasks that others, already running, have yet to finish.
void wait_for(const std::atomic<int>& left) {
    while (left > 0) std::this_thread::yield();
}

// wave(heads), on as many heads at a time as fit, laid out in memory: one at least, and enough for this many splits.
template <class Head, class LayOut, class Wave>
int in_waves(const std::vector<Head>& all, int64_t least_splits, const LayOut& lay_out, const Wave& wave) {
    for (size_t next = 0; next < all.size();) {
        std::vector<Head> heads;
        size_t bytes = 0;
        int64_t splits = 0;
        for (; next < all.size(); next++) {
            Head head = all[next];
            size_t more = lay_out(head, nullptr);
            if (!heads.empty() && bytes + more > WAVE_BYTES && splits >= least_splits) break;
            heads.push_back(head);
            bytes += more;
            splits += head.sequence->splits;
        }
        Block memory(bytes);
        char* at = memory.data();
        for (Head& head : heads) at += lay_out(head, at);
        int status = wave(heads);
        if (status != DONE) return status;
    }
    return DONE;
}

struct PackTask {
    int64_t head, begin;
};
struct QueryTask {
    int64_t head, h, tile, work;
};

// How many scores a tile of queries visits.
int64_t work_of(const Call& call, const Packed& head, int64_t h, int64_t tile) {
    const Sequence& seq = *head.sequence;
    const int64_t* offsets = seq.by_query.offsets + head.b * seq.by_query.batch + h * seq.by_query.head + tile;
    int64_t tiles = 0;
    for (int64_t i = offsets[0]; i < offsets[1]; i++) tiles += seq.by_query.table[i][1] - seq.by_query.table[i][0];
    return tiles * std::min(call.tile_q, seq.n_q - tile * call.tile_q);
}

// The longest tasks come first, so that none is left for the end: the last queries of a causal mask have most keys.
std::vector<QueryTask> query_tasks(const Call& call, const std::vector<Packed>& heads) {
    std::vector<QueryTask> tasks;
    for (size_t i = 0; i < heads.size(); i++)
        for (int64_t tile = 0; tile * call.tile_q < heads[i].sequence->n_q; tile++)
            for (int64_t g = 0; g < group_of(call); g++) {
                int64_t h = heads[i].hk * group_of(call) + g;
                tasks.push_back({int64_t(i), h, tile, work_of(call, heads[i], h, tile)});
            }
    std::stable_sort(tasks.begin(), tasks.end(), [](const QueryTask& a, const QueryTask& b) { return a.work > b.work; });
    return tasks;
}

// -- forward ----------------------------------------------------------------------------------------------------------

// Packs the keys and values of these heads, then attends. Both are tasks of one run: a head's queries wait for its keys
// alone, and packing, which comes first, waits for nobody.
int forward_wave(const Path& path, const Call& call, const std::vector<Packed>& heads, Interrupted interrupted) {
    std::vector<PackTask> packs;
    std::vector<std::atomic<int>> unpacked(heads.size());
    for (size_t i = 0; i < heads.size(); i++)
        for (int64_t k = 0; k < heads[i].sequence->n_k; k += PACK_ROWS, unpacked[i]++) packs.push_back({int64_t(i), k});
    std::vector<QueryTask> queries = query_tasks(call, heads);
    size_t scratch = std::max(path.pack_scratch(call), path.forward_scratch(call));
    int64_t first = int64_t(packs.size()), all = first + int64_t(queries.size());
    return run_tasks(all, scratch, interrupted, [&](int64_t i, void* room, const Pause&) {
        if (i < first) {
            const PackTask& task = packs[size_t(i)];
            const Packed& head = heads[size_t(task.head)];
            path.pack(call, head, task.begin, std::min(task.begin + PACK_ROWS, head.sequence->n_k), room);
            unpacked[size_t(task.head)]--;
        } else {
            const QueryTask& task = queries[size_t(i - first)];
            wait_for(unpacked[size_t(task.head)]);
            path.forward(call, heads[size_t(task.head)], task.h, task.tile, room);
        }
    });
}

int attend(const Path& path, const Call& call, const std::vector<Packed>& heads, Interrupted interrupted) {
    return in_waves(
        heads, 0, [&](Packed& head, void* memory) { return path.lay_out(call, head, memory); },
        [&](const std::vector<Packed>& wave) { return forward_wave(path, call, wave, interrupted); });
}

// -- one query a head -------------------------------------------------------------------------------------------------

constexpr int64_t DECODE_SPLIT = 2048;  // keys; by their number alone, so that bits do not depend on the machine
constexpr int64_t TURNS = 8;            // of a thread: it takes neighbouring splits together, for one stream of reads

int decode(const Path& path, const Call& call, const std::vector<Packed>& heads, Interrupted interrupted) {
    size_t bytes = path.decode_partial_bytes(call);
    std::vector<int64_t> first_split(1, 0);  // of each head
    struct Split {
        int64_t head, begin;
    };
    std::vector<Split> splits;
    for (size_t i = 0; i < heads.size(); i++) {
        int64_t n_k = heads[i].sequence->n_k;
        for (int64_t k = 0; k == 0 || k < n_k; k += DECODE_SPLIT) splits.push_back({int64_t(i), k});
        first_split.push_back(int64_t(splits.size()));
    }
    Block partials(bytes * splits.size() + 1);
    const int64_t all = int64_t(splits.size()), together = std::max<int64_t>(1, all / (TURNS * threads()));
    int status = run_tasks((all + together - 1) / together, path.decode_scratch(call), interrupted, [&](int64_t task, void* room, const Pause&) {
        for (int64_t i = task * together; i < std::min(all, (task + 1) * together); i++) {
            const Packed& head = heads[size_t(splits[size_t(i)].head)];
            int64_t begin = splits[size_t(i)].begin, end = std::min(begin + DECODE_SPLIT, head.sequence->n_k);
            path.decode(call, head, begin, end, partials.data() + size_t(i) * bytes, room);
        }
    });
    if (status != DONE) return status;
    return run_tasks(int64_t(heads.size()), 0, interrupted, [&](int64_t i, void*, const Pause&) {
        int64_t first = first_split[size_t(i)];
        path.decode_merge(call, heads[size_t(i)], first_split[size_t(i) + 1] - first, partials.data() + size_t(first) * bytes);
    });
}

// A sequence takes its way by its own length alone, so that it has the same bits whatever it is packed with.
int forward(const Path& path, const Call& call, Interrupted interrupted) {
    if (!are_rows(call)) return NOT_ROWS;
    std::vector<Packed> tiled, single;
    for (const Packed& head : key_heads(call))
        if (head.sequence->n_q > 0) (head.sequence->n_q == 1 ? single : tiled).push_back(head);
    int status = attend(path, call, tiled, interrupted);
    return status != DONE ? status : decode(path, call, single, interrupted);
}

// -- backward ---------------------------------------------------------------------------------------------------------

std::vector<PackedBackward> key_heads(const BackwardCall& call) {
    std::vector<PackedBackward> all;
    int64_t copy = 0;
    for (const Packed& head : key_heads(call.forward)) {
        PackedBackward made{};
        made.sequence = head.sequence;
        made.b = head.b;
        made.hk = head.hk;
        made.splits = head.sequence->splits;
        made.first_copy = copy;
        copy += made.splits;
        all.push_back(made);
    }
    return all;
}

// What is done for a head: its keys and queries are packed, its splits computed when all of that is there, and the sums
// over splits when all splits are.
enum class Step { PACK_KEYS, PACK_QUERIES, SPLIT, SUM };
struct BackwardTask {
    Step step;
    int64_t head, g, begin, end;  // rows; for a split, begin is its number
};
struct Progress {
    std::atomic<int> unpacked{0}, unsplit{0};
};

void add_rows(std::vector<BackwardTask>& tasks, Step step, int64_t head, int64_t g, int64_t n) {
    for (int64_t i = 0; i < n; i += PACK_ROWS) tasks.push_back({step, head, g, i, std::min(i + PACK_ROWS, n)});
}

// The tasks of these heads, in groups that run one after the other: packing first, sums last. Where splits add to the
// same cells of an array's gradient, each of them begins a group.
std::vector<std::vector<BackwardTask>> backward_tasks(const BackwardCall& call, const std::vector<PackedBackward>& heads) {
    std::vector<std::vector<BackwardTask>> groups(1);
    for (size_t i = 0; i < heads.size(); i++) {
        add_rows(groups[0], Step::PACK_KEYS, int64_t(i), 0, heads[i].sequence->n_k);
        for (int64_t g = 0; g < group_of(call.forward); g++)
            add_rows(groups[0], Step::PACK_QUERIES, int64_t(i), g, heads[i].sequence->n_q);
    }
    for (size_t i = 0; i < heads.size(); i++)
        for (int64_t split = 0; split < heads[i].splits; split++) {
            if (call.turns == ALL_IN_TURN || (call.turns == HEADS_IN_TURN && split == 0)) groups.emplace_back();
            groups.back().push_back({Step::SPLIT, int64_t(i), 0, split, split + 1});
        }
    for (size_t i = 0; i < heads.size(); i++)
        for (int64_t g = 0; g < group_of(call.forward); g++)
            add_rows(groups.back(), Step::SUM, int64_t(i), g, heads[i].sequence->n_q);
    return groups;
}

void do_task(const Path& path, const BackwardCall& call, const PackedBackward& head, Progress& progress, const BackwardTask& task, void* room,
             const Pause& pause) {
    switch (task.step) {
        case Step::PACK_KEYS:
            path.pack_backward_keys(call, head, task.begin, task.end, room);
            progress.unpacked--;
            break;
        case Step::PACK_QUERIES:
            path.pack_backward_queries(call, head, task.g, task.begin, task.end, room);
            path.add_delta(call, head, task.g, task.begin, task.end);  // while d_out is in cache
            progress.unpacked--;
            break;
        case Step::SPLIT:
            wait_for(progress.unpacked);
            path.backward(call, head, task.begin, room, pause);
            progress.unsplit--;
            break;
        case Step::SUM:
            wait_for(progress.unsplit);
            path.sum_splits(call, head, task.g, task.begin, task.end);
    }
}

int backward_wave(const Path& path, const BackwardCall& call, const std::vector<PackedBackward>& heads, Interrupted interrupted) {
    std::vector<std::vector<BackwardTask>> groups = backward_tasks(call, heads);
    std::vector<Progress> progress(heads.size());
    for (const auto& tasks : groups)
        for (const BackwardTask& task : tasks) {
            if (task.step == Step::SPLIT) progress[size_t(task.head)].unsplit++;
            else if (task.step != Step::SUM) progress[size_t(task.head)].unpacked++;
        }
    size_t scratch = std::max(path.pack_backward_scratch(call), path.backward_scratch(call));
    int status = DONE;
    for (const auto& tasks : groups) {
        if (status != DONE) break;
        status = run_tasks(int64_t(tasks.size()), scratch, interrupted, [&](int64_t i, void* room, const Pause& pause) {
            const BackwardTask& task = tasks[size_t(i)];
            do_task(path, call, heads[size_t(task.head)], progress[size_t(task.head)], task, room, pause);
        });
    }
    return status;
}

int backward(const Path& path, const BackwardCall& call, Interrupted interrupted) {
    if (!are_rows(call.forward)) return NOT_ROWS;
    return in_waves(
        key_heads(call), 2 * threads(),  // splits, to keep all threads busy
        [&](PackedBackward& head, void* memory) { return path.lay_out_backward(call, head, memory); },
        [&](const std::vector<PackedBackward>& wave) { return backward_wave(path, call, wave, interrupted); });
}

// -- linear attention -------------------------------------------------------------------------------------------------

// Every key head of every sequence.
std::vector<LinearTask> linear_tasks(const LinearCall& call) {
    std::vector<LinearTask> tasks;
    for (int64_t s = 0; s < call.n_states; s++)
        for (int64_t hk = 0; hk < call.heads_k; hk++) {
            int64_t begin = call.packed ? call.lengths[s] : 0, end = call.packed ? call.lengths[s + 1] : call.n;
            tasks.push_back({call.packed ? 0 : s, hk, begin, end, s * call.heads_k + hk});
        }
    return tasks;
}

template <class Any, class Run> int linear(const Any& call, const LinearCall& forward, size_t scratch, const Run& run, Interrupted interrupted) {
    if (!are_rows(forward)) return NOT_ROWS;
    std::vector<LinearTask> tasks = linear_tasks(forward);
    return run_tasks(int64_t(tasks.size()), scratch, interrupted,
                     [&](int64_t i, void* room, const Pause& pause) { run(call, tasks[size_t(i)], room, pause); });
}

// -- Python -----------------------------------------------------------------------------------------------------------

// The interpreter's own functions, which the library is given when it is loaded: so it needs no Python to be built, and
// one library serves every version.
struct Python {
    void* (*save_thread)();
    void (*restore_thread)(void*);
    int (*check_signals)();
} python;
thread_local void* saved_thread = nullptr;

bool signalled() {
    python.restore_thread(saved_thread);
    bool raised = python.check_signals() != 0;
    saved_thread = python.save_thread();
    return raised;
}

// Runs without the interpreter's lock. An interrupt (Ctrl-C) is left as Python's current exception. Only the main thread
// is asked for signals: taking the lock in another one, while the interpreter ends, would end that thread then and there.
template <class F> int without_lock(bool is_main, F call) {
    void* outer = saved_thread;
    saved_thread = python.save_thread();
    int status;
    try {
        status = call(is_main ? signalled : nullptr);
    } catch (const std::bad_alloc&) {
        status = NO_MEMORY;
    }
    python.restore_thread(saved_thread);
    saved_thread = outer;
    return status;
}

}  // namespace

API void tilewise_set_python(void* (*save_thread)(), void (*restore_thread)(void*), int (*check_signals)()) {
    python = {save_thread, restore_thread, check_signals};
}
API int tilewise_forward(const Call* call, int is_main) {
    return without_lock(is_main != 0, [&](Interrupted interrupted) { return forward(path(), *call, interrupted); });
}
API int tilewise_backward(const BackwardCall* call, int is_main) {
    return without_lock(is_main != 0, [&](Interrupted interrupted) { return backward(path(), *call, interrupted); });
}
API int tilewise_linear_forward(const LinearCall* call, int is_main) {
    const Path& with = path();
    return without_lock(is_main != 0, [&](Interrupted interrupted) {
        return linear(*call, *call, with.linear_forward_scratch(*call), with.linear_forward, interrupted);
    });
}
API int tilewise_linear_backward(const LinearBackwardCall* call, int is_main) {
    const Path& with = path();
    return without_lock(is_main != 0, [&](Interrupted interrupted) {
        return linear(*call, call->forward, with.linear_backward_scratch(*call), with.linear_backward, interrupted);
    });
}
API void tilewise_set_threads(int n) { set_threads(n); }
API int tilewise_threads() { return threads(); }
// The i-th path that this machine can run; the one in use for -1; null beyond the last.
API const char* tilewise_isa(int i) {
    if (i < 0) return path().name;
    return i < int(paths().size()) ? paths()[size_t(i)]->name : nullptr;
}
API int tilewise_use_isa(const char* name) {
    for (const Path* p : paths())
        if (strcmp(p->name, name) == 0) {
            chosen = p;
            return 1;
        }
    return 0;
}
API double tilewise_peak_flops(int is_double) {
    double rate = 0;
    without_lock(false, [&](Interrupted) { return rate = peak_flops(path(), is_double != 0), DONE; });
    return rate;
}
API double tilewise_read_rate(const Span* spans, int n) {
    double rate = 0;
    without_lock(false, [&](Interrupted) { return rate = read_rate(path(), spans, n), DONE; });
    return rate;
}

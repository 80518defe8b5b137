// Runs a kernel on the CPU: blocks one after the other, a fiber a thread, in an order that can be chosen or shuffled.
#include "runtime.h"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstring>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

namespace simulator {

constexpr size_t STACK = 128 << 10;
constexpr size_t SHARED_ROOM = 256 << 10;
constexpr uint64_t MOST_TURNS = 20'000'000;  // of a block: a thread that spins forever is found by this
constexpr int MOST_ROUNDS_OF_ASKING = 10'000;  // without anything else: a wait for another block that never ends

Fiber* current;
Thread* running;
uint3 block, block_size, grid_size;
std::vector<Fiber> fibers;
std::vector<Barrier> warps;
Launch launch;
std::string report;
unsigned char* shared_memory;
unsigned block_generation;

static Context scheduler;
static Barrier barriers[BARRIERS];
static bool on_fiber, failed;
static int alive;  // threads of the block that have not ended
static int rounds_of_asking;
static uint64_t random_state;
static std::vector<Event> events;
static int round_number;  // of turns, in this launch
static void (*kernel)(const void*);
static const void* kernel_params;
struct Exchange {
    uint64_t slots[2][WARP];  // of two shuffles in turn: a lane may be at the next one while others still read
};
static std::vector<Exchange> exchanges;
struct Later {
    unsigned block;
    int thread;
    SourceLine where;
    std::function<void()> work;
};
static std::vector<Later> pending, last;  // of the block; of the launch, when it ends

std::vector<Part>& parts() {
    static std::vector<Part> all;
    return all;
}

uint64_t random_number() {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return random_state >> 33;
}

SourceLine nowhere() { return {"", 0}; }

// A warp is told of by its first lane.
void note(Did did, SourceLine where, const char* what, int number) {
    if (!launch.traced || current->number % WARP) return;
    events.push_back({did, round_number, int(block.x), current->warp(), where.line, number, where.file, what});
}

// -- reports ----------------------------------------------------------------------------------------------------------

std::string place(SourceLine where) {
    return where.line ? std::string(where.file) + ":" + std::to_string(where.line) : "";
}

static std::string of_thread(int thread) {
    return "block " + std::to_string(block.x) + ", thread " + std::to_string(thread);
}

void fail(SourceLine where, const std::string& message) {
    if (!failed) report = place(where) + ": " + message + " (" + of_thread(current ? current->number : 0) + ")";
    failed = true;
    if (!on_fiber) throw Failure{};
    on_fiber = false;
    change(current->context, scheduler);
    __builtin_unreachable();
}
void fail(SourceLine where, const char* message) { fail(where, std::string(message)); }

static std::string numbers_of(const std::vector<int>& threads) {
    std::string text;
    for (size_t i = 0; i < threads.size();) {
        size_t j = i;
        while (j + 1 < threads.size() && threads[j + 1] == threads[j] + 1) j++;
        text += (text.empty() ? "" : ", ") + std::to_string(threads[i]);
        if (j > i) text += "-" + std::to_string(threads[j]);
        i = j + 1;
    }
    return text;
}

static void report_deadlock() {
    report = "deadlock in block " + std::to_string(block.x) + ": no thread can go on";
    std::vector<bool> told(fibers.size());
    for (size_t i = 0; i < fibers.size(); i++) {
        if (fibers[i].done || told[i]) continue;
        std::vector<int> same;
        for (size_t j = i; j < fibers.size(); j++) {
            const Wait &a = fibers[i].wait, &b = fibers[j].wait;
            if (fibers[j].done || a.where.line != b.where.line || a.number != b.number) continue;
            told[j] = true;
            same.push_back(int(j));
        }
        const Wait& wait = fibers[i].wait;
        report += "\n  " + place(wait.where) + ": thread" + (same.size() > 1 ? "s " : " ") + numbers_of(same) +
                  (same.size() > 1 ? " wait for " : " waits for ") + wait.what;
        if (wait.number >= 0) report += " " + std::to_string(wait.number);
        if (wait.detail) report += " (" + wait.detail() + ")";
    }
    failed = true;
}

// -- taking turns -----------------------------------------------------------------------------------------------------

static void turn_over() {
    on_fiber = false;
    Fiber* self = current;
    change(self->context, scheduler);
}

void wait_until(std::function<bool()> is_over, SourceLine where, const char* what, int number,
                std::function<std::string()> detail) {
    if (is_over()) return;
    current->wait = {std::move(is_over), where, what, number, std::move(detail)};
    current->waits = true;
    note(WAITS, where, what, number);
    turn_over();
    note(GOES_ON, where, what, number);
}

void later(SourceLine where, std::function<void()> work) {
    pending.push_back({block.x, current->number, where, std::move(work)});
}
void when_launch_ends(std::function<void()> work) {
    last.push_back({block.x, current->number, nowhere(), std::move(work)});
}

static void do_some_of(std::vector<Later>& all) {
    size_t i = random_number() % all.size();
    Later chosen = std::move(all[i]);
    all.erase(all.begin() + long(i));
    block.x = chosen.block;
    current = &fibers[size_t(chosen.thread)];
    chosen.work();
}

// Others go on each time a thread asks. A block that comes later never does: where threads have done nothing but ask for
// long, that is what they wait for. Asking twice is no mistake: a kernel may ask for each tile and find what it needs.
int load_acquire(const int* at, SourceLine where) {
    const auto detail = [at] { return "blocks run one after the other, and the number stays " + std::to_string(*at); };
    current->wait = {{}, where, "another block", -1, detail};
    current->asks = true;
    turn_over();
    return *at;
}

void add_release(int* at, int value) {
    *at += value;
    rounds_of_asking = 0;
}

static void release_if_complete(Barrier& barrier, int threads) {
    if (barrier.arrived < threads) return;
    barrier.arrived = 0;
    barrier.generation++;
    if (&barrier == &barriers[0]) block_generation++;
}

static void body() {
    kernel(kernel_params);
    note(ENDED, nowhere());
    current->done = true;
    alive--;
    if (barriers[0].arrived) release_if_complete(barriers[0], alive);  // those that ended are no longer waited for
    turn_over();
    __builtin_unreachable();
}

void barrier(int id, int threads, bool waits, SourceLine where) {
    Barrier& at = barriers[id & (BARRIERS - 1)];
    const int expected = threads ? threads : alive;
    if (threads % WARP) fail(where, "a named barrier is for whole warps, not for " + std::to_string(threads) + " threads");
    if (at.arrived && !threads && at.first.line != where.line)
        fail(where, "threads of the block are at different __syncthreads: others at " + place(at.first));
    if (!at.arrived) at.first = where;
    at.arrived++;
    if (at.arrived > expected) fail(where, "more threads come to barrier " + std::to_string(id) + " than it is for");
    const unsigned generation = at.generation;
    release_if_complete(at, expected);
    const auto is_over = [&at, generation] { return at.generation != generation; };
    if (waits) wait_until(is_over, where, threads ? "named barrier" : "__syncthreads", threads ? id : -1);
}

void warp_barrier(unsigned lanes, SourceLine where) {
    Barrier& at = warps[size_t(current->warp())];
    int expected = 0;
    for (int lane = 0; lane < WARP; lane++) {
        const size_t thread = size_t(current->warp() * WARP + lane);
        if (!(lanes >> lane & 1) || thread >= fibers.size()) continue;
        if (fibers[thread].done) fail(where, "lane " + std::to_string(lane) + " should take part and has ended");
        expected++;
    }
    if (at.arrived && at.first.line != where.line)
        fail(where, "lanes of the warp are at different operations: others at " + place(at.first));
    if (!at.arrived) at.first = where;
    at.arrived++;
    const unsigned generation = at.generation;
    release_if_complete(at, expected);
    wait_until([&at, generation] { return at.generation != generation; }, where, "the other lanes of its warp", -1);
}

void* shuffle_slot(int lane) { return &exchanges[size_t(current->warp())].slots[current->exchanges & 1][lane]; }
void end_exchange() { current->exchanges++; }

// -- faults -----------------------------------------------------------------------------------------------------------

static sigjmp_buf fault_exit;
static std::string fault;

static void on_fault(int, siginfo_t* info, void* context) {
    uintptr_t pc = 0;
#if defined(__x86_64__) && defined(__linux__)
    pc = uintptr_t(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__) && defined(__linux__)
    pc = uintptr_t(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#else
    (void)context;
#endif
    Dl_info module{};
    char text[64];
    dladdr(reinterpret_cast<void*>(pc), &module);
    const long long beyond = static_cast<unsigned char*>(info->si_addr) - (shared_memory + launch.shared_bytes);
    const bool near = beyond >= -(long long)SHARED_ROOM && beyond < 1 << 16;
    snprintf(text, sizeof text, "@%llx", (unsigned long long)(pc - reinterpret_cast<uintptr_t>(module.dli_fbase)));
    fault = std::string(text) + ": " + (near ? "outside shared memory" : "memory that is not there");
    if (near && beyond >= 0) fault += ", " + std::to_string(beyond) + " bytes after its end";
    siglongjmp(fault_exit, 1);
}

// The compiler's own checks (-fsanitize=alignment,bounds) call these; their first argument begins with a source line.
struct Checked {
    const char* file;
    uint32_t line, column;
};
struct TypeMismatch {
    Checked where;
    const void* type;
    unsigned char log_alignment, kind;
};
extern "C" {
__attribute__((used)) void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, uintptr_t at) {
    const unsigned alignment = 1u << data->log_alignment;
    fail({data->where.file, int(data->where.line)},
         at % alignment ? "not aligned to " + std::to_string(alignment) + " bytes" : "a null pointer is followed");
}
__attribute__((used)) void __ubsan_handle_out_of_bounds_abort(Checked* where, uintptr_t index) {
    fail({where->file, int(where->line)}, "index " + std::to_string(intptr_t(index)) + " is outside the array");
}
}

// -- a launch ---------------------------------------------------------------------------------------------------------

static void begin_block(char* stacks) {
    for (Barrier& at : barriers) at = Barrier();
    for (Barrier& at : warps) at = Barrier();
    pending.clear();
    block_generation = 0;
    rounds_of_asking = 0;
    alive = int(fibers.size());
    memset(shared_memory, 0xff, launch.shared_bytes);  // NaN in every type: what was never written shows
    for (size_t i = 0; i < fibers.size(); i++) {
        fibers[i] = Fiber();
        fibers[i].number = int(i);
        fibers[i].index = {unsigned(i), 0, 0};
        fibers[i].context.start(stacks + i * STACK, STACK, body);
    }
    for (const Part& part : parts()) part.begin();
}

// Whether the thread came further: from one question to the next it did not.
static bool take_turn(Fiber& fiber) {
    if (fiber.done || (fiber.waits && !fiber.wait.is_over())) return false;
    const bool asked = fiber.asks;
    fiber.waits = fiber.asks = false;
    current = &fiber;
    running = &fiber;
    on_fiber = true;
    change(scheduler, fiber.context);
    if (failed) throw Failure{};
    return !(asked && fiber.asks);
}

static bool someone_asks() {
    return std::any_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.asks; });
}

// In which order threads take turns. At random, one of the warpgroups may lag behind for a while: it goes on only when no
// other thread can, so that whoever should wait for it and does not is far ahead.
struct Turns {
    std::vector<size_t> order;
    size_t lagging = ~size_t(0);

    Turns() : order(fibers.size()) {
        const size_t n = order.size();
        for (size_t i = 0; i < n; i++) order[i] = launch.order == 1 ? n - 1 - i : i;
    }
    void shuffle() {
        for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_number() % i]);
        if (random_number() % 32 == 0) lagging = random_number() % (order.size() / WARPGROUP + 1);
    }
    // Whether anyone came further, of those that lag or of the others.
    bool take(bool lag) const {
        bool any = false;
        for (size_t i : order) {
            if ((i / WARPGROUP == lagging) != lag) continue;
            any |= take_turn(fibers[i]);
            if (launch.order == 2 && !pending.empty() && random_number() % 64 == 0) {
                do_some_of(pending);
                any = true;
            }
        }
        return any;
    }
};

static void run_block(char* stacks) {
    begin_block(stacks);
    Turns threads;
    for (uint64_t turns = 0; alive;) {
        round_number++;
        if (launch.order == 2) threads.shuffle();
        const bool any = threads.take(false) || threads.take(true);
        if ((turns += fibers.size()) > MOST_TURNS) fail(nowhere(), "a thread spins forever");
        if (any) {
            rounds_of_asking = 0;
        } else if (!pending.empty()) {
            do_some_of(pending);
        } else if (!someone_asks() || ++rounds_of_asking == MOST_ROUNDS_OF_ASKING) {
            report_deadlock();
            throw Failure{};
        }
    }
    if (!pending.empty()) {
        current = &fibers[size_t(pending[0].thread)];
        fail(pending[0].where, "the block ends while this copy is under way: nobody waited for it");
    }
    for (const Part& part : parts())
        if (part.end) part.end();
}

static void run_blocks(char* stacks) {
    if (sigsetjmp(fault_exit, 1)) {
        report = fault + " (" + of_thread(current ? current->number : 0) + ")";
        return;
    }
    try {
        for (block = {0, 0, 0}; block.x < launch.grid; block.x++) run_block(stacks);
        while (!last.empty()) do_some_of(last);
    } catch (const Failure&) {
    }
}

}  // namespace simulator

using namespace simulator;

// Runs the kernel; null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* tilewise_simulate(
    void (*entry)(const void*), const void* params, const Launch* asked) {
    launch = *asked;
    kernel = entry, kernel_params = params;
    failed = on_fiber = false;
    report.clear();
    events.clear();
    round_number = 0;
    random_state = launch.seed;
    grid_size = {launch.grid, 1, 1}, block_size = {launch.threads, 1, 1};
    fibers.resize(launch.threads);
    warps.resize((launch.threads + WARP - 1) / WARP);
    exchanges.resize(warps.size());

    const size_t page = size_t(sysconf(_SC_PAGESIZE)), stack_bytes = launch.threads * STACK;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char* memory = static_cast<char*>(mmap(nullptr, SHARED_ROOM + page, PROT_READ | PROT_WRITE, flags, -1, 0));
    char* stacks = static_cast<char*>(mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
    if (memory == MAP_FAILED || stacks == MAP_FAILED) return "no memory for the stacks of the threads";
    mprotect(memory + SHARED_ROOM, page, PROT_NONE);
    shared_memory = reinterpret_cast<unsigned char*>(memory) + SHARED_ROOM - launch.shared_bytes;

    std::vector<char> signal_stack(64 << 10);
    stack_t alternative{}, old_stack;
    alternative.ss_sp = signal_stack.data();
    alternative.ss_size = signal_stack.size();
    struct sigaction action{}, old_segv, old_bus;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaltstack(&alternative, &old_stack);
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    run_blocks(stacks);
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    sigaltstack(&old_stack, nullptr);
    pending.clear();
    last.clear();
    munmap(memory, SHARED_ROOM + page);
    munmap(stacks, stack_bytes);
    return report.empty() ? nullptr : report.c_str();
}

// What was noted of the last launch, and how much of it.
extern "C" __attribute__((visibility("default"))) const Event* tilewise_events(int* count) {
    *count = int(events.size());
    return events.data();
}

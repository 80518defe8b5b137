// The simulator's inside: fibers in turn, what they wait for, work that is done later, and reports of mistakes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fiber.h"

struct uint3 {
    unsigned x, y, z;
};
struct SourceLine {
    const char* file;
    int line;
};

namespace simulator {

constexpr int WARP = 32, WARPGROUP = 128, BARRIERS = 16;

struct Thread {  // device.h knows its beginning
    uint3 index;
};

struct Wait {  // what a thread waits for
    std::function<bool()> is_over;
    SourceLine where{};
    const char* what = "";
    int number = -1;  // of what it waits for, if it has one
    std::function<std::string()> detail;  // for a report of deadlock
};

struct Fiber : Thread {
    Context context;
    int number = 0;
    bool done = false, waits = false;
    bool asks = false;  // for a number in global memory; it may go on, but `wait` says what it waits for
    Wait wait;
    unsigned exchanges = 0;  // shuffles so far
    int warp() const { return number / WARP; }
};

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
    SourceLine first{};  // where the first of those that wait came to it
};

struct Launch {  // what Python asks for
    unsigned grid, threads, shared_bytes;
    int order;  // of threads: 0 forward, 1 backward, 2 at random
    int traced;  // whether what warps do is noted
    uint64_t seed;
};

enum Did { WAITS, GOES_ON, COPY_ISSUED, COPY_LANDED, PRODUCT_ISSUED, PRODUCT_TAKEN, ENDED };
struct Event {  // what a warp did, as Python reads it
    int did, round, block, warp, line, number;
    const char *file, *what;
};

struct Failure {};  // thrown where no fiber runs; the report is written by then

// -- the state of a launch; one runs at a time ------------------------------------------------------------------------
extern Fiber* current;
extern std::vector<Fiber> fibers;
extern std::vector<Barrier> warps;
extern Launch launch;
extern std::string report;
extern unsigned block_generation;  // how often all threads of the block have met

uint64_t random_number();
SourceLine nowhere();
void note(Did did, SourceLine where, const char* what = "", int number = -1);
std::string place(SourceLine where);  // its file and line, for a report
[[noreturn]] void fail(SourceLine where, const std::string& message);
void wait_until(std::function<bool()> is_over, SourceLine where, const char* what, int number,
                std::function<std::string()> detail = {});

// -- warps ------------------------------------------------------------------------------------------------------------
void warp_barrier(unsigned lanes, SourceLine where);
void* shuffle_slot(int lane);  // 8 bytes of a lane, for the exchange under way
void end_exchange();

// -- work that is done later ------------------------------------------------------------------------------------------
// Copies of the copy engine land late and in any order. Whoever needs them must wait for them, or reads what is not there.
void later(SourceLine where, std::function<void()> work);
// In any order when all blocks have ended: what the threads of a block did not wait for.
void when_launch_ends(std::function<void()> work);

// What a part of the simulator does when a block begins and, if anything, when its threads have all ended.
struct Part {
    void (*begin)();
    void (*end)();
};
std::vector<Part>& parts();
struct Register {
    explicit Register(Part part) { parts().push_back(part); }
};

// -- shared memory ----------------------------------------------------------------------------------------------------
extern unsigned char* shared_memory;  // it ends at a page that no one may touch
inline bool is_shared(const void* at, size_t bytes = 1) {
    const unsigned char* p = static_cast<const unsigned char*>(at);
    return p >= shared_memory && p + bytes <= shared_memory + launch.shared_bytes;
}
inline uint32_t shared_offset(const void* at) { return uint32_t(static_cast<const unsigned char*>(at) - shared_memory); }

}  // namespace simulator

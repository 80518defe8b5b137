// Barriers and copies of Hopper, made late on purpose: copies land when nothing else can go on (or at random), and until then
// their places hold NaN, so that whoever is early shows.
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>

#include "async.h"

namespace simulator {

constexpr unsigned char POISON_BYTE = 0xff;

unsigned char* memory_at(uint32 address, size_t bytes, SourceLine where) {
    if (address < BASE || address - BASE + bytes > launch.shared_bytes)
        fail(where, "address " + std::to_string(int(address - BASE)) + " is outside shared memory, which has " +
                        std::to_string(launch.shared_bytes) + " bytes");
    return shared_memory + (address - BASE);
}

uint32 shared_address(const void* at, SourceLine where) {
    if (!is_shared(at, 0)) fail(where, "a pointer that is not into shared memory");
    return BASE + shared_offset(at);
}

// -- what the copy engine and wgmma see of shared memory: what they wrote, and what was fenced ------------------------

static std::vector<unsigned char> async_view;

void fence_async() { memcpy(async_view.data(), shared_memory, launch.shared_bytes); }

const unsigned char* async_read(uint32 address, size_t bytes, SourceLine where) {
    const unsigned char* from = memory_at(address, bytes, where);
    if (memcmp(from, async_view.data() + (from - shared_memory), bytes))
        fail(where, "reads what threads wrote to shared memory without fence.proxy.async");
    return from;
}

static void async_write(unsigned char* to, const void* from, size_t bytes) {
    memcpy(to, from, bytes);
    memcpy(async_view.data() + (to - shared_memory), from, bytes);
}

// -- mbarriers --------------------------------------------------------------------------------------------------------

struct Mbarrier {
    int arrivals, pending, bytes = 0, phase = 0;
    int thread;
    unsigned generation;  // of the block, when it was made
    bool fenced = false;
};
static std::map<uint32, Mbarrier> mbarriers;
constexpr int MOST = (1 << 20) - 1;
constexpr uint64_t MARK = 0x6d62617272696572;  // in its place in shared memory, to see when it is overwritten

static std::string named(uint32 bar) { return "the mbarrier at byte " + std::to_string(int(bar - BASE)); }

static Mbarrier& mbarrier_at(uint32 bar, SourceLine where) {
    unsigned char* place = memory_at(bar, 8, where);
    if (bar % 8) fail(where, named(bar) + " is not aligned to 8 bytes");
    auto found = mbarriers.find(bar);
    if (found == mbarriers.end()) fail(where, named(bar) + " was never initialised");
    if (memcmp(place, &MARK, 8)) fail(where, named(bar) + " was overwritten");
    const Mbarrier& made = found->second;
    if (made.thread != current->number && made.generation == block_generation)
        fail(where, named(bar) + " is used before the block has met after its initialisation");
    return found->second;
}

static void end_phase_if_complete(Mbarrier& at, uint32 bar, SourceLine where) {
    if (at.pending) return;
    if (at.bytes < 0) fail(where, named(bar) + " gets " + std::to_string(-at.bytes) + " bytes more than were expected");
    if (at.bytes) return;
    at.phase ^= 1;
    at.pending = at.arrivals;
}

void mbarrier_init(uint32 bar, int arrivals, SourceLine where) {
    unsigned char* place = memory_at(bar, 8, where);
    if (bar % 8) fail(where, named(bar) + " is not aligned to 8 bytes");
    if (arrivals < 1 || arrivals > MOST) fail(where, named(bar) + " cannot wait for " + std::to_string(arrivals) + " arrivals");
    if (mbarriers.count(bar)) fail(where, named(bar) + " is initialised a second time");
    Mbarrier made{};
    made.arrivals = made.pending = arrivals;
    made.thread = current->number;
    made.generation = block_generation;
    mbarriers[bar] = made;
    memcpy(place, &MARK, 8);
}

void fence_mbarrier_init() {
    for (auto& entry : mbarriers)
        if (entry.second.thread == current->number) entry.second.fenced = true;
}

void mbarrier_arrive(uint32 bar, SourceLine where) {
    Mbarrier& at = mbarrier_at(bar, where);
    if (at.pending == 0) fail(where, named(bar) + " is arrived at more often than it was initialised for");
    at.pending--;
    end_phase_if_complete(at, bar, where);
}

void mbarrier_expect(uint32 bar, int bytes, SourceLine where) {
    Mbarrier& at = mbarrier_at(bar, where);
    at.bytes += bytes;
    if (bytes < 0 || at.bytes > MOST) fail(where, named(bar) + " cannot expect " + std::to_string(bytes) + " bytes");
}

void mbarrier_wait(uint32 bar, int parity, SourceLine where) {
    if (parity & ~1) fail(where, "a parity is 0 or 1, not " + std::to_string(parity));
    Mbarrier* at = &mbarrier_at(bar, where);
    const auto detail = [at, parity] {
        return "phase " + std::to_string(parity) + ": " + std::to_string(at->pending) + " of " +
               std::to_string(at->arrivals) + " arrivals and " + std::to_string(at->bytes) + " bytes to come";
    };
    wait_until([at, parity] { return at->phase != parity; }, where, "the mbarrier at byte", int(bar - BASE), detail);
}

// -- the copy engine --------------------------------------------------------------------------------------------------

struct Map {  // tensor_map.SimulatedMap
    uint64_t address;
    int32_t rank, item, swizzle, box[5];
    int64_t size[5], step[5], reserved;

    size_t bytes() const {
        size_t total = size_t(item);
        for (int i = 0; i < rank; i++) total *= size_t(box[i]);
        return total;
    }
};
static_assert(sizeof(Map) == 128, "as large as the driver's");

static uint32 swizzled(uint32 address, int swizzle) {
    return swizzle ? address ^ ((address >> 3) & (uint32(swizzle - 1) & ~15u)) : address;
}

static const Map* map_at(const void* map, int rank, uint32 shared, SourceLine where) {
    const Map* made = static_cast<const Map*>(map);
    if (reinterpret_cast<uintptr_t>(map) % 64) fail(where, "the tensor map is not aligned to 64 bytes");
    if (made->rank != rank)
        fail(where, "a copy of " + std::to_string(rank) + " dimensions by a tensor map of " + std::to_string(made->rank));
    const uint32 alignment = made->swizzle ? uint32(made->swizzle) * 8 : 128;
    if (shared % alignment)
        fail(where, "a box in shared memory must be aligned to " + std::to_string(alignment) + " bytes; it is at " +
                        std::to_string(shared));
    memory_at(shared, made->bytes(), where);
    return made;
}

// Calls visit(shared address, pointer to global memory or null) for each 16 bytes of a box.
template <class Visit> static void walk(const Map& map, uint32 shared, const std::vector<int>& at, Visit visit) {
    const int step = 16 / map.item;
    uint32 address = shared;
    int in_box[5] = {};
    for (size_t done = 0; done < map.bytes(); done += 16, address += 16) {
        bool row_inside = true;
        int64_t offset = 0;
        for (int i = 1; i < map.rank; i++) {
            const int64_t place = int64_t(at[size_t(i)]) + in_box[i];
            row_inside &= place >= 0 && place < map.size[i];
            offset += place * map.step[i - 1];
        }
        for (int e = 0; e < step; e++) {
            const int64_t column = int64_t(at[0]) + in_box[0] + e;
            const bool inside = row_inside && column >= 0 && column < map.size[0];
            char* global = reinterpret_cast<char*>(map.address) + offset + column * map.item;
            visit(swizzled(address, map.swizzle) + uint32(e * map.item), inside ? global : nullptr);
        }
        in_box[0] += step;
        for (int i = 0; i + 1 < map.rank && in_box[i] >= map.box[i]; i++) in_box[i] = 0, in_box[i + 1]++;
    }
}

// The place holds NaN until the copy lands; then its bytes count at the mbarrier.
static void load_later(uint32 to, size_t bytes, uint32 bar, SourceLine where, std::function<void()> land) {
    if (!mbarrier_at(bar, where).fenced)
        fail(where, named(bar) + " is given to the copy engine without fence.mbarrier_init after its initialisation");
    const std::vector<unsigned char> nothing(bytes, POISON_BYTE);
    async_write(memory_at(to, bytes, where), nothing.data(), bytes);
    note(COPY_ISSUED, where, "", int(bar - BASE));
    later(where, [=] {
        land();
        note(COPY_LANDED, where, "", int(bar - BASE));
        Mbarrier& done = mbarriers.at(bar);
        done.bytes -= int(bytes);
        end_phase_if_complete(done, bar, where);
    });
}

void tma_load(uint32 to, const void* tensor_map, uint32 bar, int rank, const int* coordinates, SourceLine where) {
    const Map map = *map_at(tensor_map, rank, to, where);
    const std::vector<int> at(coordinates, coordinates + rank);
    load_later(to, map.bytes(), bar, where, [=] {
        walk(map, to, at, [&](uint32 address, const char* global) {
            const char zero[8] = {};
            async_write(memory_at(address, size_t(map.item), where), global ? global : zero, size_t(map.item));
        });
    });
}

static void check_bulk(uint32 shared, const void* global, int bytes, SourceLine where) {
    if (bytes <= 0 || bytes % 16) fail(where, "a bulk copy has a multiple of 16 bytes, not " + std::to_string(bytes));
    if (reinterpret_cast<uintptr_t>(global) % 16)
        fail(where, "a bulk copy's place in global memory is not aligned to 16 bytes");
    if (shared % 16) fail(where, "a bulk copy's place in shared memory is not aligned to 16 bytes");
    if (is_shared(global)) fail(where, "a pointer into shared memory, where one into global memory must be");
    memory_at(shared, size_t(bytes), where);
}

void bulk_load(uint32 to, const void* from, int bytes, uint32 bar, SourceLine where) {
    check_bulk(to, from, bytes, where);
    load_later(to, size_t(bytes), bar, where,
               [=] { async_write(memory_at(to, size_t(bytes), where), from, size_t(bytes)); });
}

// Copies from shared memory: each reads it late. What it then has to write waits until the thread waits for that, or until
// the launch ends: a block that is told too early does not find it.
typedef std::function<void()> Write;
struct Group {
    int unread = 0;  // copies that have not read shared memory yet
    std::vector<Write> writes;
};
struct Stores {  // of one thread
    std::deque<std::shared_ptr<Group>> groups;
    std::shared_ptr<Group> open = std::make_shared<Group>();
};
static std::vector<Stores> stores;

static void store_later(SourceLine where, std::function<Write()> read) {
    std::shared_ptr<Group> group = stores[size_t(current->number)].open;
    group->unread++;
    later(where, [=] {
        group->writes.push_back(read());
        group->unread--;
    });
}

void tma_store(const void* tensor_map, uint32 from, int rank, const int* coordinates, SourceLine where) {
    const Map map = *map_at(tensor_map, rank, from, where);
    const std::vector<int> at(coordinates, coordinates + rank);
    store_later(where, [=]() -> Write {
        std::vector<unsigned char> values;
        walk(map, from, at, [&](uint32 address, char*) {
            const unsigned char* value = async_read(address, size_t(map.item), where);
            values.insert(values.end(), value, value + map.item);
        });
        return [=] {
            const unsigned char* value = values.data();
            walk(map, from, at, [&](uint32, char* global) {
                if (global) memcpy(global, value, size_t(map.item));
                value += map.item;
            });
        };
    });
}

void bulk_add(void* to, uint32 from, int bytes, SourceLine where) {
    check_bulk(from, to, bytes, where);
    store_later(where, [=]() -> Write {
        std::vector<float> values(size_t(bytes) / 4);
        memcpy(values.data(), async_read(from, size_t(bytes), where), size_t(bytes));
        return [=] {
            for (size_t i = 0; i < values.size(); i++) static_cast<float*>(to)[i] += values[i];
        };
    });
}

void bulk_store(void* to, uint32 from, int bytes, SourceLine where) {
    check_bulk(from, to, bytes, where);
    store_later(where, [=]() -> Write {
        const unsigned char* read = async_read(from, size_t(bytes), where);
        const std::vector<unsigned char> values(read, read + bytes);
        return [=] { memcpy(to, values.data(), values.size()); };
    });
}

void tma_store_commit() {
    Stores& mine = stores[size_t(current->number)];
    mine.groups.push_back(mine.open);
    mine.open = std::make_shared<Group>();
}

void tma_store_wait(int groups, SourceLine where) {
    Stores& mine = stores[size_t(current->number)];
    for (int i = 0; i < int(mine.groups.size()) - groups; i++) {
        std::shared_ptr<Group> group = mine.groups[size_t(i)];
        wait_until([group] { return group->unread == 0; }, where, "its stores to be read", -1);
    }
}

void bulk_wait_done(int groups, SourceLine where) {
    tma_store_wait(groups, where);
    Stores& mine = stores[size_t(current->number)];
    while (int(mine.groups.size()) > groups) {
        for (const Write& write : mine.groups.front()->writes) write();
        mine.groups.pop_front();
    }
}

// -- registers --------------------------------------------------------------------------------------------------------

static std::vector<int> registers_of_warp;
constexpr int REGISTERS = 65536;

static int registers_in_use() {
    int total = 0;
    for (int count : registers_of_warp) total += count * WARP;
    return total;
}

void registers(int count, bool more, SourceLine where) {
    if (count < 24 || count > 256 || count % 8) fail(where, "registers come in eights, 24 to 256, not " + std::to_string(count));
    warp_barrier(~0u, where);
    int& mine = registers_of_warp[size_t(current->warp())];
    if (current->number % WARP == 0) {
        if (more ? count < mine : count > mine)
            fail(where, "the warp has " + std::to_string(mine) + " registers a thread and " +
                            (more ? "takes up to " : "gives back down to ") + std::to_string(count));
        const int warp = current->warp();
        wait_until([=] { return registers_in_use() + (count - registers_of_warp[size_t(warp)]) * WARP <= REGISTERS; },
                   where, "registers that other warps give back", -1);
        registers_of_warp[size_t(warp)] = count;
    }
    warp_barrier(~0u, where);
}

// -- blocks -----------------------------------------------------------------------------------------------------------

static void begin() {
    mbarriers.clear();
    async_view.assign(launch.shared_bytes, POISON_BYTE);
    stores.clear();
    stores.resize(launch.threads);  // each with an open group of its own
    const int each = std::min(255, REGISTERS / int(launch.threads)) / 8 * 8;
    registers_of_warp.assign(warps.size(), each);
}

static void end() {
    for (const auto& entry : mbarriers) {
        current = &fibers[size_t(entry.second.thread)];
        if (entry.second.bytes > 0)
            fail(nowhere(), named(entry.first) + " still expects " + std::to_string(entry.second.bytes) + " bytes at the end");
        if (entry.second.bytes < 0)
            fail(nowhere(), named(entry.first) + " got " + std::to_string(-entry.second.bytes) + " bytes more than were expected");
    }
    for (size_t i = 0; i < stores.size(); i++) {
        current = &fibers[i];
        stores[i].groups.push_back(stores[i].open);
        for (const std::shared_ptr<Group>& group : stores[i].groups)
            for (Write& write : group->writes) when_launch_ends(std::move(write));
    }
}

static Register hopper({begin, end});

}  // namespace simulator

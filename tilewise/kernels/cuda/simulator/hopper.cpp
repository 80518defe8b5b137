// What is asynchronous on Hopper, made late on purpose: copies land when nothing else can go on (or at random), results
// of products appear when they are waited for. Until then their places hold NaN, so that whoever is early shows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <memory>

#include "runtime.h"

typedef unsigned int uint32;
typedef unsigned long long uint64;

namespace simulator {

// Addresses in shared memory are not multiples of more than 16 by themselves: kernels must align what needs it.
constexpr uint32 BASE = 1024 + 16;
constexpr unsigned char POISON_BYTE = 0xff;
constexpr uint32 POISON = 0x7fc0beef;  // a NaN that no computation gives

static unsigned char* memory_at(uint32 address, size_t bytes, SourceLine where) {
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

static const unsigned char* async_read(uint32 address, size_t bytes, SourceLine where) {
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
    later(where, [=] {
        land();
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

// -- products of matrices ---------------------------------------------------------------------------------------------

struct Product {
    int columns;
    bool add, a_transposed, b_transposed, bfloat;
    uint64 a, b;
    const uint32* registers;
};
struct Issued {
    Product product;
    float* d;
    float rows[2][16];  // of a, if it comes from registers
    uint32 words[4];    // what those registers of the thread held
    uint64_t number;    // in the count of the thread's products, the same in all threads of a warpgroup
    SourceLine where;
};
struct Accumulator {  // what d will be; meanwhile d holds a NaN that must stay untouched
    int count;
    std::vector<float> values;
};
struct Products {  // of one thread
    std::vector<Issued> open;
    std::deque<std::vector<Issued>> groups;
    std::map<float*, Accumulator> accumulators;
    bool fenced = false;
    uint64_t issued = 0, waits = 0;
};
static std::vector<Products> products;

// The first of a warpgroup to come to its n-th wait says where that is, and all must come to it there.
struct Meeting {
    SourceLine where;
    int users = 0;
};
static std::map<std::pair<int, uint64_t>, Meeting> meetings;

static void wait_at_one_place(uint64_t number, SourceLine where) {
    const std::pair<int, uint64_t> key{current->number / WARPGROUP, number};
    Meeting& met = meetings[key];
    if (met.users == 0) met.where = where;
    if (met.where.line != where.line || strcmp(met.where.file, where.file))
        fail(where, std::string("another warp of the warpgroup waits for its products at ") + met.where.file + ":" +
                        std::to_string(met.where.line));
    if (++met.users == WARPGROUP) meetings.erase(key);
}

struct Operands {  // of one product, read once for the 128 threads that share them
    std::vector<float> a, b;  // 64 x 16, 16 x columns
    int users = 0;
};
static std::map<std::pair<int, uint64_t>, Operands> operands;

static float widened(uint16_t bits, bool bfloat) {
    uint32_t word = uint32_t(bits) << 16;
    float x;
    if (bfloat) {
        memcpy(&x, &word, 4);
        return x;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    x = exponent == 31  ? (fraction ? NAN : INFINITY)
        : exponent == 0 ? ldexpf(float(fraction), -24)
                        : ldexpf(float(fraction | 0x400), exponent - 25);
    return bits & 0x8000 ? -x : x;
}

// The number at (along, depth) of an operand: 8 rows of `width` bytes, swizzled, make a block.
static float operand_at(uint64 descriptor, int along, int depth, bool transposed, bool bfloat, SourceLine where) {
    const uint32 start = uint32(descriptor & 0x3fff) << 4, leading = uint32(descriptor >> 16 & 0x3fff) << 4;
    const uint32 stride = uint32(descriptor >> 32 & 0x3fff) << 4;
    static const int widths[] = {0, 128, 64, 32};
    const int width = widths[descriptor >> 62];
    if (!width) fail(where, "an operand without swizzle is not modelled");
    const int side_by_side = width / 2;
    const int row = transposed ? depth : along, column = transposed ? along : depth;
    const uint32 address = start + uint32(row / 8) * stride + uint32(row % 8 * width) +
                           uint32(column / side_by_side) * leading + uint32(column % side_by_side * 2);
    uint16_t bits;
    memcpy(&bits, async_read(swizzled(address, width), 2, where), 2);
    return widened(bits, bfloat);
}

static Operands& operands_of(const Issued& issued) {
    const int group = current->number / WARPGROUP;
    Operands& read = operands[{group, issued.number}];
    const Product& p = issued.product;
    if (read.b.empty()) {
        read.b.resize(size_t(16 * p.columns));
        for (int k = 0; k < 16; k++)
            for (int c = 0; c < p.columns; c++)
                read.b[size_t(k * p.columns + c)] = operand_at(p.b, c, k, p.b_transposed, p.bfloat, issued.where);
        if (!p.registers) {
            read.a.resize(64 * 16);
            for (int r = 0; r < 64; r++)
                for (int k = 0; k < 16; k++)
                    read.a[size_t(r * 16 + k)] = operand_at(p.a, r, k, p.a_transposed, p.bfloat, issued.where);
        }
    }
    return read;
}

static void compute(const Issued& issued, std::vector<float>& d) {
    Operands& read = operands_of(issued);
    const Product& p = issued.product;
    if (p.registers && memcmp(p.registers, issued.words, sizeof issued.words))
        fail(issued.where, "the registers of this wgmma's operand were written to before it was waited for");
    const int warp = current->number / WARP % 4, lane = current->number % WARP;
    for (int n = 0; n < p.columns / 8; n++)
        for (int half = 0; half < 2; half++)
            for (int e = 0; e < 2; e++) {
                const int row = warp * 16 + lane / 4 + half * 8, column = n * 8 + lane % 4 * 2 + e;
                float& to = d[size_t(n * 4 + half * 2 + e)];
                float sum = p.add ? to : 0;
                for (int k = 0; k < 16; k++) {
                    const float a = p.registers ? issued.rows[half][k] : read.a[size_t(row * 16 + k)];
                    sum += a * read.b[size_t(k * p.columns + column)];
                }
                to = sum;
            }
    if (++read.users == WARPGROUP) operands.erase({current->number / WARPGROUP, issued.number});
}

// The rows of a that this thread's results need: its quad holds them, two numbers to a register.
static void gather_rows(Issued& issued, SourceLine where) {
    const uint32* mine = issued.product.registers;
    memcpy(issued.words, mine, sizeof issued.words);
    const int lane = current->number % WARP;
    for (int part = 0; part < 2; part++) {
        memcpy(shuffle_slot(lane), mine + 2 * part, 8);
        warp_barrier(~0u, where);
        for (int q = 0; q < 4; q++) {
            uint32 words[2];
            memcpy(words, shuffle_slot((lane & ~3) | q), 8);
            for (int half = 0; half < 2; half++)
                for (int e = 0; e < 2; e++)
                    issued.rows[half][part * 8 + q * 2 + e] =
                        widened(uint16_t(words[half] >> (16 * e)), issued.product.bfloat);
        }
        end_exchange();
    }
}

static void check_untouched(const float* d, int count, SourceLine where) {
    for (int i = 0; i < count; i++)
        if (memcmp(d + i, &POISON, 4)) fail(where, "the result of a wgmma was written to before it was waited for");
}

void wgmma(float* d, const Product& product, SourceLine where) {
    Products& mine = products[size_t(current->number)];
    const int count = product.columns / 2;
    if (!mine.fenced) fail(where, "wgmma.fence is missing: registers may have changed since the last one");
    Issued issued{product, d, {}, {}, mine.issued++, where};
    if (product.registers) gather_rows(issued, where);
    else warp_barrier(~0u, where);
    auto found = mine.accumulators.find(d);
    if (found == mine.accumulators.end()) {
        mine.accumulators[d] = {count, std::vector<float>(d, d + count)};
        for (int i = 0; i < count; i++) memcpy(d + i, &POISON, 4);
    } else {
        check_untouched(d, count, where);
    }
    mine.open.push_back(issued);
}

void wgmma_fence(SourceLine where) {
    warp_barrier(~0u, where);
    products[size_t(current->number)].fenced = true;
}

void wgmma_commit(SourceLine where) {
    warp_barrier(~0u, where);
    Products& mine = products[size_t(current->number)];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}

static bool is_in_flight(const Products& mine, const float* d) {
    const auto uses = [d](const Issued& issued) { return issued.d == d; };
    if (std::any_of(mine.open.begin(), mine.open.end(), uses)) return true;
    return std::any_of(mine.groups.begin(), mine.groups.end(), [&](const std::vector<Issued>& group) {
        return std::any_of(group.begin(), group.end(), uses);
    });
}

void wgmma_wait(int groups, SourceLine where) {
    warp_barrier(~0u, where);
    Products& mine = products[size_t(current->number)];
    wait_at_one_place(mine.waits++, where);
    while (int(mine.groups.size()) > groups) {
        for (const Issued& issued : mine.groups.front()) compute(issued, mine.accumulators[issued.d].values);
        mine.groups.pop_front();
        mine.fenced = false;
    }
    for (auto i = mine.accumulators.begin(); i != mine.accumulators.end();) {
        if (is_in_flight(mine, i->first)) {
            ++i;
            continue;
        }
        check_untouched(i->first, i->second.count, where);
        memcpy(i->first, i->second.values.data(), i->second.values.size() * 4);
        i = mine.accumulators.erase(i);
    }
}

void load_matrices(uint32* to, uint32 row, SourceLine where) {
    if (row % 16) fail(where, "a row of a matrix is not aligned to 16 bytes");
    const int lane = current->number % WARP;
    memcpy(shuffle_slot(lane), &row, 4);
    warp_barrier(~0u, where);
    for (int i = 0; i < 4; i++) {
        uint32 address;
        memcpy(&address, shuffle_slot(i * 8 + lane / 4), 4);
        memcpy(to + i, memory_at(address, 16, where) + lane % 4 * 4, 4);
    }
    end_exchange();
}

void store_matrices(uint32 row, const uint32* from, SourceLine where) {
    if (row % 16) fail(where, "a row of a matrix is not aligned to 16 bytes");
    const int lane = current->number % WARP;
    memcpy(shuffle_slot(lane), &row, 4);
    warp_barrier(~0u, where);
    for (int i = 0; i < 4; i++) {
        uint32 address;
        memcpy(&address, shuffle_slot(i * 8 + lane / 4), 4);
        memcpy(memory_at(address, 16, where) + lane % 4 * 4, from + i, 4);
    }
    end_exchange();
}

// What each lane gives to a product of its warp.
static void exchanged(uint64 (&of_lane)[WARP], uint32 low, uint32 high, SourceLine where) {
    const uint64 mine = uint64(high) << 32 | low;
    memcpy(shuffle_slot(current->number % WARP), &mine, 8);
    warp_barrier(~0u, where);
    for (int lane = 0; lane < WARP; lane++) memcpy(&of_lane[lane], shuffle_slot(lane), 8);
    end_exchange();
}

void mma(float* d, const uint32* a, const uint32* b, bool bfloat, SourceLine where) {
    uint64 a_first[WARP], a_second[WARP], b_all[WARP];  // depths 0 to 7 and 8 to 15 of a
    exchanged(a_first, a[0], a[1], where);
    exchanged(a_second, a[2], a[3], where);
    exchanged(b_all, b[0], b[1], where);
    const int lane = current->number % WARP;
    const auto number = [bfloat](uint64 words, int upper, int e) {
        return widened(uint16_t(words >> (32 * upper + 16 * e)), bfloat);
    };
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const uint64* of_a = k < 8 ? a_first : a_second;
            d[i] += number(of_a[row * 4 + k % 8 / 2], i / 2, k % 2) * number(b_all[column * 4 + k % 8 / 2], k / 8, k % 2);
        }
    }
}

// -- blocks -----------------------------------------------------------------------------------------------------------

static void begin() {
    mbarriers.clear();
    operands.clear();
    meetings.clear();
    async_view.assign(launch.shared_bytes, POISON_BYTE);
    stores.clear();
    stores.resize(launch.threads);  // each with an open group of its own
    products.assign(launch.threads, Products());
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
    for (size_t i = 0; i < products.size(); i++)
        if (!products[i].accumulators.empty()) {
            current = &fibers[i];
            fail(nowhere(), "the thread ended before its wgmma was waited for");
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

// Products of matrices on Hopper: results of wgmma appear when they are waited for, and until then their places hold a NaN
// that must stay untouched. And what warps exchange as matrices.
#include <cmath>
#include <cstring>
#include <map>

#include "async.h"

namespace simulator {

constexpr uint32 POISON = 0x7fc0beef;  // a NaN that no computation gives

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

static Operands operands_in_memory(const Product& p, SourceLine where) {
    Operands read;
    read.b.resize(size_t(16 * p.columns));
    for (int k = 0; k < 16; k++)
        for (int c = 0; c < p.columns; c++)
            read.b[size_t(k * p.columns + c)] = operand_at(p.b, c, k, p.b_transposed, p.bfloat, where);
    if (p.registers) return read;
    read.a.resize(64 * 16);
    for (int r = 0; r < 64; r++)
        for (int k = 0; k < 16; k++) read.a[size_t(r * 16 + k)] = operand_at(p.a, r, k, p.a_transposed, p.bfloat, where);
    return read;
}

// As the first thread of a warpgroup to issue a product found them. A GPU may read them from then on.
static std::map<std::pair<int, uint64_t>, Operands> operands_when_issued;

static void note_operands(const Issued& issued) {
    const std::pair<int, uint64_t> key{current->number / WARPGROUP, issued.number};
    if (launch.order == 2 && !operands_when_issued.count(key))  // in one order of all: it takes its time
        operands_when_issued[key] = operands_in_memory(issued.product, issued.where);
}

static bool same_bits(const std::vector<float>& x, const std::vector<float>& y) {
    return !memcmp(x.data(), y.data(), x.size() * sizeof(float));
}

static Operands& operands_of(const Issued& issued) {
    const std::pair<int, uint64_t> key{current->number / WARPGROUP, issued.number};
    const auto found = operands.find(key);
    if (found != operands.end()) return found->second;
    Operands& read = operands[key] = operands_in_memory(issued.product, issued.where);
    const auto noted = operands_when_issued.find(key);
    if (noted != operands_when_issued.end()) {
        if (!same_bits(noted->second.a, read.a) || !same_bits(noted->second.b, read.b))
            fail(issued.where, "an operand of this wgmma in shared memory was written to after a warp had issued it");
        operands_when_issued.erase(noted);
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
    note_operands(issued);
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
    note(PRODUCT_ISSUED, where);
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
        note(PRODUCT_TAKEN, where);
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

// Four matrices of 8 x 8, of whose rows each lane names one.
template <class Act> static void with_rows(uint32 row, SourceLine where, Act act) {
    if (row % 16) fail(where, "a row of a matrix is not aligned to 16 bytes");
    memcpy(shuffle_slot(current->number % WARP), &row, 4);
    warp_barrier(~0u, where);
    act([&](int matrix, int number) {
        uint32 address;
        memcpy(&address, shuffle_slot(matrix * 8 + number), 4);
        return memory_at(address, 16, where);
    });
    end_exchange();
}
// A lane has two numbers of a row of each.
template <class Act> static void for_each_matrix(uint32 row, SourceLine where, Act act) {
    const int lane = current->number % WARP;
    with_rows(row, where, [&](auto row_of) {
        for (int i = 0; i < 4; i++) act(i, row_of(i, lane / 4) + lane % 4 * 4);
    });
}

void load_matrices(uint32* to, uint32 row, SourceLine where) {
    for_each_matrix(row, where, [&](int i, const unsigned char* at) { memcpy(to + i, at, 4); });
}

// Two of a column of each.
template <class Act> static void for_each_in_columns(uint32 row, SourceLine where, Act act) {
    const int lane = current->number % WARP;
    with_rows(row, where, [&](auto row_of) {
        for (int i = 0; i < 8; i++) act(i * 2, row_of(i / 2, lane % 4 * 2 + i % 2) + lane / 4 * 2);
    });
}

void load_matrices_turned(uint32* to, uint32 row, SourceLine where) {
    for_each_in_columns(row, where, [&](int byte, const unsigned char* at) {
        memcpy(reinterpret_cast<unsigned char*>(to) + byte, at, 2);
    });
}

void store_matrices_turned(uint32 row, const uint32* from, SourceLine where) {
    for_each_in_columns(row, where, [&](int byte, unsigned char* at) {
        memcpy(at, reinterpret_cast<const unsigned char*>(from) + byte, 2);
    });
}

void store_matrices(uint32 row, const uint32* from, SourceLine where) {
    for_each_matrix(row, where, [&](int i, unsigned char* at) { memcpy(at, from + i, 4); });
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

static void begin_products() {
    operands.clear();
    operands_when_issued.clear();
    meetings.clear();
    products.assign(launch.threads, Products());
}

static void end_products() {
    for (size_t i = 0; i < products.size(); i++)
        if (!products[i].accumulators.empty()) {
            current = &fibers[i];
            fail(nowhere(), "the thread ended before its wgmma was waited for");
        }
}

static Register of_products({begin_products, end_products});

}  // namespace simulator

// Races in shared memory: each four bytes know who last wrote and read them, and whether a barrier was between.
#include "runtime.h"

namespace simulator {

struct alignas(64) Word {  // who last touched four bytes, and when; -2: several threads
    int writer = -1, reader = -1, reader_warp = -1;
    unsigned written = 0, written_in_warp = 0, read = 0, read_in_warp = 0;
    SourceLine write_line{}, read_line{};
};
static std::vector<Word> words;

static void check_shared(const void* at, int bytes, SourceLine where) {
    if (!is_shared(at, size_t(bytes))) fail(where, "outside shared memory");
    if (reinterpret_cast<uintptr_t>(at) % uintptr_t(bytes)) fail(where, "not aligned to " + std::to_string(bytes) + " bytes");
}

// Whether nothing was waited for since: the whole block's barrier, or within a warp the warp's.
static bool concurrent(int warp, unsigned block_time, unsigned warp_time) {
    if (block_time != block_generation) return false;
    return warp != current->warp() || warp_time == warps[size_t(current->warp())].generation;
}

static void check_writer(const Word& word, const char* verb, SourceLine where) {
    if (word.writer < 0 || word.writer == current->number) return;
    if (concurrent(word.writer / WARP, word.written, word.written_in_warp))
        fail(where, std::string("race: it ") + verb + " what thread " + std::to_string(word.writer) + " wrote at " +
                        place(word.write_line) + ", and no barrier is between");
}

// Most words were written before the last barrier of the block, which settles it.
void reads(const void* from, int bytes, SourceLine where) {
    check_shared(from, bytes, where);
    const int thread = current->number, warp = current->warp();
    const unsigned now = block_generation, in_warp = warps[size_t(warp)].generation;
    Word* const end = &words[(shared_offset(from) + uint32_t(bytes)) / 4];
    for (Word* word = &words[shared_offset(from) / 4]; word < end; word++) {
        if (word->written == now) check_writer(*word, "reads", where);
        const bool together = word->reader != -1 && word->read == now && word->reader != thread;
        word->reader_warp = together && word->reader_warp != warp ? -2 : warp;
        word->reader = together ? -2 : thread;
        word->read = now, word->read_in_warp = in_warp, word->read_line = where;
    }
}

void writes(const void* to, int bytes, SourceLine where) {
    check_shared(to, bytes, where);
    const int thread = current->number, warp = current->warp();
    const unsigned now = block_generation, in_warp = warps[size_t(warp)].generation;
    Word* const end = &words[(shared_offset(to) + uint32_t(bytes)) / 4];
    for (Word* word = &words[shared_offset(to) / 4]; word < end; word++) {
        if (word->written == now) check_writer(*word, "overwrites", where);
        if (word->reader != -1 && word->reader != thread && concurrent(word->reader_warp, word->read, word->read_in_warp))
            fail(where, "race: it overwrites what another thread read at " + place(word->read_line) +
                            ", and no barrier is between");
        word->writer = thread, word->write_line = where;
        word->written = now, word->written_in_warp = in_warp;
    }
}

static void begin_races() { words.assign(launch.shared_bytes / 4 + 1, Word()); }

static Register of_races({begin_races, nullptr});

}  // namespace simulator

#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "engine.h"

namespace {

// Memory that is kept from task to task and from call to call.
class Kept {
   public:
    Kept() = default;
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;
    ~Kept() { free(memory_); }
    void* at_least(size_t bytes) {
        if (bytes > size_) {
            free(memory_);
            size_ = 0;
            memory_ = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
            if (memory_ != nullptr) size_ = bytes;
        }
        return memory_;
    }

   private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

// One caller's tasks. It lives on the caller's stack, so the caller leaves last.
struct Job {
    const Task& task;
    int64_t n;
    size_t scratch_bytes;
    std::atomic<int64_t> next{0};
    std::atomic<int> status{DONE};
    int helpers = 0;  // threads of the pool inside; guarded by the pool's mutex

    void stop(int why) {
        status = why;
        next = n;
    }
    // Takes tasks until there are none; `pause` is asked within and after each, and stops the job.
    void work(Kept& kept, const Pause& pause) {
        void* scratch = kept.at_least(std::max<size_t>(scratch_bytes, 1));
        if (scratch == nullptr) return stop(NO_MEMORY);
        for (int64_t i; (i = next.fetch_add(1)) < n;) {
            try {
                task(i, scratch, pause);
            } catch (const std::bad_alloc&) {
                return stop(NO_MEMORY);
            }
            if (pause()) return;
        }
    }
    bool stopped() const { return status != DONE; }
};

// A caller's memory. Callers take it in turn, so that none is tied to a thread: a handler of signals may call the engine
// from within a pause, and threads of Python's come and go.
class Borrowed {
   public:
    Borrowed() : kept_(spare.exchange(nullptr)) {
        if (kept_ == nullptr) kept_ = new Kept;
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() { delete spare.exchange(kept_); }
    Kept& operator*() { return *kept_; }

   private:
    static std::atomic<Kept*> spare;
    Kept* kept_;
};
std::atomic<Kept*> Borrowed::spare{nullptr};

// The calling thread's pauses: it asks for signals, but not all the time.
struct Watch {
    Job& job;
    Interrupted interrupted;
    std::chrono::steady_clock::time_point asked = std::chrono::steady_clock::now();

    bool ask() {
        auto now = std::chrono::steady_clock::now();
        if (interrupted != nullptr && now - asked > std::chrono::milliseconds(20)) {
            asked = now;
            if (!job.stopped() && interrupted()) job.stop(INTERRUPTED);
        }
        return job.stopped();
    }
};

// A thread that is woken is often put on the processor of the one that woke it, and waits there while others idle. So
// the threads of the pool keep off the caller's processor, as long as there are enough for all.
class Apart {
   public:
    void keep(const std::vector<std::thread::native_handle_type>& others) {
#if defined(__linux__)
        int here = sched_getcpu();
        cpu_set_t wanted;
        if (here < 0 || sched_getaffinity(0, sizeof wanted, &wanted) != 0) return;
        if (size_t(CPU_COUNT(&wanted)) > others.size()) CPU_CLR(size_t(here), &wanted);
        if (others.size() == told_ && CPU_EQUAL(&wanted, &place_)) return;
        for (auto thread : others) pthread_setaffinity_np(thread, sizeof wanted, &wanted);
        place_ = wanted;
        told_ = others.size();
#else
        (void)others;
#endif
    }

   private:
#if defined(__linux__)
    cpu_set_t place_;
#endif
    size_t told_ = 0;
};

class Pool {
   public:
    void run(Job& job, int wanted, Interrupted interrupted) {
        Borrowed mine;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            start(wanted);
            if (wanted > 0) apart_.keep(threads_);
            open_.push_back({&job, wanted});
        }
        wake_.notify_all();
        Watch watch{job, interrupted};
        job.work(*mine, {[](void* watch) { return static_cast<Watch*>(watch)->ask(); }, &watch});
        std::unique_lock<std::mutex> lock(mutex_);
        open_.remove_if([&](const Open& open) { return open.job == &job; });
        left_.wait(lock, [&] { return job.helpers == 0; });
    }

   private:
    struct Open {
        Job* job;
        int helpers_wanted;
    };

    void start(int wanted) {
        while (threads_.size() < size_t(wanted)) {
            try {
                std::thread thread(&Pool::serve, this);
                threads_.push_back(thread.native_handle());
                thread.detach();  // it never ends
            } catch (const std::system_error&) {
                return;  // fewer threads do the same work
            }
        }
    }

    void serve() {
        Kept mine;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            auto found = std::find_if(open_.begin(), open_.end(), [](const Open& open) {
                return open.job->helpers < open.helpers_wanted && open.job->next < open.job->n;
            });
            if (found == open_.end()) {
                wake_.wait(lock);
                continue;
            }
            Job* job = found->job;
            job->helpers++;
            lock.unlock();
            job->work(mine, {[](void* job) { return static_cast<Job*>(job)->stopped(); }, job});
            lock.lock();
            if (--job->helpers == 0) left_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, left_;
    std::list<Open> open_;
    std::vector<std::thread::native_handle_type> threads_;
    Apart apart_;
};

std::atomic<int> thread_count{1};
std::atomic<Pool*> current{nullptr};

// The child of a fork has none of the threads, and the mutex may have been held: it begins anew. The old pool is left
// as it is; its memory is the parent's. Never destroyed either, so that exiting does not wait for sleeping threads.
Pool& pool() {
    static const int once = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
    (void)once;
    Pool* found = current;
    if (found == nullptr) {
        Pool* made = new Pool;
        if (current.compare_exchange_strong(found, made)) return *made;
        delete made;
    }
    return *found;
}

}  // namespace

void set_threads(int n) { thread_count = std::clamp(n, 1, MOST_THREADS); }
int threads() { return thread_count; }

int run_tasks(int64_t n, size_t scratch_bytes, Interrupted interrupted, const Task& task) {
    Job job{task, n, scratch_bytes};
    int helpers = int(std::min<int64_t>(threads(), n)) - 1;
    try {
        pool().run(job, std::max(helpers, 0), interrupted);
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return job.status;
}

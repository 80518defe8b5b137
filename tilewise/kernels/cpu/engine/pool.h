// The engine's own threads: they sleep while there is nothing to do, serve several callers at once, survive fork().
#pragma once
#include <stdint.h>
#include <functional>

#include "pause.h"

constexpr int MOST_THREADS = 1024;  // as in ../library.py

void set_threads(int n);  // including the caller's; the nearest number from 1 to MOST_THREADS
int threads();

// Called between tasks, from the calling thread only: true gives up.
typedef bool (*Interrupted)();

typedef std::function<void(int64_t, void* scratch, const Pause&)> Task;

// Runs task(i, scratch, pause) for i in 0 .. n, in any order, on up to threads() threads; each has `scratch_bytes` of its own.
// Returns a Status: DONE, NO_MEMORY (a task's memory could not be had) or INTERRUPTED. No task runs when it returns.
int run_tasks(int64_t n, size_t scratch_bytes, Interrupted interrupted, const Task& task);

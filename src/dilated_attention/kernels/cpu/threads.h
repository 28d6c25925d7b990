// Work shared out among threads.
#pragma once
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

// Whether there is a pool of OpenMP; else threads are made for every call.
bool has_pool();

// Releases Python's lock for a launch, and takes it again in `end`: no destructor, because Python may end the thread there.
// Python's handlers of signals run in its main thread alone, and not while that is in here: `stopped` lets them run.
class Watch {
 public:
  Watch();
  void end();
  bool stopped();

 private:
  Watch *const before;
  const pthread_t caller;
  std::chrono::steady_clock::time_point asked;
  void *state;  // of Python's thread
  std::atomic<bool> stop{false};
};

// Whether the launch that this thread works for is to end: a handler of a signal has raised an exception, which Python
// finds when the library returns. What the launch has written is then of no use.
bool stopped();

// Run body(data) at once in at most `threads` threads, this one among them; `jobs` of them have something to do. The pool
// wakes all of them: GNU OpenMP ends the threads that a smaller team leaves out, and PyTorch's next operator would make
// them anew.
void run_in_threads(int64_t threads, int64_t jobs, void (*body)(void *), void *data);

// Return the calling thread's memory for `floats` floats, aligned to 64 bytes, its content undefined; null if there is
// none. It is kept for the next call, because the system maps each page of new memory with a fault.
float *thread_memory(int64_t floats);

namespace {

// work(i, memory) for all 0 <= i < work.count(), in any order, which begins with the first, after work.begin(memory) in
// every thread. Returns false if memory ran out.
template <class Work>
bool compute(const Work &work, int64_t threads) {
  struct Shared {
    const Work &work;
    std::atomic<int64_t> next;
    std::atomic<bool> failed;
  } shared{work, {0}, {false}};
  const auto body = [](void *data) {
    Shared &shared = *static_cast<Shared *>(data);
    const auto next = [&] { return shared.next.fetch_add(1, std::memory_order_relaxed); };  // no job waits for another
    int64_t i = next();
    if (i >= shared.work.count()) return;
    float *memory = thread_memory(shared.work.floats());
    if (memory)
      shared.work.begin(memory);
    else
      shared.failed = true;
    for (; !shared.failed && !stopped() && i < shared.work.count(); i = next()) shared.work(i, memory);
  };
  run_in_threads(threads, work.count(), body, &shared);
  return !shared.failed;
}

}  // namespace

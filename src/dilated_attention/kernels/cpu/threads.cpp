#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cstdlib>
#include <system_error>
#include <thread>
#include <vector>

namespace {

std::atomic<bool> forked{false};

// The entry of the OpenMP library that PyTorch has loaded, GNU's or LLVM's, which both have it: the pool of its threads
// is the one that PyTorch's own operators use, and a second one would fight with it for the cores. Null where there is
// none.
using GompParallel = void (*)(void (*)(void *), void *, unsigned, unsigned);
GompParallel pool() {
  static const GompParallel found = [] {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  }();
  return found;
}

struct Memory {
  void *data = nullptr;
  size_t size = 0;
  ~Memory() { std::free(data); }
};

}  // namespace

void run_in_threads(int64_t threads, void (*body)(void *), void *data) {
  if (threads <= 1) return body(data);
  const GompParallel parallel = pool();
  if (parallel && !forked)
    return parallel(body, data, unsigned(threads), 0);  // a forked child has no pool: it would hang
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads; i++) others.emplace_back(body, data);
  } catch (const std::system_error &) {
    // Fewer threads do the same work.
  }
  body(data);
  for (std::thread &other : others) other.join();
}

float *thread_memory(int64_t floats) {
  static thread_local Memory memory;
  const size_t bytes = (size_t(floats) * sizeof(float) + 4095) / 4096 * 4096;
  if (bytes > memory.size) {
    std::free(memory.data);
    memory.data = std::aligned_alloc(4096, bytes);
    memory.size = memory.data ? bytes : 0;
  }
  return static_cast<float *>(memory.data);
}

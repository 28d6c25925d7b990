#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#else
#include <link.h>
#endif

#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

// GNU OpenMP's pool does not survive a fork: a child that asked it for threads would wait for ever.
std::atomic<bool> forked{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

using Parallel = void (*)(void (*)(void *), void *, unsigned threads, unsigned flags);

Parallel entry(void *library) { return reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel")); }

bool is_openmp(std::string_view path) {
  for (const char *openmp : {"libgomp", "libiomp5", "libomp"})
    if (path.find(openmp) != path.npos) return true;
  return false;
}

// The path of an OpenMP library that this process has loaded; empty where there is none.
std::string loaded_openmp() {
#ifdef __APPLE__
  for (uint32_t i = 0; i < _dyld_image_count(); i++)
    if (const char *path = _dyld_get_image_name(i); path && is_openmp(path)) return path;
  return "";
#else
  std::string found;
  const auto look = [](dl_phdr_info *library, size_t, void *result) {
    if (!is_openmp(library->dlpi_name)) return 0;
    return *static_cast<std::string *>(result) = library->dlpi_name, 1;
  };
  dl_iterate_phdr(look, &found);
  return found;
#endif
}

// The entry of the OpenMP library that this process has loaded, GNU's or LLVM's, which both have it: its pool is the
// one that PyTorch's own operators use, and a second pool would fight with it for the cores. Null where there is none.
Parallel pool() {
  static const Parallel found = [] {
    if (const Parallel parallel = entry(RTLD_DEFAULT)) return parallel;
    const std::string name = loaded_openmp();  // a library whose symbols are not global
    void *const library = name.empty() ? nullptr : dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    return library ? entry(library) : nullptr;
  }();
  return found;
}

struct Memory {
  void *data = nullptr;
  size_t size = 0;
  ~Memory() { std::free(data); }
};

}  // namespace

bool has_pool() { return pool(); }

void run_in_threads(int64_t threads, int64_t jobs, void (*body)(void *), void *data) {
  if (threads <= 1 || jobs <= 1) return body(data);
  const Parallel parallel = forked ? nullptr : pool();
  if (parallel) return parallel(body, data, unsigned(threads), 0);
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads && i < jobs; i++) others.emplace_back(body, data);
  } catch (const std::exception &) {
    // A limit of the system, or no memory: the threads that were started do all the work.
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

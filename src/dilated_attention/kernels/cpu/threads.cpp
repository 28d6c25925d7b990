#include "threads.h"

#include <dlfcn.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#else
#include <link.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
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
  void swap(Memory &other) { std::swap(data, other.data), std::swap(size, other.size); }
};

thread_local Memory memory;

// Python's own functions, null in a process without it. The library is plain C, which any version may load.
template <class Function>
Function in_python(const char *name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

const auto save_thread = in_python<void *(*)()>("PyEval_SaveThread");
const auto restore_thread = in_python<void (*)(void *)>("PyEval_RestoreThread");
const auto check_signals = in_python<int (*)()>("PyErr_CheckSignals");

bool in_main_thread() {
#ifdef __APPLE__
  return pthread_main_np();
#else
  return syscall(SYS_gettid) == getpid();
#endif
}

thread_local Watch *watch = nullptr;  // of the launch that this thread works for

struct Team {
  void (*body)(void *);
  void *data;
  Watch *watch;
};

// What each thread of a team runs.
void take_part(void *data) {
  const Team &team = *static_cast<Team *>(data);
  Watch *const before = std::exchange(watch, team.watch);
  team.body(team.data);
  watch = before;
}

}  // namespace

bool has_pool() { return pool(); }

Watch::Watch()
    : before(std::exchange(watch, this)),
      caller(pthread_self()),
      asked(std::chrono::steady_clock::now()),
      state(save_thread ? save_thread() : nullptr) {}

void Watch::end() {
  watch = before;
  if (restore_thread) restore_thread(state);
}

bool Watch::stopped() {
  if (stop.load(std::memory_order_relaxed)) return true;
  if (!check_signals || !pthread_equal(pthread_self(), caller)) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now - asked < std::chrono::milliseconds(50)) return false;
  asked = now;
  if (!in_main_thread()) return false;  // which has no handlers, and which Python ends in restore_thread at its exit
  Memory kept;  // a handler may call this library, whose memory is in use
  kept.swap(memory);
  restore_thread(state);
  stop = check_signals() != 0;
  state = save_thread();
  kept.swap(memory);
  return stop;
}

bool stopped() { return watch && watch->stopped(); }

void run_in_threads(int64_t threads, int64_t jobs, void (*body)(void *), void *data) {
  if (threads <= 1 || jobs <= 1) return body(data);
  Team team{body, data, watch};
  const Parallel parallel = forked ? nullptr : pool();
  if (parallel) return parallel(take_part, &team, unsigned(threads), 0);
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads && i < jobs; i++) others.emplace_back(take_part, &team);
  } catch (const std::exception &) {
    // A limit of the system, or no memory: the threads that were started do all the work.
  }
  body(data);
  for (std::thread &other : others) other.join();
}

float *thread_memory(int64_t floats) {
  const size_t bytes = (size_t(floats) * sizeof(float) + 4095) / 4096 * 4096;
  if (bytes > memory.size) {
    std::free(memory.data);
    memory.data = std::aligned_alloc(4096, bytes);
    memory.size = memory.data ? bytes : 0;
  }
  return static_cast<float *>(memory.data);
}

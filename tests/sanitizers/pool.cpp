// GNU OpenMP's entry, preloaded, with the marks of where a parallel region begins and ends. That library starts and joins
// its threads by system calls, which the thread sanitizer does not see: without marks it takes each result of a region for
// a race.
#include <dlfcn.h>

extern "C" {
void __tsan_acquire(void *);
void __tsan_release(void *);

struct Region {
  void (*body)(void *);
  void *data;
  char begin, end;
};

static void run(void *data) {
  Region *const region = static_cast<Region *>(data);
  __tsan_acquire(&region->begin);
  region->body(region->data);
  __tsan_release(&region->end);
}

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
  using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);
  static const Parallel pool = reinterpret_cast<Parallel>(dlsym(RTLD_NEXT, "GOMP_parallel"));
  Region region{body, data, 0, 0};
  __tsan_release(&region.begin);
  pool(run, &region, threads, flags);
  __tsan_acquire(&region.end);
}
}

// Call the library's functions for another process, as ctypes does in one: this program is linked to the arm64 kernels
// and runs in QEMU. emulated_arm64.py writes requests to its input and reads answers from its output.
//
//     request   Request; the bytes of the structure; for each pointer that is not null, Pointer and the buffer
//     answer    int64 result, or length of the text; the text, or the buffers that are `written`
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

struct Request {
  char function[64];
  int64_t arguments[8], is_text, structure, pointers;  // whether the function returns text; the size of the structure
};

struct Pointer {
  int64_t offset, before, size, written;  // offset: in the arguments, behind which the structure lies; before: bytes of
                                          // the buffer before the pointer's target
};

void need(bool condition, const char *what) {
  if (condition) return;
  std::fprintf(stderr, "emulated arm64: %s\n", what);
  std::abort();
}

void receive(void *to, size_t size) { need(std::fread(to, 1, size, stdin) == size, "the request is cut off"); }
void send(const void *from, size_t size) { need(std::fwrite(from, 1, size, stdout) == size, "nobody reads"); }

// Memory that ends where a page begins that cannot be accessed; such a page lies before it too. It is filled with NaN.
struct Fenced {
  const size_t size, page = sysconf(_SC_PAGESIZE), room = (size + page - 1) / page * page;
  void *const mapped = mmap(nullptr, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *const first = static_cast<char *>(mapped) + page, *const data = first + room - size;

  explicit Fenced(size_t size) : size(size) {
    need(mapped != MAP_FAILED && mprotect(first, room, PROT_READ | PROT_WRITE) == 0, "no memory");
    std::memset(first, 0xff, room);
  }
  ~Fenced() { munmap(mapped, room + 2 * page); }
  void make_read_only() { mprotect(first, room, PROT_READ); }
  void check() const {
    for (const char *x = first; x < data; x++) need(*x == char(0xff), "a kernel wrote before a buffer");
  }
};

}  // namespace

// In place of the library's own function (threads.h): the memory is new in every call, and fenced.
float *thread_memory(int64_t floats) {
  static thread_local std::unique_ptr<Fenced> memory;
  memory = std::make_unique<Fenced>((size_t(floats) * sizeof(float) + 63) / 64 * 64);
  return reinterpret_cast<float *>(memory->data);
}

int main(int, char **arguments) {
  FILE *const log = std::fopen(arguments[1], "a");  // of the calls with buffers: function and instruction set
  need(log && setvbuf(log, nullptr, _IOLBF, BUFSIZ) == 0, "no log");
  for (Request x; std::fread(&x, sizeof x, 1, stdin) == 1; std::fflush(stdout)) {
    using Function = int64_t(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
    const auto function = reinterpret_cast<Function *>(dlsym(RTLD_DEFAULT, x.function));
    need(function, "the library has no such function");
    std::vector<char> memory(sizeof x.arguments + x.structure);
    int64_t *const a = reinterpret_cast<int64_t *>(memory.data());
    std::memcpy(a, x.arguments, sizeof x.arguments);
    if (x.structure) a[3] = int64_t(a + 8);
    receive(a + 8, x.structure);
    std::vector<Pointer> pointers(x.pointers);
    std::vector<std::unique_ptr<Fenced>> buffers;
    for (Pointer &pointer : pointers) {
      receive(&pointer, sizeof pointer);
      Fenced &buffer = *buffers.emplace_back(std::make_unique<Fenced>(pointer.size));
      receive(buffer.data, buffer.size);
      if (!pointer.written) buffer.make_read_only();
      const char *const target = buffer.data + pointer.before;
      std::memcpy(&memory[pointer.offset], &target, sizeof target);
    }
    if (x.pointers) std::fprintf(log, "%s %ld\n", x.function, long(x.structure ? a[2] : 0));
    const int64_t result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    const auto text = reinterpret_cast<const char *>(result);
    const int64_t answer = x.is_text ? int64_t(std::strlen(text)) : result;
    send(&answer, sizeof answer);
    if (x.is_text) send(text, answer);
    for (int64_t i = 0; i < x.pointers; i++) {
      if (!pointers[i].written) continue;
      buffers[i]->check();
      send(buffers[i]->data, buffers[i]->size);
    }
  }
}

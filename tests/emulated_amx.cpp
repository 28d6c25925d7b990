// The kernels of amx.cpp on tile registers of plain C++, for machines that have none: a library with the function that
// backends/cpu.py calls, linked to the compiled kernels for the rest. What the instructions would refuse ends the
// process.
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "amx.cpp"

extern "C" std::atomic<int64_t> configured, released;  // how often, by all threads
std::atomic<int64_t> configured{0}, released{0};

namespace {

struct Tile16 {
  uint8_t row[16][64];
};

struct Emulated {
  static inline thread_local Configuration configuration;
  static inline thread_local bool ready = false;
  static inline thread_local Tile16 tiles[8];

  static void need(bool condition, const char *what) {
    if (condition) return;
    std::fprintf(stderr, "emulated AMX: %s\n", what);
    std::abort();
  }

  static void configure(const Configuration &to) {
    need(reinterpret_cast<uintptr_t>(&to) % 64 == 0 && to.palette == 1 && to.start_row == 0, "configuration");
    for (uint8_t byte : to.reserved) need(byte == 0, "reserved byte of a configuration");
    for (int i = 0; i < 16; i++) {
      need(i < 8 || (to.rows[i] == 0 && to.row_bytes[i] == 0), "there are eight tiles");
      need(to.rows[i] <= 16 && to.row_bytes[i] <= 64 && (to.rows[i] == 0) == (to.row_bytes[i] == 0), "size of a tile");
    }
    need(!ready, "configured twice");
    configuration = to, ready = true, ++configured;
    std::memset(tiles, 0, sizeof tiles);
  }

  static void release() {
    need(ready, "released twice");
    ready = false, ++released;
  }

  // The rows of a tile that may be used.
  static int rows_of(int tile) {
    need(ready && configuration.rows[tile] > 0, "tile that is not configured");
    return configuration.rows[tile];
  }

  template <int TILE>
  static void zero() {
    rows_of(TILE);
    tiles[TILE] = Tile16();
  }

  template <int TILE>
  static void load(const Word *from, int64_t row_words) {
    const int rows = rows_of(TILE);
    tiles[TILE] = Tile16();
    for (int i = 0; i < rows; i++) std::memcpy(tiles[TILE].row[i], from + i * row_words, configuration.row_bytes[TILE]);
  }

  template <int TILE>
  static void store(Word *to, int64_t row_words) {
    const int rows = rows_of(TILE);
    for (int i = 0; i < rows; i++) std::memcpy(to + i * row_words, tiles[TILE].row[i], configuration.row_bytes[TILE]);
  }

  // Denormal numbers are 0, as operands and as results.
  static float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.f, x) : x; }
  static float widened(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return flushed(x);
  }
  static float added(float x, float y) { return flushed(flushed(x) + flushed(y)); }

  // TDPBF16PS: even and odd products of a row are each summed with one rounding a step, then added to one another and to
  // the tile.
  template <int C, int A, int B>
  static void multiply_add() {
    const int rows = rows_of(C), lanes = configuration.row_bytes[C] / 4, words = configuration.row_bytes[A] / 4;
    need(C != A && C != B && A != B && rows_of(A) == rows && rows_of(B) == words &&
             configuration.row_bytes[B] == configuration.row_bytes[C] && configuration.row_bytes[A] % 4 == 0 &&
             configuration.row_bytes[C] % 4 == 0,
         "tiles that do not fit one another");
    for (int i = 0; i < rows; i++) {
      float even[16] = {}, odd[16] = {}, c[16];
      for (int k = 0; k < words; k++) {
        uint32_t a, b[16];
        std::memcpy(&a, tiles[A].row[i] + 4 * k, sizeof a);
        std::memcpy(b, tiles[B].row[k], sizeof b);
        for (int x = 0; x < lanes; x++) {
          even[x] = flushed(std::fma(widened(a << 16), widened(b[x] << 16), even[x]));
          odd[x] = flushed(std::fma(widened(a & 0xffff0000), widened(b[x] & 0xffff0000), odd[x]));
        }
      }
      std::memcpy(c, tiles[C].row[i], sizeof c);
      for (int x = 0; x < lanes; x++) c[x] = added(c[x], added(even[x], odd[x]));
      std::memset(tiles[C].row[i], 0, 64);
      std::memcpy(tiles[C].row[i], c, 4 * lanes);
    }
    for (int i = rows; i < 16; i++) std::memset(tiles[C].row[i], 0, 64);
  }
};

}  // namespace

extern "C" {

int64_t dilated_attention_run(int64_t kernel, int64_t type, int64_t set, const Call *call) {
  return set == 4 ? run_in_tiles<Emulated>(Kernel(kernel), type, *call) : run_avx512(Kernel(kernel), type, *call);
}
}

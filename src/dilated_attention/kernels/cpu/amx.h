// The instructions of AMX-BF16, written out: GCC 12 drops stores to a configuration that its own function loads, and
// its loads and stores of tiles say nothing to the compiler of the memory that they touch.
#pragma once
#include "product_amx.h"

namespace {

struct Amx {
  static void configure(const Configuration &configuration) { asm volatile("ldtilecfg %0" ::"m"(configuration)); }
  static void release() { asm volatile("tilerelease" ::: "memory"); }

  template <int TILE>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
  }
  // Load 16 rows that lie `row_words` words apart.
  template <int TILE>
  static void load(const Word *from, int64_t row_words) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(row_words * sizeof(Word)) : "memory");
  }
  template <int TILE>
  static void store(Word *to, int64_t row_words) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(row_words * sizeof(Word)) : "memory");
  }
  template <int C, int A, int B>
  static void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

}  // namespace

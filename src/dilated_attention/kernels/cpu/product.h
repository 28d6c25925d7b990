// Micro-kernels: products of small matrices, the only place where floating-point throughput counts.
//
// Every product of the kernels is  c[r][lane] (+)= sum over k of a[r][k] * b[k][lane],  where a is broadcast word by
// word and b and c lie in lanes. A word is one float32, or two bfloat16 whose products are added in one instruction; so
// K, Q, V and dO are read as they lie in memory, row by row, once as a (scores: k runs along a row) and once as its
// transpose (values: k runs over rows). Eight rows by two vectors are sixteen sums, twice what covers the latency of a
// product; AVX2, of half as many registers, has four by three. NEON, which multiplies by one word of a register, loads
// WIDTH words of a at once.
#pragma once
#include <type_traits>

#include "vectors.h"

#ifndef CHUNK_ROWS
#define CHUNK_ROWS 64
#endif

namespace {

enum class Role { scores, values, plain };  // of a row in a product; plain: values as they are

constexpr int VECTORS = REGISTERS == 32 ? 2 : 3, LANES = VECTORS * WIDTH;
constexpr int CHUNK = CHUNK_ROWS;               // rows that are streamed at once: a multiple of every ROWS
constexpr int COLUMNS = WIDTH < 8 ? 8 : WIDTH;  // columns of values are a multiple of it, and so of WIDTH and of ROWS

// Products in float32, of elements of any type, which are widened when they are gathered.
struct InFloat32 {
  static constexpr int PER_WORD = 1;
  static constexpr int HALVES = 1;            // words that stand for a number: product_amx.h has two
  static constexpr int ROWS = REGISTERS / 4;  // streamed rows are multiplied in multiples of it
  static constexpr int JOINED = 1;            // groups of keys that a product of dq takes at once
  // Whether streamed values lie [columns][CHUNK / PER_WORD], not [CHUNK / PER_WORD][columns].
  static constexpr bool VALUES_BY_COLUMN = false;
  static Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return ::multiply_add(a, b, c); }
#ifdef __aarch64__
  template <int WORD>
  static Lanes multiply_add_word(Lanes a, Lanes b, Lanes c) {
    return vfmaq_laneq_f32(c, b, a, WORD);
  }
#endif
  static Lanes exp2(Lanes x) { return power_of_2(x); }
  static void to_words(const Lanes (&row)[1], Integers (&words)[1]) { words[0] = integers(row[0]); }
};

// Two rows of weights as operands of values: to[2 / PER_WORD][LANES].
inline void store_weights(InFloat32, Lanes even, Lanes odd, Word *to) {
  store(to, even);
  store(to + LANES, odd);
}

// The same two rows as operands of scores: to[2][row_words], LANES / PER_WORD of them.
inline void store_weight_rows(InFloat32, const Lanes (&rows)[2][VECTORS], Word *to, int64_t row_words) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
#pragma GCC unroll 3
    for (int x = 0; x < VECTORS; x++) store(to + i * row_words + x * WIDTH, rows[i][x]);
}

// body(0), ..., body(COUNT - 1), numbers that the compiler knows.
template <int COUNT, int I = 0, class Body>
[[gnu::always_inline]] inline void for_numbers(Body body) {
  if constexpr (I < COUNT) {
    body(std::integral_constant<int, I>());
    for_numbers<COUNT, I + 1>(body);
  }
}

// c[ROWS][N vectors] (+)= a . b. For scores, `a_row` is the distance between rows of a, in words; for values, between its
// steps. NEON reads a in whole vectors: then steps of scores are rounded up to a multiple of WIDTH.
template <class Arithmetic, int N, bool ADD, Role ROLE>
inline void product(const Word *a, int64_t a_row, const Word *b, int64_t b_step, int steps, float *c, int64_t c_row) {
  constexpr int ROWS = Arithmetic::ROWS;
  Lanes sum[ROWS][N];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
    for (int x = 0; x < N; x++) sum[r][x] = ADD ? load(c + r * c_row + x * WIDTH) : zeros();
#ifdef __aarch64__
  constexpr bool ALONG = ROLE == Role::scores;  // whether a vector of a is of one row and WIDTH steps, or the reverse
  constexpr int LOADS = ALONG ? ROWS : ROWS / WIDTH;
  for (int k = 0; k < steps; k += ALONG ? WIDTH : 1) {
    Lanes words[LOADS];
    for_numbers<LOADS>([&](auto i) { words[i] = load(ALONG ? a + i * a_row + k : a + k * a_row + i * WIDTH); });
    for_numbers<ALONG ? WIDTH : 1>([&](auto step) {
      Lanes lanes[N];
      for_numbers<N>([&](auto x) { lanes[x] = load(b + (k + step) * b_step + x * WIDTH); });
      for_numbers<ROWS>([&](auto r) {
        for_numbers<N>([&](auto x) {
          constexpr int WORD = ALONG ? step() : r() % WIDTH;
          sum[r][x] =
              Arithmetic::template multiply_add_word<WORD>(words[ALONG ? r() : r() / WIDTH], lanes[x], sum[r][x]);
        });
      });
    });
  }
#else
  const int64_t row = ROLE == Role::scores ? a_row : 1, step = ROLE == Role::scores ? 1 : a_row;
  for (int k = 0; k < steps; k++) {
    Lanes lanes[N];
#pragma GCC unroll 3
    for (int x = 0; x < N; x++) lanes[x] = load(b + k * b_step + x * WIDTH);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Lanes word = all(a[r * row + k * step]);
#pragma GCC unroll 3
      for (int x = 0; x < N; x++) sum[r][x] = Arithmetic::multiply_add(word, lanes[x], sum[r][x]);
#ifdef __clang__
      // Without this Clang 19 loads the next word early, keeps one sum on the stack, and takes up to twice the time.
      if constexpr (REGISTERS == 16)
#pragma GCC unroll 3
        for (int x = 0; x < N; x++) asm volatile("" : "+x"(sum[r][x]) : : "memory");
#endif
    }
  }
#endif
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
    for (int x = 0; x < N; x++) store(c + r * c_row + x * WIDTH, sum[r][x]);
}

// loop(N): as many vectors as the lanes take, VECTORS at most, known to the compiler.
template <int N = VECTORS, class Loop>
void with_vectors(int lanes, Loop loop) {
  if constexpr (N > 1)
    if (lanes <= (N - 1) * WIDTH) return with_vectors<N - 1>(lanes, loop);
  loop(std::integral_constant<int, N>());
}

// body(flag), where the compiler knows the flag.
template <class Body>
inline void with_flag(bool flag, Body body) {
  if (flag)
    body(std::true_type());
  else
    body(std::false_type());
}

// Scores c[rows][LANES] = rows . own, where own is [words][LANES]; `count` is a multiple of ROWS.
template <class Arithmetic>
void multiply(Arithmetic, const Word *rows, int64_t row_words, const Word *own, int words, float *c, int count,
              int lanes = LANES) {
  with_vectors(lanes, [=](auto vectors) {
    for (int r = 0; r < count; r += Arithmetic::ROWS)
      product<Arithmetic, vectors(), false, Role::scores>(rows + r * row_words, row_words, own, LANES, words,
                                                          c + r * LANES, LANES);
  });
}

// Sums c[columns][LANES] += values^T . weights over the rows from `first` on of a chunk, `count` of them, multiples of
// ROWS. weights is [CHUNK / PER_WORD][LANES].
template <class Arithmetic>
void multiply_transposed(Arithmetic, const Word *values, const Word *weights, int first, int count, float *c,
                         int columns, int lanes = LANES) {
  const int step = first / Arithmetic::PER_WORD, steps = count / Arithmetic::PER_WORD;
  with_vectors(lanes, [=](auto vectors) {
    for (int d = 0; d < columns; d += Arithmetic::ROWS)
      product<Arithmetic, vectors(), true, Role::values>(values + step * columns + d, columns, weights + step * LANES,
                                                         LANES, steps, c + d * LANES, LANES);
  });
}

// Sums c[rows][columns] += weights . values, where weights is [rows][steps], its rows `weight_words` words apart, and
// values [steps][columns]: columns in lanes, a multiple of WIDTH.
template <class Arithmetic>
void multiply_rows(Arithmetic, const Word *weights, int64_t weight_words, const Word *values, int steps, float *c,
                   int count, int columns) {
  for (int r = 0; r < count; r += Arithmetic::ROWS)
    for (int d = 0; d < columns; d += LANES)
      with_vectors(columns - d, [=](auto vectors) {
        product<Arithmetic, vectors(), true, Role::scores>(weights + r * weight_words, weight_words, values + d,
                                                           columns, steps, c + r * columns + d, columns);
      });
}

}  // namespace

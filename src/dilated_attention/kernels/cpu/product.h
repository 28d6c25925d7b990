// Micro-kernels: products of small matrices, the only place where floating-point throughput counts.
//
// Every product of the kernels is  c[r][lane] (+)= sum over k of a[r][k] * b[k][lane],  where a is broadcast word by
// word and b and c lie in lanes. A word is one float32, or two bfloat16 whose products are added in one instruction; so
// K, Q, V and dO are read as they lie in memory, row by row, once as a (scores: k runs along a row) and once as its
// transpose (values: k runs over rows). Eight rows by two vectors are sixteen sums, twice what covers the latency of a
// product; AVX2, of half as many registers, has four by three.
#pragma once
#include <type_traits>

#include "vectors.h"

namespace {

enum class Role { scores, values, plain };  // of a row in a product; plain: values as they are

constexpr int VECTORS = REGISTERS == 32 ? 2 : 3, LANES = VECTORS * WIDTH;
constexpr int CHUNK = 64;  // rows that are streamed at once: a multiple of every ROWS

// Products in float32, of elements of any type, which are widened when they are gathered.
struct InFloat32 {
  static constexpr int PER_WORD = 1;
  static constexpr int HALVES = 1;            // words that stand for a number: product_amx.h has two
  static constexpr int ROWS = REGISTERS / 4;  // streamed rows are multiplied in multiples of it
  static constexpr int JOINED = 1;            // groups of keys that a product of dq takes at once
  // Whether streamed values lie [columns][CHUNK / PER_WORD], not [CHUNK / PER_WORD][columns].
  static constexpr bool VALUES_BY_COLUMN = false;
  static Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return ::multiply_add(a, b, c); }
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

template <class Arithmetic, int N, bool ADD>
inline void product(const Word *a, int64_t a_row, int64_t a_step, const Word *b, int64_t b_step, int steps, float *c,
                    int64_t c_row) {
  constexpr int ROWS = Arithmetic::ROWS;
  Lanes sum[ROWS][N];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
    for (int x = 0; x < N; x++) sum[r][x] = ADD ? load(c + r * c_row + x * WIDTH) : zeros();
  for (int k = 0; k < steps; k++) {
    Lanes lanes[N];
#pragma GCC unroll 3
    for (int x = 0; x < N; x++) lanes[x] = load(b + k * b_step + x * WIDTH);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Lanes word = all(a[r * a_row + k * a_step]);
#pragma GCC unroll 3
      for (int x = 0; x < N; x++) sum[r][x] = Arithmetic::multiply_add(word, lanes[x], sum[r][x]);
    }
  }
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

// Scores c[rows][LANES] = rows . own, where own is [words][LANES]; `count` is a multiple of ROWS.
template <class Arithmetic>
void multiply(Arithmetic, const Word *rows, int64_t row_words, const Word *own, int words, float *c, int count,
              int lanes = LANES) {
  with_vectors(lanes, [=](auto vectors) {
    for (int r = 0; r < count; r += Arithmetic::ROWS)
      product<Arithmetic, vectors(), false>(rows + r * row_words, row_words, 1, own, LANES, words, c + r * LANES,
                                            LANES);
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
      product<Arithmetic, vectors(), true>(values + step * columns + d, 1, columns, weights + step * LANES, LANES,
                                           steps, c + d * LANES, LANES);
  });
}

// Sums c[rows][columns] += weights . values, where weights is [rows][steps], rows so many words apart, and values
// [steps][columns]: columns in lanes, a multiple of WIDTH.
template <class Arithmetic>
void multiply_rows(Arithmetic, const Word *weights, int64_t weight_words, const Word *values, int steps, float *c,
                   int count, int columns) {
  for (int r = 0; r < count; r += Arithmetic::ROWS)
    for (int d = 0; d < columns; d += LANES)
      with_vectors(columns - d, [=](auto vectors) {
        product<Arithmetic, vectors(), true>(weights + r * weight_words, weight_words, 1, values + d, columns, steps,
                                             c + r * columns + d, columns);
      });
}

}  // namespace

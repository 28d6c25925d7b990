// Lists of blocks from an indexer's choice: each row's columns, sorted and distinct, by a bitmap per row.
#include <algorithm>

#include "threads.h"

namespace {

constexpr int64_t BITS = 64;

// Rows of `width` numbers each: columns in any order, some of them twice, or -1 for none. The rows of a list are query
// blocks, the columns key blocks.
template <class Number>
struct Choices {
  static constexpr int64_t PIECE = 16;  // rows of a job
  const Number *chosen;
  int64_t lists, rows, width, columns;
  int64_t q_block, k_block, tokens;  // a row may then name no block after its last query; 0: it may name all
  const int64_t *starts;             // where the columns of each row begin in `to`; or null
  int64_t *to;                       // the columns of all rows; without starts how many each row has
  std::atomic<bool> &fits;           // becomes false if a row names a column that it may not

  int64_t count() const { return (lists * rows + PIECE - 1) / PIECE; }
  int64_t words() const { return (columns + BITS - 1) / BITS; }
  int64_t summary() const { return (words() + BITS - 1) / BITS; }
  int64_t floats() const { return (words() + summary()) * int64_t(sizeof(uint64_t) / sizeof(float)); }
  void begin(float *memory) const { std::fill_n(reinterpret_cast<uint64_t *>(memory), words() + summary(), 0); }

  // The columns that a row may name are those before it.
  int64_t end_of(int64_t row) const {
    if (!tokens) return columns;
    const int64_t last_query = std::min((row % rows + 1) * q_block, tokens) - 1;
    return last_query / k_block + 1;
  }

  void operator()(int64_t job, float *memory) const {
    uint64_t *found = reinterpret_cast<uint64_t *>(memory), *some = found + words();  // a bit of `some` per word of `found`
    for (int64_t row = job * PIECE; row < std::min((job + 1) * PIECE, lists * rows) && fits; row++) {
      const Number *first = chosen + row * width, *last = first + width;
      if (starts)
        write(first, last, found, some, to + starts[row]);
      else
        to[row] = count_of(first, last, end_of(row), found);
    }
  }

  int64_t count_of(const Number *first, const Number *last, int64_t end, uint64_t *found) const {
    int64_t count = 0;
    for (const Number *at = first; at != last; at++) {
      if (*at == -1) continue;
      if (*at < 0 || *at >= end) {
        fits = false;
        last = at;  // the words up to here are cleared
        break;
      }
      uint64_t &word = found[*at / BITS];
      const uint64_t bit = uint64_t(1) << *at % BITS;
      count += !(word & bit);
      word |= bit;
    }
    for (const Number *at = first; at != last; at++)
      if (*at != -1) found[*at / BITS] = 0;
    return count;
  }

  // The columns of a row in ascending order.
  void write(const Number *first, const Number *last, uint64_t *found, uint64_t *some, int64_t *to) const {
    for (const Number *at = first; at != last; at++) {
      if (*at == -1) continue;
      const int64_t word = *at / BITS;
      found[word] |= uint64_t(1) << *at % BITS;
      some[word / BITS] |= uint64_t(1) << word % BITS;
    }
    for (int64_t i = 0; i < summary(); i++) {
      for (uint64_t left = some[i]; left; left &= left - 1) {
        const int64_t word = i * BITS + __builtin_ctzll(left);
        for (uint64_t bits = found[word]; bits; bits &= bits - 1) *to++ = word * BITS + __builtin_ctzll(bits);
        found[word] = 0;
      }
      some[i] = 0;
    }
  }
};

template <class Number>
int64_t run(const void *chosen, int64_t lists, int64_t rows, int64_t width, int64_t columns, int64_t q_block,
            int64_t k_block, int64_t tokens, const int64_t *starts, int64_t *to, int64_t threads) {
  std::atomic<bool> fits{true};
  const Choices<Number> work{static_cast<const Number *>(chosen), lists, rows, width, columns, q_block, k_block, tokens,
                             starts, to, fits};
  if (!compute(work, threads)) return 1;
  return fits ? 0 : 2;
}

}  // namespace

// Return 0, or 1 if memory ran out, or 2 if a row names a column that it may not. `bytes`: of a number of `chosen`.
extern "C" int64_t dilated_attention_choices(const void *chosen, int64_t bytes, int64_t lists, int64_t rows,
                                             int64_t width, int64_t columns, int64_t q_block, int64_t k_block,
                                             int64_t tokens, const int64_t *starts, int64_t *to, int64_t threads) {
  return (bytes == 4 ? run<int32_t> : run<int64_t>)(chosen, lists, rows, width, columns, q_block, k_block, tokens,
                                                    starts, to, threads);
}

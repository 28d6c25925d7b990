// Lists of blocks seen from the keys, for the gradients of k and v: a counting sort. Columns are those keys.
#include <algorithm>

#include "threads.h"

namespace {

// A job has some columns of one list; their places, each of which takes what comes next, stay in a core's cache.
struct Transposition {
  static constexpr int64_t PIECE = 1024;
  const int64_t *indptr, *indices;  // (lists, rows + 1); columns, ascending within a row
  const int64_t *starts;            // (lists, columns + 1), or null
  int64_t *to;                      // the rows of each column, ascending; without starts (lists, columns), their number
  int64_t lists, rows, columns;

  int64_t pieces() const { return (columns + PIECE - 1) / PIECE; }
  int64_t count() const { return lists * pieces(); }
  int64_t floats() const { return PIECE * int64_t(sizeof(int64_t) / sizeof(float)); }
  void begin(float *) const {}

  void operator()(int64_t work, float *memory) const {
    const int64_t list = work / pieces(), first = work % pieces() * PIECE, last = std::min(first + PIECE, columns);
    int64_t *next = reinterpret_cast<int64_t *>(memory);
    if (starts)
      std::copy(starts + list * (columns + 1) + first, starts + list * (columns + 1) + last, next);
    else
      std::fill(next, next + PIECE, 0);
    for (int64_t row = 0; row < rows; row++) {
      const int64_t *of_row = indptr + list * (rows + 1) + row, *end = indices + of_row[1];
      for (const int64_t *at = std::lower_bound(indices + of_row[0], end, first); at != end && *at < last; at++) {
        int64_t &place = next[*at - first];
        if (starts) to[place] = row;
        place++;
      }
    }
    if (!starts) std::copy(next, next + (last - first), to + list * columns + first);
  }
};

}  // namespace

// Return 0, or 1 if memory ran out.
extern "C" int64_t dilated_attention_transpose(const int64_t *indptr, const int64_t *indices, const int64_t *starts,
                                               int64_t *to, int64_t lists, int64_t rows, int64_t columns,
                                               int64_t threads) {
  return compute(Transposition{indptr, indices, starts, to, lists, rows, columns}, threads) ? 0 : 1;
}

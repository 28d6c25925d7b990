// What a bias (bias.py) adds to the scores of a tile, made in registers, and the sums of its gradient.
//
// Rows that a tile holds lie in lanes; `other` is the token of a row that the loop streams. A bias is
//   by difference   entry held - other + bias_at of a table for each head, so that lanes of neighbouring tokens are one
//                   load. backends/cpu_bias.py makes a table of all differences, which is as long as q and k together,
//                   and turns it round for tiles of queries.
//   a distance      of coordinates, times a factor for each head
//   by row          entry column_of_key * k + column_of_query * q + first_column of a row that query q brings: of keys
//                   if column_of_query is 0, else of differences, and 0 outside the row
// Entries of the first kind and factors of the second come times log2 e.
#pragma once
#include <algorithm>
#include <cstring>
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include "tiles.h"

namespace {

enum class BiasKind : int64_t { none, by_difference, euclidean, manhattan, chebyshev, by_row };

constexpr int AHEAD = 4;  // rows of a query's entries that are fetched before they are read
constexpr int LINE = 64 / sizeof(float);

inline Lanes load_anywhere(const float *x) { return floats(load_integers(reinterpret_cast<const int32_t *>(x))); }

// *to += x, where other threads may do the same.
template <class Number>
void add_shared(Number *to, Number x) {
  Number before, after;
  __atomic_load(to, &before, __ATOMIC_RELAXED);
  do after = before + x;
  while (!__atomic_compare_exchange(to, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

// What kernels give to `attend` that add no bias.
struct Unbiased {
  static constexpr bool any = false;
  void add(int, const Chunk &, Window, int, float, float *) const {}
};

// While it exists, if `any`, results of this thread below 2^-126 are 0. A bias by distance makes many such weights, and
// x86 takes many times as long to multiply one: 4.7 times for a whole forward (docs/notebook.md, 2026-11-30). Other calls
// keep such numbers, which a cap of 1e38 makes.
class FlushToZero {
 public:
#ifdef __x86_64__
  explicit FlushToZero(bool any) : any(any), before(any ? _mm_getcsr() : 0) {
    if (any) _mm_setcsr(before | _MM_FLUSH_ZERO_ON);
  }
  ~FlushToZero() {
    if (any) _mm_setcsr(before);
  }

 private:
  const bool any;
  const unsigned before;
#else
  explicit FlushToZero(bool) {}
#endif
  FlushToZero(const FlushToZero &) = delete;
};

template <Side HELD>
class Bias {
  const FlushToZero flush;

 public:
  const bool any;

  // The memory of a tile of `own` rows.
  static int64_t floats(const Call &call, int64_t own) {
    if (!call.bias) return 0;
    const bool has_sums = collects(call) && BiasKind(call.bias_kind) == BiasKind::by_difference;
    return call.axes * round_up(own, LANES) + CHUNK * LANES + (has_sums ? call.bias_head : 0) + 4 * WIDTH;
  }

  // `token`: the `count` rows that the tile holds; n: a query head. `parts` gives the memory.
  Bias(const Call &call, int64_t b, int64_t n, const int64_t *token, int count, Parts parts)
      : flush(call.bias), any(call.bias), call(call), kind(BiasKind(call.bias_kind)), token(token), count(count) {
    if (!any) return;
    const int64_t entries = b * call.bias_batch + n * call.bias_head;
    entry = call.bias + entries;
    pairs = parts.take(CHUNK * LANES);
    if (is_distance()) read_coordinates(b, parts);
    if (!collects(call)) return;
    if (kind == BiasKind::by_row)
      row_sums = static_cast<float *>(call.bias_sums) + entries;
    else
      total_sums = static_cast<double *>(call.bias_sums) + entries;
    if (kind == BiasKind::by_difference) {
      sums = parts.take(call.bias_head);
      std::memset(sums, 0, call.bias_head * sizeof(float));
    }
  }

  // s = s * scale + bias * log2 e in the rows of a window.
  void add(int group, const Chunk &chunk, Window w, int lanes, float scale, float *s) const {
    const int first = group * LANES;
    const auto with = [&](auto value) {  // value(j, x, other): the bias of row j and of WIDTH lanes, the first of them x
      for (int j = w.from; j < w.to; j++) {
        const int64_t other = chunk.token[j < chunk.count ? j : 0];
        for (int x = 0; x < lanes; x += WIDTH) {
          float *at = s + j * LANES + x;
          store(at, multiply_add(load(at), all(scale), value(j, x, other)));
        }
      }
    };
    if (kind == BiasKind::by_difference && is_dense(group)) {
      const float *from = entry + token[first] + call.bias_at;
      return with([=](int, int x, int64_t other) { return load_anywhere(from - other + x); });
    }
    if (is_distance()) {
      const Lanes factor = all(*entry);
      return with([=](int, int x, int64_t other) { return distance(first + x, other) * factor; });
    }
    if (is_row_of_keys(group)) {
      const float *from = entry + token[first] + call.first_column;
      const int left = count - first;
      return with([=, &chunk](int j, int x, int64_t other) {
        __builtin_prefetch(from + chunk.token[j + AHEAD < chunk.count ? j + AHEAD : 0] * call.bias_row + x);
        return load(reinterpret_cast<const Float32 *>(from + other * call.bias_row + x), left - x) * all(LOG2E);
      });
    }
    if (is_outside(group, chunk)) return with([](int, int, int64_t) { return zeros(); });
    fill(group, chunk, w);
    const Lanes times = all(kind == BiasKind::by_row ? LOG2E : 1.f);
    with([=](int j, int x, int64_t) { return load(pairs + j * LANES + x) * times; });
  }

  // Room for the gradient of the scores of a group and a chunk, [CHUNK][LANES], which `collect` reads.
  float *gradients() const { return pairs; }

  // Add the gradient of the scores, 0 where nothing is seen, to the sums, if a gradient of the bias is wanted.
  void collect(int group, const Chunk &chunk, Window w) {
    if (!collects(call) || is_outside(group, chunk)) return;
    const int first = group * LANES, lanes = rows_of(group);
    const int stop = w.to < chunk.count ? w.to : chunk.count;
    const auto with = [&](auto body) {  // body(j, ds, other)
      for (int j = w.from; j < stop; j++) body(j, pairs + j * LANES, chunk.token[j]);
    };
    if (is_distance()) {
      Lanes sum = zeros();
      with([&](int, const float *ds, int64_t other) {
        for (int x = 0; x < lanes; x += WIDTH) sum = multiply_add(load(ds + x), distance(first + x, other), sum);
      });
      total += double(sum_of(sum));
    } else if (kind == BiasKind::by_difference && is_dense(group)) {
      with([&](int, const float *ds, int64_t other) {
        float *to = sums + token[first] - other + call.bias_at;
        for (int x = 0; x < lanes; x += WIDTH)
          store(reinterpret_cast<Float32 *>(to + x), load_anywhere(to + x) + load(ds + x), WIDTH);
      });
    } else if (kind == BiasKind::by_difference) {
      with([&](int, const float *ds, int64_t other) {
        for (int x = 0; x < lanes; x++) sums[token[first + x] - other + call.bias_at] += ds[x];
      });
    } else if (is_row_of_keys(group) && !call.bias_shared) {
      float *from = row_sums + token[first] + call.first_column;
      with([&](int j, const float *ds, int64_t other) {
        auto *to = reinterpret_cast<Float32 *>(from + other * call.bias_row);
        __builtin_prefetch(from + chunk.token[j + AHEAD < stop ? j + AHEAD : j] * call.bias_row, 1);
        for (int x = 0; x < lanes; x += WIDTH) store(to + x, load(to + x, lanes - x) + load(ds + x), lanes - x);
      });
    } else {
      with([&](int, const float *ds, int64_t other) {
        for (int x = 0; x < lanes; x++) {
          const int64_t at = place(token[first + x], other);
          if (at < 0) continue;
          if (call.bias_shared)
            add_shared(row_sums + at, ds[x]);
          else
            row_sums[at] += ds[x];
        }
      });
    }
  }

  // Add the sums of the tile to those of the call.
  void finish() {
    if (!any || !collects(call)) return;
    if (is_distance()) add_shared(total_sums, total);
    if (kind != BiasKind::by_difference) return;
    for (int64_t i = 0; i < call.bias_head; i++)
      if (sums[i] != 0) add_shared(total_sums + i, double(sums[i]));
  }

 private:
  const Call &call;
  const BiasKind kind;
  const int64_t *const token;
  const int count;
  const float *entry = nullptr, *others_at = nullptr;
  float *held_at = nullptr;   // coordinates of the rows held, [axes][rows]
  float *pairs = nullptr;     // a number for each pair of a group and a chunk, [CHUNK][LANES]
  float *sums = nullptr;      // of a tile, by difference
  double total = 0;           // of a tile, of a distance
  float *row_sums = nullptr;  // of the call
  double *total_sums = nullptr;

  // Whether a gradient of the bias is wanted of these tiles.
  static bool collects(const Call &call) { return HELD == Side::keys && call.bias_sums; }

  bool is_distance() const {
    return kind == BiasKind::euclidean || kind == BiasKind::manhattan || kind == BiasKind::chebyshev;
  }

  // How many rows a group has.
  int rows_of(int group) const { return int(least(LANES, count - group * LANES)); }

  void read_coordinates(int64_t b, Parts &parts) {
    const float *of_queries = call.query_at + b * call.query_at_batch, *of_keys = call.key_at + b * call.key_at_batch;
    const float *at = HELD == Side::queries ? of_queries : of_keys;
    others_at = HELD == Side::queries ? of_keys : of_queries;
    const int64_t rows = round_up(count, LANES);
    held_at = parts.take(call.axes * rows);
    for (int64_t a = 0; a < call.axes; a++)
      for (int64_t i = 0; i < rows; i++) held_at[a * rows + i] = i < count ? at[token[i] * call.axes + a] : 0;
  }

  // Whether the rows of a group are neighbouring tokens.
  bool is_dense(int group) const {
    const int64_t *held = token + group * LANES;
    const int last = rows_of(group) - 1;
    return held[last] - held[0] == last;
  }

  // Whether the lanes of a group are neighbouring entries of a query's row: keys, by pair.
  bool is_row_of_keys(int group) const {
    return HELD == Side::keys && kind == BiasKind::by_row && call.column_of_query == 0 && is_dense(group);
  }

  // Whether no pair of a group and a chunk has an entry by row.
  bool is_outside(int group, const Chunk &chunk) const {
    if (kind != BiasKind::by_row || call.column_of_query == 0) return false;
    const int64_t *held = token + group * LANES;
    const auto held_ends = std::minmax_element(held, held + rows_of(group));
    const auto ends = std::minmax_element(chunk.token, chunk.token + chunk.count);
    const auto &queries = HELD == Side::queries ? held_ends : ends, &keys = HELD == Side::queries ? ends : held_ends;
    const int64_t first = *queries.first - *keys.second, last = *queries.second - *keys.first;
    return last + call.first_column < 0 || first + call.first_column >= call.columns;
  }

  // Write the bias of a group and the rows of a window to `pairs`, entry by entry.
  void fill(int group, const Chunk &chunk, Window w) const {
    const int first = group * LANES;
    if (HELD == Side::queries && kind == BiasKind::by_row && call.column_of_query == 0)
      return transpose_rows(first, chunk);
    for (int i = 0; i < LANES; i++) {
      float *to = pairs + i;
      const auto with = [&](auto value) {
        for (int j = w.from; j < w.to; j++) to[j * LANES] = value(chunk.token[j < chunk.count ? j : 0]);
      };
      if (first + i >= count) {
        with([](int64_t) { return 0.f; });
        continue;
      }
      const int64_t held = token[first + i];
      if (kind == BiasKind::by_difference) {
        const float *from = entry + held + call.bias_at;
        with([=](int64_t other) { return from[-other]; });
      } else {
        with([=](int64_t other) {
          const int64_t at = place(held, other);
          return at < 0 ? 0.f : entry[at];
        });
      }
    }
  }

  // Do what `fill` does for entries by pair: the rows of queries, which are held, lie along the chunk.
  void transpose_rows(int first, const Chunk &chunk) const {
    for (int x = 0; x < LANES; x += WIDTH) {
      const float *from[WIDTH];
      for (int i = 0; i < WIDTH; i++) {
        const int lane = first + x + i < count ? first + x + i : first;
        from[i] = entry + token[lane] * call.bias_row + call.first_column;
        // The next chunk's entries, but for the line where it meets this chunk, which reads that one.
        prefetch(from[i] + chunk.token[chunk.count - 1] + LINE, CHUNK);
      }
      int j = 0;
      for (; j + WIDTH <= chunk.count; j += WIDTH) {
        const int64_t other = chunk.token[j];
        if (chunk.token[j + WIDTH - 1] - other != WIDTH - 1) break;
        Integers rows[WIDTH];
        for (int i = 0; i < WIDTH; i++) rows[i] = load_integers(reinterpret_cast<const int32_t *>(from[i] + other));
        transpose(rows);
        for (int i = 0; i < WIDTH; i++) store(pairs + (j + i) * LANES + x, rows[i]);
      }
      for (; j < CHUNK; j++)
        for (int i = 0; i < WIDTH; i++)
          pairs[j * LANES + x + i] = j < chunk.count ? from[i][chunk.token[j]] : 0;
    }
  }

  // The entry of a query and a key in what the query brings; -1: none.
  int64_t place(int64_t held, int64_t other) const {
    const int64_t q = HELD == Side::queries ? held : other, k = HELD == Side::queries ? other : held;
    const int64_t column = call.column_of_key * k + call.column_of_query * q + call.first_column;
    return column < 0 || column >= call.columns ? -1 : q * call.bias_row + column;
  }

  Lanes distance(int lane, int64_t other) const {
    const float *at = others_at + other * call.axes;
    Lanes sum = zeros();
    for (int64_t a = 0; a < call.axes; a++) {
      const Lanes apart = load(held_at + a * round_up(count, LANES) + lane) - all(at[a]);
      if (kind == BiasKind::manhattan)
        sum = sum + magnitude(apart);
      else if (kind == BiasKind::chebyshev)
        sum = larger(sum, magnitude(apart));
      else
        sum = multiply_add(apart, apart, sum);
    }
    return kind == BiasKind::euclidean ? square_root(sum) : sum;
  }
};

}  // namespace

// What every kernel does with one group of rows that a tile holds, in lanes, and one chunk of rows that its loop
// streams.
//
// Scores are [streamed rows][LANES]: a tile of queries streams keys, a tile of keys streams queries. So softmax, sums
// and masks go lane by lane, without a sum across lanes. Scores stay as the product gives them or, with a softcap, as
// `cap` leaves them. Their `scale` comes times log2 e, so that p = 2^(s * scale - m), and m, lse are in units of log 2.
#pragma once
#include <cmath>
#include <cstring>

#include "rows.h"

namespace {

constexpr float SLACK =
    8;  // m moves only when a score exceeds it by 2^SLACK: sums lose nothing, acc is seldom rescaled
constexpr float LARGE = 1 << 16;  // above it, scores times the scale are rounded, as m is; below it, p loses nothing

enum class Side { queries, keys };  // which rows the tiles hold

struct Origin {
  int64_t first, stride, rows;  // tokens first + i * stride, less those that are hidden from everybody

  bool operator==(const Origin &x) const { return first == x.first && stride == x.stride && rows == x.rows; }
};

// The rows that a step of the loop visits.
struct Chunk {
  int count;
  bool edged;     // whether bands hide anything from any row of the tile
  bool cut;       // whether masks of bits hide anything
  Origin origin;  // where they come from, if they are rows of one span, from a multiple of CHUNK on
  int64_t place;  // then the number of that multiple among those of all spans of the tile; else -1
  int64_t token[CHUNK];
  int32_t first[CHUNK], last[CHUNK];  // a row sees the tile's rows first <= i <= last, or is seen by them
  const uint8_t *bits[CHUNK];         // if `cut`: of these, those whose bit is set, as in call.h; null: all of them
};

constexpr int AT_ONCE = 57;  // bits that one unaligned read gives at least

inline uint64_t bits_from(const uint8_t *bits, uint32_t first) {
  uint64_t found;
  std::memcpy(&found, bits + first / 8, sizeof found);
  return found >> first % 8;
}

// The rows that a tile holds, in groups of LANES.
struct Held {
  int count;
  const int64_t *token;
  const int32_t *row;  // numbers in the tile, ascending; lanes without a row see nothing and are not seen
  int32_t within;      // the position of row 0 of the tile in its block
  const int32_t *bit;  // if there are masks of bits: of each lane, as number_bits writes them

  int lanes(int group) const {  // in whole vectors
    const int left = count - group * LANES;
    return left < LANES ? int(round_up(left, WIDTH)) : LANES;
  }
  int groups() const { return int(round_up(count, LANES) / LANES); }

  // The last of `width` lanes from `lane` on that has a row; the first of them has one.
  int last(int lane, int width) const { return (lane + width < count ? lane + width : count) - 1; }

  // Whether the rows of a group lie so near one another that bits can be numbered by them: the group's lie in one word,
  // a vector's in the 32 bits from a byte of it on.
  bool is_near(int group) const {
    const int first = group * LANES;
    if (row[last(first, LANES)] - row[first] >= AT_ONCE) return false;
    for (int lane = first; lane < first + LANES && lane < count; lane += WIDTH)
      if (row[last(lane, WIDTH)] - row[lane] > 32 - 8) return false;
    return true;
  }

  // The number of the bit of lane x of a group: its row, counted from the group's first, or x if the rows are not near.
  int place(int group, int x, bool near) const { return near ? row[group * LANES + x] - row[group * LANES] : x; }
};

// The rows of a chunk that some row of a group sees, rounded outwards to multiples of ROWS.
struct Window {
  int from, to;
  bool masked;       // whether `hide` must hide pairs
  bool cut = false;  // whether Sight says which pairs are hidden: then all of them
};

inline Mask seeing(Integers i, const Chunk &chunk, int j) {
  return at_least(i, all(chunk.first[j])) & at_most(i, all(chunk.last[j]));
}

// Write held.bit: the bit of each lane among the 32 that Sight reads for its vector, 0 for lanes without a row.
inline void number_bits(const Held &held, int32_t *bit) {
  for (int group = 0; group < held.groups(); group++) {
    const bool near = held.is_near(group);
    for (int x = 0; x < LANES; x++) {
      const int lane = group * LANES + x, vector = x / WIDTH * WIDTH;
      bit[lane] = 0;
      if (lane >= held.count) continue;
      const int byte = held.place(group, vector, near) / 8;
      bit[lane] = int32_t(1u << (held.place(group, x, near) - 8 * byte));
    }
  }
}

// The lanes from `lane` on whose rows have their bit set, one by one.
inline Mask marked(const Held &held, int lane, const uint8_t *bits) {
  int32_t found[WIDTH];
  for (int i = 0; i < WIDTH; i++)
    found[i] = lane + i < held.count && bits_from(bits, held.within + held.row[lane + i]) & 1;
  return at_least(load_integers(found), all(1));
}

// The lanes from `lane` on that see row j of the chunk, or are seen by it; at least one lane has a row.
inline Mask seeing(const Held &held, int lane, const Chunk &chunk, int j) {
  const Mask seen = seeing(load_integers(held.row + lane), chunk, j) & first_lanes(held.count - lane);
  return chunk.cut && chunk.bits[j] ? seen & marked(held, lane, chunk.bits[j]) : seen;
}

// Which lanes of a group see which rows of a chunk that masks of bits cut: a word of bits for each row.
struct Sight {
  uint64_t words[CHUNK + 1];  // the last is read with the one before
  bool near;                  // held.is_near

  // The same for one vector.
  struct OfVector {
    const unsigned char *at;
    Integers bit;

    Mask operator()(int j) const {
      int32_t word;
      std::memcpy(&word, at + j * sizeof(uint64_t), sizeof word);
      return share_bits(all(word), bit);
    }
  };
  OfVector of(const Held &held, int group, int x) const {
    const int lane = group * LANES + x, byte = lane < held.count ? held.place(group, x, near) / 8 : 0;
    return {reinterpret_cast<const unsigned char *>(words) + byte, load_integers(held.bit + lane)};
  }
};

// Bits `low` to `high` of a word.
inline uint64_t bits_between(int64_t low, int64_t high) {
  low = low < 0 ? 0 : low;
  high = high > 63 ? 63 : high;
  return low > high ? 0 : ~uint64_t(0) << low & ~uint64_t(0) >> (63 - high);
}

// The word of row j of a chunk for a group whose rows lie far apart.
inline uint64_t lane_by_lane(const Held &held, int first, int last, const Chunk &chunk, int j) {
  uint64_t word = 0;
  for (int lane = first; lane <= last; lane++) {
    const int32_t row = held.row[lane];
    const bool marked = !chunk.bits[j] || bits_from(chunk.bits[j], held.within + row) & 1;
    word |= uint64_t(marked && chunk.first[j] <= row && row <= chunk.last[j]) << (lane - first);
  }
  return word;
}

// `window` of a chunk that masks of bits cut. Writes `sight`. Not inlined: most chunks are not cut.
template <int ROWS>
[[gnu::noinline]] Window window_of_bits(const Held &held, int group, const Chunk &chunk, bool masked, Sight &sight) {
  const int first = group * LANES, last = held.last(first, LANES), count = chunk.count;
  const int32_t top = held.row[first], bottom = held.row[last];
  uint64_t *words = sight.words;
  sight.near = held.is_near(group);
  const uint64_t whole = bits_between(0, sight.near ? bottom - top : last - first);
  if (sight.near) {
    for (int j = 0; j < count; j++)
      words[j] = chunk.bits[j] ? bits_from(chunk.bits[j], held.within + top) & whole : whole;
    for (int j = 0; j < count && chunk.edged; j++)
      words[j] &= bits_between(int64_t(chunk.first[j]) - top, int64_t(chunk.last[j]) - top);
  } else {
    for (int j = 0; j < count; j++) words[j] = lane_by_lane(held, first, last, chunk, j);
  }
  for (int j = count; j < round_up(count, ROWS); j++) words[j] = 0;

  uint64_t seen_by_all = whole;
  for (int j = 0; j < count; j++) seen_by_all &= words[j];
  if (seen_by_all == whole) return {0, int(round_up(count, ROWS)), masked};
  int from = 0, to = count;
  while (from < to && !words[from]) from++;
  while (from < to && !words[to - 1]) to--;
  return {from / ROWS * ROWS, from < to ? int(round_up(to, ROWS)) : 0, false, true};
}

template <Side HELD, int ROWS>
inline Window window(const Held &held, int group, const Chunk &chunk, Sight &sight) {
  const int first = group * LANES, last = held.last(first, LANES);
  const int32_t top = held.row[first], bottom = held.row[last];
  bool masked = chunk.count % ROWS != 0 || (HELD == Side::keys && last + 1 - first < LANES);
  if (chunk.cut) return window_of_bits<ROWS>(held, group, chunk, masked, sight);
  if (!chunk.edged) return {0, int(round_up(chunk.count, ROWS)), masked};
  int from = CHUNK, to = 0;
  for (int j = 0; j < chunk.count; j++) {
    masked |= chunk.first[j] > top || chunk.last[j] < bottom;
    if (chunk.first[j] > bottom || chunk.last[j] < top) continue;
    if (from == CHUNK) from = j;
    to = j + 1;
  }
  return {from / ROWS * ROWS, int(round_up(to, ROWS)), masked};
}

// s = -infinity where a row of the group and one of the chunk do not see one another. Most rows of a chunk that an edge
// of a window cuts see a whole group: they are passed over.
inline void hide(const Held &held, int group, const Chunk &chunk, Window w, float *s) {
  const int32_t *row = held.row + group * LANES;
  const int left = held.count - group * LANES;
  for (int j = w.from; j < w.to; j++) {
    if (left >= LANES && j < chunk.count && chunk.first[j] <= row[0] && chunk.last[j] >= row[LANES - 1]) continue;
    for (int x = 0; x < LANES; x += WIDTH) {
      const Mask seen = j < chunk.count ? seeing(load_integers(row + x), chunk, j) & first_lanes(left - x) : first_lanes(0);
      store(s + j * LANES + x, all(-INF), inverse(seen));
    }
  }
}

// The factors of scores. With a softcap c a score is c tanh(product * scale / c): `inner` precedes tanh, `scale`
// follows.
struct Scaling {
  bool capped;
  float scale, inner;

  explicit Scaling(const Scores &scores) : capped(scores.softcap > 0) {
    const double cap = capped ? std::fmin(scores.softcap, 0x1p100) : 1;  // a greater one caps nothing
    scale = float((capped ? cap : scores.scale) * double(LOG2E));
    inner = float(std::fmin(scores.scale / cap, std::numeric_limits<float>::max()));
  }
};

// s = tanh(s * inner) in the rows of a window. Not inlined: the loops around it want all registers.
[[gnu::noinline]] void cap(Window w, int lanes, float inner, float *s) {
  for (int j = w.from; j < w.to; j++)
    for (int x = 0; x < lanes; x += WIDTH) store(s + j * LANES + x, tanh_of(load(s + j * LANES + x) * all(inner)));
}

// The derivative of a capped score, whose hyperbolic tangent is s.
inline Lanes slope(Lanes s) { return all(1.f) - s * s; }

// Words of dropout (backends/dropout.py): two per query, one per key.
struct Words {
  bool any;                  // whether there is dropout
  const int32_t *a, *b, *k;  // of the lanes or of the chunk's rows, whichever are queries and keys
  int32_t threshold;
  float keep_scale;
};

inline Mask survives(Integers a, Integers b, Integers k, int32_t threshold) {
  Integers x = a ^ k;
  x = multiply(x ^ shift_right(x, 16), all(int32_t(0x21F0AAAD)));
  x = x ^ shift_right(x, 15) ^ b;
  x = multiply(x, all(int32_t(0xD35A2D97)));
  x = x ^ shift_right(x, 15);
  return at_least(x, all(threshold));
}

// x * keep_scale in the pairs of chunk row j and the lanes from `lane` on that survive, else 0.
template <Side HELD>
inline Lanes drop(const Words &words, int lane, int j, Lanes x) {
  const auto lanes = [lane](const int32_t *y) { return load_integers(y + lane); };
  const Mask keep = HELD == Side::queries ? survives(lanes(words.a), lanes(words.b), all(words.k[j]), words.threshold)
                                          : survives(all(words.a[j]), all(words.b[j]), lanes(words.k), words.threshold);
  return only(keep, x * all(words.keep_scale));
}

// Turn products into scores, -infinity where rows do not see one another (but in windows that are cut), and return the
// factor that they still need. Not inlined, as `cap` is not.
template <class Bias>
[[gnu::noinline]] float make_scores(const Held &held, int group, const Chunk &chunk, Window w, Scaling scaling,
                                    const Bias &bias, float *s) {
  const int lanes = held.lanes(group);
  if (scaling.capped) cap(w, lanes, scaling.inner, s);
  if (bias.any) bias.add(group, chunk, w, lanes, scaling.scale, s);
  if (w.masked) hide(held, group, chunk, w, s);
  return bias.any ? 1 : scaling.scale;
}

// Where the weights of row j of a chunk lie, an even one, in place of its scores and those of the next row.
template <class Arithmetic>
constexpr int weights_at(int j) {
  return j * Arithmetic::HALVES / Arithmetic::PER_WORD * LANES;
}

// A maximum as what is taken off scores: 0 in lanes that have seen nothing.
inline Lanes zero_at_infinity(Lanes m) { return only(inverse(equal(m, all(-INF))), m); }

// The running softmax of a group: m[LANES], z[LANES], acc[columns][LANES].
struct Running {
  float *m, *z, *acc;
};

// s *= scale in the rows of a window, a vector each. Not inlined: it is seldom called, from a loop that wants all registers.
[[gnu::noinline, gnu::cold]] void scale_scores(Window w, float scale, float *s) {
  for (int j = w.from; j < w.to; j++) store(s + j * LANES, load(s + j * LANES) * all(scale));
}

// One step of the online softmax. v are values of the chunk, s is room for CHUNK rows. CUT is w.cut: weights of hidden
// pairs become 0 in registers, where a pass over the scores takes seven times as long. Not inlined, as attend_dq
// and attend_dkdv are not: what one of their forms needs leaves the loops of the others alone.
template <bool CUT, class Arithmetic, class Bias>
[[gnu::noinline]]
void attend(const Operands<Arithmetic> &shape, const Word *q, const Word *k, const Word *v, Running run, const Held &held,
            int group, const Chunk &chunk, Window w, const Sight &sight, Scaling scaling, const Words &words,
            const Bias &bias, float *s) {
  if (w.from >= w.to) return;
  const int lanes = held.lanes(group);
  multiply(Arithmetic(), k + w.from * shape.stride, shape.stride, q, shape.words, s + w.from * LANES, w.to - w.from,
           lanes);
  const float scale = make_scores(held, group, chunk, w, scaling, bias, s);
  const bool drops = words.any;
  const Lanes c = all(scale);
  for (int x = 0; x < lanes; x += WIDTH) {
    const Sight::OfVector seen = CUT ? sight.of(held, group, x) : Sight::OfVector();
    Lanes top[4] = {all(-INF), all(-INF), all(-INF), all(-INF)};
    for (int j = w.from; j < w.to; j += 4)
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++) {
        const Lanes higher = larger(top[u], load(s + (j + u) * LANES + x));
        top[u] = CUT ? choose(seen(j + u), higher, top[u]) : higher;
      }
    top[0] = larger(larger(top[0], top[1]), larger(top[2], top[3])) * c;
    Lanes factor = c;
    if (any(greater(top[0], all(LARGE))) || any(greater(all(-LARGE), top[0]) & greater(top[0], all(-INF)))) {
      scale_scores(w, scale, s + x);
      factor = all(1.f);
    }
    Lanes m = load(run.m + x), z = load(run.z + x);
    if (any(greater(top[0], m + all(SLACK)))) {
      const Lanes higher = larger(m, top[0]);
      const Lanes decay = power_of_2(m - zero_at_infinity(higher));
      m = higher;
      z = z * decay;
      for (int d = 0; d < shape.columns; d++) {
        float *acc = run.acc + d * LANES + x;
        store(acc, load(acc) * decay);
      }
      store(run.m + x, m);
    }
    const Lanes shift = zero_at_infinity(m);
    Lanes sums[2] = {z, zeros()};
    for (int j = w.from; j < w.to; j += 4) {
      Lanes p[4];
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++) {
        p[u] = Arithmetic::exp2(multiply_subtract(load(s + (j + u) * LANES + x), factor, shift));
        if constexpr (CUT) p[u] = only(seen(j + u), p[u]);
        sums[u % 2] = sums[u % 2] + p[u];
        if (drops) p[u] = drop<Side::queries>(words, group * LANES + x, j + u < chunk.count ? j + u : 0, p[u]);
      }
#pragma GCC unroll 2
      for (int u = 0; u < 4; u += 2) store_weights(Arithmetic(), p[u], p[u + 1], s + weights_at<Arithmetic>(j + u) + x);
    }
    store(run.z + x, sums[0] + sums[1]);
  }
  multiply_transposed(Arithmetic(), v, s, w.from, w.to - w.from, run.acc, shape.columns, lanes);
}

// x, but 0 where s is -infinity, which `hide` has set: whatever infinities and NaN of rows that are not seen made of x.
inline Lanes where_seen(Lanes s, bool masked, Lanes x) { return masked ? only(inverse(equal(s, all(-INF))), x) : x; }

// dq += ds k (short of the scale), where p = exp(s - lse) and ds = p (do v - delta). k_values are the keys as values, s
// and dp room for CHUNK rows.
template <bool CUT, bool CAPPED, class Arithmetic, class Bias>
[[gnu::noinline]]
void attend_dq(const Operands<Arithmetic> &shape, const Word *q, const Word *dout, const Word *k, const Word *v,
               const Word *k_values, const float *lse, const float *delta, float *dq, const Held &held, int group,
               const Chunk &chunk, Window w, const Sight &sight, Scaling scaling, const Words &words, const Bias &bias,
               float *s, float *dp) {
  if (w.from >= w.to) return;
  const int lanes = held.lanes(group);
  multiply(Arithmetic(), k + w.from * shape.stride, shape.stride, q, shape.words, s + w.from * LANES, w.to - w.from,
           lanes);
  multiply(Arithmetic(), v + w.from * shape.stride, shape.stride, dout, shape.words, dp + w.from * LANES, w.to - w.from,
           lanes);
  const float scale = make_scores(held, group, chunk, w, scaling, bias, s);
  const bool masked = w.masked, drops = words.any;
  for (int x = 0; x < lanes; x += WIDTH) {
    const Sight::OfVector seen = CUT ? sight.of(held, group, x) : Sight::OfVector();
    const Lanes shift = load(lse + x), offset = load(delta + x);
    for (int j = w.from; j < w.to; j += 4) {
      Lanes ds[4];
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++) {
        const Lanes score = load(s + (j + u) * LANES + x);
        Lanes y = load(dp + (j + u) * LANES + x);
        if (drops) y = drop<Side::queries>(words, group * LANES + x, j + u < chunk.count ? j + u : 0, y);
        const Lanes p = Arithmetic::exp2(multiply_subtract(score, all(scale), shift));
        y = p * (y - offset);
        if constexpr (CAPPED) y = y * slope(score);
        ds[u] = CUT ? only(seen(j + u), y) : where_seen(score, masked, y);
      }
#pragma GCC unroll 2
      for (int u = 0; u < 4; u += 2)
        store_weights(Arithmetic(), ds[u], ds[u + 1], dp + weights_at<Arithmetic>(j + u) + x);
    }
  }
  multiply_transposed(Arithmetic(), k_values, dp, w.from, w.to - w.from, dq, shape.columns, lanes);
}

// What attend_dkdv reads of the queries of a chunk: operands of scores and of values, and two numbers per query.
struct Queries {
  const Word *q, *dout, *q_values, *dout_values;
  const float *lse, *delta;
};

// What it reads of the keys of a group; dk[columns][LANES] and dv are its sums.
struct Keys {
  const Word *k, *v;
  float *dk, *dv;
};

enum class Formed { plainly, capped, biased };  // how scores are made of products

// dv += p do and dk += ds q (short of the scale). With `rows` also ds, [CHUNK][row_words] with 0 where nothing is seen,
// for a product with keys. s and dp are room for CHUNK rows.
template <bool CUT, Formed FORMED, class Arithmetic, class Bias>
[[gnu::noinline]]
void attend_dkdv(const Operands<Arithmetic> &shape, const Keys &keys, const Queries &queries, const Held &held,
                 int group, const Chunk &chunk, Window w, const Sight &sight, Scaling scaling, const Words &words,
                 Bias &bias, float *s, float *dp, Word *rows, int64_t row_words) {
  constexpr bool CAPPED = FORMED == Formed::capped, BIASED = FORMED == Formed::biased;
  constexpr int WORDS = LANES / Arithmetic::PER_WORD;
  if (rows)
    for (int j = 0; j < round_up(chunk.count, Arithmetic::ROWS); j++)
      if (j < w.from || j >= w.to)
        for (int h = 0; h < Arithmetic::HALVES; h++)
          for (int x = 0; x < WORDS; x += WIDTH)
            store(rows + j * row_words + h * row_words / Arithmetic::HALVES + x, zeros());
  if (w.from >= w.to) return;
  const int count = w.to - w.from, lanes = held.lanes(group);
  multiply(Arithmetic(), queries.q + w.from * shape.stride, shape.stride, keys.k, shape.words, s + w.from * LANES,
           count, lanes);
  multiply(Arithmetic(), queries.dout + w.from * shape.stride, shape.stride, keys.v, shape.words, dp + w.from * LANES,
           count, lanes);
  const float scale = make_scores(held, group, chunk, w, scaling, bias, s);
  const bool masked = w.masked, drops = words.any;
  Sight::OfVector seen[VECTORS];
  for (int x = 0; x < VECTORS && CUT; x++) seen[x] = sight.of(held, group, x * WIDTH);
  const auto visible = [&](int x, int row, Lanes score, Lanes y) {
    return CUT ? only(seen[x](row), y) : where_seen(score, masked, y);
  };
  for (int j = w.from; j < w.to; j += 2) {
    Lanes p[2][VECTORS], ds[2][VECTORS];
#pragma GCC unroll 2
    for (int u = 0; u < 2; u++)
#pragma GCC unroll 3
      for (int x = 0; x < VECTORS; x++) {
        const int lane = x * WIDTH, row = j + u;
        const Lanes score = load(s + row * LANES + lane);
        Lanes y = load(dp + row * LANES + lane);
        const Lanes power = multiply_subtract(score, all(scale), all(queries.lse[row]));
        p[u][x] = visible(x, row, score, Arithmetic::exp2(power));
        if (drops) y = drop<Side::keys>(words, group * LANES + lane, row, y);
        y = p[u][x] * (y - all(queries.delta[row]));
        if constexpr (CAPPED) y = y * slope(score);
        ds[u][x] = visible(x, row, score, y);
        if constexpr (BIASED) store(bias.gradients() + row * LANES + lane, ds[u][x]);
        if (drops) p[u][x] = drop<Side::keys>(words, group * LANES + lane, row, p[u][x]);
      }
#pragma GCC unroll 3
    for (int x = 0; x < VECTORS; x++) {
      const int at = weights_at<Arithmetic>(j) + x * WIDTH;
      store_weights(Arithmetic(), p[0][x], p[1][x], s + at);
      store_weights(Arithmetic(), ds[0][x], ds[1][x], dp + at);
    }
    if (rows) store_weight_rows(Arithmetic(), ds, rows + j * row_words, row_words);
  }
  if constexpr (BIASED) bias.collect(group, chunk, w);
  multiply_transposed(Arithmetic(), queries.dout_values, s, w.from, count, keys.dv, shape.columns, lanes);
  multiply_transposed(Arithmetic(), queries.q_values, dp, w.from, count, keys.dk, shape.columns, lanes);
}

// acc is NaN where an element of v is not finite and seen: gathered values have 0 there.
template <class Element>
inline void spread_infinities(Rows<const Element> v, int64_t D, const Held &held, int group, const Chunk &chunk,
                              float *acc) {
  for (int j = 0; j < chunk.count; j++)
    for (int64_t d = 0; d < D; d++)
      if (any(infinite_or_nan(load(v[chunk.token[j]] + d, 1))))
        for (int x = 0; x < held.lanes(group); x += WIDTH)
          store(acc + d * LANES + x, all(NOT_A_NUMBER), seeing(held, group * LANES + x, chunk, j));
}

}  // namespace

// Estimates of which blocks carry the attention (estimate.h). Each reads its tensors once; scores stay in the cache.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "estimate.h"
#include "threads.h"
#include "tiles.h"

namespace {

template <class Element>
Rows<const Element> rows_at(const void *x, int64_t offset, int64_t step) {
  return {static_cast<const Element *>(x) + offset, step};
}

inline Float32 *unaligned(float *x) { return reinterpret_cast<Float32 *>(x); }
inline const Float32 *unaligned(const float *x) { return reinterpret_cast<const Float32 *>(x); }

// WIDTH rows of `words` words in lanes, lanes[round_up(words, WIDTH)][LANES]; row(u, w) loads row u, words w to w + WIDTH - 1.
template <class Row>
[[gnu::always_inline]] inline void to_lanes(int64_t words, float *lanes, Row row) {
  for (int64_t w = 0; w < words; w += WIDTH) {
    Integers block[WIDTH];
    for (int u = 0; u < WIDTH; u++) block[u] = integers(row(u, w));
    transpose(block);
    for (int u = 0; u < WIDTH; u++) store(lanes + (w + u) * LANES, block[u]);
  }
}

// The means or extremes of one interval, of all heads of a sample: sums, or maxima of x and of -x and where a NaN was.
template <class Element, bool EXTREMES>
struct Reduction {
  static constexpr int64_t KEPT = EXTREMES ? 3 : 1;
  const Estimate &call;

  // Dense heads are one long row.
  int64_t heads() const { return call.ksh == call.D && !EXTREMES ? 1 : call.H; }
  int64_t width() const { return call.H * call.D / heads(); }
  int64_t count() const { return call.B * call.rows; }
  int64_t floats() const { return KEPT * heads() * round_up(width(), WIDTH); }
  void begin(float *) const {}

  void operator()(int64_t work, float *memory) const {
    const int64_t b = work / call.rows, i = work % call.rows, width = this->width(), room = round_up(width, WIDTH);
    const int64_t start = call.starts[i], stop = call.stops[i];
    for (int64_t x = 0; x < KEPT * heads() * room; x += WIDTH)
      store(memory + x, all(EXTREMES && x / room % KEPT < 2 ? -INF : 0.f));
    for (int64_t t = start; t < stop; t++)
      for (int64_t h = 0; h < heads(); h++) {
        const auto K = rows_at<Element>(call.k, b * call.ksb + h * call.ksh, call.ksn);
        const Element *row = K[t];
        prefetch(K[least(t + 8, call.M - 1)], width);
        float *kept = memory + KEPT * h * room;
        for (int64_t d = 0; d < width; d += WIDTH) add(load(row + d, width - d), kept + d, room);
      }
    const Lanes factor = all(EXTREMES || stop <= start ? 1.f : 1.f / float(stop - start));
    for (int64_t h = 0; h < heads(); h++) {
      float *out = call.out + (work * heads() + h) * (EXTREMES ? 2 : 1) * width, *kept = memory + KEPT * h * room;
      for (int64_t d = 0; d < width; d += WIDTH) {
        const Lanes odd = EXTREMES ? load(kept + 2 * room + d) : zeros();
        store(unaligned(out + d), multiply_add(load(kept + d), factor, odd), width - d);
        if (EXTREMES) store(unaligned(out + width + d), odd - load(kept + room + d), width - d);
      }
    }
  }

 private:
  static void add(Lanes x, float *kept, int64_t room) {
    if constexpr (EXTREMES) {
      store(kept, larger(x, load(kept)));
      store(kept + room, larger(zeros() - x, load(kept + room)));
      store(kept + 2 * room, choose(is_nan(x), x, load(kept + 2 * room)));
    } else {
      store(kept, load(kept) + x);
    }
  }
};

// The keys of one block with the largest scores along one direction per head, and the mean of the others.
template <class Element>
struct Peaks {
  const Estimate &call;
  const int64_t columns = round_up(call.D, WIDTH), room = round_up(call.size, WIDTH), heads = call.H * call.G;

  int64_t count() const { return call.B * call.columns; }
  int64_t floats() const { return (call.H + heads) * columns + heads * room + 4 * (call.peaks + 2 * WIDTH); }
  void begin(float *) const {}

  void operator()(int64_t work, float *memory) const {
    const int64_t b = work / call.columns, column = work % call.columns;
    const int64_t first = column * call.size, tokens = std::min(call.size, call.M - first);
    Parts parts(memory);
    float *sum = parts.take(call.H * columns), *along = parts.take(heads * columns), *score = parts.take(heads * room);
    int64_t *best = parts.take<int64_t>(call.peaks + 8), *place = parts.take<int64_t>(call.peaks);
    for (int64_t x = 0; x < call.H * columns; x += WIDTH) store(sum + x, zeros());
    for (int64_t n = 0; n < heads; n++) {
      const Float32 *direction = rows_at<Float32>(call.q, b * call.qsb + n * call.qsh, call.qsn)[column];
      for (int64_t d = 0; d < columns; d += WIDTH) store(along + n * columns + d, load(direction + d, call.D - d));
    }
    const auto keys = [&](int64_t h) {
      return rows_at<Element>(call.k, b * call.ksb + h * call.ksh + first * call.ksn, call.ksn);
    };
    for (int64_t t = 0; t < tokens; t += WIDTH)
      for (int64_t h = 0; h < call.H; h++)
        read(keys(h), t, tokens, sum + h * columns, along + h * call.G * columns, score + h * call.G * room);
    for (int64_t n = 0; n < heads; n++) {
      const int64_t found = select(score + n * room, tokens, best, place), h = n / call.G;
      write(keys(h), tokens, found, sum + h * columns, place,
            call.out + ((work * (call.peaks + 1)) * heads + n) * call.D);
      for (int64_t p = 0; p < call.peaks; p++) {
        call.values[(work * heads + n) * call.peaks + p] = p < found ? score[n * room + place[p]] : -INF;
        call.places[(work * heads + n) * call.peaks + p] = first + (p < found ? place[p] : 0);
      }
    }
  }

 private:
  // Adds WIDTH keys of a head to its sum, and scores them along its directions. The next ones are fetched meanwhile.
  void read(Rows<const Element> K, int64_t t, int64_t tokens, float *sum, const float *along, float *score) const {
    if (tokens - t >= WIDTH)
      read(K, t, std::integral_constant<int, WIDTH>(), tokens, sum, along, score);
    else
      read(K, t, int(tokens - t), tokens, sum, along, score);
  }
  template <class Here>
  void read(Rows<const Element> K, int64_t t, Here here, int64_t tokens, float *sum, const float *along,
            float *score) const {
    for (int u = 0; u < here && t + u + WIDTH < tokens; u++) prefetch(K[t + u + WIDTH], call.D);
    for (int64_t g = 0; g < call.G; g++) {
      Lanes total[WIDTH];
      for (Lanes &x : total) x = zeros();
      for (int64_t d = 0; d < call.D; d += WIDTH) {
        const Lanes direction = load(along + g * columns + d);
        Lanes added = load(sum + d);
#pragma GCC unroll 16
        for (int u = 0; u < here; u++) {
          const Lanes key = load(K[t + u] + d, call.D - d);
          added = added + key;
          total[u] = multiply_add(key, direction, total[u]);
        }
        if (g == 0) store(sum + d, added);
      }
      store(score + g * room + t, sums_of(total));
    }
  }

  // The tokens with the largest scores, descending, of equal ones the first; a NaN counts as infinity. `best` ascends.
  // Its upper halves are scores, as integers of the same order; its lower halves are larger for earlier tokens.
  int64_t select(const float *score, int64_t tokens, int64_t *best, int64_t *place) const {
    const int64_t room = round_up(call.peaks, 8), found = least(tokens, call.peaks);
    std::fill(best, best + call.peaks, INT64_MIN);
    std::fill(best + call.peaks, best + room + 1, INT64_MAX);
    for (int64_t t = 0; t < tokens; t++) {
      const float x = std::isnan(score[t]) ? INF : score[t] + 0.f;  // -0 is 0
      int32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      const int64_t number = int64_t(bits ^ (bits >> 31 & INT32_MAX)) * (int64_t(1) << 32) + (UINT32_MAX - t);
      if (number > best[0])
        for (int64_t p = 0; p < room; p++) best[p] = least(best[p + 1], most(best[p], number));
    }
    for (int64_t p = 0; p < found; p++) place[p] = UINT32_MAX - (best[call.peaks - 1 - p] & UINT32_MAX);
    return found;
  }

  void write(Rows<const Element> K, int64_t tokens, int64_t found, const float *sum, const int64_t *place,
             float *out) const {
    const int64_t step = heads * call.D;
    const Lanes share = all(tokens > found ? 1.f / float(tokens - found) : 0.f);
    for (int64_t d = 0; d < columns; d += WIDTH) {
      Lanes rest = load(sum + d);
      for (int64_t p = 0; p < call.peaks; p++) {
        const Lanes key = p < found ? load(K[place[p]] + d, call.D - d) : zeros();
        store(unaligned(out + p * step + d), key, call.D - d);
        rest = rest - key;
      }
      store(unaligned(out + call.peaks * step + d), tokens > found ? rest * share : zeros(), call.D - d);
    }
  }
};

// Row `number` of queries or of keys, zeros past the end. The row that comes `ahead` rows later is fetched.
template <class Element>
inline void read_row(const Estimate &call, Rows<const Element> x, int64_t number, int64_t tokens, int64_t ahead,
                     float *row) {
  const int64_t left = number < tokens ? call.D : 0, later = number + ahead;
  const Element *from = x[left ? number : 0];
  prefetch(later < tokens ? x[later] : from, call.D);
  for (int64_t d = 0; d < call.D; d += WIDTH)
    store(unaligned(row + d), infinite_or_nan_to_nan(load(from + d, left - d)), call.D - d);
}

// c[count][LANES] = rows . own in `lanes` lanes, a panel of words at a time, whose part of `own` stays in the first cache.
inline void multiply_in_panels(const Word *rows, int64_t row_words, const Word *own, int words, float *c, int count,
                               int lanes) {
  constexpr int PANEL = 128;
  multiply(InFloat32(), rows, row_words, own, int(least(words, PANEL)), c, count, lanes);
  for (int w = PANEL; w < words; w += PANEL)
    for (int r = 0; r < count; r += InFloat32::ROWS)
      product<InFloat32, VECTORS, true, Role::scores>(rows + r * row_words + w, row_words, own + w * LANES, LANES,
                                                      int(least(words - w, PANEL)), c + r * LANES, LANES);
}

// The shares of some rows of one query head. Queries lie in lanes, row after row, part after part; each column keeps its
// own maximum and sum, and what the columns have in common is taken off at the end.
template <class Element>
class Shares {
 public:
  explicit Shares(const Estimate &call)
      : call(call),
        stride(int(round_up(call.D, WIDTH))),
        rows(call.tile ? call.tile : most(1, least(call.rows, round_up(most_queries(), LANES) / call.parts))),
        groups((rows * call.parts + LANES - 1) / LANES),
        wide(round_up((rows * call.parts + groups - 1) / groups, WIDTH)),
        chunk(int(most(ROWS, least(CHUNK, 16384 / stride / ROWS * ROWS)))),
        factor(float(call.scale * double(LOG2E))) {}

  int64_t tiles() const { return (call.rows + rows - 1) / rows; }
  int64_t count() const { return call.B * call.H * call.G * tiles(); }
  int64_t floats() const {
    return groups * LANES * (stride + 2 * call.columns + 2) + (chunk + WIDTH) * stride + CHUNK * LANES + 8 * WIDTH;
  }
  void begin(float *) const {}

  void operator()(int64_t work, float *memory) const {
    const int64_t heads = call.H * call.G, tile = tiles() - 1 - work / (call.B * heads);  // the longest first
    const int64_t b = work / heads % call.B, n = work % heads, first = tile * rows;
    const int64_t here = least(rows, call.rows - first), number = here * call.parts;
    Parts parts(memory);
    Word *own = parts.take(groups * LANES * stride), *room = parts.take((chunk + WIDTH) * stride);
    std::fill(room, room + (chunk + WIDTH) * stride, 0.f);  // ends of rows stay zeros
    float *s = parts.take(CHUNK * LANES);
    float *state = parts.take(groups * 2 * call.columns * LANES);
    float *weight = parts.take(groups * wide);
    int32_t *seen = parts.take<int32_t>(groups * wide);
    const List list{call.listed ? call.listed + ((b * heads + n) * tiles() + tile) * call.columns : nullptr, call};
    for (int64_t i = 0; i < groups * wide; i++) {
      const int64_t at = first * call.parts + i;
      seen[i] = i < number ? list.seen(call.seen[at]) : 0;
      weight[i] = i < number ? call.weight[at] : 0;
    }
    hold(b, n, first * call.parts, number, room, own);
    const int32_t end = *std::max_element(seen, seen + groups * wide);
    const int64_t ahead = call.stagger ? tile % call.stagger * (call.ksn / call.stagger) : 0;
    for (int32_t j = 0; j < end; j += chunk) {
      const int here = int(least(chunk, end - j));
      read_keys(b, n / call.G, ahead, list, j, here, room);
      for (int64_t g = 0; g < groups; g++) {
        const int32_t *its = seen + g * wide;
        const int seen_here = int(least(here, *std::max_element(its, its + wide) - j));
        if (seen_here <= 0) continue;
        const int width = int(least(wide, round_up(number - g * wide, WIDTH)));
        multiply_in_panels(room, stride, own + g * LANES * stride, int(call.D), s, int(round_up(seen_here, ROWS)),
                           width);
        add(list, j, seen_here, s, width, its, state + g * 2 * call.columns * LANES);
      }
    }
    float *out = call.out + ((b * heads + n) * call.rows + first) * call.columns;
    std::fill(out, out + here * call.columns, 0.f);
    for (int64_t g = 0; g * wide < number; g++)
      finish(seen + g * wide, weight + g * wide, g * wide, state + g * 2 * call.columns * LANES, out);
  }

 private:
  static constexpr int64_t NONE = INT64_MAX / 2;  // a token that no sequence has
  static constexpr int ROWS = InFloat32::ROWS;
  const Estimate &call;
  const int stride;
  const int64_t rows, groups, wide;  // groups of lanes, equally wide
  const int chunk;
  const float factor;

  // Queries that are held at once: what a second cache holds, and few enough for every thread to have several tiles.
  int64_t most_queries() const {
    const int64_t all = call.B * call.H * call.G * call.rows * call.parts;
    return least(least(16 * LANES, 98304 / call.D), all / (4 * call.threads));
  }

  // The columns that a tile looks at, those of a list or all; their keys are numbered from the first one on.
  struct List {
    const int64_t *columns;
    const Estimate &call;
    int64_t key(int64_t j) const { return columns ? columns[j / call.peaks] * call.peaks + j % call.peaks : j; }
    int32_t seen(int64_t keys) const {
      if (!columns) return int32_t(least(keys, call.columns * call.peaks));
      return int32_t((std::lower_bound(columns, columns + call.columns, keys / call.peaks) - columns) * call.peaks);
    }
  };

  // Keys j to j + here - 1, `stride` words each, and zeros up to a multiple of ROWS. All but the first of the sequence
  // lie `ahead` elements further on.
  void read_keys(int64_t b, int64_t h, int64_t ahead, const List &list, int32_t j, int here, Word *room) const {
    const int64_t head = b * call.ksb + h * call.ksh;
    const auto K = rows_at<Element>(call.k, head + ahead, call.ksn), K_first = rows_at<Element>(call.k, head, call.ksn);
    for (int r = 0; r < round_up(here, ROWS); r++)
      read_row(call, j + r ? K : K_first, r < here ? list.key(j + r) : NONE, call.M, 8, room + r * stride);
  }

  // Queries in lanes: own[groups][stride][LANES], of which `wide` are used.
  void hold(int64_t b, int64_t n, int64_t first, int64_t number, Word *room, Word *own) const {
    const auto Q = rows_at<Element>(call.q, b * call.qsb + n * call.qsh, call.qsn);
    for (int64_t i = 0; i < groups * wide; i += WIDTH) {
      for (int u = 0; u < WIDTH; u++)
        read_row(call, Q, i + u < number ? first + i + u : NONE, call.N, WIDTH, room + u * stride);
      to_lanes(stride, own + i / wide * stride * LANES + i % wide,
               [&](int u, int64_t w) { return load(room + u * stride + w); });
    }
  }

  // The products of keys j to j + here - 1, which are overwritten, into the maxima and sums of their columns:
  // state[columns][2][LANES].
  void add(const List &list, int32_t j, int here, float *s, int width, const int32_t *seen, float *state) const {
    const bool masked = *std::min_element(seen, seen + width) < j + here;
    for (int x = 0; x < width; x += WIDTH) {
      const Integers limit = load_integers(seen + x);
      const auto score = [&](int i) {
        Lanes y = load(s + i * LANES + x) * all(factor);
        if (call.logarithm) y = y + all(call.logarithm[list.key(j + i)] * LOG2E);
        return masked ? choose(at_least(limit, all(j + i + 1)), y, all(-INF)) : y;
      };
      for (int from = 0; from < here;) {
        const int64_t column = (j + from) / call.peaks;
        const int to = int(least(here, (column + 1) * call.peaks - j));
        float *at = state + column * 2 * LANES + x;
        const bool fresh = column * call.peaks == j + from;
        const Lanes before = fresh ? all(-INF) : load(at);
        Lanes top = before;
        for (int i = from; i < to; i++) {
          const Lanes y = score(i);
          store(s + i * LANES + x, y);
          top = larger(top, y);
        }
        const Lanes shift = zero_at_infinity(top);
        Lanes sum = fresh ? zeros() : load(at + LANES) * power_of_2(before - shift);
        for (int i = from; i < to; i++) sum = sum + power_of_2(load(s + i * LANES + x) - shift);
        store(at, top), store(at + LANES, sum);
        from = to;
      }
    }
  }

  // Adds the lanes' shares, times their weights, to the rows that they are parts of.
  void finish(const int32_t *seen, const float *weight, int64_t group, float *state, float *out) const {
    for (int64_t x = 0; x < wide; x += WIDTH) {
      const int64_t reached = (*std::max_element(seen + x, seen + x + WIDTH) + call.peaks - 1) / call.peaks;
      Lanes top = all(-INF), total = zeros();
      for (int64_t c = 0; c < reached; c++) top = larger(top, load(state + c * 2 * LANES + x));
      const Lanes shift = zero_at_infinity(top);
      for (int64_t c = 0; c < reached; c++) {
        float *at = state + c * 2 * LANES + x;
        const Lanes mass = load(at + LANES) * power_of_2(load(at) - shift);
        store(at, mass);
        total = total + mass;
      }
      const Lanes factor = load(weight + x) / choose(equal(total, zeros()), all(1.f), total);
      for (int64_t c = 0; c < reached; c += WIDTH) {
        Integers block[WIDTH];
        for (int u = 0; u < WIDTH; u++)
          block[u] = c + u < reached ? integers(load(state + (c + u) * 2 * LANES + x) * factor) : all(0);
        transpose(block);
        for (int u = 0; u < WIDTH; u++) {
          const int64_t row = (group + x + u) / call.parts;
          if (seen[x + u] == 0 || row >= rows) continue;
          Float32 *to = unaligned(out + row * call.columns + c);
          store(to, load(to, reached - c) + ::floats(block[u]), reached - c);
        }
      }
    }
  }
};

// The weights by bucket of the tokens of some neighbouring blocks of one head: the bits of a bucket say on which side of
// its planes a token lies. Tokens lie in lanes.
template <class Element>
class Buckets {
 public:
  explicit Buckets(const Estimate &call)
      : call(call),
        planes(int(call.columns * call.size)),
        stride(int(round_up(call.D, WIDTH))),
        together(most(1, CHUNK / call.parts)) {}

  int64_t count() const { return call.B * groups() * call.H; }
  int64_t floats() const { return rows() * (stride + LANES) + stride * LANES; }

  void begin(float *memory) const {
    std::fill(memory, memory + rows() * stride, 0.f);
    for (int64_t d = 0; d < call.D; d++)
      for (int64_t x = 0; x < planes; x++) memory[x * stride + d] = call.planes[d * planes + x];
  }

  void operator()(int64_t work, float *memory) const {
    const int64_t h = work % call.H, b = work / call.H / groups(), first = work / call.H % groups() * together;
    const int64_t blocks = least(together, call.rows - first), tokens = blocks * call.parts;
    float *s = memory + rows() * stride, *own = s + rows() * LANES;
    float *out = call.out + ((b * call.H + h) * call.rows + first) * buckets();
    std::fill(out, out + blocks * buckets(), 0.f);
    for (int64_t t = 0; t < tokens; t += LANES) {
      const int64_t here = least(LANES, tokens - t);
      for (int64_t x = 0; x < here; x += WIDTH) hold(b, h, first * call.parts + t + x, here - x, own + x);
      multiply(InFloat32(), memory, stride, own, int(call.D), s, int(rows()), int(here));
      for (int64_t x = 0; x < here; x += WIDTH) add(b, h, first, t + x, here - x, s + x, own, out);
    }
  }

 private:
  const Estimate &call;
  const int planes, stride;
  const int64_t together;  // blocks

  int64_t groups() const { return (call.rows + together - 1) / together; }
  int64_t buckets() const { return call.columns << call.size; }
  int64_t rows() const { return round_up(planes, InFloat32::ROWS); }

  // Tokens t to t + here - 1, less the centres of their blocks, in WIDTH lanes, and as many of them, of own[stride][LANES].
  void hold(int64_t b, int64_t h, int64_t t, int64_t here, float *own) const {
    const auto K = rows_at<Element>(call.k, b * call.ksb + h * call.ksh, call.ksn);
    const auto centres = rows_at<Float32>(call.q, b * call.qsb + h * call.qsh, call.qsn);
    to_lanes(call.D, own, [&](int u, int64_t d) {
      const int64_t token = t + least(u, here - 1);
      const Lanes centre = load(centres[token / call.parts] + d, call.D - d);
      return infinite_or_nan_to_nan(load(K[token] + d, call.D - d) - centre);
    });
  }

  // The weights of tokens t to t + here - 1 of the work's blocks, WIDTH of them at most, into their buckets.
  void add(int64_t b, int64_t h, int64_t first, int64_t t, int64_t here, const float *s, float *room,
           float *out) const {
    float *to[WIDTH], weight[WIDTH];
    const int64_t count = least(WIDTH, here);
    for (int64_t u = 0; u < count; u++) {
      const int64_t block = (t + u) / call.parts;
      to[u] = out + block * buckets();
      weight[u] = call.weight[((b * call.rows + first + block) * call.H + h) * call.parts + (t + u) % call.parts];
    }
    for (int64_t hash = 0; hash < call.columns; hash++) {
      Integers bucket = all(int32_t(hash << call.size));
      for (int i = 0; i < call.size; i++, s += LANES)
        bucket = ::add(bucket, integers(only(greater(load(s), zeros()), ::floats(all(int32_t(1 << i))))));
      store(room, bucket);
      const int32_t *at = reinterpret_cast<const int32_t *>(room);
      for (int64_t u = 0; u < count; u++) to[u][at[u]] += weight[u];
    }
  }
};

// The shares by collisions of some rows of one head, which lie in lanes.
struct Collisions {
  static constexpr int ROWS = InFloat32::ROWS;
  const Estimate &call;
  const int64_t tiles = (call.rows + LANES - 1) / LANES, wide = round_up(call.H, COLUMNS),
                deep = round_up(call.D, WIDTH);

  int64_t count() const { return call.B * call.M * tiles; }
  int64_t floats() const { return (2 * wide + 2 * deep) * LANES + ROWS * call.D; }
  void begin(float *) const {}

  void operator()(int64_t work, float *memory) const {
    const int64_t heads = call.B * call.M, first = (tiles - 1 - work / heads) * LANES, head = work % heads;
    const int64_t here = least(LANES, call.rows - first), row = head * call.rows + first;
    const int64_t *seen = call.seen + first;
    const int columns = int(*std::max_element(seen, seen + here)), whole = columns / ROWS * ROWS;
    const float *held = static_cast<const float *>(call.k) + head * call.H * call.D;
    float *near = memory, *share = near + wide * LANES, *met = share + wide * LANES, *total = met + deep * LANES;
    float *rest = total + deep * LANES;
    hold(call.values + row * call.H, call.H, here, columns, near);
    hold(call.weight + row * call.D, call.D, here, call.D, met);
    weigh(seen, here, columns, near);
    std::fill(total, rest, 0.f);
    multiply_transposed(InFloat32(), held, near, 0, columns, total, int(call.D), int(here));
    for (float *x = met; x < total; x += WIDTH) store(x, load(x) / (load(x + deep * LANES) + all(float(call.nothing))));
    multiply_in_panels(held, call.D, met, int(call.D), share, whole, int(here));
    if (whole < columns) {
      std::fill(std::copy(held + whole * call.D, held + columns * call.D, rest), rest + ROWS * call.D, 0.f);
      multiply_in_panels(rest, call.D, met, int(call.D), share + whole * LANES, ROWS, int(here));
    }
    finish(held, here, columns, near, share);
    float *out = call.out + row * call.H;
    std::fill(out, out + here * call.H, 0.f);
    from_lanes(share, here, columns, out, call.H);
  }

 private:
  // Logits become weights relative to the largest of a row; 0 behind the columns that it sees.
  static void weigh(const int64_t *seen, int64_t here, int columns, float *near) {
    alignas(64) int32_t limits[LANES] = {};
    std::copy(seen, seen + here, limits);
    for (int64_t x = 0; x < here; x += WIDTH) {
      const Integers limit = load_integers(limits + x);
      Lanes top = all(-INF);
      for (int c = 0; c < columns; c++)
        top = larger(top, choose(at_least(limit, all(c + 1)), load(near + c * LANES + x), all(-INF)));
      const Lanes shift = zero_at_infinity(top);
      for (int c = 0; c < columns; c++) {
        float *at = near + c * LANES + x;
        store(at, only(at_least(limit, all(c + 1)), power_of_2((load(at) - shift) * all(LOG2E))));
      }
    }
  }

  // The shares by collisions, relative to the weights, become the whole ones. Overwrites the weights.
  void finish(const float *held, int64_t here, int columns, float *near, float *share) const {
    const int64_t buckets = int64_t(1) << call.size;
    Lanes total[VECTORS];
    for (Lanes &x : total) x = zeros();
    for (int c = 0; c < columns; c++) {
      Lanes sums = zeros();  // of the first hash
      for (int64_t i = 0; i < buckets; i += WIDTH) sums = sums + load(unaligned(held + c * call.D + i), buckets - i);
      const Lanes in_one = all(sum_of(sums));
      for (int64_t x = 0; x < here; x += WIDTH) {
        float *weight = near + c * LANES + x, *at = share + c * LANES + x;
        const Lanes alone = load(weight) * in_one;
        store(at, load(at) * load(weight)), store(weight, alone);
        total[x / WIDTH] = total[x / WIDTH] + alone;
      }
    }
    for (int64_t x = 0; x < here; x += WIDTH) {
      const Lanes sum = total[x / WIDTH];
      const Lanes factor = all(float(call.scale)) / choose(equal(sum, zeros()), all(1.f), sum);
      for (int c = 0; c < columns; c++) {
        float *at = share + c * LANES + x;
        store(at, multiply_add(load(near + c * LANES + x), factor, load(at)));
      }
    }
  }

  // rows[here][n], `step` apart, as lanes[n][LANES]; zeros in other lanes.
  static void hold(const float *rows, int64_t step, int64_t here, int64_t n, float *lanes) {
    for (int64_t x = 0; x < LANES; x += WIDTH)
      to_lanes(n, lanes + x, [&](int u, int64_t i) {
        return x + u < here ? load(unaligned(rows + (x + u) * step + i), n - i) : zeros();
      });
  }

  static void from_lanes(const float *lanes, int64_t here, int64_t n, float *rows, int64_t step) {
    for (int64_t x = 0; x < here; x += WIDTH)
      for (int64_t i = 0; i < n; i += WIDTH) {
        Integers block[WIDTH];
        for (int64_t u = 0; u < WIDTH; u++) block[u] = integers(load(lanes + (i + u) * LANES + x));
        transpose(block);
        for (int64_t u = 0; u < least(WIDTH, here - x); u++)
          store(unaligned(rows + (x + u) * step + i), ::floats(block[u]), n - i);
      }
  }
};

// Marks the `count` largest of columns in order[limit], of equal ones the first; `room` has room for as many.
inline void keep_largest(float *order, int64_t limit, int64_t count, float *room) {
  if (count >= limit) return std::fill(order, order + limit, INF);
  if (count == 0) return std::fill(order, order + limit, -INF);
  std::copy(order, order + limit, room);
  std::nth_element(room, room + count - 1, room + limit, [](float a, float b) { return a > b; });
  const float least_kept = room[count - 1];
  int64_t equals = count;
  for (int64_t c = 0; c < limit; c++) equals -= order[c] > least_kept;
  for (int64_t c = 0; c < limit; c++) {
    const bool kept = order[c] > least_kept || (order[c] == least_kept && equals-- > 0);
    order[c] = kept ? INF : -INF;
  }
}

// The order in which a row lists its columns, up to where it may list none: how many these are.
constexpr float ALWAYS = 4;  // more than a share
inline int64_t rank_columns(const Estimate &call, int64_t row, const float *share, int64_t count, float *order) {
  const int64_t limit = least(call.D, most(most(call.seen[row], call.stops[row]), count));
  for (int64_t c = 0; c < limit; c++) {
    const float x = std::isnan(share[c]) ? 0.f : share[c];
    order[c] = c >= call.starts[row] && c < call.stops[row] ? x + ALWAYS : c < call.seen[row] ? x : -1.f;
  }
  return limit;
}

struct Largest {
  const Estimate &call;

  int64_t count() const { return call.B * call.M * call.rows; }
  int64_t floats() const { return 2 * round_up(call.D, WIDTH); }
  void begin(float *) const {}

  void operator()(int64_t work, float *order) const {
    const float *share = static_cast<const float *>(call.k) + work * call.D;
    const int64_t limit = rank_columns(call, call.first + work % call.rows, share, call.counts[work], order);
    keep_largest(order, limit, call.counts[work], order + round_up(call.D, WIDTH));
    int64_t *to = call.places + call.offsets[work];
    for (int64_t c = 0; c < limit; c++)
      if (order[c] > 0) *to++ = c;
  }
};

// The rows of one list, in order. `sum` holds by distance the shares of the sampled rows so far, `number` how many rows.
struct Forecasts {
  static constexpr int KINDS = 3;
  const Estimate &call;
  const int64_t room = round_up(call.D, WIDTH);

  int64_t count() const { return call.B * call.M; }
  int64_t floats() const { return 7 * room; }
  void begin(float *) const {}

  void operator()(int64_t work, float *memory) const {
    float *sum = memory, *number = sum + room, *order = number + room, *spare = order + room, *kinds = spare + room;
    const float *seen = static_cast<const float *>(call.k) + work * call.H * call.D;
    float *held = call.values + work * KINDS, *share = call.out + work * call.rows * call.D;
    std::fill(sum, order, 0.f);
    int64_t known = 0;
    for (; known < call.H && call.sampled[known] < call.first; known++)
      add(seen + known * call.D, call.seen[call.sampled[known]], sum, number);
    float *own = kinds, *moved = own + room, *distant = moved + room;
    for (int64_t i = 0; i < call.rows; i++, share += call.D) {
      const int64_t row = call.first + i, may = call.seen[row];
      for (int x = 0; x < KINDS; x++) std::fill(kinds + x * room + may, kinds + x * room + call.D, 0.f);
      std::copy(share, share + may, own);
      if (may > 0) moved[0] = 0, std::copy(own, own + may - 1, moved + 1);
      for (int64_t c = 0; c < may; c++) distant[c] = sum[may - 1 - c] / most_float(number[may - 1 - c], 1.f);
      mix(held, kinds, may, share);
      if (known == call.H || call.sampled[known] != row) continue;
      const float *here = seen + known * call.D;
      const int64_t count = call.counts[work * call.rows + i];
      for (int x = 0; x < KINDS; x++) {
        const int64_t limit = rank_columns(call, row, kinds + x * room, count, order);
        keep_largest(order, limit, count, spare);
        for (int64_t c = 0; c < least(limit, may); c++)
          if (order[c] > 0) held[x] += here[c];
      }
      add(here, may, sum, number);
      known++;
    }
  }

 private:
  static float most_float(float a, float b) { return a < b ? b : a; }

  void add(const float *here, int64_t may, float *sum, float *number) const {
    for (int64_t c = 0; c < may; c++) sum[may - 1 - c] += here[c], number[may - 1 - c] += 1;
  }

  // Shares of the three kinds, each scaled to 1 and times its weight, into `to`; 0 from column `may` on.
  void mix(const float *held, const float *kinds, int64_t may, float *to) const {
    const float top = most_float(most_float(held[0], held[1]), held[2]);
    double weight[KINDS], total = 0;
    for (int x = 0; x < KINDS; x++) total += weight[x] = std::exp(call.scale * (held[x] - top));
    std::fill(to, to + call.D, 0.f);
    for (int x = 0; x < KINDS; x++) {
      double sum = 0;
      for (int64_t c = 0; c < may; c++) sum += kinds[x * room + c];
      const float factor = float(weight[x] / total / (sum < SMALLEST ? SMALLEST : sum));
      for (int64_t c = 0; c < may; c++) to[c] += factor * kinds[x * room + c];
    }
  }
  static constexpr double SMALLEST = 1.17549435e-38;  // of float
};

template <class Element>
bool estimated(Estimator estimator, const Estimate &call) {
  switch (estimator) {
    case Estimator::means:
      return compute(Reduction<Element, false>{call}, call.threads);
    case Estimator::extremes:
      return compute(Reduction<Element, true>{call}, call.threads);
    case Estimator::peaks:
      return compute(Peaks<Element>{call}, call.threads);
    case Estimator::shares:
      return compute(Shares<Element>(call), call.threads);
    case Estimator::buckets:
      return compute(Buckets<Element>(call), call.threads);
    case Estimator::collisions:
      return compute(Collisions{call}, call.threads);
    case Estimator::forecast:
      return compute(Forecasts{call}, call.threads);
    case Estimator::largest:
      return compute(Largest{call}, call.threads);
  }
  return false;
}

inline int estimate(Estimator estimator, int64_t type, const Estimate &call) {
  switch (Type(type)) {
    case Type::float32:
      return estimated<Float32>(estimator, call) ? 0 : 1;
    case Type::bfloat16:
      return estimated<BFloat16>(estimator, call) ? 0 : 1;
    case Type::float16:
      return estimated<Float16>(estimator, call) ? 0 : 1;
  }
  return 2;
}

}  // namespace

// Estimates of which blocks carry the attention (estimate.h). Each reads its tensors once; scores stay in the cache.
#pragma once
#include <algorithm>
#include <cmath>

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

// The means or extremes of one interval, of all heads of a sample.
template <class Element, bool EXTREMES>
struct Reduction {
  const Estimate &call;

  int64_t count() const { return call.B * call.rows; }
  int64_t floats() const { return WIDTH; }
  void begin(float *) const {}

  void operator()(int64_t work, float *) const {
    const int64_t b = work / call.rows, i = work % call.rows, D = call.D;
    const int64_t start = call.starts[i], stop = call.stops[i];
    const bool dense = call.ksh == D && !EXTREMES;  // then the heads are one long row
    const int64_t heads = dense ? 1 : call.H, width = dense ? call.H * D : D, wide = EXTREMES ? 2 * D : width;
    for (int64_t h = 0; h < heads; h++) {
      const auto K = rows_at<Element>(call.k, b * call.ksb + h * call.ksh, call.ksn);
      float *out = call.out + (work * heads + h) * wide;
      for (int64_t d = 0; d < width; d += 4 * WIDTH) reduce(K, start, stop, d, width, out);
    }
  }

 private:
  void reduce(Rows<const Element> K, int64_t start, int64_t stop, int64_t d, int64_t width, float *out) const {
    Lanes sum[4], least[4];
    for (int x = 0; x < 4; x++) sum[x] = all(EXTREMES ? -INF : 0.f), least[x] = all(INF);
    for (int64_t t = start; t < stop; t++) {
      const Element *row = K[t] + d;
#pragma GCC unroll 4
      for (int x = 0; x < 4; x++) {
        if (d + x * WIDTH >= width) break;
        const Lanes y = load(row + x * WIDTH, width - d - x * WIDTH);
        if constexpr (EXTREMES)  // a NaN stays one
          sum[x] = choose(greater(sum[x], y) | is_nan(sum[x]), sum[x], y), least[x] = choose(greater(y, least[x]) | is_nan(least[x]), least[x], y);
        else
          sum[x] = sum[x] + y;
      }
    }
    const Lanes factor = all(EXTREMES || stop <= start ? 1.f : 1.f / float(stop - start));
    for (int x = 0; x < 4 && d + x * WIDTH < width; x++) {
      const int64_t at = d + x * WIDTH;
      store(unaligned(out + at), sum[x] * factor, width - at);
      if (EXTREMES) store(unaligned(out + width + at), least[x], width - at);
    }
  }
};

// The keys of one block with the largest scores along one direction per head, and the mean of the others.
template <class Element>
struct Peaks {
  const Estimate &call;
  const int64_t columns = round_up(call.D, WIDTH), room = round_up(call.size, WIDTH);

  int64_t count() const { return call.B * call.columns; }
  int64_t floats() const { return 2 * columns + room + 3 * (call.peaks + WIDTH) + 4 * WIDTH; }
  void begin(float *) const {}

  void operator()(int64_t work, float *memory) const {
    const int64_t b = work / call.columns, column = work % call.columns, heads = call.H * call.G;
    const int64_t first = column * call.size, tokens = std::min(call.size, call.M - first);
    Parts parts(memory);
    float *sum = parts.take(columns), *along = parts.take(columns), *score = parts.take(room);
    float *best = parts.take(call.peaks);
    int64_t *place = parts.take<int64_t>(call.peaks);
    for (int64_t h = 0; h < call.H; h++) {
      const auto K = rows_at<Element>(call.k, b * call.ksb + h * call.ksh + first * call.ksn, call.ksn);
      for (int64_t d = 0; d < columns; d += WIDTH) {
        Lanes total = zeros();
        for (int64_t t = 0; t < tokens; t++) total = total + load(K[t] + d, call.D - d);
        store(sum + d, total);
      }
      for (int64_t g = 0; g < call.G; g++) {
        const int64_t n = h * call.G + g;
        const auto direction = rows_at<Float32>(call.q, b * call.qsb + n * call.qsh, call.qsn)[column];
        for (int64_t d = 0; d < columns; d += WIDTH) store(along + d, load(direction + d, call.D - d));
        scores(K, tokens, along, score);
        const int64_t found = select(score, tokens, best, place);
        write(K, tokens, found, sum, place, call.out + ((work * (call.peaks + 1)) * heads + n) * call.D);
        for (int64_t p = 0; p < call.peaks; p++) {
          call.values[(work * heads + n) * call.peaks + p] = p < found ? score[place[p]] : -INF;
          call.places[(work * heads + n) * call.peaks + p] = first + (p < found ? place[p] : 0);
        }
      }
    }
  }

 private:
  void scores(Rows<const Element> K, int64_t tokens, const float *along, float *score) const {
    for (int64_t t = 0; t < tokens; t += WIDTH) {
      Lanes total[WIDTH];
      for (int64_t u = 0; u < WIDTH; u++) {
        total[u] = zeros();
        if (t + u >= tokens) continue;
        const Element *row = K[t + u];
        for (int64_t d = 0; d < columns; d += WIDTH)
          total[u] = multiply_add(load(row + d, call.D - d), load(along + d), total[u]);
      }
      store(score + t, sums_of(total));
    }
  }

  // The tokens with the largest scores, descending, of equal ones the first; a NaN counts as infinity.
  int64_t select(const float *score, int64_t tokens, float *best, int64_t *place) const {
    int64_t found = 0;
    for (int64_t t = 0; t < tokens; t++) {
      const float x = std::isnan(score[t]) ? INF : score[t];
      if (found == call.peaks && !(x > best[found - 1])) continue;
      int64_t p = found < call.peaks ? found++ : found - 1;
      for (; p > 0 && x > best[p - 1]; p--) best[p] = best[p - 1], place[p] = place[p - 1];
      best[p] = x, place[p] = t;
    }
    return found;
  }

  void write(Rows<const Element> K, int64_t tokens, int64_t found, const float *sum, const int64_t *place,
             float *out) const {
    const int64_t step = call.H * call.G * call.D;
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

// The shares of some rows of one query head. Queries lie in lanes, row after row, part after part; each column keeps its
// own maximum and sum, and what the columns have in common is taken off at the end.
template <class Element, class Arithmetic>
class Shares {
 public:
  explicit Shares(const Estimate &call)
      : call(call),
        words(int(call.D * call.joined)),
        stride(int(round_up(words, WIDTH))),
        rows(most(1, least(call.rows, most(LANES, least(4 * LANES, 65536 / words)) / call.parts))),
        lanes(round_up(rows * call.parts, LANES)),
        chunk(int(most(Arithmetic::ROWS, least(CHUNK, 16384 / stride / Arithmetic::ROWS * Arithmetic::ROWS)))),
        factor(float(call.scale * double(LOG2E))) {}

  int64_t tiles() const { return (call.rows + rows - 1) / rows; }
  int64_t count() const { return call.B * call.H * call.G * tiles(); }
  int64_t floats() const {
    return lanes * stride + (chunk + WIDTH) * stride + CHUNK * LANES + 2 * call.columns * lanes + 2 * lanes + 8 * WIDTH;
  }
  void begin(float *) const {}

  void operator()(int64_t work, float *memory) const {
    const int64_t heads = call.H * call.G, tile = tiles() - 1 - work / (call.B * heads);  // the longest first
    const int64_t b = work / heads % call.B, n = work % heads, first = tile * rows;
    const int64_t here = least(rows, call.rows - first), number = here * call.parts;
    Parts parts(memory);
    Word *own = parts.take(lanes * stride), *keys = parts.take((chunk + WIDTH) * stride);
    float *s = parts.take(CHUNK * LANES), *state = parts.take(2 * call.columns * lanes), *weight = parts.take(lanes);
    int32_t *seen = parts.take<int32_t>(lanes);
    for (int64_t i = 0; i < lanes; i++) {
      const int64_t at = first * call.parts + i;
      seen[i] = i < number ? int32_t(least(call.seen[at], call.columns * call.peaks)) : 0;
      weight[i] = i < number ? call.weight[at] : 0;
    }
    const auto Q = rows_at<Element>(call.q, b * call.qsb + n * call.qsh, call.qsn);
    const auto K = rows_at<Element>(call.k, b * call.ksb + n / call.G * call.ksh, call.ksn);
    hold(Q, first * call.parts, number, keys, own);
    const int32_t end = *std::max_element(seen, seen + lanes);
    for (int32_t j = 0; j < end; j += chunk) {
      const int here = int(least(chunk, end - j));
      for (int r = 0; r < round_up(here, Arithmetic::ROWS); r++)
        gather<false>(K, r < here ? j + r : INT64_MAX / 2 / call.joined, call.M, keys + r * stride);
      for (int64_t group = 0; group < lanes; group += LANES) {
        if (*std::max_element(seen + group, seen + group + LANES) <= j) continue;
        multiply(Arithmetic(), keys, stride, own + group * stride, words, s, int(round_up(here, Arithmetic::ROWS)));
        add(j, here, s, seen + group, state + 2 * call.columns * group);
      }
    }
    float *out = call.out + ((b * heads + n) * call.rows + first) * call.columns;
    std::fill(out, out + here * call.columns, 0.f);
    for (int64_t group = 0; group < number; group += LANES)
      finish(seen + group, weight + group, group, state + 2 * call.columns * group, out);
  }

 private:
  const Estimate &call;
  const int words, stride;
  const int64_t rows, lanes;
  const int chunk;
  const float factor;

  // One row: `joined` tokens, as they come or turned.
  template <bool TURNED>
  void gather(Rows<const Element> x, int64_t row, int64_t tokens, Word *to) const {
    for (int64_t i = 0; i < call.joined; i++) {
      const int64_t token = row * call.joined + (TURNED ? call.joined - 1 - i : i), left = token < tokens ? call.D : 0;
      const Element *from = x[left ? token : 0];
      for (int64_t d = 0; d < call.D; d += WIDTH)
        store(unaligned(to + i * call.D + d), infinite_or_nan_to_nan(load(from + d, left - d)), call.D - d);
    }
  }

  // Queries in lanes: own[groups][stride][LANES].
  void hold(Rows<const Element> Q, int64_t first, int64_t number, Word *room, Word *own) const {
    for (int w = words; w < stride; w++)
      for (int u = 0; u < WIDTH; u++) room[u * stride + w] = 0;
    for (int64_t i = 0; i < lanes; i += WIDTH) {
      for (int u = 0; u < WIDTH; u++)
        gather<true>(Q, i + u < number ? first + i + u : INT64_MAX / 2 / call.joined, call.N, room + u * stride);
      for (int w = 0; w < stride; w += WIDTH) {
        Integers block[WIDTH];
        for (int u = 0; u < WIDTH; u++) block[u] = integers(load(room + u * stride + w));
        transpose(block);
        Word *to = own + (i / LANES * stride + w) * LANES + i % LANES;
        for (int u = 0; u < WIDTH; u++) store(to + u * LANES, block[u]);
      }
    }
  }

  // The scores of keys j to j + here - 1 into the maxima and sums of their columns: state[columns][2][LANES].
  void add(int32_t j, int here, const float *s, const int32_t *seen, float *state) const {
    const bool masked = *std::min_element(seen, seen + LANES) < j + here;
    for (int x = 0; x < LANES; x += WIDTH) {
      const Integers limit = load_integers(seen + x);
      const auto score = [&](int i) {
        Lanes y = load(s + i * LANES + x) * all(factor);
        if (call.logarithm) y = y + all(call.logarithm[j + i] * LOG2E);
        return masked ? choose(at_least(limit, all(j + i + 1)), y, all(-INF)) : y;
      };
      for (int from = 0; from < here;) {
        const int64_t column = (j + from) / call.peaks;
        const int to = int(least(here, (column + 1) * call.peaks - j));
        float *at = state + column * 2 * LANES + x;
        const bool fresh = column * call.peaks == j + from;
        const Lanes before = fresh ? all(-INF) : load(at);
        Lanes top = before;
        for (int i = from; i < to; i++) top = larger(top, score(i));
        const Lanes shift = zero_at_infinity(top);
        Lanes sum = fresh ? zeros() : load(at + LANES) * power_of_2(before - shift);
        for (int i = from; i < to; i++) sum = sum + power_of_2(score(i) - shift);
        store(at, top), store(at + LANES, sum);
        from = to;
      }
    }
  }

  // Adds the lanes' shares, times their weights, to the rows that they are parts of.
  void finish(const int32_t *seen, const float *weight, int64_t group, float *state, float *out) const {
    for (int x = 0; x < LANES; x += WIDTH) {
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
      return compute(Shares<Element, InFloat32>(call), call.threads);
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

// Tiles of few rows, which lists for single tokens and the queries of decoding make: forward.h and backward.h would
// leave most of their lanes empty and gather rows that are used once. So here lanes run along a row, streamed rows are
// read where they lie, and each row that a tile holds is a problem of its own, in float32.
#pragma once
#include <cmath>
#include <new>

#include "kernels.h"
#include "tiles.h"

namespace {

// Calls work(d, vectors, lanes) for each piece of a row: a piece begins at column d and has `vectors` vectors, each with
// `lanes` numbers in use. Both are constants to the compiler, except in the last piece.
template <class Work>
inline void for_pieces(int64_t D, Work work) {
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, 4> four;
  const std::integral_constant<int, WIDTH> whole;
  int64_t d = 0;
  for (; d + four * whole <= D; d += four * whole) work(d, four, whole);
  for (; d + whole <= D; d += whole) work(d, one, whole);
  if (d < D) work(d, one, D - d);
}

// scores[j] = own . x[token[j]] for a chunk; NaN where that is infinite.
template <class Element>
inline void dots(const float *own, Rows<const Element> x, const int64_t *token, int count, int64_t D, float *scores) {
  constexpr int CHAINS = WIDTH < 8 ? 2 : 1;  // of sums of a row, where WIDTH of them do not cover a product's latency
  for (int j = 0; j < count; j += WIDTH) {
    Lanes sums[WIDTH][CHAINS], sum[WIDTH];
    for (auto &chains : sums)
      for (Lanes &chain : chains) chain = zeros();
    for_pieces(D, [&](int64_t d, auto vectors, auto lanes) {
      Lanes piece[vectors];
      for (int i = 0; i < vectors; i++) piece[i] = load(own + d + i * WIDTH);
#pragma GCC unroll 16
      for (int u = 0; u < WIDTH; u++) {
        const Element *row = x[token[j + u < count ? j + u : j]] + d;
        for (int i = 0; i < vectors; i++) {
          Lanes &chain = sums[u][i % CHAINS];
          chain = multiply_add(load(row + i * WIDTH, lanes), piece[i], chain);
        }
      }
    });
    for (int u = 0; u < WIDTH; u++) {
      sum[u] = sums[u][0];
      for (int i = 1; i < CHAINS; i++) sum[u] = sum[u] + sums[u][i];
    }
    store(scores + j, infinite_or_nan_to_nan(sums_of(sum)));
  }
}

// sums += sum over j of weights[j] * x[token[j]].
template <class Element>
inline void add_rows(const float *weights, Rows<const Element> x, const int64_t *token, int count, int64_t D,
                     float *sums) {
  for_pieces(D, [&](int64_t d, auto vectors, auto lanes) {
    constexpr int CHAINS = 2;  // of sums, for the latency of a product
    Lanes sum[CHAINS][vectors];
    for (int i = 0; i < vectors; i++) sum[0][i] = load(sums + d + i * WIDTH), sum[1][i] = zeros();
    const auto add = [&](int j, int chain) {
      const Element *row = x[token[j]] + d;
      const Lanes weight = all(weights[j]);
      for (int i = 0; i < vectors; i++)
        sum[chain][i] = multiply_add(load(row + i * WIDTH, lanes), weight, sum[chain][i]);
    };
    int j = 0;
    for (; j + 1 < count; j += 2) add(j, 0), add(j + 1, 1);
    if (j < count) add(j, 0);
    for (int i = 0; i < vectors; i++) store(sums + d + i * WIDTH, sum[0][i] + sum[1][i]);
  });
}

template <class Element>
inline void read_row(const Element *x, int64_t D, float *row) {
  for (int64_t d = 0; d < D; d += WIDTH) store(row + d, load(x + d, D - d));
}

template <class Element>
inline void write_row(const float *row, float factor, Element *x, int64_t D, bool add) {
  for (int64_t d = 0; d < D; d += WIDTH) {
    const Lanes y = load(row + d) * all(factor);
    store(x + d, add ? y + load(x + d, D - d) : y, D - d);
  }
}

// The dropout of one row and those that it meets, which lie in lanes.
class Drawn {
 public:
  Drawn(const Call &call, int64_t b, int64_t h, int64_t n, const int64_t *queries, int query_count, const int64_t *keys,
        int key_count)
      : words{call.query_words != nullptr, first, second, word, int32_t(call.threshold), float(call.keep_scale)} {
    if (!words.any) return;
    read_query_words(call, b, n, queries, query_count, first, second);
    read_key_words(call, h, keys, key_count, word);
  }

  template <Side IN_LANES>
  Lanes drop(int lane, Lanes x) const {
    return words.any ? ::drop<IN_LANES>(words, lane, 0, x) : x;
  }

 private:
  int32_t first[CHUNK], second[CHUNK], word[CHUNK];
  const Words words;
};

// Forward, BackwardDq or BackwardDkdv of such tiles. The rows of all tiles of a job are held at once, and take what they
// see of one stretch of the sequence after another, so that what the lists of several rows name is in the cache.
template <class Element, Kernel KERNEL>
class Few {
 public:
  explicit Few(const Call &call)
      : call(call),
        G(call.G),
        heads(call.H * G),
        D(call.D),
        columns(round_up(D, WIDTH)) {}

  int64_t count() const { return call.job_count * call.B; }
  int64_t floats() const {
    constexpr int64_t OF_ROW = (sizeof(Row) + sizeof(Stream<HELD>)) / sizeof(float) + 1;
    return call.own * (G * (3 * columns + 2) + 2 * columns + OF_ROW) + 9 * CHUNK + 16 * WIDTH;
  }
  void begin(float *) const {}

  void operator()(int64_t number, float *memory) const {
    const Work work(call, number, 1);
    const int64_t b = work.b;
    Parts parts(memory);
    const Held held = hold(work.job, b, parts);
    if constexpr (KERNEL == Kernel::forward)
      forward(held, b, parts);
    else if constexpr (KERNEL == Kernel::dq)
      backward_dq(held, b, parts);
    else
      backward_dkdv(held, b, parts);
  }

 private:
  static constexpr Side HELD = KERNEL == Kernel::dkdv ? Side::keys : Side::queries;
  static constexpr int64_t ROOM = 1 << 19, LEAST = CHUNK / 2;  // bytes of a stretch; rows of it that a row sees

  struct Row {
    const Tile *tile;
    int64_t token, head;  // of keys
    int32_t number;       // in the tile
  };
  struct Held {
    int64_t count;
    const Row *rows;
  };

  const Call &call;
  const Inputs<Element> inputs{call};
  const int64_t G, heads, D, columns;
  const Scaling scaling{call.scores};

  void clear(float *row) const {
    for (int64_t d = 0; d < columns; d += WIDTH) store(row + d, zeros());
  }

  // s = tanh(s * inner) for a chunk, and its slopes. Not inlined: it is seldom called.
  [[gnu::noinline]] void cap(int count, float *s, float *slopes) const {
    for (int j = 0; j < count; j += WIDTH) {
      const Lanes tangent = tanh_of(load(s + j) * all(scaling.inner));
      store(s + j, tangent), store(slopes + j, slope(tangent));
    }
  }
  [[gnu::noinline]] static void multiply(int count, const float *slopes, float *ds) {
    for (int j = 0; j < count; j += WIDTH) store(ds + j, load(ds + j) * load(slopes + j));
  }

  void write_gradient(const float *row, float factor, void *to, bool add, int64_t b, int64_t head, int64_t tokens,
                      int64_t all_heads, int64_t token) const {
    with_rows<Element>(to, add, b, head, tokens, all_heads, D,
                       [&](auto rows, bool add) { write_row(row, factor, rows[token], D, add); });
  }

  // The rows of a job's tiles, less keys that are hidden from everybody.
  Held hold(int64_t job, int64_t b, Parts &parts) const {
    Row *rows = parts.take<Row>(call.own);
    int64_t count = 0;
    for (int64_t line = call.jobs[job]; line < call.jobs[job + 1]; line++) {
      const Tile &tile = tile_of(call, line);
      for (int32_t i = 0; i < tile.rows; i++) {
        const int64_t token = tile.start + int64_t(i) * tile.stride;
        if (HELD == Side::queries || !call.hidden || !call.hidden[b * call.M + token])
          rows[count++] = {&tile, token, tile.head, i};
      }
    }
    return {count, rows};
  }

  // work(x, n, tokens, count) for each row x that is held and query head n: rows that it sees or that see it, at most a
  // chunk at a time. Heads that share a list take the same rows one after another. `work` is flattened: for a handful of
  // rows, functions that it calls would cost as much as what they do.
  template <class Work>
  void stream(const Held &held, int64_t b, Parts parts, Work work) const {
    if (held.count == 0) return;
    const int64_t together = !call.indptr || call.LH % G == 0 ? G : 1;
    const int64_t positions = held.rows->tile->spans()->count;
    const int64_t bytes = positions * 2 * D * sizeof(Element) * (HELD == Side::keys ? together : 1);
    auto *streams = parts.take<Stream<HELD>>(held.count);
    int64_t *seen = parts.take<int64_t>(CHUNK);
    Chunk chunk;
    for (int64_t first = 0; first < G; first += together) {
      int64_t listed = 0;
      for (int64_t x = 0; x < held.count; x++) {
        const Row &row = held.rows[x];
        new (streams + x) Stream<HELD>(call, *row.tile, b, row.head * G + first);
        listed += streams[x].blocks();
      }
      const int64_t stretches = least(bytes / ROOM, listed / (LEAST * held.count)) + 1;
      for (int64_t stretch = 1; stretch <= stretches; stretch++)
        for (int64_t x = 0; x < held.count; x++) {
          if (x + 1 < held.count) streams[x + 1].ask();
          if (!within(call, b, held.rows[x].token, 1, 1)) continue;
          while (streams[x].next(chunk, stretch == stretches ? INT64_MAX : positions * stretch / stretches)) {
            const bool some = chunk.edged || chunk.cut;
            const int32_t number = held.rows[x].number, bit = held.rows[x].tile->within + number;
            int count = some ? 0 : chunk.count;
            for (int j = 0; j < chunk.count && some; j++) {
              const uint8_t *const bits = chunk.cut ? chunk.bits[j] : nullptr;
              seen[count] = chunk.token[j];
              count += chunk.first[j] <= number && number <= chunk.last[j] && (!bits || bits_from(bits, bit) & 1);
            }
            for (int64_t g = first; g < first + together && count; g++)
              work(x, held.rows[x].head * G + g, some ? seen : chunk.token, count);
          }
        }
    }
  }

  // out and lse: row x * G + g of q is query head g of row x.
  void forward(const Held &held, int64_t b, Parts parts) const {
    const int64_t rows = held.count * G;
    float *q = parts.take(rows * columns), *acc = parts.take(rows * columns), *m = parts.take(rows);
    float *z = parts.take(rows), *s = parts.take(CHUNK), *slopes = parts.take(CHUNK);
    const auto rise = [=](int64_t i, float to) {  // the maximum of a row
      const float decay = m[i] == -INF ? 0 : std::exp2(m[i] - to);
      m[i] = to, z[i] *= decay;
      for (int64_t d = i * columns; d < (i + 1) * columns; d += WIDTH) store(acc + d, load(acc + d) * all(decay));
    };
    for (int64_t i = 0; i < rows; i++) {
      const Row &row = held.rows[i / G];
      const int64_t n = row.head * G + i % G;
      read_row(inputs.q(b, n)[row.token], D, q + i * columns);
      m[i] = -INF, z[i] = 0;
      if (row.tile->first) {
        clear(acc + i * columns);
      } else {  // what an earlier launch left
        m[i] = call.lse[(b * call.N + row.token) * heads + n] * LOG2E, z[i] = m[i] != -INF;
        read_row(head_of<Element>(call.out, b, n, call.N, heads, D)[row.token], D, acc + i * columns);
      }
      if (row.tile->phantoms == 0) continue;  // keys of score and value 0
      if (m[i] < 0) rise(i, 0);
      z[i] += float(row.tile->phantoms) * std::exp2(-m[i]);
    }

    stream(held, b, parts, [&](int64_t x, int64_t n, const int64_t *token, int count) __attribute__((flatten)) {
      const int64_t h = held.rows[x].head, i = x * G + n - h * G;
      dots(q + i * columns, inputs.k(b, h), token, count, D, s);
      if (scaling.capped) cap(count, s, slopes);
      Lanes top = all(-INF), sum = zeros();
      for (int j = 0; j < count; j += WIDTH) {
        const Lanes y = choose(first_lanes(count - j), load(s + j) * all(scaling.scale), all(-INF));
        store(s + j, y);
        top = larger(top, y);
      }
      if (const float to = largest_of(top); to > m[i] + SLACK) rise(i, to);
      const Lanes shift = all(m[i] == -INF ? 0 : m[i]);
      const Drawn drawn(call, b, h, n, &held.rows[x].token, 1, token, count);
      for (int j = 0; j < count; j += WIDTH) {
        const Lanes p = power_of_2(load(s + j) - shift);
        sum = sum + p;
        store(s + j, drawn.template drop<Side::keys>(j, p));
      }
      z[i] += sum_of(sum);
      add_rows(s, inputs.v(b, h), token, count, D, acc + i * columns);
    });

    for (int64_t i = 0; i < rows; i++) {
      const Row &row = held.rows[i / G];
      const int64_t n = row.head * G + i % G;
      float *sums = acc + i * columns;  // what is infinite is NaN, as in Forward
      for (int64_t d = 0; d < columns; d += WIDTH) store(sums + d, infinite_or_nan_to_nan(load(sums + d)));
      call.lse[(b * call.N + row.token) * heads + n] = z[i] == 0 ? -INF : m[i] * LN2 + std::log(z[i]);
      const float factor = z[i] == 0 ? 0 : 1 / z[i];
      write_row(sums, factor, head_of<Element>(call.out, b, n, call.N, heads, D)[row.token], D, false);
    }
  }

  void backward_dq(const Held &held, int64_t b, Parts parts) const {
    const int64_t rows = held.count * G;
    float *q = parts.take(rows * columns), *dout = parts.take(rows * columns), *dq = parts.take(rows * columns);
    float *lse = parts.take(rows), *delta = parts.take(rows), *s = parts.take(CHUNK), *dp = parts.take(CHUNK);
    float *slopes = parts.take(CHUNK);
    for (int64_t i = 0; i < rows; i++) {
      const Row &row = held.rows[i / G];
      const int64_t n = row.head * G + i % G;
      read_row(inputs.q(b, n)[row.token], D, q + i * columns);
      read_row(inputs.dout(b, n)[row.token], D, dout + i * columns);
      clear(dq + i * columns);
      const float *stats = inputs.stats(b, n)[row.token];
      lse[i] = stats[0], delta[i] = stats[1];
    }

    stream(held, b, parts, [&](int64_t x, int64_t n, const int64_t *token, int count) __attribute__((flatten)) {
      const int64_t h = held.rows[x].head, i = x * G + n - h * G;
      dots(q + i * columns, inputs.k(b, h), token, count, D, s);
      if (scaling.capped) cap(count, s, slopes);
      dots(dout + i * columns, inputs.v(b, h), token, count, D, dp);
      const Drawn drawn(call, b, h, n, &held.rows[x].token, 1, token, count);
      for (int j = 0; j < count; j += WIDTH) {
        const Lanes p = power_of_2(multiply_subtract(load(s + j), all(scaling.scale), all(lse[i])));
        const Lanes dropped = drawn.template drop<Side::keys>(j, load(dp + j));
        store(s + j, p * (dropped - all(delta[i])));
      }
      if (scaling.capped) multiply(count, slopes, s);
      add_rows(s, inputs.k(b, h), token, count, D, dq + i * columns);
    });

    for (int64_t i = 0; i < rows; i++) {
      const Row &row = held.rows[i / G];
      write_gradient(dq + i * columns, float(call.scores.scale), call.dq, call.add_dq, b, row.head * G + i % G, call.N, heads,
                     row.token);
    }
  }

  void backward_dkdv(const Held &held, int64_t b, Parts parts) const {
    const int64_t rows = held.count;
    float *k = parts.take(rows * columns), *v = parts.take(rows * columns);
    float *dk = parts.take(rows * columns), *dv = parts.take(rows * columns);
    float *s = parts.take(CHUNK), *dp = parts.take(CHUNK), *lse = parts.take(CHUNK), *delta = parts.take(CHUNK);
    float *slopes = parts.take(CHUNK);
    for (int64_t x = 0; x < rows; x++) {
      const Row &row = held.rows[x];
      read_row(inputs.k(b, row.head)[row.token], D, k + x * columns);
      read_row(inputs.v(b, row.head)[row.token], D, v + x * columns);
      clear(dk + x * columns), clear(dv + x * columns);
    }

    stream(held, b, parts, [&](int64_t x, int64_t n, const int64_t *token, int count) __attribute__((flatten)) {
      const auto Q = inputs.q(b, n), dO = inputs.dout(b, n);
      dots(k + x * columns, Q, token, count, D, s);
      if (scaling.capped) cap(count, s, slopes);
      dots(v + x * columns, dO, token, count, D, dp);
      read_stats(inputs.stats(b, n), token, count, round_up(count, WIDTH), lse, delta);
      const Drawn drawn(call, b, held.rows[x].head, n, token, count, &held.rows[x].token, 1);
      for (int j = 0; j < count; j += WIDTH) {
        const Lanes p = power_of_2(multiply_subtract(load(s + j), all(scaling.scale), load(lse + j)));
        const Lanes dropped = drawn.template drop<Side::queries>(j, load(dp + j));
        store(dp + j, p * (dropped - load(delta + j)));
        store(s + j, drawn.template drop<Side::queries>(j, p));
      }
      if (scaling.capped) multiply(count, slopes, dp);
      add_rows(s, dO, token, count, D, dv + x * columns);
      add_rows(dp, Q, token, count, D, dk + x * columns);
    });

    for (int64_t x = 0; x < rows; x++) {
      const Row &row = held.rows[x];
      write_gradient(dk + x * columns, float(call.scores.scale), call.dk, call.add_dkdv, b, row.head, call.M, call.H,
                     row.token);
      write_gradient(dv + x * columns, 1, call.dv, call.add_dkdv, b, row.head, call.M, call.H, row.token);
    }
  }
};

}  // namespace

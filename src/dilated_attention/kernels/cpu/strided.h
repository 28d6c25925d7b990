// The kernels: one flat loop over the rows of all spans or blocks that a tile sees, one softmax. See call.h for the
// table and kernels/strided.py for the same kernels on a GPU.
#pragma once
#include <cmath>

#include "online.h"

namespace {

constexpr int TILE_FIELDS = 8, SPAN_FIELDS = 4;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

struct Span {
  int32_t start, stride, count, diagonal;
};

struct Tile {
  int32_t head, start, stride, rows, first, phantoms, list, unused;

  const Span *spans() const { return reinterpret_cast<const Span *>(this + 1); }
};
static_assert(sizeof(Tile) == 4 * TILE_FIELDS && sizeof(Span) == 4 * SPAN_FIELDS);

inline const Tile &tile_of(const Call &call, int64_t line) {
  return *reinterpret_cast<const Tile *>(call.lines + line * (TILE_FIELDS + call.spans * SPAN_FIELDS));
}

// The rows of a tile, in chunks: span after span, or block after block of a list.
template <Side HELD>
class Stream {
 public:
  Stream(const Call &call, const Tile &tile, int64_t b, int64_t n)
      : tile(tile), listed(call.indptr), size(call.size), indices(call.indices), end_of_runs(call.spans) {
    if (HELD == Side::queries && call.hidden) hidden = call.hidden + b * call.M;
    if (!listed) return;
    const int64_t *list = call.indptr + b * call.lsb + n / call.LH * call.lsh + tile.list;
    next_to_come = list[0], end_of_runs = list[1];
  }

  // Fills the chunk as far as there are rows; false if there are none.
  bool next(Chunk &chunk) {
    chunk.count = 0, chunk.edged = false;
    while (chunk.count < CHUNK && (at < end || next_run())) {
      const int64_t take = least(end - at, CHUNK - chunk.count);
      if (take > 0)
        chunk.edged |=
            HELD == Side::queries ? at + take - 1 > run.diagonal : at < int64_t(run.diagonal) + tile.rows - 1;
      for (int64_t j = at; j < at + take; j++) {
        const int64_t token = run.start + j * run.stride;
        chunk.token[chunk.count] = token;
        chunk.edge[chunk.count] = int32_t(j - run.diagonal);
        chunk.count += !(hidden && hidden[token]);
      }
      at += take;
    }
    return chunk.count > 0;
  }

 private:
  const Tile &tile;
  const bool listed;
  const int64_t size, *const indices;
  int64_t next_to_come = 0, end_of_runs;  // spans, or places in the list of blocks
  const uint8_t *hidden = nullptr;
  Span run{};               // the span of
  int64_t at = 0, end = 0;  // these positions, which come next

  bool next_run() {
    if (next_to_come == end_of_runs) return false;
    const int64_t which = next_to_come++;
    run = tile.spans()[listed ? 0 : which];
    at = listed ? indices[which] * size : 0;
    end = listed && at + size < run.count ? at + size : run.count;
    // What the diagonal hides from the whole tile is not visited.
    if (HELD == Side::queries)
      end = least(end, int64_t(run.diagonal) + tile.rows);
    else
      at = most(at, run.diagonal);
    return true;
  }
};

// Parts of a thread's memory, one after another.
class Parts {
 public:
  explicit Parts(float *at) : at(at) {}
  template <class T = float>
  T *take(int64_t count) {
    T *part = reinterpret_cast<T *>(at);
    at += round_up(count * int64_t(sizeof(T)) / int64_t(sizeof(float)), WIDTH);
    return part;
  }
  float *at;
};

template <class Element>
Rows<const Element> head_of(const void *x, int64_t b, int64_t sb, int64_t h, int64_t sh, int64_t sn) {
  return {static_cast<const Element *>(x) + b * sb + h * sh, sn};
}

template <class Element>
Rows<Element> head_of(void *x, int64_t b, int64_t h, int64_t tokens, int64_t heads, int64_t D) {
  return {static_cast<Element *>(x) + (b * tokens * heads + h) * D, heads * D};
}

// The words of dropout of some tokens: two of a query, one of a key.
inline void read_query_words(const Call &call, int64_t b, int64_t n, const int64_t *token, int count, int32_t *first,
                             int32_t *second) {
  const int64_t heads = call.H * call.G;
  for (int i = 0; i < count; i++) {
    const int32_t *words = call.query_words + 2 * ((b * call.N + token[i]) * heads + n);
    first[i] = words[0], second[i] = words[1];
  }
}

inline void read_key_words(const Call &call, int64_t h, const int64_t *token, int count, int32_t *word) {
  for (int i = 0; i < count; i++) word[i] = call.key_words[token[i] * call.kwn + h * call.kwh];
}

// out and lse of the tiles.
template <class Element, class Arithmetic>
class Forward {
 public:
  explicit Forward(const Call &call) : call(call), shape(call.D), own(round_up(call.own, LANES)) {}

  int64_t count() const { return call.job_count * call.B * call.G; }
  int64_t floats() const {
    return own * (shape.stride + shape.columns + 8) + CHUNK * (shape.stride + shape.columns + LANES + 2) + 16 * WIDTH;
  }

  void operator()(int64_t work, float *memory) const {
    const int64_t job = work / call.G / call.B, b = work / call.G % call.B;
    for (int64_t line = call.jobs[job]; line < call.jobs[job + 1]; line++)
      compute(tile_of(call, line), b, work % call.G, memory);
  }

 private:
  const Call &call;
  const Operands<Arithmetic> shape;
  const int64_t own;

  void compute(const Tile &tile, int64_t b, int64_t g, float *memory) const {
    Parts parts(memory);
    const int64_t h = tile.head, n = h * call.G + g, heads = call.H * call.G;
    int64_t *token = parts.take<int64_t>(own);
    int32_t *row = parts.take<int32_t>(own), *a = parts.take<int32_t>(own), *w = parts.take<int32_t>(own);
    for (int i = 0; i < own; i++) token[i] = tile.start + int64_t(i) * tile.stride, row[i] = i;
    const Held held{tile.rows, token, row};
    float *q = parts.take(own * shape.stride), *m = parts.take(own), *z = parts.take(own);
    float *acc = parts.take(own * shape.columns);
    float *k = parts.take(CHUNK * shape.stride), *v = parts.take(CHUNK * shape.columns);
    float *s = parts.take(CHUNK * LANES);
    int32_t *x = parts.take<int32_t>(CHUNK);

    const auto K = head_of<Element>(call.k, b, call.ksb, h, call.ksh, call.ksn);
    const auto V = head_of<Element>(call.v, b, call.vsb, h, call.vsh, call.vsn);
    shape.gather_lanes(head_of<Element>(call.q, b, call.qsb, n, call.qsh, call.qsn), token, tile.rows, q);
    const auto out = head_of<Element>(call.out, b, n, call.N, heads, call.D);
    const Rows<float> lse{call.lse + b * call.N * heads + n, heads};
    begin(tile, out, lse, token, m, z, acc);
    const Words words{call.query_words != nullptr, a, w, x, int32_t(call.threshold), float(call.keep_scale)};
    if (words.any) read_query_words(call, b, n, token, tile.rows, a, w);

    Chunk chunk;
    for (Stream<Side::queries> stream(call, tile, b, n); stream.next(chunk);) {
      shape.gather(K, chunk.token, chunk.count, k);
      const bool finite = shape.gather_values(V, chunk.token, chunk.count, v);
      if (words.any) read_key_words(call, h, chunk.token, chunk.count, x);
      for (int group = 0; group < held.groups(); group++) {
        const int64_t at = group * LANES;
        attend(shape, q + at * shape.stride, k, v, {m + at, z + at, acc + at * shape.columns}, held, group, chunk,
               float(call.scale * double(LOG2E)), words, s);
        if (!finite) spread_infinities<Element>(V, call.D, held, group, chunk, acc + at * shape.columns);
      }
    }

    // finish: out = acc / z, lse = m + log z; rows that saw nothing get 0 and -infinity, a NaN stays one.
    for (int i = 0; i < tile.rows; i++) {
      *lse[token[i]] = z[i] == 0 ? -INF : m[i] * LN2 + std::log(z[i]);
      z[i] = z[i] == 0 ? 0 : 1 / z[i];
    }
    shape.write_sums(acc, z, out, token, tile.rows, false);
  }

  // What an earlier launch left, or nothing; then the phantoms, keys of score and value 0.
  void begin(const Tile &tile, Rows<Element> out, Rows<float> lse, const int64_t *token, float *m, float *z,
             float *acc) const {
    const int64_t sums = round_up(tile.rows, LANES) * shape.columns;
    if (tile.first)
      for (int64_t i = 0; i < sums; i += WIDTH) _mm512_store_ps(acc + i, all(0.f));
    else
      shape.read_sums(out, token, tile.rows, acc);
    for (int i = 0; i < round_up(tile.rows, LANES); i++) {
      m[i] = tile.first || i >= tile.rows ? -INF : *lse[token[i]] * LOG2E;
      z[i] = m[i] != -INF;
    }
    if (tile.phantoms == 0) return;
    for (int i = 0; i < round_up(tile.rows, LANES); i += WIDTH) {
      const Lanes before = _mm512_load_ps(m + i), top = _mm512_max_ps(all(0.f), before);
      const Lanes decay = exp2(_mm512_sub_ps(before, top));
      const Lanes zeros = _mm512_mul_ps(all(float(tile.phantoms)), exp2(_mm512_sub_ps(all(0.f), top)));
      _mm512_store_ps(m + i, top);
      _mm512_store_ps(z + i, _mm512_fmadd_ps(_mm512_load_ps(z + i), decay, zeros));
      for (int d = 0; d < shape.columns; d++) {
        float *at = acc + (i / LANES * shape.columns + d) * LANES + i % LANES;
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), decay));
      }
    }
  }
};

// stats: lse in units of log 2, infinity in rows that saw nothing, whose p is 0; delta = rowsum(dout * out) - dlse.
template <class Element>
class Stats {
 public:
  explicit Stats(const Call &call) : call(call) {}

  int64_t count() const { return call.B * ((call.N + CHUNK - 1) / CHUNK); }
  int64_t floats() const { return WIDTH; }

  void operator()(int64_t work, float *) const {
    const int64_t b = work % call.B, first = work / call.B * CHUNK, heads = call.H * call.G;
    for (int64_t token = first; token < first + CHUNK && token < call.N; token++)
      for (int64_t n = 0; n < heads; n++) {
        const int64_t at = (b * call.N + token) * heads + n;
        const Element *out = static_cast<const Element *>(call.out) + at * call.D;
        const Element *dout = static_cast<const Element *>(call.dout) + b * call.dsb + token * call.dsn + n * call.dsh;
        Lanes sum = all(0.f);
        for (int64_t d = 0; d < call.D; d += WIDTH)
          sum = _mm512_fmadd_ps(load(out + d, call.D - d), load(dout + d, call.D - d), sum);
        const bool some = call.lse[at] != -INF;
        call.stats[2 * at] = some ? call.lse[at] * LOG2E : INF;
        call.stats[2 * at + 1] = some ? _mm512_reduce_add_ps(sum) - (call.dlse ? call.dlse[at] : 0) : 0;
      }
  }

 private:
  const Call &call;
};

// lse and delta of so many tokens; zeros up to a multiple of ROWS.
inline void read_stats(const Call &call, int64_t b, int64_t n, const int64_t *token, int count, float *lse,
                       float *delta) {
  const int64_t heads = call.H * call.G;
  for (int i = count; i < round_up(count, ROWS); i++) lse[i] = delta[i] = 0;
  for (int i = 0; i < count; i++) {
    const float *stats = call.stats + 2 * ((b * call.N + token[i]) * heads + n);
    lse[i] = stats[0], delta[i] = stats[1];
  }
}

// dq of the tiles, those of Forward.
template <class Element, class Arithmetic>
class BackwardDq {
 public:
  explicit BackwardDq(const Call &call) : call(call), shape(call.D), own(round_up(call.own, LANES)) {}

  int64_t count() const { return call.job_count * call.B * call.G; }
  int64_t floats() const {
    return own * (2 * shape.stride + shape.columns + 8) + CHUNK * (2 * shape.stride + shape.columns + 2 * LANES + 2) +
           16 * WIDTH;
  }

  void operator()(int64_t work, float *memory) const {
    const int64_t job = work / call.G / call.B, b = work / call.G % call.B;
    for (int64_t line = call.jobs[job]; line < call.jobs[job + 1]; line++)
      compute(tile_of(call, line), b, work % call.G, memory);
  }

 private:
  const Call &call;
  const Operands<Arithmetic> shape;
  const int64_t own;

  void compute(const Tile &tile, int64_t b, int64_t g, float *memory) const {
    Parts parts(memory);
    const int64_t h = tile.head, n = h * call.G + g, heads = call.H * call.G;
    int64_t *token = parts.take<int64_t>(own);
    int32_t *row = parts.take<int32_t>(own), *first = parts.take<int32_t>(own), *second = parts.take<int32_t>(own);
    for (int i = 0; i < own; i++) token[i] = tile.start + int64_t(i) * tile.stride, row[i] = i;
    const Held held{tile.rows, token, row};
    float *q = parts.take(own * shape.stride), *dout = parts.take(own * shape.stride);
    float *dq = parts.take(own * shape.columns), *lse = parts.take(own), *delta = parts.take(own);
    float *k = parts.take(CHUNK * shape.stride), *v = parts.take(CHUNK * shape.stride);
    float *k_values = parts.take(CHUNK * shape.columns), *s = parts.take(CHUNK * LANES),
          *dp = parts.take(CHUNK * LANES);
    int32_t *word = parts.take<int32_t>(CHUNK);

    const auto K = head_of<Element>(call.k, b, call.ksb, h, call.ksh, call.ksn);
    const auto V = head_of<Element>(call.v, b, call.vsb, h, call.vsh, call.vsn);
    shape.gather_lanes(head_of<Element>(call.q, b, call.qsb, n, call.qsh, call.qsn), token, tile.rows, q);
    shape.gather_lanes(head_of<Element>(call.dout, b, call.dsb, n, call.dsh, call.dsn), token, tile.rows, dout);
    read_stats(call, b, n, token, tile.rows, lse, delta);
    const int64_t sums = round_up(tile.rows, LANES) * shape.columns;
    for (int64_t i = 0; i < sums; i += WIDTH) _mm512_store_ps(dq + i, all(0.f));
    const Words words{call.query_words != nullptr, first, second, word, int32_t(call.threshold),
                      float(call.keep_scale)};
    if (words.any) read_query_words(call, b, n, token, tile.rows, first, second);

    Chunk chunk;
    for (Stream<Side::queries> stream(call, tile, b, n); stream.next(chunk);) {
      const Word *scores = shape.gather_both(K, chunk.token, chunk.count, k, k_values);
      shape.gather(V, chunk.token, chunk.count, v);
      if (words.any) read_key_words(call, h, chunk.token, chunk.count, word);
      for (int group = 0; group < held.groups(); group++) {
        const int64_t at = group * LANES;
        attend_dq(shape, q + at * shape.stride, dout + at * shape.stride, scores, v, k_values, lse + at, delta + at,
                  dq + at * shape.columns, held, group, chunk, float(call.scale * double(LOG2E)), words, s, dp);
      }
    }
    for (int i = 0; i < tile.rows; i++) lse[i] = float(call.scale);
    if (call.add_dq)
      shape.write_sums(dq, lse, head_of<Float32>(call.dq, b, n, call.N, heads, call.D), token, tile.rows, true);
    else
      shape.write_sums(dq, lse, head_of<Element>(call.dq, b, n, call.N, heads, call.D), token, tile.rows, false);
  }
};

// dk and dv of the tiles, which hold keys; their spans are the queries that see them, one query head after another.
// With dq, float32, also dq, which is added to: then a job has all tiles that the queries of one of its tiles see.
template <class Element, class Arithmetic>
class BackwardDkdv {
 public:
  explicit BackwardDkdv(const Call &call) : call(call), shape(call.D), own(round_up(call.own, LANES)) {}

  int64_t count() const { return call.job_count * call.B; }
  int64_t floats() const {
    return own * (2 * shape.stride + 3 * shape.columns + 6) +
           CHUNK * (2 * shape.stride + 3 * shape.columns + 3 * LANES + 4) + 24 * WIDTH;
  }

  void operator()(int64_t work, float *memory) const {
    const int64_t job = work / call.B, b = work % call.B;
    for (int64_t line = call.jobs[job]; line < call.jobs[job + 1]; line++) compute(tile_of(call, line), b, memory);
  }

 private:
  const Call &call;
  const Operands<Arithmetic> shape;
  const int64_t own;

  void compute(const Tile &tile, int64_t b, float *memory) const {
    Parts parts(memory);
    const int64_t h = tile.head, heads = call.H * call.G;
    int64_t *token = parts.take<int64_t>(own);
    int32_t *row = parts.take<int32_t>(own), *word = parts.take<int32_t>(own);
    int held_rows = 0;
    for (int i = 0; i < tile.rows; i++) {
      token[held_rows] = tile.start + int64_t(i) * tile.stride, row[held_rows] = i;
      held_rows += !(call.hidden && call.hidden[b * call.M + token[held_rows]]);
    }
    const Held held{held_rows, token, row};
    float *k = parts.take(own * shape.stride), *v = parts.take(own * shape.stride);
    float *k_values = parts.take(own * shape.columns);
    float *dk = parts.take(own * shape.columns), *dv = parts.take(own * shape.columns), *factor = parts.take(own);
    float *q = parts.take(CHUNK * shape.stride), *dout = parts.take(CHUNK * shape.stride);
    float *q_values = parts.take(CHUNK * shape.columns), *dout_values = parts.take(CHUNK * shape.columns);
    float *dq = parts.take(CHUNK * shape.columns), *lse = parts.take(CHUNK), *delta = parts.take(CHUNK);
    float *s = parts.take(CHUNK * LANES), *dp = parts.take(CHUNK * LANES), *rows = parts.take(CHUNK * LANES);
    int32_t *first = parts.take<int32_t>(CHUNK), *second = parts.take<int32_t>(CHUNK);

    const auto K = head_of<Element>(call.k, b, call.ksb, h, call.ksh, call.ksn);
    const auto V = head_of<Element>(call.v, b, call.vsb, h, call.vsh, call.vsn);
    shape.gather_lanes(K, token, held.count, k);
    shape.gather_lanes(V, token, held.count, v);
    if (call.dq)
      for (int group = 0; group < held.groups(); group++) {
        const int at = group * LANES, count = held.count - at < LANES ? held.count - at : LANES;
        Word *to = k_values + at / Arithmetic::PER_WORD * shape.columns;
        shape.gather_values(K, token + at, count, to);
        for (int64_t i = round_up(count, ROWS) / Arithmetic::PER_WORD * shape.columns;
             i < LANES / Arithmetic::PER_WORD * shape.columns; i += WIDTH)
          _mm512_store_ps(to + i, all(0.f));
      }
    const int64_t sums = held.groups() * LANES * shape.columns;
    for (int64_t i = 0; i < sums; i += WIDTH) _mm512_store_ps(dk + i, all(0.f)), _mm512_store_ps(dv + i, all(0.f));
    const Words words{call.query_words != nullptr, first, second, word, int32_t(call.threshold),
                      float(call.keep_scale)};
    if (words.any) read_key_words(call, h, token, held.count, word);

    Chunk chunk;
    for (int64_t n = h * call.G; n < (h + 1) * call.G; n++) {
      const auto Q = head_of<Element>(call.q, b, call.qsb, n, call.qsh, call.qsn);
      const auto dO = head_of<Element>(call.dout, b, call.dsb, n, call.dsh, call.dsn);
      for (Stream<Side::keys> stream(call, tile, b, n); stream.next(chunk);) {
        const Queries queries{shape.gather_both(Q, chunk.token, chunk.count, q, q_values),
                              shape.template gather_both<Role::plain>(dO, chunk.token, chunk.count, dout, dout_values),
                              q_values,
                              dout_values,
                              lse,
                              delta};
        read_stats(call, b, n, chunk.token, chunk.count, lse, delta);
        if (words.any) read_query_words(call, b, n, chunk.token, chunk.count, first, second);
        if (call.dq)
          for (int64_t i = 0; i < CHUNK * shape.columns; i += WIDTH) _mm512_store_ps(dq + i, all(0.f));
        for (int group = 0; group < held.groups(); group++) {
          const int64_t at = group * LANES;
          const Keys keys{k + at * shape.stride, v + at * shape.stride,
                          k_values + at / Arithmetic::PER_WORD * shape.columns, dk + at * shape.columns,
                          dv + at * shape.columns};
          attend_dkdv(shape, keys, queries, call.dq ? dq : nullptr, held, group, chunk,
                      float(call.scale * double(LOG2E)), words, s, dp, rows);
        }
        if (call.dq) add_dq(dq, head_of<Float32>(call.dq, b, n, call.N, heads, call.D), chunk);
      }
    }
    for (int i = 0; i < held.count; i++) factor[i] = float(call.scale);
    write(dk, factor, call.dk, b, h, held);
    for (int i = 0; i < held.count; i++) factor[i] = 1;
    write(dv, factor, call.dv, b, h, held);
  }

  void add_dq(const float *dq, Rows<Float32> to, const Chunk &chunk) const {
    for (int j = 0; j < chunk.count; j++)
      for (int64_t d = 0; d < call.D; d += WIDTH) {
        Float32 *row = to[chunk.token[j]] + d;
        const Lanes x = _mm512_load_ps(dq + j * shape.columns + d);
        store(row, _mm512_fmadd_ps(x, all(float(call.scale)), load(row, call.D - d)), call.D - d);
      }
  }

  void write(const float *sums, const float *factor, void *to, int64_t b, int64_t h, const Held &held) const {
    if (call.add_dkdv)
      shape.write_sums(sums, factor, head_of<Float32>(to, b, h, call.M, call.H, call.D), held.token, held.count, true);
    else
      shape.write_sums(sums, factor, head_of<Element>(to, b, h, call.M, call.H, call.D), held.token, held.count, false);
  }
};

}  // namespace

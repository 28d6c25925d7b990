// The forward: one flat loop over the rows of all spans or blocks that a tile of queries sees, one softmax. The same on
// a GPU: kernels/strided.py.
#pragma once
#include <cmath>
#include <cstring>

#include "bias.h"

namespace {

// out and lse of the tiles.
template <class Element, class Arithmetic>
class Forward {
 public:
  explicit Forward(const Call &call)
      : call(call),
        shape(call.D),
        own(round_up(call.own, LANES)),
        kept(call, chunks(call, call.M), CHUNK * shape.stride + shape.values) {}

  int64_t count() const { return call.job_count * call.B * query_heads; }
  int64_t floats() const {
    return kept.floats() + own * (shape.stride + shape.columns + 12) + CHUNK * (LANES + 2) + 16 * WIDTH +
           Bias<Side::queries>::floats(call, own);
  }
  void begin(float *memory) const { kept.clear(memory); }

  void operator()(int64_t work, float *memory) const {
    for_each_tile(call, work, query_heads, [&](const Task &task, const Task &next) { compute(task, next, memory); });
  }

 private:
  const Call &call;
  const int64_t query_heads = call.G / call.joined;  // or groups of them
  const Inputs<Element> inputs{call};
  const Operands<Arithmetic> shape;
  const int64_t own;
  const Kept kept;
  const Scaling scaling{call.scores};

  void compute(const Task &task, const Task &next, float *memory) const {
    Parts parts(memory + kept.floats());
    const Tile &tile = *task.tile;
    const int64_t b = task.b, h = tile.head, n = h * call.G + task.g, heads = call.H * call.G;
    const int joined = int(call.joined), rows = rows_in(call, b, tile) * joined;
    int64_t *token = parts.take<int64_t>(own), *numbers = parts.take<int64_t>(own), *q_at = parts.take<int64_t>(own);
    int32_t *row = parts.take<int32_t>(own), *first = parts.take<int32_t>(own), *second = parts.take<int32_t>(own);
    int32_t *bit = parts.take<int32_t>(own);
    number_rows(tile, joined, own, row, token);
    const Held held{rows, token, row, tile.within, bit};
    if (call.kinds) number_bits(held, bit);
    float *q = parts.take(own * shape.stride), *m = parts.take(own), *z = parts.take(own);
    float *acc = parts.take(own * shape.columns);
    float *s = parts.take(CHUNK * LANES);
    int32_t *word = parts.take<int32_t>(CHUNK);

    const SideBySide written = side_by_side(joined, token, tile.rows * joined, heads, 1, numbers);
    const int64_t *at = written.at;
    const Rows<Element> out{head_of<Element>(call.out, b, n, call.N, heads, call.D).base, written.step * call.D};
    const Rows<float> lse{call.lse + b * call.N * heads + n, written.step};
    for (int i = rows; i < tile.rows * joined; i++) {
      *lse[at[i]] = -INF;
      std::memset(static_cast<void *>(out[at[i]]), 0, call.D * sizeof(Element));
    }
    if (rows == 0) return;

    const auto K = inputs.k(b, h), V = inputs.v(b, h);
    const SideBySide of_q = side_by_side(joined, token, rows, call.qsn, call.qsh, q_at);
    shape.gather_lanes(Rows<const Element>{inputs.q(b, n).base, of_q.step}, of_q.at, rows, q);
    prepare(tile, rows, out, lse, at, m, z, acc);
    const Words words{call.query_words != nullptr, first, second, word, int32_t(call.threshold),
                      float(call.keep_scale)};
    if (words.any) read_query_words(call, b, n, token, rows, first, second, joined);
    const Bias<Side::queries> bias(call, b, n, token, rows, parts);

    for_each_chunk<Side::queries>(inputs, kept, memory, task, next, [&](const Chunk &chunk, Ahead &ahead, bool last) {
      if (last) ahead.add(out, call.D, at, rows);
      Kept::Slot &slot = kept.find(memory, chunk, b, h);
      Word *k = slot.rows, *v = slot.rows + CHUNK * shape.stride;
      if (!slot.known) {
        shape.gather(K, chunk.token, chunk.count, k);
        slot.finite = shape.gather_values(V, chunk.token, chunk.count, v);
      }
      if (words.any) read_key_words(call, h, chunk.token, chunk.count, word);
      for (int group = 0; group < held.groups(); group++) {
        const int64_t lane = group * LANES;
        ahead.ask(group, held.groups());
        Sight sight;
        const Window w = window<Side::queries, Arithmetic::ROWS>(held, group, chunk, sight);
        with_flag(w.cut, [&](auto cut) {
          attend<cut()>(shape, q + lane * shape.stride, k, v, {m + lane, z + lane, acc + lane * shape.columns}, held,
                        group, chunk, w, sight, scaling, words, bias, s);
        });
        if (!slot.finite) spread_infinities<Element>(V, call.D, held, group, chunk, acc + lane * shape.columns);
      }
    });

    // finish: out = acc / z, lse = m + log z; rows that saw nothing get 0 and -infinity, a NaN stays one.
    for (int i = 0; i < rows; i++) {
      *lse[at[i]] = z[i] == 0 ? -INF : m[i] * LN2 + std::log(z[i]);
      z[i] = z[i] == 0 ? 0 : 1 / z[i];
    }
    shape.write_sums(acc, z, out, at, rows, false);
  }

  // What an earlier launch left, or nothing; then the phantoms, keys of score and value 0.
  void prepare(const Tile &tile, int rows, Rows<Element> out, Rows<float> lse, const int64_t *at, float *m, float *z,
               float *acc) const {
    const int64_t sums = round_up(rows, LANES) * shape.columns;
    if (tile.first)
      for (int64_t i = 0; i < sums; i += WIDTH) store(acc + i, zeros());
    else
      shape.read_sums(out, at, rows, acc);
    for (int i = 0; i < round_up(rows, LANES); i++) {
      m[i] = tile.first || i >= rows ? -INF : *lse[at[i]] * LOG2E;
      z[i] = m[i] != -INF;
    }
    if (tile.phantoms == 0) return;
    for (int i = 0; i < round_up(rows, LANES); i += WIDTH) {
      const Lanes before = load(m + i), top = larger(zeros(), before);
      const Lanes decay = power_of_2(before - top);
      const Lanes phantoms = all(float(tile.phantoms)) * power_of_2(zeros() - top);
      store(m + i, top);
      store(z + i, multiply_add(load(z + i), decay, phantoms));
      for (int d = 0; d < shape.columns; d++) {
        float *sum = acc + (i / LANES * shape.columns + d) * LANES + i % LANES;
        store(sum, load(sum) * decay);
      }
    }
  }
};

}  // namespace

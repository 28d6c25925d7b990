// The backward, from the merged out and lse: tiles and loops as in the forward, or of keys that stream the queries.
#pragma once
#include "bias.h"

namespace {

// stats: lse in units of log 2, infinity in rows that saw nothing, whose p is 0; delta = rowsum(dout * out) - dlse.
template <class Element>
class Stats {
 public:
  explicit Stats(const Call &call) : call(call) {}

  int64_t count() const { return call.B * ((call.N + CHUNK - 1) / CHUNK); }
  int64_t floats() const { return WIDTH; }
  void begin(float *) const {}

  void operator()(int64_t work, float *) const {
    const int64_t b = work % call.B, first = work / call.B * CHUNK, heads = call.H * call.G;
    for (int64_t token = first; token < first + CHUNK && token < call.N; token++)
      for (int64_t n = 0; n < heads; n++) {
        const int64_t at = (b * call.N + token) * heads + n;
        const Element *out = static_cast<const Element *>(call.out) + at * call.D;
        const Element *dout = static_cast<const Element *>(call.dout) + b * call.dsb + token * call.dsn + n * call.dsh;
        Lanes sum = zeros();
        for (int64_t d = 0; d < call.D; d += WIDTH)
          sum = multiply_add(load(out + d, call.D - d), load(dout + d, call.D - d), sum);
        const bool some = call.lse[at] != -INF;
        call.stats[2 * at] = some ? call.lse[at] * LOG2E : INF;
        call.stats[2 * at + 1] = some ? sum_of(sum) - (call.dlse ? call.dlse[at] : 0) : 0;
      }
  }

 private:
  const Call &call;
};

// dq of the tiles, those of Forward.
template <class Element, class Arithmetic>
class BackwardDq {
 public:
  explicit BackwardDq(const Call &call)
      : call(call),
        shape(call.D),
        own(round_up(call.own, LANES)),
        kept(call, chunks(call, call.M), CHUNK * 2 * shape.stride + shape.values) {}

  int64_t count() const { return call.job_count * call.B * query_heads; }
  int64_t floats() const {
    return kept.floats() + own * (2 * shape.stride + shape.columns + 14) + CHUNK * (2 * LANES + 2) + 16 * WIDTH +
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
    if (rows == 0) return;
    int64_t *token = parts.take<int64_t>(own), *numbers = parts.take<int64_t>(own), *q_at = parts.take<int64_t>(own);
    int64_t *dout_at = parts.take<int64_t>(own);
    int32_t *row = parts.take<int32_t>(own), *first = parts.take<int32_t>(own), *second = parts.take<int32_t>(own);
    int32_t *bit = parts.take<int32_t>(own);
    number_rows(tile, joined, own, row, token);
    const Held held{rows, token, row, tile.within, bit};
    if (call.kinds) number_bits(held, bit);
    float *q = parts.take(own * shape.stride), *dout = parts.take(own * shape.stride);
    float *dq = parts.take(own * shape.columns), *lse = parts.take(own), *delta = parts.take(own);
    float *s = parts.take(CHUNK * LANES), *dp = parts.take(CHUNK * LANES);
    int32_t *word = parts.take<int32_t>(CHUNK);

    const auto K = inputs.k(b, h), V = inputs.v(b, h);
    const SideBySide of_q = side_by_side(joined, token, rows, call.qsn, call.qsh, q_at);
    const SideBySide of_dout = side_by_side(joined, token, rows, call.dsn, call.dsh, dout_at);
    const SideBySide written = side_by_side(joined, token, rows, heads, 1, numbers);
    const int64_t *at = written.at;
    shape.gather_lanes(Rows<const Element>{inputs.q(b, n).base, of_q.step}, of_q.at, rows, q);
    shape.gather_lanes(Rows<const Element>{inputs.dout(b, n).base, of_dout.step}, of_dout.at, rows, dout);
    const Rows<const float> stats{inputs.stats(b, n).base, 2 * written.step};
    read_stats(stats, at, rows, round_up(rows, LANES), lse, delta);
    const int64_t sums = round_up(rows, LANES) * shape.columns;
    for (int64_t i = 0; i < sums; i += WIDTH) store(dq + i, zeros());
    const Words words{call.query_words != nullptr, first, second, word, int32_t(call.threshold),
                      float(call.keep_scale)};
    if (words.any) read_query_words(call, b, n, token, rows, first, second, joined);
    const Bias<Side::queries> bias(call, b, n, token, rows, parts);

    const auto with_gradient = [&](auto body) {
      with_rows<Element>(call.dq, call.add_dq, b, n, call.N, heads, call.D, [&](auto to, bool add) {
        to.step = written.step * call.D;
        body(to, add);
      });
    };
    for_each_chunk<Side::queries>(inputs, kept, memory, task, next, [&](const Chunk &chunk, Ahead &ahead, bool last) {
      if (last) with_gradient([&](auto to, bool) { ahead.add(to, call.D, at, rows); });
      Kept::Slot &slot = kept.find(memory, chunk, b, h);
      Parts rows(slot.rows);
      Word *k_values = rows.take(shape.values), *k = rows.take(CHUNK * shape.stride);
      Word *v = rows.take(CHUNK * shape.stride);
      if (!slot.known) {
        slot.finite = shape.gather_both(K, chunk.token, chunk.count, k, k_values);
        shape.gather(V, chunk.token, chunk.count, v);
      }
      const Word *scores = shape.scores_of(slot.finite, k, k_values);
      if (words.any) read_key_words(call, h, chunk.token, chunk.count, word);
      for (int group = 0; group < held.groups(); group++) {
        const int64_t lane = group * LANES;
        ahead.ask(group, held.groups());
        Sight sight;
        const Window w = window<Side::queries, Arithmetic::ROWS>(held, group, chunk, sight);
        const auto attend = [&](auto cut, auto capped) {
          attend_dq<cut(), capped()>(shape, q + lane * shape.stride, dout + lane * shape.stride, scores, v, k_values,
                                     lse + lane, delta + lane, dq + lane * shape.columns, held, group, chunk, w, sight,
                                     scaling, words, bias, s, dp);
        };
        with_flag(w.cut, [&](auto cut) { with_flag(scaling.capped, [&](auto capped) { attend(cut, capped); }); });
      }
    });
    for (int i = 0; i < rows; i++) lse[i] = float(call.scores.scale);
    with_gradient([&](auto to, bool add) { shape.write_sums(dq, lse, to, at, rows, add); });
  }
};

// dk and dv of the tiles, which hold keys; their spans are the queries that see them, one query head after another.
// With dq, float32, also dq, which is added to: then a job has all tiles that the queries of one of its tiles see.
template <class Element, class Arithmetic>
class BackwardDkdv {
 public:
  explicit BackwardDkdv(const Call &call)
      : call(call),
        shape(call.D),
        own(round_up(call.own, LANES)),
        kept(call, chunks(call, call.N), CHUNK * 2 * (shape.stride + 1) + 2 * shape.values) {}

  int64_t count() const { return call.job_count * call.B; }
  int64_t floats() const {
    return kept.floats() + own * (2 * shape.stride + 3 * shape.columns + 6) +
           CHUNK * (shape.columns + 2 * LANES + ROW + 2) + 24 * WIDTH + Bias<Side::keys>::floats(call, own);
  }

  void begin(float *memory) const { kept.clear(memory); }

  void operator()(int64_t work, float *memory) const {
    for_each_tile(call, work, 1, [&](const Task &task, const Task &next) { compute(task, next, memory); });
  }

 private:
  // Words of a row of a group's ds, and of a row of those of several groups and their low halves.
  static constexpr int WORDS = LANES / Arithmetic::PER_WORD, JOINED = Arithmetic::JOINED,
                       ROW = Arithmetic::HALVES * JOINED * WORDS;
  const Call &call;
  const Inputs<Element> inputs{call};
  const Operands<Arithmetic> shape;
  const int64_t own;
  const Kept kept;
  const Scaling scaling{call.scores};

  void compute(const Task &task, const Task &next, float *memory) const {
    Parts parts(memory + kept.floats());
    const Tile &tile = *task.tile;
    const int64_t b = task.b, h = tile.head, heads = call.H * call.G;
    int64_t *token = parts.take<int64_t>(own);
    int32_t *row = parts.take<int32_t>(own), *word = parts.take<int32_t>(own), *bit = parts.take<int32_t>(own);
    int held_rows = 0;
    for (int i = 0; i < rows_in(call, b, tile); i++) {
      token[held_rows] = tile.start + int64_t(i) * tile.stride, row[held_rows] = i;
      held_rows += !(call.hidden && call.hidden[b * call.M + token[held_rows]]);
    }
    if (held_rows == 0) return;
    const Held held{held_rows, token, row, tile.within, bit};
    if (call.kinds) number_bits(held, bit);
    float *k = parts.take(own * shape.stride), *v = parts.take(own * shape.stride);
    float *k_values = parts.take(own * shape.columns);
    float *dk = parts.take(own * shape.columns), *dv = parts.take(own * shape.columns), *factor = parts.take(own);
    float *dq = parts.take(CHUNK * shape.columns);
    float *s = parts.take(CHUNK * LANES), *dp = parts.take(CHUNK * LANES), *rows = parts.take(CHUNK * ROW);
    int32_t *first = parts.take<int32_t>(CHUNK), *second = parts.take<int32_t>(CHUNK);

    const auto K = inputs.k(b, h), V = inputs.v(b, h);
    shape.gather_lanes(K, token, held.count, k);
    shape.gather_lanes(V, token, held.count, v);
    if (call.dq)
      for (int group = 0; group < held.groups(); group++) {
        const int at = group * LANES, count = held.count - at < LANES ? held.count - at : LANES;
        Word *to = k_values + at / Arithmetic::PER_WORD * shape.value_row;
        shape.gather_value_rows(K, token + at, count, to);
        for (int64_t i = round_up(count, Arithmetic::ROWS) / Arithmetic::PER_WORD * shape.value_row;
             i < LANES / Arithmetic::PER_WORD * shape.value_row; i += WIDTH)
          store(to + i, zeros());
      }
    const int64_t sums = held.groups() * LANES * shape.columns;
    for (int64_t i = 0; i < sums; i += WIDTH) store(dk + i, zeros()), store(dv + i, zeros());
    const Words words{call.query_words != nullptr, first, second, word, int32_t(call.threshold),
                      float(call.keep_scale)};
    if (words.any) read_key_words(call, h, token, held.count, word);

    const auto with_gradient = [&](void *to, auto body) {
      with_rows<Element>(to, call.add_dkdv, b, h, call.M, call.H, call.D, body);
    };
    for (int64_t n = h * call.G; n < (h + 1) * call.G; n++) {
      const auto Q = inputs.q(b, n), dO = inputs.dout(b, n);
      const int64_t g = n - h * call.G;
      Bias<Side::keys> bias(call, b, n, token, held.count, parts);
      const Task now{&tile, b, g}, then = g + 1 < call.G ? Task{&tile, b, g + 1} : next;
      for_each_chunk<Side::keys>(inputs, kept, memory, now, then, [&](const Chunk &chunk, Ahead &ahead, bool last) {
        if (call.dq)
          ahead.add(head_of<Float32>(call.dq, b, n, call.N, heads, call.D), call.D, chunk.token, chunk.count);
        if (last) {
          const auto add = [&](auto rows, bool) { ahead.add(rows, call.D, token, held.count); };
          with_gradient(call.dk, add), with_gradient(call.dv, add);
        }
        Kept::Slot &slot = kept.find(memory, chunk, b, n);
        Parts rows_of(slot.rows);
        Word *q_values = rows_of.take(shape.values), *dout_values = rows_of.take(shape.values);
        Word *q = rows_of.take(CHUNK * shape.stride), *dout = rows_of.take(CHUNK * shape.stride);
        float *lse = rows_of.take(CHUNK), *delta = rows_of.take(CHUNK);
        if (!slot.known) {
          slot.finite = shape.gather_both(Q, chunk.token, chunk.count, q, q_values);
          shape.template gather_both<Role::plain>(dO, chunk.token, chunk.count, dout, dout_values);
          read_stats(inputs.stats(b, n), chunk.token, chunk.count, round_up(chunk.count, Arithmetic::ROWS), lse, delta);
        }
        const Queries queries{shape.scores_of(slot.finite, q, q_values),
                              shape.scores_of(true, dout, dout_values),
                              q_values,
                              dout_values,
                              lse,
                              delta};
        if (words.any) read_query_words(call, b, n, chunk.token, chunk.count, first, second);
        if (call.dq)
          for (int64_t i = 0; i < CHUNK * shape.columns; i += WIDTH) store(dq + i, zeros());
        for (int first_group = 0; first_group < held.groups(); first_group += JOINED) {
          const int joined = int(least(JOINED, held.groups() - first_group));
          Window seen{CHUNK, 0, false};
          for (int i = 0; i < joined; i++) {
            const int group = first_group + i, at = group * LANES;
            ahead.ask(group, held.groups());
            const Keys keys{k + at * shape.stride, v + at * shape.stride, dk + at * shape.columns,
                            dv + at * shape.columns};
            Sight sight;
            const Window w = window<Side::keys, Arithmetic::ROWS>(held, group, chunk, sight);
            const auto attend = [&](auto cut, auto formed) {
              attend_dkdv<cut(), formed()>(shape, keys, queries, held, group, chunk, w, sight, scaling, words, bias, s,
                                           dp, call.dq ? rows + i * WORDS : nullptr, ROW);
            };
            with_flag(w.cut, [&](auto cut) {
              bias.any         ? attend(cut, std::integral_constant<Formed, Formed::biased>())
              : scaling.capped ? attend(cut, std::integral_constant<Formed, Formed::capped>())
                               : attend(cut, std::integral_constant<Formed, Formed::plainly>());
            });
            if (w.from < w.to) seen.from = int(least(seen.from, w.from)), seen.to = int(most(seen.to, w.to));
          }
          if (call.dq && seen.from < seen.to)
            multiply_rows(Arithmetic(), rows + seen.from * ROW, ROW, k_values + first_group * WORDS * shape.value_row,
                          joined * WORDS, dq + seen.from * shape.columns, seen.to - seen.from, shape.columns);
        }
        if (call.dq) add_dq(dq, head_of<Float32>(call.dq, b, n, call.N, heads, call.D), chunk);
      });
      bias.finish();
    }
    const auto write = [&](const float *sums, float times, void *gradient) {
      for (int i = 0; i < held.count; i++) factor[i] = times;
      with_gradient(gradient,
                    [&](auto rows, bool add) { shape.write_sums(sums, factor, rows, token, held.count, add); });
    };
    write(dk, float(call.scores.scale), call.dk);
    write(dv, 1, call.dv);
  }

  void add_dq(const float *dq, Rows<Float32> to, const Chunk &chunk) const {
    for (int j = 0; j < chunk.count; j++)
      for (int64_t d = 0; d < call.D; d += WIDTH) {
        Float32 *row = to[chunk.token[j]] + d;
        const Lanes x = load(dq + j * shape.columns + d);
        store(row, multiply_add(x, all(float(call.scores.scale)), load(row, call.D - d)), call.D - d);
      }
  }
};

}  // namespace

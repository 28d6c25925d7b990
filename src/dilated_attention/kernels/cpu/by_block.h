// The forward of tiles of few rows whose lists name whole blocks: few.h would multiply row by row, and forward.h leave most
// lanes empty. So here a job has many tiles and takes one block after another: the rows that see the block fill the
// lanes. The sums of a row lie in a row, to which each block adds.
#pragma once
#include <cmath>
#include <cstring>

#include "bias.h"
#include "few.h"
#include "tiles.h"

namespace {

template <class Element, class Arithmetic>
class ForwardByBlock {
 public:
  explicit ForwardByBlock(const Call &call) : call(call), shape(call.D), own(round_up(call.own, LANES)) {}

  int64_t count() const { return call.job_count * call.B * query_heads; }
  int64_t floats() const {
    constexpr int64_t OF_ROW = 2 * 4 + 3 + (sizeof(List) + sizeof(float) - 1) / sizeof(float);
    return own * (shape.columns + OF_ROW) + PIECES * (CHUNK * shape.stride + shape.values + OF_CHUNK) +
           LANES * (shape.stride + shape.columns + CHUNK + 16) + CHUNK + 32 * WIDTH;
  }
  void begin(float *) const {}

  void operator()(int64_t work, float *memory) const {
    const int64_t job = work / query_heads / call.B, b = work / query_heads % call.B;
    for (int64_t line = call.jobs[job], end = call.jobs[job + 1]; line < end && !stopped();) {
      int64_t last = line + 1;
      while (last < end && are_alike(tile_of(call, last - 1), tile_of(call, last))) last++;
      compute(line, last, b, work % query_heads * call.joined, memory);
      line = last;
    }
  }

 private:
  static constexpr int PIECES = 4;  // chunks that are gathered at once
  static constexpr int64_t OF_CHUNK = (sizeof(Chunk) + sizeof(float) - 1) / sizeof(float) + 2 * WIDTH;
  static constexpr int32_t EVERY = INT32_MAX;

  struct List {
    const int64_t *next, *end;  // blocks that are still to come
    int64_t first_row, rows;
  };

  const Call &call;
  const int64_t query_heads = call.G / call.joined;  // or groups of them
  const Inputs<Element> inputs{call};
  const Operands<Arithmetic> shape;
  const int64_t own;
  const Scaling scaling{call.scores};

  // Whether two tiles see rows of the same span, the second no fewer of them.
  static bool are_alike(const Tile &a, const Tile &b) {
    const Span &x = *a.spans(), &y = *b.spans();
    return a.head == b.head && a.ahead == b.ahead && x.start == y.start && x.stride == y.stride && x.count == y.count &&
           x.near <= y.near;
  }

  static int64_t block_of(const List &list) { return list.next == list.end ? INT64_MAX : *list.next; }

  List list_of(const Tile &tile, int64_t b, int64_t n) const {
    const int64_t *list = call.indptr + b * call.lsb + n / call.LH * call.lsh + tile.list;
    const int64_t *begin = call.indices + list[0], *end = call.indices + list[1];
    const int64_t stop = tile.ahead + tile.spans()->count;
    if (tile.ahead > 0) begin = std::lower_bound(begin, end, tile.ahead / call.size);
    return {begin, std::lower_bound(begin, end, (stop + call.size - 1) / call.size), 0, 0};
  }

  // The tiles of these lines, for `joined` query heads of their key-value head, the first of them g.
  void compute(int64_t first_line, int64_t last_line, int64_t b, int64_t g, float *memory) const {
    Parts parts(memory);
    const Tile &any = tile_of(call, first_line);
    const int64_t h = any.head, n = h * call.G + g, heads = call.H * call.G;
    const int joined = int(call.joined);
    const int64_t tiles = last_line - first_line;
    List *lists = parts.take<List>(own);
    int64_t *token = parts.take<int64_t>(own), *numbers = parts.take<int64_t>(own), *room = parts.take<int64_t>(own);
    int64_t *listed = parts.take<int64_t>(own);
    int32_t *limit = parts.take<int32_t>(own);  // the last position that a row sees
    float *m = parts.take(own), *z = parts.take(own), *acc = parts.take(own * shape.columns);

    int64_t rows = 0, block = INT64_MAX;
    for (int64_t x = 0; x < tiles; x++) {
      const Tile &tile = tile_of(call, first_line + x);
      lists[x] = list_of(tile, b, n);
      lists[x].first_row = rows, lists[x].rows = rows_in(call, b, tile) * joined;
      if (lists[x].rows) block = least(block, block_of(lists[x]));
      const int32_t near = tile.spans()->near;
      for (int64_t i = 0; i < tile.rows * joined; i++) {
        const int32_t row = int32_t(i / joined);
        token[rows] = tile.start + int64_t(row) * tile.stride;
        limit[rows++] = near == 1 << 30 ? EVERY : row + near;
      }
    }
    const SideBySide written = side_by_side(joined, token, rows, heads, 1, numbers);
    const int64_t *at = written.at;
    const Rows<Element> out{head_of<Element>(call.out, b, n, call.N, heads, call.D).base, written.step * call.D};
    const Rows<float> lse{call.lse + b * call.N * heads + n, written.step};
    const SideBySide of_q = side_by_side(joined, token, rows, call.qsn, call.qsh, room);
    const Rows<const Element> Q{inputs.q(b, n).base, of_q.step};
    for (int64_t x = 0; x < tiles; x++) {
      const Tile &tile = tile_of(call, first_line + x);
      for (int64_t i = lists[x].first_row; i < lists[x].first_row + tile.rows * joined; i++)
        begin_row(tile, out[at[i]], *lse[at[i]], m[i], z[i], acc + i * shape.columns);
    }

    while (block < INT64_MAX && !stopped()) {
      int64_t count = 0, next = INT64_MAX;
      for (int64_t x = 0; x < tiles; x++) {
        List &list = lists[x];
        if (list.rows == 0) continue;
        if (block_of(list) == block) {
          list.next++;
          for (int64_t i = list.first_row; i < list.first_row + list.rows; i++) listed[count++] = i;
        }
        next = least(next, block_of(list));
      }
      add_block(any, block, b, h, n, Q, {count, listed, token, of_q.at, limit, m, z, acc}, parts);
      block = next;
    }

    for (int64_t x = 0; x < tiles; x++) {
      const Tile &tile = tile_of(call, first_line + x);
      for (int64_t i = lists[x].first_row; i < lists[x].first_row + tile.rows * joined; i++) {
        if (i >= lists[x].first_row + lists[x].rows) z[i] = 0;  // after the end of a sample
        *lse[at[i]] = z[i] == 0 ? -INF : m[i] * LN2 + std::log(z[i]);
        const float factor = z[i] == 0 ? 0 : 1 / z[i];
        if (z[i] == 0)
          std::memset(static_cast<void *>(out[at[i]]), 0, call.D * sizeof(Element));
        else
          write_row(acc + i * shape.columns, factor, out[at[i]], call.D, false);
      }
    }
  }

  // What an earlier launch left, or nothing; then the phantoms, keys of score and value 0.
  void begin_row(const Tile &tile, const Element *out, float lse, float &m, float &z, float *acc) const {
    m = tile.first ? -INF : lse * LOG2E;
    z = m != -INF;
    if (tile.first)
      for (int64_t d = 0; d < shape.columns; d += WIDTH) store(acc + d, zeros());
    else
      read_row(out, call.D, acc);
    if (tile.phantoms == 0) return;
    raise(std::fmax(m, 0.f), m, z, acc);
    z += float(tile.phantoms) * std::exp2(-m);
  }

  // The maximum of a row rises.
  void raise(float to, float &m, float &z, float *acc) const {
    z *= decayed(to, m, acc);
    m = to;
  }
  float decayed(float to, float m, float *acc) const {
    const float decay = m == -INF ? 0 : std::exp2(m - to);
    for (int64_t d = 0; d < shape.columns; d += WIDTH) store(acc + d, load(acc + d) * all(decay));
    return decay;
  }

  struct Listing {
    int64_t count;
    const int64_t *row;  // the rows that see the block
    const int64_t *token, *q_at;
    const int32_t *limit;
    float *m, *z, *acc;
  };

  // A block's keys and values, for all rows that list it.
  void add_block(const Tile &tile, int64_t block, int64_t b, int64_t h, int64_t n, Rows<const Element> Q,
                 const Listing &listing, Parts parts) const {
    if (listing.count == 0) return;
    const Span &span = *tile.spans();
    const int64_t lowest = listing.limit[listing.row[0]], highest = listing.limit[listing.row[listing.count - 1]];
    int64_t at = most(block * call.size - tile.ahead, 0);
    int64_t end = least((block + 1) * call.size - tile.ahead, within(call, b, span.start, span.stride, span.count));
    end = least(end, highest == EVERY ? end : highest + 1);
    const uint8_t *hidden = call.hidden ? call.hidden + b * call.M : nullptr;

    const auto K = inputs.k(b, h), V = inputs.v(b, h);
    Word *k = parts.take(PIECES * CHUNK * shape.stride), *v = parts.take(PIECES * shape.values);
    Chunk *chunks = parts.take<Chunk>(PIECES);
    bool finite[PIECES];
    while (at < end) {
      int pieces = 0;
      for (; pieces < PIECES && at < end; pieces++) {
        Chunk &chunk = chunks[pieces];
        chunk.count = 0, chunk.place = -1;
        for (; at < end && chunk.count < CHUNK; at++) {
          const int64_t key = span.start + at * span.stride;
          if (hidden && hidden[key]) continue;
          chunk.token[chunk.count] = key;
          chunk.first[chunk.count] = int32_t(at), chunk.last[chunk.count] = EVERY;
          chunk.count++;
        }
        chunk.cut = false;
        chunk.edged = at - 1 > lowest;
        shape.gather(K, chunk.token, chunk.count, k + pieces * CHUNK * shape.stride);
        finite[pieces] = shape.gather_values(V, chunk.token, chunk.count, v + pieces * shape.values);
      }
      for (int64_t first = 0; first < listing.count; first += LANES)
        add_chunks(chunks, finite, pieces, k, v, V, b, h, n, Q, first, listing, parts);
    }
  }

  // Chunks, for as many of the rows from `first` on as there are lanes.
  void add_chunks(const Chunk *chunks, const bool *finite, int pieces, const Word *k, const Word *v,
                  Rows<const Element> V, int64_t b, int64_t h, int64_t n, Rows<const Element> Q, int64_t first,
                  const Listing &listing, Parts parts) const {
    const int count = int(least(LANES, listing.count - first));
    const int64_t *row = listing.row + first;
    int64_t *token = parts.take<int64_t>(LANES), *q_at = parts.take<int64_t>(LANES);
    int32_t *limit = parts.take<int32_t>(LANES), *words_a = parts.take<int32_t>(LANES);
    int32_t *words_b = parts.take<int32_t>(LANES), *words_k = parts.take<int32_t>(CHUNK);
    float *m = parts.take(LANES), *z = parts.take(LANES), *ones = parts.take(LANES);
    float *q = parts.take(LANES * shape.stride), *acc = parts.take(LANES * shape.columns), *s = parts.take(LANES * CHUNK);
    for (int i = 0; i < LANES; i++) {
      const bool some = i < count;
      const int64_t from = row[some ? i : 0];
      token[i] = listing.token[from], q_at[i] = listing.q_at[from], limit[i] = listing.limit[from];
      m[i] = some ? listing.m[from] : -INF, z[i] = some ? listing.z[from] : 0, ones[i] = 1;
    }
    const Held held{count, token, limit, 0, nullptr};
    const Words words{call.query_words != nullptr, words_a, words_b, words_k, int32_t(call.threshold),
                      float(call.keep_scale)};
    if (words.any)
      for (int i = 0; i < count; i++)
        read_query_words(call, b, n + row[i] % call.joined, token + i, 1, words_a + i, words_b + i);
    shape.gather_lanes(Q, q_at, count, q);
    for (int64_t i = 0; i < LANES * shape.columns; i += WIDTH) store(acc + i, zeros());

    for (int piece = 0; piece < pieces; piece++) {
      const Chunk &chunk = chunks[piece];
      if (words.any) read_key_words(call, h, chunk.token, chunk.count, words_k);
      attend(shape, q, k + piece * CHUNK * shape.stride, v + piece * shape.values, {m, z, acc}, held, 0, chunk, scaling,
             words, Unbiased(), s);
      if (!finite[piece]) spread_infinities<Element>(V, call.D, held, 0, chunk, acc);
    }

    for (int i = 0; i < count; i++) {
      float *sums = listing.acc + row[i] * shape.columns;
      if (m[i] != listing.m[row[i]]) decayed(m[i], listing.m[row[i]], sums);
      listing.m[row[i]] = m[i], listing.z[row[i]] = z[i];
    }
    const Rows<Float32> sums{reinterpret_cast<Float32 *>(listing.acc), shape.columns};
    shape.write_sums(acc, ones, sums, row, count, true);
  }
};

}  // namespace

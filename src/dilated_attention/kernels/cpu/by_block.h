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
    constexpr int64_t OF_ROW = 2 * 4 + 4 + OF_MEMBER;
    return own * (shape.columns + OF_ROW) + PIECES * (CHUNK * shape.stride + shape.values + OF_CHUNK) +
           LANES * (shape.stride + shape.columns + CHUNK + 16) + CHUNK + 32 * WIDTH;
  }
  void begin(float *) const {}

  void operator()(int64_t number, float *memory) const {
    const Work work(call, number, query_heads);
    for (int64_t line = call.jobs[work.job], end = call.jobs[work.job + 1]; line < end && !stopped();) {
      int64_t last = line + 1;
      while (last < end && are_alike(tile_of(call, last - 1), tile_of(call, last))) last++;
      compute(line, last, work.b, work.head * call.joined, memory);
      line = last;
    }
  }

 private:
  // A tile of a job: the blocks of its list that are still to come, and its rows among those of the job.
  struct Member {
    const Tile *tile;
    const int64_t *next, *end;
    int64_t first_row, seen_end, end_row;  // those before seen_end lie in the sample

    int64_t block() const { return next == end ? INT64_MAX : *next; }
  };

  // The rows of a job.
  struct Job {
    int64_t b, h, n;
    Rows<const Element> Q;
    const int64_t *q_at, *token;
    const int32_t *limit;  // the last position that a row sees
    float *m, *z, *acc;    // as in Running, but for acc[rows][columns]
  };

  // Which rows of a job see the block at hand.
  struct Listing {
    const int64_t *row;
    int64_t count;
  };

  static constexpr int PIECES = 4;
  static constexpr int64_t OF_MEMBER = (sizeof(Member) + sizeof(float) - 1) / sizeof(float);
  static constexpr int64_t OF_CHUNK = (sizeof(Chunk) + sizeof(float) - 1) / sizeof(float) + 2 * WIDTH;
  static constexpr int32_t EVERY = INT32_MAX;

  // Chunks of a block, gathered at once.
  struct Pieces {
    int count;
    Chunk *chunks;
    Word *k, *v;  // of all chunks, one after another
    bool finite[PIECES];
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

  Member member_of(const Tile &tile, int64_t b, int64_t n, int64_t first_row) const {
    const int64_t seen_end = first_row + rows_in(call, b, tile) * call.joined;
    const int64_t end_row = first_row + tile.rows * call.joined;
    if (seen_end == first_row) return {&tile, nullptr, nullptr, first_row, seen_end, end_row};
    const int64_t *list = call.indptr + b * call.lsb + n / call.LH * call.lsh + tile.list;
    const int64_t *begin = call.indices + list[0], *end = call.indices + list[1];
    const int64_t stop = tile.ahead + tile.spans()->count;
    const int64_t *next = std::lower_bound(begin, end, tile.ahead / call.size);
    return {&tile, next, std::lower_bound(next, end, (stop + call.size - 1) / call.size), first_row, seen_end, end_row};
  }

  // The tiles of these lines, for `joined` query heads of their key-value head, the first of them g.
  void compute(int64_t first_line, int64_t last_line, int64_t b, int64_t g, float *memory) const {
    Parts parts(memory);
    const Tile &first_tile = tile_of(call, first_line);
    const int64_t h = first_tile.head, n = h * call.G + g, heads = call.H * call.G;
    const int64_t tiles = last_line - first_line;
    const int joined = int(call.joined);
    Member *members = parts.take<Member>(own);
    int64_t *token = parts.take<int64_t>(own), *numbers = parts.take<int64_t>(own), *room = parts.take<int64_t>(own);
    int64_t *listed = parts.take<int64_t>(own);
    int32_t *row = parts.take<int32_t>(own), *limit = parts.take<int32_t>(own);
    float *m = parts.take(own), *z = parts.take(own), *acc = parts.take(own * shape.columns);

    int64_t rows = 0, block = INT64_MAX;
    for (int64_t x = 0; x < tiles; x++) {
      const Tile &tile = tile_of(call, first_line + x);
      members[x] = member_of(tile, b, n, rows);
      block = least(block, members[x].block());
      number_rows(tile, joined, tile.rows * joined, row + rows, token + rows);
      const int32_t near = tile.spans()->near;
      for (; rows < members[x].end_row; rows++) limit[rows] = near == 1 << 30 ? EVERY : row[rows] + near;
    }
    const SideBySide written = side_by_side(joined, token, rows, heads, 1, numbers);
    const int64_t *at = written.at;
    const Rows<Element> out{head_of<Element>(call.out, b, n, call.N, heads, call.D).base, written.step * call.D};
    const Rows<float> lse{call.lse + b * call.N * heads + n, written.step};
    for (int64_t x = 0; x < tiles; x++)
      for (int64_t i = members[x].first_row; i < members[x].end_row; i++)
        begin_row(*members[x].tile, out[at[i]], *lse[at[i]], m[i], z[i], acc + i * shape.columns);

    const SideBySide of_q = side_by_side(joined, token, rows, call.qsn, call.qsh, room);
    const Job job{b, h, n, {inputs.q(b, n).base, of_q.step}, of_q.at, token, limit, m, z, acc};
    while (block < INT64_MAX && !stopped()) {
      int64_t count = 0, following = INT64_MAX;
      for (int64_t x = 0; x < tiles; x++) {
        Member &member = members[x];
        if (member.block() == block) {
          member.next++;
          for (int64_t i = member.first_row; i < member.seen_end; i++) listed[count++] = i;
        }
        following = least(following, member.block());
      }
      add_block(first_tile, block, job, {listed, count}, parts);
      block = following;
    }

    for (int64_t x = 0; x < tiles; x++)
      for (int64_t i = members[x].first_row; i < members[x].end_row; i++)
        finish_row(i < members[x].seen_end ? z[i] : 0, m[i], acc + i * shape.columns, out[at[i]], *lse[at[i]]);
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
    const float top = std::fmax(m, 0.f);
    z = z * decay(m, top, acc) + float(tile.phantoms) * std::exp2(-top);
    m = top;
  }

  // As `finish` in forward.h.
  void finish_row(float z, float m, const float *acc, Element *out, float &lse) const {
    lse = z == 0 ? -INF : m * LN2 + std::log(z);
    if (z == 0)
      std::memset(static_cast<void *>(out), 0, call.D * sizeof(Element));
    else
      write_row(acc, 1 / z, out, call.D, false);
  }

  // Scale the sums of a row whose maximum rises, and return the factor.
  float decay(float from, float to, float *acc) const {
    const float factor = from == -INF ? 0 : std::exp2(from - to);
    for (int64_t d = 0; d < shape.columns; d += WIDTH) store(acc + d, load(acc + d) * all(factor));
    return factor;
  }

  // A block's keys and values, for all rows that list it. `tile`: any of the job.
  void add_block(const Tile &tile, int64_t block, const Job &job, const Listing &listing, Parts parts) const {
    if (listing.count == 0) return;
    const Span &span = *tile.spans();
    const int64_t lowest = job.limit[listing.row[0]], highest = job.limit[listing.row[listing.count - 1]];
    int64_t at = most(block * call.size - tile.ahead, 0);
    int64_t end = least((block + 1) * call.size - tile.ahead, within(call, job.b, span.start, span.stride, span.count));
    if (highest != EVERY) end = least(end, highest + 1);
    const uint8_t *hidden = call.hidden ? call.hidden + job.b * call.M : nullptr;

    const auto K = inputs.k(job.b, job.h), V = inputs.v(job.b, job.h);
    Word *k = parts.take(PIECES * CHUNK * shape.stride), *v = parts.take(PIECES * shape.values);
    Pieces pieces{0, parts.take<Chunk>(PIECES), k, v, {}};
    while (at < end) {
      for (pieces.count = 0; pieces.count < PIECES && at < end; pieces.count++) {
        Chunk &chunk = pieces.chunks[pieces.count];
        chunk.count = 0;
        chunk.place = -1;
        for (; at < end && chunk.count < CHUNK; at++) {
          const int64_t key = span.start + at * span.stride;
          if (hidden && hidden[key]) continue;
          chunk.token[chunk.count] = key;
          chunk.first[chunk.count] = int32_t(at);
          chunk.last[chunk.count] = EVERY;
          chunk.count++;
        }
        chunk.cut = false;
        chunk.edged = at - 1 > lowest;
        shape.gather(K, chunk.token, chunk.count, k + pieces.count * CHUNK * shape.stride);
        pieces.finite[pieces.count] =
            shape.gather_values(V, chunk.token, chunk.count, v + pieces.count * shape.values);
      }
      for (int64_t first = 0; first < listing.count; first += LANES)
        add_pieces(pieces, job, {listing.row + first, least(LANES, listing.count - first)}, parts);
    }
  }

  // Chunks, for as many rows as there are lanes, or fewer.
  void add_pieces(const Pieces &pieces, const Job &job, const Listing &listing, Parts parts) const {
    const int count = int(listing.count);
    int64_t *token = parts.take<int64_t>(LANES), *q_at = parts.take<int64_t>(LANES);
    int32_t *limit = parts.take<int32_t>(LANES), *first = parts.take<int32_t>(LANES);
    int32_t *second = parts.take<int32_t>(LANES), *word = parts.take<int32_t>(CHUNK);
    float *m = parts.take(LANES), *z = parts.take(LANES), *ones = parts.take(LANES);
    float *q = parts.take(LANES * shape.stride), *acc = parts.take(LANES * shape.columns), *s = parts.take(LANES * CHUNK);
    for (int i = 0; i < LANES; i++) {
      const bool some = i < count;
      const int64_t row = listing.row[some ? i : 0];
      token[i] = job.token[row];
      q_at[i] = job.q_at[row];
      limit[i] = job.limit[row];
      m[i] = some ? job.m[row] : -INF;
      z[i] = some ? job.z[row] : 0;
      ones[i] = 1;
    }
    const Held held{count, token, limit, 0, nullptr};
    const Words words{call.query_words != nullptr, first, second, word, int32_t(call.threshold),
                      float(call.keep_scale)};
    if (words.any)
      for (int i = 0; i < count; i++)
        read_query_words(call, job.b, job.n + listing.row[i] % call.joined, token + i, 1, first + i, second + i);
    shape.gather_lanes(job.Q, q_at, count, q);
    for (int64_t i = 0; i < LANES * shape.columns; i += WIDTH) store(acc + i, zeros());

    for (int piece = 0; piece < pieces.count; piece++) {
      const Chunk &chunk = pieces.chunks[piece];
      if (words.any) read_key_words(call, job.h, chunk.token, chunk.count, word);
      Sight unused;
      const Window w = window<Side::queries, Arithmetic::ROWS>(held, 0, chunk, unused);
      attend<false>(shape, q, pieces.k + piece * CHUNK * shape.stride, pieces.v + piece * shape.values, {m, z, acc},
                    held, 0, chunk, w, unused, scaling, words, Unbiased(), s);
      if (!pieces.finite[piece])
        spread_infinities<Element>(inputs.v(job.b, job.h), call.D, held, 0, chunk, acc);
    }

    for (int i = 0; i < count; i++) {
      const int64_t row = listing.row[i];
      if (m[i] != job.m[row]) decay(job.m[row], m[i], job.acc + row * shape.columns);
      job.m[row] = m[i];
      job.z[row] = z[i];
    }
    const Rows<Float32> sums{reinterpret_cast<Float32 *>(job.acc), shape.columns};
    shape.write_sums(acc, ones, sums, listing.row, count, true);
  }
};

}  // namespace

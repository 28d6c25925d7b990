// What the kernels in forward.h and backward.h share: lines of the table (call.h), the stream of rows that a tile sees,
// what a thread keeps of it, and where rows, words and statistics lie.
#pragma once
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

  // Blocks in the list.
  int64_t blocks() const { return listed ? end_of_runs - next_to_come : 0; }

  // Fills the chunk as far as there are rows, of lists of single positions only those `below` one; false if there are
  // none.
  bool next(Chunk &chunk, int64_t below = INT64_MAX) {
    chunk.count = 0, chunk.edged = false, chunk.place = -1;
    if (listed && size == 1) return next_positions(chunk, below);
    while (chunk.count < CHUNK && (at < end || next_run())) {
      const int64_t take = least(end - at, CHUNK - chunk.count);
      if (take <= 0) continue;
      chunk.place = chunk.count == 0 && at % CHUNK == 0 ? before + at / CHUNK : -1;
      chunk.origin = chunk.place < 0 ? Origin{} : Origin{run.start + at * run.stride, run.stride, take};
      chunk.edged |= HELD == Side::queries ? at + take - 1 > run.diagonal : at < int64_t(run.diagonal) + tile.rows - 1;
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
  int64_t before = 0;       // chunks of the spans before
  Span run{};               // the span of
  int64_t at = 0, end = 0;  // these positions, which come next

  // The same of lists of single positions.
  bool next_positions(Chunk &chunk, int64_t below) {
    const Span all = tile.spans()[0];
    for (; chunk.count < CHUNK && next_to_come < end_of_runs && indices[next_to_come] < below; next_to_come++) {
      const int64_t j = indices[next_to_come], token = all.start + j * all.stride;
      chunk.edged |= HELD == Side::queries ? j > all.diagonal : j < int64_t(all.diagonal) + tile.rows - 1;
      chunk.token[chunk.count] = token;
      chunk.edge[chunk.count] = int32_t(j - all.diagonal);
      chunk.count += !(hidden && hidden[token]);
    }
    return chunk.count > 0;
  }

  bool next_run() {
    if (next_to_come >= end_of_runs) return false;
    const int64_t which = next_to_come++;
    if (!listed) before += (run.count + CHUNK - 1) / CHUNK;
    run = tile.spans()[listed ? 0 : which];
    at = listed ? indices[which] * size : 0;
    end = listed && at + size < run.count ? at + size : run.count;
    // What the diagonal hides from the whole tile is not visited.
    if (HELD == Side::queries)
      end = least(end, int64_t(run.diagonal) + tile.rows);
    else
      at = most(at, run.diagonal / CHUNK * CHUNK);
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

// As many as the spans of a tile have at most, of that many tokens.
inline int64_t chunks(const Call &call, int64_t tokens) { return call.spans * ((tokens + CHUNK - 1) / CHUNK); }

// Chunks that a thread has gathered, for the next tile that streams the same rows: a gather of rows that lie far apart
// costs as much as the products. A chunk's place names its slot, so that a look is one comparison. Places past the last
// slot share one, but for lists, which jump: they go round.
class Kept {
 public:
  struct Slot {
    int64_t b, head;
    Origin origin;
    bool known, finite;  // whether the rows are those asked for; whether all their values are finite
    float *rows;
  };

  // Room for so many chunks of so many floats; for fewer where that is more than a core's second cache.
  Kept(const Call &call, int64_t chunks, int64_t floats)
      : goes_round(call.indptr), size(round_up(floats, WIDTH)), slots(most(1, least(chunks, ROOM / size))) {}

  int64_t floats() const { return slots * (size + SLOT); }

  void clear(float *memory) const {
    for (int64_t i = 0; i < slots; i++) slot(memory, i) = {-1, -1, {}, false, false, memory + slots * SLOT + i * size};
  }

  Slot &find(float *memory, const Chunk &chunk, int64_t b, int64_t head) const {
    const int64_t last = slots - 1, place = chunk.place < 0 ? last : chunk.place;
    Slot &found = slot(memory, goes_round ? place % slots : least(place, last));
    found.known = chunk.place >= 0 && found.b == b && found.head == head && found.origin == chunk.origin;
    found.b = b, found.head = head, found.origin = chunk.origin;
    return found;
  }

 private:
  static constexpr int64_t ROOM = 3 << 17, SLOT = 2 * WIDTH;
  static_assert(sizeof(Slot) <= SLOT * sizeof(float));
  const bool goes_round;
  const int64_t size, slots;

  static Slot &slot(float *memory, int64_t i) { return *reinterpret_cast<Slot *>(memory + i * SLOT); }
};

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

// lse and delta of so many tokens; zeros behind them, `padded` of both together.
inline void read_stats(const Call &call, int64_t b, int64_t n, const int64_t *token, int count, int64_t padded,
                       float *lse, float *delta) {
  const int64_t heads = call.H * call.G;
  for (int i = count; i < padded; i++) lse[i] = delta[i] = 0;
  for (int i = 0; i < count; i++) {
    const float *stats = call.stats + 2 * ((b * call.N + token[i]) * heads + n);
    lse[i] = stats[0], delta[i] = stats[1];
  }
}

}  // namespace

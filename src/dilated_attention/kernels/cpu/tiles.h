// What the kernels in forward.h and backward.h share: lines of the table (call.h), the stream of rows that a tile sees,
// what a thread keeps of it, and where rows, words and statistics lie.
#pragma once
#include <algorithm>

#include "online.h"
#include "threads.h"

namespace {

constexpr int TILE_FIELDS = 9, SPAN_FIELDS = 5;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

struct Span {
  int32_t start, stride, count, near, far;
};

struct Tile {
  int32_t head, start, stride, rows, first, phantoms, list, ahead, within;

  const Span *spans() const { return reinterpret_cast<const Span *>(this + 1); }
};
static_assert(sizeof(Tile) == 4 * TILE_FIELDS && sizeof(Span) == 4 * SPAN_FIELDS);

inline const Tile &tile_of(const Call &call, int64_t line) {
  return *reinterpret_cast<const Tile *>(call.lines + line * (TILE_FIELDS + call.spans * SPAN_FIELDS));
}

// How many of `count` tokens, start + i * stride, lie in sample b.
inline int64_t within(const Call &call, int64_t b, int64_t start, int64_t stride, int64_t count) {
  if (!call.lengths) return count;
  return most(0, least(count, (call.lengths[b] - start + stride - 1) / stride));
}

// The rows of a tile that lie in sample b.
inline int rows_in(const Call &call, int64_t b, const Tile &tile) {
  return int(within(call, b, tile.start, tile.stride, tile.rows));
}

// The rows of a tile, in chunks: span after span, or block after block of a list.
template <Side HELD>
class Stream {
 public:
  Stream(const Call &call, const Tile &tile, int64_t b, int64_t n)
      : call(call),
        tile(tile),
        b(b),
        listed(call.indptr),
        size(call.size),
        indices(call.indices),
        end_of_runs(call.spans) {
    if (HELD == Side::queries && call.hidden) hidden = call.hidden + b * call.M;
    if (!listed) return;
    const int64_t *list = call.indptr + b * call.lsb + n / call.LH * call.lsh + tile.list;
    next_to_come = list[0], end_of_runs = list[1];
    if (next_to_come == end_of_runs) return;
    // Blocks that lie outside the span are not visited.
    const int64_t *begin = indices + list[0], *end = indices + list[1];
    const int64_t stop = tile.ahead + tile.spans()->count;
    if (tile.ahead > 0) next_to_come = std::lower_bound(begin, end, tile.ahead / size) - indices;
    if (end[-1] * size >= stop) end_of_runs = std::lower_bound(begin, end, (stop + size - 1) / size) - indices;
  }

  // Blocks in the list.
  int64_t blocks() const { return listed ? end_of_runs - next_to_come : 0; }

  // Prefetch what comes next of a list of single positions. Inlined as `prefetch` is.
  [[gnu::always_inline]] void ask() const {
    constexpr int64_t LINE = 64 / sizeof(int64_t);
    if (!listed || size != 1) return;
    for (int64_t i = next_to_come; i < least(end_of_runs, next_to_come + CHUNK); i += LINE) __builtin_prefetch(indices + i);
  }

  // Fills the chunk as far as there are rows, of lists of single positions only those `below` one; false if there are
  // none.
  bool next(Chunk &chunk, int64_t below = INT64_MAX) {
    chunk.count = 0, chunk.edged = chunk.cut = false, chunk.place = -1;
    if (listed && size == 1) return next_positions(chunk, below);
    while (chunk.count < CHUNK && (at < end || next_run())) {
      const int64_t take = least(end - at, CHUNK - chunk.count);
      if (take <= 0) continue;
      chunk.place = chunk.count == 0 && at % CHUNK == 0 ? before + at / CHUNK : -1;
      chunk.origin = chunk.place < 0 ? Origin{} : Origin{run.start + at * run.stride, run.stride, take};
      chunk.edged |= at + take - 1 > high(run) || at < low(run) + tile.rows - 1;
      add(chunk, int(take));
      at += take;
    }
    return chunk.count > 0;
  }

 private:
  const Call &call;
  const Tile &tile;
  const int64_t b;
  const bool listed;
  const int64_t size, *const indices;
  int64_t next_to_come = 0, end_of_runs;  // spans, or places in the list of blocks
  const uint8_t *hidden = nullptr;
  int64_t before = 0;       // chunks of the spans before
  Span run{};               // the span of
  int64_t at = 0, end = 0;  // these positions, which come next
  int64_t first = 0;        // of the block of these
  const uint8_t *bits = nullptr;  // its mask; null: the block is whole

  // Row i of the tile and row j of a span see one another iff low <= j - i <= high.
  static int64_t low(const Span &span) { return HELD == Side::queries ? span.far : span.near; }
  static int64_t high(const Span &span) { return HELD == Side::queries ? span.near : span.far; }

  // Write position j of a span to place i of a chunk.
  static void write(Chunk &chunk, int i, const Span &span, int64_t j) {
    chunk.token[i] = span.start + j * span.stride;
    chunk.first[i] = int32_t(j - high(span));
    chunk.last[i] = int32_t(j - low(span));
  }

  // Add the next `count` positions of the run, less those that are hidden from everybody.
  void add(Chunk &chunk, int count) const {
    const Span span = run;
    const int from = chunk.count;
    for (int i = 0; i < count; i++) write(chunk, from + i, span, at + i);
    if (call.kinds) {
      chunk.cut |= bits != nullptr;
      for (int i = 0; i < count; i++)
        chunk.bits[from + i] = bits ? bits + (at + i - first) * call.row_bytes : nullptr;
    }
    chunk.count += count;
    if (hidden) leave_out_hidden(chunk, from);
  }

  void leave_out_hidden(Chunk &chunk, int from) const {
    int count = from;
    for (int i = from; i < chunk.count; i++) {
      if (hidden[chunk.token[i]]) continue;
      chunk.token[count] = chunk.token[i];
      chunk.first[count] = chunk.first[i];
      chunk.last[count] = chunk.last[i];
      if (call.kinds) chunk.bits[count] = chunk.bits[i];
      count++;
    }
    chunk.count = count;
  }

  // `next` of lists of single positions.
  bool next_positions(Chunk &chunk, int64_t below) {
    const Span all = tile.spans()[0];
    const int64_t *const kinds = call.kinds, lowest = low(all) + tile.rows - 1, highest = high(all);
    int64_t entry = next_to_come;
    int count = 0;
    bool edged = false, cut = false;
    for (; count < CHUNK && entry < end_of_runs; entry++) {
      const int64_t j = indices[entry] - tile.ahead;
      if (j >= below) break;
      edged |= j > highest || j < lowest;
      write(chunk, count, all, j);
      if (kinds) {
        chunk.bits[count] = mask_of(entry);
        cut |= chunk.bits[count] != nullptr;
      }
      count += !(hidden && hidden[chunk.token[count]]);
    }
    next_to_come = entry;
    chunk.count = count;
    chunk.edged = edged;
    chunk.cut = cut;
    return count > 0;
  }

  // The mask of the block of an entry of the list; null: the block is whole.
  const uint8_t *mask_of(int64_t entry) const {
    const int64_t kind = call.kinds[entry];
    return kind < 0 ? nullptr : call.bits + kind * size * call.row_bytes;
  }

  bool next_run() {
    if (next_to_come >= end_of_runs) return false;
    const int64_t which = next_to_come++;
    if (!listed) before += (run.count + CHUNK - 1) / CHUNK;
    run = tile.spans()[listed ? 0 : which];
    first = listed ? indices[which] * size - tile.ahead : 0;
    if (call.kinds) bits = mask_of(which);
    const int64_t count = within(call, b, run.start, run.stride, run.count);
    end = listed ? least(first + size, count) : count;
    // What the band hides from the whole tile is not visited.
    end = least(end, high(run) + tile.rows);
    at = most(most(first, 0), low(run) / CHUNK * CHUNK);
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

// The rows of q, dout and stats of a query head, of k and v of a key-value head.
template <class Element>
struct Inputs {
  const Call &call;
  Rows<const Element> q(int64_t b, int64_t n) const { return rows(call.q, b * call.qsb + n * call.qsh, call.qsn); }
  Rows<const Element> k(int64_t b, int64_t h) const { return rows(call.k, b * call.ksb + h * call.ksh, call.ksn); }
  Rows<const Element> v(int64_t b, int64_t h) const { return rows(call.v, b * call.vsb + h * call.vsh, call.vsn); }
  Rows<const Element> dout(int64_t b, int64_t n) const {
    return rows(call.dout, b * call.dsb + n * call.dsh, call.dsn);
  }
  Rows<const float> stats(int64_t b, int64_t n) const {
    const int64_t heads = call.H * call.G;
    return {call.stats + 2 * (b * call.N * heads + n), 2 * heads};
  }

 private:
  static Rows<const Element> rows(const void *x, int64_t first, int64_t step) {
    return {static_cast<const Element *>(x) + first, step};
  }
};

// The rows of a contiguous tensor.
template <class Element>
Rows<Element> head_of(void *x, int64_t b, int64_t h, int64_t tokens, int64_t heads, int64_t D) {
  return {static_cast<Element *>(x) + (b * tokens * heads + h) * D, heads * D};
}

// body(rows, add): the rows of a gradient, of float32 where launches add to it.
template <class Element, class Body>
void with_rows(void *gradient, bool add, int64_t b, int64_t head, int64_t tokens, int64_t heads, int64_t D, Body body) {
  if (add)
    body(head_of<Float32>(gradient, b, head, tokens, heads, D), true);
  else
    body(head_of<Element>(gradient, b, head, tokens, heads, D), false);
}

// As many as the spans of a tile have at most, of that many tokens.
inline int64_t chunks(const Call &call, int64_t tokens) { return call.spans * ((tokens + CHUNK - 1) / CHUNK); }

// Whether the rows that tiles see begin later from tile to tile.
inline bool is_window(const Call &call) {
  const int32_t far = call.job_count ? tile_of(call, 0).spans()->far : 1 << 30;
  return far != 1 << 30 && far != -(1 << 30);
}

// Chunks that a thread has gathered, for the next tile that streams the same rows: a gather of rows that lie far apart
// costs as much as the products. A chunk's place names its slot, so that a look is one comparison. Places past the last
// slot share one, but for lists, which jump, and windows, which move on: they go round.
class Kept {
 public:
  struct Slot {
    int64_t b, head;
    Origin origin;
    bool known, finite;  // whether the rows are those asked for; whether all their values are finite
    float *rows;
  };

  // Make room for `chunks` chunks of `floats` floats; for fewer if they exceed a core's second cache.
  Kept(const Call &call, int64_t chunks, int64_t floats)
      : goes_round(call.indptr || is_window(call)),
        size(round_up(floats, WIDTH)),
        slots(most(1, least(chunks, ROOM / size))) {}

  int64_t floats() const { return slots * (size + SLOT); }

  void clear(float *memory) const {
    for (int64_t i = 0; i < slots; i++) slot(memory, i) = {-1, -1, {}, false, false, memory + slots * SLOT + i * size};
  }

  bool has(float *memory, const Chunk &chunk, int64_t b, int64_t head) const {
    const Slot &slot = slot_of(memory, chunk);
    return chunk.place >= 0 && slot.b == b && slot.head == head && slot.origin == chunk.origin;
  }

  Slot &find(float *memory, const Chunk &chunk, int64_t b, int64_t head) const {
    Slot &found = slot_of(memory, chunk);
    found.known = has(memory, chunk, b, head);
    found.b = b, found.head = head, found.origin = chunk.origin;
    return found;
  }

 private:
  static constexpr int64_t ROOM = 3 << 17, SLOT = 16;  // floats
  static_assert(sizeof(Slot) <= SLOT * sizeof(float));
  const bool goes_round;
  const int64_t size, slots;

  static Slot &slot(float *memory, int64_t i) { return *reinterpret_cast<Slot *>(memory + i * SLOT); }
  Slot &slot_of(float *memory, const Chunk &chunk) const {
    const int64_t last = slots - 1, place = chunk.place < 0 ? last : chunk.place;
    return slot(memory, goes_round ? place % slots : least(place, last));
  }
};

// A tile that is computed for one of the query heads of its key-value head, in one sample.
struct Task {
  const Tile *tile;
  int64_t b, g;
};

// The job, the sample and the query head (or group of heads) of one piece of work. Samples come one after another,
// because the heads of a token share pages of memory, and the tiles of a head share the rows that a thread keeps.
struct Work {
  int64_t job, b, head;

  Work(const Call &call, int64_t number, int64_t query_heads)
      : job(number / query_heads % call.job_count),
        b(number / query_heads / call.job_count),
        head(number % query_heads) {}
};

// body(task, next) for the tiles of a job. `next` is what the thread will probably compute then: a tile of the same job,
// or of the one that is as many on as there are threads. Its tile is null where there is none.
template <class Body>
void for_each_tile(const Call &call, int64_t number, int64_t query_heads, Body body) {
  const Work work(call, number, query_heads);
  const auto task = [&](const Work &work, int64_t line) { return Task{&tile_of(call, line), work.b, work.head}; };
  Task later{};
  if (number + call.threads < call.job_count * call.B * query_heads) {
    const Work then(call, number + call.threads, query_heads);
    later = task(then, call.jobs[then.job]);
  }
  const int64_t end = call.jobs[work.job + 1];
  for (int64_t line = call.jobs[work.job]; line < end && !stopped(); line++)
    body(task(work, line), line + 1 < end ? task(work, line + 1) : later);
}

// Fetch the first n elements of a row into the second cache: the first has no room for what is read and what comes next.
// Inlined: GCC leaves out calls of a function that does nothing but this.
template <class Element>
[[gnu::always_inline]] inline void prefetch(const Element *row, int64_t n) {
  constexpr int LINE = 64, SECOND_CACHE = 2;
  for (int64_t d = 0; d < n; d += LINE / int64_t(sizeof(Element))) __builtin_prefetch(row + d, 0, SECOND_CACHE);
}

// Rows that a thread will read or write soon, prefetched while it computes: else it waits for most of them.
class Ahead {
 public:
  template <class Element>
  void add(Rows<Element> x, int64_t D, const int64_t *tokens, int64_t count) {
    sets[size++] = {reinterpret_cast<const char *>(x.base),
                    x.step * int64_t(sizeof(Element)),
                    D * int64_t(sizeof(Element)),
                    tokens,
                    0,
                    0,
                    count};
  }
  template <class Element>
  void add(Rows<Element> x, int64_t D, const Tile &tile, int64_t rows) {
    add(x, D, nullptr, rows);
    sets[size - 1].start = tile.start, sets[size - 1].stride = tile.stride;
  }

  // Prefetch one of `parts` parts of them. Inlined as `prefetch` is.
  [[gnu::always_inline]] void ask(int part, int parts) const {
    for (int s = 0; s < size; s++) {
      const Set &set = sets[s];
      for (int64_t i = set.count * part / parts; i < set.count * (part + 1) / parts; i++) {
        const char *row = set.base + (set.tokens ? set.tokens[i] : set.start + i * set.stride) * set.step;
        prefetch(row, set.bytes);
      }
    }
  }

 private:
  struct Set {
    const char *base;
    int64_t step, bytes;
    const int64_t *tokens;  // or null: start + i * stride
    int64_t start, stride, count;
  } sets[8];
  int size = 0;
};

// The rows that a chunk streams, of a query head or, where tiles hold queries, of a key-value head.
template <Side HELD, class Element>
Ahead ahead_of(const Inputs<Element> &inputs, const Kept &kept, float *memory, const Chunk &chunk, int64_t b,
               int64_t head) {
  Ahead ahead;
  if (kept.has(memory, chunk, b, head)) return ahead;
  const auto add = [&](auto rows, int64_t D) { ahead.add(rows, D, chunk.token, chunk.count); };
  const int64_t D = inputs.call.D;
  if constexpr (HELD == Side::queries)
    add(inputs.k(b, head), D), add(inputs.v(b, head), D);
  else
    add(inputs.q(b, head), D), add(inputs.dout(b, head), D), add(inputs.stats(b, head), 2);
  return ahead;
}

// The rows that the tile of a task holds, and those of its first chunk.
template <Side HELD, class Element>
Ahead ahead_of(const Inputs<Element> &inputs, const Kept &kept, float *memory, const Task &task, Chunk &first) {
  if (!task.tile) return {};
  const Call &call = inputs.call;
  const int64_t b = task.b, h = task.tile->head, n = h * call.G + task.g;
  const int rows = rows_in(call, b, *task.tile);
  if (rows == 0) return {};
  const bool queries = HELD == Side::queries;
  Ahead ahead;
  if (Stream<HELD>(call, *task.tile, b, n).next(first))
    ahead = ahead_of<HELD>(inputs, kept, memory, first, b, queries ? h : n);
  ahead.add(queries ? inputs.q(b, n) : inputs.k(b, h), call.D, *task.tile, rows);
  if (call.dout) ahead.add(queries ? inputs.dout(b, n) : inputs.v(b, h), call.D, *task.tile, rows);
  return ahead;
}

// body(chunk, ahead, last) for the chunks that the tile of a task streams, in order: ahead are the rows of the chunk after
// it, or of the task that comes next.
template <Side HELD, class Element, class Body>
void for_each_chunk(const Inputs<Element> &inputs, const Kept &kept, float *memory, const Task &task, const Task &next,
                    Body body) {
  const int64_t h = task.tile->head, n = h * inputs.call.G + task.g;
  Stream<HELD> stream(inputs.call, *task.tile, task.b, n);
  Chunk chunks[2];
  int64_t number = 0;
  for (bool more = stream.next(chunks[0]); more && (++number % 16 || !stopped());) {
    Chunk &chunk = chunks[(number - 1) % 2], &following = chunks[number % 2];
    more = stream.next(following);
    Ahead ahead = more ? ahead_of<HELD>(inputs, kept, memory, following, task.b, HELD == Side::queries ? h : n)
                       : ahead_of<HELD>(inputs, kept, memory, next, following);
    body(chunk, ahead, !more);
  }
}

// Number the rows of a tile of queries where `joined` heads of each token lie side by side: row i is of the tile's token
// row[i], which is i / joined, and of head i % joined.
inline void number_rows(const Tile &tile, int joined, int64_t count, int32_t *row, int64_t *token) {
  int32_t number = 0;
  for (int64_t i = 0; i < count; number++)
    for (int head = 0; head < joined && i < count; head++, i++) {
      row[i] = number;
      token[i] = tile.start + int64_t(number) * tile.stride;
    }
}

// Where these rows lie in a tensor, from the first of the heads on: row i is number at[i] of rows `step` elements apart.
struct SideBySide {
  const int64_t *at;
  int64_t step;
};

// `token_step`, `head_step`: from one token of the tensor to the next, and from head to head. `room`: for `count` numbers.
inline SideBySide side_by_side(int joined, const int64_t *token, int64_t count, int64_t token_step, int64_t head_step,
                               int64_t *room) {
  if (joined == 1) return {token, token_step};
  for (int64_t i = 0; i < count; i++) room[i] = token[i] * token_step + i % joined * head_step;
  return {room, 1};
}

// The words of dropout of some tokens: two of a query, one of a key. Row i of queries is of head n + i % joined.
inline void read_query_words(const Call &call, int64_t b, int64_t n, const int64_t *token, int count, int32_t *first,
                             int32_t *second, int64_t joined = 1) {
  const int64_t heads = call.H * call.G;
  for (int i = 0; i < count; i++) {
    const int32_t *words = call.query_words + 2 * ((b * call.N + token[i]) * heads + n + i % joined);
    first[i] = words[0], second[i] = words[1];
  }
}

inline void read_key_words(const Call &call, int64_t h, const int64_t *token, int count, int32_t *word) {
  for (int i = 0; i < count; i++) word[i] = call.key_words[token[i] * call.kwn + h * call.kwh];
}

// Read lse and delta of `count` tokens, and fill both with zeros up to `padded`.
inline void read_stats(Rows<const float> stats, const int64_t *token, int count, int64_t padded, float *lse,
                       float *delta) {
  for (int i = count; i < padded; i++) lse[i] = delta[i] = 0;
  for (int i = 0; i < count; i++) lse[i] = stats[token[i]][0], delta[i] = stats[token[i]][1];
}

}  // namespace

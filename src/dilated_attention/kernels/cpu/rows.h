// Rows of tensors, from where they lie to where products read them, and back.
//
// Products read gathered rows densely, since rows of a power of two apart would share a few lines of the cache. A row
// is an operand of scores or of values. A number that is not finite becomes NaN in the scores, which makes p NaN
// wherever the row is seen, and 0 in the values, which then add nothing to rows that do not see it: 0 * NaN would.
#pragma once
#include <type_traits>

#include "call.h"
#include "product.h"

namespace {

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The rows of one sample and head of a tensor, by token.
template <class Element>
struct Rows {
  Element *base;
  int64_t step;
  Element *operator[](int64_t token) const { return base + token * step; }
};

// Load WIDTH words of a row that has `left` more elements, followed by their low halves if the arithmetic has them; clear
// `finite` if an element is not.
template <class Arithmetic, Role ROLE, class Element>
inline void load_words(const Element *x, int64_t left, bool &finite, Integers (&words)[Arithmetic::HALVES]) {
  if constexpr (std::is_same_v<Element, BFloat16> && Arithmetic::PER_WORD == 2) {
    words[0] = Arithmetic::template words_of<ROLE>(x, left, finite);
  } else {
    Lanes row[Arithmetic::PER_WORD];
    for (int i = 0; i < Arithmetic::PER_WORD; i++) {
      row[i] = load(x + i * WIDTH, left - i * WIDTH);
      if constexpr (ROLE == Role::scores) row[i] = infinite_or_nan_to_nan(row[i]);
      if constexpr (ROLE == Role::values) {
        const Mask odd = infinite_or_nan(row[i]);
        finite &= !any(odd);
        row[i] = only(inverse(odd), row[i]);
      }
    }
    Arithmetic::to_words(row, words);
  }
}

// The shapes of the operands of one head_dim.
template <class Arithmetic>
struct Operands {
  static constexpr int HALVES = Arithmetic::HALVES;
  int64_t D;
  int words;      // of a row of scores
  int stride;     // from one row of scores to the next, in words
  int columns;    // of a row of values
  int value_row;  // from one such row (of PER_WORD tokens) to the next, in words
  int values;     // words of a chunk's values

  explicit Operands(int64_t D)
      : D(D),
        words(int(round_up(D, Arithmetic::PER_WORD) / Arithmetic::PER_WORD)),
        stride(HALVES * int(round_up(words, Arithmetic::PER_WORD == 1 ? COLUMNS : WIDTH))),  // gather_both: one of both
        columns(int(round_up(D, COLUMNS))),
        value_row(HALVES * columns),
        values(CHUNK / Arithmetic::PER_WORD * value_row) {}

  // to[count][stride]: rows as operands of scores; rows up to a multiple of ROWS are 0.
  template <class Element>
  void gather(Rows<const Element> x, const int64_t *tokens, int count, Word *to) const {
    bool finite;
    Integers row[HALVES];
    for (int i = 0; i < count; i++)
      for (int w = 0; w < words; w += WIDTH) {
        load_words<Arithmetic, Role::scores>(x[tokens[i]] + w * Arithmetic::PER_WORD, D - w * Arithmetic::PER_WORD,
                                             finite, row);
        for (int h = 0; h < HALVES; h++) store(to + i * stride + h * stride / HALVES + w, row[h]);
      }
    for (int64_t i = int64_t(count) * stride; i < round_up(count, Arithmetic::ROWS) * stride; i += WIDTH)
      store(to + i, zeros());
  }

  // Rows of a chunk as operands of values, laid out as VALUES_BY_COLUMN says; rows up to a multiple of ROWS are 0. Says
  // whether all elements were finite.
  template <Role ROLE = Role::values, class Element>
  bool gather_values(Rows<const Element> x, const int64_t *tokens, int count, Word *to) const {
    if constexpr (!Arithmetic::VALUES_BY_COLUMN) {
      return gather_value_rows<ROLE>(x, tokens, count, to);
    } else {
      bool finite = true;
      for (int i = 0; i < count; i += 2 * WIDTH)
        for (int d = 0; d < columns; d += LANES) {
          Integers blocks[HALVES][2][WIDTH];
          for (int u = 0; u < WIDTH; u++) {
            Integers pair[HALVES][2];
            load_pair<ROLE>(x, tokens, i + 2 * u, count, d, pair, finite);
            for (int h = 0; h < HALVES; h++)
              for (int y = 0; y < 2; y++) blocks[h][y][u] = pair[h][y];
          }
          for (int h = 0; h < HALVES; h++)
            for (int y = 0; y < 2 && d + y * WIDTH < columns; y++) {
              transpose(blocks[h][y]);
              Word *at = to + ((d + y * WIDTH) * HALVES + h) * (CHUNK / 2) + i / 2;
              for (int u = 0; u < WIDTH; u++) store(at + u * HALVES * (CHUNK / 2), blocks[h][y][u]);
            }
        }
      return finite;
    }
  }

  // The same, to[count / PER_WORD][value_row].
  template <Role ROLE = Role::values, class Element>
  bool gather_value_rows(Rows<const Element> x, const int64_t *tokens, int count, Word *to) const {
    bool finite = true;
    const int padded = int(round_up(count, Arithmetic::ROWS));
    for (int i = 0; i < padded; i += Arithmetic::PER_WORD, to += value_row) {
      if constexpr (Arithmetic::PER_WORD == 1) {
        for (int d = 0; d < columns; d += WIDTH) {
          Integers row[1];
          load_words<Arithmetic, ROLE>(x[tokens[i < count ? i : 0]] + d, i < count ? D - d : 0, finite, row);
          store(to + d, row[0]);
        }
      } else {
        for (int d = 0; d < columns; d += LANES) {
          Integers pair[HALVES][2];
          load_pair<ROLE>(x, tokens, i, count, d, pair, finite);
          for (int h = 0; h < HALVES; h++)
            for (int y = 0; y < 2 && d + y * WIDTH < columns; y++) store(to + h * columns + d + y * WIDTH, pair[h][y]);
        }
      }
    }
    return finite;
  }

  // Rows as both. Says whether all elements were finite: then one operand may be both, and only `values` is written.
  template <Role ROLE = Role::values, class Element>
  bool gather_both(Rows<const Element> x, const int64_t *tokens, int count, Word *scores, Word *values) const {
    const bool finite = gather_values<ROLE>(x, tokens, count, values);
    if (scores_of(finite, scores, values) == scores) gather(x, tokens, count, scores);
    return finite;
  }
  static Word *scores_of(bool finite, Word *scores, Word *values) {
    return Arithmetic::PER_WORD == 1 && finite ? values : scores;
  }

  // to[groups][stride][LANES]: rows as the lanes of scores, word after word; lanes up to a multiple of LANES are 0.
  template <class Element>
  void gather_lanes(Rows<const Element> x, const int64_t *tokens, int count, Word *to) const {
    bool finite;
    for (int i = 0; i < round_up(count, LANES); i += WIDTH)
      for (int w = 0; w < words; w += WIDTH) {
        Integers blocks[HALVES][WIDTH];
        for (int u = 0; u < WIDTH; u++) {
          const int64_t left = i + u < count ? D - w * Arithmetic::PER_WORD : 0;
          Integers row[HALVES];
          load_words<Arithmetic, Role::scores>(x[tokens[left ? i + u : 0]] + w * Arithmetic::PER_WORD, left, finite,
                                               row);
          for (int h = 0; h < HALVES; h++) blocks[h][u] = row[h];
        }
        for (int h = 0; h < HALVES; h++) {
          transpose(blocks[h]);
          Word *at = to + (i / LANES * stride + w * HALVES + h) * LANES + i % LANES;
          for (int u = 0; u < WIDTH; u++) store(at + u * HALVES * LANES, blocks[h][u]);
        }
      }
  }

  // to[groups][columns][LANES]: sums that an earlier launch left.
  template <class Element>
  void read_sums(Rows<Element> x, const int64_t *tokens, int count, float *to) const {
    for (int i = 0; i < round_up(count, LANES); i += WIDTH)
      for (int d = 0; d < columns; d += WIDTH) {
        Integers block[WIDTH];
        for (int u = 0; u < WIDTH; u++) block[u] = i + u < count ? integers(load(x[tokens[i + u]] + d, D - d)) : all(0);
        transpose(block);
        float *at = to + (i / LANES * columns + d) * LANES + i % LANES;
        for (int u = 0; u < WIDTH; u++) store(at + u * LANES, block[u]);
      }
  }

  // x[tokens] = sums * factor, or += ; sums is [groups][columns][LANES], factor one per row.
  template <class Element>
  void write_sums(const float *sums, const float *factor, Rows<Element> x, const int64_t *tokens, int count,
                  bool add) const {
    for (int i = 0; i < count; i += WIDTH)
      for (int d = 0; d < columns; d += WIDTH) {
        const float *at = sums + (i / LANES * columns + d) * LANES + i % LANES;
        Integers block[WIDTH];
        for (int u = 0; u < WIDTH; u++) block[u] = integers(load(at + u * LANES) * load(factor + i));
        transpose(block);
        for (int u = 0; u < WIDTH && i + u < count; u++) {
          Element *row = x[tokens[i + u]] + d;
          const Lanes y = floats(block[u]);
          store(row, add ? y + load(row, D - d) : y, D - d);
        }
      }
  }

 private:
  // The words of elements d to d + 15 and d + 16 to d + 31 of rows i and i + 1, those of zeros for rows that there are
  // not.
  template <Role ROLE, class Element>
  void load_pair(Rows<const Element> x, const int64_t *tokens, int i, int count, int d, Integers (&pair)[HALVES][2],
                 bool &finite) const {
    const bool any = i < count, both = i + 1 < count;
    Integers a[HALVES], b[HALVES];
    load_words<Arithmetic, ROLE>(x[tokens[any ? i : 0]] + d, any ? D - d : 0, finite, a);
    load_words<Arithmetic, ROLE>(x[tokens[both ? i + 1 : 0]] + d, both ? D - d : 0, finite, b);
    for (int h = 0; h < HALVES; h++) Arithmetic::interleave(a[h], b[h], pair[h]);
  }
};

}  // namespace

// Rows of tensors, from where they lie to where products read them, and back.
//
// Products read gathered rows densely, since rows of a power of two apart would share a few lines of the cache. A row
// is an operand of scores or of values. A number that is not finite becomes NaN in the scores, which makes p NaN
// wherever the row is seen, and 0 in the values, which then add nothing to rows that do not see it: 0 * NaN would.
#pragma once
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

enum class Role { scores, values, plain };  // plain: values as they are

// Sixteen words of a row of which so many elements are left; says whether all of them were finite.
template <class Arithmetic, Role ROLE, class Element>
inline __m512i load_words(const Element *x, int64_t left, bool &finite) {
  if constexpr (Arithmetic::PER_WORD == 1) {
    const Lanes row = load(x, left);
    if constexpr (ROLE == Role::plain) return integers(row);
    if constexpr (ROLE == Role::scores) return integers(infinite_or_nan_to_nan(row));
    const __mmask16 odd = infinite_or_nan(row);
    finite &= odd == 0;
    return integers(_mm512_maskz_mov_ps(~odd, row));
  } else {
    const __mmask32 inside = left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1;
    const __m512i row = _mm512_maskz_loadu_epi16(inside, x), exponent = _mm512_set1_epi16(0x7f80);
    if constexpr (ROLE == Role::plain) return row;
    const __mmask32 odd = _mm512_cmpeq_epi16_mask(_mm512_and_si512(row, exponent), exponent);
    if constexpr (ROLE == Role::scores) return _mm512_mask_mov_epi16(row, odd, _mm512_set1_epi16(0x7fc0));
    finite &= odd == 0;
    return _mm512_maskz_mov_epi16(~odd, row);
  }
}

// The shapes of the operands of one head_dim.
template <class Arithmetic>
struct Operands {
  int64_t D;
  int words;    // of a row of scores
  int stride;   // from one row of scores to the next, in words
  int columns;  // of a row of values, and from one such row (of PER_WORD tokens) to the next
  int values;   // words of a chunk's values

  explicit Operands(int64_t D)
      : D(D),
        words(int(round_up(D, Arithmetic::PER_WORD) / Arithmetic::PER_WORD)),
        stride(int(round_up(words, WIDTH))),
        columns(int(round_up(D, WIDTH))),
        values(CHUNK / Arithmetic::PER_WORD * columns) {}

  // to[count][stride]: rows as operands of scores; rows up to a multiple of ROWS are 0.
  template <class Element>
  void gather(Rows<const Element> x, const int64_t *tokens, int count, Word *to) const {
    bool finite;
    for (int i = 0; i < count; i++)
      for (int w = 0; w < words; w += WIDTH)
        _mm512_store_si512(to + i * stride + w,
                           load_words<Arithmetic, Role::scores>(x[tokens[i]] + w * Arithmetic::PER_WORD,
                                                                D - w * Arithmetic::PER_WORD, finite));
    for (int64_t i = int64_t(count) * stride; i < round_up(count, Arithmetic::ROWS) * stride; i += WIDTH)
      _mm512_store_ps(to + i, all(0.f));
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
          __m512i blocks[2][WIDTH];
          for (int u = 0; u < WIDTH; u++)
            load_pair<ROLE>(x, tokens, i + 2 * u, count, d, blocks[0][u], blocks[1][u], finite);
          for (int y = 0; y < 2 && d + y * WIDTH < columns; y++) {
            transpose(blocks[y]);
            Word *at = to + (d + y * WIDTH) * (CHUNK / 2) + i / 2;
            for (int u = 0; u < WIDTH; u++) _mm512_store_si512(at + u * (CHUNK / 2), blocks[y][u]);
          }
        }
      return finite;
    }
  }

  // The same, to[count / PER_WORD][columns].
  template <Role ROLE = Role::values, class Element>
  bool gather_value_rows(Rows<const Element> x, const int64_t *tokens, int count, Word *to) const {
    bool finite = true;
    const int padded = int(round_up(count, Arithmetic::ROWS));
    for (int i = 0; i < padded; i += Arithmetic::PER_WORD, to += columns) {
      if constexpr (Arithmetic::PER_WORD == 1) {
        for (int d = 0; d < columns; d += WIDTH)
          _mm512_store_si512(to + d, i < count ? load_words<Arithmetic, ROLE>(x[tokens[i]] + d, D - d, finite)
                                               : _mm512_setzero_si512());
      } else {
        for (int d = 0; d < columns; d += LANES) {
          __m512i low, high;
          load_pair<ROLE>(x, tokens, i, count, d, low, high, finite);
          _mm512_store_si512(to + d, low);
          if (d + WIDTH < columns) _mm512_store_si512(to + d + WIDTH, high);
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

  // to[groups][stride][LANES]: rows as the lanes of scores; lanes up to a multiple of LANES are 0.
  template <class Element>
  void gather_lanes(Rows<const Element> x, const int64_t *tokens, int count, Word *to) const {
    bool finite;
    for (int i = 0; i < round_up(count, LANES); i += WIDTH)
      for (int w = 0; w < words; w += WIDTH) {
        __m512i block[WIDTH];
        for (int u = 0; u < WIDTH; u++)
          block[u] = i + u < count ? load_words<Arithmetic, Role::scores>(x[tokens[i + u]] + w * Arithmetic::PER_WORD,
                                                                          D - w * Arithmetic::PER_WORD, finite)
                                   : _mm512_setzero_si512();
        transpose(block);
        Word *at = to + (i / LANES * stride + w) * LANES + i % LANES;
        for (int u = 0; u < WIDTH; u++) _mm512_store_si512(at + u * LANES, block[u]);
      }
  }

  // to[groups][columns][LANES]: sums that an earlier launch left.
  template <class Element>
  void read_sums(Rows<Element> x, const int64_t *tokens, int count, float *to) const {
    for (int i = 0; i < round_up(count, LANES); i += WIDTH)
      for (int d = 0; d < columns; d += WIDTH) {
        __m512i block[WIDTH];
        for (int u = 0; u < WIDTH; u++)
          block[u] = i + u < count ? integers(load(x[tokens[i + u]] + d, D - d)) : _mm512_setzero_si512();
        transpose(block);
        float *at = to + (i / LANES * columns + d) * LANES + i % LANES;
        for (int u = 0; u < WIDTH; u++) _mm512_store_si512(at + u * LANES, block[u]);
      }
  }

  // x[tokens] = sums * factor, or += ; sums is [groups][columns][LANES], factor one a row.
  template <class Element>
  void write_sums(const float *sums, const float *factor, Rows<Element> x, const int64_t *tokens, int count,
                  bool add) const {
    for (int i = 0; i < count; i += WIDTH)
      for (int d = 0; d < columns; d += WIDTH) {
        const float *at = sums + (i / LANES * columns + d) * LANES + i % LANES;
        __m512i block[WIDTH];
        for (int u = 0; u < WIDTH; u++)
          block[u] = integers(_mm512_mul_ps(_mm512_load_ps(at + u * LANES), _mm512_loadu_ps(factor + i)));
        transpose(block);
        for (int u = 0; u < WIDTH && i + u < count; u++) {
          Element *row = x[tokens[i + u]] + d;
          const Lanes y = floats(block[u]);
          store(row, add ? _mm512_add_ps(y, load(row, D - d)) : y, D - d);
        }
      }
  }

 private:
  // The words of elements d to d + 31 of rows i and i + 1, those of zeros for rows that there are not.
  template <Role ROLE, class Element>
  void load_pair(Rows<const Element> x, const int64_t *tokens, int i, int count, int d, __m512i &low, __m512i &high,
                 bool &finite) const {
    const __m512i interleave = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                                                6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const bool any = i < count, both = i + 1 < count;
    const __m512i a = load_words<Arithmetic, ROLE>(x[tokens[any ? i : 0]] + d, any ? D - d : 0, finite);
    const __m512i b = load_words<Arithmetic, ROLE>(x[tokens[both ? i + 1 : 0]] + d, both ? D - d : 0, finite);
    low = _mm512_permutex2var_epi16(a, interleave, b);
    high = _mm512_permutex2var_epi16(a, _mm512_add_epi16(interleave, _mm512_set1_epi16(WIDTH)), b);
  }
};

}  // namespace

// What Python hands to an estimate of which blocks carry the attention: estimates.py fills it field by field.
//
//     means      out[b, i, h] = the mean of k over the tokens starts[i] <= t < stops[i], 0 where there are none
//     extremes   out[b, i, h] = the greatest components of k over these tokens, then the least
//     peaks      out[b, j, p, n] = the key of block j with the p-th largest score along q[b, j, n], p < peaks, and last the
//                mean of the others, 0 where there are none; values, places (B, columns, H * G, peaks): scores and tokens
//     shares     out[b, n, i, j] = sum over parts of weight * the softmax of scale * q . k + logarithm over the first
//                `seen` keys, summed over the `peaks` keys of column j
//     buckets    out[b, h, i, hash, bucket] = the sum of the weights (B, rows, H, parts) of the parts of block i of k which,
//                less q[b, i, h], lie above plane p of the hash where the bucket has bit p, and there alone; `columns`
//                hashes of `size` planes
//     collisions out (B, M, rows, H) = w * ((weight / (w k + nothing)) k^T) + scale * share, * and / by element. w is
//                exp(values - the row's largest), 0 from column `seen` (rows) on; share is w times the sum of the first
//                2^size columns of k, scaled to a sum of 1 a row; k is float32 (B, M, H, D), values (B, M, rows, H),
//                weight (B, M, rows, D)
//     forecast   out (B, M, rows, D), shares of the rows that begin with `first`, becomes its mixture with the two other forecasts
//                (routing/forecast.py); k is float32 (B, M, H, D), the shares that H `sampled` rows have seen; values
//                (B, M, 3): what the lists of each forecast have held so far
//     largest    the lists (B, M, H) of the `counts` largest of each row of k, float32 (B, M, H, D), ascending, each at its
//                `offsets` in places: first the columns starts[i] <= j < stops[i], then those below seen[i]; of equal
//                ones the first; a NaN counts as 0
//
// Rows of forecast and largest have starts, stops, seen (rows), counts and offsets (B, M, rows). With `listed`, each
// `tile` rows of each head look at listed columns only, which are whole: they see those whose keys they all see. With
// `stagger`, the keys of tile t, except the first, lie (t modulo stagger) / stagger of the distance between two keys
// further on. Legend: call.h.
#pragma once
#include <cstdint>

enum class Estimator : int64_t { means, extremes, peaks, shares, buckets, collisions, forecast, largest };

struct Estimate {
  const void *q, *k;  // (B, N, H * G, D), (B, M, H, D), rows dense; of peaks q is float32 (B, columns, H * G, D)
  float *out, *values;
  int64_t *places;
  const int64_t *starts, *stops;  // (rows)
  const float *weight;            // (rows, parts)
  const int64_t *seen;            // (rows, parts): not negative
  const float *logarithm;         // of every key, or null
  const float *planes;            // (D, columns * size)
  const int64_t *listed;          // (B, H * G, tiles, columns), ascending, or null
  const int64_t *counts, *offsets, *sampled;
  int64_t B, N, M, H, G, D, qsb, qsn, qsh, ksb, ksn, ksh;
  int64_t rows, parts, columns, peaks, size, tile, stagger, first, threads;  // size: tokens of a block
  double scale;    // of the scores; in a forecast, how fast its weights follow
  double nothing;  // added to what all columns hold
};

// Return 0, or 1 if memory ran out, or 2 if the set does not serve this element type.
int estimate_avx2(Estimator estimator, int64_t type, const Estimate &call);
int estimate_avx512(Estimator estimator, int64_t type, const Estimate &call);
int estimate_neon(Estimator estimator, int64_t type, const Estimate &call);

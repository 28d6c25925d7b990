// What Python hands to a kernel: plain C, one structure for all kernels. backends/cpu.py fills it field by field.
//
// The work is a table of int32 lines, one per tile, made by backends/tiles.py and described in kernels/strided.py:
//
//     head  start  stride  rows  first  phantoms  list  ahead  within  the tile: tokens start + i * stride, i < rows
//     start  stride  count  near  far                                  span 1:   tokens start + j * stride, j < count
//     ...                                                              further spans
//
// Row i of a tile of queries sees key j of a span iff i + far <= j <= i + near; row i of a tile of keys is seen by query j
// iff i + near <= j <= i + far. 2^30 and -2^30 hide nothing. With lists of blocks (indptr), they thin out the one span;
// its position j is position ahead + j of the lists. Row i of the tile is position within + i of its block, and has that
// number in masks of bits.
//
// Legend, as in kernels/online.py and kernels/strided.py.
//   q, k, v, dout    queries, keys, values, gradient of out
//   s, p, ds         scores, probabilities, gradient of the scores
//   m, z, acc        running softmax: maximum, denominator, numerator;  out = acc / z,  lse = m + log z
//   b, h, g, n       sample, KV head, query head within the KV head, query head h * G + g
//   B, H, G, D       samples, KV heads, query heads per KV head, head_dim
//   N, M             tokens of q and of k
//   .sb, .sn, .sh    strides of sample, token and head, in elements
#pragma once
#include <cstdint>

// The numbers of the scores, as in scores.py; 0 turns softcap, dropout and the bias off.
struct Scores {
  double scale, softcap, dropout_p, bias;
};

struct Call {
  const void *q, *k, *v, *dout;     // (B, N or M, heads, D), rows dense
  void *out;                        // (B, N, H * G, D), contiguous
  float *lse;                       // (B, N, H * G), natural logarithm
  const float *dlse;                // as lse, or null
  float *stats;                     // (B, N, H * G, 2): lse in units of log 2 and delta = rowsum(dout * out) - dlse
  void *dq, *dk, *dv;               // contiguous; float32 where the call adds to them
  const int32_t *lines;             // the table
  const int64_t *jobs;              // job x is lines jobs[x] to jobs[x + 1] - 1, which one thread computes in order
  const int64_t *indptr, *indices;  // lists of blocks, or null
  const int64_t *kinds;             // for each of `indices` the number of its mask, -1 for a whole block; or null
  const uint8_t *bits;              // masks: row_bytes for each streamed position of a block, a bit for each row held
  const uint8_t *hidden;            // (B, M): keys that nobody sees, or null
  const int64_t *lengths;           // (B): tokens of each sample, later rows see nothing and are not seen; or null
  const int32_t *query_words, *key_words;  // dropout (backends/dropout.py): (B, N, H * G, 2) and by kwn, kwh; or null
  const float *bias;                // entries of a bias (bias.h), or null
  void *bias_sums;                  // sums of its gradient, float64, or float32 by row; or null
  const float *query_at, *key_at;   // coordinates (rows, axes) of a bias by distance
  int64_t B, N, M, H, G, D;
  int64_t qsb, qsn, qsh, ksb, ksn, ksh, vsb, vsn, vsh, dsb, dsn, dsh;
  int64_t job_count, spans, own;  // spans of a line; the most rows of a tile
  int64_t lsb, lsh, LH, size;     // lists: strides of indptr, query heads that share a list, positions of a block
  int64_t row_bytes, kwn, kwh, threshold;
  int64_t add_dq, add_dkdv;  // whether launches add up, in float32; else one launch writes, in the dtype of q
  int64_t few;               // whether tiles have few rows (few.h); `own` is then the most rows of a job
  int64_t joined;            // query heads that lie side by side in tiles of queries: G if they share their lists, or 1
  int64_t by_block;          // whether by_block.h runs the forward; `own` is then the most rows of a job
  int64_t threads;
  int64_t bias_kind, bias_batch, bias_head, bias_row, bias_at;  // strides of entries; see bias.h
  int64_t column_of_key, column_of_query, first_column, columns;
  int64_t axes, query_at_batch, key_at_batch;
  int64_t bias_shared;  // whether two threads may add to one sum of a row
  double keep_scale;  // 1 / (1 - dropout_p)
  Scores scores;
};

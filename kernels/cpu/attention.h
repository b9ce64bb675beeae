// Paged attention: out = softmax(scale q k^T) v over a sequence's blocks, read where they lie; nothing is gathered.
// Online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022): running maximum m, sum l and accumulator.
//   one query:    4 d FLOPs a key and head; bytes: each key and value once for the heads that share it. Memory-bound.
//   many queries: tiles of KEYS keys are copied out once (transposed for q k^T) and serve all rows of a query tile. Compute-bound.
// Keys are taken in runs that begin at multiples of the run's length in the sequence, and both kernels add in one order: a row's bits
// are the same whichever of them computes it, in whatever chunk and batch.
//   score:   lane j of a vector takes d = j, j + W, ...; then the lanes are added (sum8).
//   softmax: key t of a run adds to partial sum t % W; then those are added by halves (sum).
//   values:  one chain of fused multiply-adds in the order of the keys.

constexpr int64_t KEYS = 64;  // in a run

template <class T>
struct KeyValues {  // where one sequence's keys and values of one layer lie
  const T* pool;
  const int32_t* table;
  int64_t block_size, token_stride, layer_offset, block_stride, value_offset;

  KeyValues(const AttentionArgs& g, int64_t seq)
      : pool(static_cast<const T*>(g.pool)), table(g.block_tables + seq * g.table_stride), block_size(g.block_size),
        token_stride(g.num_kv_heads * g.head_dim), layer_offset(g.layer * 2 * block_size * token_stride),
        block_stride(g.num_layers * 2 * block_size * token_stride), value_offset(block_size * token_stride) {}
  const T* key(int64_t position) const {
    return pool + table[position / block_size] * block_stride + layer_offset + position % block_size * token_stride;
  }
  // Where the keys from `position` to the end of its run lie, `head_offset` elements into each; returns how many.
  int64_t run(int64_t position, int64_t length, int64_t head_offset, int64_t* offsets) const {
    const int64_t stop = smaller(length, (position / KEYS + 1) * KEYS);
    for (int64_t i = position; i < stop; ++i) offsets[i - position] = key(i) - pool + head_offset;
    return stop - position;
  }
};

// Sums of the lanes of eight vectors.
static inline void sum8(const vf* x, float* out) {
#if VECTOR_BYTES >= 32
  __m256 h[8];
  for (int i = 0; i < 8; ++i) {
#if VECTOR_BYTES == 64
    h[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)x[i]), _mm512_extractf32x8_ps((__m512)x[i], 1));
#else
    h[i] = (__m256)x[i];
#endif
  }
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(h[4], h[5]), _mm256_hadd_ps(h[6], h[7]));
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
#else
  for (int i = 0; i < 8; ++i) out[i] = sum(x[i]);
#endif
}

// The rows' partial sums, in the order of sum().
static inline vf sum_by_halves(vf* x) {
  for (int64_t half = W / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// The running softmax of one row: p becomes exp(scores - new maximum), padded with 0 to a multiple of W.
static inline float update_row(float& row_m, float& row_l, float* scores, int64_t count) {
  const int64_t padded = (count + W - 1) / W * W;
  for (int64_t t = count; t < padded; ++t) scores[t] = -INFINITY;
  vf top = splat(-INFINITY);
  for (int64_t t = 0; t < padded; t += W) top = vmax(load(scores + t), top);
  const float m = largest(vmax(top, splat(row_m)));
  if (m == -INFINITY) {  // nothing visible so far
    for (int64_t t = 0; t < padded; t += W) store(scores + t, vf{});
    return 1.0f;
  }
  vf total = {};
  for (int64_t t = 0; t < padded; t += W) {
    const vf p = vexp(load(scores + t) - m);
    store(scores + t, p);
    total += p;
  }
  const float rescale = row_m == m ? 1.0f : row_m == -INFINITY ? 0.0f : vexp(splat(row_m - m))[0];
  row_l = row_l * rescale + sum(total);
  row_m = m;
  return rescale;
}

template <class T>
static inline void write_rows(const float* acc, const float* l, int64_t count, int64_t head_dim, T* out) {
  for (int64_t g = 0; g < count; ++g)
    for (int64_t d = 0; d < head_dim; d += W) store(out + g * head_dim + d, load(acc + g * head_dim + d) * (1.0f / l[g]));
}

static inline void widen_row(const float* from, float* to, int64_t n, float scale) {
  for (int64_t d = 0; d < n; d += W) store(to + d, load(from + d) * scale);
}
static inline void widen_row(const bf16* from, float* to, int64_t n, float scale) {
  for (int64_t d = 0; d < n; d += W) store(to + d, load(from + d) * scale);
}

struct Scratch {  // kept by its thread from call to call
  Floats q, acc, scores, keys, values, m, l, rescale;
};

// Asks for the rows of a run one after the other, in the order in which they lie, a few lines at a time.
template <class T>
struct Ahead {
  const T* base;
  const int64_t* offsets;
  int64_t left, row_bytes, at = 0;

  inline __attribute__((always_inline)) void step(int64_t num_bytes) {
    if (left == 0) return;
    const char* row = reinterpret_cast<const char*>(base + *offsets) + at;
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(row + i);
    at += num_bytes;
    if (at >= row_bytes) { at = 0; ++offsets; --left; }
  }
};

// One query token, all key-value heads of the item, in runs of KEYS keys. In the softmax rows (query heads) are the lanes. A run is gone
// through head by head with sums in registers. That walk strides through memory, so the run is asked for one stage ahead in a straight one:
// values while scores are computed, the next run's keys while values are added.
template <class T>
struct OneQuery {
  const AttentionArgs& g;
  const KeyValues<T> kv;
  const int64_t D, group, num_heads, rows, lanes, length;
  int64_t offsets[2][KEYS], *now = offsets[0], *next = offsets[1], count, next_count;
  float *queries, *acc, *scores, *m, *l, *rescale;
  vf* sums;  // [KEYS][lanes]
  Ahead<T> ahead;

  OneQuery(const AttentionArgs& g, const AttentionItem& item, Scratch& s)
      : g(g), kv(g, item.seq), D(g.head_dim), group(g.num_heads / g.num_kv_heads), num_heads(item.num_heads), rows(num_heads * group),
        lanes((rows + 15) / 16 * 16), length(g.seq_lens[item.seq]) {
    queries = s.q.reserve(rows * D); acc = s.acc.filled(rows * D, 0.0f); scores = s.scores.reserve(KEYS * lanes);
    m = s.m.filled(lanes, -INFINITY); l = s.l.filled(lanes, 0.0f); rescale = s.rescale.reserve(lanes);
    sums = reinterpret_cast<vf*>(s.values.filled(KEYS * lanes * W, 0.0f));
  }

  // sums of G query heads from row on with N keys from t on.
  template <int G, int N>
  inline __attribute__((always_inline)) void dot(int64_t t, int64_t row, int64_t head) {
    const float* q = queries + row * D;
    const T* keys[N];
    vf total[N][G] = {};
    for (int n = 0; n < N; ++n) {
      keys[n] = kv.pool + now[t + n] + head * D;
      ahead.step(D * int64_t(sizeof(T)));
    }
    for (int64_t d = 0; d < D; d += W) {
      vf x[G];
#pragma GCC unroll 4
      for (int i = 0; i < G; ++i) x[i] = load(q + i * D + d);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const vf key = load(keys[n] + d);
#pragma GCC unroll 4
        for (int i = 0; i < G; ++i) total[n][i] += key * x[i];
      }
    }
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < G; ++i) sums[(t + n) * lanes + row + i] = total[n][i];
  }

  template <int G, int N>
  void dot_all(int64_t row, int64_t head) {
    int64_t t = 0;
    for (; t + N <= count; t += N) dot<G, N>(t, row, head);
    for (; t < count; ++t) dot<G, 1>(t, row, head);
  }

  void score_run() {  // scores [count][lanes]
    for (int64_t head = 0; head < num_heads; ++head) {
      int64_t row = head * group, left = group;
      for (; left > 4; left -= 4, row += 4) dot_all<4, 2>(row, head);
      if (left == 4) dot_all<4, 2>(row, head);
      if (left == 3) dot_all<3, 3>(row, head);
      if (left == 2) dot_all<2, 4>(row, head);
      if (left == 1) dot_all<1, 4>(row, head);
    }
    for (int64_t i = 0; i < count * lanes; i += 8) sum8(sums + i, scores + i);
  }

  void update(int64_t position) {  // scores become exp(scores - new maximum); the first key's position
    for (int64_t row = 0; row < lanes; row += W) {
      const vf before = load(m + row);
      vf top = before, totals[W] = {};
      for (int64_t t = 0; t < count; ++t) top = vmax(load(scores + t * lanes + row), top);
      for (int64_t t = 0; t < count; ++t) {
        const vf p = vexp(load(scores + t * lanes + row) - top);
        store(scores + t * lanes + row, p);
        totals[(position + t) % W] += p;
      }
      const vf scale = vexp(before - top);
      store(m + row, top);
      store(l + row, load(l + row) * scale + sum_by_halves(totals));
      store(rescale + row, scale);
    }
  }

  // acc = rescale acc + scores values, G query heads from row on, NV vectors from d on.
  template <int G, int NV>
  inline __attribute__((always_inline)) void add(int64_t row, int64_t head, int64_t d) {
    vf total[G][NV];
#pragma GCC unroll 4
    for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) total[i][j] = load(acc + (row + i) * D + d + j * W) * rescale[row + i];
    for (int64_t t = 0; t < count; ++t) {
      const T* value = kv.pool + kv.value_offset + now[t] + head * D + d;
      ahead.step(NV * W * int64_t(sizeof(T)));
      vf v[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) v[j] = load(value + j * W);
#pragma GCC unroll 4
      for (int i = 0; i < G; ++i) {
        const vf p = splat(scores[t * lanes + row + i]);
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) total[i][j] += p * v[j];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) store(acc + (row + i) * D + d + j * W, total[i][j]);
  }

  template <int G, int NV>
  void add_all(int64_t row, int64_t head) {
    int64_t d = 0;
    for (; d + NV * W <= D; d += NV * W) add<G, NV>(row, head, d);
    for (; d < D; d += W) add<G, 1>(row, head, d);
  }

  void add_run() {
    for (int64_t head = 0; head < num_heads; ++head) {
      int64_t row = head * group, left = group;
      for (; left > 4; left -= 4, row += 4) add_all<4, 2>(row, head);
      if (left == 4) add_all<4, 2>(row, head);
      if (left == 3) add_all<3, 4>(row, head);
      if (left == 2) add_all<2, 4>(row, head);
      if (left == 1) add_all<1, 4>(row, head);
    }
  }

  void run(const AttentionItem& item) {
    const int64_t row0 = g.query_start_loc[item.seq];
    const T* q = static_cast<const T*>(g.q) + row0 * g.q_stride + item.head * group * D;
    for (int64_t i = 0; i < rows; ++i) widen_row(q + i * D, queries + i * D, D, g.scale);
    int64_t t = larger(0, length - g.window);
    for (next_count = kv.run(t, length, item.head * D, next); next_count; t += count) {
      int64_t* const used = now;
      now = next;
      next = used;
      count = next_count;
      next_count = t + count < length ? kv.run(t + count, length, item.head * D, next) : 0;
      ahead = {kv.pool + kv.value_offset, now, count, num_heads * D * int64_t(sizeof(T))};
      score_run();
      update(t);
      ahead = {kv.pool, next, next_count, num_heads * D * int64_t(sizeof(T))};
      add_run();
    }
    write_rows(acc, l, rows, D, static_cast<T*>(g.out) + (row0 * g.num_heads + item.head * group) * D);
  }
};

// A tile [MR][NV vectors] of scores; keys transposed, q [MR][head_dim]. Lanes are summed apart, then added as sum8 adds them.
template <int MR, int NV>
static inline __attribute__((always_inline)) void sum_lane(int64_t lane, const float* q, int64_t head_dim, const float* keys,
                                                           vf (&acc)[MR][NV]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = vf{};
  for (int64_t d = lane; d < head_dim; d += W) {
    vf key[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) key[j] = load(keys + d * KEYS + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const vf x = splat(q[i * head_dim + d]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] += key[j] * x;
    }
  }
}

constexpr int kLeaves = W == 8 ? 8 : W / 2;  // sum8 first adds the halves of a vector of 4 or 16

template <int MR, int NV, int kLeaf, int kCount>
static inline __attribute__((always_inline)) void sum_lanes(const float* q, int64_t head_dim, const float* keys, vf (&acc)[MR][NV]) {
  if constexpr (kCount == 1 && kLeaves == W) return sum_lane<MR, NV>(kLeaf, q, head_dim, keys, acc);
  else {
    vf left[MR][NV];
    if constexpr (kCount == 1) {
      sum_lane<MR, NV>(kLeaf, q, head_dim, keys, left);
      sum_lane<MR, NV>(kLeaf + kLeaves, q, head_dim, keys, acc);
    } else {
      sum_lanes<MR, NV, kLeaf, kCount / 2>(q, head_dim, keys, left);
      sum_lanes<MR, NV, kLeaf + kCount / 2, kCount / 2>(q, head_dim, keys, acc);
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] += left[i][j];
  }
}

template <int MR>
static void score_rows(const float* q, int64_t head_dim, const float* keys, float* scores) {
  constexpr int NV = 2;
  for (int64_t t = 0; t < KEYS; t += NV * W) {
    vf acc[MR][NV];
    sum_lanes<MR, NV, 0, kLeaves>(q, head_dim, keys + t, acc);
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < NV; ++j) store(scores + i * KEYS + t + j * W, acc[i][j]);
  }
}

// scores[rows][KEYS] = q keys.
static inline void score_strip(int rows, const float* q, int64_t head_dim, const float* keys, float* scores) {
  switch (rows) {
#define ROWS(R) case R: return score_rows<R>(q, head_dim, keys, scores);
    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
  }
}
static inline void value_strip(int rows, const float* p, const float* v, int64_t head_dim, const float* scale, float* acc) {
  int64_t d = 0;
#define ROWS(R, NV) case R: multiply_tile<R, NV, true>(p, KEYS, 1, v + d, head_dim, KEYS, scale, acc + d, head_dim); break;
  for (; d + 2 * W <= head_dim; d += 2 * W) switch (rows) { ROWS(1, 2) ROWS(2, 2) ROWS(3, 2) ROWS(4, 2) ROWS(5, 2) ROWS(6, 2) }
  for (; d < head_dim; d += W) switch (rows) { ROWS(1, 1) ROWS(2, 1) ROWS(3, 1) ROWS(4, 1) ROWS(5, 1) ROWS(6, 1) }
#undef ROWS
}

// Copies KEYS keys (transposed) and values from position t on; 0 where the sequence has ended.
template <class T>
static void load_tile(const KeyValues<T>& kv, int64_t head_offset, int64_t t, int64_t length, int64_t D, float* keys, float* values) {
  for (int64_t i = 0; i < KEYS; ++i) {
    if (t + i >= length) {
      for (int64_t d = 0; d < D; ++d) keys[d * KEYS + i] = values[i * D + d] = 0.0f;
      continue;
    }
    const T* key = kv.key(t + i) + head_offset;
    for (int64_t d = 0; d < D; ++d) keys[d * KEYS + i] = widen(key[d]);
    widen_row(key + kv.value_offset, values + i * D, D, 1.0f);
  }
}

// Many query tokens, one key-value head: rows are (token, query head of the group).
template <class T>
static void attend_many(const AttentionArgs& g, const AttentionItem& item, Scratch& s) {
  constexpr int STRIP = 6;
  const KeyValues<T> kv(g, item.seq);
  const int64_t D = g.head_dim, group = g.num_heads / g.num_kv_heads, rows = item.num_queries * group;
  const int64_t row0 = int64_t(g.query_start_loc[item.seq]) + item.query, length = g.seq_lens[item.seq];
  const int64_t first = length - (g.query_start_loc[item.seq + 1] - g.query_start_loc[item.seq]) + item.query;  // position of row 0
  float *queries = s.q.reserve(rows * D), *acc = s.acc.filled(rows * D, 0.0f), *scores = s.scores.reserve(STRIP * KEYS);
  float *m = s.m.filled(rows, -INFINITY), *l = s.l.filled(rows, 0.0f);
  float *keys = s.keys.reserve(KEYS * D), *values = s.values.reserve(KEYS * D);
  const T* q = static_cast<const T*>(g.q) + row0 * g.q_stride + item.head * group * D;
  for (int64_t r = 0; r < rows; ++r) widen_row(q + r / group * g.q_stride + r % group * D, queries + r * D, D, g.scale);
  const int64_t end = first + item.num_queries, begin = larger(0, first + 1 - g.window) / KEYS * KEYS;
  for (int64_t t = begin; t < end; t += KEYS) {
    load_tile(kv, item.head * D, t, length, D, keys, values);
    for (int64_t r = 0; r < rows; r += STRIP) {
      const int64_t strip = smaller(STRIP, rows - r);
      if (first + (r + strip - 1) / group < t) continue;                  // all of it lies before this tile
      if (first + r / group - g.window >= t + KEYS - 1) continue;         // or has moved past it
      score_strip(int(strip), queries + r * D, D, keys, scores);
      float rescale[STRIP];
      for (int64_t i = 0; i < strip; ++i) {
        float* row = scores + i * KEYS;
        const int64_t position = first + (r + i) / group;
        for (int64_t j = larger(0, position + 1 - t); j < KEYS; ++j) row[j] = -INFINITY;
        for (int64_t j = smaller(KEYS, position + 1 - g.window - t) - 1; j >= 0; --j) row[j] = -INFINITY;
        rescale[i] = update_row(m[r + i], l[r + i], row, KEYS);
      }
      value_strip(int(strip), scores, values, D, rescale, acc + r * D);
    }
  }
  T* out = static_cast<T*>(g.out) + (row0 * g.num_heads + item.head * group) * D;
  for (int64_t i = 0; i < item.num_queries; ++i)
    write_rows(acc + i * group * D, l + i * group, group, D, out + i * g.num_heads * D);
}

static void attention(const AttentionArgs& g, const AttentionItem* items, int64_t first, int64_t last) {
  static thread_local Scratch scratch;
  for (int64_t i = first; i < last; ++i) {
    const int32_t* start = g.query_start_loc + items[i].seq;
    const bool one = start[1] - start[0] == 1;
    if (g.dtype == kFloat32) one ? OneQuery<float>(g, items[i], scratch).run(items[i]) : attend_many<float>(g, items[i], scratch);
    else one ? OneQuery<bf16>(g, items[i], scratch).run(items[i]) : attend_many<bf16>(g, items[i], scratch);
  }
}

// Paged attention: out = softmax(scale q k^T) v over a sequence's blocks, read where they lie; nothing is gathered.
// Online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022): running maximum m, sum l and accumulator.
//   one query:    4 d FLOPs a key and head; bytes: each key and value once for the heads that share it. Memory-bound.
//   many queries: tiles of KEYS keys are copied out once (transposed for q k^T) and serve all rows of a query tile. Compute-bound.
// Keys are taken in runs that begin at multiples of the run's length in the sequence, and both kernels add in one order: a row's bits
// are the same whichever of them computes it, in whatever chunk and batch.
//   score:   one chain of multiply-adds in the order of d. Keys lie in the lanes, so they are transposed first.
//   softmax: key t of a run adds to partial sum t % W; then those are added by halves (sum).
//   values:  one chain of multiply-adds in the order of the keys.
// A head's sink is a score beside those of the keys, with no value.
// With bfloat16 units both products are theirs: two d, or two keys, a step; probabilities are rounded to bfloat16, all sums are float32.

constexpr int64_t KEYS = 64;  // in a run
constexpr int SCORED = VECTOR_BYTES == 64 ? 4 : 2;  // vectors of keys that are scored at once: what the register file holds

// What a query (by words of its keys) and probabilities are multiplied as: see multiply_tile.
template <class T>
struct As { using Query = float; using Weight = float; };
template <>
struct As<bf16> {
#if BF16_UNITS
  using Query = Pair; using Weight = Pair;
#else
  using Query = Two; using Weight = float;
#endif
};

static inline bool one_query(const AttentionArgs& g, const AttentionItem& item) {
  return g.query_start_loc[item.seq + 1] - g.query_start_loc[item.seq] == 1;
}

static inline const float* sinks_of(const AttentionArgs& g, const AttentionItem& item) {
  return g.sinks ? g.sinks + item.head * (g.num_heads / g.num_kv_heads) : nullptr;
}

template <class T>
struct KeyValues {  // where one sequence's keys and values of one layer and head lie: a run of each in a block
  const T* base;           // of block 0
  const int32_t* table;
  int64_t row, block_size, block_stride, value_offset;

  KeyValues(const AttentionArgs& g, const AttentionItem& item)
      : table(g.block_tables + item.seq * g.table_stride), row(row_length<T>(g.head_dim)), block_size(g.block_size) {
    const int64_t run = block_size * row;
    const int64_t plane = g.num_kv_heads * run;
    value_offset = g.planes == 2 ? plane : 0;
    block_stride = g.num_layers * g.planes * plane;
    base = static_cast<const T*>(g.pool) + g.layer * g.planes * plane + item.head * run;
  }
  const T* key(int64_t position) const { return base + table[position / block_size] * block_stride + position % block_size * row; }
};

template <class T>
struct Run {  // the keys [begin, end) of a run, from position `start` on
  int64_t start = 0, begin = 0, end = 0, value_offset = 0;
  const T* keys[KEYS];  // in the room of one that is not there lies another

  void find(const KeyValues<T>& kv, int64_t position, int64_t length) {  // those from `position` on
    start = position / KEYS * KEYS;
    begin = position - start;
    end = smaller(length - start, KEYS);
    value_offset = kv.value_offset;
    for (int64_t i = begin; i < end;) {
      const T* key = kv.key(start + i);
      for (const int64_t stop = smaller(end, i + kv.block_size - (start + i) % kv.block_size); i < stop; ++i, key += kv.row) keys[i] = key;
    }
    for (int64_t i = 0; i < begin; ++i) keys[i] = keys[begin];
    for (int64_t i = end; i < KEYS; ++i) keys[i] = keys[end - 1];
  }
};

// Asks for a run's keys, then for its values, some cache lines at a time: evenly, for L1 has few open misses, and to L2.
template <class T>
struct Ahead {
  const Run<T>* run = nullptr;
  uint64_t row = 2 * KEYS;  // the next one
  int64_t row_bytes, left = 0;  // of the row at hand
  const char* at = nullptr;

  bool is_done() const { return row == 2 * KEYS && left <= 0; }
  inline __attribute__((always_inline)) void step(int lines) {
#pragma GCC unroll 4
    for (int i = 0; i < lines; ++i, at += 64, left -= 64) {
      if (left <= 0) {
        if (row == 2 * KEYS) return;
        at = reinterpret_cast<const char*>(run->keys[row % KEYS] + (row < KEYS ? 0 : run->value_offset));
        left = row_bytes;
        ++row;
      }
      __builtin_prefetch(at, 0, 2);
    }
  }
};

// The runs of all items with one query, one after the other. While one is used, memory is asked for the next one.
template <class T>
struct Runs {
  const AttentionArgs& g;
  const AttentionItem *item, *const last;
  int64_t position = -1;  // of the item's next run; -1: its first one
  Run<T> runs[2], *now = runs, *following = runs + 1;
  Ahead<T> ahead;

  Runs(const AttentionArgs& g, const AttentionItem* first, const AttentionItem* last) : g(g), item(first), last(last) {
    ahead.row_bytes = row_length<T>(g.head_dim) * int64_t(sizeof(T));
    advance();
  }
  const Run<T>& advance() {
    while (!ahead.is_done()) ahead.step(1);
    Run<T>* const used = now;
    now = following;
    following = used;
    while (item != last && !one_query(g, *item)) ++item;
    if (item == last) return *now;
    const int64_t length = g.seq_lens[item->seq];
    following->find(KeyValues<T>(g, *item), position < 0 ? larger(0, length - g.window) : position, length);
    ahead.run = following;
    ahead.row = 0;
    position = following->start + following->end;
    if (position == length) { position = -1; ++item; }
    return *now;
  }
};

// out[j][i] = rows[i][word + j] for eight by eight words; rows of `out` are KEYS apart.
static inline void transpose8(const uint32_t* const* rows, int64_t word, uint32_t* out) {
#if VECTOR_BYTES >= 32
  __m256i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + word));
  for (int i = 0; i < 8; i += 2) { b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]); b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]); }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * KEYS), _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (i + 4) * KEYS), _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) out[j * KEYS + i] = rows[i][word + j];
#endif
}

// words[j][i] = keys[i][j] for eight keys; rows of `words` are KEYS apart.
template <class F>
static inline void transpose_words(const uint32_t* const* keys, int64_t num_words, uint32_t* words, F&& between) {
  int64_t word = 0;
  for (; word + 8 <= num_words; word += 8) {
    between();
    transpose8(keys, word, words + word * KEYS);
  }
  for (; word < num_words; ++word)
    for (int64_t i = 0; i < 8; ++i) words[word * KEYS + i] = keys[i][word];
}

// Vectors of values as weights multiply them: of one key, or two keys interleaved.
static inline vf load_values(const float* key, const float*) { return load(key); }
static inline vf load_values(const bf16* key, const bf16* next) {
#if BF16_UNITS
  const vu first = (vu)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key)));
  const vu second = (vu)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
  return (vf)(first | second << 16);  // compilers make four times the instructions of the plain conversion
#else
  return load(key);
#endif
}

// Probabilities as weights.
static inline const float* as_weights(const float* scores, int64_t, float*) { return scores; }
static inline const Pair* as_weights(const float* scores, int64_t count, Pair* out) {
#if BF16_UNITS
  for (int64_t i = 0; i < count; i += W)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i / 2), (__m256i)_mm512_cvtneps_pbh((__m512)load(scores + i)));
#endif
  return out;
}

// scale s becomes softcap tanh(scale s / softcap), as 1 - 2 / (e^2x + 1); what is not visible, -infinity, stays.
static inline void cap_scores(float* scores, int64_t count, float scale, float softcap) {
  const float inner = 2.0f * scale / softcap, outer = softcap / scale;
  for (int64_t t = 0; t < count; t += W) {
    const vf s = load(scores + t);
    store(scores + t, select(s == -INFINITY, s, outer - 2.0f * outer / (vexp(s * inner) + 1.0f)));
  }
}

// The running softmax of one row: p becomes exp(scale (scores - new maximum)), padded with 0 to a multiple of W.
static inline float update_row(float& row_m, float& row_l, float* scores, int64_t count, const AttentionArgs& g) {
  const int64_t padded = (count + W - 1) / W * W;
  const float scale = g.scale;
  for (int64_t t = count; t < padded; ++t) scores[t] = -INFINITY;
  if (g.softcap != 0.0f) cap_scores(scores, padded, scale, g.softcap);
  vf top = splat(-INFINITY);
  for (int64_t t = 0; t < padded; t += W) top = vmax(load(scores + t), top);
  const float m = largest(vmax(top, splat(row_m)));
  if (m == -INFINITY) {  // nothing visible so far
    for (int64_t t = 0; t < padded; t += W) store(scores + t, vf{});
    return 1.0f;
  }
  vf total = {};
  for (int64_t t = 0; t < padded; t += W) {
    const vf p = vexp((load(scores + t) - m) * scale);
    store(scores + t, p);
    total += p;
  }
  const float rescale = row_m == m ? 1.0f : row_m == -INFINITY ? 0.0f : vexp(splat((row_m - m) * scale))[0];
  row_l = row_l * rescale + sum(total);
  row_m = m;
  return rescale;
}

// `sinks`: of the rows' heads, or null. A sink adds to the sum l alone, and last.
template <class T>
static inline void write_rows(const float* acc, const float* l, const float* m, const float* sinks, float scale, int64_t count,
                              int64_t head_dim, T* out) {
  for (int64_t g = 0; g < count; ++g) {
    const float total = sinks ? l[g] + vexp(splat(sinks[g] - m[g] * scale))[0] : l[g];
    for (int64_t d = 0; d < head_dim; d += W) store(out + g * head_dim + d, load(acc + g * head_dim + d) * (1.0f / total));
  }
}

// A row of a query.
template <class T>
static inline void take_query(const T* from, float* to, int64_t n) {
  for (int64_t d = 0; d < n; d += W) store(to + d, load(from + d));
}
template <class T>
static inline void take_query(const T* from, Two* to, int64_t n) { take_query(from, &to->first, n); }
static inline void take_query(const bf16* from, Pair* to, int64_t n) { std::memcpy(to, from, size_t(n) * sizeof(bf16)); }

struct Scratch {  // kept by its thread from call to call
  Floats q, acc, scores, weights, keys, values, m, l, rescale, wide;
};

// A run of the pool's rows as T: the rows themselves, or codes widened (see kv_codes.h), with the scales of those.
template <class T, class C>
struct Widened {
  Run<T> run;
  float key_scales[KEYS], value_scales[KEYS];

  const Run<T>& of(const Run<C>& from, const AttentionArgs& g, const AttentionItem& item, Floats& buffer) {
    const int64_t D = g.head_dim;
    T* const rows = reinterpret_cast<T*>(buffer.reserve(2 * KEYS * D));
    run.start = from.start; run.begin = from.begin; run.end = from.end;
    run.value_offset = from.value_offset ? KEYS * D : 0;
    float of_keys = 1.0f, of_values = 1.0f;
    if (g.cache == kCacheFloat8) {
      const float* scale = g.kv_scales + g.layer * 2 * g.num_kv_heads + item.head;
      of_keys = scale[0];
      of_values = from.value_offset ? scale[g.num_kv_heads] : of_keys;
    }
    for (int64_t i = 0; i < KEYS; ++i) {
      T* const row = rows + i * D;
      run.keys[i] = row;
      const C *key = from.keys[i], *value = key + from.value_offset;
      key_scales[i] = scale_of_row(key, D, of_keys);
      value_scales[i] = scale_of_row(value, D, of_values);
      widen_row(key, row, D);
      if (run.value_offset) widen_row(value, row + KEYS * D, D);
    }
    return run;
  }
  void scale(float* scores, const float* scales, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t t = 0; t < KEYS; t += W) store(scores + r * KEYS + t, load(scores + r * KEYS + t) * load(scales + t));
  }
  void scale_scores(float* scores, int64_t rows) const { scale(scores, key_scales, rows); }
  void scale_weights(float* weights, int64_t rows) const { scale(weights, value_scales, rows); }
};
template <class T>
struct Widened<T, T> {
  const Run<T>& of(const Run<T>& from, const AttentionArgs&, const AttentionItem&, Floats&) { return from; }
  void scale_scores(float*, int64_t) const {}
  void scale_weights(float*, int64_t) const {}
};

// One query token and one key-value head, in runs of KEYS keys: they are transposed, word by word (a word is two bfloat16 or a float32), and
// serve all query heads of the group.
template <class T, class C>
struct OneQuery {
  const AttentionArgs& g;
  const int64_t D, rows, length, num_words;
  using Query = typename As<T>::Query;
  using Weight = typename As<T>::Weight;
  static constexpr int64_t depth = kStepDepth<Weight>;  // keys that are added in one step
  Runs<C>& runs;
  const Run<T>* now = nullptr;
  Widened<T, C> widened;
  float *acc, *scores, *m, *l, *rescale;
  Query* queries;         // [rows][num_words]
  const Weight* weights;  // [rows][KEYS / depth]
  uint32_t* words;        // [num_words][KEYS]
  Scratch& s;

  OneQuery(const AttentionArgs& g, const AttentionItem& item, Runs<C>& runs, Scratch& s)
      : g(g), D(g.head_dim), rows(g.num_heads / g.num_kv_heads), length(g.seq_lens[item.seq]),
        num_words(D * int64_t(sizeof(T)) / 4), runs(runs), s(s) {
    queries = reinterpret_cast<Query*>(s.q.reserve(rows * D)); acc = s.acc.filled(rows * D, 0.0f); scores = s.scores.reserve(rows * KEYS);
    m = s.m.filled(rows, -INFINITY); l = s.l.filled(rows, 0.0f); rescale = s.rescale.reserve(rows);
    words = reinterpret_cast<uint32_t*>(s.keys.reserve(num_words * KEYS));
  }

  void transpose_keys() {
    Ahead<C> ahead = runs.ahead;
    for (int64_t t = now->begin / 8 * 8; t < now->end; t += 8)
      transpose_words(reinterpret_cast<const uint32_t* const*>(now->keys + t), num_words, words + t, [&] { ahead.step(2); });
    runs.ahead = ahead;
  }

  // Asks again for values [first, last), and to L1: a CPU drops what it is asked for while too much is on its way.
  inline __attribute__((always_inline)) void ask_values(int64_t first, int64_t last) const {
    for (; first < last; ++first)
      for (int64_t d = 0; d < D; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(now->keys[first] + now->value_offset + d, 0, 3);
  }

  // Scores of G query heads from row on with the NV vectors of keys from t on.
  template <int G, int NV>
  inline __attribute__((always_inline)) void score(int64_t row, int64_t t) {
    const Query* q = queries + row * num_words;
    const float* at = reinterpret_cast<const float*>(words + t);
    vf total[G][NV] = {};
    Ahead<C> ahead = runs.ahead;
    for (int64_t word = 0, end = num_words; word < end; ++word, at += KEYS) {
      ahead.step(3);
      if (row == 0) ask_values(word * KEYS / end, (word + 1) * KEYS / end);
      vf key[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) key[j] = load(at + j * W);
#pragma GCC unroll 4
      for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) total[i][j] = multiply_add(total[i][j], q[i * end + word], key[j]);
    }
    runs.ahead = ahead;
#pragma GCC unroll 4
    for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) store(scores + (row + i) * KEYS + t + j * W, total[i][j]);
  }

  template <int G>
  void score_all(int64_t row) {
    constexpr int64_t at_once = SCORED * W;
    for (int64_t t = now->begin / at_once * at_once; t < now->end; t += at_once) score<G, SCORED>(row, t);
  }

  void score_run() {  // scores [rows][KEYS]
    transpose_keys();
    int64_t row = 0, left = rows;
    for (; left > 4; left -= 4, row += 4) score_all<4>(row);
    if (left == 4) score_all<4>(row);
    if (left == 3) score_all<3>(row);
    if (left == 2) score_all<2>(row);
    if (left == 1) score_all<1>(row);
    widened.scale_scores(scores, rows);
  }

  void update() {  // scores become exp(scores - new maximum)
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t t = 0; t < now->begin; ++t) scores[row * KEYS + t] = -INFINITY;
      rescale[row] = update_row(m[row], l[row], scores + row * KEYS, now->end, g);
    }
    widened.scale_weights(scores, rows);
    weights = as_weights(scores, rows * KEYS, reinterpret_cast<Weight*>(s.weights.reserve(depth > 1 ? rows * KEYS / 2 : 0)));
  }

  // acc = rescale acc + scores values, G query heads from row on, NV vectors from d on.
  template <int G, int NV>
  inline __attribute__((always_inline)) void add(int64_t row, int64_t d) {
    vf total[G][NV];
#pragma GCC unroll 4
    for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) total[i][j] = load(acc + (row + i) * D + d + j * W) * rescale[row + i];
    const int64_t offset = now->value_offset + d;
    const Weight* const weight = weights + row * (KEYS / depth);
    const T* const* const keys = now->keys;
    Ahead<C> ahead = runs.ahead;
    for (int64_t t = now->begin / depth * depth, end = now->end; t < end; t += depth) {  // beside a run's ends lies weight 0
      const T *value = keys[t] + offset, *next_value = keys[t + depth - 1] + offset;
      ahead.step(3);
      vf v[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) v[j] = load_values(value + j * W, next_value + j * W);
#pragma GCC unroll 4
      for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) total[i][j] = multiply_add(total[i][j], weight[i * (KEYS / depth) + t / depth], v[j]);
    }
    runs.ahead = ahead;
#pragma GCC unroll 4
    for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) store(acc + (row + i) * D + d + j * W, total[i][j]);
  }

  template <int G, int NV>
  void add_all(int64_t row) {
    int64_t d = 0;
    for (; d + NV * W <= D; d += NV * W) add<G, NV>(row, d);
    for (; d < D; d += W) add<G, 1>(row, d);
  }

  void add_run() {
    int64_t row = 0, left = rows;
    for (; left > 4; left -= 4, row += 4) add_all<4, 2>(row);
    if (left == 4) add_all<4, 2>(row);
    if (left == 3) add_all<3, 4>(row);
    if (left == 2) add_all<2, 4>(row);
    if (left == 1) add_all<1, 4>(row);
  }

  void run(const AttentionItem& item) {
    const int64_t row0 = g.query_start_loc[item.seq];
    const T* q = static_cast<const T*>(g.q) + row0 * g.q_stride + item.head * rows * D;
    for (int64_t i = 0; i < rows; ++i) take_query(q + i * D, queries + i * num_words, D);
    do {
      now = &widened.of(runs.advance(), g, item, s.wide);
      score_run();
      update();
      add_run();
    } while (now->start + now->end < length);
    write_rows(acc, l, m, sinks_of(g, item), g.scale, rows, D, static_cast<T*>(g.out) + (row0 * g.num_heads + item.head * rows) * D);
  }
};

constexpr int STRIP = ROW_TILE;  // rows of a query tile whose scores are made together

// scores[rows][KEYS] = q keys, and acc[rows][head_dim] = scale acc + weights values.
template <int R, class X>
static void score_rows(const X* q, int64_t steps, const float* keys, float* scores) {
  for (int64_t t = 0; t < KEYS; t += 2 * W) multiply_tile<R, 2>(q, steps, 1, keys + t, KEYS, steps, false, nullptr, scores + t, KEYS);
}
template <int R, class X>
static void add_values(const X* weights, const float* values, int64_t head_dim, const float* scale, float* acc) {
  constexpr int64_t steps = KEYS / kStepDepth<X>;
  int64_t d = 0;
  for (; d + 2 * W <= head_dim; d += 2 * W)
    multiply_tile<R, 2>(weights, steps, 1, values + d, head_dim, steps, true, scale, acc + d, head_dim);
  for (; d < head_dim; d += W) multiply_tile<R, 1>(weights, steps, 1, values + d, head_dim, steps, true, scale, acc + d, head_dim);
}

template <class X>
static void score_strip(int rows, const X* q, int64_t steps, const float* keys, float* scores) {
  switch (rows) {
#define ROWS(R) case R: return score_rows<R>(q, steps, keys, scores);
    ALL_ROWS
#undef ROWS
  }
}
template <class X>
static void value_strip(int rows, const X* weights, const float* values, int64_t head_dim, const float* scale, float* acc) {
  switch (rows) {
#define ROWS(R) case R: return add_values<R>(weights, values, head_dim, scale, acc);
    ALL_ROWS
#undef ROWS
  }
}

// Copies a run's keys (transposed) and values, as weights multiply them.
template <class T>
static void load_tile(const Run<T>& run, int64_t D, float* keys, float* values) {
  constexpr int64_t depth = kStepDepth<typename As<T>::Weight>;
  const int64_t num_words = D * int64_t(sizeof(T)) / 4;
  const bool widened = sizeof(T) == 2 && depth == 1;  // words of two bfloat16 become two rows
  const T* const* const at = run.keys;
  float* const words = widened ? keys + num_words * KEYS : keys;
  for (int64_t i = 0; i < KEYS; i += 8)
    transpose_words(reinterpret_cast<const uint32_t* const*>(at + i), num_words, reinterpret_cast<uint32_t*>(words + i), [] {});
  if (widened)
    for (int64_t word = 0; word < num_words; ++word)
      for (int64_t i = 0; i < KEYS; i += W)
        load_two(reinterpret_cast<const bf16*>(words + word * KEYS + i), keys + 2 * word * KEYS + i, keys + (2 * word + 1) * KEYS + i);
  for (int64_t i = 0; i < KEYS; i += depth, values += D)
    for (int64_t d = 0; d < D; d += W)
      store(values + d, load_values(at[i] + run.value_offset + d, at[i + depth - 1] + run.value_offset + d));
}

// Many query tokens, one key-value head: rows are (token, query head of the group).
template <class T, class C>
static void attend_many(const AttentionArgs& g, const AttentionItem& item, Scratch& s) {
  using X = typename As<T>::Weight;  // and what queries are multiplied as: keys lie widened
  const KeyValues<C> kv(g, item);
  Run<C> run;
  Widened<T, C> widened;
  const int64_t D = g.head_dim, group = g.num_heads / g.num_kv_heads, rows = item.num_queries * group, steps = D / kStepDepth<X>;
  const int64_t row0 = int64_t(g.query_start_loc[item.seq]) + item.query, length = g.seq_lens[item.seq];
  const int64_t first = length - (g.query_start_loc[item.seq + 1] - g.query_start_loc[item.seq]) + item.query;  // position of row 0
  X* const queries = reinterpret_cast<X*>(s.q.reserve(rows * D));
  float *acc = s.acc.filled(rows * D, 0.0f), *scores = s.scores.reserve(STRIP * KEYS);
  float *m = s.m.filled(rows, -INFINITY), *l = s.l.filled(rows, 0.0f);
  float *keys = s.keys.reserve(2 * KEYS * D), *values = s.values.reserve(KEYS * D), *weights = s.weights.reserve(STRIP * KEYS);
  const T* q = static_cast<const T*>(g.q) + row0 * g.q_stride + item.head * group * D;
  for (int64_t r = 0; r < rows; ++r) take_query(q + r / group * g.q_stride + r % group * D, queries + r * steps, D);
  const int64_t end = first + item.num_queries, begin = larger(0, first + 1 - g.window) / KEYS * KEYS;
  for (int64_t t = begin; t < end; t += KEYS) {
    run.find(kv, t, length);
    load_tile(widened.of(run, g, item, s.wide), D, keys, values);
    for (int64_t r = 0; r < rows; r += STRIP) {
      const int64_t strip = smaller(STRIP, rows - r);
      if (first + (r + strip - 1) / group < t) continue;                  // all of it lies before this tile
      if (first + r / group - g.window >= t + KEYS - 1) continue;         // or has moved past it
      score_strip(int(strip), queries + r * steps, steps, keys, scores);
      widened.scale_scores(scores, strip);
      float rescale[STRIP];
      for (int64_t i = 0; i < strip; ++i) {
        float* row = scores + i * KEYS;
        const int64_t position = first + (r + i) / group;
        for (int64_t j = larger(0, position + 1 - t); j < KEYS; ++j) row[j] = -INFINITY;
        for (int64_t j = smaller(KEYS, position + 1 - g.window - t) - 1; j >= 0; --j) row[j] = -INFINITY;
        rescale[i] = update_row(m[r + i], l[r + i], row, KEYS, g);
      }
      widened.scale_weights(scores, strip);
      value_strip(int(strip), as_weights(scores, strip * KEYS, reinterpret_cast<X*>(weights)), values, D, rescale, acc + r * D);
    }
  }
  T* out = static_cast<T*>(g.out) + (row0 * g.num_heads + item.head * group) * D;
  for (int64_t i = 0; i < item.num_queries; ++i)
    write_rows(acc + i * group * D, l + i * group, m + i * group, sinks_of(g, item), g.scale, group, D, out + i * g.num_heads * D);
}

template <class T, class C>
static void attend(const AttentionArgs& g, const AttentionItem* item, const AttentionItem* last, Scratch& s) {
  for (Runs<C> runs(g, item, last); item < last; ++item)
    if (one_query(g, *item)) OneQuery<T, C>(g, *item, runs, s).run(*item);
    else attend_many<T, C>(g, *item, s);
}

template <class T>
static void attend_as(const AttentionArgs& g, const AttentionItem* item, const AttentionItem* last, Scratch& s) {
  if (g.cache == kCacheFloat8) attend<T, Float8>(g, item, last, s);
  else if (g.cache == kCacheInt8) attend<T, Int8>(g, item, last, s);
  else attend<T, T>(g, item, last, s);
}

static void attention(const AttentionArgs& g, const AttentionItem* items, int64_t first, int64_t last) {
  static thread_local Scratch scratch;
  if (g.dtype == kFloat32) attend_as<float>(g, items + first, items + last, scratch);
  else attend_as<bf16>(g, items + first, items + last, scratch);
}

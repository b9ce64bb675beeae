// Paged attention: out = softmax(scale q k^T) v over a sequence's blocks, read where they lie; nothing is gathered.
// Online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022): running maximum m, sum l and accumulator.
//   one query:    4 d FLOPs a key and head; bytes: each key and value once for the heads that share it. Memory-bound.
//   many queries: tiles of KEYS keys are copied out once (transposed for q k^T) and serve all rows of a query tile. Compute-bound.
// Keys are taken in runs that begin at multiples of the run's length in the sequence, and both kernels add in one order: a row's bits
// are the same whichever of them computes it, in whatever chunk and batch.
//   score:   one chain of multiply-adds in the order of d. Keys lie in the lanes, as the pool holds them, or they are transposed first.
//   softmax: key t of a run adds to partial sum t % W; then those are added by halves (sum).
//   values:  one chain of multiply-adds in the order of the keys.
// A head's sink is a score beside those of the keys, with no value.
// With bfloat16 units both products are theirs: two d, or two keys, a step; probabilities are rounded to bfloat16, all sums are float32.

constexpr int64_t KEYS = 64;  // in a run
constexpr int64_t LEAD = 4;   // heads between the one at hand and the one that memory is asked for
constexpr int SPACED = VECTOR_BYTES == 64 ? 1 : 4;  // steps of narrow vectors beside one that asks memory
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

// Of the same sequence as the first item, which has one query.
static inline int64_t heads_of(const AttentionItem* item, const AttentionItem* last) {
  const AttentionItem* other = item;
  while (other != last && other->seq == item->seq) ++other;
  return other - item;
}

static inline const float* sinks_of(const AttentionArgs& g, const AttentionItem& item) {
  return g.sinks ? g.sinks + item.head * (g.num_heads / g.num_kv_heads) : nullptr;
}

template <class T>
struct KeyValues {  // where one sequence's keys and values of one layer and head lie: a run of each in a block
  const T* base;           // of block 0
  const int32_t* table;
  int64_t row, block_size, block_stride, value_offset;
  bool grouped;

  KeyValues(const AttentionArgs& g, const AttentionItem& item)
      : table(g.block_tables + item.seq * g.table_stride), row(row_length<T>(g.head_dim)), block_size(g.block_size),
        grouped(keys_in_groups<T>(g.planes, block_size)) {
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
  const T *in_turn[2 * KEYS + 2], *keys[KEYS];  // in the room of one that is not there lies another; from `head` on those of the head at hand
  int64_t head = 0, head_stride, row;
  bool grouped = false;
  const T* key(int64_t i) const { return keys[i] + head; }
  const float* group(int64_t i) const {  // the first word of W keys from i on, GROUP before the next; of another group if none of them is there
    const int64_t held = smaller(larger(i, begin), end - 1);
    return reinterpret_cast<const float*>(key(held) - held % GROUP * row) + i % GROUP;
  }
  const uint32_t* const* words(int64_t i) const { return reinterpret_cast<const uint32_t* const*>(keys + i); }  // of the first head

  void find(const KeyValues<T>& kv, int64_t position, int64_t length) {  // those from `position` on
    start = position / KEYS * KEYS;
    begin = position - start;
    end = smaller(length - start, KEYS);
    value_offset = kv.value_offset;
    head = 0;
    head_stride = kv.block_size * kv.row;
    row = kv.row;
    grouped = kv.grouped;
    for (int64_t i = begin; i < end;) {
      const T* key = kv.key(start + i);
      for (const int64_t stop = smaller(end, i + kv.block_size - (start + i) % kv.block_size); i < stop; ++i, key += kv.row) keys[i] = key;
    }
    for (int64_t i = 0; i < begin; ++i) keys[i] = keys[begin];
    for (int64_t i = end; i < KEYS; ++i) keys[i] = keys[end - 1];
    for (int64_t i = 0; i < KEYS; ++i) {  // rows of several blocks in turn: CPUs follow some streams by themselves
      in_turn[i] = keys[i % 8 * (KEYS / 8) + i / 8];
      in_turn[KEYS + i] = in_turn[i] + value_offset;
    }
    for (int64_t i = 2 * KEYS; i < 2 * KEYS + 2; ++i) in_turn[i] = keys[0];
  }
};

// Asks memory for what is used next, to L2, and evenly: CPUs drop what they are asked for while too much is on its way.
template <class T>
struct Ahead {
  const T* const* rows = nullptr;
  int64_t head = 0, shift, pair = 0, end = 0;  // pairs of lines, 1 << shift a row

  explicit Ahead(int64_t row_bytes) { for (shift = 0; row_bytes > 128 << shift;) ++shift; }
  void begin(const Run<T>& next, int64_t head_of_it) {
    rows = next.in_turn;
    head = head_of_it;
    pair = 0;
    end = (next.value_offset ? 2 * KEYS : KEYS) << shift;
  }
  template <int N>
  inline __attribute__((always_inline)) void step() {
    if (pair >= end) return;
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i, ++pair) {
      const char* const at = reinterpret_cast<const char*>(rows[pair >> shift] + head) + (pair & ((1 << shift) - 1)) * 128;
      __builtin_prefetch(at, 0, 2);
      __builtin_prefetch(at + 64, 0, 2);
    }
  }
};

// The runs of all sequences with one query, one after the other, each for all heads among the items.
template <class T>
struct Runs {
  const AttentionArgs& g;
  const AttentionItem *item, *const last;
  int64_t position = -1;  // of the item's next run; -1: its first one
  Run<T> runs[2], *now = runs, *following = runs + 1;

  Runs(const AttentionArgs& g, const AttentionItem* first, const AttentionItem* last) : g(g), item(first), last(last) { advance(); }
  Run<T>& advance() {
    Run<T>* const used = now;
    now = following;
    following = used;
    while (item != last && !one_query(g, *item)) ++item;
    if (item == last) { following = now; return *now; }
    const int64_t length = g.seq_lens[item->seq];
    following->find(KeyValues<T>(g, *item), position < 0 ? larger(0, length - g.window) : position, length);
    position = following->start + following->end;
    if (position == length) { position = -1; item += heads_of(item, last); }
    return *now;
  }
};

#if VECTOR_BYTES == 64
#define UNPACK(which, a, b) (vu)_mm512_unpack##which((__m512i)(a), (__m512i)(b))
#define LANES(a, b, of_four, of_two) (vu)_mm512_shuffle_i32x4((__m512i)(a), (__m512i)(b), of_four)
#elif VECTOR_BYTES == 32
#define UNPACK(which, a, b) (vu)_mm256_unpack##which((__m256i)(a), (__m256i)(b))
#define LANES(a, b, of_four, of_two) (vu)_mm256_permute2x128_si256((__m256i)(a), (__m256i)(b), of_two)
#endif

// words[j] = word j of each of W keys, from rows[i] + word on; eight words or one.
template <int N>
static inline __attribute__((always_inline)) void load_words(const uint32_t* const* rows, int64_t word, vu* words) {
#if VECTOR_BYTES >= 32
  if constexpr (N == 8) {
    vu a[8], b[8];
    const auto eight = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + word)); };
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
#if VECTOR_BYTES == 64
      a[i] = (vu)_mm512_inserti64x4(_mm512_castsi256_si512(eight(i + i / 4 * 4)), eight(i + i / 4 * 4 + 4), 1);
#else
      a[i] = (vu)eight(i);
#endif
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) { b[i] = UNPACK(lo_epi32, a[i], a[i + 1]); b[i + 1] = UNPACK(hi_epi32, a[i], a[i + 1]); }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
      a[i] = UNPACK(lo_epi64, b[i], b[i + 2]); a[i + 1] = UNPACK(hi_epi64, b[i], b[i + 2]);
      a[i + 2] = UNPACK(lo_epi64, b[i + 1], b[i + 3]); a[i + 3] = UNPACK(hi_epi64, b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) { words[i] = LANES(a[i], a[i + 4], 0x88, 0x20); words[i + 4] = LANES(a[i], a[i + 4], 0xdd, 0x31); }
    return;
  }
#endif
  for (int j = 0; j < N; ++j)
    for (int i = 0; i < W; ++i) words[j][i] = rows[i][word + j];
}

// words[j][i] = word j of key i of a run, in groups of W keys; rows of `words` are KEYS apart.
template <class T, class F>
static inline void transpose_words(const Run<T>& run, int64_t first, int64_t last, int64_t num_words, uint32_t* words, F&& between) {
  for (int64_t t = first / W * W; t < last; t += W) {
    const uint32_t* const* const rows = run.words(t);
    const int64_t head = run.head * int64_t(sizeof(T)) / 4;
    int64_t word = 0;
    vu w[8];
    for (; word + 8 <= num_words; word += 8) {
      between();
      load_words<8>(rows, head + word, w);
      for (int64_t j = 0; j < 8; ++j) store(reinterpret_cast<float*>(words + (word + j) * KEYS + t), (vf)w[j]);
    }
    for (; word < num_words; ++word) {
      load_words<1>(rows, head + word, w);
      store(reinterpret_cast<float*>(words + word * KEYS + t), (vf)w[0]);
    }
  }
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

// NV of them. With bfloat16 units the numbers of two vectors lie by fours in turn (see in_order): one operation a vector, not four.
template <int NV, class T>
static inline __attribute__((always_inline)) void load_values(const T* key, const T* next, vf* v) {
#if BF16_UNITS
  if constexpr (sizeof(T) == 2 && NV % 2 == 0) {
#pragma GCC unroll 2
    for (int j = 0; j < NV; j += 2) {
      const vu first = (vu)load(reinterpret_cast<const float*>(key + j * W)), second = (vu)load(reinterpret_cast<const float*>(next + j * W));
      v[j] = (vf)UNPACK(lo_epi16, first, second);
      v[j + 1] = (vf)UNPACK(hi_epi16, first, second);
    }
    return;
  }
#endif
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) v[j] = load_values(key + j * W, next + j * W);
}

template <class T>
static inline void in_order(float* row, int64_t head_dim) {
#if BF16_UNITS
  if (sizeof(T) == 2)
    for (int64_t d = 0; d + 2 * W <= head_dim; d += 2 * W) {
      const __m512 low = (__m512)load(row + d), high = (__m512)load(row + d + W);
      const __m512i turn = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
      store(row + d, (vf)_mm512_permutex2var_ps(low, turn, high));
      store(row + d + W, (vf)_mm512_permutex2var_ps(low, _mm512_add_epi32(turn, _mm512_set1_epi32(8)), high));
    }
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

// The running softmax of some rows, KEYS apart: p becomes exp(scale (scores - new maximum)), padded with 0 to a multiple of W. `rescale`: of
// what was added up so far, with room for a multiple of W. X: what p is rounded to next; pairs of bfloat16 need fewer digits.
template <class X, class F>
static inline void update_rows(float* row_m, float* row_l, float* scores, int64_t rows, int64_t count, const AttentionArgs& g, float* rescale, F&& between) {
  const int64_t padded = (count + W - 1) / W * W;
  const float scale = g.scale;
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = scores + r * KEYS;
    for (int64_t t = count; t < padded; ++t) row[t] = -INFINITY;
    if (g.softcap != 0.0f) cap_scores(row, padded, scale, g.softcap);
    vf top = splat(row_m[r]);
    for (int64_t t = 0; t < padded; t += W) top = vmax(load(row + t), top);
    const float m = largest(top);
    rescale[r] = row_m[r] == m ? 0.0f : row_m[r] - m;
    row_m[r] = m;
  }
  for (int64_t r = 0; r < rows; r += W) store(rescale + r, vexp(load(rescale + r) * scale));
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = scores + r * KEYS;
    const float m = row_m[r] == -INFINITY ? 0.0f : row_m[r];  // nothing visible so far
    const float steep = scale * 1.44269504f, most = m * steep;
    vf total = {};
    for (int64_t t = 0; t < padded; t += W) {
      between();
      const vf s = load(row + t), p = kStepDepth<X> > 1 ? vexp2_short(s * steep - most) : vexp((s - m) * scale);
      store(row + t, p);
      total += p;
    }
    row_l[r] = row_l[r] * rescale[r] + sum(total);
  }
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

  const Run<T>& of(const Run<C>& from, const AttentionArgs& g, int64_t head, Floats& buffer) {
    const int64_t D = g.head_dim;
    T* const rows = reinterpret_cast<T*>(buffer.reserve(2 * KEYS * D));
    run.start = from.start; run.begin = from.begin; run.end = from.end;
    run.value_offset = from.value_offset ? KEYS * D : 0;
    float of_keys = 1.0f, of_values = 1.0f;
    if (g.cache == kCacheFloat8) {
      const float* scale = g.kv_scales + g.layer * 2 * g.num_kv_heads + head;
      of_keys = scale[0];
      of_values = from.value_offset ? scale[g.num_kv_heads] : of_keys;
    }
    for (int64_t i = 0; i < KEYS; ++i) {
      T* const row = rows + i * D;
      run.keys[i] = row;
      const C *key = from.key(i), *value = key + from.value_offset;
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
  const Run<T>& of(const Run<T>& from, const AttentionArgs&, int64_t, Floats&) { return from; }
  void scale_scores(float*, int64_t) const {}
  void scale_weights(float*, int64_t) const {}
};

// One query token and some key-value heads, in runs of KEYS keys, word by word (a word is two bfloat16 or a float32). They serve all query
// heads of the group.
template <class T, class C>
struct OneQuery {
  const AttentionArgs& g;
  const int64_t D, rows, heads, length, num_words;
  using Query = typename As<T>::Query;
  using Weight = typename As<T>::Weight;
  static constexpr int64_t depth = kStepDepth<Weight>;  // keys that are added in one step
  Runs<C>& runs;
  const Run<T>* now = nullptr;
  Ahead<C> ahead;
  Widened<T, C> widened;
  float *acc, *scores, *m, *l, *rescale;
  Query* queries;         // [rows][num_words]; this and acc, m and l are of the head at hand
  const Weight* weights;  // [rows][KEYS / depth]
  uint32_t* words;        // [num_words][KEYS], of keys that are transposed here
  const float* vectors[KEYS / W];  // of W keys: the first word of each, `stride` before the next
  int64_t stride;
  Scratch& s;

  OneQuery(const AttentionArgs& g, const AttentionItem& item, int64_t heads, Runs<C>& runs, Scratch& s)
      : g(g), D(g.head_dim), rows(g.num_heads / g.num_kv_heads), heads(heads), length(g.seq_lens[item.seq]),
        num_words(D * int64_t(sizeof(T)) / 4), runs(runs), ahead(row_length<C>(D) * int64_t(sizeof(C))), s(s) {
    const int64_t all = heads * rows;
    queries = reinterpret_cast<Query*>(s.q.reserve(all * D)); acc = s.acc.filled(all * D, 0.0f); scores = s.scores.reserve(rows * KEYS);
    m = s.m.filled(all, -INFINITY); l = s.l.filled(all, 0.0f); rescale = s.rescale.filled((rows + W - 1) / W * W, 0.0f);
    words = reinterpret_cast<uint32_t*>(s.keys.reserve(num_words * KEYS));
  }

  void find_keys() {
    stride = now->grouped ? GROUP : KEYS;
    for (int64_t t = 0; t < KEYS; t += W) vectors[t / W] = now->grouped ? now->group(t) : reinterpret_cast<const float*>(words + t);
    if (now->grouped) return;
    Ahead<C> asking = ahead;
    transpose_words(*now, now->begin, now->end, num_words, words, [&] { asking.template step<SPACED == 1 ? 3 : 1>(); });
    ahead = asking;
  }

  // Scores of G query heads from row on.
  template <int G, int NV = SCORED>
  void score(int64_t row) {
    const Query* const q = queries + row * num_words;
    for (int64_t t = now->begin / (NV * W) * (NV * W); t < now->end; t += NV * W) {
      const float* const* const keys = vectors + t / W;
      vf total[G][NV] = {};
      Ahead<C> asking = ahead;
      for (int64_t word = 0, end = num_words, at = 0; word < end; ++word, at += stride) {
        if (word % SPACED == 0) asking.template step<SPACED == 1 && G == 4 ? 1 : 2>();
        vf key[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) key[j] = load(keys[j] + at);
#pragma GCC unroll 4
        for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
          for (int j = 0; j < NV; ++j) total[i][j] = multiply_add(total[i][j], q[i * end + word], key[j]);
      }
      ahead = asking;
#pragma GCC unroll 4
      for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) store(scores + (row + i) * KEYS + t + j * W, total[i][j]);
    }
  }

  void score_run() {  // scores [rows][KEYS]
    find_keys();
    int64_t row = 0, left = rows;
    for (; left > 4; left -= 4, row += 4) score<4>(row);
    if (left == 4) score<4>(row);
    if (left == 3) score<3>(row);
    if (left == 2) score<2>(row);
    if (left == 1) score<1>(row);
    widened.scale_scores(scores, rows);
  }

  void update() {  // scores become exp(scores - new maximum)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t t = 0; t < now->begin; ++t) scores[row * KEYS + t] = -INFINITY;
    Ahead<C> asking = ahead;
    update_rows<Weight>(m, l, scores, rows, now->end, g, rescale, [&] { asking.template step<2>(); });
    ahead = asking;
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
    const int64_t offset = now->head + now->value_offset + d;
    const Weight* const weight = weights + row * (KEYS / depth);
    const T* const* const keys = now->keys;
    Ahead<C> asking = ahead;
    for (int64_t t = now->begin / depth * depth, end = now->end; t < end; t += depth) {  // beside a run's ends lies weight 0
      const T *value = keys[t] + offset, *next_value = keys[t + depth - 1] + offset;
      if (t / depth % SPACED == 0) asking.template step<1>();
      vf v[NV];
      load_values<NV>(value, next_value, v);
#pragma GCC unroll 4
      for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) total[i][j] = multiply_add(total[i][j], weight[i * (KEYS / depth) + t / depth], v[j]);
    }
    ahead = asking;
#pragma GCC unroll 4
    for (int i = 0; i < G; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) store(acc + (row + i) * D + d + j * W, total[i][j]);
  }

  template <int G, int NV>
  void add_all(int64_t row) {
    int64_t d = 0;
    for (; d + NV * W <= D; d += NV * W) add<G, NV>(row, d);
    for (; d + 2 * W <= D; d += 2 * W) add<G, 2>(row, d);
    if (d < D) add<G, 1>(row, d);
  }

  void add_run() {
    int64_t row = 0, left = rows;
    for (; left > 4; left -= 4, row += 4) add_all<4, 2>(row);
    if (left == 4) add_all<4, 2>(row);
    if (left == 3) add_all<3, 4>(row);
    if (left == 2) add_all<2, 4>(row);
    if (left == 1) add_all<1, 4>(row);
  }

  void move(int64_t by) {  // to another head
    queries += by * rows * num_words; acc += by * rows * D; m += by * rows; l += by * rows;
  }

  void run(const AttentionItem& item) {
    const int64_t row0 = g.query_start_loc[item.seq];
    const T* q = static_cast<const T*>(g.q) + row0 * g.q_stride + item.head * rows * D;
    for (int64_t i = 0; i < heads * rows; ++i) take_query(q + i * D, queries + i * num_words, D);
    do {
      Run<C>& run = runs.advance();
      for (int64_t head = 0; head < heads; ++head, move(1), run.head += run.head_stride) {
        const int64_t next = head + smaller(heads, LEAD);
        ahead.begin(next < heads ? run : *runs.following, next % heads * run.head_stride);
        now = &widened.of(run, g, item.head + head, s.wide);
        score_run();
        update();
        add_run();
        while (ahead.pair < ahead.end) ahead.template step<1>();
      }
      move(-heads);
    } while (now->start + now->end < length);
    for (int64_t row = 0; row < heads * rows; ++row) in_order<T>(acc + row * D, D);
    write_rows(acc, l, m, sinks_of(g, item), g.scale, heads * rows, D, static_cast<T*>(g.out) + (row0 * g.num_heads + item.head * rows) * D);
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

// Copies a run's keys (words of them all together) and values, as weights multiply them.
template <class T>
static void load_tile(const Run<T>& run, int64_t D, float* keys, float* values) {
  constexpr int64_t depth = kStepDepth<typename As<T>::Weight>;
  const int64_t num_words = D * int64_t(sizeof(T)) / 4;
  const bool widened = sizeof(T) == 2 && depth == 1;  // words of two bfloat16 become two rows
  const T* const* const at = run.keys;
  float* const words = widened ? keys + num_words * KEYS : keys;
  if (!run.grouped) transpose_words(run, 0, KEYS, num_words, reinterpret_cast<uint32_t*>(words), [] {});
  for (int64_t t = 0; run.grouped && t < KEYS; t += W)
    for (int64_t word = 0; word < num_words; ++word) store(words + word * KEYS + t, load(run.group(t) + word * GROUP));
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
    load_tile(widened.of(run, g, item.head, s.wide), D, keys, values);
    for (int64_t r = 0; r < rows; r += STRIP) {
      const int64_t strip = smaller(STRIP, rows - r);
      if (first + (r + strip - 1) / group < t) continue;                  // all of it lies before this tile
      if (first + r / group - g.window >= t + KEYS - 1) continue;         // or has moved past it
      score_strip(int(strip), queries + r * steps, steps, keys, scores);
      widened.scale_scores(scores, strip);
      float rescale[(STRIP + W - 1) / W * W] = {};
      for (int64_t i = 0; i < strip; ++i) {
        float* row = scores + i * KEYS;
        const int64_t position = first + (r + i) / group;
        for (int64_t j = larger(0, position + 1 - t); j < KEYS; ++j) row[j] = -INFINITY;
        for (int64_t j = smaller(KEYS, position + 1 - g.window - t) - 1; j >= 0; --j) row[j] = -INFINITY;
      }
      update_rows<X>(m + r, l + r, scores, strip, KEYS, g, rescale, [] {});
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
  int64_t heads = 1;
  for (Runs<C> runs(g, item, last); item < last; item += heads)
    if (one_query(g, *item)) {
      heads = heads_of(item, last);
      OneQuery<T, C>(g, *item, heads, runs, s).run(*item);
    } else {
      heads = 1;
      attend_many<T, C>(g, *item, s);
    }
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

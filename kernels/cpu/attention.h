// Paged attention: out = softmax(scale q k^T) v over a sequence's blocks, read where they lie; nothing is gathered.
// Online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022): running maximum m, sum l and accumulator.
//   one query:    4 d FLOPs a key and head; bytes: each key and value once for the heads that share it. Memory-bound.
//   many queries: tiles of KEYS keys are copied out once (transposed for q k^T) and serve all rows of a query tile. Compute-bound.
// Keys are taken in runs that begin at multiples of the run's length in the sequence, and both kernels add in one order: a row's bits
// are the same whichever of them computes it, in whatever chunk and batch.
//   score:   one chain of multiply-adds in the order of d. Keys lie in the lanes, as the pool holds them in groups, or they are grouped first.
//   softmax: key t of a run adds to partial sum t % W; then those are added by halves (sum).
//   values:  one chain of multiply-adds in the order of the keys.
// A head's sink is a score beside those of the keys, with no value.
// With bfloat16 units both products are theirs: two d, or two keys, a step; probabilities are rounded to bfloat16, all sums are float32.

constexpr int64_t KEYS = 64;  // in a run
constexpr int64_t LEAD = 4;   // heads between the one at hand and the one that memory is asked for
constexpr int SPACED = VECTOR_BYTES == 64 ? 1 : 4;  // steps of narrow vectors beside one that asks memory
constexpr int SCORED = VECTOR_BYTES == 64 ? 4 : 2;  // vectors of keys that are scored at once: what the register file holds

// What a query (by words of its keys) and probabilities are multiplied as: see multiply_tile.
template <class T, class C>
struct As { using Query = float; using Weight = float; };
#if BF16_UNITS
template <class C>
struct As<bf16, C> { using Query = Pair; using Weight = Pair; };
#else
template <>
struct As<bf16, bf16> { using Query = Two; using Weight = float; };
#endif

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
  int64_t row, block_size, block_stride, head_stride, value_offset, of_entry;  // the latter: tokens of an entry of the table
  bool grouped;

  KeyValues(const AttentionArgs& g, const AttentionItem& item)
      : table(g.block_tables + item.seq * g.table_stride), row(row_length<T>(g.head_dim)), block_size(g.block_size),
        grouped(keys_in_groups(g.planes, block_size)) {
    value_offset = g.planes == 2 ? g.plane : 0;
    block_stride = g.num_layers * g.planes * g.plane;
    head_stride = g.head_step * block_size * row;
    of_entry = g.slots ? 1 : block_size;
    base = static_cast<const T*>(g.pool) + g.layer * g.planes * g.plane + item.head * head_stride;
  }
  const T* key(int64_t position) const {
    if (of_entry != 1) return base + table[position / block_size] * block_stride + position % block_size * row;
    const uint32_t slot = uint32_t(table[position]), size = uint32_t(block_size);  // of blocks of one token it is the block
    return base + slot / size * block_stride + slot % size * row;
  }
};

template <class T>
struct Run {  // the keys [begin, end) of a run, from position `start` on
  int64_t start = 0, begin = 0, end = 0, value_offset = 0;
  const T *in_turn[2 * KEYS + 2], *keys[KEYS];  // in the room of one that is not there lies another; from `head` on those of the head at hand
  int64_t head = 0, head_stride, row;
  const T* copied = nullptr;  // groups that the pool does not hold, see group_keys
  bool grouped = false;
  const T* key(int64_t i) const { return keys[i] + head; }
  const T* group(int64_t i) const {  // where key i lies; another group if it is not there
    if (!grouped) return copied + i / GROUP * GROUP * row;
    const int64_t held = smaller(larger(i, begin), end - 1);
    return key(held) - held % GROUP * row;
  }
  const Item<T>* items(int64_t i) const { return reinterpret_cast<const Item<T>*>(group(i)) + i % GROUP; }  // of W keys, GROUP apart

  void find(const KeyValues<T>& kv, int64_t position, int64_t length) {  // those from `position` on
    start = position / KEYS * KEYS;
    begin = position - start;
    end = smaller(length - start, KEYS);
    value_offset = kv.value_offset;
    head = 0;
    head_stride = kv.head_stride;
    row = kv.row;
    grouped = kv.grouped;
    for (int64_t i = begin; i < end;) {
      const T* key = kv.key(start + i);
      for (const int64_t stop = smaller(end, i + kv.of_entry - (start + i) % kv.of_entry); i < stop; ++i, key += kv.row) keys[i] = key;
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

// Groups the keys of the head at hand, where the pool does not.
template <class C, class F>
static void group_keys(Run<C>& run, int64_t head_dim, Floats& buffer, F&& between) {
  using V = typename VectorOf<Item<C>>::Type;
  constexpr int64_t size = sizeof(Item<C>), N = size == 1 ? GROUP : W, together = N * size;  // keys at a time, bytes of an item of theirs
  if (run.grouped) return;
  C* const groups = reinterpret_cast<C*>(buffer.reserve(KEYS * run.row));
  run.copied = groups;
  const int64_t row_bytes = head_dim * int64_t(sizeof(C));
  for (int64_t t = 0; t < KEYS; t += N) {
    C* const group = groups + t / GROUP * GROUP * run.row;
    for (int64_t at = 0; at < row_bytes; at += VECTOR_BYTES) {
      V block[N];
      const int64_t left = row_bytes - at;
#pragma GCC unroll 16
      for (int64_t i = 0; i < N; ++i) {
        if (i % 2 == 0) between();
        load_bytes(reinterpret_cast<const char*>(run.key(t + i)) + at, left, block[i]);
      }
      transpose<N>(block);
      char* const to = reinterpret_cast<char*>(group) + at * GROUP + t % GROUP * size;
#pragma GCC unroll 64
      for (int64_t i = 0; i < VECTOR_BYTES; i += size)
        if (i < left) std::memcpy(to + i * GROUP, reinterpret_cast<const char*>(block + i / size % N) + i / size / N * together, together);
    }
    if (run.row > head_dim)
      for (int64_t i = 0; i < N; ++i) std::memcpy(group + head_dim * GROUP + (t % GROUP + i) * 4, run.key(t + i) + head_dim, 4);
  }
}

// Word `word` of W keys as a query's X multiplies them.
template <class X, class C>
static inline __attribute__((always_inline)) vf key_word(const Item<C>* items, int64_t word) {
  if constexpr (sizeof(C) < sizeof(Item<C>) && kStepDepth<X> == 1) {
    const vu both = (vu)load(items + word / 2 * GROUP);
    return (vf)(word % 2 ? both & 0xffff0000u : both << 16);
  } else if constexpr (sizeof(C) == 1 && kStepDepth<X> == 2) {
    return load_pairs(items + 2 * word * GROUP, items + (2 * word + 1) * GROUP);
  } else {
    return load(items + word * GROUP);
  }
}

// Vectors of values as weights multiply them: of one key, or two keys interleaved.
template <class X, class C>
static inline vf load_values(const C* key, const C* next) {
#if BF16_UNITS
  if constexpr (sizeof(C) == 2) {
    const vu first = (vu)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key)));
    const vu second = (vu)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
    return (vf)(first | second << 16);  // compilers make four times the instructions of the plain conversion
  }
#endif
  if constexpr (kStepDepth<X> == 2) return load_pairs(key, next);
  return load(key);
}

// NV of them. With bfloat16 units the numbers of two vectors lie by fours in turn (see in_order): one operation a vector, not four.
template <int NV, class X, class T>
static inline __attribute__((always_inline)) void load_values(const T* key, const T* next, vf* v) {
#if BF16_UNITS
  if constexpr (sizeof(T) == 2 && NV % 2 == 0) {
#pragma GCC unroll 2
    for (int j = 0; j < NV; j += 2) {
      const vu first = (vu)load(reinterpret_cast<const float*>(key + j * W)), second = (vu)load(reinterpret_cast<const float*>(next + j * W));
      v[j] = (vf)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second);
      v[j + 1] = (vf)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second);
    }
    return;
  }
#endif
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) v[j] = load_values<X>(key + j * W, next + j * W);
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

// `sinks`: of the rows' heads, or null. A sink adds to the sum l alone, and last. `lse`: of the rows, or null.
template <class T>
static inline void write_rows(const float* acc, const float* l, const float* m, const float* sinks, float scale, int64_t count,
                              int64_t head_dim, T* out, float* lse) {
  for (int64_t g = 0; g < count; ++g) {
    const float total = sinks ? l[g] + vexp(splat(sinks[g] - m[g] * scale))[0] : l[g];
    if (lse) lse[g] = m[g] * scale + vlog(splat(total))[0];
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

// A run's keys [first, last) as words [KEYS / N][head_dim / depth of X][N], and its values [KEYS / depth][head_dim]. `between`: see Ahead.
template <int64_t N, class X, class C, class F>
static void copy_keys(const Run<C>& run, int64_t head_dim, int64_t first, int64_t last, float* keys, F&& between) {
  const int64_t num_words = head_dim / kStepDepth<X>;
  for (int64_t t = first / W * W; t < last; t += W) {
    const Item<C>* const items = run.items(t);
    float* const to = keys + t / N * N * num_words + t % N;
    for (int64_t word = 0; word < num_words; ++word) {
      if (word % 2 == 0) between();
      store(to + word * N, key_word<X, C>(items, word));
    }
  }
}
template <class X, class C>
static void copy_values(const Run<C>& run, int64_t head_dim, int64_t first, int64_t last, float* values) {
  constexpr int64_t depth = kStepDepth<X>;
  for (int64_t t = first / depth * depth; t < last; t += depth)
    for (int64_t d = 0; d < head_dim; d += W)
      store(values + t / depth * head_dim + d, load_values<X>(run.key(t) + run.value_offset + d, run.key(t + depth - 1) + run.value_offset + d));
}

struct Scratch {  // kept by its thread from call to call
  Floats q, acc, scores, weights, keys, values, m, l, rescale, grouped;
};

// The scales of a run of codes.
template <class C>
struct Scales {
  float keys[sizeof(C) == 1 ? KEYS : 1], values[sizeof(C) == 1 ? KEYS : 1];

  void find(const Run<C>& run, const AttentionArgs& g, int64_t head) {
    const float* const of_head = g.kv_scales + g.layer * 2 * g.num_kv_heads + head;
    if (sizeof(C) == 1 && g.cache == kCacheFloat8)
      for (int64_t i = 0; i < KEYS; ++i) {
        keys[i] = of_head[0] * FLOAT8_SCALE;
        values[i] = of_head[run.value_offset ? g.num_kv_heads : 0] * FLOAT8_SCALE;
      }
    if (sizeof(C) > 1 || g.cache != kCacheInt8) return;
    for (int64_t t = 0; t < KEYS; t += GROUP) std::memcpy(keys + t, run.group(t) + g.head_dim * GROUP, GROUP * sizeof(float));
    for (int64_t i = 0; i < KEYS; ++i) std::memcpy(values + i, run.key(i) + run.value_offset + g.head_dim, sizeof(float));
  }
  static void multiply(float* scores, const float* scales, int64_t rows) {
    for (int64_t r = 0; r < rows && sizeof(C) == 1; ++r)
      for (int64_t t = 0; t < KEYS; t += W) store(scores + r * KEYS + t, load(scores + r * KEYS + t) * load(scales + t));
  }
};

// One query token and some key-value heads, in runs of KEYS keys, word by word (a word is two bfloat16 or a float32). They serve all query
// heads of the group.
template <class T, class C>
struct OneQuery {
  const AttentionArgs& g;
  const int64_t D, rows, heads, length, num_words;
  using Query = typename As<T, C>::Query;
  using Weight = typename As<T, C>::Weight;
  static constexpr int64_t depth = kStepDepth<Weight>;  // keys that are added in one step
  static constexpr bool coded = sizeof(C) == 1;         // keys and values are widened first
  Runs<C>& runs;
  Run<C>* now = nullptr;
  Ahead<C> ahead;
  Scales<C> scales;
  float *acc, *scores, *m, *l, *rescale;
  Query* queries;         // [rows][num_words]; this and acc, m and l are of the head at hand
  const Weight* weights;  // [rows][KEYS / depth]
  float* wide;            // keys, then values: see copy_keys
  const float* vectors[KEYS / W];  // of W keys: the first word of each, `stride` before the next
  int64_t stride = GROUP;  // compilers that know it make an address for each of the vectors: 1.08 times slower on Zen 4
  Scratch& s;

  OneQuery(const AttentionArgs& g, const AttentionItem& item, int64_t heads, Runs<C>& runs, Scratch& s)
      : g(g), D(g.head_dim), rows(g.num_heads / g.num_kv_heads), heads(heads), length(g.seq_lens[item.seq]),
        num_words(D / kStepDepth<Query>), runs(runs), ahead(row_length<C>(D) * int64_t(sizeof(C))), s(s) {
    const int64_t all = heads * rows;
    queries = reinterpret_cast<Query*>(s.q.reserve(all * D)); acc = s.acc.filled(all * D, 0.0f); scores = s.scores.reserve(rows * KEYS);
    m = s.m.filled(all, -INFINITY); l = s.l.filled(all, 0.0f); rescale = s.rescale.filled((rows + W - 1) / W * W, 0.0f);
    wide = s.keys.reserve(KEYS * D);
  }

  void find_keys() {
    Ahead<C> asking = ahead;
    const auto ask = [&] { asking.template step<1>(); };
    group_keys(*now, D, s.grouped, ask);
    for (int64_t t = 0; t < KEYS; t += W)
      if constexpr (coded) vectors[t / W] = wide + t / GROUP * GROUP * num_words + t % GROUP;
      else vectors[t / W] = now->items(t);
    if (coded) copy_keys<GROUP, Query>(*now, D, now->begin, now->end, wide, ask);
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
    int64_t row = 0, left = rows;
    for (; left > 4; left -= 4, row += 4) score<4>(row);
    if (left == 4) score<4>(row);
    if (left == 3) score<3>(row);
    if (left == 2) score<2>(row);
    if (left == 1) score<1>(row);
    scales.multiply(scores, scales.keys, rows);
  }

  void update() {  // scores become exp(scores - new maximum)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t t = 0; t < now->begin; ++t) scores[row * KEYS + t] = -INFINITY;
    Ahead<C> asking = ahead;
    update_rows<Weight>(m, l, scores, rows, now->end, g, rescale, [&] { asking.template step<2>(); });
    ahead = asking;
    scales.multiply(scores, scales.values, rows);
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
    const C* const* const keys = now->keys;
    Ahead<C> asking = ahead;
    for (int64_t t = now->begin / depth * depth, end = now->end; t < end; t += depth) {  // beside a run's ends lies weight 0
      if (t / depth % SPACED == 0) asking.template step<1>();
      vf v[NV];
      if constexpr (coded) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) v[j] = load(wide + t / depth * D + d + j * W);
      } else {
        load_values<NV, Weight>(keys[t] + offset, keys[t + depth - 1] + offset, v);
      }
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
    if (coded) copy_values<Weight>(*now, D, now->begin, now->end, wide);
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
        now = &run;
        find_keys();
        scales.find(run, g, item.head + head);
        score_run();
        update();
        add_run();
        while (ahead.pair < ahead.end) ahead.template step<1>();
      }
      move(-heads);
    } while (now->start + now->end < length);
    for (int64_t row = 0; row < heads * rows; ++row) in_order<C>(acc + row * D, D);
    const int64_t at = row0 * g.num_heads + item.head * rows;
    write_rows(acc, l, m, sinks_of(g, item), g.scale, heads * rows, D, static_cast<T*>(g.out) + at * D, g.lse ? g.lse + at : nullptr);
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

// Many query tokens, one key-value head: rows are (token, query head of the group).
template <class T, class C>
static void attend_many(const AttentionArgs& g, const AttentionItem& item, Scratch& s) {
  using X = typename As<T, C>::Weight;  // and what queries are multiplied as: keys lie widened
  const KeyValues<C> kv(g, item);
  Run<C> run;
  Scales<C> scales;
  const int64_t D = g.head_dim, group = g.num_heads / g.num_kv_heads, rows = item.num_queries * group, steps = D / kStepDepth<X>;
  const int64_t row0 = int64_t(g.query_start_loc[item.seq]) + item.query, length = g.seq_lens[item.seq];
  const int64_t first = length - (g.query_start_loc[item.seq + 1] - g.query_start_loc[item.seq]) + item.query;  // position of row 0
  X* const queries = reinterpret_cast<X*>(s.q.reserve(rows * D));
  float *acc = s.acc.filled(rows * D, 0.0f), *scores = s.scores.reserve(STRIP * KEYS);
  float *m = s.m.filled(rows, -INFINITY), *l = s.l.filled(rows, 0.0f);
  float *keys = s.keys.reserve(KEYS * D), *values = s.values.reserve(KEYS * D), *weights = s.weights.reserve(STRIP * KEYS);
  const T* q = static_cast<const T*>(g.q) + row0 * g.q_stride + item.head * group * D;
  for (int64_t r = 0; r < rows; ++r) take_query(q + r / group * g.q_stride + r % group * D, queries + r * steps, D);
  const int64_t end = first + item.num_queries, begin = larger(0, first + 1 - g.window) / KEYS * KEYS;
  for (int64_t t = begin; t < end; t += KEYS) {
    run.find(kv, t, length);
    group_keys(run, D, s.grouped, [] {});
    scales.find(run, g, item.head);
    copy_keys<KEYS, X>(run, D, 0, KEYS, keys, [] {});
    copy_values<X>(run, D, 0, KEYS, values);
    for (int64_t r = 0; r < rows; r += STRIP) {
      const int64_t strip = smaller(STRIP, rows - r);
      if (first + (r + strip - 1) / group < t) continue;                  // all of it lies before this tile
      if (first + r / group - g.window >= t + KEYS - 1) continue;         // or has moved past it
      score_strip(int(strip), queries + r * steps, steps, keys, scores);
      scales.multiply(scores, scales.keys, strip);
      float rescale[(STRIP + W - 1) / W * W] = {};
      for (int64_t i = 0; i < strip; ++i) {
        float* row = scores + i * KEYS;
        const int64_t position = first + (r + i) / group;
        for (int64_t j = larger(0, position + 1 - t); j < KEYS; ++j) row[j] = -INFINITY;
        for (int64_t j = smaller(KEYS, position + 1 - g.window - t) - 1; j >= 0; --j) row[j] = -INFINITY;
      }
      update_rows<X>(m + r, l + r, scores, strip, KEYS, g, rescale, [] {});
      scales.multiply(scores, scales.values, strip);
      value_strip(int(strip), as_weights(scores, strip * KEYS, reinterpret_cast<X*>(weights)), values, D, rescale, acc + r * D);
    }
  }
  for (int64_t i = 0; i < item.num_queries; ++i) {
    const int64_t at = (row0 + i) * g.num_heads + item.head * group;
    write_rows(acc + i * group * D, l + i * group, m + i * group, sinks_of(g, item), g.scale, group, D, static_cast<T*>(g.out) + at * D,
               g.lse ? g.lse + at : nullptr);
  }
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

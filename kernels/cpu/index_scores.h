// Scores by which sparse attention chooses its keys (DeepSeek-V3.2-Exp, 2025, equation 1; the "lightning indexer"):
//   score of key t = sum over heads h of weight[h] max(0, q[h] . key[t])
// 2 d + 3 FLOPs a key and head; bytes: each key once a query. Dot products are attention's, heads are added in their order: a score's bits do
// not depend on its batch.

template <class T>
static void score_keys(const IndexArgs& g, const IndexItem& item, Scratch& s) {
  using X = typename As<T, T>::Weight;  // keys lie widened
  const AttentionArgs& a = g.of;
  const int64_t D = a.head_dim, heads = a.num_heads, steps = D / kStepDepth<X>;
  const KeyValues<T> kv(a, AttentionItem{item.seq, 0, 1, 0});
  Run<T> run;
  X* const queries = reinterpret_cast<X*>(s.q.reserve(heads * D));
  float *const keys = s.keys.reserve(KEYS * D), *const scores = s.scores.reserve(STRIP * KEYS);
  const T* const q = static_cast<const T*>(a.q) + item.token * a.q_stride;
  const float* const weights = g.weights + item.token * heads;
  for (int64_t h = 0; h < heads; ++h) take_query(q + h * D, queries + h * steps, D);
  for (int64_t t = item.first; t < item.last; t += KEYS) {
    run.find(kv, t, item.last);
    group_keys(run, D, s.grouped, [] {});
    copy_keys<KEYS, X>(run, D, 0, KEYS, keys, [] {});
    vf total[KEYS / W] = {};
    for (int64_t h = 0; h < heads; h += STRIP) {
      const int64_t strip = smaller(STRIP, heads - h);
      score_strip(int(strip), queries + h * steps, steps, keys, scores);
      for (int64_t i = 0; i < strip; ++i)
        for (int64_t j = 0; j < KEYS / W; ++j) total[j] = multiply_add(total[j], weights[h + i], vmax(load(scores + i * KEYS + j * W), splat(0.0f)));
    }
    for (int64_t j = 0; j < KEYS / W; ++j) store(g.scores + item.row * g.row + t + j * W, total[j]);
  }
}

static void index_scores(const IndexArgs& g, const IndexItem* items, int64_t first, int64_t last) {
  static thread_local Scratch scratch;
  for (int64_t i = first; i < last; ++i) {
    if (g.of.dtype == kFloat32) score_keys<float>(g, items[i], scratch);
    else score_keys<bf16>(g, items[i], scratch);
  }
}

// The choice of sparse attention's keys: the `count` largest scores of a query token (index_scores.h); of equal ones the first.
namespace {

constexpr int64_t kScoreFloats = 4 << 20, kIndexKeys = 1024;  // scores that are held at once; keys of an item, a multiple of 64

// In the order of the floats; 0 is -0, and NaNs lie at the ends.
uint32_t in_order(float score) {
  uint32_t bits;
  score += 0.0f;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Writes their slots, in the order of positions. There are more than `count` keys.
void choose(const IndexArgs& g, const IndexItem& item, const float* scores) {
  static thread_local std::vector<uint32_t> keys, sorted;
  keys.resize(size_t(item.last));
  for (int64_t t = 0; t < item.last; ++t) keys[size_t(t)] = in_order(scores[t]);
  sorted = keys;
  std::nth_element(sorted.begin(), sorted.begin() + (g.count - 1), sorted.end(), std::greater<uint32_t>());
  const uint32_t least = sorted[size_t(g.count - 1)];
  int64_t equal = g.count - std::count_if(sorted.begin(), sorted.begin() + g.count, [&](uint32_t key) { return key > least; });
  const int32_t* const table = g.of.block_tables + item.seq * g.of.table_stride;
  const int64_t size = g.of.block_size;
  int32_t* slot = g.slots + item.token * g.count;
  for (int64_t start = 0; start < item.last; start += size) {
    const int32_t first = int32_t(table[start / size] * size);
    for (int64_t t = start; t < std::min(item.last, start + size); ++t)
      if (keys[size_t(t)] > least || (keys[size_t(t)] == least && equal-- > 0)) *slot++ = first + int32_t(t - start);
  }
}

// Some tokens at a time: all their scores are made, then each is chosen for.
void call(IndexArgs& g) {
  static thread_local std::vector<float> scores;
  static thread_local std::vector<IndexItem> tokens, items;
  const Kernels* kernels = with_vectors_for(g.of.head_dim);
  int64_t longest = 0;
  tokens.clear();
  for (int32_t s = 0; s < g.of.num_seqs; ++s) {
    const int32_t first = g.of.query_start_loc[s], last = g.of.query_start_loc[s + 1];
    for (int32_t token = first; token < last; ++token) tokens.push_back({s, token, 0, 0, g.of.seq_lens[s] - (last - 1 - token)});
    if (last > first) longest = std::max<int64_t>(longest, g.of.seq_lens[s]);
  }
  g.row = (longest + 63) / 64 * 64;
  const int64_t at_once = std::max<int64_t>(1, kScoreFloats / std::max<int64_t>(g.row, 1)), count = int64_t(tokens.size());
  scores.resize(size_t(std::min(at_once, count) * g.row));
  g.scores = scores.data();
  for (int64_t start = 0; start < count; start += at_once) {
    const int64_t rows = std::min(at_once, count - start);
    IndexItem* const now = tokens.data() + start;
    items.clear();
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t t = 0; t < now[row].last; t += kIndexKeys)
        items.push_back({now[row].seq, now[row].token, int32_t(row), t, std::min(now[row].last, t + kIndexKeys)});
    const IndexItem* const parts = items.data();  // other threads have an `items` of their own
    pool->run(int64_t(items.size()), 1, [&](int64_t first, int64_t last) { kernels->index_scores(g, parts, first, last); });
    pool->run(rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) choose(g, now[row], g.scores + row * g.row);
    });
  }
}
}  // namespace

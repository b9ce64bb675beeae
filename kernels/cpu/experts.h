// A mixture's rows: each chooses its experts, and takes the weighted sum of their outputs. The products are linear.h's.
//   weight of a chosen expert = factor e^(logit - highest) / (sum of the same over the chosen experts, or over all), or
//   factor sigmoid(logit) / (1, or the sum of the same over the chosen experts)
// Chosen are the largest logits or sigmoids plus correction, of the groups that have the largest (with a correction: the largest sums of
// two); of equal ones, the lower number. Sums go in the order of the experts' numbers, in float32: a row's
// bits depend on no other row.

static inline vf sigmoid(vf x) { return 1.0f / (vexp(-x) + 1.0f); }

// The experts of other groups become -infinity.
static void keep_groups(const RouteArgs& g, float* choice, float* bests) {
  const int64_t size = g.num_experts / g.num_groups;
  const auto best = [&](int64_t group) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = group * size; i < (group + 1) * size; ++i)
      if (choice[i] > first) { second = first; first = choice[i]; }
      else if (choice[i] > second) second = choice[i];
    return g.correction ? first + second : first;
  };
  for (int64_t group = 0; group < g.num_groups; ++group) bests[group] = best(group);
  for (int64_t group = 0; group < g.num_groups; ++group) {
    int64_t above = 0;
    for (int64_t other = 0; other < g.num_groups; ++other)
      above += bests[other] > bests[group] || (bests[other] == bests[group] && other < group);
    if (above < g.chosen_groups) continue;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) choice[i] = -INFINITY;
  }
}

// `padded`: n and what fills the last register, -INFINITY.
static void softmax_row(float* values, int64_t n, int64_t padded) {
  float highest = -INFINITY, total = 0;
  for (int64_t i = 0; i < n; ++i) highest = values[i] > highest ? values[i] : highest;
  for (int64_t i = 0; i < padded; i += W) store(values + i, vexp(load(values + i) - highest));
  for (int64_t i = 0; i < n; ++i) total += values[i];
  for (int64_t i = 0; i < n; ++i) values[i] /= total;
}

template <class T>
static void route_row(const RouteArgs& g, const T* logits, int32_t* experts, float* weights, float* values) {
  const int64_t n = g.num_experts, padded = (n + W - 1) / W * W;
  float* const choice = values + padded;
  for (int64_t i = 0; i < padded; ++i) values[i] = i < n ? widen(logits[i]) : -INFINITY;
  if (g.sigmoid)
    for (int64_t i = 0; i < padded; i += W) store(values + i, sigmoid(load(values + i)));
  const bool scored = g.sigmoid || g.correction;  // values are scores, not logits, from here on
  if (g.correction && !g.sigmoid) softmax_row(values, n, padded);
  for (int64_t i = 0; i < n; ++i) choice[i] = g.correction ? values[i] + g.correction[i] : values[i];
  if (g.num_groups > 1) keep_groups(g, choice, choice + padded);
  for (int64_t c = 0; c < g.chosen; ++c) {  // insertion in ascending order of numbers
    int64_t best = -1, place = c;
    for (int64_t i = 0, next = 0; i < n; ++i) {
      if (next < c && experts[next] == i) { ++next; continue; }
      if (best < 0 || choice[i] > choice[best]) best = i;
    }
    for (; place > 0 && experts[place - 1] > best; --place) experts[place] = experts[place - 1];
    experts[place] = int32_t(best);
  }
  float highest = -INFINITY, total = 0;
  for (int64_t c = 0; c < g.chosen; ++c) highest = values[experts[c]] > highest ? values[experts[c]] : highest;
  if (!scored)
    for (int64_t i = 0; i < padded; i += W) store(values + i, vexp(load(values + i) - highest));
  if (g.normalized)
    for (int64_t c = 0; c < g.chosen; ++c) total += values[experts[c]];
  else if (scored) total = 1;
  else
    for (int64_t i = 0; i < n; ++i) total += values[i];
  for (int64_t c = 0; c < g.chosen; ++c) weights[c] = values[experts[c]] / total * g.factor;
  if (g.gated) weights[g.chosen] = sigmoid(splat(widen(logits[n])))[0];
}

static void route(const RouteArgs& g, int64_t first, int64_t last) {
  static thread_local Floats values;
  float* const own = values.reserve(2 * ((g.num_experts + W - 1) / W * W) + g.num_groups);
  const int64_t columns = g.num_experts + g.gated, weights = g.chosen + g.gated;
  for (int64_t row = first; row < last; ++row) {
    int32_t* const experts = g.experts + row * g.chosen;
    if (g.dtype == kFloat32) route_row(g, static_cast<const float*>(g.logits) + row * columns, experts, g.weights + row * weights, own);
    else route_row(g, static_cast<const bf16*>(g.logits) + row * columns, experts, g.weights + row * weights, own);
  }
}

template <class T>
static void add_weighted_of(const T* y, float weight, float* sum, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(sum + i, load(sum + i) + load(y + i) * weight);
  for (; i < n; ++i) sum[i] += widen(y[i]) * weight;
}

// sum += weight y, a row of n.
static void add_weighted(const void* y, float weight, float* sum, int64_t n, Dtype dtype) {
  if (dtype == kFloat32) add_weighted_of(static_cast<const float*>(y), weight, sum, n);
  else add_weighted_of(static_cast<const bf16*>(y), weight, sum, n);
}

// y = sum, n numbers.
static void narrow_all(const float* sum, void* y, int64_t n, Dtype dtype) {
  if (dtype == kFloat32) { std::memcpy(y, sum, size_t(n) * sizeof(float)); return; }
  bf16* const out = static_cast<bf16*>(y);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(sum + i));
  for (; i < n; ++i) narrow(out + i, sum[i]);
}

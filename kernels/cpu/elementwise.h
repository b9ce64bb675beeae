// The small kernels between the matrix products: each reads its inputs once and writes its output once. Sums are float32.

template <class T>
static float mean_of_row(const T* x, int64_t n) {
  vf sums = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) sums += load(x + i);
  float total = sum(sums);
  for (; i < n; ++i) total += widen(x[i]);
  return total / float(n);
}

template <class T>
static void norm_row(const T* x, const T* weight, T* y, int64_t n, float eps, float mean = 0.0f) {
  vf squares = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) { const vf v = load(x + i) - mean; squares += v * v; }
  float total = sum(squares);
  for (; i < n; ++i) total += (widen(x[i]) - mean) * (widen(x[i]) - mean);
  const float scale = 1.0f / std::sqrt(total / float(n) + eps);
  for (i = 0; i + W <= n; i += W) store(y + i, (load(x + i) - mean) * scale * load(weight + i));
  for (; i < n; ++i) narrow(y + i, (widen(x[i]) - mean) * scale * widen(weight[i]));
}

template <class T>
static void add_row(const T* x, T* residual, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(residual + i, load(residual + i) + load(x + i));
  for (; i < n; ++i) narrow(residual + i, widen(residual[i]) + widen(x[i]));
}

template <class T>
static void add_rms_norm_of(const NormArgs& g, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    T* residual = static_cast<T*>(g.residual) + row * g.n;
    if (g.x) add_row(static_cast<const T*>(g.x) + row * g.n, residual, g.n);
    T* y = static_cast<T*>(g.y) + row * g.n;
    if (g.weight) norm_row(residual, static_cast<const T*>(g.weight), y, g.n, g.eps);
    else std::memcpy(y, residual, size_t(g.n) * sizeof(T));
  }
}

static void add_rms_norm(const NormArgs& g, int64_t first, int64_t last) {
  if (g.dtype == kFloat32) add_rms_norm_of<float>(g, first, last);
  else add_rms_norm_of<bf16>(g, first, last);
}

// y = gate / (1 + exp(-slope)) * up. silu: slope = gate. gelu by tanh: slope = 2 sqrt(2 / pi) (gate + 0.044715 gate^3). Clamped silu
// (gpt-oss): slope = 1.702 gate, gate at most 7, up from -7 to 7, plus 1.
struct Silu {
  template <class V>
  static V slope(V x) { return x; }
  template <class V>
  static V gate(V x) { return x; }
  template <class V>
  static V up(V x) { return x; }
};
struct Gelu : Silu {
  template <class V>
  static V slope(V x) { return x * (x * x * 0.07135481627f + 1.5957691216f); }
};
struct ClampedSilu {
  static vf slope(vf x) { return x * 1.702f; }
  static vf gate(vf x) { return vmin(x, splat(7.0f)); }
  static vf up(vf x) { return vmax(vmin(x, splat(7.0f)), splat(-7.0f)) + 1.0f; }
};

struct ReluSquared {};  // of up alone

template <class Gate>
static inline vf gated(vf gate, vf up) {
  const vf x = Gate::gate(gate);
  return x / (vexp(-Gate::slope(x)) + 1.0f) * Gate::up(up);
}
template <>
inline vf gated<ReluSquared>(vf, vf up) {
  const vf x = vmax(up, vf{});
  return x * x;
}
template <class Gate>
constexpr int64_t kInputs = 2;
template <>
constexpr int64_t kInputs<ReluSquared> = 1;

// The last numbers of a row like the others: a rank's part of a row has the bits of the whole.
template <class Gate, class T>
static void gate_mul_of(const T* gate_up, T* y, int64_t n, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const T *gate = gate_up + row * kInputs<Gate> * n, *up = gate + (kInputs<Gate> - 1) * n;
    T* out = y + row * n;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, gated<Gate>(load(gate + i), load(up + i)));
    if (i == n) continue;
    T gates[W] = {}, ups[W] = {}, outs[W];
    std::copy(gate + i, gate + n, gates);
    std::copy(up + i, up + n, ups);
    store(outs, gated<Gate>(load(gates), load(ups)));
    std::copy(outs, outs + (n - i), out + i);
  }
}

template <class Gate>
static void gate_mul(const void* gate_up, void* y, int64_t n, Dtype dtype, int64_t first, int64_t last) {
  if (dtype == kFloat32) gate_mul_of<Gate>(static_cast<const float*>(gate_up), static_cast<float*>(y), n, first, last);
  else gate_mul_of<Gate>(static_cast<const bf16*>(gate_up), static_cast<bf16*>(y), n, first, last);
}

// (x[i], x[i + d/2]) turned by angle i; cosines at table, sines at table + d/2.
template <class T>
static void rotate(T* x, const float* table, int64_t d) {
  const int64_t half = d / 2;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const vf a = load(x + i), b = load(x + half + i), c = load(table + i), s = load(table + half + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = widen(x[i]), b = widen(x[half + i]), c = table[i], s = table[half + i];
    narrow(x + i, a * c - b * s);
    narrow(x + half + i, b * c + a * s);
  }
}

template <class T, class C>
static void rope_and_store_of(const RopeArgs& g, int64_t first, int64_t last) {
  const int64_t D = g.head_dim, kv_size = g.num_kv_heads * D, q_size = g.num_heads * D;
  const int64_t row = row_length<C>(D), run = g.block_size * row;
  const float* const scales = g.kv_scales + g.layer * 2 * g.num_kv_heads;  // read for float8 alone
  static thread_local Floats buffer;
  C* const coded = reinterpret_cast<C*>(buffer.reserve(row));
  for (int64_t token = first; token < last; ++token) {
    T *q = static_cast<T*>(g.qkv) + token * (q_size + g.planes * kv_size), *k = q + q_size;
    const float* table = g.cos_sin + g.positions[token] * D;
    if (g.norms_all_heads) {
      norm_row(q, static_cast<const T*>(g.q_norm), q, q_size, g.eps);
      norm_row(k, static_cast<const T*>(g.k_norm), k, kv_size, g.eps);
    }
    for (int64_t h = 0; h < g.num_heads + g.num_kv_heads; ++h) {
      T* head = q + h * D;
      const T* weight = static_cast<const T*>(h < g.num_heads ? g.q_norm : g.k_norm);
      if (weight && g.norms_each_head) norm_row(head, weight + (h < g.num_heads ? h : h - g.num_heads) * D, head, D, g.eps, mean_of_row(head, D));
      else if (weight && !g.norms_all_heads) norm_row(head, weight, head, D, g.eps);
      rotate(head, table, D);
    }
    if (g.slots[token] < 0) continue;
    const int64_t block = g.slots[token] / g.block_size, offset = g.slots[token] % g.block_size;
    C* slot = static_cast<C*>(g.pool) + (block * g.num_layers + g.layer) * g.planes * g.plane + offset * row;
    const int64_t in_group = offset % GROUP, grouped = keys_in_groups(g.planes, g.block_size) ? g.num_kv_heads : 0;
    for (int64_t h = 0; h < g.planes * g.num_kv_heads; ++h) {  // keys, then values
      C* const place = slot + h / g.num_kv_heads * g.plane + h % g.num_kv_heads * g.head_step * run;
      if constexpr (sizeof(C) == 1) write_row(k + h * D, h < grouped ? coded : place, D, g.cache == kCacheFloat8 ? scales[h] : 1.0f);
      else if (h >= grouped) std::memcpy(place, k + h * D, size_t(D) * sizeof(C));
      if (h < grouped) write_in_group(sizeof(C) == 1 ? coded : reinterpret_cast<const C*>(k + h * D), place - in_group * row, in_group, D);
    }
  }
}

template <class T>
static void rope_and_store_as(const RopeArgs& g, int64_t first, int64_t last) {
  if (g.cache == kCacheFloat8) rope_and_store_of<T, Float8>(g, first, last);
  else if (g.cache == kCacheInt8) rope_and_store_of<T, Int8>(g, first, last);
  else rope_and_store_of<T, T>(g, first, last);
}

static void rope_and_store(const RopeArgs& g, int64_t first, int64_t last) {
  if (g.dtype == kFloat32) rope_and_store_as<float>(g, first, last);
  else rope_and_store_as<bf16>(g, first, last);
}

// argmax of logits + Gumbel noise; the formula is in gumbel_noise.py. No noise exceeds 23, so vectors that are further than that below
// the best so far are passed over.
static inline vu mix32(vu x) {
  x ^= x >> 16; x *= 0x85EBCA6Bu; x ^= x >> 13; x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

static inline vf gumbel(vu h) {
  const vf wide = __builtin_convertvector(h >> 16, vf) * 65536.0f + __builtin_convertvector(h & 0xffffu, vf);  // float(h)
  const vf v = vmin((wide + 0.5f) * 0x1p-32f, splat(1.0f - 0x1p-24f));
  const vf u = 1.0f - v;  // log1p(-v) = log(u) * v / (1 - u): exact where 1 - v rounds (Kahan)
  const vf lost = 1.0f - u, log1p = select(lost == 0.0f, -v, vlog(u) * (v / lost));
  return -vlog(-log1p);
}

static void gumbel_argmax(const float* logits, const int64_t* keys, int64_t* chosen, int64_t vocab_size, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* x = logits + row * vocab_size;
    const uint32_t k0 = uint32_t(keys[2 * row]), k1 = uint32_t(keys[2 * row + 1]);
    float best = -INFINITY;
    int64_t best_id = 0;
    vu lane = {};
    for (int64_t i = 0; i < W; ++i) lane[i] = uint32_t(i);
    for (int64_t start = 0; start < vocab_size; start += W) {
      vf logit = splat(-INFINITY);
      if (start + W <= vocab_size) logit = load(x + start);
      else for (int64_t i = start; i < vocab_size; ++i) logit[i - start] = x[i];
      if (largest(logit) + 23.0f <= best) continue;
      const vu token = lane + uint32_t(start);
      const vf total = logit + gumbel(mix32(mix32(token * 0x9E3779B1u + k0) ^ k1));
      for (int64_t i = 0; i < W; ++i)
        if (total[i] > best) { best = total[i]; best_id = start + i; }
    }
    chosen[row] = best_id;
  }
}

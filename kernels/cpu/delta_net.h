// Gated delta nets: convolution, gates, the recurrence over a state in KV blocks, and the gated norm. Formulas and layout: ../delta_net.py.
//
//   kv = S' k,  sq = S' q,  delta = beta (v - g kv),  o = g sq + (k' q) delta,  S = g S + k delta'
//
// Mamba-2's rule has no kv (which is summed all the same: one token waits for memory) and adds skip v to o.
//
// S is [key_dim, value_dim] of one value head; one item of work is one head of one sequence. 8 FLOPs a number of S and token.
//   one token:    S is read where it lies for the two sums, then read again (from L2) and written to its other copy. Memory-bound: bytes are S
//                 in and out. A core of Zen 4 takes 11.5 us for 128 x 128, as for a copy of 64 KiB in memory.
//   many tokens:  S is copied to slices of columns that stay in L1 while a tile of tokens goes by; the pass that changes S for a token sums
//                 for the next one. Compute-bound: 1.8 us a token there; two passes over S in L2 would take 3.4.
// A column's sums are one chain of multiply-adds each in the order of its rows, whatever the path: a token has the same bits in any chunk.

constexpr int64_t TOKEN_TILE = 64;
constexpr int SLICE = VECTOR_BYTES == 64 ? 2 : 4;  // vectors of columns: a slice of 128 rows has 16 KiB
constexpr int WIDE = VECTOR_BYTES == 64 ? 8 : 4;   // the same for one token: what the register file holds
constexpr int64_t ROWS_AT_ONCE = 16;               // of S, for one token: they stay in L1 while slices of columns go by
constexpr float L2_EPS = 1e-6f;

// Of two products that are added, compilers would make either one part of a multiply-add; this one is rounded.
static inline __attribute__((always_inline)) vf rounded_product(vf x, vf y) {
  vf product = x * y;
#if defined(__x86_64__)
  asm("" : "+v"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

// To memory past the caches: until these numbers are read again all weights of the model go by. Aligned.
static inline void store_past(float* p, vf x) {
#if VECTOR_BYTES == 64
  _mm512_stream_ps(p, (__m512)x);
#elif VECTOR_BYTES == 32
  _mm256_stream_ps(p, (__m256)x);
#elif defined(__SSE2__)
  __builtin_ia32_movntps(p, x);
#else
  store(p, x);
#endif
}
static inline void await_stores_past() {  // else other threads may not see them in time
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

// f(number of vectors, first column) for slices of N vectors, narrower ones at the end.
template <int N>
struct Vectors { static constexpr int count = N; };
template <int N, class F>
static inline __attribute__((always_inline)) void by_slices(int64_t first, int64_t columns, F&& f) {
  for (; first + N * W <= columns; first += N * W) f(Vectors<N>(), first);
  if constexpr (N > 1) by_slices<N / 2>(first, columns, f);
}

struct SliceRows {  // of N vectors, one behind the other
  float* first;
  int64_t step;
  float* operator()(int64_t i) const { return first + i * step; }
};
struct FoundRows {  // from one column on
  float* const* rows;
  int64_t column;
  float* operator()(int64_t i) const { return rows[i] + column; }
};
struct NoRows {};
template <int N>
static inline void ask_row(FoundRows rows, int64_t i) {
#pragma GCC unroll 8
  for (int j = 0; j < N * W; j += 16) __builtin_prefetch(rows(i) + j);
}
template <int N>
static inline void ask_row(NoRows, int64_t) {}

// kv += S' k, sq += S' q, of N vectors of columns and some rows of S. Asks memory for as many rows of `next`.
template <int N, class Rows, class Next>
static inline __attribute__((always_inline)) void sum_rows(Rows s, int64_t count, const float* k, const float* q, float* kv, float* sq, Next next) {
  vf of_k[N], of_q[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) of_k[j] = load(kv + j * W), of_q[j] = load(sq + j * W);
  for (int64_t i = 0; i < count; ++i) {
    ask_row<N>(next, i);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const vf x = load(s(i) + j * W);
      of_k[j] += x * k[i];
      of_q[j] += x * q[i];
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) store(kv + j * W, of_k[j]), store(sq + j * W, of_q[j]);
}

// S = g S + k delta', from some rows to others.
template <int N, bool kPast, class Rows, class Next>
static inline __attribute__((always_inline)) void update_rows(Rows s, Rows to, int64_t count, float decay, const float* k, const float* delta,
                                                              Next next) {
  vf of_delta[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) of_delta[j] = load(delta + j * W);
  for (int64_t i = 0; i < count; ++i) {
    ask_row<N>(next, i);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const vf x = rounded_product(load(s(i) + j * W), splat(decay)) + splat(k[i]) * of_delta[j];
      if constexpr (kPast) store_past(to(i) + j * W, x);
      else store(to(i) + j * W, x);
    }
  }
}

// The same in place in a slice, and the sums of the next token.
template <int N>
static inline __attribute__((always_inline)) void update_and_sum_rows(SliceRows s, int64_t count, float decay, const float* k, const float* delta,
                                                                      const float* next_k, const float* next_q, float* kv, float* sq) {
  vf of_delta[N], of_k[N], of_q[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) of_delta[j] = load(delta + j * W), of_k[j] = vf{}, of_q[j] = vf{};
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const vf x = rounded_product(load(s(i) + j * W), splat(decay)) + splat(k[i]) * of_delta[j];
      store(s(i) + j * W, x);
      of_k[j] += x * next_k[i];
      of_q[j] += x * next_q[i];
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) store(kv + j * W, of_k[j]), store(sq + j * W, of_q[j]);
}

template <class T>
static inline vf rounded_to(vf x) {
  T row[W];
  store(row, x);
  return load(row);
}
template <>
inline vf rounded_to<float>(vf x) { return x; }

template <class T>
static inline void widen_row(const T* x, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(y + i, load(x + i));
  for (; i < n; ++i) y[i] = widen(x[i]);
}

// Row `row` of taps [rows, taps] goes to column `row` of y [taps, step].
template <class T>
static inline void transpose_taps(const T* x, int64_t rows, int64_t taps, float* y, int64_t step) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t j = 0; j < taps; ++j) y[j * step + row] = widen(x[row * taps + j]);
}

struct Channels {  // of q, k or v of one head: how many, and where they begin in this head's rows, in `projected`, and in the kept inputs
  int64_t count, here, there, kept;
};

// Key heads of a key-value head: one that several have, or some of its own.
static inline int64_t keys_of_kv(const DeltaNetArgs& g) { return g.num_key_heads < g.num_kv_heads ? 1 : g.num_key_heads / g.num_kv_heads; }

// One value head of one sequence.
template <class T>
struct DeltaNetHead {
  const DeltaNetArgs& g;
  const int64_t seq, head, keys, values, past;  // past: inputs of the convolution that are kept
  const int64_t key_head, kv_head, value_in_kv, state_at, kept_at, kept_row;
  const bool keeps_key;  // of a key-value head's value heads that share a key head, the first one writes its inputs
  int64_t padded_keys, row, width, channels;
  Channels parts[3];
  float *taps, *bias, *seen, *mixed, *decay, *beta, *kq, *o, *kv, *sq, *delta, *state;
  float **source, **target;  // rows of S, and of the S behind it

  DeltaNetHead(const DeltaNetArgs& g, int64_t seq, int64_t head)
      : g(g), seq(seq), head(head), keys(g.key_dim), values(g.value_dim), past(g.conv_size - 1),
        key_head(head / (g.num_value_heads / g.num_key_heads)), kv_head(head / (g.num_value_heads / g.num_kv_heads)),
        value_in_kv(head % (g.num_value_heads / g.num_kv_heads)), state_at(g.offset + value_in_kv * keys * values),
        kept_at(g.offset + g.num_value_heads / g.num_kv_heads * keys * values),
        kept_row(2 * keys_of_kv(g) * keys + g.num_value_heads / g.num_kv_heads * values),
        keeps_key(value_in_kv % smaller(g.num_value_heads / g.num_key_heads, g.num_value_heads / g.num_kv_heads) == 0) {
    const int64_t kv_keys = keys_of_kv(g), key_in_kv = key_head % kv_keys;
    channels = 2 * g.num_key_heads * keys + g.num_value_heads * values;
    width = channels + g.num_value_heads * (values + (g.skip ? 1 : 2));
    padded_keys = (keys + W - 1) / W * W;
    row = 2 * padded_keys + values;
    parts[0] = {keys, 0, key_head * keys, key_in_kv * keys};
    parts[1] = {keys, padded_keys, (g.num_key_heads + key_head) * keys, (kv_keys + key_in_kv) * keys};
    parts[2] = {values, 2 * padded_keys, 2 * g.num_key_heads * keys + head * values, 2 * kv_keys * keys + value_in_kv * values};
    static thread_local Floats buffer;
    const int64_t pointers = 2 * keys;  // the room of one for each row, in floats
    const int64_t sizes[] = {g.conv_size * row, row, (past + TOKEN_TILE) * row, TOKEN_TILE * row, TOKEN_TILE, TOKEN_TILE, TOKEN_TILE,
                             TOKEN_TILE * values, values, values, values, keys * values, 2 * pointers, pointers};
    float *of_source, *of_target;
    float** const places[] = {&taps, &bias, &seen, &mixed, &decay, &beta, &kq, &o, &kv, &sq, &delta, &state, &of_source, &of_target};
    int64_t total = 0;
    for (const int64_t size : sizes) total += (size + 15) / 16 * 16;
    float* next = buffer.reserve(total);
    for (int i = 0; i < 14; ++i) *places[i] = next, next += (sizes[i] + 15) / 16 * 16;
    source = reinterpret_cast<float**>(of_source);
    target = reinterpret_cast<float**>(of_target);
  }

  StateRuns copy(int64_t which) const { return copy_of_state(g, seq, kv_head, which, values); }

  void begin(const StateRuns& from) {
    if (padded_keys != keys) std::memset(seen, 0, size_t((past + TOKEN_TILE) * row) * sizeof(float));
    if (padded_keys != keys) std::memset(taps, 0, size_t(g.conv_size * row) * sizeof(float));
    std::memset(bias, 0, size_t(row) * sizeof(float));
    for (const Channels& part : parts) {
      const int64_t first = part.there * g.conv_size;
      if (g.conv_bias) std::memcpy(bias + part.here, g.conv_bias + part.there, size_t(part.count) * sizeof(float));
      if (g.conv_dtype == kFloat32) transpose_taps(static_cast<const float*>(g.conv) + first, part.count, g.conv_size, taps + part.here, row);
      else transpose_taps(static_cast<const bf16*>(g.conv) + first, part.count, g.conv_size, taps + part.here, row);
      for (int64_t j = 0; j < past; ++j) from.read(kept_at + j * kept_row + part.kept, part.count, seen + j * row + part.here);
    }
  }

  // q, k, v, the decay and beta of tokens [first, first + count) of the step.
  void mix(int64_t first, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      const T* const x = static_cast<const T*>(g.projected) + (first + t) * width;
      float* const at = seen + (past + t) * row;
      for (const Channels& part : parts) widen_row(x + part.there, at + part.here, part.count);
      const T* const gates = x + channels + g.num_value_heads * values + head;
      const float a = widen(gates[g.skip ? 0 : g.num_value_heads]) + g.dt[head], step = a > 20.0f ? a : log1pf(expf(a));
      beta[t] = g.skip ? step : g.beta_scale / (1.0f + expf(-widen(gates[0])));
      decay[t] = expf(-g.decay[head] * step);
    }
    for (int64_t t = 0; t < count; ++t) {
      float* const y = mixed + t * row;
      for (int64_t c = 0; c < row; c += W) {
        vf x = load(bias + c);
        for (int64_t j = 0; j <= past; ++j) x += load(seen + (t + j) * row + c) * load(taps + j * row + c);
        store(y + c, x / (vexp(-x) + 1.0f));
      }
      float *const q = y, *const k = y + padded_keys;
      if (!g.skip) scale_to_length(q, 1.0f / std::sqrt(float(keys))), scale_to_length(k, 1.0f);
      vf products = {};
      for (int64_t c = 0; c < padded_keys; c += W) products += load(q + c) * load(k + c);
      kq[t] = sum(products);
    }
  }

  void scale_to_length(float* x, float length) const {
    vf squares = {};
    for (int64_t c = 0; c < padded_keys; c += W) squares += load(x + c) * load(x + c);
    const float scale = length / std::sqrt(sum(squares) + L2_EPS);
    for (int64_t c = 0; c < padded_keys; c += W) store(x + c, load(x + c) * scale);
  }

  // Of token t of the tile, by its sums: delta and o of some columns.
  void answer(int64_t t, int64_t first, int64_t columns) {
    const float* const v = mixed + t * row + 2 * padded_keys;
    for (int64_t c = first; c < first + columns; c += W) {
      const vf d = g.skip ? load(v + c) * beta[t] : (load(v + c) - load(kv + c) * decay[t]) * beta[t];
      const vf sum = rounded_product(load(sq + c), splat(decay[t])) + d * kq[t];
      store(delta + c, d);
      store(o + t * values + c, g.skip ? sum + load(v + c) * g.skip[head] : sum);
    }
  }

  // Where the rows of a head's S lie, [keys].
  void find_rows(const StateRuns& runs, int64_t first, float** rows) const {
    runs.pieces(first, keys * values, [&](float* place, int64_t done, int64_t piece) {
      for (int64_t at = 0; at < piece; at += values) rows[(done + at) / values] = place + at;
    });
  }

  // Memory has always something to do: it reads rows that are summed soon, then those of the head behind while it writes this one's.
  void step_once(const StateRuns& from, const StateRuns& to) {
    const float *const q = mixed, *const k = mixed + padded_keys;
    std::memset(kv, 0, size_t(values) * sizeof(float));
    std::memset(sq, 0, size_t(values) * sizeof(float));
    find_rows(to, state_at, target);
    if (from.base) {
      const bool more = value_in_kv + 1 < g.num_value_heads / g.num_kv_heads;
      find_rows(from, state_at, source);
      find_rows(from, state_at + (more ? keys * values : 0), source + keys);
      sum_in_place(k, q);
    } else {
      std::memset(state, 0, size_t(values) * sizeof(float));
      for (int64_t i = 0; i < 2 * keys; ++i) source[i] = state;
    }
    answer(0, 0, values);
    uintptr_t all = uintptr_t(values) * sizeof(float);
    for (int64_t i = 0; i < keys; ++i) all |= reinterpret_cast<uintptr_t>(target[i]);
    if (all % VECTOR_BYTES) return update_in_place<false>(k);
    update_in_place<true>(k);
    await_stores_past();
  }
  void sum_in_place(const float* k, const float* q) {
    for (int64_t i = 0; i < keys; i += ROWS_AT_ONCE)
      by_slices<WIDE>(0, values, [&](auto n, int64_t c) {
        const FoundRows next{source + smaller(i + ROWS_AT_ONCE, keys), c};
        sum_rows<n.count>(FoundRows{source + i, c}, smaller(ROWS_AT_ONCE, keys - i), k + i, q + i, kv + c, sq + c, next);
      });
  }
  template <bool kPast>
  void update_in_place(const float* k) {
    for (int64_t i = 0; i < keys; i += ROWS_AT_ONCE)
      by_slices<WIDE>(0, values, [&](auto n, int64_t c) {
        const FoundRows s{source + i, c}, to{target + i, c}, next{source + keys + i, c};
        update_rows<n.count, kPast>(s, to, smaller(ROWS_AT_ONCE, keys - i), decay[0], k + i, delta + c, next);
      });
  }

  // Slices of S lie one behind the other, each [keys][its columns].
  void read_state(const StateRuns& from) {
    if (!from.base) return void(std::memset(state, 0, size_t(keys * values) * sizeof(float)));
    find_rows(from, state_at, source);
    for (int64_t i = 0; i < keys; ++i)
      by_slices<SLICE>(0, values, [&](auto n, int64_t c) {
        ask_row<n.count>(FoundRows{source, c}, smaller(i + ROWS_AT_ONCE, keys - 1));
        std::memcpy(state + c * keys + i * (n.count * W), source[i] + c, sizeof(vf) * n.count);
      });
  }
  void write_state(const StateRuns& to) const {
    find_rows(to, state_at, target);
    for (int64_t i = 0; i < keys; ++i)
      by_slices<SLICE>(0, values, [&](auto n, int64_t c) {
        std::memcpy(target[i] + c, state + c * keys + i * (n.count * W), sizeof(vf) * n.count);
      });
  }

  void step_tile(int64_t count) {
    by_slices<SLICE>(0, values, [&](auto n, int64_t c) {
      constexpr int N = n.count;
      const SliceRows s{state + c * keys, N * W};
      const float *q = mixed, *k = mixed + padded_keys;
      std::memset(kv + c, 0, sizeof(vf) * N);
      std::memset(sq + c, 0, sizeof(vf) * N);
      sum_rows<N>(s, keys, k, q, kv + c, sq + c, NoRows());
      for (int64_t t = 0; t < count; ++t, q += row, k += row) {
        answer(t, c, N * W);
        if (t + 1 < count) update_and_sum_rows<N>(s, keys, decay[t], k, delta + c, k + row, q + row, kv + c, sq + c);
        else update_rows<N, false>(s, s, keys, decay[t], k, delta + c, NoRows());
      }
    });
  }

  void finish(int64_t first, int64_t count) {
    if (g.norm_dtype == kFloat32) finish_by(static_cast<const float*>(g.norm), first, count);
    else finish_by(static_cast<const bf16*>(g.norm), first, count);
  }
  template <class N>
  void finish_by(const N* weight, int64_t first, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      const T* const z = static_cast<const T*>(g.projected) + (first + t) * width + channels + head * values;
      T* const y = static_cast<T*>(g.out) + ((first + t) * g.num_value_heads + head) * values;
      const float* const x = o + t * values;
      if (g.skip) {
        for (int64_t c = 0; c < values; c += W) store(y + c, load(x + c) * (load(z + c) / (vexp(-load(z + c)) + 1.0f)));
        continue;
      }
      vf squares = {};
      for (int64_t c = 0; c < values; c += W) squares += load(x + c) * load(x + c);
      const float scale = 1.0f / std::sqrt(sum(squares) / float(values) + g.eps);
      for (int64_t c = 0; c < values; c += W) {
        const vf gate = load(z + c);
        store(y + c, load(weight + c) * rounded_to<T>(load(x + c) * scale) * (gate / (vexp(-gate) + 1.0f)));
      }
    }
  }

  void shift(int64_t count) { std::memmove(seen, seen + count * row, size_t(past * row) * sizeof(float)); }
  void write_past(const StateRuns& to) const {
    for (const Channels& part : parts)
      if (keeps_key || &part == parts + 2)
        for (int64_t j = 0; j < past; ++j) to.write(kept_at + j * kept_row + part.kept, part.count, seen + j * row + part.here);
  }

  void run() {
    const int32_t which = g.source[seq], start = g.query_start_loc[seq], end = g.query_start_loc[seq + 1], mark = g.marks[seq];
    if (which == PADDING) return;
    const StateRuns from = which == NO_STATE ? StateRuns{} : copy(which), last = copy(which == NO_STATE ? 0 : 1 - which), snapshot = copy(2);
    begin(from);
    if (end - start == 1) {
      mix(start, 1);
      step_once(from, last);
      finish(start, 1);
      shift(1);
      write_past(last);
      if (mark) {
        for (int64_t i = 0; i < keys; ++i) snapshot.write(state_at + i * values, values, target[i]);
        write_past(snapshot);
      }
      return;
    }
    read_state(from);
    for (int64_t token = start; token < end;) {
      const int64_t until = token < start + mark ? start + mark : end, count = smaller(TOKEN_TILE, until - token);
      mix(token, count);
      step_tile(count);
      finish(token, count);
      shift(count);
      token += count;
      if (token == start + mark) write_state(snapshot), write_past(snapshot);
    }
    write_state(last);
    write_past(last);
  }
};

static void delta_net(const DeltaNetArgs& g, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    if (g.dtype == kFloat32) DeltaNetHead<float>(g, i / g.num_value_heads, i % g.num_value_heads).run();
    else DeltaNetHead<bf16>(g, i / g.num_value_heads, i % g.num_value_heads).run();
  }
}

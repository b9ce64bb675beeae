// Short convolutions of gated inputs. Formulas and layout: ../short_conv.py.
//
//   s = b x,  y = c (bias + sum over j of conv[j] s[t - (conv_size - 1) + j])
//
// One item of work is a key-value head's channels of one sequence; the newest conv_size inputs are in a ring that stays in L1.
// Memory-bound: bytes are b, c and x in, y out; 2 (conv_size + 1) FLOPs a channel and token.
// A channel's sum is one chain of multiply-adds in the order of the taps: a token has the same bits in any chunk.

template <class T>
static void short_conv_of_head(const ShortConvArgs& g, int64_t seq, int64_t head) {
  const int64_t n = g.channels / g.num_kv_heads, first = head * n, size = g.conv_size, past = size - 1;
  const int32_t which = g.source[seq], start = g.query_start_loc[seq], count = g.query_start_loc[seq + 1] - start, mark = g.marks[seq];
  if (which == PADDING) return;
  const StateRuns from = which == NO_STATE ? StateRuns{} : copy_of_state(g, seq, head, which, 1);
  static thread_local Floats buffer;
  float* const ring = buffer.reserve(size * n + 2 * size);  // the input of token t, from the chunk's first on, is in row (t + past) % size
  float** const seen = reinterpret_cast<float**>(ring + size * n);  // a token's row, behind those of the tokens before it
  for (int64_t j = 0; j < past; ++j) from.read(g.offset + j * n, n, ring + j * n);
  const auto keep = [&](int64_t done, int64_t copy) {
    const StateRuns to = copy_of_state(g, seq, head, copy, 1);
    for (int64_t j = 0; j < past; ++j) to.write(g.offset + j * n, n, ring + (done + j) % size * n);
  };
  for (int64_t t = 0; t < count; ++t) {
    const T *const b = static_cast<const T*>(g.projected) + (start + t) * 3 * g.channels + first, *const c = b + g.channels, *const x = c + g.channels;
    T* const y = static_cast<T*>(g.out) + (start + t) * g.channels + first;
    for (int64_t j = 0; j < size; ++j) seen[j] = ring + (t + j) % size * n;
    for (int64_t i = 0; i < n; i += W) store(seen[past] + i, load(b + i) * load(x + i));
    for (int64_t i = 0; i < n; i += W) {
      vf sum = g.bias ? load(g.bias + first + i) : vf{};
      for (int64_t j = 0; j < size; ++j) sum += load(seen[j] + i) * load(g.conv + j * g.channels + first + i);
      store(y + i, load(c + i) * sum);
    }
    if (t + 1 == mark) keep(mark, 2);
  }
  keep(count, which == 0 ? 1 : 0);
}

static void short_conv(const ShortConvArgs& g, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    if (g.dtype == kFloat32) short_conv_of_head<float>(g, i / g.num_kv_heads, i % g.num_kv_heads);
    else short_conv_of_head<bf16>(g, i / g.num_kv_heads, i % g.num_kv_heads);
  }
}

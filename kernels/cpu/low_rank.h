// Low-rank updates of linear layers (Hu et al., LoRA, 2021): y += B A x of each row's own adapter; adapters' ranks differ.
// FLOPs: 2 ranks (k + n) a row. Bytes: A and B of each adapter once for each tile of its rows, which bounds a decode step.
// A lies in panels of one vector of ranks, B in panels of PANEL outputs, each laid out as linear.h's. Of a panel of B only the steps from the
// first that is not zero to the last are there: B of layers that are one product is a block diagonal.
// h = A x is summed in float32, and rounded where the bfloat16 units multiply it. Each sum has its order, whatever the rows beside it.
// Nothing is asked for ahead: measured at several distances, that made short streams slower.

template <class X>
struct NumberOf { typedef float type; };
template <>
struct NumberOf<Pair> { typedef bf16 type; };

// h of MR rows and a vector of ranks: even and odd steps apart, so that no multiplication waits for the one before.
template <int MR, class X>
static void multiply_down(const X* x, int64_t row, const float* a, int64_t steps, float* c) {
  vf acc[MR][2];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) acc[i][0] = acc[i][1] = vf{};
  int64_t step = 0;
  for (; step + 2 <= steps; step += 2)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const vf own = load(a + (step + j) * W);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) acc[i][j] = multiply_add(acc[i][j], x[i * row + step + j], own);
    }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    if (step < steps) acc[i][0] = multiply_add(acc[i][0], x[i * row + step], load(a + step * W));
    store(c + i * W, acc[i][0] + acc[i][1]);
  }
}

template <class T>
static inline void widen_row(const T* from, int64_t k, T* to) { std::memcpy(to, from, size_t(k) * sizeof(T)); }
static inline void widen_row(const bf16* from, int64_t k, float* to) {
  int64_t i = 0;
  for (; i + W <= k; i += W) store(to + i, load(from + i));
  for (; i < k; ++i) to[i] = widen(from[i]);
}

template <class X>
static void multiply_down(int rows, const X* x, int64_t row, const float* a, int64_t steps, float* c) {
  switch (rows) {
#define ROWS(R) case R: return multiply_down<R>(x, row, a, steps, c);
    ALL_ROWS
#undef ROWS
  }
}
template <class X>
static void multiply_up(int rows, const X* h, int64_t row, const float* b, int64_t steps, float* c) {
  switch (rows) {
#define ROWS(R) case R: return multiply_tile<R, kPanelVectors>(h, row, 1, b, PANEL, steps, false, nullptr, c, PANEL);
    ALL_ROWS
#undef ROWS
  }
}

template <class X, class T>
static void low_rank_down_as(const LowRankArgs& g, const LowRankTile& tile, int64_t first, int64_t last) {
  typedef typename NumberOf<X>::type N;
  static thread_local Floats x_buffer;
  constexpr int64_t depth = kStepDepth<X>;
  const int64_t steps = (g.k + depth - 1) / depth, stride = (g.k + 15) / 16 * 16 + 32;  // no two rows at a distance of whole pages
  N* const x = reinterpret_cast<N*>(x_buffer.reserve(ROW_TILE * stride));
  float c[ROW_TILE * W];
  for (int64_t start = 0; start < tile.count; start += ROW_TILE) {
    const int64_t height = smaller(ROW_TILE, tile.count - start);
    for (int64_t i = 0; i < height; ++i) {
      widen_row(static_cast<const T*>(g.x) + g.rows[tile.first + start + i] * g.k, g.k, x + i * stride);
      narrow(x + i * stride + g.k, 0.0f);
    }
    for (int64_t v = first; v < last; ++v) {
      const char* const a = static_cast<const char*>(g.slots[tile.slot].a) + v * steps * W * 4;
      multiply_down(int(height), reinterpret_cast<const X*>(x), stride / depth, reinterpret_cast<const float*>(a), steps, c);
      N* h = static_cast<N*>(g.h) + (tile.first + start) * g.h_row + v * W;
      for (int64_t i = 0; i < height; ++i, h += g.h_row) store(h, load(c + i * W));
    }
  }
}

template <class X, class T>
static void low_rank_up_as(const LowRankArgs& g, const LowRankTile& tile, int64_t first, int64_t last) {
  typedef typename NumberOf<X>::type N;
  const LowRankSlot& slot = g.slots[tile.slot];
  float c[ROW_TILE * PANEL];
  for (int64_t start = 0; start < tile.count; start += ROW_TILE) {
    const int64_t height = smaller(ROW_TILE, tile.count - start);
    const X* const h = reinterpret_cast<const X*>(static_cast<const N*>(g.h) + (tile.first + start) * g.h_row);
    for (int64_t p = first; p < last; ++p) {
      const int64_t steps = slot.starts[p + 1] - slot.starts[p];
      if (!steps) continue;
      const float* const b = static_cast<const float*>(slot.b) + slot.starts[p] * PANEL;
      multiply_up(int(height), h + slot.firsts[p], g.h_row / kStepDepth<X>, b, steps, c);
      for (int64_t i = 0; i < height; ++i) {
        T* const y = static_cast<T*>(g.y) + g.rows[tile.first + start + i] * g.n + p * PANEL;
        finish_rows(c + i * PANEL, 1, y, y, 0, smaller(PANEL, g.n - p * PANEL));
      }
    }
  }
}

#if BF16_UNITS
typedef Pair LowRankStep;
#else
typedef Two LowRankStep;
#endif
static void low_rank_down(const LowRankArgs& g, const LowRankTile& tile, int64_t first, int64_t last) {
  g.dtype == kFloat32 ? low_rank_down_as<float, float>(g, tile, first, last) : low_rank_down_as<LowRankStep, bf16>(g, tile, first, last);
}
static void low_rank_up(const LowRankArgs& g, const LowRankTile& tile, int64_t first, int64_t last) {
  g.dtype == kFloat32 ? low_rank_up_as<float, float>(g, tile, first, last) : low_rank_up_as<LowRankStep, bf16>(g, tile, first, last);
}

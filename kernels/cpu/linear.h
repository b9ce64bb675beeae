// Linear layers: y = x W^T + bias, weights packed once into panels of PANEL columns, so that a pass reads them in one straight stream.
// FLOPs: 2 m n k. Bytes: the weights once for each block of rows, which bounds a decode step; the multiply-adds bound a prefill.
// A panel is [k][PANEL] in float32. In bfloat16 two k lie interleaved, [k / 2][PANEL][2]: the layout that bfloat16 units multiply, and that
// others widen with two operations; k is padded to a multiple of 2 with zeros.
// Blocking as in Goto and van de Geijn, 2008: a panel's piece stays in L1, a block of packed x in L2.

constexpr int kPanelVectors = 2;
constexpr int64_t PANEL = kPanelVectors * W;
constexpr int64_t FEW_ROWS = VECTOR_BYTES == 64 ? 24 : 16;  // for these a panel is widened as it is multiplied; for more, once before
constexpr int64_t PIECE_BYTES = 16 << 10;
constexpr int64_t X_BLOCK_BYTES = 512 << 10;
constexpr int64_t LEAST_TILES = 4;  // of a block of x, however large k is

#if BF16_UNITS
#include "coded.h"
#endif

static inline int64_t even(int64_t k) { return (k + 1) / 2 * 2; }

// Rows to columns, by words of 4 bytes: a number, or two of bfloat16. False: it cannot be coded.
static bool pack_linear(const PackLinearArgs& g, int64_t first, int64_t last) {
  [[maybe_unused]] static thread_local Floats plain_buffer;
  const int64_t item = g.dtype == kFloat32 ? 4 : 2, row_bytes = g.k * item, words = even(g.k) * item / 4;
  const PackedPart* part = g.parts;
  int64_t part_end = part->rows;
  for (int64_t p = first; p < last; ++p) {
    const char* rows[PANEL];
    for (int64_t j = 0, row = p * PANEL; j < PANEL; ++j, ++row) {
      while (row >= part_end && row < g.n) part_end += (++part)->rows;
      rows[j] = row < g.n ? static_cast<const char*>(part->weight) + (row - part_end + part->rows) * row_bytes : nullptr;
    }
    uint32_t* out = static_cast<uint32_t*>(g.packed) + p * words * PANEL;
#if BF16_UNITS
    if (g.coded) out = reinterpret_cast<uint32_t*>(plain_buffer.reserve(words * PANEL));
#endif
    for (int64_t word = 0; word < words; word += W, out += W * PANEL)
      for (int v = 0; v < kPanelVectors; ++v) {
        vu block[W];
        for (int64_t i = 0; i < W; ++i) {
          if (const char* row = rows[v * W + i]) load_bytes(row + word * 4, row_bytes - word * 4, block[i]);
          else block[i] = vu{};
        }
        transpose(block);
        for (int64_t i = 0; i < smaller(W, words - word); ++i) *reinterpret_cast<vu_any*>(out + i * PANEL + v * W) = block[i];
      }
#if BF16_UNITS
    if (g.coded)
      for (int64_t i = 0, blocks = g.k / CODED_K; i < blocks; ++i)
        if (!code_block(reinterpret_cast<const char*>(plain_buffer.data) + i * BLOCK_NUMBERS * 2, static_cast<char*>(g.packed) + (p * blocks + i) * CODED_BYTES))
          return false;
#endif
  }
  return true;
}

// Step `step` of a row of x, which ends after k numbers.
template <class T>
static inline void take(const T* row, int64_t step, int64_t, float& out) { out = widen(row[step]); }
template <class T>
static inline void take(const T* row, int64_t step, int64_t k, Two& out) {
  out = {widen(row[2 * step]), 2 * step + 1 < k ? widen(row[2 * step + 1]) : 0.0f};
}
static inline void take(const bf16* row, int64_t step, int64_t k, Pair& out) {
  out = {row[2 * step], 2 * step + 1 < k ? row[2 * step + 1] : bf16{}};
}

// Rows [0, m) cut into tiles of nearly equal height.
struct RowTiles {
  int64_t m, count;
  RowTiles(int64_t rows, int64_t highest) : m(rows), count((rows + highest - 1) / highest) {}
  int64_t start(int64_t tile) const { return tile * (m / count) + smaller(tile, m % count); }
};

// W steps of up to W rows. Writes W - height words too many.
template <class X, class T>
static inline void transpose_block(const T* rows, int64_t k, int64_t height, X* out) {
  vu block[W];
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) block[i] = i < height ? *reinterpret_cast<const vu_any*>(rows + i * k) : vu{};
  transpose(block);
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) *reinterpret_cast<vu_any*>(out + i * height) = block[i];
}

// x's rows as tiles [steps][height], one after the other; up to W words behind them are written, too.
template <class X, class T>
static void pack_rows(const T* x, int64_t k, const RowTiles& tiles, int64_t steps, X* out) {
  constexpr bool kCopies = sizeof(X) == kStepDepth<X> * sizeof(T) && ROW_TILE <= W;
  for (int64_t t = 0; t < tiles.count; ++t) {
    const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start;
    const T* rows = x + start * k;
    int64_t done = 0;
    if constexpr (kCopies)
      for (; (done + W) * kStepDepth<X> <= k; done += W) transpose_block(rows + done * kStepDepth<X>, k, height, out + done * height);
    for (int64_t i = 0; i < height; ++i)
      for (int64_t j = done; j < steps; ++j) take(rows + i * k, j, k, out[j * height + i]);
    out += steps * height;
  }
}

// `k` interleaved rows of a panel as float32 [k][PANEL].
static inline void widen_piece(const bf16* panel, int64_t k, float* piece) {
  for (int64_t i = 0; i < k; i += 2, panel += 2 * PANEL, piece += 2 * PANEL)
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) load_two(panel + 2 * j * W, piece + j * W, piece + PANEL + j * W);
}

template <int64_t kAhead, class X>
static void multiply_rows(int rows, const X* x, const float* b, int64_t steps, bool add, float* c, const char* stream) {
  switch (rows) {
#define ROWS(R) case R: return multiply_tile<R, kPanelVectors, kAhead>(x, 1, R, b, PANEL, steps, add, nullptr, c, PANEL, stream);
    ALL_ROWS
#undef ROWS
  }
}

// y = c + bias for `columns` of a panel.
template <class T>
static void finish_rows(const float* c, int64_t rows, const T* bias, T* y, int64_t ldy, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, c += PANEL, y += ldy) {
    int64_t j = 0;
    for (; j + W <= columns; j += W) store(y + j, bias ? load(c + j) + load(bias + j) : load(c + j));
    for (; j < columns; ++j) narrow(y + j, c[j] + (bias ? widen(bias[j]) : 0.0f));
  }
}

// X: what x is multiplied as (float, Two, Pair: see multiply_tile). Blocks of rows, panels, pieces of a panel, tiles of rows.
template <class X, class T, bool kCoded = false>
static void linear_as(const LinearArgs& g, int64_t first, int64_t last) {
  constexpr int64_t depth = kStepDepth<X>, k_block = PIECE_BYTES / (PANEL * int64_t(sizeof(float))) * depth;
  constexpr bool kWidensPieces = sizeof(T) == 2 && depth == 1;
  static thread_local Floats x_buffer, c_buffer, piece_buffer;
  const int64_t steps = (g.k + depth - 1) / depth, row_bytes = steps * int64_t(sizeof(X));
  const int64_t block = smaller(g.m, larger(LEAST_TILES, X_BLOCK_BYTES / row_bytes / ROW_TILE) * ROW_TILE);
  X* const x = reinterpret_cast<X*>(x_buffer.reserve(block * row_bytes / int64_t(sizeof(float)) + W));
  float *const c = c_buffer.reserve(block * PANEL), *const piece = piece_buffer.reserve(kWidensPieces || kCoded ? k_block / depth * PANEL : 0);
  const T *packed = static_cast<const T*>(g.packed), *bias = static_cast<const T*>(g.bias);
  for (int64_t m0 = 0; m0 < g.m; m0 += block) {
    const RowTiles tiles(smaller(block, g.m - m0), ROW_TILE);
    pack_rows(static_cast<const T*>(g.x) + m0 * g.k, g.k, tiles, steps, x);
    for (int64_t p = first; p < last; ++p) {
      for (int64_t k0 = 0; k0 < g.k; k0 += k_block) {
        const int64_t k = smaller(k_block, g.k - k0);
        const T* at = packed + (p * even(g.k) + k0) * PANEL;
        const float* b = reinterpret_cast<const float*>(at);
        if constexpr (kWidensPieces) {
          widen_piece(at, k, piece);
          b = piece;
        }
        int64_t t = 0;
#if BF16_UNITS
        if constexpr (kCoded) {  // the first tile leaves what the others multiply
          b = piece;
          multiply_coded_rows(int(tiles.start(1)), x + k0 / depth * tiles.start(1), static_cast<const char*>(g.packed) + (p * g.k + k0) / CODED_K * CODED_BYTES,
                              k / CODED_K, k0 > 0, c, tiles.count > 1 ? reinterpret_cast<char*>(piece) : nullptr);
          ++t;
        }
#endif
        for (; t < tiles.count; ++t) {
          const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start;
          multiply_rows<kCoded ? 0 : depth * PANEL * sizeof(T)>(int(height), x + start * steps + k0 / depth * height, b, (k + depth - 1) / depth, k0 > 0,
                                                   c + start * PANEL, reinterpret_cast<const char*>(at));
        }
      }
      finish_rows(c, tiles.m, bias ? bias + p * PANEL : nullptr, static_cast<T*>(g.y) + m0 * g.n + p * PANEL, g.n,
                  smaller(PANEL, g.n - p * PANEL));
    }
  }
}

static void linear(const LinearArgs& g, int64_t first, int64_t last) {
  if (g.dtype == kFloat32) return linear_as<float, float>(g, first, last);
#if BF16_UNITS
  g.num_parts == CODED ? linear_as<Pair, bf16, true>(g, first, last) : linear_as<Pair, bf16>(g, first, last);
#else
  g.m > FEW_ROWS ? linear_as<float, bf16>(g, first, last) : linear_as<Two, bf16>(g, first, last);
#endif
}

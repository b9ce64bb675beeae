// Linear layers: y = x W^T + bias, weights packed once into panels of PANEL columns, [k][PANEL] each, so that a pass reads them in
// one straight stream. FLOPs: 2 m n k. Bytes: the weights once (m <= FEW_ROWS), the bound of a decode step; compute bounds a prefill.
// bfloat16 rows of a panel lie interleaved in pairs, [k / 2][PANEL][2]: see load_two. k is padded to a multiple of 2 with zeros.
// Blocking as in Goto and van de Geijn, 2008: a panel's piece stays in L1, a block of packed x in L2.

constexpr int kPanelVectors = 2;
constexpr int64_t PANEL = kPanelVectors * W;
constexpr int ROW_TILE = VECTOR_BYTES == 64 ? 12 : 6;  // accumulators fill the register file
constexpr int FEW_ROW_TILE = VECTOR_BYTES == 64 ? 12 : 5;  // of these passes, which need registers for two rows of the panel as well
constexpr int64_t FEW_ROWS = VECTOR_BYTES == 64 ? 24 : 16;
constexpr int64_t K_BLOCK = 384;
constexpr int64_t ROW_BLOCK = 40 * ROW_TILE;

static inline int64_t even(int64_t k) { return (k + 1) / 2 * 2; }

static void pack_linear_of(const float* weight, float* packed, int64_t n, int64_t k) {
  for (int64_t start = 0; start < n; start += PANEL, packed += even(k) * PANEL)
    for (int64_t j = 0; j < PANEL; ++j)
      for (int64_t i = 0; i < even(k); ++i) packed[i * PANEL + j] = start + j < n && i < k ? weight[(start + j) * k + i] : 0.0f;
}

static void pack_linear_of(const bf16* weight, bf16* packed, int64_t n, int64_t k) {
  for (int64_t start = 0; start < n; start += PANEL, packed += even(k) * PANEL)
    for (int64_t j = 0; j < PANEL; ++j)
      for (int64_t i = 0; i < even(k); ++i)
        packed[(i / 2 * PANEL + j) * 2 + i % 2] = start + j < n && i < k ? weight[(start + j) * k + i] : bf16{};
}

static void pack_linear(const void* weight, void* packed, int64_t n, int64_t k, Dtype dtype) {
  if (dtype == kFloat32) pack_linear_of(static_cast<const float*>(weight), static_cast<float*>(packed), n, k);
  else pack_linear_of(static_cast<const bf16*>(weight), static_cast<bf16*>(packed), n, k);
}

// Rows k and k + 1 of a panel.
static inline __attribute__((always_inline)) void load_rows(const float* panel, vf (&row0)[kPanelVectors], vf (&row1)[kPanelVectors]) {
#pragma GCC unroll 4
  for (int j = 0; j < kPanelVectors; ++j) { row0[j] = load(panel + j * W); row1[j] = load(panel + PANEL + j * W); }
}
static inline __attribute__((always_inline)) void load_rows(const bf16* panel, vf (&row0)[kPanelVectors], vf (&row1)[kPanelVectors]) {
#pragma GCC unroll 4
  for (int j = 0; j < kPanelVectors; ++j) load_two(panel + 2 * j * W, row0[j], row1[j]);
}

// C [R][PANEL] = x panel, x as a packed tile [k][R]. `ahead` is asked for meanwhile, kAhead bytes with each two k: it is read next.
// Each output is one chain of fused multiply-adds in the order of k, as in multiply_tile: its bits do not depend on its neighbours.
template <int R, int64_t kAhead, class T>
static void pass(const float* x, const T* panel, int64_t k_count, float* c, const char* ahead) {
  vf acc[R][kPanelVectors];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) acc[i][j] = vf{};
  for (int64_t k = 0; k < k_count; k += 2, x += 2 * R, panel += 2 * PANEL, ahead += kAhead) {
    vf row0[kPanelVectors], row1[kPanelVectors];
    load_rows(panel, row0, row1);
    if (kAhead) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < kAhead; line += 64) __builtin_prefetch(ahead + line);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const vf x0 = splat(x[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVectors; ++j) acc[i][j] += x0 * row0[j];
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const vf x1 = splat(x[R + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVectors; ++j) acc[i][j] += x1 * row1[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) store(c + i * PANEL + j * W, acc[i][j]);
}

template <int64_t kAhead, class T>
static void pass_rows(int rows, const float* x, const T* panel, int64_t k, float* c, const char* ahead) {
  switch (rows) {
#define ROWS(R) case R: return pass<R, kAhead>(x, panel, k, c, ahead);
    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5)
#if VECTOR_BYTES == 64
    ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
#undef ROWS
  }
}

template <bool kLoad, int64_t kAhead, class B>
static void multiply_rows(int rows, const float* a, int64_t row, int64_t column, const B* b, int64_t k, float* c, int64_t ldc,
                          const char* ahead) {
  switch (rows) {
#define ROWS(R) case R: return multiply_tile<R, kPanelVectors, kLoad, kAhead>(a, row, column, b, PANEL, k, nullptr, c, ldc, ahead);
    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if VECTOR_BYTES == 64
    ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
#undef ROWS
  }
}

template <class T>
static void finish_rows(const float* c, int64_t rows, const T* bias, T* y, int64_t ldy, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) narrow(y + i * ldy + j, c[i * PANEL + j] + (bias ? widen(bias[j]) : 0.0f));
}

// Rows [0, m) cut into tiles of nearly equal height.
struct RowTiles {
  int64_t m, count;
  RowTiles(int64_t rows, int64_t highest) : m(rows), count((rows + highest - 1) / highest) {}
  int64_t start(int64_t tile) const { return tile * (m / count) + smaller(tile, m % count); }
};

// x's rows [0, m) and columns [k0, k0 + k) as tiles [k][height], one after the other, each in the room of `padded` columns.
template <class T>
static void pack_rows(const T* x, int64_t ldx, const RowTiles& tiles, int64_t k0, int64_t k, float* out, int64_t padded) {
  for (int64_t t = 0; t < tiles.count; ++t) {
    const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start;
    for (int64_t i = 0; i < height; ++i) {
      const T* row = x + (start + i) * ldx + k0;
      for (int64_t j = 0; j < k; ++j) out[j * height + i] = widen(row[j]);
    }
    out += padded * height;
  }
}

// Few rows: tile by tile they pass over each panel while it is in the cache; the last tile asks for the next panel.
template <class T>
static void linear_few_rows(const LinearArgs& g, int64_t first, int64_t last) {
  const T* packed = static_cast<const T*>(g.packed);
  const T* bias = static_cast<const T*>(g.bias);
  static thread_local Floats buffer;
  const RowTiles tiles(g.m, FEW_ROW_TILE);
  const int64_t k = even(g.k);
  float *x = buffer.filled(g.m * k, 0.0f), c[FEW_ROWS * PANEL];
  pack_rows(static_cast<const T*>(g.x), g.k, tiles, 0, g.k, x, k);
  for (int64_t p = first; p < last; ++p) {
    const T* panel = packed + p * k * PANEL;
    const char* next = reinterpret_cast<const char*>(panel + k * PANEL);
    for (int64_t t = 0; t < tiles.count; ++t) {
      const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start;
      if (t + 1 == tiles.count) pass_rows<2 * PANEL * sizeof(T)>(int(height), x + start * k, panel, k, c + start * PANEL, next);
      else pass_rows<0>(int(height), x + start * k, panel, k, c + start * PANEL, next);
    }
    finish_rows(c, g.m, bias ? bias + p * PANEL : nullptr, static_cast<T*>(g.y) + p * PANEL, g.n, smaller(PANEL, g.n - p * PANEL));
  }
}

// Many rows: blocks of rows and of k. The sums of a block of rows live in a float32 buffer [panel][row][PANEL] until k is through.
template <class T>
static void linear_many_rows(const LinearArgs& g, int64_t first, int64_t last) {
  const T* packed = static_cast<const T*>(g.packed);
  const T* bias = static_cast<const T*>(g.bias);
  static thread_local Floats sums_buffer, rows_buffer, piece_buffer;
  float *sums = sums_buffer.reserve((last - first) * smaller(g.m, ROW_BLOCK) * PANEL), *rows = rows_buffer.reserve(ROW_BLOCK * K_BLOCK);
  float* piece = piece_buffer.reserve(sizeof(T) == 4 ? 0 : (K_BLOCK + 1) * PANEL);
  for (int64_t m0 = 0; m0 < g.m; m0 += ROW_BLOCK) {
    const RowTiles tiles(smaller(ROW_BLOCK, g.m - m0), ROW_TILE);
    for (int64_t k0 = 0; k0 < g.k; k0 += K_BLOCK) {
      const int64_t k = smaller(K_BLOCK, g.k - k0);
      pack_rows(static_cast<const T*>(g.x) + m0 * g.k, g.k, tiles, k0, k, rows, k);
      for (int64_t p = first; p < last; ++p) {
        const T* panel = packed + (p * even(g.k) + k0) * PANEL;
        const float* b = reinterpret_cast<const float*>(panel);
        const char* next = reinterpret_cast<const char*>(panel + even(g.k) * PANEL);  // the next panel's piece
        if (sizeof(T) != 4) {  // widen once, use for every tile of rows
          for (int64_t i = 0; i < k; i += 2) {
            vf row0[kPanelVectors], row1[kPanelVectors];
            load_rows(panel + i * PANEL, row0, row1);
            for (int j = 0; j < kPanelVectors; ++j) { store(piece + i * PANEL + j * W, row0[j]); store(piece + (i + 1) * PANEL + j * W, row1[j]); }
          }
          b = piece;
        }
        float* c = sums + (p - first) * tiles.m * PANEL;
        for (int64_t t = 0; t < tiles.count; ++t) {
          const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start;
          const float* a = rows + start * k;
          if (k0 == 0) multiply_rows<false, PANEL * sizeof(T)>(int(height), a, 1, height, b, k, c + start * PANEL, PANEL, next);
          else multiply_rows<true, PANEL * sizeof(T)>(int(height), a, 1, height, b, k, c + start * PANEL, PANEL, next);
        }
      }
    }
    for (int64_t p = first; p < last; ++p)
      finish_rows(sums + (p - first) * tiles.m * PANEL, tiles.m, bias ? bias + p * PANEL : nullptr,
                  static_cast<T*>(g.y) + m0 * g.n + p * PANEL, g.n, smaller(PANEL, g.n - p * PANEL));
  }
}

template <class T>
static void linear_of(const LinearArgs& g, int64_t first, int64_t last) {
  if (g.m > FEW_ROWS) linear_many_rows<T>(g, first, last);
  else linear_few_rows<T>(g, first, last);
}

static void linear(const LinearArgs& g, int64_t first, int64_t last) {
  if (g.dtype == kFloat32) linear_of<float>(g, first, last);
  else linear_of<bf16>(g, first, last);
}

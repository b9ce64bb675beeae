// Linear layers: y = x W^T + bias, weights packed once into panels of PANEL columns, [k][PANEL] each, so that a pass reads them in
// one straight stream. FLOPs: 2 m n k. Bytes: the weights once (m <= ROW_TILE), the bound of a decode step; compute bounds a prefill.
// Blocking as in Goto and van de Geijn, 2008: a panel's piece stays in L1, a block of packed x in L2.

constexpr int kPanelVectors = 2;
constexpr int64_t PANEL = kPanelVectors * W;
constexpr int ROW_TILE = VECTOR_BYTES == 64 ? 12 : 6;  // accumulators fill the register file
constexpr int64_t FETCH_AHEAD = 32 * PANEL;
constexpr int64_t K_BLOCK = 384;
constexpr int64_t ROW_BLOCK = 40 * ROW_TILE;

template <class T>
static void pack_linear_of(const T* weight, T* packed, int64_t n, int64_t k) {
  for (int64_t start = 0; start < n; start += PANEL, packed += k * PANEL)
    for (int64_t j = 0; j < PANEL; ++j)
      for (int64_t i = 0; i < k; ++i) packed[i * PANEL + j] = start + j < n ? weight[(start + j) * k + i] : T{};
}

static void pack_linear(const void* weight, void* packed, int64_t n, int64_t k, Dtype dtype) {
  if (dtype == kFloat32) pack_linear_of(static_cast<const float*>(weight), static_cast<float*>(packed), n, k);
  else pack_linear_of(static_cast<const bf16*>(weight), static_cast<bf16*>(packed), n, k);
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

// Few rows: one pass over each panel, x as it lies. x float32 [m, k].
template <class T>
static void linear_few_rows(const LinearArgs& g, const float* x, int64_t first, int64_t last) {
  const T* packed = static_cast<const T*>(g.packed);
  const T* bias = static_cast<const T*>(g.bias);
  float c[ROW_TILE * PANEL];
  for (int64_t p = first; p < last; ++p) {
    const T* panel = packed + p * g.k * PANEL;
    const char* ahead = reinterpret_cast<const char*>(panel + FETCH_AHEAD);
    multiply_rows<false, PANEL * sizeof(T)>(int(g.m), x, g.k, 1, panel, g.k, c, PANEL, ahead);
    const int64_t columns = smaller(PANEL, g.n - p * PANEL);
    finish_rows(c, g.m, bias ? bias + p * PANEL : nullptr, static_cast<T*>(g.y) + p * PANEL, g.n, columns);
  }
}

// Rows [0, m) cut into tiles of nearly equal height.
struct RowTiles {
  int64_t m, count;
  explicit RowTiles(int64_t rows) : m(rows), count((rows + ROW_TILE - 1) / ROW_TILE) {}
  int64_t start(int64_t tile) const { return tile * (m / count) + smaller(tile, m % count); }
};

// x's rows [0, m) and columns [k0, k0 + k) as tiles [k][height], one after the other.
template <class T>
static void pack_rows(const T* x, int64_t ldx, const RowTiles& tiles, int64_t k0, int64_t k, float* out) {
  for (int64_t t = 0; t < tiles.count; ++t) {
    const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start;
    for (int64_t i = 0; i < height; ++i) {
      const T* row = x + (start + i) * ldx + k0;
      for (int64_t j = 0; j < k; ++j) out[j * height + i] = widen(row[j]);
    }
    out += k * height;
  }
}

// Many rows: blocks of rows and of k. The sums of a block of rows live in a float32 buffer [panel][row][PANEL] until k is through.
template <class T>
static void linear_many_rows(const LinearArgs& g, int64_t first, int64_t last) {
  const T* packed = static_cast<const T*>(g.packed);
  const T* bias = static_cast<const T*>(g.bias);
  static thread_local Floats sums_buffer, rows_buffer, piece_buffer;
  float *sums = sums_buffer.reserve((last - first) * smaller(g.m, ROW_BLOCK) * PANEL), *rows = rows_buffer.reserve(ROW_BLOCK * K_BLOCK);
  float* piece = piece_buffer.reserve(sizeof(T) == 4 ? 0 : K_BLOCK * PANEL);
  for (int64_t m0 = 0; m0 < g.m; m0 += ROW_BLOCK) {
    const RowTiles tiles(smaller(ROW_BLOCK, g.m - m0));
    for (int64_t k0 = 0; k0 < g.k; k0 += K_BLOCK) {
      const int64_t k = smaller(K_BLOCK, g.k - k0);
      pack_rows(static_cast<const T*>(g.x) + m0 * g.k, g.k, tiles, k0, k, rows);
      for (int64_t p = first; p < last; ++p) {
        const T* panel = packed + (p * g.k + k0) * PANEL;
        const float* b = reinterpret_cast<const float*>(panel);
        const char* next = reinterpret_cast<const char*>(panel + g.k * PANEL);  // the next panel's piece
        if (sizeof(T) != 4) {  // widen once, use for every tile of rows
          for (int64_t i = 0; i < k * PANEL; i += W) store(piece + i, load(panel + i));
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
  if (g.m > ROW_TILE) return linear_many_rows<T>(g, first, last);
  if (sizeof(T) == 4) return linear_few_rows<T>(g, static_cast<const float*>(g.x), first, last);
  static thread_local Floats buffer;
  float* x = buffer.reserve(g.m * g.k);
  for (int64_t i = 0; i < g.m * g.k; ++i) x[i] = widen(static_cast<const T*>(g.x)[i]);
  linear_few_rows<T>(g, x, first, last);
}

static void linear(const LinearArgs& g, int64_t first, int64_t last) {
  if (g.dtype == kFloat32) linear_of<float>(g, first, last);
  else linear_of<bf16>(g, first, last);
}

// Products of bfloat16 by AMX's tiles, over the panels of AVX512-BF16; everything else is that set's.
// A tile is 16 rows of x, or of pairs of k of a panel, by 64 bytes. An output sums each step of 32 k, its even and its odd ones apart,
// and then the steps in order: its value does not depend on its neighbours, nor on how many rows there are.
#include "kernels.h"

#if AMX_TILES
#include <immintrin.h>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")
#endif
#define VECTOR_BYTES 64
#define BF16_UNITS 1

namespace splitserve {
namespace {
#include "simd.h"
#include "linear.h"

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64, TILE_K = 32, PANEL_ROW_BYTES = PANEL * 4;
constexpr int64_t K_BLOCK = 512;  // a panel's piece of it, 32 KiB, stays in L1 while x streams by

// Tiles 0 to 3: sums of upper rows left and right, lower left and right. 4, 5: x's upper and lower rows. 6, 7: weights left and right.
static void shape_tiles(int64_t upper, int64_t lower) {
  struct alignas(64) { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } shapes = {};
  const int64_t rows[] = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS};
  shapes.palette = 1;
  for (int i = 0; i < 8; ++i) shapes.rows[i] = uint8_t(rows[i]), shapes.row_bytes[i] = rows[i] ? TILE_BYTES : 0;
  asm volatile("" : : "r"(&shapes) : "memory");  // compilers do not know that tiles read memory
  _tile_loadconfig(&shapes);
}

// Rows c [upper + lower][PANEL] become, or grow by, x [steps][upper + lower][TILE_K] times a panel. Its last step lies at `last`.
template <bool kLower>
static void multiply_tiles(const char* x, int64_t upper, int64_t lower, const char* panel, const char* last, int64_t steps, bool add, float* c, bool asks) {
  float* const c_lower = c + upper * PANEL;
  if (add) {
    _tile_loadd(0, c, PANEL_ROW_BYTES);
    _tile_loadd(1, c + TILE_ROWS, PANEL_ROW_BYTES);
    if (kLower) _tile_loadd(2, c_lower, PANEL_ROW_BYTES);
    if (kLower) _tile_loadd(3, c_lower + TILE_ROWS, PANEL_ROW_BYTES);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (kLower) _tile_zero(2);
    if (kLower) _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step, x += (upper + lower) * TILE_BYTES, panel += TILE_ROWS * PANEL_ROW_BYTES) {
    const char* const weights = step + 1 < steps ? panel : last;
    if (asks)
      for (int64_t line = 0; line < TILE_ROWS * PANEL_ROW_BYTES; line += 64) ask(panel + line);
    _tile_loadd(4, x, TILE_BYTES);
    _tile_loadd(6, weights, PANEL_ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + TILE_BYTES, PANEL_ROW_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    if (kLower) _tile_loadd(5, x + upper * TILE_BYTES, TILE_BYTES);
    if (kLower) _tile_dpbf16ps(2, 5, 6);
    if (kLower) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, PANEL_ROW_BYTES);
  _tile_stored(1, c + TILE_ROWS, PANEL_ROW_BYTES);
  if (kLower) _tile_stored(2, c_lower, PANEL_ROW_BYTES);
  if (kLower) _tile_stored(3, c_lower + TILE_ROWS, PANEL_ROW_BYTES);
}
}  // namespace

void linear_amx(const LinearArgs& g, int64_t first, int64_t last) {
  if (g.dtype == kFloat32) return linear_as<float, float>(g, first, last);
  static thread_local Floats x_buffer, c_buffer;
  const int64_t steps = (g.k + TILE_K - 1) / TILE_K, row_bytes = g.k * 2;
  const int64_t block = smaller(g.m, larger(LEAST_TILES, X_BLOCK_BYTES / (steps * TILE_BYTES) / (2 * TILE_ROWS)) * 2 * TILE_ROWS);
  char* const packed_x = reinterpret_cast<char*>(x_buffer.reserve(block * steps * TILE_BYTES / 4));
  float* const c = c_buffer.reserve(block * PANEL);
  const bf16* const bias = static_cast<const bf16*>(g.bias);
  alignas(64) char padded[TILE_ROWS * PANEL_ROW_BYTES] = {};  // a panel's last step
  int64_t shape = 0;
  for (int64_t m0 = 0; m0 < g.m; m0 += block) {
    const RowTiles tiles(smaller(block, g.m - m0), 2 * TILE_ROWS);
    char* to = packed_x;
    for (int64_t t = 0; t < tiles.count; ++t)
      for (int64_t step = 0; step < steps; ++step)
        for (int64_t row = tiles.start(t); row < tiles.start(t + 1); ++row, to += TILE_BYTES) {
          vu numbers;
          load_bytes(static_cast<const char*>(g.x) + (m0 + row) * row_bytes + step * TILE_BYTES, row_bytes - step * TILE_BYTES, numbers);
          *reinterpret_cast<vu_any*>(to) = numbers;
        }
    for (int64_t p = first; p < last; ++p) {
      for (int64_t k0 = 0; k0 < g.k; k0 += K_BLOCK) {
        const int64_t k = smaller(K_BLOCK, g.k - k0), piece_steps = (k + TILE_K - 1) / TILE_K, rest = even(k) % TILE_K / 2 * PANEL_ROW_BYTES;
        const char* const panel = static_cast<const char*>(g.packed) + (p * even(g.k) + k0) / 2 * PANEL_ROW_BYTES;
        const char* last_step = panel + (piece_steps - 1) * TILE_ROWS * PANEL_ROW_BYTES;
        if (rest) last_step = static_cast<const char*>(std::memcpy(padded, last_step, size_t(rest)));
        asm volatile("" : : "r"(last_step) : "memory");
        for (int64_t t = 0; t < tiles.count; ++t) {
          const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start, upper = smaller(height, TILE_ROWS), lower = height - upper;
          if (height != shape) shape_tiles(upper, lower), shape = height;
          const char* const x = packed_x + (start * steps + k0 / TILE_K * height) * TILE_BYTES;
          const bool asks = t == 0 && g.m >= asking_rows;
          (lower ? multiply_tiles<true> : multiply_tiles<false>)(x, upper, lower, panel, last_step, piece_steps, k0 > 0, c + start * PANEL, asks);
        }
      }
      finish_rows(c, tiles.m, bias ? bias + p * PANEL : nullptr, static_cast<bf16*>(g.y) + m0 * g.n + p * PANEL, g.n, smaller(PANEL, g.n - p * PANEL));
    }
  }
  _tile_release();
}
}  // namespace splitserve
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

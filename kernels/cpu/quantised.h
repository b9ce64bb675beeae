// Linear layers of quantised weights: y = x W^T + bias, w[n][k] = scale[n][k / group] (code[n][k] - zero[n][k / group]). FLOPs: 2 m n k.
// Bytes: the codes and their scales once for each block of rows; they are never unpacked to memory.
//
// Codes of 4 and 8 bits are multiplied as whole numbers. x is rounded to 16 bits (8 where the scheme says so), each block of k with a scale of
// its own (8 bits: each row), so that a block's sum is exact in int32, and the same on every instruction set; sums of blocks are float32, in the
// order of k. With 16 bits the rounding is finer than bfloat16's own.
//   VNNI: x = 256 high + low, two dot products of bytes.   Others: two dot products of 16-bit numbers, of the even and of the odd k.
// float4 (e2m1) codes are doubled, which makes them whole numbers; their scales (e8m0: a power of 2) are halved.
// float8 (e4m3) codes are widened to float32, a piece of a panel at a time.
//
// A panel is one stream of blocks: codes, scales[PANEL], offsets[PANEL] (scale * zero), each of the latter two where the part has it. Where whole
// numbers have them of one byte, they are multiples of their super-block's, which lie apart.
//   4 bits: [block / 8][PANEL] words: low nibbles four k, high nibbles the next four.  8 bits: [block / 4][PANEL] words.  float8: [block][PANEL].

#ifndef VNNI_UNITS
#define VNNI_UNITS 0
#endif

typedef int32_t vi_any __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint8_t vb_any __attribute__((vector_size(VECTOR_BYTES / 4), aligned(1), may_alias));

static inline vi load_words(const uint8_t* p) { return *reinterpret_cast<const vi_any*>(p); }
static inline vi splat_word(int32_t x) { return x - vi{}; }

static inline float widen_half(uint16_t half) {  // of a finite half
  const uint32_t magnitude = uint32_t(half & 0x7fff) << 13, sign = uint32_t(half & 0x8000) << 16;
  float f, power = 5.192296858534828e33f;  // 2^112
  std::memcpy(&f, &magnitude, 4);
  f *= power;
  uint32_t u;
  std::memcpy(&u, &f, 4);
  u |= sign;
  std::memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t narrow_half(float x) {  // of a number that a half holds exactly
  uint32_t u;
  std::memcpy(&u, &x, 4);
  float magnitude;
  const uint32_t positive = u & 0x7fffffff;
  std::memcpy(&magnitude, &positive, 4);
  magnitude *= 1.925929944387236e-34f;  // 2^-112
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  return uint16_t((u >> 16 & 0x8000) | bits >> 13);
}
// `super`: what a scale of one byte is a multiple of.
static inline vf load_scales(const uint8_t* p, int64_t bytes, const uint8_t* super = nullptr) {
  if (bytes == 4) return load(reinterpret_cast<const float*>(p));
  if (bytes == 1) {
#if VECTOR_BYTES == 64
    const vi whole = (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif VECTOR_BYTES == 32
    const vi whole = (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    vi whole = {};
    for (int64_t i = 0; i < W; ++i) whole[i] = int8_t(p[i]);
#endif
    return __builtin_convertvector(whole, vf) * load_scales(super, 2);
  }
#if VECTOR_BYTES == 64
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif VECTOR_BYTES == 32
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf out = {};
  for (int64_t i = 0; i < W; ++i) {
    uint16_t half;
    std::memcpy(&half, p + 2 * i, 2);
    out[i] = widen_half(half);
  }
  return out;
#endif
}

static inline vf load_e8m0(const uint8_t* p) { return (vf)(__builtin_convertvector(*reinterpret_cast<const vb_any*>(p), vu) << 23); }

static inline int64_t blocks_of(int64_t k, int64_t block) { return (k + block - 1) / block; }
static inline bool has_nibbles(const QuantisedPart& part) { return part.kind == kInt4 || part.kind == kFloat4; }
static inline int64_t code_bytes(const QuantisedPart& part) { return part.block * PANEL * (has_nibbles(part) ? 4 : 8) / 8; }
static inline int64_t block_bytes(const QuantisedPart& part) {
  return code_bytes(part) + PANEL * part.scale_bytes * (1 + part.has_offsets);
}

static inline int64_t super_bytes(const QuantisedPart& part) { return part.supers ? PANEL * 2 * (1 + part.has_offsets) : 0; }

static void pack_quantised(const PackArgs& g, int64_t first, int64_t last) {
  const QuantisedPart& part = g.part;
  const int64_t blocks = blocks_of(g.k, part.block), groups = blocks_of(g.k, g.group), codes_size = code_bytes(part);
  for (int64_t p = first; p < last; ++p)
    for (int64_t b = 0; b < blocks; ++b) {
      uint8_t* out = static_cast<uint8_t*>(const_cast<void*>(part.packed)) + (p * blocks + b) * block_bytes(part);
      for (int64_t j = 0; j < PANEL; ++j) {
        const int64_t n = p * PANEL + j;
        const bool there = n < part.n;
        const int64_t count = there ? smaller(part.block, g.k - b * part.block) : 0;
        int64_t i = 0;
        for (; part.kind != kFloat8 && i + 8 <= count; i += 8) {  // eight at a time
          const int64_t k = b * part.block + i;
          if (has_nibbles(part)) {  // 0 1 2 3 4 5 6 7 become 0 4 1 5 2 6 3 7
            uint32_t word;
            std::memcpy(&word, g.codes + n * ((g.k + 1) / 2) + k / 2, 4);
            uint32_t change = (word ^ word >> 8) & 0x0000ff00u;
            word ^= change ^ change << 8;
            change = (word ^ word >> 4) & 0x00f000f0u;
            word ^= change ^ change << 4;
            std::memcpy(out + (i / 8 * PANEL + j) * 4, &word, 4);
          } else {
            for (int64_t four = i; four < i + 8; four += 4) std::memcpy(out + (four / 4 * PANEL + j) * 4, g.codes + n * g.k + k + four - i, 4);
          }
        }
        for (; i < part.block; ++i) {
          const int64_t k = b * part.block + i;
          if (has_nibbles(part)) {
            const uint8_t code = i < count ? g.codes[n * ((g.k + 1) / 2) + k / 2] >> k % 2 * 4 & 15 : 8;
            uint8_t& byte = out[(i / 8 * PANEL + j) * 4 + i % 4];
            byte = i % 8 < 4 ? code : uint8_t(byte | code << 4);
          } else if (part.kind == kInt8) {
            out[(i / 4 * PANEL + j) * 4 + i % 4] = i < count ? g.codes[n * g.k + k] : 128;
          } else {
            out[i * PANEL + j] = i < count ? g.codes[n * g.k + k] : 0;
          }
        }
        for (int64_t of = 0; part.scale_bytes && of <= part.has_offsets; ++of) {
          const float* from = of ? g.offsets : g.scales;
          const float value = there ? from[n * groups + b * part.block / g.group] : 0.0f;
          uint8_t* at = out + codes_size + (of * PANEL + j) * part.scale_bytes;
          const uint16_t half = narrow_half(value);
          uint32_t bits;
          std::memcpy(&bits, &value, 4);
          if (part.scale_bytes == 4) std::memcpy(at, &value, 4);
          else if (part.scale_bytes == 2) std::memcpy(at, &half, 2);
          else *at = part.kind == kFloat4 ? uint8_t(bits >> 23) : uint8_t(int8_t(value));
        }
      }
    }
}

// Bytes of 4 bits as the numbers that are multiplied: int4 as they are; float4 doubled, plus 12.
template <QuantisedKind kKind>
static inline vi numbers_of(vi nibbles) {
  if (kKind != kFloat4) return nibbles;
#if VECTOR_BYTES >= 32
  const __m128i numbers = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
#if VECTOR_BYTES == 64
  return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), (__m512i)nibbles);
#else
  return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), (__m256i)nibbles);
#endif
#else
  const vu magnitude = (vu)nibbles & 0x07070707u, large = magnitude >> 2 & 0x01010101u, negative = (vu)nibbles >> 3 & 0x01010101u;
  const vu both = magnitude & magnitude >> 1 & 0x01010101u;
  const vu number = magnitude + (((magnitude & 0x03030303u) + 2 * both) & large * 7);  // 0 1 2 3 4 6 8 12
  return (vi)(number + 0x0c0c0c0cu - (2 * number & negative * 31));
#endif
}
static inline int32_t zero_of(const QuantisedPart& part) { return part.kind == kInt4 ? 8 : part.kind == kFloat4 ? 12 : 128; }

// Four k of a row of x. VNNI: the high bytes and the low ones; others: k 0 and 2, k 1 and 3 as 16-bit numbers.
struct Quad { int32_t first, second; };

static inline Quad quad_of(const int16_t* x) {
#if VNNI_UNITS
  uint32_t high = 0, low = 0;
  for (int i = 0; i < 4; ++i) {
    const int32_t h = (x[i] + 128) >> 8;
    high |= uint32_t(h & 255) << 8 * i;
    low |= uint32_t((x[i] - 256 * h) & 255) << 8 * i;
  }
  return {int32_t(high), int32_t(low)};
#else
  return {int32_t(uint32_t(uint16_t(x[0])) | uint32_t(uint16_t(x[2])) << 16), int32_t(uint32_t(uint16_t(x[1])) | uint32_t(uint16_t(x[3])) << 16)};
#endif
}
static inline Quad byte_quad_of(const int16_t* x) {  // of numbers that fit in a byte
#if VNNI_UNITS
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= uint32_t(x[i] & 255) << 8 * i;
  return {int32_t(bytes), 0};
#else
  return quad_of(x);
#endif
}

// sum += the dot products of each word's four bytes and x's four k. kBytes: x fits in bytes.
template <bool kBytes>
static inline void dot(vi& first, vi& second, vi codes, Quad x) {
#if VNNI_UNITS
  first = (vi)_mm512_dpbusd_epi32((__m512i)first, (__m512i)codes, _mm512_set1_epi32(x.first));
  if (!kBytes) second = (vi)_mm512_dpbusd_epi32((__m512i)second, (__m512i)codes, _mm512_set1_epi32(x.second));
#else
  const vi even = codes & 0x00ff00ff, odd = (vi)((vu)codes >> 8) & 0x00ff00ff;
#if VECTOR_BYTES == 64
  first += (vi)_mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(x.first));
  second += (vi)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(x.second));
#elif VECTOR_BYTES == 32
  first += (vi)_mm256_madd_epi16((__m256i)even, _mm256_set1_epi32(x.first));
  second += (vi)_mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32(x.second));
#else
  first += (even & 0xffff) * int32_t(int16_t(x.first)) + (even >> 16) * (x.first >> 16);
  second += (odd & 0xffff) * int32_t(int16_t(x.second)) + (odd >> 16) * (x.second >> 16);
#endif
#endif
}
template <bool kBytes>
static inline vi dot_sum(vi first, vi second) { return VNNI_UNITS ? kBytes ? first : (first << 8) + second : first + second; }

// Rows of x as whole numbers: a block of a row is scale * numbers, whose sum is `sum`.
struct Rounded { float scale; int32_t sum; };

template <class T>
static void round_block(const T* x, const int32_t* order, int64_t count, float scale, int16_t* out) {
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  int64_t i = 0;
  if (!order)
    for (; i + W <= count; i += W) {
      const vi whole = (vi)(load(x + i) * inverse + 12582912.0f) - 0x4b400000;  // to nearest, ties to even
      for (int64_t j = 0; j < W; ++j) out[i + j] = int16_t(whole[j]);
    }
  for (; i < count; ++i) {
    const float shifted = widen(x[order ? order[i] : i]) * inverse + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    out[i] = int16_t(bits - 0x4b400000);
  }
}
template <class T>
static float largest_of(const T* x, const int32_t* order, int64_t count) {
  vf most = {};
  int64_t i = 0;
  if (!order)
    for (; i + W <= count; i += W) { const vf v = load(x + i); most = vmax(most, vmax(v, -v)); }
  float out = largest(most);
  for (; i < count; ++i) { const float v = std::fabs(widen(x[order ? order[i] : i])); out = v > out ? v : out; }
  return out;
}

constexpr float kLargest16 = 32512.0f;  // 127 * 256: its high byte is within a signed byte's range
constexpr float kLargest8 = 127.0f;
constexpr int64_t FEW_TILES = 2;  // for these codes of 4 bits are unpacked as they are multiplied; for more, once before
constexpr int QUAD_ROWS = VECTOR_BYTES == 64 ? 4 : 2;  // whose accumulators fill the register file

// Tiles [steps of four k][height], and beside them [blocks][height].
template <class T>
static void round_rows(const T* x, int64_t k, const QuantisedPart& part, const RowTiles& tiles, Quad* quads, Rounded* rounded) {
  static thread_local Floats buffer;
  const int64_t blocks = blocks_of(k, part.block), padded = blocks * part.block;
  int16_t* const row = reinterpret_cast<int16_t*>(buffer.reserve(padded / 2 + 1));
  for (int64_t t = 0; t < tiles.count; ++t) {
    const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start;
    for (int64_t i = 0; i < height; ++i) {
      const T* from = x + (start + i) * k;
      const float of_row = part.x_bits == 8 ? largest_of(from, nullptr, k) / kLargest8 : 0.0f;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = b * part.block, count = smaller(part.block, k - first);
        const int32_t* order = part.order ? part.order + first : nullptr;
        const T* at = part.order ? from : from + first;
        const float scale = part.x_bits == 8 ? of_row : largest_of(at, order, count) / kLargest16;
        int16_t* out = row + first;
        round_block(at, order, count, scale, out);
        for (int64_t j = count; j < part.block; ++j) out[j] = 0;
        int32_t sum = 0;
        for (int64_t j = 0; j < part.block; ++j) sum += out[j];
        rounded[b * height + i] = {scale, sum};
        for (int64_t j = 0; j < part.block; j += 4)
          quads[(first + j) / 4 * height + i] = part.x_bits == 8 ? byte_quad_of(out + j) : quad_of(out + j);
      }
    }
    quads += padded / 4 * height;
    rounded += blocks * height;
  }
}

// c[MR][PANEL] += `count` blocks of a panel for a tile of rows, from block `at` on. `unpacked`: the blocks' codes of 4 bits as bytes (kKind is kInt8), or null.
// `supers`: the panel's.
template <int MR, QuantisedKind kKind, bool kBytes>
static inline __attribute__((always_inline)) void multiply_blocks(const QuantisedPart& part, const uint8_t* panel, const uint8_t* supers, const uint8_t* unpacked,
                                                                  const Quad* quads, const Rounded* rounded, int64_t at, int64_t count, float* c) {
  constexpr int kChains = MR == 1 ? 2 : 1;
  constexpr bool kNibbles = kKind != kInt8;
  const bool asks = 2 * MR >= asking_rows;  // codes take at least twice the time of as many bytes of numbers
  const int64_t codes_size = code_bytes(part), scale_bytes = part.scale_bytes, steps = part.block / 8;
  const bool has_offsets = part.has_offsets;
  const int32_t zero = zero_of(part);
  vf total[MR][kPanelVectors];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; ++j) total[i][j] = at ? load(c + i * PANEL + j * W) : vf{};
  for (int64_t b = 0; b < count; ++b, rounded += MR) {
    vi first[kChains][MR][kPanelVectors] = {}, second[kChains][MR][kPanelVectors] = {};
    const uint8_t* codes = unpacked ? unpacked : panel;
    for (int64_t s = 0; s < steps; ++s, quads += 2 * MR) {  // eight k
      constexpr int64_t kStepBytes = PANEL * (kNibbles ? 4 : 8);
      if (asks) {
#pragma GCC unroll 8
        for (int64_t line = 0; line < kStepBytes; line += 64) ask(codes + line);
      }
      vi low[kPanelVectors], high[kPanelVectors];
#pragma GCC unroll 2
      for (int j = 0; j < kPanelVectors; ++j) {
        const vi words = load_words(codes + j * W * 4);
        low[j] = kNibbles ? numbers_of<kKind>(words & 0x0f0f0f0f) : words;
        high[j] = kNibbles ? numbers_of<kKind>((vi)((vu)words >> 4) & 0x0f0f0f0f) : load_words(codes + (PANEL + j * W) * 4);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kPanelVectors; ++j) dot<kBytes>(first[0][i][j], second[0][i][j], low[j], quads[i]);
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kPanelVectors; ++j)
          dot<kBytes>(first[kChains - 1][i][j], second[kChains - 1][i][j], high[j], quads[MR + i]);
      codes += kStepBytes;
    }
    const uint8_t* scales = panel + codes_size;
    const uint8_t* super = supers + ((at + b) >> part.super_shift) * super_bytes(part);
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; ++j) {
      const vf scale = part.kind == kFloat4 ? load_e8m0(scales + j * W) * 0.5f
                       : scale_bytes        ? load_scales(scales + j * W * scale_bytes, scale_bytes, super + j * W * 2)
                                            : splat(1.0f);
      const vf offset = has_offsets ? load_scales(scales + (PANEL + j * W) * scale_bytes, scale_bytes, super + (PANEL + j * W) * 2) : vf{};
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        vi dots = dot_sum<kBytes>(first[0][i][j], second[0][i][j]);
        if (kChains > 1) dots += dot_sum<kBytes>(first[kChains - 1][i][j], second[kChains - 1][i][j]);
        if (!has_offsets) dots -= zero * rounded[i].sum;
        const vf factor = scale * rounded[i].scale;  // on its own: where a scale is 1 the sum must have the same bits
        total[i][j] += __builtin_convertvector(dots, vf) * factor;
        if (has_offsets) total[i][j] -= offset * (rounded[i].scale * float(rounded[i].sum));
      }
    }
    panel += block_bytes(part);
    if (unpacked) unpacked += codes_size * 2;
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; ++j) store(c + i * PANEL + j * W, total[i][j]);
}

template <QuantisedKind kKind, bool kBytes>
static void multiply_tile_of(int64_t rows, const QuantisedPart& part, const uint8_t* panel, const uint8_t* supers, const uint8_t* unpacked, const Quad* quads,
                             const Rounded* rounded, int64_t at, int64_t count, float* c) {
  switch (rows) {
    case 1: return multiply_blocks<1, kKind, kBytes>(part, panel, supers, unpacked, quads, rounded, at, count, c);
    case 2: return multiply_blocks<2, kKind, kBytes>(part, panel, supers, unpacked, quads, rounded, at, count, c);
#if VECTOR_BYTES == 64
    case 3: return multiply_blocks<3, kKind, kBytes>(part, panel, supers, unpacked, quads, rounded, at, count, c);
    case 4: return multiply_blocks<4, kKind, kBytes>(part, panel, supers, unpacked, quads, rounded, at, count, c);
#endif
  }
}

// Blocks of codes of 4 bits as bytes, in the layout of 8 bits.
template <QuantisedKind kKind>
static void unpack_nibbles(const QuantisedPart& part, const uint8_t* panel, int64_t count, uint8_t* out) {
  for (int64_t b = 0; b < count; ++b, panel += block_bytes(part))
    for (int64_t at = 0; at < code_bytes(part); at += PANEL * 4, out += PANEL * 8)
#pragma GCC unroll 2
      for (int64_t j = 0; j < PANEL * 4; j += W * 4) {
        const vi words = load_words(panel + at + j);
        *reinterpret_cast<vi_any*>(out + j) = numbers_of<kKind>(words & 0x0f0f0f0f);
        *reinterpret_cast<vi_any*>(out + PANEL * 4 + j) = numbers_of<kKind>((vi)((vu)words >> 4) & 0x0f0f0f0f);
      }
}

// A block's scales for widen_codes.
static inline void float8_scales(const QuantisedPart& part, const uint8_t* panel, vf* scale) {
  const vf power = splat(VECTOR_BYTES >= 32 ? 256.0f : 1.329227995784916e36f);  // 2^8, 2^120: from e4m3's bias to float16's, float32's
  for (int j = 0; j < kPanelVectors; ++j)
    scale[j] = part.scale_bytes ? load_scales(panel + code_bytes(part) + j * W * part.scale_bytes, part.scale_bytes) * power : power;
}
// PANEL float8 codes as float32. By way of float16, where hardware widens subnormal numbers as fast as others.
static inline void widen_codes(const uint8_t* codes, const vf* scale, vf* out) {
  ask(codes);
#if VECTOR_BYTES == 64
  const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(int16_t(0xbfff)));
  out[0] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(halves)) * scale[0];
  out[1] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)) * scale[1];
#elif VECTOR_BYTES == 32
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xbfff)));
  out[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)) * scale[0];
  out[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)) * scale[1];
#else
  for (int j = 0; j < kPanelVectors; ++j) {
    const vu bits = __builtin_convertvector(*reinterpret_cast<const vb_any*>(codes + j * W), vu);
    out[j] = (vf)((bits & 0x7f) << 20 | (bits & 0x80) << 24) * scale[j];
  }
#endif
}

// A block of float8 codes as float32 [block][PANEL].
static void widen_float8(const QuantisedPart& part, const uint8_t* panel, float* piece) {
  vf scale[kPanelVectors], wide[kPanelVectors];
  float8_scales(part, panel, scale);
  for (int64_t i = 0; i < part.block; ++i) {
    widen_codes(panel + i * PANEL, scale, wide);
    for (int j = 0; j < kPanelVectors; ++j) store(piece + i * PANEL + j * W, wide[j]);
  }
}
// c[MR][PANEL] += a block of float8 codes for one tile of rows [block][MR], with the bits of multiply_tile of the widened block.
template <int MR>
static void multiply_float8(const QuantisedPart& part, const uint8_t* panel, const float* x, bool add, float* c) {
  vf scale[kPanelVectors], wide[kPanelVectors], acc[MR][kPanelVectors];
  float8_scales(part, panel, scale);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; ++j) acc[i][j] = add ? load(c + i * PANEL + j * W) : vf{};
  for (int64_t k = 0; k < part.block; ++k, panel += PANEL, x += MR) {
    widen_codes(panel, scale, wide);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < kPanelVectors; ++j) acc[i][j] = multiply_add(acc[i][j], x[i], wide[j]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; ++j) store(c + i * PANEL + j * W, acc[i][j]);
}
static void multiply_float8_rows(int64_t rows, const QuantisedPart& part, const uint8_t* panel, const float* x, bool add, float* c) {
  switch (rows) {
#define ROWS(R) case R: return multiply_float8<R>(part, panel, x, add, c);
    ALL_ROWS
#undef ROWS
  }
}

template <class T>
static void quantised_part(const LinearArgs& g, const QuantisedPart& part, int64_t column, int64_t first, int64_t last) {
  static thread_local Floats x_buffer, sums_buffer, c_buffer, piece_buffer;
  const bool whole = part.kind != kFloat8;  // numbers
  const int64_t blocks = blocks_of(g.k, part.block), padded = blocks * part.block;
  const int64_t row_floats = whole ? padded / 2 : padded, tile = whole ? QUAD_ROWS : ROW_TILE;
  const int64_t rows = smaller(g.m, larger(LEAST_TILES, X_BLOCK_BYTES / 4 / row_floats / tile) * tile);
  const int64_t at_once = whole ? larger(1, PIECE_BYTES / code_bytes(part)) : 1;  // blocks
  float *const x = x_buffer.reserve(rows * row_floats), *const c = c_buffer.reserve(rows * PANEL);
  Rounded* const rounded = reinterpret_cast<Rounded*>(sums_buffer.reserve(rows * blocks * 2));
  const bool unpacks = has_nibbles(part) && g.m > FEW_TILES * QUAD_ROWS;
  float* const piece = piece_buffer.reserve(whole ? unpacks * at_once * code_bytes(part) / 2 : part.block * PANEL);
  uint8_t* const unpacked = unpacks ? reinterpret_cast<uint8_t*>(piece) : nullptr;
  for (int64_t m0 = 0; m0 < g.m; m0 += rows) {
    const RowTiles tiles(smaller(rows, g.m - m0), tile);
    const T* from = static_cast<const T*>(g.x) + m0 * g.k;
    if (whole) round_rows(from, g.k, part, tiles, reinterpret_cast<Quad*>(x), rounded);
    else {
      float* out = x;
      for (int64_t t = 0; t < tiles.count; ++t) {
        const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start;
        for (int64_t i = 0; i < height; ++i)
          for (int64_t k = 0; k < padded; ++k) out[k * height + i] = k < g.k ? widen(from[(start + i) * g.k + k]) : 0.0f;
        out += padded * height;
      }
    }
    for (int64_t p = first; p < last; ++p) {
      const uint8_t* panel = static_cast<const uint8_t*>(part.packed) + p * blocks * block_bytes(part);
      const uint8_t* supers = part.supers + p * blocks_of(blocks, int64_t(1) << part.super_shift) * super_bytes(part);
      for (int64_t b = 0; b < blocks; b += at_once, panel += at_once * block_bytes(part)) {
        if (!whole && tiles.count == 1) {
          multiply_float8_rows(tiles.m, part, panel, x + b * part.block * tiles.m, b > 0, c);
          continue;
        }
        if (!whole) widen_float8(part, panel, piece);
        if (unpacks) (part.kind == kInt4 ? unpack_nibbles<kInt4> : unpack_nibbles<kFloat4>)(part, panel, smaller(at_once, blocks - b), unpacked);
        for (int64_t t = 0; t < tiles.count; ++t) {
          const int64_t start = tiles.start(t), height = tiles.start(t + 1) - start;
          if (!whole) {
            multiply_rows<0>(int(height), x + start * padded + b * part.block * height, piece, part.block, b > 0, c + start * PANEL, nullptr);
            continue;
          }
          const Quad* quads = reinterpret_cast<const Quad*>(x) + start * (padded / 4) + b * (part.block / 4) * height;
          const Rounded* of_block = rounded + start * blocks + b * height;
          const int64_t count = smaller(at_once, blocks - b);
          float* out = c + start * PANEL;
          auto* const multiply = part.kind == kInt4 && !unpacks     ? multiply_tile_of<kInt4, false>
                                 : part.kind == kFloat4 && !unpacks ? multiply_tile_of<kFloat4, false>
                                 : part.x_bits == 16                ? multiply_tile_of<kInt8, false>
                                                                    : multiply_tile_of<kInt8, true>;
          multiply(height, part, panel, supers, unpacked, quads, of_block, b, count, out);
        }
      }
      if (part.row_scales)
        for (int64_t i = 0; i < tiles.m; ++i)
          for (int64_t j = 0; j < PANEL; j += W) store(c + i * PANEL + j, load(c + i * PANEL + j) * load(part.row_scales + p * PANEL + j));
      const T* bias = g.bias ? static_cast<const T*>(g.bias) + column + p * PANEL : nullptr;
      finish_rows(c, tiles.m, bias, static_cast<T*>(g.y) + m0 * g.n + column + p * PANEL, g.n, smaller(PANEL, part.n - p * PANEL));
    }
  }
}

// Panels [first, last) of all parts' together.
static void quantised_linear(const LinearArgs& g, int64_t first, int64_t last) {
  const QuantisedPart* part = static_cast<const QuantisedPart*>(g.packed);
  for (int64_t i = 0, column = 0, panels; i < g.num_parts; ++i, column += part->n, first -= panels, last -= panels, ++part) {
    panels = (part->n + PANEL - 1) / PANEL;
    const int64_t from = larger(0, first), to = smaller(panels, last);
    if (from >= to) continue;
    if (g.dtype == kFloat32) quantised_part<float>(g, *part, column, from, to);
    else quantised_part<bf16>(g, *part, column, from, to);
  }
}

// A head's key or value as the pool holds it. In a row of head_dim numbers: in the model's own type; or float8 (e4m3), times a scale of its
// head; or whole numbers of 8 bits, and behind them their float32 scale. Codes are exact in bfloat16: attention multiplies them as they are,
// and then a key's scores and a value's weights by their scale.
// Keys in the model's own type lie in groups of GROUP tokens, [words of a row][GROUP], where a block holds whole groups and values are apart.

constexpr int64_t GROUP = 16;

struct Float8 { uint8_t bits; };
struct Int8 { int8_t code; };

template <class C>
static inline int64_t row_length(int64_t head_dim) { return head_dim; }  // in items of C
template <>
inline int64_t row_length<Int8>(int64_t head_dim) { return head_dim + int64_t(sizeof(float)); }

template <class C>
static inline bool keys_in_groups(int64_t planes, int64_t block_size) { return sizeof(C) > 1 && planes == 2 && block_size % GROUP == 0; }

static inline float scale_of_row(const Float8*, int64_t, float of_head) { return of_head; }
static inline float scale_of_row(const Int8* row, int64_t head_dim, float) {
  float scale;
  std::memcpy(&scale, row + head_dim, sizeof scale);
  return scale;
}

typedef uint8_t vbyte __attribute__((vector_size(VECTOR_BYTES / 4), aligned(1), may_alias));
typedef int8_t vcode __attribute__((vector_size(VECTOR_BYTES / 4), aligned(1), may_alias));

static inline vu load_bytes(const void* p) {
#if VECTOR_BYTES == 64
  return (vu)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif VECTOR_BYTES == 32
  return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*static_cast<const vbyte*>(p), vu);
#endif
}
// e4m3 without NaN. Subnormals are made of normal numbers, 2^-6 (1 + m / 8) - 2^-6: processors are slow with those of float32.
static inline vf load(const Float8* p) {
  const vu code = load_bytes(p), magnitude = code & 0x7fu, small = (vu)(magnitude < 8u);
  const vf wide = (vf)((magnitude << 20) + (120u << 23) + (small & 1u << 23)) - (vf)(small & 0x3c800000u);
  return (vf)((vu)wide | (code & 0x80u) << 24);
}
static inline vf load(const Int8* p) { return __builtin_convertvector((vi)(load_bytes(p) << 24) >> 24, vf); }

// Numbers that T holds exactly.
static inline void store_exact(float* p, vf x) { store(p, x); }
static inline void store_exact(bf16* p, vf x) { *reinterpret_cast<vh_any*>(p) = __builtin_convertvector((vu)x >> 16, vh); }

// Pairs of codes to pairs of bfloat16, as many as a whole vector holds; the rest is left to the caller. Returns how many.
template <class T, class C>
static inline int64_t widen_pairs(const C*, T*, int64_t) { return 0; }
template <>
inline int64_t widen_pairs(const Int8* from, bf16* to, int64_t n) {
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const vu pairs = (vu)__builtin_convertvector(*reinterpret_cast<const vh_any*>(from + i), vu);
    const vf even = __builtin_convertvector((vi)(pairs << 24) >> 24, vf), odd = __builtin_convertvector((vi)(pairs << 16) >> 24, vf);
    store(reinterpret_cast<float*>(to + i), (vf)((vu)even >> 16 | ((vu)odd & 0xffff0000u)));
  }
  return i;
}
#if VECTOR_BYTES == 64
template <>
inline int64_t widen_pairs(const Float8* from, bf16* to, int64_t n) {
  const __m512i subnormal = _mm512_set4_epi64(0, 0, 0x3c603c403c203c00, 0x3bc03b803b000000);  // m 2^-9 in bfloat16, twice eight at the end
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __m512i wide =
        _mm512_mask_permutexvar_epi16(normal, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, subnormal);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16(int16_t(0x8000)));
    _mm512_storeu_si512(to + i, _mm512_or_si512(wide, sign));
  }
  return i;
}
#endif

template <class T, class C>
static inline void widen_row(const C* from, T* to, int64_t head_dim) {  // head_dim: a multiple of W
  for (int64_t d = widen_pairs(from, to, head_dim); d < head_dim; d += W) store_exact(to + d, load(from + d));
}

// Runs body(vector, place, count) over n numbers, the last ones beside zeros.
template <class T, class F>
static inline void by_vectors(const T* from, int64_t n, F&& body) {
  int64_t i = 0;
  for (; i + W <= n; i += W) body(load(from + i), i, W);
  if (i == n) return;
  vf rest = {};
  for (int64_t j = i; j < n; ++j) rest[j - i] = widen(from[j]);
  body(rest, i, n - i);
}

template <class T>
static inline void write_row(const T* from, T* to, int64_t head_dim, float) { std::memcpy(to, from, size_t(head_dim) * sizeof(T)); }
static inline void write_in_group(const void* from, void* to, int64_t num_words) {
  for (int64_t word = 0; word < num_words; ++word)
    std::memcpy(static_cast<uint32_t*>(to) + word * GROUP, static_cast<const uint32_t*>(from) + word, sizeof(uint32_t));
}

// To nearest, ties to even; beyond +-448 becomes that; NaN stays NaN.
template <class T>
static void write_row(const T* from, Float8* to, int64_t head_dim, float scale) {
  by_vectors(from, head_dim, [&](vf x, int64_t i, int64_t count) {
    x = vmax(splat(-448.0f), vmin(splat(448.0f), x / scale));
    const vu bits = (vu)x, magnitude = bits & 0x7fffffffu;
    const vf subnormal = (vf)magnitude + 16384.0f;  // its last bit is 2^-9, as that of e4m3's
    const vu rounded = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    vu code = (vu)select((vi)(magnitude < (121u << 23)), (vf)((vu)subnormal - (141u << 23)), (vf)rounded);
    code = (vu)select((vi)(x != x), (vf)(code | 0x7fu), (vf)code) | (bits >> 24 & 0x80u);
    const vbyte bytes = __builtin_convertvector(code & 0xffu, vbyte);
    std::memcpy(to + i, &bytes, size_t(count));
  });
}

// Rounded beside the row's largest magnitude; a row with a number that is not finite becomes NaN.
template <class T>
static void write_row(const T* from, Int8* to, int64_t head_dim, float) {
  vf top = {}, poison = {};
  by_vectors(from, head_dim, [&](vf x, int64_t, int64_t) {
    top = vmax(top, vmax(x, -x));
    poison += x * 0.0f;
  });
  const float scale = largest(top) / 127.0f + sum(poison), divisor = scale > 0.0f ? scale : 1.0f;
  by_vectors(from, head_dim, [&](vf x, int64_t i, int64_t count) {
    const vcode codes = __builtin_convertvector((vi)(x / divisor + 12582912.0f) - 0x4b400000, vcode);  // 1.5 * 2^23: its bits
    std::memcpy(to + i, &codes, size_t(count));
  });
  std::memcpy(to + head_dim, &scale, sizeof scale);
}

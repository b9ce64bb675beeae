// A head's key or value as the pool holds it. In a row of head_dim numbers: in the model's own type; or float8 (e4m3), times a scale of its
// head; or whole numbers of 8 bits, and behind them their float32 scale. Codes are exact in bfloat16: attention multiplies them as they are,
// and then a key's scores and a value's weights by their scale.
// Where a block holds whole groups of GROUP tokens and values are apart, a group's keys lie item by item, [items of a row][GROUP]. An item is a
// code, or a word of 4 bytes; scales lie behind the codes, [GROUP].

constexpr int64_t GROUP = 16;

struct Float8 { uint8_t bits; };
struct Int8 { int8_t code; };

template <class C>
static inline int64_t row_length(int64_t head_dim) { return head_dim; }  // in items of C
template <>
inline int64_t row_length<Int8>(int64_t head_dim) { return head_dim + int64_t(sizeof(float)); }

template <class C>
struct ItemOf { using Type = C; };
template <>
struct ItemOf<bf16> { using Type = float; };
template <class C>
using Item = typename ItemOf<C>::Type;
template <class I>
struct VectorOf { using Type = vb; };
template <>
struct VectorOf<float> { using Type = vu; };

static inline bool keys_in_groups(int64_t planes, int64_t block_size) { return planes == 2 && block_size % GROUP == 0; }

typedef uint8_t vbyte __attribute__((vector_size(VECTOR_BYTES / 4), aligned(1), may_alias));
typedef int8_t vcode __attribute__((vector_size(VECTOR_BYTES / 4), aligned(1), may_alias));

static inline vf load(const Int8* p) {
#if VECTOR_BYTES == 64
  return (vf)_mm512_cvtepi32_ps(_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif VECTOR_BYTES == 32
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const vcode*>(p), vf);
#endif
}
// e4m3 without NaN, less FLOAT8_SCALE: float16 has its subnormals, too.
constexpr float FLOAT8_SCALE = 256.0f;
static inline vf load(const Float8* p) {
#if VECTOR_BYTES == 64
  const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(int16_t(0xbfff))));
#elif VECTOR_BYTES == 32
  const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return (vf)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(int16_t(0xbfff))));
#else  // 2^k (1 + m / 8) stands for 2^(k + 1) m / 8, too: what is less
  const vu code = __builtin_convertvector(*reinterpret_cast<const vbyte*>(p), vu);
  const vf normal = (vf)(((code & 0x7fu) << 20) + (112u << 23)), subnormal = normal * 2.0f - 0x1p-14f;
  return (vf)((vu)vmin(normal, subnormal) | (code & 0x80u) << 24);
#endif
}

// Pairs of bfloat16 in words.
template <class C>
static inline vf load_pairs(const C* even, const C* odd) { return pairs_of(load(even), load(odd)); }
#if BF16_UNITS
static inline vf load_pairs(const Float8* even, const Float8* odd) {
  const __m512i subnormal = _mm512_set4_epi64(0, 0, 0x3860384038203800, 0x37c0378037000000);  // m 2^-17 in bfloat16, twice eight at the end
  const __m512i order = (__m512i)(vu{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001u + 0x100000u);
  const __m128i *low = reinterpret_cast<const __m128i*>(even), *high = reinterpret_cast<const __m128i*>(odd);
  const __m512i code = _mm512_cvtepi8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1));
  const __m512i normal = (_mm512_slli_epi16(code, 4) & _mm512_set1_epi16(0x7f0)) | _mm512_set1_epi16(112 << 7);
  const __m512i wide = _mm512_mask_permutexvar_epi16(normal, _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78)), code, subnormal);
  return (vf)_mm512_permutexvar_epi16(order, wide | (code & _mm512_set1_epi16(int16_t(0x8000))));
}
#endif

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

// A row as it stands, to the place of a token of a group.
template <class C>
static inline void write_in_group(const C* row, C* group, int64_t token, int64_t head_dim) {
  const int64_t count = head_dim * int64_t(sizeof(C)) / int64_t(sizeof(Item<C>));
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(reinterpret_cast<Item<C>*>(group) + i * GROUP + token, reinterpret_cast<const Item<C>*>(row) + i, sizeof(Item<C>));
  if (row_length<C>(head_dim) > head_dim) std::memcpy(group + head_dim * GROUP + token * 4, row + head_dim, sizeof(float));
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

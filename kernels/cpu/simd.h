// Vectors of float32 in the width of the instruction set at hand, in the compiler's vector extension: one source, three widths.
// Included once by each isa_*.cpp, inside its own namespace, after the target pragma. VECTOR_BYTES is 16, 32 or 64.

constexpr int64_t W = VECTOR_BYTES / 4;  // lanes

// No template of the standard library may be instantiated here: the linker keeps one copy of it for all instruction sets.
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct Floats {  // a buffer that only grows
  float* data = nullptr;
  size_t capacity = 0;
  Floats() = default;
  Floats(const Floats&) = delete;
  ~Floats() { std::free(data); }
  float* reserve(int64_t count) {
    if (size_t(count) > capacity) {
      std::free(data);
      data = static_cast<float*>(std::aligned_alloc(64, (size_t(count) * sizeof(float) + 63) / 64 * 64));
      if (!data) std::abort();
      capacity = size_t(count);
    }
    return data;
  }
  float* filled(int64_t count, float value) {
    reserve(count);
    for (int64_t i = 0; i < count; ++i) data[i] = value;
    return data;
  }
};

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t vb __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef float vf_any __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

struct bf16 { uint16_t bits; };

static inline vf splat(float x) { return x - vf{}; }
static inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }

static inline vf load(const bf16* p) {  // compilers make five instructions of the plain conversion to 8 lanes
#if VECTOR_BYTES == 32
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  return (vf)(__builtin_convertvector((vh)*reinterpret_cast<const vh_any*>(p), vu) << 16);
#endif
}
static inline void store(bf16* p, vf x) {  // to nearest, ties to even; NaN stays NaN
#if BF16_UNITS
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  const vu u = (vu)x, rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vu nan = (vu)(x != x);
  *reinterpret_cast<vh_any*>(p) = __builtin_convertvector((nan & 0x7fc0u) | (~nan & rounded), vh);
#endif
}

// Two bfloat16 rows interleaved lane by lane: one load and two operations give both. p as float32 pairs: [row 0, row 1] of each lane.
static inline void load_two(const bf16* p, vf& row0, vf& row1) {
  const vu both = (vu)*reinterpret_cast<const vf_any*>(p);
  row0 = (vf)(both << 16);
  row1 = (vf)(both & 0xffff0000u);
}
static inline void load_two(const bf16* p, float* row0, float* row1) {
  vf first, second;
  load_two(p, first, second);
  store(row0, first);
  store(row1, second);
}

// Two bfloat16, as float32, in each word.
static inline vf pairs_of(vf even, vf odd) { return (vf)((vu)even >> 16 | ((vu)odd & 0xffff0000u)); }

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { const uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
static inline void narrow(float* p, float x) { *p = x; }
static inline void narrow(bf16* p, float x) {
  uint32_t u; std::memcpy(&u, &x, 4);
  p->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// As many of the next `left` bytes as a vector holds.
template <class V>
static inline void load_bytes(const void* p, int64_t left, V& x) {
  if (left >= int64_t(sizeof x)) return void(std::memcpy(&x, p, sizeof x));
  x = V{};
  std::memcpy(&x, p, size_t(left));
}

// Rows transposed in place: words [W][W], or bytes, each [16][16] of them.
template <int S, class V, int... L>
static inline void exchange(V& a, V& b, std::integer_sequence<int, L...>) {  // halves of 2 S lanes
  constexpr int N = sizeof...(L);
  const V first = a, second = b;
#if defined(__clang__)
  a = __builtin_shufflevector(first, second, (L & S ? N + (L ^ S) : L)...);
  b = __builtin_shufflevector(first, second, (L & S ? N + L : L ^ S)...);
#else
  a = __builtin_shuffle(first, second, V{(L & S ? N + (L ^ S) : L)...});
  b = __builtin_shuffle(first, second, V{(L & S ? N + L : L ^ S)...});
#endif
}
template <int ROWS = int(W), int S = ROWS / 2, class V>
static inline __attribute__((always_inline)) void transpose(V* rows) {
  if constexpr (S > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
      if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, int(sizeof(V) / sizeof(rows[0][0]))>{});
    transpose<ROWS, S / 2>(rows);
  }
}

static inline vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }

// Over the lanes, by halves: `both` of lanes i and i + W / 2, and so on.
template <class F>
static inline float by_halves(vf x, F&& both) {
#if VECTOR_BYTES >= 32
#if VECTOR_BYTES == 64
  const __m256 of8 = both(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
  const __m256 of8 = (__m256)x;
#endif
  const __m128 of4 = both(_mm256_castps256_ps128(of8), _mm256_extractf128_ps(of8, 1));
  const __m128 of2 = both(of4, _mm_movehl_ps(of4, of4));
  return both(of2, _mm_movehdup_ps(of2))[0];
#else
  float lane[W];
  store(lane, x);
  for (int64_t half = W / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lane[i] = both(lane[i], lane[i + half]);
  return lane[0];
#endif
}
static inline float sum(vf x) { return by_halves(x, [](auto a, auto b) { return a + b; }); }
static inline float largest(vf x) { return by_halves(x, [](auto a, auto b) { return b > a ? b : a; }); }

// e^x to 1 ulp or so: x = n ln 2 + r, a polynomial for e^r, n added to the exponent. Below -87 it is 0.
static inline vf vexp(vf x) {
  const vi tiny = x < -87.0f;
  x = vmin(x, splat(88.0f));
  const vf shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are n
  const vf n = shifted - 12582912.0f;
  const vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vf scaled = (vf)((vi)p + ((vi)shifted << 23));
  return select(tiny, vf{}, scaled);
}

// 2^x to four parts in a million, for x of at most 0, or so. Below -126 it is 0.
static inline vf vexp2_short(vf x) {
  const vf shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f);
  vf p = r * 9.6004e-3f + 5.591689e-2f;
  p = p * r + 2.4023718e-1f;
  p = p * r + 6.9312199e-1f;
  p = p * r + 1.0f;
  return select(x < -126.0f, vf{}, (vf)((vi)p + ((vi)shifted << 23)));
}

// ln x for positive normal x, to 1 ulp or so (the polynomial of Cephes' logf).
static inline vf vlog(vf x) {
  vi bits = (vi)x;
  const vi big = ((bits & 0x007fffff) > 0x3504f3);  // mantissa above sqrt 2: take it halved
  const vi exponent = ((bits >> 23) & 0xff) - 127 - big;
  bits = (bits & 0x007fffff) | (0x3f800000 + (big << 23));  // big is -1 where true
  const vf f = (vf)bits - 1.0f, e = __builtin_convertvector(exponent, vf), z = f * f;
  vf p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const vf y = p * f * z + e * -2.12194440e-4f - 0.5f * z;
  return f + y + e * 0.693359375f;
}

// What a row of A is multiplied as, step by step of k, against a row of B of W 4-byte words a vector:
//   float: one k; B float32.   Two: two k; B two bfloat16 rows interleaved, widened here.   Pair: the same by bfloat16 units.
struct Two { float first, second; };
struct Pair { bf16 first, second; };
template <class X>
constexpr int64_t kStepDepth = 2;
template <>
constexpr int64_t kStepDepth<float> = 1;

static inline vf multiply_add(vf sum, float a, vf b) { return sum + splat(a) * b; }
static inline vf multiply_add(vf sum, Two a, vf b) {
  const vf row0 = (vf)((vu)b << 16), row1 = (vf)((vu)b & 0xffff0000u);
  sum += splat(a.first) * row0;
  return sum + splat(a.second) * row1;
}
#if BF16_UNITS
static inline vf multiply_add(vf sum, Pair a, vf b) {
  int32_t bits;
  std::memcpy(&bits, &a, 4);
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)b);
}
#endif

// Ask memory for what lies ahead in a stream, first to L2, then to L1. (L1 alone is held up by its few open misses: 11 GB/s where memory gives 16.)
static inline __attribute__((always_inline)) void ask(const void* stream) {
  constexpr int64_t AHEAD_L2 = 64 << 10, AHEAD_L1 = 2 << 10;
  __builtin_prefetch(static_cast<const char*>(stream) + AHEAD_L2, 0, 2);
  __builtin_prefetch(static_cast<const char*>(stream) + AHEAD_L1, 0, 3);
}

// Rows whose accumulators of two vectors fill the register file; and a case for each number of them.
#if VECTOR_BYTES == 64
constexpr int ROW_TILE = 12;
#define ALL_ROWS ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#else
constexpr int ROW_TILE = 6;
#define ALL_ROWS ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#endif

// C tile [MR][NV vectors] = A B, plus scale[i] * C where `add`: step k of A's row i at a[i * row + k * column], B's at b + k * ldb, C rows ldc
// apart. Each output is one chain of multiply-adds in the order of k, whatever MR: its value does not depend on its neighbours.
// `stream`: where in memory B comes from, kStream bytes with each step; what follows is asked for ahead. Where few rows need little time for
// a step, Zen 4 reads 24 GB/s so and 31 without, at eight rows 26 and 21: asking_rows.

template <int MR, int NV, int64_t kStream = 0, class X>
static inline __attribute__((always_inline)) void multiply_tile(const X* a, int64_t row, int64_t column, const float* b, int64_t ldb,
                                                                 int64_t steps, bool add, const float* scale, float* c, int64_t ldc,
                                                                 const char* stream = nullptr) {
  vf acc[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = add ? load(c + i * ldc + j * W) * (scale ? scale[i] : 1.0f) : vf{};
  const bool asks = kStream > 0 && MR >= asking_rows;
  for (int64_t k = 0; k < steps; ++k, stream += kStream) {
    vf bv[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) bv[j] = load(b + k * ldb + j * W);
    if (asks) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < kStream; line += 64) ask(stream + line);
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = multiply_add(acc[i][j], a[i * row + k * column], bv[j]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(c + i * ldc + j * W, acc[i][j]);
}

// Weights of bfloat16 in 12 bits and a quarter, without loss: a decode step waits for weights, and a weight's exponent is nearly always one of a
// few. (Zhang et al., "70% Size, 100% Accuracy" (DFloat11), 2025, code exponents by Huffman trees; here all codes have four bits, which a
// CPU expands as fast as memory gives them.)
// A block is CODED_K inputs of a panel: a head, then units of two steps, 128 numbers in the order of the plain panel: their signs and
// fractions, 128 bytes; their exponents, 64 bytes, two in each. Code 0 is exponent 0, code c exponent base + c. What has another
// exponent is listed in the head; a matrix where that is too long stays plain.

constexpr int LISTED = 15;
constexpr int64_t CODED_AHEAD_L2 = 64 << 10, CODED_AHEAD_L1 = 8 << 10;  // see ask

struct CodedHead {
  uint8_t base, count;
  uint16_t units;  // those with a listed number
  struct { uint16_t at, bits; } listed[LISTED];
};
static_assert(sizeof(CodedHead) == 64 && CODED_BYTES == 64 + CODED_K * PANEL * 3 / 2);

constexpr int64_t STEP_NUMBERS = 2 * PANEL, UNIT_BYTES = 3 * STEP_NUMBERS;
constexpr int64_t BLOCK_UNITS = CODED_K / 4, BLOCK_NUMBERS = CODED_K * PANEL;

// By code: the upper seven bits of an exponent, and its last bit as the upper bit of a byte.
struct Exponents {
  __m512i upper, last;
  explicit Exponents(uint8_t base) {
    const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i all = _mm_and_si128(_mm_add_epi8(codes, _mm_set1_epi8(char(base))), _mm_cmpgt_epi8(codes, _mm_setzero_si128()));
    upper = _mm512_broadcast_i32x4(_mm_and_si128(_mm_srli_epi16(all, 1), _mm_set1_epi8(0x7f)));
    last = _mm512_broadcast_i32x4(_mm_slli_epi16(_mm_and_si128(all, _mm_set1_epi8(1)), 7));
  }
};

// A step of two, the unit's first or second, as a plain panel has it.
static inline __attribute__((always_inline)) void expand(const char* unit, int step, const Exponents& e, __m512i* words) {
  const __m512i low4 = _mm512_set1_epi8(0x0f), sign = _mm512_set1_epi8(char(0x80)), codes = _mm512_loadu_si512(unit + 128);
  const __m512i code = _mm512_and_si512(step ? _mm512_srli_epi16(codes, 4) : codes, low4), rest = _mm512_loadu_si512(unit + 64 * step);
  const __m512i high = _mm512_ternarylogic_epi32(_mm512_shuffle_epi8(e.upper, code), rest, sign, 0xF8);  // a | (b & c)
  const __m512i low = _mm512_ternarylogic_epi32(_mm512_shuffle_epi8(e.last, code), rest, sign, 0xF4);    // a | (b & ~c)
  words[0] = _mm512_unpacklo_epi8(low, high);
  words[1] = _mm512_unpackhi_epi8(low, high);
}

// Step `step` of a block. In registers: a call, or words in memory, would hold up the sums of every row.
static inline __attribute__((always_inline)) void put_listed(const CodedHead& head, uint64_t step, __m512i* words) {
  for (int i = 0; i < head.count; ++i) {
    const uint64_t number = head.listed[i].at - step * STEP_NUMBERS, bit = number < STEP_NUMBERS ? uint64_t(1) << number : 0;
    for (int j = 0; j < kPanelVectors; ++j)
      words[j] = _mm512_mask_set1_epi16(words[j], __mmask32(bit >> 32 * j), short(head.listed[i].bits));
  }
}

// As multiply_tile, of whole blocks; a panel in plain form is left in `piece` if that is given.
template <int MR, bool kKeeps>
static inline void multiply_coded(const Pair* x, const char* block, int64_t blocks, bool add, float* c, char* piece) {
  vf acc[MR][kPanelVectors];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; ++j) acc[i][j] = add ? load(c + i * PANEL + j * W) : vf{};
  const bool asks = MR >= asking_rows;
  for (const char* end = block + blocks * CODED_BYTES; block < end; block += CODED_BYTES) {
    const CodedHead& head = *reinterpret_cast<const CodedHead*>(block);
    const Exponents exponents(head.base);
    const char* at = block + sizeof(CodedHead);
    for (int64_t unit = 0; unit < BLOCK_UNITS; ++unit, at += UNIT_BYTES) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < UNIT_BYTES; line += 64) {
        if (asks) __builtin_prefetch(at + line + CODED_AHEAD_L2, 0, 2);
        __builtin_prefetch(at + line + CODED_AHEAD_L1, 0, 3);
      }
#pragma GCC unroll 2
      for (int step = 0; step < 2; ++step, x += MR) {
        __m512i b[kPanelVectors];
        expand(at, step, exponents, b);
        if (__builtin_expect(head.units >> unit & 1, 0)) put_listed(head, 2 * unit + step, b);
        if constexpr (kKeeps) {
          _mm512_storeu_si512(piece, b[0]);
          _mm512_storeu_si512(piece + VECTOR_BYTES, b[1]);
          piece += kPanelVectors * VECTOR_BYTES;
        }
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
          for (int j = 0; j < kPanelVectors; ++j) acc[i][j] = multiply_add(acc[i][j], x[i], (vf)b[j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; ++j) store(c + i * PANEL + j * W, acc[i][j]);
}

static void multiply_coded_rows(int rows, const Pair* x, const char* block, int64_t blocks, bool add, float* c, char* piece) {
  switch (rows) {
#define ROWS(R) case R: return piece ? multiply_coded<R, true>(x, block, blocks, add, c, piece) : multiply_coded<R, false>(x, block, blocks, add, c, piece);
    ALL_ROWS
#undef ROWS
  }
}

// The base with which fewest numbers must be listed, or so few that counting all takes longer than they do.
static uint8_t good_base(const uint8_t* exponents) {
  __m512i highest = _mm512_setzero_si512();
  for (int64_t i = 0; i < BLOCK_NUMBERS; i += 64) highest = _mm512_max_epu8(highest, _mm512_load_si512(exponents + i));
  alignas(64) uint8_t lanes[64];
  _mm512_store_si512(lanes, highest);
  int top = 15, listed = 0;
  for (int lane : lanes) top = lane > top ? lane : top;
  for (int64_t i = 0; i < BLOCK_NUMBERS; i += 64) {
    const __m512i e = _mm512_load_si512(exponents + i);
    listed += __builtin_popcountll(_mm512_cmple_epu8_mask(e, _mm512_set1_epi8(char(top - 15))) & _mm512_test_epi8_mask(e, e));
  }
  if (listed <= 2) return uint8_t(top - 15);
  int64_t counts[256] = {}, within = 0, most = -1;
  int best = 0;
  for (int64_t i = 0; i < BLOCK_NUMBERS; ++i) ++counts[exponents[i]];
  for (int e = 1; e < 256; ++e) {
    within += counts[e] - (e > 15 ? counts[e - 15] : 0);
    if (e >= 15 && within > most) most = within, best = e - 15;
  }
  return uint8_t(best);
}

// A block of a plain panel. False: too many numbers would have to be listed.
static bool code_block(const char* words, char* block) {
  alignas(64) uint8_t exponents[BLOCK_NUMBERS], rests[BLOCK_NUMBERS];
  const __m512i low8 = _mm512_set1_epi16(0x00ff), sign = _mm512_set1_epi8(char(0x80)), one = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < BLOCK_NUMBERS; i += 64) {
    const __m512i a = _mm512_loadu_si512(words + 2 * i), b = _mm512_loadu_si512(words + 2 * i + 64);
    const __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, low8), _mm512_and_si512(b, low8));
    const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    const __m512i exponent = _mm512_or_si512(_mm512_add_epi8(high, high), _mm512_and_si512(_mm512_srli_epi16(low, 7), one));
    _mm512_store_si512(exponents + i, exponent);
    _mm512_store_si512(rests + i, _mm512_ternarylogic_epi32(sign, high, low, 0xCA));  // a ? b : c
  }
  CodedHead head = {good_base(exponents), 0, 0, {}};
  char* at = block + sizeof(CodedHead);
  const __m512i base = _mm512_set1_epi8(char(head.base)), codes = _mm512_set1_epi8(15);
  for (int64_t unit = 0; unit < BLOCK_UNITS; ++unit, at += UNIT_BYTES) {
    __m512i pair[2];
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t first = (2 * unit + half) * STEP_NUMBERS;
      const __m512i exponent = _mm512_load_si512(exponents + first), code = _mm512_sub_epi8(exponent, base);
      const __mmask64 known = _mm512_cmple_epu8_mask(_mm512_sub_epi8(code, one), _mm512_sub_epi8(codes, one));
      pair[half] = _mm512_maskz_mov_epi8(known, code);
      _mm512_storeu_si512(at + 64 * half, _mm512_load_si512(rests + first));
      for (uint64_t others = ~(known | _mm512_testn_epi8_mask(exponent, exponent)); others; others &= others - 1) {
        const int64_t byte = __builtin_ctzll(others), lane = byte / 16, within = byte % 16;
        const int64_t number = first + lane * 8 + within % 8 + within / 8 * 32;  // as unpacklo and unpackhi place it
        if (head.count == LISTED) return false;
        head.units |= uint16_t(1 << unit);
        head.listed[head.count].at = uint16_t(number);
        std::memcpy(&head.listed[head.count++].bits, words + 2 * number, 2);
      }
    }
    _mm512_storeu_si512(at + 128, _mm512_or_si512(pair[0], _mm512_slli_epi16(pair[1], 4)));
  }
  std::memcpy(block, &head, sizeof head);
  return true;
}

// Quantised linear layers for AVX-512 with VNNI, whose bits are those of AVX-512 without it.
#if defined(__x86_64__)
#include <immintrin.h>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")
#endif
#define VECTOR_BYTES 64
#define BF16_UNITS 0
#define VNNI_UNITS 1

namespace splitserve {
namespace {
#include "simd.h"
#include "linear.h"
#include "quantised.h"
}  // namespace

void quantised_linear_vnni(const LinearArgs& g, int64_t first, int64_t last) { quantised_linear(g, first, last); }
}  // namespace splitserve
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

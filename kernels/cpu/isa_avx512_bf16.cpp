// The kernels for AVX-512 with bfloat16 units (AVX512-BF16). Their products of bfloat16 differ from the others in the last bits.
#if defined(__x86_64__)
#include <immintrin.h>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")
#endif
#define VECTOR_BYTES 64
#define BF16_UNITS 1

namespace splitserve {
namespace {
#include "simd.h"
#include "linear.h"
#include "low_rank.h"
#include "quantised.h"
#include "kv_codes.h"
#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "states.h"
#include "delta_net.h"
#include "short_conv.h"
#include "index_scores.h"
}  // namespace

const Kernels kAvx512Bf16Kernels = {"avx512_bf16", W, PANEL, true, pack_linear, linear, low_rank_down, low_rank_up,
                                pack_quantised, quantised_linear, attention, rope_and_store, add_rms_norm, {gate_mul<Silu>, gate_mul<Gelu>, gate_mul<ClampedSilu>, gate_mul<ReluSquared>},
                                gumbel_argmax, route, add_weighted, narrow_all, delta_net, short_conv, index_scores};
}  // namespace splitserve
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

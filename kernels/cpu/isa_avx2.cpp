// The kernels for AVX2 with FMA.
#if defined(__x86_64__)
#include <immintrin.h>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
#define VECTOR_BYTES 32
#define BF16_UNITS 0

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

const Kernels kAvx2Kernels = {"avx2", W, PANEL, false, pack_linear, linear, low_rank_down, low_rank_up,
                                pack_quantised, quantised_linear, attention, rope_and_store, add_rms_norm, {gate_mul<Silu>, gate_mul<Gelu>, gate_mul<ClampedSilu>, gate_mul<ReluSquared>},
                                gumbel_argmax, route, add_weighted, narrow_all, delta_net, short_conv, index_scores};
}  // namespace splitserve
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

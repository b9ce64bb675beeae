// One kernel call, its items shared among the pool's threads; and which instruction set it is in. Included by module.cpp alone.
#pragma once
#include <algorithm>
#include <map>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"
#if AMX_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {
using namespace splitserve;

#if AMX_TILES
const Kernels kAmxKernels = [] {
  Kernels kernels = kAvx512Bf16Kernels;
  kernels.name = "avx512_amx";
  kernels.codes = false;
  kernels.linear = linear_amx;
  return kernels;
}();

// Whether this process may use tiles: the CPU has them for bfloat16, and Linux gives the process room for them (since 5.16).
bool has_tiles() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif

const Kernels* const kAll[] = {
#if defined(__x86_64__)
    &kAvx512Kernels, &kAvx512Bf16Kernels, &kAvx2Kernels,
#if AMX_TILES
    &kAmxKernels,
#endif
#endif
    &kGenericKernels};

bool supported(const Kernels* kernels) {
#if AMX_TILES
  static const bool tiles = has_tiles();
  if (kernels == &kAmxKernels) return tiles && supported(&kAvx512Bf16Kernels);
#endif
#if defined(__x86_64__)
  if (kernels == &kAvx512Bf16Kernels) return __builtin_cpu_supports("avx512bf16") && supported(&kAvx512Kernels);
  if (kernels == &kAvx512Kernels)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  if (kernels == &kAvx2Kernels)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#endif
  return kernels == &kGenericKernels;
}

const Kernels* active = nullptr;
ThreadPool first_pool;
std::map<int64_t, ThreadPool> pools;  // the others, by number
thread_local ThreadPool* pool = &first_pool;  // of calls from this thread

constexpr double kShortCall = 2e5;  // multiply-adds or so: some 20 microseconds

// Runs body(first, last) over [0, items): on all threads, in equal parts, if the whole is not short.
template <class F>
void share(int64_t items, double work, F&& body) {
  if (work < kShortCall) return body(0, items);
  pool->run(items, (items + pool->size() - 1) / pool->size(), body);
}

// The same on threads of its own, for a start: cores that later are other workers' still have nothing to do.
template <class F>
void share_packing(int64_t threads, int64_t items, double work, F&& body) {
  ThreadPool packers;
  if (work >= kShortCall) packers.resize(threads);
  packers.run(items, packers.size() > 1 ? 1 : items, body);
}

double work_of(const LinearArgs& g) { return double(g.m) * double(g.n) * double(g.k); }
double work_of(const RopeArgs& g, int64_t num_tokens) { return double(num_tokens * (g.num_heads + g.planes * g.num_kv_heads) * g.head_dim); }
double work_of(const NormArgs& g, int64_t rows) { return double(rows * g.n); }

int64_t panels(int64_t n) { return (n + active->panel - 1) / active->panel; }

auto* quantised_linear_here() {
#if defined(__x86_64__)
  static const bool vnni = __builtin_cpu_supports("avx512vnni");
  if (vnni && active->vector_width == kAvx512Kernels.vector_width) return quantised_linear_vnni;
#endif
  return active->quantised_linear;
}

int64_t panels(const LinearArgs& g) {
  const auto* parts = static_cast<const QuantisedPart*>(g.packed);
  int64_t count = g.num_parts > 0 ? 0 : panels(g.n);
  for (int64_t i = 0; i < g.num_parts; ++i) count += panels(parts[i].n);
  return count;
}
// Several products in one call; threads share all their panels.
void call(const LinearArgs* products, size_t count) {
  int64_t items = 0;
  double work = 0;
  for (size_t i = 0; i < count; ++i) { items += panels(products[i]); work += work_of(products[i]); }
  share(items, work, [&](int64_t first, int64_t last) {
    for (const LinearArgs* g = products; g < products + count; ++g) {
      const int64_t own = panels(*g);
      if (first < own && last > 0)
        (g->num_parts > 0 ? quantised_linear_here() : active->linear)(*g, std::max<int64_t>(first, 0), std::min(last, own));
      first -= own;
      last -= own;
    }
  });
}
void call(const LinearArgs& g) { call(&g, 1); }
void call(const RouteArgs& g, int64_t rows) {
  share(rows, 4.0 * double(rows * g.num_experts * g.chosen), [&](int64_t first, int64_t last) { active->route(g, first, last); });
}
void call(const RopeArgs& g, int64_t num_tokens) {
  share(num_tokens, work_of(g, num_tokens), [&](int64_t first, int64_t last) { active->rope_and_store(g, first, last); });
}
void call(const NormArgs& g, int64_t rows) {
  share(rows, work_of(g, rows), [&](int64_t first, int64_t last) { active->add_rms_norm(g, first, last); });
}
void call_gate_mul(GateMul* gate_mul, const void* gate_up, void* y, int64_t rows, int64_t n, Dtype dtype) {
  share(rows, 4.0 * double(rows * n), [&](int64_t first, int64_t last) { gate_mul(gate_up, y, n, dtype, first, last); });
}

constexpr int64_t kLowRankRows = 12;  // of one adapter, at most, that are multiplied together

// The rows of a step in tiles of one slot each; `rows` [m] gets them in the order of slots. Rows without an adapter are left out.
void cut(const LowRankSlot* table, int64_t num_slots, const int32_t* slots, int64_t m, std::vector<int32_t>& rows,
         std::vector<LowRankTile>& tiles) {
  static thread_local std::vector<int32_t> ends;
  const auto adapted = [&](int64_t row) { return slots[row] >= 0 && slots[row] < num_slots && table[slots[row]].vectors; };
  ends.assign(size_t(num_slots), 0);
  for (int64_t row = 0; row < m; ++row)
    if (adapted(row)) ++ends[size_t(slots[row])];
  tiles.clear();
  int32_t first = 0;
  for (int32_t slot = 0; slot < num_slots; ++slot) {
    const int64_t count = ends[size_t(slot)], parts = (count + kLowRankRows - 1) / kLowRankRows;
    ends[size_t(slot)] = first;
    for (int64_t part = 0; part < parts; ++part) {
      const int32_t height = int32_t(count / parts + (part < count % parts));
      tiles.push_back({slot, first, height});
      first += height;
    }
  }
  rows.resize(size_t(first));
  for (int64_t row = 0; row < m; ++row)
    if (adapted(row)) rows[size_t(ends[size_t(slots[row])]++)] = int32_t(row);
}

// Threads share tiles, or, of few, their vectors of ranks and then their outputs; no row's bits depend on that.
void call(LowRankArgs g, const std::vector<LowRankTile>& tiles) {
  static thread_local std::vector<float> h;
  int64_t vectors = 0, num_rows = 0, steps = 0;
  const int64_t count = int64_t(tiles.size()), all = panels(g.n), threads = pool->size();
  for (const LowRankTile& tile : tiles) {
    vectors = std::max(vectors, g.slots[tile.slot].vectors);
    steps += tile.count * g.slots[tile.slot].vectors;
    num_rows += tile.count;
  }
  g.h_row = vectors * active->vector_width;
  h.resize(size_t(num_rows * g.h_row));
  g.h = h.data();
  const auto down = [&](int64_t tile, int64_t first, int64_t last) {
    const LowRankTile& at = tiles[size_t(tile)];
    last = std::min(last, g.slots[at.slot].vectors);
    if (first < last) active->low_rank_down(g, at, first, last);
  };
  const auto up = [&](int64_t tile, int64_t first, int64_t last) { active->low_rank_up(g, tiles[size_t(tile)], first, last); };
  const auto both = [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) down(tile, 0, vectors), up(tile, 0, all);
  };
  if (double(steps) * double(active->vector_width * (g.k + g.n)) < kShortCall) return both(0, count);
  if (threads == 1 || count >= 2 * threads) return pool->run(count, 1, both);
  const int64_t slices = std::min(all, 4 * threads);
  pool->run(count * vectors, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) down(i / vectors, i % vectors, i % vectors + 1);
  });
  pool->run(count * slices, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) up(i / slices, i % slices * all / slices, (i % slices + 1) * all / slices);
  });
}
void call(const LowRankArgs& args, const int32_t* slots, int64_t num_slots, int64_t m) {
  static thread_local std::vector<int32_t> rows;
  static thread_local std::vector<LowRankTile> tiles;
  cut(args.slots, num_slots, slots, m, rows, tiles);
  LowRankArgs g = args;
  g.rows = rows.data();
  if (!tiles.empty()) call(g, tiles);
}

// Vectors must divide `size`.
const Kernels* with_vectors_for(int64_t size) {
  const Kernels* kernels = active;
  for (const Kernels* candidate : kAll)
    if (size % kernels->vector_width && supported(candidate) && size % candidate->vector_width == 0) kernels = candidate;
  return kernels;
}

double work_of(const DeltaNetArgs& g) {
  const int64_t num_tokens = g.query_start_loc[g.num_seqs] - g.query_start_loc[0];
  return 4.0 * double(num_tokens * g.num_value_heads * g.key_dim) * double(g.value_dim);
}
void call(const DeltaNetArgs& g) {
  const Kernels* kernels = with_vectors_for(g.value_dim);
  const auto run = [&](int64_t first, int64_t last) { kernels->delta_net(g, first, last); };
  const int64_t count = g.num_seqs * g.num_value_heads, num_tokens = g.query_start_loc[g.num_seqs] - g.query_start_loc[0];
  const int64_t side_by_side = std::min(g.num_value_heads / g.num_kv_heads, count / (4 * pool->size()));  // one asks memory for the next
  if (work_of(g) < kShortCall) run(0, count);
  else pool->run(count, num_tokens > g.num_seqs ? 1 : std::max<int64_t>(1, side_by_side), run);
}

double work_of(const ShortConvArgs& g) {
  const int64_t num_tokens = g.query_start_loc[g.num_seqs] - g.query_start_loc[0];
  return double(num_tokens * g.channels) * double(g.conv_size + 3);
}
void call(const ShortConvArgs& g) {
  const Kernels* kernels = with_vectors_for(g.channels / g.num_kv_heads);
  const auto run = [&](int64_t first, int64_t last) { kernels->short_conv(g, first, last); };
  const int64_t count = g.num_seqs * g.num_kv_heads;
  if (work_of(g) < kShortCall) run(0, count);
  else pool->run(count, std::max<int64_t>(1, count / (8 * pool->size())), run);
}

constexpr int64_t kQueryRows = 192;  // rows (query tokens x heads of a group) that share a tile of keys

struct AttentionItems {  // what a step's attention is cut into, the same in every layer
  std::vector<AttentionItem> items;
  double work = 0;

  explicit AttentionItems(const AttentionArgs& g) {
    const int64_t group = g.num_heads / g.num_kv_heads, tile = std::max<int64_t>(1, kQueryRows / group);
    for (int64_t s = 0; s < g.num_seqs; ++s) {
      const int64_t queries = g.query_start_loc[s + 1] - g.query_start_loc[s];
      work += double(queries) * double(g.seq_lens[s]) * double(g.num_heads * g.head_dim);
      for (int64_t h = 0; h < g.num_kv_heads; ++h)
        for (int64_t q = 0; q < queries; q += tile)
          items.push_back({int32_t(s), int32_t(q), int32_t(std::min(tile, queries - q)), int32_t(h)});
    }
  }
};

void call(const AttentionArgs& g, const AttentionItems& cut) {
  const Kernels* kernels = with_vectors_for(g.head_dim);
  const auto attend = [&](int64_t first, int64_t last) { kernels->attention(g, cut.items.data(), first, last); };
  const int64_t count = int64_t(cut.items.size());
  const bool decodes = count == g.num_seqs * g.num_kv_heads;  // else items take different times
  if (cut.work < kShortCall) attend(0, count);
  else pool->run(count, decodes && g.num_seqs >= 4 * pool->size() ? g.num_kv_heads : 1, attend);
}
}  // namespace

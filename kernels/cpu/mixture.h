// A layer's mixture of experts: y = sum over a row's experts of weight * down(act(gate) * up), of that row; of the experts that are held
// here, which may be a part of all: a row that chose none of them is 0. Bytes: the weights of the
// experts that some row chose, once; at one row that bounds the call. FLOPs: 6 hidden_size intermediate_size a row and expert.
// The rows of an expert are gathered and multiplied together. The experts of a few rows share one call, so that threads share their
// panels. See experts.h for how rows choose and sum.
#pragma once
#include <cstdlib>
#include <cstring>

#include "calls.h"

namespace {

struct ExpertWeights {
  Matrix gate_up, down;
};

struct MixtureWeights {  // 8-byte fields, as the caller's table has them
  Matrix router;           // num_experts outputs, then the shared expert's gate where it is gated
  const float* correction;  // [num_experts] or null
  int64_t num_experts, first_held, num_held;  // held: [first_held, first_held + num_held)
  int64_t chosen, num_groups, chosen_groups, normalized, sigmoid;
  double factor;
  int64_t hidden_size, intermediate_size, shared_size, shared_gated, activation;
  ExpertWeights experts[1];  // num_held, then the shared one if shared_size
};

struct Bytes {  // a buffer that only grows
  void* data = nullptr;
  size_t capacity = 0;
  ~Bytes() { std::free(data); }
  void* reserve(int64_t count) {
    if (size_t(count) > capacity) {
      std::free(data);
      capacity = (size_t(count) + 63) / 64 * 64;
      data = std::aligned_alloc(64, capacity);
      if (!data) std::abort();
    }
    return data;
  }
};

constexpr int64_t kRowsAtOnce = 512;  // of experts that share a call

// The rows that chose each expert held, in order: those of number e of these are [starts[e], starts[e + 1]).
struct RowsOfExperts {
  std::vector<int32_t> starts, rows;
  std::vector<float> weights;

  void sort(const int32_t* experts, const float* chosen_weights, int64_t m, const MixtureWeights& w, int64_t stride) {
    const int64_t chosen = w.chosen;
    const size_t first = size_t(w.first_held), count = size_t(w.num_held);  // unsigned: a lower number becomes a large one
    starts.assign(count + 1, 0);
    for (int64_t i = 0; i < m * chosen; ++i) {
      const size_t e = size_t(experts[i]) - first;
      if (e < count) ++starts[e + 1];
    }
    for (size_t e = 0; e < count; ++e) starts[e + 1] += starts[e];
    next.assign(starts.begin(), starts.end() - 1);
    rows.resize(size_t(m * chosen));
    weights.resize(size_t(m * chosen));
    for (int64_t row = 0; row < m; ++row)
      for (int64_t c = 0; c < chosen; ++c) {
        const size_t e = size_t(experts[row * chosen + c]) - first;
        if (e >= count) continue;
        const size_t at = size_t(next[e]++);
        rows[at] = int32_t(row);
        weights[at] = chosen_weights[row * stride + c];
      }
  }

 private:
  std::vector<int32_t> next;
};

struct Expert {
  const ExpertWeights* weights;
  int64_t rows;
};

// The experts' MLPs of intermediate size `width`. x and y: the rows of one expert after those of the other; x: one row, of all (step 0).
void run_mlps(const std::vector<Expert>& experts, const void* x, void* y, int64_t step, int64_t hidden_size, int64_t width,
              int64_t activation, Dtype dtype) {
  static thread_local Bytes gate_up_buffer, activated_buffer;
  static thread_local std::vector<LinearArgs> products;
  const int64_t item = dtype == kFloat32 ? 4 : 2;
  int64_t rows = 0;
  for (const Expert& expert : experts) rows += expert.rows;
  const int64_t columns = num_inputs(activation) * width;
  char* const gate_up = static_cast<char*>(gate_up_buffer.reserve(rows * columns * item));
  char* const activated = static_cast<char*>(activated_buffer.reserve(rows * width * item));
  products.clear();
  int64_t at = 0;
  for (const Expert& e : experts) {
    const Matrix& w = e.weights->gate_up;
    products.push_back({static_cast<const char*>(x) + step * at * hidden_size * item, w.packed, w.bias, gate_up + at * columns * item,
                        e.rows, columns, hidden_size, dtype, w.num_parts});
    at += e.rows;
  }
  call(products.data(), products.size());
  call_gate_mul(active->gate_mul[activation], gate_up, activated, rows, width, dtype);
  products.clear();
  at = 0;
  for (const Expert& e : experts) {
    const Matrix& w = e.weights->down;
    products.push_back({activated + at * width * item, w.packed, w.bias, static_cast<char*>(y) + at * hidden_size * item, e.rows,
                        hidden_size, width, dtype, w.num_parts});
    at += e.rows;
  }
  call(products.data(), products.size());
}

// y [m, hidden_size] of x [m, hidden_size]; they may be one.
void run_mixture(const MixtureWeights& w, const void* x, void* y, int64_t m, Dtype dtype) {
  static thread_local Bytes logits_buffer, experts_buffer, weights_buffer, rows_buffer, out_buffer, sum_buffer;  // one step at a time
  static thread_local RowsOfExperts sorted_here;
  static thread_local std::vector<Expert> batch;
  RowsOfExperts& sorted = sorted_here;  // helpers would find their own by the other name
  const int64_t n = w.hidden_size, item = dtype == kFloat32 ? 4 : 2, row_bytes = n * item;
  const int64_t gated = w.shared_size > 0 && w.shared_gated, columns = w.num_experts + gated, stride = w.chosen + gated;
  void* const logits = logits_buffer.reserve(m * columns * item);
  int32_t* const experts = static_cast<int32_t*>(experts_buffer.reserve(m * w.chosen * 4));
  float* const weights = static_cast<float*>(weights_buffer.reserve(m * stride * 4));
  float* const sum = static_cast<float*>(sum_buffer.reserve(m * n * 4));
  call(LinearArgs{x, w.router.packed, w.router.bias, logits, m, columns, n, dtype, w.router.num_parts});
  call(RouteArgs{logits, experts, weights, w.correction, w.num_experts, w.chosen, w.num_groups, w.chosen_groups, w.normalized != 0,
                 w.sigmoid != 0, float(w.factor), gated != 0, dtype}, m);
  sorted.sort(experts, weights, m, w, stride);
  std::memset(sum, 0, size_t(m * n) * sizeof(float));
  const char* const from = static_cast<const char*>(x);
  const auto add = [&](const char* out, int64_t rows, auto&& row_of, auto&& weight_of) {
    share(rows, double(rows * n), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) active->add_weighted(out + i * row_bytes, weight_of(i), sum + row_of(i) * n, n, dtype);
    });
  };
  for (int64_t e = 0; e < w.num_held;) {
    const int64_t begin = sorted.starts[size_t(e)];
    int64_t end = begin, last = e;
    batch.clear();
    for (; last < w.num_held; ++last) {
      const int64_t rows = sorted.starts[size_t(last) + 1] - sorted.starts[size_t(last)];
      if (!batch.empty() && end + rows - begin > kRowsAtOnce) break;
      if (rows) batch.push_back({w.experts + last, rows});
      end += rows;
    }
    if (batch.empty()) break;
    const char* gathered = from;
    if (m > 1) {
      char* const to = static_cast<char*>(rows_buffer.reserve((end - begin) * row_bytes));
      share(end - begin, double((end - begin) * n), [&](int64_t i, int64_t stop) {
        for (; i < stop; ++i) std::memcpy(to + i * row_bytes, from + sorted.rows[size_t(begin + i)] * row_bytes, size_t(row_bytes));
      });
      gathered = to;
    }
    char* const out = static_cast<char*>(out_buffer.reserve((end - begin) * row_bytes));
    run_mlps(batch, gathered, out, m > 1 ? 1 : 0, n, w.intermediate_size, w.activation, dtype);
    int64_t at = begin;
    for (const Expert& expert : batch) {
      add(out + (at - begin) * row_bytes, expert.rows, [&](int64_t i) { return sorted.rows[size_t(at + i)]; },
          [&](int64_t i) { return sorted.weights[size_t(at + i)]; });
      at += expert.rows;
    }
    e = last;
  }
  if (w.shared_size > 0) {
    batch.assign(1, {w.experts + w.num_held, m});
    char* const out = static_cast<char*>(out_buffer.reserve(m * row_bytes));
    run_mlps(batch, from, out, 1, n, w.shared_size, w.activation, dtype);
    add(out, m, [](int64_t i) { return i; }, [&](int64_t i) { return gated ? weights[i * stride + w.chosen] : 1.0f; });
  }
  share(m, double(m * n), [&](int64_t first, int64_t last) {
    active->narrow_all(sum + first * n, static_cast<char*>(y) + first * row_bytes, (last - first) * n, dtype);
  });
}

double work_of(const MixtureWeights& w, int64_t m) {
  return double(m) * double(w.hidden_size) * double(w.chosen * w.intermediate_size) * double(w.num_held) / double(w.num_experts);
}
}  // namespace

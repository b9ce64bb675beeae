// The Python module splitserve.kernels._cpu: addresses and sizes in, nothing out. It knows no torch, so it builds in seconds and
// works with any version of it. The caller keeps the tensors alive, contiguous and of the right size.
//
// The instruction set is chosen once, when the module is imported, so one build runs on every machine of an architecture.
// The GIL is released for calls that take longer than handing it over: many small calls that each give it up would wait for the
// other threads of the process again and again.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <string>

#include "kernels.h"
#include "thread_pool.h"

namespace {
using namespace splitserve;

const Kernels* const kAll[] = {
#if defined(__x86_64__)
    &kAvx512Kernels, &kAvx2Kernels,
#endif
    &kGenericKernels};

bool supported(const Kernels* kernels) {
#if defined(__x86_64__)
  if (kernels == &kAvx512Kernels)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  if (kernels == &kAvx2Kernels)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#endif
  return kernels == &kGenericKernels;
}

const Kernels* active = nullptr;
ThreadPool pool;

constexpr double kShortCall = 2e5;  // multiply-adds or so: some 20 microseconds

// Runs items on the pool, with the GIL released if the whole call is not short.
template <class F>
void run(int64_t items, int64_t grain, double work, F&& body) {
  if (work < kShortCall) return body(0, items);
  Py_BEGIN_ALLOW_THREADS
  pool.run(items, grain, body);
  Py_END_ALLOW_THREADS
}

// Arguments are integers (addresses, sizes) and floats, by position.
struct Arguments {
  PyObject* const* values;
  Py_ssize_t count, next = 0;
  bool failed = false;

  int64_t integer() {
    if (next >= count) { failed = true; return 0; }
    const long long value = PyLong_AsLongLong(values[next++]);
    if (value == -1 && PyErr_Occurred()) failed = true;
    return value;
  }
  double real() {
    if (next >= count) { failed = true; return 0; }
    const double value = PyFloat_AsDouble(values[next++]);
    if (value == -1 && PyErr_Occurred()) failed = true;
    return value;
  }
  template <class T>
  T* address() { return reinterpret_cast<T*>(integer()); }
  const void* input() { return address<const void>(); }
  Dtype dtype() { return Dtype(integer()); }
  bool complete() {
    if (!failed && next == count) return true;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "wrong number of arguments: %zd", count);
    return false;
  }
};

int64_t rows_per_thread(int64_t rows) { return (rows + pool.size() - 1) / pool.size(); }

PyObject* pack_linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  const void* weight = a.input();
  void* packed = a.address<void>();
  const int64_t n = a.integer(), k = a.integer();
  const Dtype dtype = a.dtype();
  if (!a.complete()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  active->pack_linear(weight, packed, n, k, dtype);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  LinearArgs g;
  g.x = a.input(); g.packed = a.input(); g.bias = a.input(); g.y = a.address<void>();
  g.m = a.integer(); g.n = a.integer(); g.k = a.integer(); g.dtype = a.dtype();
  if (!a.complete()) return nullptr;
  const int64_t panels = (g.n + active->panel - 1) / active->panel;
  run(panels, rows_per_thread(panels), double(g.m) * double(g.n) * double(g.k),
      [&](int64_t first, int64_t last) { active->linear(g, first, last); });
  Py_RETURN_NONE;
}

constexpr int64_t kQueryRows = 192;  // rows (query tokens x heads of a group) that share a tile of keys

std::vector<AttentionItem> attention_items(const AttentionArgs& g, double* work) {
  std::vector<AttentionItem> items;
  const int64_t group = g.num_heads / g.num_kv_heads, tile = std::max<int64_t>(1, kQueryRows / group);
  const int64_t heads = pool.size() == 1 ? g.num_kv_heads : 1;  // of a one-query item: all at once stream through the blocks
  for (int64_t s = 0; s < g.num_seqs; ++s) {
    const int64_t queries = g.query_start_loc[s + 1] - g.query_start_loc[s];
    *work += double(queries) * double(g.seq_lens[s]) * double(g.num_heads * g.head_dim);
    if (queries == 1) {
      for (int64_t h = 0; h < g.num_kv_heads; h += heads) items.push_back({int32_t(s), 0, 1, int32_t(h), int32_t(heads)});
      continue;
    }
    for (int64_t h = 0; h < g.num_kv_heads; ++h)
      for (int64_t q = 0; q < queries; q += tile)
        items.push_back({int32_t(s), int32_t(q), int32_t(std::min(tile, queries - q)), int32_t(h), 1});
  }
  return items;
}

PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  AttentionArgs g;
  g.q = a.input(); g.q_stride = a.integer(); g.pool = a.input(); g.out = a.address<void>();
  g.query_start_loc = a.address<const int32_t>(); g.seq_lens = a.address<const int32_t>(); g.block_tables = a.address<const int32_t>();
  g.num_seqs = a.integer(); g.table_stride = a.integer(); g.num_layers = a.integer(); g.layer = a.integer(); g.block_size = a.integer();
  g.num_heads = a.integer(); g.num_kv_heads = a.integer(); g.head_dim = a.integer(); g.window = a.integer();
  g.scale = float(a.real()); g.dtype = a.dtype();
  if (!a.complete()) return nullptr;
  const Kernels* kernels = active;
  for (const Kernels* candidate : kAll)  // vectors must divide a head
    if (g.head_dim % kernels->vector_width && supported(candidate) && g.head_dim % candidate->vector_width == 0) kernels = candidate;
  double work = 0;
  const std::vector<AttentionItem> items = attention_items(g, &work);
  run(int64_t(items.size()), 1, work, [&](int64_t first, int64_t last) { kernels->attention(g, items.data(), first, last); });
  Py_RETURN_NONE;
}

PyObject* rope_and_store(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  RopeArgs g;
  g.qkv = a.address<void>(); g.pool = a.address<void>(); g.cos_sin = a.address<const float>();
  g.positions = a.address<const int32_t>(); g.slots = a.address<const int64_t>(); g.q_norm = a.input(); g.k_norm = a.input();
  const int64_t num_tokens = a.integer();
  g.num_layers = a.integer(); g.layer = a.integer(); g.block_size = a.integer();
  g.num_heads = a.integer(); g.num_kv_heads = a.integer(); g.head_dim = a.integer(); g.eps = float(a.real()); g.dtype = a.dtype();
  if (!a.complete()) return nullptr;
  run(num_tokens, rows_per_thread(num_tokens), double(num_tokens * (g.num_heads + 2 * g.num_kv_heads) * g.head_dim),
      [&](int64_t first, int64_t last) { active->rope_and_store(g, first, last); });
  Py_RETURN_NONE;
}

PyObject* add_rms_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  NormArgs g;
  g.x = a.input(); g.residual = a.address<void>(); g.weight = a.input(); g.y = a.address<void>();
  const int64_t rows = a.integer();
  g.n = a.integer(); g.eps = float(a.real()); g.dtype = a.dtype();
  if (!a.complete()) return nullptr;
  run(rows, rows_per_thread(rows), double(rows * g.n), [&](int64_t first, int64_t last) { active->add_rms_norm(g, first, last); });
  Py_RETURN_NONE;
}

PyObject* silu_mul(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  const void* gate_up = a.input();
  void* y = a.address<void>();
  const int64_t rows = a.integer(), n = a.integer();
  const Dtype dtype = a.dtype();
  if (!a.complete()) return nullptr;
  run(rows, rows_per_thread(rows), 4.0 * double(rows * n),
      [&](int64_t first, int64_t last) { active->silu_mul(gate_up, y, n, dtype, first, last); });
  Py_RETURN_NONE;
}

PyObject* gumbel_argmax(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  const float* logits = a.address<const float>();
  const int64_t* keys = a.address<const int64_t>();
  int64_t* chosen = a.address<int64_t>();
  const int64_t rows = a.integer(), vocab_size = a.integer();
  if (!a.complete()) return nullptr;
  run(rows, rows_per_thread(rows), 16.0 * double(rows * vocab_size),
      [&](int64_t first, int64_t last) { active->gumbel_argmax(logits, keys, chosen, vocab_size, first, last); });
  Py_RETURN_NONE;
}

PyObject* set_num_threads(PyObject*, PyObject* value) {
  const long threads = PyLong_AsLong(value);
  if (threads < 1 || threads > 1024) return PyErr_Format(PyExc_ValueError, "threads must be from 1 to 1024"), nullptr;
  Py_BEGIN_ALLOW_THREADS
  if (threads != pool.size()) pool.resize(threads);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// Names of the instruction sets this machine has, best first.
PyObject* instruction_sets(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const Kernels* kernels : kAll)
    if (names && supported(kernels)) {
      PyObject* name = PyUnicode_FromString(kernels->name);
      if (!name || PyList_Append(names, name)) Py_CLEAR(names);
      Py_XDECREF(name);
    }
  return names;
}

// Use another instruction set than the best; packed weights of the one before are of no use to it. Returns its panel width.
PyObject* use_instruction_set(PyObject*, PyObject* name) {
  const char* wanted = PyUnicode_AsUTF8(name);
  if (!wanted) return nullptr;
  for (const Kernels* kernels : kAll)
    if (supported(kernels) && std::string(kernels->name) == wanted) {
      active = kernels;
      return PyLong_FromLongLong(kernels->panel);
    }
  return PyErr_Format(PyExc_ValueError, "this machine has no instruction set %s", wanted), nullptr;
}

PyMethodDef methods[] = {
#define FAST(name, doc) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, doc}
    FAST(pack_linear, "weight, packed, n, k, dtype"),
    FAST(linear, "x, packed, bias or 0, y, m, n, k, dtype"),
    FAST(attention, "q, q_stride, pool, out, query_start_loc, seq_lens, block_tables, num_seqs, table_stride, num_layers, layer, block_size, "
                    "num_heads, num_kv_heads, head_dim, window, scale, dtype"),
    FAST(rope_and_store, "qkv, pool, cos_sin, positions, slots, q_norm or 0, k_norm or 0, num_tokens, num_layers, layer, block_size, "
                         "num_heads, num_kv_heads, head_dim, eps, dtype"),
    FAST(add_rms_norm, "x or 0, residual, weight, y, rows, n, eps, dtype"),
    FAST(silu_mul, "gate_up, y, rows, n, dtype"),
    FAST(gumbel_argmax, "logits, keys, chosen, rows, vocab_size"),
#undef FAST
    {"set_num_threads", set_num_threads, METH_O, "threads that share one call"},
    {"instruction_sets", instruction_sets, METH_NOARGS, "names, best first"},
    {"use_instruction_set", use_instruction_set, METH_O, "name -> panel width"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", "Native CPU kernels; see kernels.h.", -1, methods, nullptr, nullptr, nullptr, nullptr};
}  // namespace

PyMODINIT_FUNC PyInit__cpu() {
  for (const Kernels* kernels : kAll)
    if (!active && supported(kernels)) active = kernels;
  return PyModule_Create(&definition);
}

// The Python module splitserve.kernels._cpu: addresses and sizes in, nothing out. It knows no torch, so it builds in seconds and
// works with any version of it. The caller keeps the tensors alive, contiguous and of the right size.
//
// The instruction set is chosen once, when the module is imported, so one build runs on every machine of an architecture.
// Threads of Python may compute at once, each with a pool of helpers of its own (use_thread_pool).
// The GIL is released for calls that take longer than handing it over: many small calls that each give it up would wait for the
// other threads of the process again and again.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <functional>
#include <string>

#include "calls.h"
#include "decoder.h"
#include "index_choice.h"

int64_t splitserve::asking_rows = 1;

namespace {
using namespace splitserve;

// With the GIL released if the whole call is not short.
template <class F>
void run(double work, F&& call) {
  if (work < kShortCall) return call();
  Py_BEGIN_ALLOW_THREADS
  call();
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

PyObject* pack_linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  PackLinearArgs g;
  g.parts = a.address<const PackedPart>(); g.packed = a.address<void>();
  g.n = a.integer(); g.k = a.integer(); g.dtype = a.dtype(); g.coded = a.integer();
  const int64_t threads = a.integer();
  if (!a.complete()) return nullptr;
  std::atomic<bool> done = true;
  Py_BEGIN_ALLOW_THREADS
  share_packing(threads, panels(g.n), double(g.n * g.k), [&](int64_t first, int64_t last) {
    if (!active->pack_linear(g, first, last)) done = false;
  });
  Py_END_ALLOW_THREADS
  return PyBool_FromLong(done);
}

// 0: there is no such layout.
PyObject* packed_bytes(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  const int64_t n = a.integer(), k = a.integer();
  const Dtype dtype = a.dtype();
  const bool coded = a.integer();
  if (!a.complete()) return nullptr;
  if (!coded) return PyLong_FromLongLong(panels(n) * active->panel * ((k + 1) / 2 * 2) * (dtype == kFloat32 ? 4 : 2));
  const bool known = active->codes && dtype == kBFloat16 && k % CODED_K == 0;
  return PyLong_FromLongLong(known ? panels(n) * (k / CODED_K) * CODED_BYTES : 0);
}

PyObject* pack_quantised(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  PackArgs g;
  const auto* part = a.address<const QuantisedPart>();
  g.codes = a.address<const uint8_t>(); g.scales = a.address<const float>(); g.offsets = a.address<const float>();
  g.k = a.integer(); g.group = a.integer();
  const int64_t threads = a.integer();
  if (!a.complete()) return nullptr;
  g.part = *part;
  Py_BEGIN_ALLOW_THREADS
  share_packing(threads, panels(g.part.n), 8.0 * double(g.part.n * g.k), [&](int64_t first, int64_t last) { active->pack_quantised(g, first, last); });
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  LinearArgs g;
  g.x = a.input(); g.packed = a.input(); g.num_parts = a.integer(); g.bias = a.input(); g.y = a.address<void>();
  g.m = a.integer(); g.n = a.integer(); g.k = a.integer(); g.dtype = a.dtype();
  if (!a.complete()) return nullptr;
  run(work_of(g), [&] { call(g); });
  Py_RETURN_NONE;
}

PyObject* low_rank(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  LowRankArgs g{};
  g.slots = a.address<const LowRankSlot>();
  const int64_t num_slots = a.integer();
  const int32_t* slots = a.address<const int32_t>();
  g.x = a.input(); g.y = a.address<void>();
  const int64_t m = a.integer();
  g.n = a.integer(); g.k = a.integer(); g.dtype = a.dtype();
  if (!a.complete()) return nullptr;
  run(double(m) * double(active->vector_width * (g.n + g.k)), [&] { call(g, slots, num_slots, m); });
  Py_RETURN_NONE;
}

PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  AttentionArgs g;
  g.q = a.input(); g.q_stride = a.integer(); g.pool = a.input(); g.out = a.address<void>();
  g.query_start_loc = a.address<const int32_t>(); g.seq_lens = a.address<const int32_t>(); g.block_tables = a.address<const int32_t>();
  g.sinks = a.address<const float>();
  g.num_seqs = a.integer(); g.table_stride = a.integer(); g.num_layers = a.integer(); g.layer = a.integer(); g.block_size = a.integer();
  g.num_heads = a.integer(); g.num_kv_heads = a.integer(); g.plane = a.integer(); g.head_step = a.integer(); g.head_dim = a.integer(); g.planes = a.integer();
  g.window = a.integer();
  g.scale = float(a.real()); g.softcap = float(a.real()); g.dtype = a.dtype(); g.cache = Cache(a.integer()); g.kv_scales = a.address<const float>();
  g.slots = a.integer();
  g.lse = a.address<float>();
  if (!a.complete()) return nullptr;
  const AttentionItems items(g);
  run(items.work, [&] { call(g, items); });
  Py_RETURN_NONE;
}

PyObject* index_slots(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  IndexArgs g{};
  AttentionArgs& t = g.of;
  t.q = a.input(); t.q_stride = a.integer(); g.weights = a.address<const float>(); t.pool = a.input();
  t.query_start_loc = a.address<const int32_t>(); t.seq_lens = a.address<const int32_t>(); t.block_tables = a.address<const int32_t>();
  g.slots = a.address<int32_t>();
  t.num_seqs = a.integer(); t.table_stride = a.integer(); t.num_layers = a.integer(); t.layer = a.integer(); t.block_size = a.integer();
  t.plane = a.integer(); t.num_heads = a.integer(); t.head_dim = a.integer(); g.count = a.integer(); t.dtype = a.dtype();
  if (!a.complete()) return nullptr;
  t.num_kv_heads = t.planes = 1;
  run(2 * kShortCall, [&] { call(g); });
  Py_RETURN_NONE;
}

PyObject* rope_and_store(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  RopeArgs g;
  g.qkv = a.address<void>(); g.pool = a.address<void>(); g.cos_sin = a.address<const float>();
  g.positions = a.address<const int32_t>(); g.slots = a.address<const int64_t>(); g.q_norm = a.input(); g.k_norm = a.input();
  g.norms_all_heads = false; g.norms_each_head = a.integer();
  const int64_t num_tokens = a.integer();
  g.num_layers = a.integer(); g.layer = a.integer(); g.block_size = a.integer();
  g.num_heads = a.integer(); g.num_kv_heads = a.integer(); g.plane = a.integer(); g.head_step = a.integer(); g.head_dim = a.integer(); g.planes = a.integer();
  g.eps = float(a.real()); g.dtype = a.dtype();
  g.cache = Cache(a.integer()); g.kv_scales = a.address<const float>();
  if (!a.complete()) return nullptr;
  run(work_of(g, num_tokens), [&] { call(g, num_tokens); });
  Py_RETURN_NONE;
}

PyObject* add_rms_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  NormArgs g;
  g.x = a.input(); g.residual = a.address<void>(); g.weight = a.input(); g.y = a.address<void>();
  const int64_t rows = a.integer();
  g.n = a.integer(); g.eps = float(a.real()); g.dtype = a.dtype();
  if (!a.complete()) return nullptr;
  run(work_of(g, rows), [&] { call(g, rows); });
  Py_RETURN_NONE;
}

PyObject* gate_mul(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  const void* gate_up = a.input();
  void* y = a.address<void>();
  const int64_t rows = a.integer(), n = a.integer(), activation = a.integer();
  const Dtype dtype = a.dtype();
  if (!a.complete()) return nullptr;
  run(4.0 * double(rows * n), [&] { call_gate_mul(active->gate_mul[activation], gate_up, y, rows, n, dtype); });
  Py_RETURN_NONE;
}

PyObject* mixture(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  const MixtureWeights* weights = a.address<const MixtureWeights>();
  const void* x = a.input();
  void* y = a.address<void>();
  const int64_t rows = a.integer();
  const Dtype dtype = a.dtype();
  if (!a.complete()) return nullptr;
  run(work_of(*weights, rows), [&] { run_mixture(*weights, x, y, rows, dtype); });
  Py_RETURN_NONE;
}

void state_arguments(Arguments& a, StateArgs& g) {
  g.pool = a.address<void>();
  g.query_start_loc = a.address<const int32_t>(); g.tables = a.address<const int32_t>(); g.source = a.address<const int32_t>();
  g.marks = a.address<const int32_t>();
  g.num_seqs = a.integer(); g.table_stride = a.integer(); g.offset = a.integer();
  g.num_layers = a.integer(); g.layer = a.integer(); g.planes = a.integer(); g.num_kv_heads = a.integer(); g.plane_heads = a.integer();
  g.head_step = a.integer(); g.run_floats = a.integer();
}

PyObject* delta_net(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  DeltaNetArgs g;
  g.projected = a.input(); g.out = a.address<void>();
  g.conv = a.input(); g.decay = a.address<const float>(); g.dt = a.address<const float>(); g.norm = a.input();
  g.conv_bias = a.address<const float>(); g.skip = a.address<const float>();
  g.num_key_heads = a.integer(); g.num_value_heads = a.integer(); g.key_dim = a.integer(); g.value_dim = a.integer(); g.conv_size = a.integer();
  g.eps = float(a.real()); g.beta_scale = float(a.real()); g.dtype = a.dtype(); g.conv_dtype = a.dtype(); g.norm_dtype = a.dtype();
  state_arguments(a, g);
  if (!a.complete()) return nullptr;
  run(work_of(g), [&] { call(g); });
  Py_RETURN_NONE;
}

PyObject* short_conv(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  ShortConvArgs g;
  g.projected = a.input(); g.out = a.address<void>(); g.conv = a.address<const float>(); g.bias = a.address<const float>();
  g.channels = a.integer(); g.conv_size = a.integer(); g.dtype = a.dtype();
  state_arguments(a, g);
  if (!a.complete()) return nullptr;
  run(work_of(g), [&] { call(g); });
  Py_RETURN_NONE;
}

PyObject* gumbel_argmax(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  const float* logits = a.address<const float>();
  const int64_t* keys = a.address<const int64_t>();
  int64_t* chosen = a.address<int64_t>();
  const int64_t rows = a.integer(), vocab_size = a.integer();
  if (!a.complete()) return nullptr;
  const double work = 16.0 * double(rows * vocab_size);
  run(work, [&] { share(rows, work, [&](int64_t first, int64_t last) { active->gumbel_argmax(logits, keys, chosen, vocab_size, first, last); }); });
  Py_RETURN_NONE;
}

// Layers [first, last) of a decoder; see decoder.h.
PyObject* decoder_layers(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments a{values, count};
  DecoderArgs g;
  g.layers = a.address<const LayerWeights>();
  g.first = a.integer(); g.last = a.integer();
  g.hidden = a.address<void>(); g.residual = a.address<void>();
  g.num_tokens = a.integer(); g.hidden_size = a.integer(); g.intermediate_size = a.integer();
  RopeArgs& r = g.rope;
  r.pool = a.address<void>();
  r.positions = a.address<const int32_t>(); r.slots = a.address<const int64_t>();
  AttentionArgs& t = g.attention;
  t.query_start_loc = a.address<const int32_t>(); t.seq_lens = a.address<const int32_t>(); t.block_tables = a.address<const int32_t>();
  t.num_seqs = a.integer(); t.table_stride = a.integer();
  r.num_layers = t.num_layers = a.integer(); r.block_size = t.block_size = a.integer();
  r.num_heads = t.num_heads = a.integer(); r.num_kv_heads = t.num_kv_heads = a.integer(); r.plane = t.plane = a.integer(); r.head_dim = t.head_dim = a.integer();
  t.scale = float(a.real()); t.softcap = float(a.real()); g.eps = float(a.real()); r.eps = float(a.real());
  g.dtype = r.dtype = t.dtype = a.dtype(); r.cache = t.cache = Cache(a.integer()); r.kv_scales = t.kv_scales = a.address<const float>();
  g.adapters = a.address<const int32_t>(); g.num_slots = a.integer();
  if (!a.complete()) return nullptr;
  t.pool = r.pool;
  run(2 * kShortCall, [&] { run_layers(g); });
  Py_RETURN_NONE;
}

PyObject* set_num_threads(PyObject*, PyObject* value) {
  const long threads = PyLong_AsLong(value);
  if (threads < 1 || threads > 1024) return PyErr_Format(PyExc_ValueError, "threads must be from 1 to 1024"), nullptr;
  Py_BEGIN_ALLOW_THREADS
  if (threads != pool->size()) pool->resize(threads);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// The calling thread computes with the helpers of this pool from now on; the pool is made when first used. The GIL guards `pools`.
PyObject* use_thread_pool(PyObject*, PyObject* number) {
  const int64_t wanted = PyLong_AsLongLong(number);
  if (wanted == -1 && PyErr_Occurred()) return nullptr;
  pool = wanted ? &pools[wanted] : &first_pool;
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
  const char* wanted = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (!wanted) return nullptr;
  for (const Kernels* kernels : kAll)
    if (supported(kernels) && std::string(kernels->name) == wanted) {
      if (active != kernels) active = kernels;  // other threads may be reading it
      return PyLong_FromLongLong(kernels->panel);
    }
  return PyErr_Format(PyExc_ValueError, "this machine has no instruction set %s", wanted), nullptr;
}

PyObject* ask_from_rows(PyObject*, PyObject* rows) {
  const int64_t wanted = PyLong_AsLongLong(rows);
  if (wanted == -1 && PyErr_Occurred()) return nullptr;
  if (asking_rows != wanted) asking_rows = wanted;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
#define STATES ", pool, query_start_loc, tables, source, marks, num_seqs, table_stride, offset, num_layers, layer, planes, num_kv_heads, " \
               "plane_heads, head_step, run_floats"
#define FAST(name, doc) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, doc}
    FAST(pack_linear, "parts, packed, n, k, dtype, coded, threads -> whether it could be coded"),
    FAST(packed_bytes, "n, k, dtype, coded"),
    FAST(linear, "x, packed or parts, number of parts or 0, bias or 0, y, m, n, k, dtype"),
    FAST(low_rank, "table of slots, its length, slots of rows, x, y, m, n, k, dtype"),
    FAST(pack_quantised, "part, codes, scales or 0, offsets or 0, k, group, threads"),
    FAST(attention, "q, q_stride, pool, out, query_start_loc, seq_lens, block_tables, sinks or 0, num_seqs, table_stride, num_layers, layer, "
                    "block_size, num_heads, num_kv_heads, plane, head_step, head_dim, planes, window, scale, softcap, dtype, cache, kv_scales or 0, slots, lse or 0"),
    FAST(index_slots, "q, q_stride, weights, pool, query_start_loc, seq_lens, block_tables, slots, num_seqs, table_stride, num_layers, layer, "
                      "block_size, plane, num_heads, head_dim, count, dtype"),
    FAST(rope_and_store, "qkv, pool, cos_sin, positions, slots, q_norm or 0, k_norm or 0, norms_each_head, num_tokens, num_layers, layer, "
                         "block_size, num_heads, num_kv_heads, plane, head_step, head_dim, planes, eps, dtype, cache, kv_scales or 0"),
    FAST(add_rms_norm, "x or 0, residual, weight, y, rows, n, eps, dtype"),
    FAST(gate_mul, "gate_up, y, rows, n, activation, dtype"),
    FAST(mixture, "weights, x, y, rows, dtype"),
    FAST(delta_net, "projected, out, conv, decay, dt, norm, conv_bias, skip, num_key_heads, num_value_heads, key_dim, value_dim, conv_size, eps, beta_scale, "
                    "dtype, conv_dtype, norm_dtype" STATES),
    FAST(short_conv, "projected, out, conv, bias or 0, channels, conv_size, dtype" STATES),
    FAST(decoder_layers, "layers, first, last, hidden, residual, num_tokens, hidden_size, intermediate_size, pool, positions, slots, "
                         "query_start_loc, seq_lens, block_tables, num_seqs, table_stride, num_layers, block_size, num_heads, num_kv_heads, "
                         "plane, head_dim, scale, softcap, eps, qk_eps, dtype, cache, kv_scales or 0, slots of tokens or 0, number of slots"),
    FAST(gumbel_argmax, "logits, keys, chosen, rows, vocab_size"),
#undef FAST
#undef STATES
    {"set_num_threads", set_num_threads, METH_O, "threads that share one call of the calling thread"},
    {"use_thread_pool", use_thread_pool, METH_O, "number; the helpers of the calling thread"},
    {"instruction_sets", instruction_sets, METH_NOARGS, "names, best first"},
    {"use_instruction_set", use_instruction_set, METH_O, "name -> panel width"},
    {"ask_from_rows", ask_from_rows, METH_O, "rows from which products ask memory for weights ahead"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", "Native CPU kernels; see kernels.h.", -1, methods, nullptr, nullptr, nullptr, nullptr};
}  // namespace

PyMODINIT_FUNC PyInit__cpu() {
  for (const Kernels* kernels : kAll)
    if (!active && supported(kernels)) active = kernels;
  PyObject* module = PyModule_Create(&definition);
  if (module && PyModule_AddStringConstant(module, "SOURCES_HASH", SOURCES_HASH)) Py_CLEAR(module);
  return module;
}

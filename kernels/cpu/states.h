// Where the states of a step's sequences lie in the KV pool: see ../states.py and ../state_shape.py.

constexpr int32_t NO_STATE = -1, PADDING = -2;

struct StateRuns {  // where one copy of a layer's state lies, of one key-value head: in its keys and values of some blocks
  char* base = nullptr;  // null: there is none, and it reads as zeros
  const int32_t* table = nullptr;
  int64_t run = 0, planes = 0, plane_step = 0, block_step = 0;  // run: in floats, whole rows; steps in bytes

  // f(place, done, count) over the pieces that [first, first + count) lies in.
  template <class F>
  void pieces(int64_t first, int64_t count, F&& f) const {
    for (int64_t done = 0; done < count;) {
      const int64_t i = (first + done) / run, within = (first + done) % run, piece = smaller(count - done, run - within);
      f(reinterpret_cast<float*>(base + table[i / planes] * block_step + i % planes * plane_step) + within, done, piece);
      done += piece;
    }
  }
  void read(int64_t first, int64_t count, float* to) const {
    if (!base) return void(std::memset(to, 0, size_t(count) * sizeof(float)));
    pieces(first, count, [&](const float* place, int64_t done, int64_t piece) { std::memcpy(to + done, place, size_t(piece) * sizeof(float)); });
  }
  void write(int64_t first, int64_t count, const float* from) const {
    pieces(first, count, [&](float* place, int64_t done, int64_t piece) { std::memcpy(place, from + done, size_t(piece) * sizeof(float)); });
  }
};

// Rows of `row` numbers are never cut: what a run has behind its last whole row stays as it is.
static inline StateRuns copy_of_state(const StateArgs& g, int64_t seq, int64_t kv_head, int64_t which, int64_t row) {
  StateRuns runs;
  const int64_t bytes = g.run_floats * 4, plane = g.plane_heads * bytes;
  runs.base = static_cast<char*>(g.pool) + (g.layer * g.planes * g.plane_heads + kv_head * g.head_step) * bytes;
  runs.table = g.tables + (seq * 3 + which) * g.table_stride;
  runs.run = g.run_floats / row * row;
  runs.planes = g.planes;
  runs.plane_step = plane;
  runs.block_step = g.num_layers * g.planes * plane;
  return runs;
}

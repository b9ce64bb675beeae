// AMX's tiles played on a CPU without them: SIGILL's handler does what the instruction at hand would have done, or ends the process where
// a CPU would (unknown instructions, shapes that do not fit). From Intel's manual, volumes 1 (chapter 18) and 2. Denormals are not flushed.
#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {
struct Tile {
  int rows, row_bytes;
  alignas(64) uint8_t data[16][64];
};
thread_local Tile tiles[8];

void need(bool holds) { if (!holds) std::abort(); }

float widened(const uint8_t* at) {
  uint32_t bits = uint32_t(at[0] | at[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void load_shapes(const uint8_t* memory) {
  need(memory[0] == 1 && memory[1] == 0);
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, memory + 16 + 2 * i, 2);
    tiles[i] = {memory[48 + i], row_bytes, {}};
    need(tiles[i].rows <= 16 && row_bytes <= 64 && !tiles[i].rows == !row_bytes);
  }
}

void multiply(Tile& c, const Tile& a, const Tile& b) {
  need(c.rows && c.rows == a.rows && a.row_bytes == 4 * b.rows && c.row_bytes == b.row_bytes);
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      float sums[2] = {}, before;
      for (int k = 0; k < b.rows; ++k)
        for (int i = 0; i < 2; ++i) sums[i] = std::fmaf(widened(&a.data[m][4 * k + 2 * i]), widened(&b.data[k][4 * n + 2 * i]), sums[i]);
      std::memcpy(&before, &c.data[m][4 * n], 4);
      const float after = before + (sums[0] + sums[1]);
      std::memcpy(&c.data[m][4 * n], &after, 4);
    }
}

void play(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  constexpr int kPlaces[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  const uint8_t* at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  need(at[0] == 0xC4 && (at[1] & 31) == 2);  // a three-byte VEX prefix, map 0F38
  const int index_high = at[1] & 0x40 ? 0 : 8, base_high = at[1] & 0x20 ? 0 : 8, prefix = at[2] & 3, other = ~at[2] >> 3 & 15;
  const int opcode = at[3], mode = at[4] >> 6, tile = at[4] >> 3 & 7, low = at[4] & 7;
  at += 5;
  uint8_t* memory = nullptr;
  int64_t stride = 0;
  if (mode != 3) {
    int base = low;
    if (low == 4) {
      const int index = (*at >> 3 & 7) + index_high;
      base = *at & 7;
      if (index != 4) stride = registers[kPlaces[index]] << (*at >> 6);
      ++at;
    }
    need(mode != 0 || base != 5);  // no such operand is made
    int32_t displacement = 0;
    if (mode == 1) displacement = int8_t(*at);
    if (mode == 2) std::memcpy(&displacement, at, 4);
    at += mode == 1 ? 1 : mode == 2 ? 4 : 0;
    memory = reinterpret_cast<uint8_t*>(registers[kPlaces[base + base_high]] + displacement);
  }
  Tile& t = tiles[tile];
  switch (opcode << 4 | prefix << 1 | (mode == 3)) {
    case 0x490: load_shapes(memory); break;
    case 0x491: std::memset(tiles, 0, sizeof tiles); break;
    case 0x497: need(t.rows), std::memset(t.data, 0, sizeof t.data); break;
    case 0x4B6: need(t.rows), std::memset(t.data, 0, sizeof t.data);
      for (int i = 0; i < t.rows; ++i) std::memcpy(t.data[i], memory + i * stride, size_t(t.row_bytes));
      break;
    case 0x4B4: need(t.rows);
      for (int i = 0; i < t.rows; ++i) std::memcpy(memory + i * stride, t.data[i], size_t(t.row_bytes));
      break;
    case 0x5C5: multiply(t, tiles[low], tiles[other & 7]); break;
    default: std::abort();
  }
  registers[REG_RIP] = reinterpret_cast<greg_t>(at);
}

struct sigaction before;
}  // namespace

extern "C" void start_playing() {
  struct sigaction action = {};
  action.sa_sigaction = play;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, &before);
}
extern "C" void stop_playing() { sigaction(SIGILL, &before, nullptr); }

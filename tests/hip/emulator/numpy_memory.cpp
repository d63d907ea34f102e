// Memory for NumPy's arrays (NEP 49) that starts as NaN, and is NaN once it is freed: a copy that runs late, from or to an
// array that is gone, shows. What is freed stays out of use for a while, so that such a copy breaks nothing else.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>

namespace {

// As numpy/ndarraytypes.h declares them.
struct Allocator {
  void* context;
  void* (*malloc)(void*, size_t);
  void* (*calloc)(void*, size_t, size_t);
  void* (*realloc)(void*, void*, size_t);
  void (*free)(void*, void*, size_t);
};
struct Handler {
  char name[127];
  uint8_t version;
  Allocator allocator;
};

std::deque<std::pair<void*, size_t>> freed;
size_t kept = 0;
constexpr size_t MOST_KEPT = 16 << 20;  // bytes

void* take(void*, size_t bytes) {
  void* made = malloc(bytes);
  return made ? memset(made, 0xff, bytes) : nullptr;
}
void* take_zeros(void*, size_t count, size_t bytes) { return calloc(count, bytes); }
void* resize(void*, void* old, size_t bytes) { return realloc(old, bytes); }
void give_back(void*, void* old, size_t bytes) {
  if (!old) return;
  memset(old, 0xff, bytes);
  freed.emplace_back(old, bytes);
  kept += bytes;
  while (kept > MOST_KEPT) {
    kept -= freed.front().second;
    free(freed.front().first);
    freed.pop_front();
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Handler emulator_numpy_memory = {
    "emulator", 1, {nullptr, take, take_zeros, resize, give_back}};

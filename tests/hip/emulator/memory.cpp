// Device memory: each allocation has pages of its own, ends at a page without access, and starts as NaN (large ones: as
// 0). What was freed cannot be accessed any more, and its addresses are given to nobody for a long time.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>

#include "machine.hpp"

namespace emulator {
namespace {

struct Allocation {
  char* pages;
  size_t mapped, bytes;
  bool pinned;
  int device;
};
std::map<const char*, Allocation> allocations;  // by first byte
std::deque<Allocation> freed;
size_t used = 0;
constexpr size_t MOST_FREED = 4096;  // of them mappings without access are kept
const size_t page = size_t(sysconf(_SC_PAGESIZE));
constexpr size_t ALIGN = 16;

}  // namespace

size_t total_memory() {
  const char* text = getenv("WGRAD_EMULATED_MEMORY");
  return text ? strtoull(text, nullptr, 10) : size_t(8) << 30;
}

size_t used_memory() { return used; }

void* allocate(size_t bytes, bool pinned) {
  size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN;
  if (used + rounded > total_memory()) return nullptr;
  size_t inner = (rounded + page - 1) / page * page, mapped = inner + 2 * page;
  void* pages = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(pages) + page;
  mprotect(start, inner, PROT_READ | PROT_WRITE);
  char* first = start + (inner - rounded);
  if (rounded <= LARGE) memset(first, 0xff, rounded);
  allocations[first] = {static_cast<char*>(pages), mapped, rounded, pinned, device};
  used += rounded;
  return first;
}

bool release(void* address) {
  auto found = allocations.find(static_cast<char*>(address));
  if (found == allocations.end()) return false;
  used -= found->second.bytes;
  const Allocation& gone = freed.emplace_back(found->second);
  mmap(gone.pages, gone.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  allocations.erase(found);
  if (freed.size() > MOST_FREED) {
    munmap(freed.front().pages, freed.front().mapped);
    freed.pop_front();
  }
  return true;
}

// The allocation that has all of [address, address + bytes).
static const Allocation* around(const void* address, size_t bytes) {
  const char* at = static_cast<const char*>(address);
  auto after = allocations.upper_bound(at);
  if (after == allocations.begin()) return nullptr;
  auto& [first, a] = *--after;
  return at + bytes <= first + a.bytes ? &a : nullptr;
}

bool inside(const void* address, size_t bytes) { return around(address, bytes); }

bool on_card(const void* address, size_t bytes) {
  const Allocation* found = around(address, bytes);
  return found && !found->pinned;
}

int device_of(const void* address) {
  const Allocation* found = around(address, 1);
  return found ? found->device : -1;
}

std::string describe(const void* address) {
  const char* at = static_cast<const char*>(address);
  for (auto& [first, a] : allocations) {
    if (at < a.pages || at >= a.pages + a.mapped) continue;
    std::string size = " an allocation of " + std::to_string(a.bytes) + " bytes";
    if (at < first) return std::to_string(first - at) + " bytes before" + size;
    if (at >= first + a.bytes) return std::to_string(at - first - a.bytes) + " bytes after the end of" + size;
    return "inside" + size;
  }
  for (const Allocation& a : freed)
    if (at >= a.pages && at < a.pages + a.mapped)
      return "in an allocation of " + std::to_string(a.bytes) + " bytes that was freed";
  return "near no allocation";
}

}  // namespace emulator

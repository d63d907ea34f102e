// The emulated card: memory with guards, and a machine that runs work-groups of fibers. See machine.cpp, memory.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "gpu_host.hpp"

namespace emulator {

struct Arch {
  const char* name;
  unsigned host;  // GPU_HOST of the kernels made for it
  unsigned wave;
  unsigned lds;
  bool integrated = false;
};
// The cards that this process has: those that $WGRAD_EMULATED_ARCH names, with commas; one gfx942 unless said.
int devices();
const Arch& arch(int device);
// The one of this thread (hipSetDevice), 0 in a new thread.
extern thread_local int device;

// ---- memory ------------------------------------------------------------------------------------------------------
// Bytes that end at a page without access, NaN up to LARGE, above it zeros that take no memory; nullptr when the card ($WGRAD_EMULATED_MEMORY bytes) is full.
constexpr size_t LARGE = size_t(64) << 20;
// pinned: main memory, which kernels reach all the same.
void* allocate(size_t bytes, bool pinned);
bool release(void* address);
// Does [address, address + bytes) lie within one allocation?
bool inside(const void* address, size_t bytes);
// And is that one no main memory?
bool on_card(const void* address, size_t bytes);
// The number of the card that was this thread's when it was allocated, or -1.
int device_of(const void* address);
// "16 bytes after an allocation of 4,096 bytes": where an address lies, in words.
std::string describe(const void* address);
// The first byte of the LDS array of the work-group that runs in which it is, or null.
const char* lds_array(const void* address);
size_t total_memory();
size_t used_memory();

// ---- running -----------------------------------------------------------------------------------------------------
struct Launch {
  const gpu::host::Kernel* kernel;
  gpu::host::Machine** machine;  // where the kernel's shared object looks for the machine
  unsigned grid[3];
  const Arch* arch;
  bool reversed;   // which order
  long only;  // number of the one work-group that runs, from the end where it is negative; ALL_GROUPS
  std::string arguments;
};
constexpr long ALL_GROUPS = 1L << 62;
// What $WGRAD_EMULATED_ORDER ("rev") and $WGRAD_EMULATED_GROUPS ("last", or the number of one) ask for now.
bool reversed();
long only_group();
// Calls `work`. Empty, or which wrong address it used.
std::string guarded(const std::function<void()>& work, bool* illegal);
// Runs all work-groups. Empty, or what went wrong and where; `illegal` says that it was a wrong address.
std::string run(const Launch& launch, bool* illegal);

}  // namespace emulator

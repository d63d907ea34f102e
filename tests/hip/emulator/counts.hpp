// What a kernel's memory accesses cost: LDS bank conflicts and cache lines of global memory, for kernels built with
// GPU_COUNTED (tests/hip/emulator/build.py, counted=True), which report every load and store. See counts.cpp.
#pragma once

#include <cstddef>
#include <string>

namespace emulator {

// A kernel starts; what it does from here on counts under its name. line: bytes of a cache line.
void count_launch(const char* kernel, unsigned wave, unsigned line, bool cdna);
// How many lines L1 keeps from then on: all of a compute unit, or a work-group's share. A launch finds none there.
void count_l1(size_t lines);
// Work-item `thread` reads or writes; `site` is the instruction. What is neither LDS nor the card's memory is a
// register. Of an access, 16 bytes at most: the compiler reports no wider ones, and cards have none. The memory
// in words where another wave of the work-group has used the same bytes since the last barrier and one of the two writes.
const char* count_access(unsigned thread, const void* address, unsigned bytes, bool store, const void* site);
// The work-items [first, first + lanes), a wave, have all come to a meeting, a barrier or their end.
void count_wave(unsigned first, unsigned lanes);
// A work-group starts; all its waves have come to a barrier. all: which is for global memory too, not for LDS alone.
void count_group();
void count_barrier(bool all);
// Forget the accesses of a kernel that failed half-way.
void count_abandon();

// {"kernel": {"launches": n, "sites": [[offset in the code object, "lds" or "global", "load" or "store", bytes of a
// lane, accesses by a wave, cost, least cost, lines fetched from L2], ...]}, ...}; cost is in LDS cycles or in cache
// lines.
std::string counts_as_json();
void clear_counts();

}  // namespace emulator

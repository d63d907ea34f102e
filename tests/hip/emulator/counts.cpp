// Lanes run one after another, so an access of a wave is put together again: the n-th time that each lane comes by one
// instruction, since the wave last met (shuffle, matrix instruction, barrier), is one access. Its cost:
//
// Global memory, in cache lines: those that the wave touches; at least its distinct bytes / bytes of a line.
//   Sources: ROCm Compute Profiler, Vector L1 cache (a line is 64 bytes on MI200, 128 on MI300); RDNA white paper.
//   Of the lines that are read, L2 hands over those that are not among the last that L1 has read (count_l1).
// LDS, in cycles: 32 banks of 4 bytes; in a cycle a bank serves one 4-byte word, to any number of lanes. Lanes are
//   served in groups: 32 for accesses of up to 4 bytes, 16 for 8, 8 for 16, neighbors all, except that CDNA's 16-byte
//   reads take lanes 0-3 with 20-23, 4-7 with 16-19, 8-11 with 28-31, 12-15 with 24-27, and so on from lane 32. A group
//   costs the most words that one bank has to serve; at least its distinct words / 32.
//   Sources: Composable Kernel, Understanding AMD GPU LDS and Bank Conflicts; AMD, Avoiding LDS Bank Conflicts on AMD
//   GPUs Using CK-Tile Framework (2025). No groups are published for RDNA: neighbors are taken there.
#include "counts.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <unordered_map>
#include <vector>

#include "machine.hpp"

namespace emulator {
namespace {

struct Access {
  const void* site;
  unsigned occurrence, lane;
  uintptr_t address;
  unsigned bytes;
  bool store, lds;
};
struct Site {
  unsigned bytes;
  bool store, lds;
  unsigned long accesses, cost, least, fetched;
};
struct Kernel {
  unsigned long launches;
  std::map<const void*, Site> sites;
};
struct Cost {
  unsigned long spent, least;
};

constexpr unsigned BANKS = 32, MOST = 1024;
std::map<std::string, Kernel> kernels;
Kernel* current = nullptr;
unsigned line_bytes, lanes_of_wave;
bool cdna_rules;
size_t l1_lines = 256;  // 16 KiB on MI200, 32 KiB on the others
std::list<uintptr_t> l1;  // the last line first
std::unordered_map<uintptr_t, std::list<uintptr_t>::iterator> in_l1;
std::vector<Access> logs[MOST];  // by work-item
bool logged = false;

// Who has used two bytes of memory, and after how many barriers, last of all. Without a barrier in between the order of
// two waves is anybody's guess; the lanes of one are in order. What a wave has stored in global memory reaches the others
// behind a barrier for all memory. What it has loaded may be overwritten behind any: it waits for its loads to use them.
struct Use {
  unsigned written, read;  // epochs, 0: never
  unsigned writer, reader;
};
constexpr unsigned SEVERAL = ~0u;
unsigned epoch = 1, visible = 1;  // visible: the first epoch whose stores to global memory other waves need not see yet
std::map<const char*, std::vector<Use>> used;                // by LDS array
std::unordered_map<uintptr_t, std::vector<Use>> used_pages;  // of global memory
constexpr uintptr_t PAGE = 4096;

// since: the first epoch that no barrier has ended for this memory.
bool races(std::vector<Use>& uses, size_t first, unsigned bytes, bool store, unsigned wave, unsigned since) {
  if (uses.size() < (first + bytes + 1) / 2) uses.resize((first + bytes + 1) / 2);
  bool found = false;
  for (size_t at = first / 2; at < (first + bytes + 1) / 2; at++) {
    Use& use = uses[at];
    found |= use.written >= since && use.writer != wave;
    found |= store && use.read == epoch && use.reader != wave;
    if (store) {
      use.written = epoch, use.writer = wave;
    } else {
      use.reader = use.read == epoch && use.reader != wave ? SEVERAL : wave;
      use.read = epoch;
    }
  }
  return found;
}

unsigned lds_group(const Access& a) {
  if (a.bytes <= 4) return a.lane / 32;
  if (a.bytes == 8) return a.lane / 16;
  if (a.store || !cdna_rules) return a.lane / 8;
  constexpr unsigned with[8] = {0, 1, 2, 3, 1, 0, 3, 2};
  return a.lane / 32 * 4 + with[a.lane % 32 / 4];
}

// The distinct units of `unit` bytes that [first, last) touches.
std::vector<uintptr_t> units(const Access* first, const Access* last, unsigned unit) {
  std::vector<uintptr_t> found;
  for (; first != last; first++)
    for (uintptr_t u = first->address / unit; u <= (first->address + first->bytes - 1) / unit; u++) found.push_back(u);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

Cost global_cost(const Access* first, const Access* last) {
  size_t bytes = units(first, last, 1).size();
  return {units(first, last, line_bytes).size(), (bytes + line_bytes - 1) / line_bytes};
}

// Does L1 read a line from L2?
bool fetches(uintptr_t line) {
  auto [found, missing] = in_l1.try_emplace(line);
  if (!missing) l1.erase(found->second);
  l1.push_front(line);
  found->second = l1.begin();
  if (l1.size() > l1_lines) in_l1.erase(l1.back()), l1.pop_back();
  return missing;
}

unsigned long fetched(const Access* first, const Access* last) {
  if (first->lds || first->store) return 0;
  std::vector<uintptr_t> lines = units(first, last, line_bytes);
  return std::count_if(lines.begin(), lines.end(), fetches);
}

Cost lds_cost(const Access* first, const Access* last) {
  std::map<unsigned, std::vector<Access>> groups;
  for (; first != last; first++) groups[lds_group(*first)].push_back(*first);
  Cost cost = {0, 0};
  for (auto& [number, members] : groups) {
    unsigned long served[BANKS] = {};
    std::vector<uintptr_t> words = units(members.data(), members.data() + members.size(), 4);
    for (uintptr_t word : words) served[word % BANKS]++;
    cost.spent += *std::max_element(served, served + BANKS);
    cost.least += (words.size() + BANKS - 1) / BANKS;
  }
  return cost;
}

void count_one(const Access* first, const Access* last) {
  Cost cost = first->lds ? lds_cost(first, last) : global_cost(first, last);
  Site fresh = {first->bytes, first->store, first->lds, 0, 0, 0, 0};
  Site& site = current->sites.try_emplace(first->site, fresh).first->second;
  site.accesses++;
  site.cost += cost.spent;
  site.least += cost.least;
  site.fetched += fetched(first, last);
}

}  // namespace

void count_launch(const char* kernel, unsigned wave, unsigned line, bool cdna) {
  current = &kernels[kernel];
  current->launches++;
  lanes_of_wave = wave;
  line_bytes = line;
  cdna_rules = cdna;
  l1.clear(), in_l1.clear(), used_pages.clear();
}
void count_l1(size_t lines) { l1_lines = lines; }

const char* count_access(unsigned thread, const void* address, unsigned bytes, bool store, const void* site) {
  const char* array = lds_array(address);
  if (!array && !inside(address, bytes)) return nullptr;
  logs[thread].push_back(
      {site, 0, thread % lanes_of_wave, reinterpret_cast<uintptr_t>(address), bytes, store, array != nullptr});
  logged = true;
  const unsigned wave = thread / lanes_of_wave;
  if (array) {
    const size_t at = size_t(static_cast<const char*>(address) - array);
    return races(used[array], at, bytes, store, wave, epoch) ? "LDS" : nullptr;
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);  // an access lies within a page, as it is aligned
  return races(used_pages[at / PAGE], at % PAGE, bytes, store, wave, visible) ? "global memory" : nullptr;
}
// Epochs go on from one work-group to the next, so what the last one did is over.
void count_group() { used.clear(), count_barrier(true); }
void count_barrier(bool all) {
  epoch++;
  if (all) visible = epoch;
}

void count_wave(unsigned first, unsigned lanes) {
  if (!logged) return;
  std::vector<Access> all;
  for (unsigned lane = 0; lane < lanes; lane++) {
    std::vector<Access>& log = logs[first + lane];
    std::stable_sort(log.begin(), log.end(), [](const Access& a, const Access& b) { return a.site < b.site; });
    for (size_t i = 1; i < log.size(); i++)
      if (log[i].site == log[i - 1].site) log[i].occurrence = log[i - 1].occurrence + 1;
    all.insert(all.end(), log.begin(), log.end());
    log.clear();
  }
  auto same = [](const Access& a, const Access& b) {
    return a.site == b.site && a.occurrence == b.occurrence && a.lds == b.lds;
  };
  std::stable_sort(all.begin(), all.end(), [](const Access& a, const Access& b) {
    if (a.site != b.site) return a.site < b.site;
    return a.occurrence != b.occurrence ? a.occurrence < b.occurrence : a.lds < b.lds;
  });
  const Access* end = all.data() + all.size();
  for (const Access* at = all.data(); at != end;) {
    const Access* next = at;
    while (next != end && same(*at, *next)) next++;
    count_one(at, next);
    at = next;
  }
}

void count_abandon() {
  for (std::vector<Access>& log : logs) log.clear();
  logged = false;
}

std::string counts_as_json() {
  std::string text = "{";
  for (auto& [name, kernel] : kernels) {
    if (kernel.sites.empty()) continue;
    text += (text.size() > 1 ? ", \"" : "\"") + name + "\": {\"launches\": " + std::to_string(kernel.launches);
    text += ", \"sites\": [";
    bool more = false;
    for (auto& [address, site] : kernel.sites) {
      Dl_info info = {};
      dladdr(address, &info);
      size_t offset = size_t(static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase));
      text += std::string(more ? ", [" : "[") + std::to_string(offset) + (site.lds ? ", \"lds\"" : ", \"global\"");
      text += site.store ? ", \"store\"" : ", \"load\"";
      for (unsigned long number : {(unsigned long)site.bytes, site.accesses, site.cost, site.least, site.fetched})
        text += ", " + std::to_string(number);
      text += "]";
      more = true;
    }
    text += "]}";
  }
  return text + "}";
}

void clear_counts() { kernels.clear(); }

}  // namespace emulator

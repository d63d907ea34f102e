// Work-groups on the CPU: each work-item is a fiber, waves run one after another between barriers, the lanes of a wave
// one after another between meetings (shuffles, matrix instructions). $WGRAD_EMULATED_ORDER=rev turns both orders
// around, so that a missing barrier shows. All lanes of a wave come to the same barrier, or the launch fails. LDS starts as NaN in every work-group and ends at a page without access.
#include "machine.hpp"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "counts.hpp"

#if !defined(__x86_64__)
#error "the emulator switches fibers in x86-64 assembly"
#endif

// Saves the callee's registers on the stack, leaves the stack pointer in *from, and goes on with stack `to`.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulator {
namespace {

using gpu::host::Machine;
using gpu::host::SLOT;

constexpr Arch ARCHES[] = {
    {"gfx90a", 910, 64, 65536}, {"gfx942", 942, 64, 65536}, {"gfx1100", 1100, 32, 65536}, {"gfx1201", 1201, 32, 65536},
    {"gfx950", 942, 64, 163840},  // runs gfx942's kernels
    {"gfx1103", 1100, 32, 65536, true}, {"gfx1036", 0, 32, 65536, true},  // parts of a processor; this one and
    {"gfx803", 0, 64, 65536}};                                            // this are not supported
// An odd number of pages: where many stacks begin would fall into a few sets of the TLB.
constexpr size_t STACK = 65 * 4096;
constexpr unsigned MOST_THREADS = 1024, MOST_LANES = 64;

enum class State { NEW, READY, MEETING, AT_BARRIER, DONE };

struct Fiber {
  void* stack_pointer;
  State state;
  unsigned kind, parity;
  unsigned line;   // of the barrier
  bool all;        // which is for global memory too
  unsigned stack;  // which it has
};

struct Local {  // one GPU_SHARED
  const void* key;
  char *pages, *first;
  size_t bytes;
};

Machine machine;
Fiber fibers[MOST_THREADS];
char* stacks = nullptr;
// Those that no fiber has, the last one used on top: it is in the cache. One that a fiber has just ended on is `left`
// until another has begun or ended.
std::vector<unsigned> free_stacks;
constexpr unsigned NO_STACK = ~0u;
unsigned left = NO_STACK;
struct {  // the lanes of the wave that runs
  unsigned wave, first, lanes, gone_on;
  bool backwards;
  unsigned thread(unsigned i) const { return first + (backwards ? lanes - 1 - i : i); }
} turn;
// What the lanes of a wave left at a meeting; two tables in turn, so that a fast lane does not overwrite a slow one's.
char tables[MOST_THREADS / 32][2][MOST_LANES * SLOT];
std::vector<Local> locals;
void* main_stack;
const Launch* running;
sigjmp_buf escape;
std::string failure;
bool wrong_address;

void fiber_main();

void leave(unsigned stack) {
  if (left != NO_STACK) free_stacks.push_back(left);
  left = stack;
}

void start_fiber(Fiber& fiber) {
  fiber.stack = free_stacks.back(), free_stacks.pop_back();
  leave(NO_STACK);
  // Not all at the same distance: their first lines would fall into a few sets of the cache.
  void** top = reinterpret_cast<void**>(stacks + (fiber.stack + 1) * STACK - 64 - fiber.stack % 64 * 832);
  *--top = nullptr;  // the return address of fiber_main, which never returns; aligns its frame
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.state = State::READY;
}

// The stack of the next lane that can go on, or after the last one of the scheduler.
void* next_stack() {
  while (turn.gone_on < turn.lanes) {
    const unsigned thread = turn.thread(turn.gone_on++);
    Fiber& fiber = fibers[thread];
    if (fiber.state == State::NEW) start_fiber(fiber);
    if (fiber.state != State::READY) continue;
    machine.thread = thread;
    return fiber.stack_pointer;
  }
  return main_stack;
}

void yield() {
  void** const mine = &fibers[machine.thread].stack_pointer;
  emulator_switch(mine, next_stack());
}

[[noreturn]] void fail(const std::string& what) {
  failure = what;
  if (running)
    failure += " (work-item " + std::to_string(machine.thread) + " of work-group (" +
            std::to_string(machine.block[0]) + ", " + std::to_string(machine.block[1]) + ", " +
            std::to_string(machine.block[2]) + "))";
  siglongjmp(escape, 1);
}

void barrier(unsigned line, bool all) {
  fibers[machine.thread].state = State::AT_BARRIER;
  fibers[machine.thread].line = line;
  fibers[machine.thread].all = all;
  yield();
}

const char* meet(unsigned kind, const void* mine, unsigned bytes) {
  Fiber& fiber = fibers[machine.thread];
  char* table = tables[turn.wave][fiber.parity];
  char* slot = table + (machine.thread - turn.first) * SLOT;
  if (bytes == 4)  // a shuffle: most of all
    memcpy(slot, mine, 4);
  else
    memcpy(slot, mine, bytes);
  fiber.parity ^= 1;
  fiber.kind = kind;
  fiber.state = State::MEETING;
  yield();
  return table;
}

void* shared(const void* key, unsigned long bytes) {
  for (Local& local : locals)
    if (local.key == key) return local.first;
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  size_t rounded = (bytes + 15) / 16 * 16, inner = (rounded + page - 1) / page * page, all = rounded;
  for (Local& local : locals) all += local.bytes;
  if (all > running->arch->lds)
    fail("LDS: " + std::to_string(all) + " bytes are more than the " + std::to_string(running->arch->lds) + " of a work-group");
  char* pages =
      static_cast<char*>(mmap(nullptr, inner + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(pages + inner, page, PROT_NONE);
  char* first = pages + inner - rounded;
  memset(first, 0xff, rounded);
  locals.push_back({key, pages, first, rounded});
  return first;
}

void fiber_main() {
  running->kernel->invoke(running->arguments.data());
  fibers[machine.thread].state = State::DONE;
  leave(fibers[machine.thread].stack);
  yield();
}

// A wave comes to a barrier as one: where some of its lanes do not, a card lets the others through, or waits for ever.
void check_barrier(unsigned first, unsigned lanes, unsigned live) {
  if (!live) return;
  if (live < lanes) fail("some lanes of a wave have ended, and others wait at a barrier");
  for (unsigned i = 1; i < lanes; i++)
    if (fibers[first + i].line != fibers[first].line) fail("lanes of a wave wait at different barriers");
}

// Lets every lane of a wave go on until it waits or ends. True where the lanes have all met and may go on.
bool run_wave(unsigned wave, unsigned threads, bool backwards) {
  unsigned first = wave * machine.wave_size;
  unsigned lanes = threads - first < machine.wave_size ? threads - first : machine.wave_size;
  unsigned meeting = 0, live = 0, kind = 0;
  turn = {wave, first, lanes, 0, backwards};
  if (void* stack = next_stack(); stack != main_stack) emulator_switch(&main_stack, stack);
  for (unsigned i = 0; i < lanes; i++) {
    machine.thread = turn.thread(i);
    Fiber& fiber = fibers[machine.thread];
    if (fiber.state == State::DONE) continue;
    live++;
    if (fiber.state != State::MEETING) continue;
    if (meeting && fiber.kind != kind) fail("lanes of a wave meet at different instructions");
    kind = fiber.kind;
    meeting++;
  }
  count_wave(first, lanes);
  if (!meeting) return check_barrier(first, lanes, live), false;
  if (meeting < live)
    fail("some lanes of a wave wait for the others at a shuffle or matrix instruction that those skip");
  unsigned parity = 0;
  for (unsigned i = 0; i < lanes; i++)
    if (fibers[first + i].state == State::MEETING) parity = fibers[first + i].parity ^ 1;
  for (unsigned i = 0; i < machine.wave_size; i++)
    if (i >= lanes || fibers[first + i].state == State::DONE)
      memset(tables[wave][parity] + i * SLOT, 0xff, SLOT);
    else
      fibers[first + i].state = State::READY;
  return true;
}

void run_group(unsigned threads, bool backwards) {
  for (Local& local : locals) memset(local.first, 0xff, local.bytes);
  count_group();
  for (unsigned i = 0; i < threads; i++) fibers[i] = {nullptr, State::NEW, 0, 0, 0, false, 0};
  unsigned waves = (threads + machine.wave_size - 1) / machine.wave_size;
  for (;;) {
    for (unsigned i = 0; i < waves; i++)
      while (run_wave(backwards ? waves - 1 - i : i, threads, backwards)) {
      }
    unsigned live = 0;
    bool all = true;
    for (unsigned i = 0; i < threads; i++)
      if (fibers[i].state == State::AT_BARRIER) {
        fibers[i].state = State::READY;
        all &= fibers[i].all;
        live++;
      }
    if (!live) return;
    // A card goes on without a wave that has ended, and its barriers are then not those that the source means.
    if (live < threads) fail("a wave has ended, and others wait at a barrier");
    count_barrier(all);
  }
}

void on_signal(int, siginfo_t* info, void*) {
  wrong_address = true;
  std::string where = describe(info->si_addr);
  char* const at = static_cast<char*>(info->si_addr);
  for (Local& local : locals)
    if (at >= local.pages && at < local.first + local.bytes + 4096)
      where = "past the end of an LDS array of " + std::to_string(local.bytes) + " bytes";
  char text[200];
  snprintf(text, sizeof(text), "access to %p: %s", info->si_addr, where.c_str());
  fail(text);
}

}  // namespace

static bool is_set(const char* variable, const char* value) {
  const char* text = getenv(variable);
  return text && !strcmp(text, value);
}
bool reversed() { return is_set("WGRAD_EMULATED_ORDER", "rev"); }
long only_group() {
  const char* text = getenv("WGRAD_EMULATED_GROUPS");
  return !text ? ALL_GROUPS : is_set("WGRAD_EMULATED_GROUPS", "last") ? -1 : atol(text);
}

const char* lds_array(const void* address) {
  for (Local& local : locals)
    if (address >= local.first && address < local.first + local.bytes) return local.first;
  return nullptr;
}

thread_local int device = 0;

int devices() {
  const char* text = getenv("WGRAD_EMULATED_ARCH");
  return 1 + int(text ? std::count(text, text + strlen(text), ',') : 0);
}

const Arch& arch(int number) {
  const char* text = getenv("WGRAD_EMULATED_ARCH");
  std::string wanted = text ? text : "";
  for (; number; number--) wanted.erase(0, wanted.find(',') + 1);
  wanted.resize(std::min(wanted.find(','), wanted.size()));
  for (const Arch& a : ARCHES)
    if (wanted == a.name) return a;
  return ARCHES[1];
}

std::string guarded(const std::function<void()>& work, bool* illegal) {
  static char signal_stack[64 << 10];
  failure.clear();
  wrong_address = false;
  stack_t alternate = {signal_stack, 0, sizeof(signal_stack)}, old_alternate;
  sigaltstack(&alternate, &old_alternate);
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  if (!sigsetjmp(escape, 1)) work();
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_alternate, nullptr);
  *illegal = wrong_address;
  return failure;
}

std::string run(const Launch& launch, bool* illegal) {
  if (!stacks)
    stacks = static_cast<char*>(mmap(nullptr, STACK * (MOST_THREADS + 1), PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  const unsigned wave = launch.arch->wave;
  machine = {0, {0, 0, 0}, {launch.grid[0], launch.grid[1], launch.grid[2]}, wave, barrier, meet, shared,
             [](const char* message) { fail(message); },
             [](const void* address, unsigned bytes, bool store, const void* site) {
               if (const char* what = count_access(machine.thread, address, bytes, store, site))
                 fail(std::string("two waves use the same bytes of ") + what +
                      " between two barriers, and one of them writes");
             }};
  *launch.machine = &machine;
  left = NO_STACK;
  free_stacks.resize(MOST_THREADS + 1);  // one is left while all others are in use
  for (unsigned i = 0; i <= MOST_THREADS; i++) free_stacks[i] = MOST_THREADS - i;
  running = &launch;
  count_launch(launch.kernel->name, wave, launch.arch->host == 910 ? 64 : 128, wave == 64);
  std::string found = guarded(
      [&] {
        unsigned long all = (unsigned long)launch.grid[0] * launch.grid[1] * launch.grid[2];
        const bool one = launch.only != ALL_GROUPS;
        const unsigned long chosen = launch.only < 0 ? all + launch.only : launch.only;
        if (one && chosen >= all) return;
        for (unsigned long i = one ? chosen : 0; i < (one ? chosen + 1 : all); i++) {
          unsigned long at = launch.reversed && !one ? all - 1 - i : i;
          machine.block[0] = unsigned(at % launch.grid[0]);
          machine.block[1] = unsigned(at / launch.grid[0] % launch.grid[1]);
          machine.block[2] = unsigned(at / launch.grid[0] / launch.grid[1]);
          run_group(launch.kernel->threads, launch.reversed);
        }
      },
      illegal);
  count_abandon();
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  for (Local& local : locals) munmap(local.pages, size_t(local.first + local.bytes - local.pages) + page);
  locals.clear();
  running = nullptr;
  return found;
}

}  // namespace emulator

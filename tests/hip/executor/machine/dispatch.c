// Runs a wave, one instruction after another, until something needs the caller.
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>

#include "machine.h"

enum { ENDED, BARRIER, COMPILE, FAULT, ERROR, LOST };  // machine.py has the same
typedef struct {
  Entry* code;  // one entry a word
  u64 base, words;
  u32 flush;  // float32 subnormals are zeros: FLOAT_DENORM_MODE_32 of the kernel
  u32 error;  // of an Override, after ERROR
  u64 fault;  // address, after FAULT
  u64 executed;
  u32* trace;  // numbers of the words that were executed, or null
  u64 traced, room;
} Run;

static sigjmp_buf before_fault;
static volatile int armed;
static volatile u64 fault_address;
static struct sigaction old_segv, old_bus;

static void on_fault(int number, siginfo_t* info, void* context) {
  (void)context;
  if (armed) {
    fault_address = (u64)info->si_addr;
    armed = 0;
    siglongjmp(before_fault, 1);
  }
  signal(number, SIG_DFL);
}

void machine_watch(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
}

void machine_unwatch(void) {
  sigaction(SIGSEGV, &old_segv, 0);
  sigaction(SIGBUS, &old_bus, 0);
}

static u32 mode(void) { u32 m; __asm__ volatile("stmxcsr %0" : "=m"(m)); return m; }
static void set_mode(u32 m) { __asm__ volatile("ldmxcsr %0" ::"m"(m)); }

static int run(Run* r, u64* wave) {
  for (;;) {
    u64 pc = pair(scalars(wave), PC), word = (pc - r->base) >> 2;
    if (pc == ~0ull) return ENDED;
    if (word >= r->words || (pc & 3)) return LOST;
    Entry* e = &r->code[word];
    if (!e->kind) return COMPILE;
    e->executed++, r->executed++;
    if (r->trace && r->traced < r->room) r->trace[r->traced++] = (u32)word;
    if (e->kind == 3) {
      if ((r->error = ((Override)e->function)(wave, e->parameters))) return ERROR;
    } else {
      call(e, wave);
      if (e->kind == 2) return BARRIER;
    }
  }
}

int machine_run(Run* r, u64* wave) {
  u32 before = mode();
  const u32 flush_bits = 0x8040;  // MXCSR: flush to zero, denormals are zero
  set_mode(r->flush ? before | flush_bits : before & ~flush_bits);
  int result = FAULT;
  if (!sigsetjmp(before_fault, 0)) {
    armed = 1;
    result = run(r, wave);
    armed = 0;
  }
  set_mode(before);
  if (result == FAULT) r->fault = fault_address;
  return result;
}

int machine_skip(u64* wave, void* size) {
  advance(wave, *(int*)size);
  return FINE;
}

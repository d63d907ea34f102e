// Simplifies control flow before lavapipe generates code. lavapipe calls LLVM with "default<O0>", which splits shaders at barriers,
// and then with the passes that optimize, or with GALLIVM_PERF=nopt with "mem2reg". A load has basic blocks for each lane, and
// instruction selection takes longer for what these passes remove than the passes do. instcombine takes longer than it saves.
//
// A driver finds this function before LLVM's own if this library is preloaded, or opened with RTLD_GLOBAL before the driver.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#define OPTIMIZED "sroa,early-cse,simplifycfg,reassociate,"  // how lavapipe's passes begin

typedef void *(*Run)(void *module, const char *passes, void *machine, void *options);

void *LLVMRunPasses(void *module, const char *passes, void *machine, void *options) {
  Dl_info caller = {0};
  dladdr(__builtin_return_address(0), &caller);
  void *driver = caller.dli_fname ? dlopen(caller.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : 0;  // which is linked with its LLVM
  Run run = (Run)dlsym(driver ? driver : RTLD_NEXT, "LLVMRunPasses");
  if (!strcmp(passes, "default<O0>")) passes = "function(simplifycfg),default<O0>";
  if (!strncmp(passes, OPTIMIZED, sizeof OPTIMIZED - 1)) passes = "sroa,sccp,simplifycfg,early-cse,adce";
  if (!strcmp(passes, "mem2reg")) passes = "mem2reg,sccp,simplifycfg,early-cse,adce";
  return run(module, passes, machine, options);
}

// The entry points of libamdhip64.so that wgrad uses, on the emulated card of machine.hpp. A code object is a shared
// object of the kernels compiled for the CPU. Work waits in its stream and runs late (queue.cpp): a copy reads and writes the
// host's memory when it runs, not when it is asked for, and nothing but the host's own waiting holds it back.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "counts.hpp"
#include "machine.hpp"
#include "properties.hpp"
#include "queue.hpp"

using namespace emulator;

namespace {

struct Module {
  void* handle;
  gpu::host::Machine** machine;
};
struct Function {
  Module* module;
  const gpu::host::Kernel* kernel;
};
unsigned long launches = 0;

bool blocking() {
  const char* text = getenv("HIP_LAUNCH_BLOCKING");
  return text && !strcmp(text, "1");
}

void execute(const Launch& launch) {
  launches++;
  // $WGRAD_EMULATED_FAULT_AT: the number of the launch, from 1, that goes wrong.
  const char* planted = getenv("WGRAD_EMULATED_FAULT_AT");
  bool illegal = false;
  std::string failure = planted && launches == strtoul(planted, nullptr, 10) ? "a planted fault" : run(launch, &illegal);
  if (!failure.empty()) fault(std::string(launch.kernel->name) + ": " + failure, illegal);
}

// kind: 0 host to host, 1 host to device, 2 device to host, 3 device to device
bool known(const void* to, const void* from, size_t bytes, int kind) {
  return on_card(to, bytes) == (kind & 1) && on_card(from, bytes) == (kind >> 1);
}

void move(void* to, const void* from, size_t bytes) {
  bool illegal = false;
  std::string failure = guarded([=] { memmove(to, from, bytes); }, &illegal);
  if (!failure.empty()) fault("a copy of " + std::to_string(bytes) + " bytes: " + failure, illegal);
}

// The arguments as one block. The runtime under test lays them one after another, each aligned to its size, and closes
// the list with where they end, and null: so a wrong number or size of them is seen here, which HIP itself would not see.
bool pack(const gpu::host::Kernel* kernel, void** params, std::string* packed) {
  if (!params) return false;
  const char* const first = static_cast<const char*>(params[0]);
  size_t at = 0;
  for (unsigned i = 0; i < kernel->arguments; i++) {
    size_t size = kernel->sizes[i];
    at = (at + size - 1) / size * size;
    if (params[i] != first + at) return false;
    at += size;
  }
  if (params[kernel->arguments] != first + at) return false;
  packed->assign(first, at);
  return true;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// ---- for tests ---------------------------------------------------------------------------------------------------
API const char* emulator_last_failure() { return last_failure().c_str(); }
API unsigned long emulator_launches() { return finish_all(), launches; }
// What launches of counted kernels have cost so far (counts.hpp); valid until the next call.
API const char* emulator_counts() {
  static std::string text;
  finish_all();
  return (text = counts_as_json()).c_str();
}
API void emulator_l1(size_t lines) { finish_all(), count_l1(lines); }
API void emulator_clear_counts() { finish_all(), clear_counts(); }
API void emulator_clear() { clear(); }
API int emulator_device_of(void* address) { return device_of(address); }
// What a pool takes back is NaN from then on, in the order of the stream; not while the stream captures: it would be part of
// every replay.
API void emulator_poison(void* first, size_t bytes, Stream* stream) {
  if (stream->capturing || bytes > LARGE) return;
  submit(stream, [=] {
    if (inside(first, bytes)) memset(first, 0xff, bytes);
  });
}

// ---- device ------------------------------------------------------------------------------------------------------
API int hipInit(unsigned) { return SUCCESS; }
API int hipGetDeviceCount(int* count) {
  const char* text = getenv("WGRAD_EMULATED_DEVICES");
  *count = text ? atoi(text) : devices();
  return *count ? SUCCESS : NO_DEVICE;
}
API int hipSetDevice(int number) {
  if (number < 0 || number >= devices()) return INVALID_DEVICE;
  return device = number, SUCCESS;
}
API int hipGetDevice(int* number) { return *number = device, SUCCESS; }
API int hipDriverGetVersion(int* version) { return *version = 70100000, SUCCESS; }
API int hipRuntimeGetVersion(int* version) {
  const char* text = getenv("WGRAD_EMULATED_VERSION");
  return *version = text ? atoi(text) : 70100000, SUCCESS;
}
API int hipGetDevicePropertiesR0600(Properties* p, int number) {
  if (number < 0 || number >= devices()) return INVALID_DEVICE;
  const Arch& arch = emulator::arch(number);
  memset(p, 0, sizeof(*p));
  snprintf(p->name, sizeof(p->name), "Emulated %s", arch.name);
  snprintf(p->gcnArchName, sizeof(p->gcnArchName), arch.wave == 64 ? "%s:sramecc+:xnack-" : "%s", arch.name);
  p->totalGlobalMem = total_memory();
  p->sharedMemPerBlock = arch.lds;
  p->warpSize = int(arch.wave);
  p->maxThreadsPerBlock = 1024;
  p->multiProcessorCount = 4;
  p->clockRate = 1000000;
  p->integrated = arch.integrated;
  return SUCCESS;
}
API int hipMemGetInfo(size_t* free, size_t* total) {
  *total = total_memory();
  *free = *total - used_memory();
  return SUCCESS;
}
API int hipDeviceSynchronize() { return finish_all(); }
API int hipGetLastError() { return lost(); }
API int hipPeekAtLastError() { return lost(); }
API const char* hipGetErrorName(int error) {
  switch (error) {
    case SUCCESS: return "hipSuccess";
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case NO_DEVICE: return "hipErrorNoDevice";
    case NO_BINARY_FOR_GPU: return "hipErrorNoBinaryForGpu";
    case NOT_FOUND: return "hipErrorNotFound";
    case ILLEGAL_ADDRESS: return "hipErrorIllegalAddress";
    case LAUNCH_FAILURE: return "hipErrorLaunchFailure";
    case CAPTURE_UNSUPPORTED: return "hipErrorStreamCaptureUnsupported";
    case CAPTURE_INVALIDATED: return "hipErrorStreamCaptureInvalidated";
    case CAPTURED_EVENT: return "hipErrorCapturedEvent";
    default: return "hipErrorUnknown";
  }
}
API const char* hipGetErrorString(int error) {
  switch (error) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no ROCm-capable device is detected";
    case NO_BINARY_FOR_GPU: return "no kernel image is available for execution on the device";
    case INVALID_IMAGE: return "device kernel image is invalid";
    case NOT_FOUND: return "named symbol not found";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case LAUNCH_FAILURE: return "unspecified launch failure";
    default: return "unknown error";
  }
}

// ---- memory ------------------------------------------------------------------------------------------------------
static int take(void** address, size_t bytes, bool pinned) {
  if (int error = unsafe()) return error;
  *address = allocate(bytes, pinned);
  return *address ? SUCCESS : OUT_OF_MEMORY;
}
API int hipMalloc(void** address, size_t bytes) { return take(address, bytes, false); }
API int hipHostMalloc(void** address, size_t bytes, unsigned) { return take(address, bytes, true); }
// At once, though ROCm's would wait for the card: who frees has to have waited.
API int hipFree(void* address) {
  if (int error = unsafe(); error == CAPTURE_UNSUPPORTED) return error;
  return !address || release(address) ? SUCCESS : INVALID_VALUE;
}
API int hipHostFree(void* address) { return hipFree(address); }
API int hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind, Stream* stream) {
  if (!lost() && !known(to, from, bytes, kind)) return INVALID_VALUE;
  return submit(stream, [=] { move(to, from, bytes); });
}
API int hipMemsetAsync(void* to, int value, size_t bytes, Stream* stream) {
  if (!lost() && !inside(to, bytes)) return INVALID_VALUE;
  return submit(stream, [=] {
    bool illegal = false;
    std::string failure = guarded([=] { memset(to, value, bytes); }, &illegal);
    if (!failure.empty()) fault("a fill: " + failure, illegal);
  });
}

// ---- modules -----------------------------------------------------------------------------------------------------
API int hipModuleLoadData(Module** module, const void* image) {
  const unsigned char* bytes = static_cast<const unsigned char*>(image);
  if (memcmp(bytes, "\x7f" "ELF", 4)) return INVALID_IMAGE;
  if (bytes[18] != 62) return NO_BINARY_FOR_GPU;  // e_machine: x86-64
  // The section headers come last: their offset, size and number give the file's length.
  uint64_t sections;
  uint16_t size, count;
  memcpy(&sections, bytes + 40, 8), memcpy(&size, bytes + 58, 2), memcpy(&count, bytes + 60, 2);
  size_t length = sections + size_t(size) * count;
  int file = memfd_create("kernels", 0);
  for (size_t at = 0; at < length;) {
    ssize_t n = write(file, bytes + at, length - at);
    if (n <= 0) return close(file), OUT_OF_MEMORY;
    at += size_t(n);
  }
  std::string path = "/proc/self/fd/" + std::to_string(file);
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  // The file stays open: the loader takes a second file of the same number for the first.
  if (!handle) return fprintf(stderr, "emulator: %s\n", dlerror()), INVALID_IMAGE;
  auto host = static_cast<const unsigned*>(dlsym(handle, "gpu_host_arch"));
  auto machine = static_cast<gpu::host::Machine**>(dlsym(handle, "gpu_host_machine"));
  if (!host || !machine) return INVALID_IMAGE;
  if (*host != arch(device).host) return NO_BINARY_FOR_GPU;
  *module = new Module{handle, machine};
  return SUCCESS;
}
API int hipModuleUnload(Module* module) { return delete module, SUCCESS; }
API int hipModuleGetFunction(Function** function, Module* module, const char* name) {
  const std::string symbol = std::string("gpu_kernel_") + name;
  auto kernel = static_cast<const gpu::host::Kernel*>(dlsym(module->handle, symbol.c_str()));
  if (!kernel) return NOT_FOUND;
  *function = new Function{module, kernel};
  return SUCCESS;
}
API int hipModuleLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                              unsigned bz, unsigned lds, Stream* stream, void** params, void** extra) {
  if (lost()) return lost();
  if (!gx || !gy || !gz || bx != function->kernel->threads || by != 1 || bz != 1 || lds) return INVALID_VALUE;
  Launch launch{function->kernel, function->module->machine, {gx, gy, gz}, &arch(device), reversed(), only_group(), {}};
  if (extra || !pack(function->kernel, params, &launch.arguments)) return INVALID_VALUE;
  if (int error = submit(stream, [launch] { execute(launch); })) return error;
  return blocking() && !stream->capturing ? finish(stream) : SUCCESS;
}

// ---- streams, events, graphs ---------------------------------------------------------------------------------------
API int hipStreamCreate(Stream** stream) { return *stream = create_stream(), SUCCESS; }
API int hipStreamCreateWithFlags(Stream** stream, unsigned) { return hipStreamCreate(stream); }
API int hipStreamDestroy(Stream* stream) { return destroy_stream(stream), SUCCESS; }
API int hipStreamSynchronize(Stream* stream) { return finish(stream); }
API int hipStreamQuery(Stream* stream) { return query(stream); }
API int hipEventCreate(Event** event) { return *event = new Event, SUCCESS; }
API int hipEventDestroy(Event* event) { return delete event, SUCCESS; }
API int hipEventRecord(Event* event, Stream* stream) { return record(event, stream); }
API int hipEventSynchronize(Event* event) { return wait_for(event); }
API int hipEventQuery(Event* event) { return query(event); }
API int hipEventElapsedTime(float* milliseconds, Event* start, Event* stop) {
  if (!start->mark || !stop->mark) return INVALID_HANDLE;
  if (!start->mark->reached || !stop->mark->reached) return NOT_READY;
  return *milliseconds = float(stop->mark->milliseconds - start->mark->milliseconds), SUCCESS;
}
API int hipStreamBeginCapture(Stream* stream, int mode) { return begin_capture(stream, mode); }
API int hipStreamEndCapture(Stream* stream, Graph** graph) { return end_capture(stream, graph); }
API int hipGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long) {
  return *executable = new Graph(*graph), SUCCESS;
}
API int hipGraphLaunch(Graph* executable, Stream* stream) {
  for (const Work& work : executable->nodes)
    if (int error = submit(stream, work)) return error;
  return SUCCESS;
}
API int hipGraphDestroy(Graph* graph) { return delete graph, SUCCESS; }
API int hipGraphExecDestroy(Graph* executable) { return delete executable, SUCCESS; }

// A Vulkan driver in front of another, $WGRAD_VULKAN_DRIVER, that answers some of its functions itself.
//
// -DSWALLOW: command buffers and submissions do nothing. RADV without a card (RADV_FORCE_FAMILY) has no functions for them
// and can do everything else: what is wanted of it is its compiler.
// -DFAULTS: the device is lost at a call that the test chooses (wgrad_fault_at), or at a submission that takes longer than
// wgrad_fault_seconds, as by a watchdog; or a wait from that call on never returns (wgrad_fault_hangs). A new device works again.
// -DWORKGROUP_BYTES=N: the limit of workgroup memory is N at least. lavapipe allocates what a shader asks for, on the heap,
// and says 32 KiB all the same: kernels for cards with 48 KiB run on it so. It also says that shaders may index arrays of
// textures: Dawn demands that, Mesa 22 has not, and no shader here has a texture.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef void (*Function)(void);
typedef Function (*Lookup)(void *object, const char *name);

static void *driver(void) {
  static void *opened;
  if (!opened) opened = dlopen(getenv("WGRAD_VULKAN_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  if (!opened) {
    fprintf(stderr, "%s\n", dlerror());
    abort();
  }
  return opened;
}

#ifdef SWALLOW
static int nothing(void) { return 0; }

static Function own(const char *name, Function theirs) {
  static const char *const names[] = {"vkBeginCommandBuffer", "vkEndCommandBuffer", "vkResetCommandBuffer", "vkQueueSubmit",
                                      "vkQueueSubmit2", "vkQueueSubmit2KHR", "vkWaitForFences", "vkGetFenceStatus",
                                      "vkWaitSemaphores", "vkWaitSemaphoresKHR", "vkQueueWaitIdle", "vkDeviceWaitIdle"};
  for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
    if (!strcmp(name, names[i])) return (Function)nothing;
  return strncmp(name, "vkCmd", 5) ? theirs : (Function)nothing;
}
#endif

#ifdef WORKGROUP_BYTES
// Where VkPhysicalDeviceProperties has limits.maxComputeSharedMemorySize, and VkPhysicalDeviceProperties2 the former.
enum { LIMIT = 512, PROPERTIES = 16 };
typedef void (*GetProperties)(void *device, char *properties);
static GetProperties properties, properties2;

static void raise_limit(char *limit) {
  uint32_t bytes;
  memcpy(&bytes, limit, sizeof bytes);
  if (bytes < 16 << 10 || bytes > 1 << 20) abort();  // Vulkan promises the former: this is not the place of the limit
  if (bytes < WORKGROUP_BYTES) bytes = WORKGROUP_BYTES;
  memcpy(limit, &bytes, sizeof bytes);
}

static void own_properties(void *device, char *found) {
  properties(device, found);
  raise_limit(found + LIMIT);
}

static void own_properties2(void *device, char *found) {
  properties2(device, found);
  raise_limit(found + PROPERTIES + LIMIT);
}

// Where VkPhysicalDeviceFeatures has shaderSampledImageArrayDynamicIndexing and the same for storage images, as VkBool32;
// and VkDeviceCreateInfo its pEnabledFeatures. All that a structure is followed by begins with its type and the next one.
enum { TEXTURES = 34, IMAGES = 36, FEATURES = 16, ENABLED = 64, NEXT = 8, TYPE_FEATURES2 = 1000059000 };
typedef int (*CreateDevice)(void *device, char *info, void *allocator, void *created);
static GetProperties features2;
static CreateDevice create_device;

static void set_textures(char *features, uint32_t value) {
  if (features) ((uint32_t *)features)[TEXTURES] = ((uint32_t *)features)[IMAGES] = value;
}

static void own_features2(void *device, char *found) {
  features2(device, found);
  set_textures(found + FEATURES, 1);
}

// A device that is asked for what the driver has not would not be created.
static int own_create_device(void *device, char *info, void *allocator, void *created) {
  set_textures(*(char **)(info + ENABLED), 0);
  for (char *next = *(char **)(info + NEXT); next; next = *(char **)(next + NEXT))
    if (*(int32_t *)next == TYPE_FEATURES2) set_textures(next + FEATURES, 0);
  return create_device(device, info, allocator, created);
}

static Function own(const char *name, Function theirs) {
  if (!strcmp(name, "vkGetPhysicalDeviceProperties")) {
    properties = (GetProperties)theirs;
    return (Function)own_properties;
  }
  if (!strcmp(name, "vkGetPhysicalDeviceProperties2") || !strcmp(name, "vkGetPhysicalDeviceProperties2KHR")) {
    properties2 = (GetProperties)theirs;
    return (Function)own_properties2;
  }
  if (!strcmp(name, "vkGetPhysicalDeviceFeatures2") || !strcmp(name, "vkGetPhysicalDeviceFeatures2KHR")) {
    features2 = (GetProperties)theirs;
    return (Function)own_features2;
  }
  if (!strcmp(name, "vkCreateDevice")) {
    create_device = (CreateDevice)theirs;
    return (Function)own_create_device;
  }
  return theirs;
}
#endif

#ifdef FAULTS
// A program sets these through ctypes. calls: of the functions below, so far. losses: how often a device was lost, the last
// time at lost_at (seconds of CLOCK_MONOTONIC).
int wgrad_fault_at = -1, wgrad_fault_hangs, wgrad_fault_calls, wgrad_fault_losses;
double wgrad_fault_seconds = 1e9, wgrad_fault_lost_at;
enum { LOST = -4, CALLS = 8, DEVICES = 4096 };
typedef int (*Call)(void *a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f);
static Call theirs_of[CALLS], wait_idle, create_device, get_queue, get_queue2;
static struct {
  void *device, *queue;
  int lost;
} devices[DEVICES];
static int opened;

static int *lost(void *device_or_queue) {
  int n = opened;
  while (--n > 0 && devices[n].device != device_or_queue && devices[n].queue != device_or_queue)
    ;
  return &devices[n < 0 ? 0 : n].lost;
}

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec + 1e-9 * at.tv_nsec;
}

static void lose(int *device) {
  if (__atomic_exchange_n(device, 1, __ATOMIC_SEQ_CST)) return;
  wgrad_fault_losses++;
  wgrad_fault_lost_at = now();
}

static int fault(void *device_or_queue) {
  int call = __atomic_fetch_add(&wgrad_fault_calls, 1, __ATOMIC_SEQ_CST);
  if (call == wgrad_fault_at && !wgrad_fault_hangs) lose(lost(device_or_queue));
  return *lost(device_or_queue);
}

static int hanging_wait(void *device, uintptr_t info, uintptr_t nanoseconds, uintptr_t d, uintptr_t e, uintptr_t f) {
  int code = fault(device) ? LOST : theirs_of[0](device, info, nanoseconds, d, e, f);
  while (wgrad_fault_hangs && wgrad_fault_at >= 0 && wgrad_fault_calls > wgrad_fault_at) pause();
  return code;
}

#define CALL(N)                                                                                                      \
  static int call##N(void *a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f) {                     \
    return fault(a) ? LOST : theirs_of[N](a, b, c, d, e, f);                                                         \
  }
CALL(1) CALL(2) CALL(3) CALL(4) CALL(5) CALL(6)

static int submit(void *queue, uintptr_t count, uintptr_t infos, uintptr_t fence, uintptr_t e, uintptr_t f) {
  if (fault(queue)) return LOST;
  double begun = now();
  int code = theirs_of[7](queue, count, infos, fence, e, f);
  if (wgrad_fault_seconds < 1e9 && !code) {
    code = wait_idle(queue, 0, 0, 0, 0, 0);
    if (now() - begun > wgrad_fault_seconds) lose(lost(queue));
  }
  return *lost(queue) ? LOST : code;
}

static int open_device(void *physical, uintptr_t b, uintptr_t c, uintptr_t device, uintptr_t e, uintptr_t f) {
  int code = create_device(physical, b, c, device, e, f);
  if (!code && opened < DEVICES) {
    devices[opened].lost = 0;
    devices[opened].queue = 0;
    devices[opened++].device = *(void **)device;
  }
  return code;
}

static void found_queue(void *device, void *queue) {
  for (int n = opened - 1; n >= 0; n--)
    if (devices[n].device == device) {
      devices[n].queue = queue;
      return;
    }
}

static int open_queue(void *device, uintptr_t b, uintptr_t c, uintptr_t queue, uintptr_t e, uintptr_t f) {
  get_queue(device, b, c, queue, e, f);
  found_queue(device, *(void **)queue);
  return 0;
}

static int open_queue2(void *device, uintptr_t info, uintptr_t queue, uintptr_t d, uintptr_t e, uintptr_t f) {
  get_queue2(device, info, queue, d, e, f);
  found_queue(device, *(void **)queue);
  return 0;
}

static Function own(const char *name, Function theirs) {
  static const struct {
    const char *name;
    Call *theirs, own;
  } calls[] = {{"vkWaitSemaphores", &theirs_of[0], hanging_wait},
               {"vkWaitSemaphoresKHR", &theirs_of[0], hanging_wait},
               {"vkGetSemaphoreCounterValue", &theirs_of[1], call1},
               {"vkGetSemaphoreCounterValueKHR", &theirs_of[1], call1},
               {"vkWaitForFences", &theirs_of[2], call2},
               {"vkGetFenceStatus", &theirs_of[3], call3},
               {"vkCreateComputePipelines", &theirs_of[4], call4},
               {"vkAllocateMemory", &theirs_of[5], call5},
               {"vkMapMemory", &theirs_of[6], call6},
               {"vkQueueSubmit", &theirs_of[7], submit},
               {"vkCreateDevice", &create_device, open_device},
               {"vkGetDeviceQueue", &get_queue, open_queue},
               {"vkGetDeviceQueue2", &get_queue2, open_queue2}};
  if (!strcmp(name, "vkQueueWaitIdle")) wait_idle = (Call)theirs;
  for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++)
    if (!strcmp(name, calls[i].name)) {
      *calls[i].theirs = (Call)theirs;
      return (Function)calls[i].own;
    }
  return theirs;
}
#endif

static Lookup device_lookup;

static Function of_device(void *device, const char *name) {
  Function found = device_lookup(device, name);
  return found ? own(name, found) : found;
}

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  Function found = ((Lookup)dlsym(driver(), "vk_icdGetInstanceProcAddr"))(instance, name);
  if (found && !strcmp(name, "vkGetDeviceProcAddr")) {
    device_lookup = (Lookup)found;
    return (Function)of_device;
  }
  return found ? own(name, found) : found;
}

Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
  Function found = ((Lookup)dlsym(driver(), "vk_icdGetPhysicalDeviceProcAddr"))(instance, name);
  return found ? own(name, found) : found;
}

int vk_icdNegotiateLoaderICDInterfaceVersion(unsigned *version) {
  return ((int (*)(unsigned *))dlsym(driver(), "vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
}

// A Vulkan driver in front of another, $WGRAD_VULKAN_DRIVER, that answers some of its functions itself.
//
// -DSWALLOW: command buffers and submissions do nothing. RADV without a card (RADV_FORCE_FAMILY) has no functions for them
// and can do everything else: what is wanted of it is its compiler.
// -DWORKGROUP_BYTES=N: the limit of workgroup memory is N at least. lavapipe allocates what a shader asks for, on the heap,
// and says 32 KiB all the same: kernels for cards with 48 KiB run on it so.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static Function own(const char *name, Function theirs) {
  if (!strcmp(name, "vkGetPhysicalDeviceProperties")) {
    properties = (GetProperties)theirs;
    return (Function)own_properties;
  }
  if (!strcmp(name, "vkGetPhysicalDeviceProperties2") || !strcmp(name, "vkGetPhysicalDeviceProperties2KHR")) {
    properties2 = (GetProperties)theirs;
    return (Function)own_properties2;
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

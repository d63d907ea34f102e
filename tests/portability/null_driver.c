// A Vulkan driver in front of another, $WGRAD_VULKAN_DRIVER, that swallows command buffers and submissions. RADV without a
// card (RADV_FORCE_FAMILY) has no functions for them and can do everything else: what is wanted of it is its compiler.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef Function (*Lookup)(void *object, const char *name);

static void *driver(void) {
  static void *opened;
  if (!opened) opened = dlopen(getenv("WGRAD_VULKAN_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  if (!opened) abort();
  return opened;
}

static int nothing(void) { return 0; }

static Function own(const char *name) {
  static const char *const names[] = {"vkBeginCommandBuffer", "vkEndCommandBuffer", "vkResetCommandBuffer", "vkQueueSubmit",
                                      "vkQueueSubmit2", "vkQueueSubmit2KHR", "vkWaitForFences", "vkGetFenceStatus",
                                      "vkWaitSemaphores", "vkWaitSemaphoresKHR", "vkQueueWaitIdle", "vkDeviceWaitIdle"};
  for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
    if (!strcmp(name, names[i])) return (Function)nothing;
  return strncmp(name, "vkCmd", 5) ? NULL : (Function)nothing;
}

static Lookup device_lookup;

static Function of_device(void *device, const char *name) {
  Function found = device_lookup(device, name);
  return found && own(name) ? own(name) : found;
}

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  Function found = ((Lookup)dlsym(driver(), "vk_icdGetInstanceProcAddr"))(instance, name);
  if (found && !strcmp(name, "vkGetDeviceProcAddr")) {
    device_lookup = (Lookup)found;
    return (Function)of_device;
  }
  return found && own(name) ? own(name) : found;
}

Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
  return ((Lookup)dlsym(driver(), "vk_icdGetPhysicalDeviceProcAddr"))(instance, name);
}

int vk_icdNegotiateLoaderICDInterfaceVersion(unsigned *version) {
  return ((int (*)(unsigned *))dlsym(driver(), "vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
}

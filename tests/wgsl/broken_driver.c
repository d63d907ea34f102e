// A Vulkan driver that goes wrong, for tests/wgsl/test_adapter_check.py.
//
// $BROKEN says how. "load": the process crashes when the loader asks for a function; "hang": that call never returns.
// Otherwise the functions of $WGRAD_VULKAN_DRIVER are given, but vkCreateDevice crashes ("open").
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*Function)(void);
typedef Function (*Lookup)(void *object, const char *name);

static int crash(void) {
  abort();
  return 0;
}

static Function find(const char *entry, void *object, const char *name) {
  const char *broken = getenv("BROKEN");
  if (!broken || !strcmp(broken, "load")) abort();
  while (!strcmp(broken, "hang")) sleep(1);
  if (!strcmp(name, "vkCreateDevice")) return (Function)crash;
  Lookup theirs = (Lookup)dlsym(dlopen(getenv("WGRAD_VULKAN_DRIVER"), RTLD_NOW | RTLD_LOCAL), entry);
  return theirs ? theirs(object, name) : 0;
}

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  return find("vk_icdGetInstanceProcAddr", instance, name);
}

Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
  return find("vk_icdGetPhysicalDeviceProcAddr", instance, name);
}

int vk_icdNegotiateLoaderICDInterfaceVersion(unsigned *version) {
  if (*version > 5) *version = 5;
  return 0;
}

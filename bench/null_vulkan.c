// A Vulkan driver in front of RADV ($NULL_VULKAN_DRIVER) for a machine without its GPU: what of wgpu's start RADV's null device
// cannot do is answered here, and every compute pipeline is compiled with statistics, a JSON line of which goes to
// $NULL_VULKAN_OUT. Nothing runs. With $NULL_VULKAN_SHIM set, as beside Mesa's libamdgpu_noop_drm_shim.so, only the latter.
//
//     cc -shared -fPIC -o null_vulkan.so null_vulkan.c -ldl      (needs Vulkan's headers)
#define _GNU_SOURCE
#define VK_NO_PROTOTYPES
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vulkan/vulkan.h>

static void *driver(void) {
  static void *opened;
  if (!opened) opened = dlopen(getenv("NULL_VULKAN_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  if (!opened) {
    fprintf(stderr, "%s\n", dlerror());
    abort();
  }
  return opened;
}

static PFN_vkGetDeviceProcAddr look_up;
static PFN_vkCreateDevice create_device;
static PFN_vkCreateComputePipelines create_pipelines;
static PFN_vkCreateSemaphore create_semaphore;
static PFN_vkGetBufferMemoryRequirements requirements;
static PFN_vkGetBufferMemoryRequirements2 requirements2;

static int nothing(void) { return 0; }

// ---- what the null device lacks: timeline semaphores, memory ---------------------------------------------------------
static VkResult counter(VkDevice device, VkSemaphore semaphore, uint64_t *value) {
  (void)device, (void)semaphore;
  *value = 0x7fffffff;  // everything that was submitted is done
  return VK_SUCCESS;
}

static VkResult own_semaphore(VkDevice device, const VkSemaphoreCreateInfo *info, const VkAllocationCallbacks *allocator,
                              VkSemaphore *out) {
  VkSemaphoreCreateInfo binary = *info;
  binary.pNext = NULL;
  return create_semaphore(device, &binary, allocator, out);
}

static void fill(VkPhysicalDeviceMemoryProperties *memory) {
  memset(memory, 0, sizeof *memory);
  memory->memoryHeapCount = 2;
  memory->memoryHeaps[0] = (VkMemoryHeap){(VkDeviceSize)24 << 30, VK_MEMORY_HEAP_DEVICE_LOCAL_BIT};
  memory->memoryHeaps[1] = (VkMemoryHeap){(VkDeviceSize)16 << 30, 0};
  memory->memoryTypeCount = 3;
  const VkMemoryPropertyFlags visible = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
  memory->memoryTypes[0] = (VkMemoryType){VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, 0};
  memory->memoryTypes[1] = (VkMemoryType){visible, 1};
  memory->memoryTypes[2] = (VkMemoryType){visible | VK_MEMORY_PROPERTY_HOST_CACHED_BIT, 1};
}

static void own_memory(VkPhysicalDevice device, VkPhysicalDeviceMemoryProperties *memory) {
  (void)device;
  fill(memory);
}

static void own_memory2(VkPhysicalDevice device, VkPhysicalDeviceMemoryProperties2 *memory) {
  (void)device;
  fill(&memory->memoryProperties);
  for (VkBaseOutStructure *next = memory->pNext; next; next = next->pNext)
    if (next->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT) {
      VkPhysicalDeviceMemoryBudgetPropertiesEXT *budget = (void *)next;
      memset(budget->heapBudget, 0, sizeof budget->heapBudget + sizeof budget->heapUsage);
      budget->heapBudget[0] = (VkDeviceSize)20 << 30;
      budget->heapBudget[1] = (VkDeviceSize)15 << 30;
    }
}

static void own_requirements(VkDevice device, VkBuffer buffer, VkMemoryRequirements *found) {
  requirements(device, buffer, found);
  found->memoryTypeBits = 7;
}

static void own_requirements2(VkDevice device, const VkBufferMemoryRequirementsInfo2 *info, VkMemoryRequirements2 *found) {
  requirements2(device, info, found);
  found->memoryRequirements.memoryTypeBits = 7;
}

struct memory {
  size_t size;
  char *bytes;
};

static VkResult own_allocate(VkDevice device, const VkMemoryAllocateInfo *info, const VkAllocationCallbacks *allocator,
                             struct memory **out) {
  (void)device, (void)allocator;
  *out = malloc(sizeof **out);
  (*out)->size = info->allocationSize;
  (*out)->bytes = mmap(NULL, info->allocationSize, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return (*out)->bytes == MAP_FAILED ? VK_ERROR_OUT_OF_HOST_MEMORY : VK_SUCCESS;
}

static void own_free(VkDevice device, struct memory *memory, const VkAllocationCallbacks *allocator) {
  (void)device, (void)allocator;
  if (memory) munmap(memory->bytes, memory->size);
  free(memory);
}

static VkResult own_map(VkDevice device, struct memory *memory, VkDeviceSize offset, VkDeviceSize size,
                        VkMemoryMapFlags flags, void **out) {
  (void)device, (void)size, (void)flags;
  *out = memory->bytes + offset;
  return VK_SUCCESS;
}

// ---- statistics of every pipeline ------------------------------------------------------------------------------------
static VkResult own_device(VkPhysicalDevice physical, const VkDeviceCreateInfo *info,
                           const VkAllocationCallbacks *allocator, VkDevice *out) {
  const char *names[256];
  VkDeviceCreateInfo more = *info;
  if (info->enabledExtensionCount > 255) return VK_ERROR_EXTENSION_NOT_PRESENT;
  for (uint32_t i = 0; i < info->enabledExtensionCount; i++) names[i] = info->ppEnabledExtensionNames[i];
  names[more.enabledExtensionCount++] = "VK_KHR_pipeline_executable_properties";
  more.ppEnabledExtensionNames = names;
  return create_device(physical, &more, allocator, out);
}

static int count(const char *text, const char *word) {
  int found = 0;
  for (; text && (text = strstr(text, word)); text++) found++;
  return found;
}

static void tell(VkDevice device, VkPipeline pipeline, FILE *out) {
#define GET(name) PFN_##name name = (PFN_##name)look_up(device, #name)
  GET(vkGetPipelineExecutablePropertiesKHR);
  GET(vkGetPipelineExecutableStatisticsKHR);
  GET(vkGetPipelineExecutableInternalRepresentationsKHR);
  VkPipelineInfoKHR which = {VK_STRUCTURE_TYPE_PIPELINE_INFO_KHR, NULL, pipeline};
  VkPipelineExecutableInfoKHR first = {VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INFO_KHR, NULL, pipeline, 0};
  VkPipelineExecutablePropertiesKHR properties = {VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_PROPERTIES_KHR};
  uint32_t number = 1;
  vkGetPipelineExecutablePropertiesKHR(device, &which, &number, &properties);
  fprintf(out, ", \"wave\": %u", properties.subgroupSize);
  static VkPipelineExecutableStatisticKHR statistics[64];
  number = 64;
  for (int i = 0; i < 64; i++)
    statistics[i] = (VkPipelineExecutableStatisticKHR){VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_STATISTIC_KHR};
  vkGetPipelineExecutableStatisticsKHR(device, &first, &number, statistics);
  for (uint32_t i = 0; i < number; i++)
    if (statistics[i].format != VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_FLOAT64_KHR)
      fprintf(out, ", \"%s\": %llu", statistics[i].name, (unsigned long long)statistics[i].value.u64);
  static VkPipelineExecutableInternalRepresentationKHR texts[16];
  number = 16;
  for (int i = 0; i < 16; i++)
    texts[i] = (VkPipelineExecutableInternalRepresentationKHR){
        VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INTERNAL_REPRESENTATION_KHR};
  vkGetPipelineExecutableInternalRepresentationsKHR(device, &first, &number, texts);
  for (uint32_t i = 0; i < number; i++) texts[i].pData = calloc(1, texts[i].dataSize + 1);
  vkGetPipelineExecutableInternalRepresentationsKHR(device, &first, &number, texts);
  int matrix = 0;
  for (uint32_t i = 0; i < number; i++) {
    if (strstr(texts[i].name, "ssembly")) matrix += count(texts[i].pData, "v_wmma");
    free(texts[i].pData);
  }
  fprintf(out, ", \"wmma\": %d", matrix);
}

static VkResult own_pipelines(VkDevice device, VkPipelineCache cache, uint32_t number,
                              const VkComputePipelineCreateInfo *infos, const VkAllocationCallbacks *allocator,
                              VkPipeline *out) {
  (void)cache;
  VkResult worst = VK_SUCCESS;
  for (uint32_t i = 0; i < number; i++) {
    VkComputePipelineCreateInfo info = infos[i];
    info.flags |= VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR |
                  VK_PIPELINE_CREATE_CAPTURE_INTERNAL_REPRESENTATIONS_BIT_KHR;
    VkResult result = create_pipelines(device, VK_NULL_HANDLE, 1, &info, allocator, out + i);
    FILE *file = getenv("NULL_VULKAN_OUT") ? fopen(getenv("NULL_VULKAN_OUT"), "a") : NULL;
    if (file) {
      fprintf(file, "{\"result\": %d", result);
      if (!result) tell(device, out[i], file);
      fprintf(file, "}\n");
      fclose(file);
    }
    if (result) worst = result;
  }
  return worst;
}

static PFN_vkVoidFunction own(const char *name, PFN_vkVoidFunction theirs) {
#define TAKE(function, place, mine) \
  if (!strcmp(name, function)) return place = (void *)theirs, (PFN_vkVoidFunction)mine
  TAKE("vkCreateComputePipelines", create_pipelines, own_pipelines);
  if (getenv("NULL_VULKAN_SHIM")) return theirs;
  static const char *const ignored[] = {
      "vkBeginCommandBuffer", "vkEndCommandBuffer", "vkResetCommandBuffer", "vkQueueSubmit", "vkQueueSubmit2",
      "vkQueueSubmit2KHR", "vkWaitForFences", "vkGetFenceStatus", "vkWaitSemaphores", "vkWaitSemaphoresKHR",
      "vkQueueWaitIdle", "vkDeviceWaitIdle", "vkUnmapMemory", "vkBindBufferMemory", "vkBindBufferMemory2",
      "vkBindBufferMemory2KHR", "vkFlushMappedMemoryRanges", "vkInvalidateMappedMemoryRanges", "vkUpdateDescriptorSets",
      "vkResetFences", "vkGetCalibratedTimestampsEXT"};
  for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
    if (!strcmp(name, ignored[i])) return (PFN_vkVoidFunction)nothing;
  if (!strncmp(name, "vkCmd", 5)) return (PFN_vkVoidFunction)nothing;
  if (!strncmp(name, "vkGetSemaphoreCounterValue", 26)) return (PFN_vkVoidFunction)counter;
  TAKE("vkCreateSemaphore", create_semaphore, own_semaphore);
  TAKE("vkGetBufferMemoryRequirements", requirements, own_requirements);
  TAKE("vkGetBufferMemoryRequirements2", requirements2, own_requirements2);
  TAKE("vkGetBufferMemoryRequirements2KHR", requirements2, own_requirements2);
  if (!strcmp(name, "vkAllocateMemory")) return (PFN_vkVoidFunction)own_allocate;
  if (!strcmp(name, "vkFreeMemory")) return (PFN_vkVoidFunction)own_free;
  if (!strcmp(name, "vkMapMemory")) return (PFN_vkVoidFunction)own_map;
  return theirs;
}

static PFN_vkVoidFunction of_device(VkDevice device, const char *name) {
  PFN_vkVoidFunction found = look_up(device, name);
  return found ? own(name, found) : found;
}

PFN_vkVoidFunction vk_icdGetInstanceProcAddr(VkInstance instance, const char *name) {
  PFN_vkVoidFunction theirs = ((PFN_vkGetInstanceProcAddr)dlsym(driver(), "vk_icdGetInstanceProcAddr"))(instance, name);
  if (!theirs) return theirs;
  TAKE("vkGetDeviceProcAddr", look_up, of_device);
  TAKE("vkCreateDevice", create_device, own_device);
  if (!getenv("NULL_VULKAN_SHIM")) {
    if (!strcmp(name, "vkGetPhysicalDeviceMemoryProperties")) return (PFN_vkVoidFunction)own_memory;
    if (!strncmp(name, "vkGetPhysicalDeviceMemoryProperties2", 36)) return (PFN_vkVoidFunction)own_memory2;
  }
  return theirs;
}

PFN_vkVoidFunction vk_icdGetPhysicalDeviceProcAddr(VkInstance instance, const char *name) {
  return ((PFN_vkGetInstanceProcAddr)dlsym(driver(), "vk_icdGetPhysicalDeviceProcAddr"))(instance, name);
}

VkResult vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
  return ((VkResult(*)(uint32_t *))dlsym(driver(), "vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
}

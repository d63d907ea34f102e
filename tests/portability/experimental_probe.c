// Does a library of wgpu-native make a device with a feature that it calls experimental? A line for each Vulkan adapter that
// lists ray queries: "given", or what the library says. They stand for cooperative matrices, which no software driver
// has: one gate keeps both (wgsl/runtime/matrix_units.py).
//
//     experimental_probe LIBRARY
#include <stdio.h>
#ifdef _WIN32
#include <windows.h>
#define OPEN(path) ((void *)LoadLibraryA(path))
#define FIND(library, name) ((void *)GetProcAddress(library, name))
#else
#include <dlfcn.h>
#define OPEN(path) dlopen(path, RTLD_NOW)
#define FIND(library, name) dlsym(library, name)
#endif
#define WGPU_SKIP_DECLARATIONS
#include "webgpu.h"
#include "wgpu.h"

static void given(WGPURequestDeviceStatus status, WGPUDevice device, WGPUStringView message, void *first, void *second) {
    (void)device, (void)first, (void)second;
    if (status == WGPURequestDeviceStatus_Success) puts("given");
    else printf("%.*s\n", (int)message.length, message.data);
}

int main(int count, char **arguments) {
    void *library = count == 2 ? OPEN(arguments[1]) : NULL;
    if (!library) return fputs("experimental_probe LIBRARY: it cannot be loaded\n", stderr), 2;
    WGPUInstance (*create)(WGPUInstanceDescriptor const *) = FIND(library, "wgpuCreateInstance");
    size_t (*list)(WGPUInstance, WGPUInstanceEnumerateAdapterOptions const *, WGPUAdapter *) =
        FIND(library, "wgpuInstanceEnumerateAdapters");
    WGPUStatus (*describe)(WGPUAdapter, WGPUAdapterInfo *) = FIND(library, "wgpuAdapterGetInfo");
    WGPUBool (*has)(WGPUAdapter, WGPUFeatureName) = FIND(library, "wgpuAdapterHasFeature");
    WGPUFuture (*request)(WGPUAdapter, WGPUDeviceDescriptor const *, WGPURequestDeviceCallbackInfo) =
        FIND(library, "wgpuAdapterRequestDevice");
    WGPUFeatureName feature = (WGPUFeatureName)WGPUNativeFeature_RayQuery;
    WGPUDeviceDescriptor wanted = {.requiredFeatureCount = 1, .requiredFeatures = &feature};
    WGPURequestDeviceCallbackInfo then = {.mode = WGPUCallbackMode_AllowProcessEvents, .callback = given};
    WGPUInstance instance = create(NULL);
    WGPUAdapter adapters[64];
    if (list(instance, NULL, NULL) > 64) return fputs("more than 64 adapters\n", stderr), 2;
    size_t number = list(instance, NULL, adapters);
    for (size_t i = 0; i < number; i++) {
        WGPUAdapterInfo info = {0};
        describe(adapters[i], &info);
        if (info.backendType == WGPUBackendType_Vulkan && has(adapters[i], feature)) request(adapters[i], &wanted, then);
    }
    return 0;
}

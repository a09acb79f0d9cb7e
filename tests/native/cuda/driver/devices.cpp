// Devices, their contexts, and how functions are found.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "context.h"

namespace fake_cuda {
namespace {

constexpr int kDriverVersion = 13000;

bool is_device(int device) {
    return device >= 0 && device < static_cast<int>(driver().contexts.size());
}

struct ErrorText {
    int code;
    const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialised, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* text_of(int code) {
    for (const ErrorText& error : kErrors)
        if (error.code == code) return &error;
    return nullptr;
}

struct Offered {
    const char* name;
    int version;
    void* function;
};
const Offered kOffered[] = {
#define FAKE_CUDA_OFFER(name, version, parameters) {#name, version, reinterpret_cast<void*>(&name)},
    FAKE_CUDA_FUNCTIONS(FAKE_CUDA_OFFER)
#undef FAKE_CUDA_OFFER
};

}  // namespace

// FAKE_CUDA_DEVICES: how many there are.
int cuInit(unsigned flags) {
    return call(__func__, "", [&] {
        if (flags != 0) return kInvalidValue;
        Driver& state = driver();
        if (state.process != 0) return state.process == getpid() ? 0 : kNotInitialised;
        const char* const said = std::getenv("FAKE_CUDA_DEVICES");
        const int count = said == nullptr ? 1 : std::atoi(said);
        if (count <= 0) return kNoDevice;
        for (int device = 0; device < count; ++device) state.contexts.push_back(std::make_unique<Context>(device));
        state.process = getpid();
        return 0;
    });
}

// FAKE_CUDA_VERSION: 13000 for 13.0.
int cuDriverGetVersion(int* version) {
    return call(__func__, "", [&] {
        const char* const said = std::getenv("FAKE_CUDA_VERSION");
        *version = said == nullptr ? kDriverVersion : std::atoi(said);
        return 0;
    });
}

int cuDeviceGetCount(int* count) {
    return call(__func__, "", [&] {
        *count = static_cast<int>(driver().contexts.size());
        return 0;
    });
}

int cuDeviceGet(int* device, int ordinal) {
    return call(__func__, "", [&] {
        *device = ordinal;
        return is_device(ordinal) ? 0 : kInvalidDevice;
    });
}

int cuDeviceGetName(char* name, int length, int device) {
    return call(__func__, "", [&] {
        if (!is_device(device)) return kInvalidDevice;
        std::snprintf(name, static_cast<std::size_t>(length), "emulated GPU");
        return 0;
    });
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
    return call(__func__, "", [&] {
        if (!is_device(device)) return kInvalidDevice;
        static const std::map<int, int> values{{1, 1024}, {10, 32},        {16, 132},      {75, 9},
                                               {76, 0},   {81, 228 << 10}, {97, 227 << 10}};
        const auto found = values.find(attribute);
        if (found == values.end()) return kInvalidValue;
        *value = found->second;
        return 0;
    });
}

int cuDeviceTotalMem(std::size_t* bytes, int device) {
    return call(__func__, "", [&] {
        if (!is_device(device)) return kInvalidDevice;
        *bytes = driver().memory_bytes;
        return 0;
    });
}

int cuDevicePrimaryCtxRetain(Handle* context, int device) {
    return call(__func__, "", [&] {
        if (!is_device(device)) return kInvalidDevice;
        Context* const one = driver().contexts[static_cast<std::size_t>(device)].get();
        *context = one;
        driver().context_of[one] = one;
        return 0;
    });
}

int cuCtxPushCurrent(Handle context) {
    return call(__func__, "", [&] {
        const auto found = driver().context_of.find(context);
        if (found == driver().context_of.end()) return kInvalidContext;
        current_contexts().push_back(found->second);
        return 0;
    });
}

int cuCtxPopCurrent(Handle* context) {
    return call(__func__, "", [&] {
        if (current_contexts().empty()) return kInvalidContext;
        if (context != nullptr) *context = current_contexts().back();
        current_contexts().pop_back();
        return 0;
    });
}

int cuGetErrorName(int code, const char** name) {
    const ErrorText* const known = text_of(code);
    *name = known == nullptr ? nullptr : known->name;
    return known == nullptr ? kInvalidValue : 0;
}

int cuGetErrorString(int code, const char** text) {
    const ErrorText* const known = text_of(code);
    *text = known == nullptr ? nullptr : known->text;
    return known == nullptr ? kInvalidValue : 0;
}

}  // namespace fake_cuda

// version: what the caller knows of CUDA. status: 0 found, 1 there is none of this name, 2 only in later versions.
extern "C" __attribute__((visibility("default"))) int cuGetProcAddress_v2(const char* name, void** function,
                                                                          int version, std::uint64_t flags,
                                                                          int* status) {
    if (name == nullptr || function == nullptr || flags > 2) return fake_cuda::kInvalidValue;
    *function = nullptr;
    if (status != nullptr) *status = 1;
    for (const fake_cuda::Offered& one : fake_cuda::kOffered) {
        if (std::strcmp(one.name, name) != 0) continue;
        if (status != nullptr) *status = version < one.version ? 2 : 0;
        if (version < one.version) break;
        *function = one.function;
        return 0;
    }
    return fake_cuda::kNotFound;
}

#include "cuda/driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <mutex>

namespace fedcore::cuda {
namespace {

constexpr int kOutOfMemory = 2, kNoDevice = 100;
// Errors after which the context, and so the process, cannot use the GPU: ECC, illegal address, time-out, and from 710
// on assertions, stack, instruction, alignment, address space, program counter, failed launch.
constexpr int kSticky[] = {214, 700, 702, 710, 714, 715, 716, 717, 718, 719};

std::atomic<const char*> refused{nullptr};

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string described(const Driver& from, int code) {
    const char *name = nullptr, *text = nullptr;
    if (from.cuGetErrorName == nullptr || from.cuGetErrorName(code, &name) != 0 || name == nullptr)
        return "error " + std::to_string(code);
    if (from.cuGetErrorString == nullptr || from.cuGetErrorString(code, &text) != 0 || text == nullptr) return name;
    return std::string(name) + " (" + text + ")";
}

Driver load() {
    if (const char* const because = refused) throw DeviceFailure(because);
    const char* named = std::getenv("FEDCORE_CUDA_DRIVER");
    Driver made;
    made.substituted = named != nullptr && *named != '\0';
    const std::string path = made.substituted ? named : "libcuda.so.1";
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw DeviceFailure("no NVIDIA driver: " + path + " was not found; install the driver, or compute on the CPU");
    using Get = int (*)(const char* name, void** function, int version, std::uint64_t flags, int* status);
    // The form of cuGetProcAddress that reports reasons came with 12.0, the oldest supported version.
    const auto get = reinterpret_cast<Get>(dlsym(library, "cuGetProcAddress_v2"));
    if (get == nullptr)
        throw DeviceFailure("the NVIDIA driver is older than CUDA " + version_text(kOldestDriver) + "; update it");
#define FEDCORE_LOOK_UP(NAME, VERSION, PARAMETERS)                                \
    {                                                                             \
        void* found = nullptr;                                                    \
        int status = 0;                                                           \
        if (get(#NAME, &found, VERSION, 0, &status) != 0 || found == nullptr)     \
            throw DeviceFailure("the NVIDIA driver has no " #NAME "; update it"); \
        made.NAME = reinterpret_cast<decltype(made.NAME)>(found);                 \
    }
    FEDCORE_DRIVER_FUNCTIONS(FEDCORE_LOOK_UP)
#undef FEDCORE_LOOK_UP
    const int code = made.cuInit(0);
    if (code == kNoDevice) throw DeviceFailure("the NVIDIA driver sees no GPU");
    if (code != 0) throw DeviceFailure("the NVIDIA driver does not start: " + described(made, code));
    if (made.cuDriverGetVersion(&made.version) != 0 || made.version < kOldestDriver)
        throw DeviceFailure("the NVIDIA driver is of CUDA " + version_text(made.version) + ", older than " +
                            version_text(kOldestDriver) + "; update it");
    int count = 0;
    if (made.cuDeviceGetCount(&count) != 0 || count == 0) throw DeviceFailure("the NVIDIA driver sees no GPU");
    return made;
}

bool is_sticky(int code) {
    return std::find(std::begin(kSticky), std::end(kSticky), code) != std::end(kSticky);
}

}  // namespace

void refuse_devices(const char* because) {
    refused = because;
}

const Driver& driver() {
    static std::mutex mutex;  // of the first call only: in a forked process it may stay locked
    static Driver loaded;
    static std::atomic<pid_t> loaded_by{0};
    if (loaded_by == 0) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (loaded_by == 0) {
            loaded = load();
            loaded_by = getpid();
        }
    }
    if (loaded_by != getpid())
        throw DeviceFailure(
            "CUDA does not survive a fork: start this process with the method 'spawn', or use CUDA in "
            "it for the first time");
    return loaded;
}

void check(int code, const char* doing) {
    if (code == 0) return;
    const std::string what = std::string(doing) + ": " + described(driver(), code);
    if (code == kOutOfMemory) throw OutOfDeviceMemory(what);
    throw DeviceFailure(what + (is_sticky(code) ? "; this process can no longer use the GPU: start a new one from "
                                                  "the last save"
                                                : ""));
}

}  // namespace fedcore::cuda

#include "cuda/device.h"

#include <algorithm>
#include <map>

#include "cuda/image.h"

namespace fedcore::cuda {
namespace {

constexpr int kMajor = 75, kMinor = 76;           // attributes of a device
constexpr int kDynamicShared = 8, kCarveout = 9;  // and of a kernel
constexpr int kMostDynamicShared = 64 << 10;      // every GPU since 7.5 has this much for one block
constexpr int kDeviceOrdinal = 9;                 // and of an address
constexpr unsigned kNoTiming = 2, kPortable = 1;
constexpr int kNoBinary = 209, kInvalidHandle = 400, kContextDestroyed = 709;

constexpr const char* kNames[] = {
#define FEDCORE_KERNEL(NAME, CALL, MEMORY, BODY, BLOCKS) "fedcore_" #NAME,
#include "kernels/cuda/kernels.def"
#undef FEDCORE_KERNEL
};

}  // namespace

Current::Current(const Device& device) {
    check(driver().cuCtxPushCurrent(device.context()), "choosing the GPU");
}
Current::~Current() {
    void* popped = nullptr;
    driver().cuCtxPopCurrent(&popped);
}

int device_of(const void* address) {
    const Current current(Device::get(0));
    int ordinal = 0;
    check(driver().cuPointerGetAttribute(&ordinal, kDeviceOrdinal, reinterpret_cast<Address>(address)),
          "asking in which GPU's memory an array lies");
    return ordinal;
}

Event make_event() {
    Event event = nullptr;
    check(driver().cuEventCreate(&event, kNoTiming), "making an event");
    return event;
}

bool wait_for(Stream stream, Stream other) {
    const Event event = make_event();
    const int code = driver().cuEventRecord(event, other);
    const bool gone = code == kInvalidHandle || code == kContextDestroyed;
    const int waited = code == 0 ? driver().cuStreamWaitEvent(stream, event, 0) : 0;
    check(driver().cuEventDestroy(event), "dropping an event");  // the driver keeps it until it has occurred
    if (gone)
        check(driver().cuCtxSynchronize(), "waiting for a destroyed stream");
    else
        check(code, "recording an event");
    check(waited, "waiting for an event");
    return !gone;
}

Device& Device::get(int ordinal) {
    driver();  // throws in a forked process
    static std::mutex mutex;
    static auto& devices =
        *new std::map<int, std::unique_ptr<Device>>;  // never destroyed, because the driver may be unloaded first
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Device>& device = devices[ordinal];
    if (!device) device.reset(new Device(ordinal));
    return *device;
}

Device::Device(int number) : ordinal(number) {
    const Driver& cuda = driver();
    int count = 0;
    check(cuda.cuDeviceGetCount(&count), "counting GPUs");
    if (ordinal < 0 || ordinal >= count)
        throw DeviceFailure("device: expected cuda:0 .. cuda:" + std::to_string(count - 1) +
                            ", got cuda:" + std::to_string(ordinal));
    check(cuda.cuDeviceGet(&device_, ordinal), "opening the GPU");
    char text[256] = {};
    check(cuda.cuDeviceGetName(text, sizeof text - 1, device_), "asking the GPU's name");
    name = text;
    int major = 0, minor = 0;
    check(cuda.cuDeviceGetAttribute(&major, kMajor, device_), "asking the GPU's capability");
    check(cuda.cuDeviceGetAttribute(&minor, kMinor, device_), "asking the GPU's capability");
    check(cuda.cuDeviceTotalMem(&memory, device_), "asking the GPU's memory");
    capability = 10 * major + minor;
    check(cuda.cuDevicePrimaryCtxRetain(&context_, device_), "opening the GPU's context");
    const Current current(*this);
    load();
    last_ = make_event();
}

void Device::load() {
    const Driver& cuda = driver();
    const Image from = image();
    if (from.begin == nullptr && !cuda.substituted)
        throw DeviceFailure(std::string("fedcore was built without kernels for GPUs, because ") + from.missing +
                            "; build it with a CUDA toolkit and FEDCORE_CUDA=ON");
    const int code = cuda.cuModuleLoadData(&module_, from.begin);
    if (code == kNoBinary)
        throw DeviceFailure(name + ": no kernels for its capability " + std::to_string(capability / 10) + "." +
                            std::to_string(capability % 10) + " (compiled for: " + from.targets + ")");
    check(code, "loading the kernels");
    for (const char* kernel : kNames) {
        Function found = nullptr;
        check(cuda.cuModuleGetFunction(&found, module_, kernel), kernel);
        // Prefer shared memory: rows are read once, so they do not need the L1 cache.
        check(cuda.cuFuncSetAttribute(found, kCarveout, 100), "dividing the L1 cache");
        kernels_.push_back(found);
    }
    for (auto i = static_cast<std::size_t>(Kernel::columns_8); i < kernels_.size(); ++i)
        check(cuda.cuFuncSetAttribute(kernels_[i], kDynamicShared, kMostDynamicShared), "asking for shared memory");
}

void Device::precede(Stream stream) {
    // A new stream may have the number of a destroyed one; only the legacy stream's number is unique.
    if (any_ && (stream != nullptr || last_stream_ != nullptr))
        check(driver().cuStreamWaitEvent(stream, last_, 0), "waiting for an earlier call");
    for (const Event event : joined_) check(driver().cuStreamWaitEvent(stream, event, 0), "waiting for a copy");
}

void Device::follow(Stream stream) {
    precede(stream);
    for (; !joined_.empty(); joined_.pop_back()) check(driver().cuEventDestroy(joined_.back()), "dropping an event");
}

void Device::passed(Stream stream) {
    check(driver().cuEventRecord(last_, stream), "recording an event");
    last_stream_ = stream, any_ = true;
}

void Device::join(Event event) {
    joined_.push_back(event);
}

namespace {

Address allocated(Device& device, std::size_t bytes) {
    const Current current(device);
    Address at = 0;
    check(driver().cuMemAlloc(&at, std::max<std::size_t>(bytes, 1)), "allocating memory on the GPU");
    return at;
}

}  // namespace

Memory::Memory(Device& on, std::size_t size) : device(on), bytes(size), at(allocated(on, size)) {}

Memory::~Memory() {
    try {
        const Current current(device);
        driver().cuMemFree(at);
    } catch (const DeviceFailure&) {
        // The process can no longer use the GPU, nor its memory.
    }
}

void Memory::used_by(Stream stream) {
    if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
}

void Memory::no_longer_used_by(Stream stream) {
    users.erase(std::remove(users.begin(), users.end(), stream), users.end());
}

void Memory::forget_users() {
    if (shown == 0) users.clear();
}

PinnedMemory::PinnedMemory(const Device& device, std::size_t size) : bytes(size), device_(device) {
    const Current current(device_);
    check(driver().cuMemHostAlloc(&at_, std::max<std::size_t>(bytes, 1), kPortable), "allocating pinned memory");
}

PinnedMemory::~PinnedMemory() {
    try {
        const Current current(device_);
        driver().cuMemFreeHost(at_);
    } catch (const DeviceFailure&) {
    }
}

PinnedRegion::PinnedRegion(const Device& device, void* at, std::size_t bytes) : device_(device), at_(at) {
    const Current current(device_);
    check(driver().cuMemHostRegister(at_, bytes, kPortable), "pinning memory");
}

PinnedRegion::~PinnedRegion() {
    try {
        const Current current(device_);
        driver().cuMemHostUnregister(at_);
    } catch (const DeviceFailure&) {
    }
}

}  // namespace fedcore::cuda

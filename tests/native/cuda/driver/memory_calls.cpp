// Memory and copies. Pinned memory is read and written when the stream comes to it; what else the host has is read at
// once, and written before the call returns.
#include <cstring>
#include <vector>

#include "context.h"

namespace fake_cuda {
namespace {

constexpr int kAlreadyRegistered = 712, kNotRegistered = 713;

std::string of(std::size_t bytes) {
    return "bytes=" + std::to_string(bytes);
}
std::string of(std::size_t bytes, Handle stream) {
    return of(bytes) + " stream=" + std::to_string(reinterpret_cast<std::uintptr_t>(stream));
}

char* pointer(Address at) {
    return reinterpret_cast<char*>(at);
}

bool is_device_memory(const void* at) {
    for (const auto& context : driver().contexts)
        if (context->memory.allocations.find(at, 1) != nullptr) return true;
    return false;
}

bool is_registered(const void* at, std::size_t bytes) {
    const char* const begin = static_cast<const char*>(at);
    auto found = driver().registered.upper_bound(begin);
    return found != driver().registered.begin() && begin + bytes <= (--found)->first + found->second;
}

// Whether the host's bytes are pinned: all, or none. A mixture, or a device's bytes, must not be copied.
bool host_bytes(const void* at, std::size_t bytes, bool* pinned) {
    const Allocations& all = driver().pinned;
    *pinned = bytes > 0 && (all.find(at, bytes) != nullptr || is_registered(at, bytes));
    return at != nullptr && !is_device_memory(at) && (*pinned || (all.find(at, 1) == nullptr && !is_registered(at, 1)));
}

// Issues work on so many bytes of the context's own memory, if they are its own.
int issue(Context& context, Handle handle, Address at, std::size_t bytes, std::function<void()> work) {
    const auto stream = context.stream(handle);
    if (!stream) return kInvalidHandle;
    if (context.memory.allocations.find(pointer(at), bytes) == nullptr) return kInvalidValue;
    stream->issue([&context, at, bytes, work = std::move(work)] {
        const DeviceMemory::Opened opened(context.memory, at, bytes);
        work();
    });
    return 0;
}

}  // namespace

int cuPointerGetAttribute(void* value, int attribute, Address at) {
    constexpr int kDeviceOrdinal = 9;
    return call_in_context(__func__, "", [&](Context&) {
        if (value == nullptr || attribute != kDeviceOrdinal) return kInvalidValue;
        for (const auto& context : driver().contexts)
            if (context->memory.allocations.find(pointer(at), 1) != nullptr) {
                *static_cast<int*>(value) = context->device;
                return 0;
            }
        return kInvalidValue;
    });
}

int cuMemAlloc(Address* at, std::size_t bytes) {
    return call_in_context(__func__, of(bytes), [&](Context& context) {
        if (at == nullptr || bytes == 0) return kInvalidValue;
        Allocations& all = context.memory.allocations;
        const std::size_t most = driver().memory_bytes;
        Stretch made;
        if (bytes > most || all.bytes() > most - bytes || !all.add(bytes, &made)) return kOutOfMemory;
        *at = reinterpret_cast<Address>(made.at);
        return 0;
    });
}

int cuMemFree(Address at) {
    return call_in_context(__func__, "", [&](Context& context) {
        if (at == 0) return 0;
        context.run_all();
        DeviceMemory::close_opened();
        return context.memory.allocations.remove(pointer(at)) ? 0 : kInvalidValue;
    });
}

int cuMemHostAlloc(void** at, std::size_t bytes, unsigned flags) {
    return call_in_context(__func__, of(bytes), [&](Context&) {
        if (at == nullptr || bytes == 0 || flags > 7) return kInvalidValue;
        Stretch made;
        if (!driver().pinned.add(bytes, &made)) return kOutOfMemory;
        open_pages(made);
        *at = made.at;
        return 0;
    });
}

int cuMemFreeHost(void* at) {
    return call_in_context(__func__, "", [&](Context&) {
        for (const auto& context : driver().contexts) context->run_all();
        return driver().pinned.remove(at) ? 0 : kInvalidValue;
    });
}

int cuMemHostRegister(void* at, std::size_t bytes, unsigned flags) {
    return call_in_context(__func__, of(bytes), [&](Context&) {
        if (at == nullptr || bytes == 0 || flags > 7) return kInvalidValue;
        return driver().registered.emplace(static_cast<const char*>(at), bytes).second ? 0 : kAlreadyRegistered;
    });
}

int cuMemHostUnregister(void* at) {
    return call_in_context(__func__, "", [&](Context&) {
        for (const auto& context : driver().contexts) context->run_all();
        return driver().registered.erase(static_cast<const char*>(at)) != 0 ? 0 : kNotRegistered;
    });
}

int cuMemcpyHtoDAsync(Address to, const void* from, std::size_t bytes, Handle stream) {
    return call_in_context(__func__, of(bytes, stream), [&](Context& context) {
        bool pinned = false;
        if (bytes == 0) return 0;
        if (!host_bytes(from, bytes, &pinned)) return kInvalidValue;
        if (pinned) return issue(context, stream, to, bytes, [=] { std::memcpy(pointer(to), from, bytes); });
        const auto* const first = static_cast<const char*>(from);
        return issue(context, stream, to, bytes, [=, staged = std::vector<char>(first, first + bytes)] {
            std::memcpy(pointer(to), staged.data(), bytes);
        });
    });
}

int cuMemcpyDtoHAsync(void* to, Address from, std::size_t bytes, Handle stream) {
    return call_in_context(__func__, of(bytes, stream), [&](Context& context) {
        bool pinned = false;
        if (bytes == 0) return 0;
        if (!host_bytes(to, bytes, &pinned)) return kInvalidValue;
        const int code = issue(context, stream, from, bytes, [=] { std::memcpy(to, pointer(from), bytes); });
        if (code == 0 && !pinned) context.stream(stream)->end().run();
        return code;
    });
}

int cuMemcpyDtoDAsync(Address to, Address from, std::size_t bytes, Handle stream) {
    return call_in_context(__func__, of(bytes, stream), [&](Context& context) {
        if (bytes == 0) return 0;
        if (context.memory.allocations.find(pointer(from), bytes) == nullptr) return kInvalidValue;
        return issue(context, stream, to, bytes, [=, &context] {
            const DeviceMemory::Opened source(context.memory, from, bytes);
            std::memmove(pointer(to), pointer(from), bytes);
        });
    });
}

int cuMemsetD8Async(Address to, unsigned char value, std::size_t bytes, Handle stream) {
    return call_in_context(__func__, of(bytes, stream), [&](Context& context) {
        if (bytes == 0) return 0;
        return issue(context, stream, to, bytes, [=] { std::memset(pointer(to), value, bytes); });
    });
}

}  // namespace fake_cuda

#include "control.h"

#include "context.h"

using fake_cuda::driver;
using fake_cuda::turns;
using Turn = std::lock_guard<std::recursive_mutex>;

extern "C" {

const char* fake_cuda_calls() {
    static thread_local std::string text;
    const Turn turn(turns());
    text = driver().recorder.take();
    return text.c_str();
}

void fake_cuda_fail(const char* what, int code, int after) {
    const Turn turn(turns());
    driver().recorder.fail(what, code, after);
}

void fake_cuda_mend() {
    const Turn turn(turns());
    driver().recorder.forget_failures();
    for (const auto& context : driver().contexts) context->lost = 0;
}

std::size_t fake_cuda_live_bytes(int device) {
    const Turn turn(turns());
    std::size_t bytes = 0;
    for (const auto& context : driver().contexts)
        if (device < 0 || device == context->device) bytes += context->memory.allocations.bytes();
    return bytes;
}

std::size_t fake_cuda_pinned_bytes() {
    const Turn turn(turns());
    return driver().pinned.bytes();
}

void fake_cuda_set_memory(std::size_t bytes) {
    const Turn turn(turns());
    driver().memory_bytes = bytes;
}

}  // extern "C"

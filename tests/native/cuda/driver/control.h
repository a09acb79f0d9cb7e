// What tests ask of the driver beside CUDA's own functions.
#pragma once

#include <cstddef>

#pragma GCC visibility push(default)
extern "C" {

// The calls since the last time, a line each; valid until it is asked again.
const char* fake_cuda_calls();
// A function of CUDA fails with a code, once, behind so many calls that go well. "kernel": a kernel that runs.
void fake_cuda_fail(const char* what, int code, int after);
// Nothing is to fail any more, and contexts that were lost are as they were.
void fake_cuda_mend();
// Bytes of a device's memory that are taken (of all devices' for -1), and how much each has.
std::size_t fake_cuda_live_bytes(int device);
std::size_t fake_cuda_pinned_bytes();
void fake_cuda_set_memory(std::size_t bytes);
}
#pragma GCC visibility pop

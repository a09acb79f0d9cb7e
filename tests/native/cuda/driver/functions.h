// What the driver for tests offers of libcuda.so.1, and by which codes its functions answer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake_cuda {

using Address = std::uint64_t;  // CUdeviceptr
using Handle = void*;           // CUcontext, CUmodule, CUfunction, CUstream, CUevent

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotInitialised = 3, kNoDevice = 100, kInvalidDevice = 101,
              kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kIllegalAddress = 700;

// By the version in which each function took this form (cuda.h of CUDA 12.0): asking for an older one would give
// another, with other parameters.
#define FAKE_CUDA_FUNCTIONS(X)                                                                                 \
    X(cuInit, 2000, (unsigned flags))                                                                          \
    X(cuDriverGetVersion, 2020, (int* version))                                                                \
    X(cuDeviceGetCount, 2000, (int* count))                                                                    \
    X(cuDeviceGet, 2000, (int* device, int ordinal))                                                           \
    X(cuDeviceGetName, 2000, (char* name, int length, int device))                                             \
    X(cuDeviceGetAttribute, 2000, (int* value, int attribute, int device))                                     \
    X(cuDeviceTotalMem, 3020, (std::size_t* bytes, int device))                                                \
    X(cuDevicePrimaryCtxRetain, 7000, (Handle * context, int device))                                          \
    X(cuCtxPushCurrent, 4000, (Handle context))                                                                \
    X(cuCtxPopCurrent, 4000, (Handle * context))                                                               \
    X(cuCtxSynchronize, 2000, ())                                                                              \
    X(cuPointerGetAttribute, 4000, (void* value, int attribute, Address at))                                   \
    X(cuModuleLoadData, 2000, (Handle * module, const void* image))                                            \
    X(cuModuleGetFunction, 2000, (Handle * function, Handle module, const char* name))                         \
    X(cuFuncSetAttribute, 9000, (Handle function, int attribute, int value))                                   \
    X(cuMemAlloc, 3020, (Address * at, std::size_t bytes))                                                     \
    X(cuMemFree, 3020, (Address at))                                                                           \
    X(cuMemHostAlloc, 2020, (void** at, std::size_t bytes, unsigned flags))                                    \
    X(cuMemFreeHost, 2000, (void* at))                                                                         \
    X(cuMemHostRegister, 6050, (void* at, std::size_t bytes, unsigned flags))                                  \
    X(cuMemHostUnregister, 4000, (void* at))                                                                   \
    X(cuMemcpyHtoDAsync, 3020, (Address to, const void* from, std::size_t bytes, Handle stream))               \
    X(cuMemcpyDtoHAsync, 3020, (void* to, Address from, std::size_t bytes, Handle stream))                     \
    X(cuMemcpyDtoDAsync, 3020, (Address to, Address from, std::size_t bytes, Handle stream))                   \
    X(cuMemsetD8Async, 3020, (Address to, unsigned char value, std::size_t bytes, Handle stream))              \
    X(cuStreamCreate, 2000, (Handle * stream, unsigned flags))                                                 \
    X(cuStreamDestroy, 4000, (Handle stream))                                                                  \
    X(cuStreamSynchronize, 2000, (Handle stream))                                                              \
    X(cuStreamWaitEvent, 3020, (Handle stream, Handle event, unsigned flags))                                  \
    X(cuEventCreate, 2000, (Handle * event, unsigned flags))                                                   \
    X(cuEventDestroy, 4000, (Handle event))                                                                    \
    X(cuEventRecord, 2000, (Handle event, Handle stream))                                                      \
    X(cuEventSynchronize, 2000, (Handle event))                                                                \
    X(cuLaunchKernel, 4000,                                                                                    \
      (Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
       unsigned block_z, unsigned shared_bytes, Handle stream, void** arguments, void** extra))                \
    X(cuGetErrorName, 6000, (int code, const char** name))                                                     \
    X(cuGetErrorString, 6000, (int code, const char** text))

#define FAKE_CUDA_DECLARE(name, version, parameters) int name parameters;
FAKE_CUDA_FUNCTIONS(FAKE_CUDA_DECLARE)
#undef FAKE_CUDA_DECLARE

}  // namespace fake_cuda

// NVIDIA's driver, found at run time, without linking to CUDA or its headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fedcore::cuda {

// No device is available, or a driver call failed; the message is for users.
struct DeviceFailure : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct OutOfDeviceMemory : DeviceFailure {
    using DeviceFailure::DeviceFailure;
};

using Address = std::uint64_t;  // CUdeviceptr
using Stream = void*;           // CUstream; null is the legacy default stream
using Event = void*;
using Function = void*;

// The functions of libcuda.so.1, by the version that introduced their present form (cuda.h of 12.0).
// clang-format off
#define FEDCORE_DRIVER_FUNCTIONS(X) \
    X(cuInit, 2000, (unsigned flags)) \
    X(cuDriverGetVersion, 2020, (int* version)) \
    X(cuDeviceGetCount, 2000, (int* count)) \
    X(cuDeviceGet, 2000, (int* device, int ordinal)) \
    X(cuDeviceGetName, 2000, (char* name, int length, int device)) \
    X(cuDeviceGetAttribute, 2000, (int* value, int attribute, int device)) \
    X(cuDeviceTotalMem, 3020, (std::size_t* bytes, int device)) \
    X(cuDevicePrimaryCtxRetain, 7000, (void** context, int device)) \
    X(cuCtxPushCurrent, 4000, (void* context)) \
    X(cuCtxPopCurrent, 4000, (void** context)) \
    X(cuCtxSynchronize, 2000, ()) \
    X(cuPointerGetAttribute, 4000, (void* value, int attribute, Address at)) \
    X(cuModuleLoadData, 2000, (void** module, const void* image)) \
    X(cuModuleGetFunction, 2000, (Function* function, void* module, const char* name)) \
    X(cuFuncSetAttribute, 9000, (Function function, int attribute, int value)) \
    X(cuMemAlloc, 3020, (Address* at, std::size_t bytes)) \
    X(cuMemFree, 3020, (Address at)) \
    X(cuMemHostAlloc, 2020, (void** at, std::size_t bytes, unsigned flags)) \
    X(cuMemFreeHost, 2000, (void* at)) \
    X(cuMemHostRegister, 6050, (void* at, std::size_t bytes, unsigned flags)) \
    X(cuMemHostUnregister, 4000, (void* at)) \
    X(cuMemcpyHtoDAsync, 3020, (Address to, const void* from, std::size_t bytes, Stream stream)) \
    X(cuMemcpyDtoHAsync, 3020, (void* to, Address from, std::size_t bytes, Stream stream)) \
    X(cuMemcpyDtoDAsync, 3020, (Address to, Address from, std::size_t bytes, Stream stream)) \
    X(cuMemsetD8Async, 3020, (Address to, unsigned char value, std::size_t bytes, Stream stream)) \
    X(cuStreamCreate, 2000, (Stream* stream, unsigned flags)) \
    X(cuStreamDestroy, 4000, (Stream stream)) \
    X(cuStreamSynchronize, 2000, (Stream stream)) \
    X(cuStreamWaitEvent, 3020, (Stream stream, Event event, unsigned flags)) \
    X(cuEventCreate, 2000, (Event* event, unsigned flags)) \
    X(cuEventDestroy, 4000, (Event event)) \
    X(cuEventRecord, 2000, (Event event, Stream stream)) \
    X(cuEventSynchronize, 2000, (Event event)) \
    X(cuLaunchKernel, 4000, \
      (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
       unsigned block_z, unsigned shared, Stream stream, void** arguments, void** extra)) \
    X(cuGetErrorName, 6000, (int code, const char** name)) \
    X(cuGetErrorString, 6000, (int code, const char** text))
// clang-format on

struct Driver {
#define FEDCORE_MEMBER(NAME, VERSION, PARAMETERS) int(*NAME) PARAMETERS = nullptr;
    FEDCORE_DRIVER_FUNCTIONS(FEDCORE_MEMBER)
#undef FEDCORE_MEMBER
    int version = 0;           // 13000: the newest version that the driver supports
    bool substituted = false;  // by FEDCORE_CUDA_DRIVER, as tests do
};

// The driver, loaded at the first call. Raises DeviceFailure, also in a process that was forked after the first call,
// where CUDA does not work. May be called again after a failure.
const Driver& driver();

// Makes the first call of driver() fail with this text, for an embedding that lacks support for devices.
void refuse_devices(const char* because);

// Raises DeviceFailure, or OutOfDeviceMemory, if the code is not 0.
void check(int code, const char* doing);

constexpr int kOldestDriver = 12000;

}  // namespace fedcore::cuda

// The part of DLPack's C ABI (dmlc/dlpack, versions 0.x and 1.x) that this package reads and writes.
#pragma once

#include <cstdint>

namespace fedcore::bindings::dlpack {

constexpr std::int32_t kCpu = 1, kCuda = 2, kPinned = 3, kManaged = 13;   // device types
constexpr std::uint8_t kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4;  // type codes
constexpr std::uint64_t kReadOnly = 1, kNotInPlace = 3;                   // flag bits, 1.x only: 2 is a copy

struct Tensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t ndim;
    std::uint8_t type_code;
    std::uint8_t type_bits;
    std::uint16_t type_lanes;
    std::int64_t* shape;
    std::int64_t* strides;  // in elements; null for C order
    std::uint64_t byte_offset;
};

struct Managed {  // capsule "dltensor"
    Tensor tensor;
    void* context;
    void (*deleter)(Managed*);
};

struct ManagedVersioned {  // capsule "dltensor_versioned"
    std::uint32_t major, minor;
    void* context;
    void (*deleter)(ManagedVersioned*);
    std::uint64_t flags;
    Tensor tensor;
};

// A type's C functions, from version 1.2 on, in the capsule "dlpack_exchange_api" of its `__dlpack_c_exchange_api__`.
struct Exchange {
    std::uint32_t major, minor;
    const Exchange* of_before;
    void* allocate;
    int (*managed_of)(void* object, ManagedVersioned** out);  // 0, or -1 with a Python error set
    void *object_of, *tensor_of;
    int (*current_stream)(std::int32_t device_type, std::int32_t device,
                          void** stream);  // the library's current stream
};

}  // namespace fedcore::bindings::dlpack

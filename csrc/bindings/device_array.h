// A vector in a device's memory, as a Python object.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/callers_device.h"
#include "cuda/device.h"

namespace fedcore::bindings {

namespace py = pybind11;

struct DeviceDtype {
    const char* name;  // as NumPy spells it
    std::int64_t itemsize;
    std::uint8_t code;  // DLPack's
};

class DeviceArray {
  public:
    DeviceArray(std::int64_t n, const py::object& dtype, int device);

    std::int64_t n() const { return n_; }
    std::int64_t bytes() const { return n_ * dtype_->itemsize; }
    const DeviceDtype& dtype() const { return *dtype_; }
    int device() const { return memory_->device.ordinal; }
    // The number of arrays and tensors of other libraries that hold the memory.
    std::int64_t holders() const { return memory_.use_count(); }
    const std::shared_ptr<cuda::Memory>& held() const { return memory_; }
    cuda::Memory& memory() const { return *memory_; }
    std::size_t offset() const { return offset_; }
    void* data() const { return reinterpret_cast<void*>(memory_->at + offset_); }

    DeviceArray part(const py::slice& which) const;
    DeviceArray view(const py::object& dtype) const;
    void fill_with_zeros();
    void copy_from(const py::object& source);
    void copy_to(const py::object& out) const;
    py::array to_host() const;
    py::capsule to_dlpack(const std::optional<std::intptr_t>& stream, const py::object& max_version,
                          const py::object& dl_device, const py::object& copy) const;

    bool writeable = true;

  private:
    void require_writeable(const char* what) const;
    cuda::Address address() const { return memory_->at + offset_; }
    template <class Body>
    void run(const CallersStreams& streams, const Body& body) const;

    std::shared_ptr<cuda::Memory> memory_;
    std::size_t offset_ = 0;
    std::int64_t n_;
    const DeviceDtype* dtype_;
};

}  // namespace fedcore::bindings

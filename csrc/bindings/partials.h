// Where a call leaves what each block adds to its sums of squares.
#pragma once

#include <vector>

#include "bindings/arrays.h"

namespace fedcore::bindings {

// The caller's float64[blocks, k]; or, where that is None, memory of the call's own, which a device has itself.
class Partials {
  public:
    // Behind all other arrays of the call, as every output.
    Partials(Arrays& arrays, const py::object& given, std::int64_t blocks, std::int64_t k)
        : own_(given.is_none() && !arrays.on_device() ? blocks * k : 0),
          data_(!given.is_none() ? arrays.written_numbers(given, {"partials"}, blocks * k)
                : own_.empty()   ? nullptr
                                 : own_.data()) {}
    Partials(const Partials&) = delete;
    Partials& operator=(const Partials&) = delete;

    double* data() const { return data_; }

  private:
    std::vector<double> own_;
    double* data_;
};

}  // namespace fedcore::bindings

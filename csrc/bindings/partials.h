// Memory for each block's share of a call's sums of squares.
#pragma once

#include <vector>

#include "bindings/arrays.h"

namespace fedcore::bindings {

// The caller's float64[blocks, k] or, for None, temporary memory; a device has its own.
class Partials {
  public:
    // After all other arrays of the call, as all outputs.
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

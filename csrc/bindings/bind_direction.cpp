#include <string>

#include "base/float_mode.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/cuda/kernels.h"
#include "kernels/direction.h"

namespace fedcore::bindings {
namespace {

// The vector of a term, or null if the coefficient is 0.
const float* counted(Arrays& arrays, const py::object& vector, const char* name, const char* factor, float coefficient,
                     std::int64_t n) {
    if (vector.is_none() && coefficient != 0)
        raise("ArrayError",
              std::string(name) + ": expected float32[" + std::to_string(n) + "] where " + factor + " != 0, got None");
    if (vector.is_none()) return nullptr;
    const float* data = arrays.input<float>(vector, {name}, n).data;
    return coefficient == 0 ? nullptr : data;
}

void direction_step(const py::object& y, const py::object& grad, double lr, double a, double b, double mu,
                    double weight_decay, const py::object& grad_prev, const py::object& offset, const py::object& x) {
    const IeeeMode mode;  // because coefficients are rounded here, and a flushing caller would lose subnormal ones
    Arrays arrays(Devices::any);
    const auto gradient = arrays.input<float>(grad, {"grad"});
    const std::int64_t n = gradient.n;
    LocalStep step{gradient.data, nullptr, nullptr, nullptr, 0, 0, 0, 0, 0};
    step.lr = static_cast<float>(lr);
    step.a = static_cast<float>(a);
    step.b = static_cast<float>(b);
    step.mu = static_cast<float>(mu);
    step.weight_decay = static_cast<float>(weight_decay);
    step.grad_prev = counted(arrays, grad_prev, "grad_prev", "b", step.b, n);
    step.offset = offset.is_none() ? nullptr : arrays.input<float>(offset, {"offset"}, n).data;
    step.x = counted(arrays, x, "x", "mu", step.mu, n);
    const auto model = arrays.output<float>(y, {"y"}, n);
    run_where_arrays_lie(
        arrays, [&] { fedcore::direction_step(step, model.data, n); },
        [&](cuda::Queue& queue) { cuda::direction_step(queue, step, model.data, n); });
}

}  // namespace

void bind_direction(py::module_& module) {
    module.def("direction_step", &direction_step, py::arg("y"), py::arg("grad"), py::kw_only(), py::arg("lr"),
               py::arg("a") = 1.0, py::arg("b") = 0.0, py::arg("mu") = 0.0, py::arg("weight_decay") = 0.0,
               py::arg("grad_prev") = py::none(), py::arg("offset") = py::none(), py::arg("x") = py::none());
}

}  // namespace fedcore::bindings

#include <vector>

#include "base/blocks.h"
#include "base/float_mode.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/partials.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/cuda/kernels.h"
#include "kernels/optimizer.h"

namespace fedcore::bindings {
namespace {

double optimizer_step(const py::object& v, const py::object& m, const py::object& s, const py::object& x, double from_m,
                      double from_v, double from_s, double from_square, bool yogi, double tau, double gamma,
                      const py::object& m_out, const py::object& s_out, const py::object& x_out,
                      const py::object& partials) {
    const IeeeMode mode;  // because coefficients are rounded here, and a flushing caller would lose subnormal ones
    if (s.is_none() != s_out.is_none()) raise("ArrayError", "s_out: expected an array exactly where s is one");
    const bool has_second = !s.is_none();
    const OptimizerStep step{!has_second ? Second::none
                             : yogi      ? Second::yogi
                                         : Second::decay,
                             static_cast<float>(from_m),
                             static_cast<float>(from_v),
                             static_cast<float>(from_s),
                             static_cast<float>(from_square),
                             static_cast<float>(tau),
                             static_cast<float>(gamma)};
    Arrays arrays(Devices::any);
    const auto direction = arrays.input<float>(v, {"v"});
    const std::int64_t n = direction.n;
    const auto first = arrays.input<float>(m, {"m"}, n);
    const auto second = has_second ? arrays.input<float>(s, {"s"}, n) : Span<const float>{nullptr, n, kNothing};
    const auto model = arrays.input<float>(x, {"x"}, n);
    OptimizerOutputs to{};
    to.m = arrays.output<float>(m_out, {"m_out"}, n, first.number).data;
    if (has_second) to.s = arrays.output<float>(s_out, {"s_out"}, n, second.number).data;
    to.x = arrays.output<float>(x_out, {"x_out"}, n, model.number).data;
    const OptimizerInputs from{direction.data, first.data, second.data, model.data};
    const Partials shares(arrays, partials, block_count(n), 1);
    double square = 0;
    run_where_arrays_lie(
        arrays, [&] { square = fedcore::optimizer_step(step, from, to, n, shares.data()); },
        [&](cuda::Queue& queue) { square = cuda::optimizer_step(queue, step, from, to, n, shares.data()); });
    return square;
}

}  // namespace

void bind_optimizer(py::module_& module) {
    module.def("optimizer_step", &optimizer_step, py::arg("v"), py::arg("m"), py::arg("s"), py::arg("x"), py::kw_only(),
               py::arg("from_m"), py::arg("from_v"), py::arg("from_s") = 1.0, py::arg("from_square") = 1.0,
               py::arg("yogi") = false, py::arg("tau") = 0.0, py::arg("gamma"), py::arg("m_out"), py::arg("s_out"),
               py::arg("x_out"), py::arg("partials") = py::none());
}

}  // namespace fedcore::bindings

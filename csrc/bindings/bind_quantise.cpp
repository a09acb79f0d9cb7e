#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/quantised_rows.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/cuda/kernels.h"
#include "kernels/quantise.h"

namespace fedcore::bindings {
namespace {

void quantise(const py::object& x, const std::string& codec_name, const py::object& codes, const py::object& scales,
              std::optional<std::uint64_t> seed, std::uint64_t row, std::int64_t first) {
    const Codec codec = codec_of(codec_name);
    Arrays arrays(Devices::any);
    const auto from = arrays.input<float>(x, {"x"});
    const AnySpan to = arrays.output(codes, {"codes"}, dtypes_of(codec), from.n);
    float* scale = nullptr;
    if (has_scales(codec, scales, {"scales"}))
        scale = arrays.output<float>(scales, {"scales"}, scale_count(from.n)).data;
    const DitherKey key{seed.value_or(0), row, checked_first(first, from.n)};
    const DitherKey* const dither = seed.has_value() ? &key : nullptr;
    run_where_arrays_lie(
        arrays, [&] { fedcore::quantise(from.data, codec, dither, from.n, to.data, scale); },
        [&](cuda::Queue& queue) { cuda::quantise(queue, from.data, codec, dither, from.n, to.data, scale); });
}

void dequantise(const py::object& codes, const py::object& scales, const std::string& codec_name,
                const py::object& out) {
    const Codec codec = codec_of(codec_name);
    Arrays arrays(Devices::any);
    const AnySpan from = arrays.input(codes, {"codes"}, dtypes_of(codec));
    const float* scale = nullptr;
    if (has_scales(codec, scales, {"scales"}))
        scale = arrays.input<float>(scales, {"scales"}, scale_count(from.n)).data;
    const auto to = arrays.output<float>(out, {"out"}, from.n);
    run_where_arrays_lie(
        arrays, [&] { fedcore::dequantise(from.data, scale, codec, from.n, to.data); },
        [&](cuda::Queue& queue) { cuda::dequantise(queue, from.data, scale, codec, from.n, to.data); });
}

}  // namespace

void bind_quantise(py::module_& module) {
    module.def("quantise", &quantise, py::arg("x"), py::arg("codec"), py::arg("codes"), py::arg("scales"),
               py::arg("seed"), py::arg("row"), py::arg("first"));
    module.def("dequantise", &dequantise, py::arg("codes"), py::arg("scales"), py::arg("codec"), py::arg("out"));
}

}  // namespace fedcore::bindings

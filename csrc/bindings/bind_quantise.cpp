#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/native_call.h"
#include "kernels/quantise.h"

namespace fedcore::bindings {
namespace {

Codec codec_of(const std::string& name) {
    if (name == "bf16") return Codec::bf16;
    if (name == "f16") return Codec::f16;
    if (name != "int8") raise("UnknownNameError", "codec: expected bf16, f16 or int8, got " + name);
    return Codec::int8;
}

// The dtypes that a codec's codes may come in: as bits, or as the numbers that the bits stand for.
const Dtypes& dtypes_of(Codec codec) {
    static const Dtypes kDue[] = {{"uint16", "bfloat16"}, {"uint16", "float16"}, {"int8"}};
    return kDue[static_cast<int>(codec)];
}

bool has_scales(Codec codec, const py::object& scales) {
    if ((codec == Codec::int8) == scales.is_none())
        raise("ArrayError", "scales: expected an array exactly where the codec is int8");
    return codec == Codec::int8;
}

void quantise(const py::object& x, const std::string& codec_name, const py::object& codes, const py::object& scales,
              std::optional<std::uint64_t> seed, std::uint64_t row) {
    const Codec codec = codec_of(codec_name);
    Arrays arrays;
    const auto from = arrays.input<float>(x, {"x"});
    const AnySpan to = arrays.output(codes, {"codes"}, dtypes_of(codec), from.n);
    float* scale = nullptr;
    if (has_scales(codec, scales))
        scale = arrays.output<float>(scales, {"scales"}, (from.n + kCodeBlock - 1) / kCodeBlock).data;
    const NativeCall call;  // reads the row once: milliseconds
    fedcore::quantise(from.data, codec, {seed.has_value(), seed.value_or(0), row}, from.n, to.data, scale);
}

void dequantise(const py::object& codes, const py::object& scales, const std::string& codec_name,
                const py::object& out) {
    const Codec codec = codec_of(codec_name);
    Arrays arrays;
    const AnySpan from = arrays.input(codes, {"codes"}, dtypes_of(codec));
    const float* scale = nullptr;
    if (has_scales(codec, scales))
        scale = arrays.input<float>(scales, {"scales"}, (from.n + kCodeBlock - 1) / kCodeBlock).data;
    const auto to = arrays.output<float>(out, {"out"}, from.n);
    const NativeCall call;  // reads the codes once: milliseconds
    fedcore::dequantise(from.data, scale, codec, from.n, to.data);
}

}  // namespace

void bind_quantise(py::module_& module) {
    module.def("quantise", &quantise, py::arg("x"), py::arg("codec"), py::arg("codes"), py::arg("scales"),
               py::arg("seed"), py::arg("row"));
    module.def("dequantise", &dequantise, py::arg("codes"), py::arg("scales"), py::arg("codec"), py::arg("out"));
}

}  // namespace fedcore::bindings

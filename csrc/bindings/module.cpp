#include "bindings/bind.h"

PYBIND11_MODULE(_core, module) {
    using namespace fedcore::bindings;
    module.doc() = "fedcore's native kernels; call them through fedcore.kernels.";
    bind_aggregate(module);
    bind_direction(module);
    bind_exchange(module);
    bind_mix(module);
    bind_norms(module);
    bind_quantise(module);
    bind_runtime(module);
}

#include "bindings/bind.h"

PYBIND11_MODULE(_core, module) {
    using namespace fedcore::bindings;
    module.doc() = "fedcore's native code; call it through fedcore.kernels and fedcore.sampling.";
    bind_aggregate(module);
    bind_direction(module);
    bind_exchange(module);
    bind_mix(module);
    bind_norms(module);
    bind_quantise(module);
    bind_runtime(module);
    bind_sampling(module);
}

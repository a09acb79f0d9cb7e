#include "bindings/bind.h"

PYBIND11_MODULE(_core, module) {
    using namespace fedcore::bindings;
    module.doc() = "fedcore's native code; call it through fedcore.kernels, fedcore.sampling and fedcore.store.";
    bind_aggregate(module);
    bind_checksum(module);
    bind_client_index(module);
    bind_columns(module);
    bind_combine(module);
    bind_copy(module);
    bind_devices(module);
    bind_direction(module);
    bind_exact(module);
    bind_exchange(module);
    bind_mix(module);
    bind_norms(module);
    bind_optimizer(module);
    bind_plain_tensors(module);
    bind_plain_updates(module);
    bind_quantise(module);
    bind_runtime(module);
    bind_sampling(module);
}

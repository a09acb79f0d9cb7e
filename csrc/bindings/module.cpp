#include "bindings/bind.h"
#include "cuda/driver.h"

PYBIND11_MODULE(_core, module, pybind11::mod_gil_not_used()) {
    using namespace fedcore::bindings;
    module.doc() = "fedcore's native code; call it through fedcore.kernels, fedcore.sampling and fedcore.store.";
#ifdef Py_GIL_DISABLED
    fedcore::cuda::refuse_devices(
        "arrays on CUDA devices need a Python with the GIL, which guards the lists of their users");
#endif
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
    bind_robust(module);
    bind_runtime(module);
    bind_sampling(module);
}

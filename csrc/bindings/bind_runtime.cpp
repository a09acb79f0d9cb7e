#include "base/isa.h"
#include "base/pool.h"
#include "bindings/bind.h"

namespace fedcore::bindings {

void bind_runtime(py::module_& module) {
    module.def("threads", &threads);
    module.def("set_threads", &set_threads, py::arg("count"));
    module.def("isa", [] { return name(active_isa()); });
    module.def("best_isa", [] { return name(best_isa()); });
    module.attr("version") = FEDCORE_VERSION;
    module.attr("compiler") = __VERSION__;
}

}  // namespace fedcore::bindings

// The functions that module.cpp calls, one a file; each adds functions to the module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

namespace fedcore::bindings {

namespace py = pybind11;

void bind_aggregate(py::module_& module);
void bind_checksum(py::module_& module);
void bind_client_index(py::module_& module);
void bind_columns(py::module_& module);
void bind_combine(py::module_& module);
void bind_copy(py::module_& module);
void bind_devices(py::module_& module);
void bind_direction(py::module_& module);
void bind_exact(py::module_& module);
void bind_exchange(py::module_& module);
void bind_mix(py::module_& module);
void bind_norms(py::module_& module);
void bind_optimizer(py::module_& module);
void bind_plain_tensors(py::module_& module);
void bind_plain_updates(py::module_& module);
void bind_quantise(py::module_& module);
void bind_robust(py::module_& module);
void bind_runtime(py::module_& module);
void bind_sampling(py::module_& module);

}  // namespace fedcore::bindings

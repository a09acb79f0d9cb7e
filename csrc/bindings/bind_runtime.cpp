#include "base/float_mode.h"
#include "base/isa.h"
#include "base/pool.h"
#include "bindings/bind.h"
#include "bindings/exported_array.h"
#include "cuda/image.h"

namespace fedcore::bindings {
namespace {

void set_thread_count(std::int64_t count) {
    check_range("count", count, 1, kMostThreads);
    set_threads(static_cast<int>(count));
}

// in_ieee_mode(function, *args, **kwargs): calls the function. It uses CPython's call protocol, because every call of
// the package's functions passes through it.
PyObject* in_ieee_mode(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "in_ieee_mode: the function is missing");
        return nullptr;
    }
    const IeeeMode mode;
    return PyObject_Vectorcall(arguments[0], arguments + 1, static_cast<std::size_t>(count - 1), names);
}

PyMethodDef methods[] = {{"in_ieee_mode", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&in_ieee_mode)),
                          METH_FASTCALL | METH_KEYWORDS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_runtime(py::module_& module) {
    module.def("threads", &threads);
    module.def("set_threads", &set_thread_count, py::arg("count"));
    if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
    module.def("isa", [] { return name(active_isa()); });
    module.def("best_isa", [] { return name(best_isa()); });
    module.attr("version") = FEDCORE_VERSION;
    module.attr("compiler") = __VERSION__;
    module.attr("cuda_targets") = cuda::image().targets;
    module.attr("cuda_missing") = cuda::image().missing;
}

}  // namespace fedcore::bindings

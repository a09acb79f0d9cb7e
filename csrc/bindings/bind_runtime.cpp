#include "base/float_mode.h"
#include "base/isa.h"
#include "base/pool.h"
#include "base/residency.h"
#include "bindings/bind.h"
#include "bindings/exported_array.h"
#include "bindings/without_gil.h"
#include "cuda/image.h"

namespace fedcore::bindings {
namespace {

void set_thread_count(std::int64_t count) {
    check_range("count", count, 1, kMostThreads);
    set_threads(static_cast<int>(count));
}

PyObject* letting_go = nullptr;  // a Python function, which lives as long as the process

void call_letting_go() {
    const WithGil scope;
    py::reinterpret_borrow<py::function>(letting_go)();
}

// Without a limit (0), `function` is never called. Kernels call it between two pieces of work.
void limit_residency(std::int64_t bytes, const py::typing::Callable<py::object()>& function) {
    check_range("bytes", bytes, 0);
    if (letting_go == nullptr) letting_go = py::object(function).release().ptr();
    let_go.store(&call_letting_go);
    resident_limit.store(bytes);
}

void count_bytes(std::int64_t bytes) {
    if (const std::int64_t limit = resident_limit.load()) count_traffic(bytes, limit);
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
                          METH_FASTCALL | METH_KEYWORDS,
                          "in_ieee_mode(function: collections.abc.Callable[..., typing.Any], *args: typing.Any, "
                          "**kwargs: typing.Any) -> typing.Any"},
                         {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_runtime(py::module_& module) {
    module.def("threads", &threads);
    module.def("set_threads", &set_thread_count, py::arg("count"));
    if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
    module.def("limit_residency", &limit_residency, py::arg("bytes"), py::arg("function"));
    module.def("resident_limit", [] { return resident_limit.load(); });
    module.def("count_bytes", &count_bytes, py::arg("bytes"));
    module.def("isa", [] { return name(active_isa()); });
    module.def("best_isa", [] { return name(best_isa()); });
    module.attr("version") = FEDCORE_VERSION;
    module.attr("compiler") = __VERSION__;
    module.attr("cuda_targets") = cuda::image().targets;
    module.attr("cuda_missing") = cuda::image().missing;
}

}  // namespace fedcore::bindings

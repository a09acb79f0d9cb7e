#include <pybind11/numpy.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/client_id.h"
#include "bindings/registered.h"
#include "kernels/norms.h"

namespace fedcore::bindings {
namespace {

// The fields of fedcore.Update, in order; a test compares them.
enum At { kClient, kValue, kSteps, kExamples, kLr, kControl, kCount, kRound, kKind, kKeep, kWeight, kLoss, kUpdateId };

// A plain int within 1..most; else 0.
double whole(PyObject* object, double most) {
    if (!PyLong_CheckExact(object)) return 0;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0 && value >= 1 && static_cast<double>(value) <= most ? static_cast<double>(value) : 0;
}

// `sent` for None or the same number; if clients may choose rates, a plain float within (0, most]; else 0.
double rate(PyObject* object, double sent, bool own, double most) {
    if (object == Py_None) return sent;
    if (!PyFloat_CheckExact(object)) return 0;
    const double value = PyFloat_AS_DOUBLE(object);
    if (!own) return value == sent ? sent : 0;
    return value > 0 && value <= most ? value : 0;
}

// A model as a plain NumPy vector of n float32: the array, or torch's NumPy view of a tensor; else null.
py::object plain_model(PyObject* model, std::int64_t n) {
    if (is_plain_vector(model, n)) return py::reinterpret_borrow<py::object>(model);
    py::object view = view_of_torch(model);
    return view && is_plain_vector(view, n) ? view : py::object();
}

// A plain int within oldest..newest, or `absent` for None; else kNoRound.
constexpr std::int64_t kNoRound = -2;

std::int64_t round_of(PyObject* object, std::int64_t oldest, std::int64_t newest, std::int64_t absent) {
    if (object == Py_None) return absent;
    if (!PyLong_CheckExact(object)) return kNoRound;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0 && value >= oldest && value <= newest ? value : kNoRound;
}

bool is_model(PyObject* kind) {
    return PyUnicode_CheckExact(kind) && PyUnicode_CompareWithASCIIString(kind, "model") == 0;
}

py::list list_of(std::vector<py::object>& objects) {
    py::list list(objects.size());
    for (std::size_t i = 0; i < objects.size(); ++i)
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), objects[i].release().ptr());
    return list;
}

// Whether all numbers differ; reorders them.
bool are_different(std::vector<std::int64_t>& numbers) {
    if (!std::is_sorted(numbers.begin(), numbers.end())) std::sort(numbers.begin(), numbers.end());
    return std::adjacent_find(numbers.begin(), numbers.end()) == numbers.end();
}

// Whether an optional loss is a plain float >= 0 and not infinite.
bool is_loss(PyObject* object) {
    if (object == Py_None) return true;
    return PyFloat_CheckExact(object) && PyFloat_AS_DOUBLE(object) >= 0 && std::isfinite(PyFloat_AS_DOUBLE(object));
}

// Clients, models, and the columns of steps, examples, distances and rounds.
using Objects = py::typing::List<py::object>;
using Columns = py::typing::Optional<py::typing::Tuple<Objects, Objects, py::array_t<double>, py::array_t<double>,
                                                       py::array_t<double>, py::array_t<std::int64_t>>>;

// Reads a list of updates at once, if each is of the usual form: a model as a float32 vector of n elements, of NumPy or
// torch, from one draw of a registered client, of a round within oldest..newest, without a control or an id, and with a
// valid loss or none. A missing round is `absent`, or unusual if that is kNoRound. Unless `repeats`, the clients must
// differ. Otherwise returns None, and Python reads the updates one by one and reports errors. This saves time on small
// models, for which reading takes most of a round. Missing numbers of examples are NaN.
Columns read_plain_updates(const py::object& updates, const py::handle& type, const Registered& index, std::int64_t n,
                           double lr, double max_steps, double max_examples, bool own_rates, double max_lr,
                           std::int64_t oldest, std::int64_t newest, std::int64_t absent, bool repeats) {
    const bool named = PyType_Check(type.ptr()) &&
                       PyType_HasFeature(reinterpret_cast<PyTypeObject*>(type.ptr()), Py_TPFLAGS_TUPLE_SUBCLASS);
    if (!named) raise("ArrayError", "type: expected a type of named tuples");
    const py::tuple listed = items_of(updates, "updates");
    const auto k = static_cast<py::ssize_t>(listed.size());
    std::vector<py::object> clients, ys;
    clients.reserve(static_cast<std::size_t>(k));
    ys.reserve(static_cast<std::size_t>(k));
    py::array_t<double> steps(k), examples(k), distances(k);
    py::array_t<std::int64_t> starts(k);
    std::int64_t* const start = starts.mutable_data();
    double *const step = steps.mutable_data(), *const example = examples.mutable_data(),
                  *const distance = distances.mutable_data();
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(k));
    for (py::ssize_t i = 0; i < k; ++i) {
        PyObject* update = PyTuple_GET_ITEM(listed.ptr(), i);
        if (reinterpret_cast<PyObject*>(Py_TYPE(update)) != type.ptr() || PyTuple_GET_SIZE(update) != kUpdateId + 1)
            return py::none();
        const auto field = [update](At which) { return PyTuple_GET_ITEM(update, which); };
        const bool counted = field(kExamples) != Py_None;
        const double done = whole(field(kSteps), max_steps);
        const double held = counted ? whole(field(kExamples), max_examples) : 1;
        const double rate_used = rate(field(kLr), lr, own_rates, max_lr);
        start[i] = round_of(field(kRound), oldest, newest, absent);
        const bool plain = done > 0 && held > 0 && rate_used > 0 && std::isfinite(1 / (rate_used * done)) &&
                           whole(field(kCount), 1) == 1 && field(kControl) == Py_None && start[i] != kNoRound &&
                           is_model(field(kKind)) && field(kWeight) == Py_None && is_loss(field(kLoss)) &&
                           field(kUpdateId) == Py_None;
        if (!plain) return py::none();
        py::object model = plain_model(field(kValue), n);
        if (!model) return py::none();
        {
            const OneThread scope(index);
            numbers[i] = number_of(index, field(kClient));
        }
        if (numbers[i] == kNone) return py::none();
        clients.push_back(py::reinterpret_borrow<py::object>(field(kClient)));
        ys.push_back(std::move(model));
        step[i] = done;
        example[i] = counted ? held : std::numeric_limits<double>::quiet_NaN();
        distance[i] = rate_used * done;
    }
    if (!repeats && !are_different(numbers)) return py::none();
    return py::make_tuple(list_of(clients), list_of(ys), steps, examples, distances, starts);
}

// Copies a vector of float32 and returns its squared norm, which is not finite if the vector is not.
double copy_measured(const py::array& source, const py::array& out) {
    const auto n = static_cast<std::int64_t>(out.size());
    if (!is_plain_vector(source, n) || !is_plain_vector(out, n) || !out.writeable())
        raise("ArrayError", "out: expected two float32 vectors of one length");
    auto* const copy = static_cast<float*>(const_cast<void*>(out.data()));
    std::memcpy(copy, source.data(), static_cast<std::size_t>(4 * n));
    std::vector<double> scratch(static_cast<std::size_t>(block_count(n)));
    double square = 0;
    fedcore::squared_norms(&copy, 1, n, scratch.data(), &square);
    return square;
}

}  // namespace

void bind_plain_updates(py::module_& module) {
    module.def("read_plain_updates", &read_plain_updates, py::arg("updates"), py::arg("type"), py::arg("index"),
               py::arg("n"), py::arg("lr"), py::arg("max_steps"), py::arg("max_examples"), py::arg("own_rates"),
               py::arg("max_lr"), py::arg("oldest") = 0, py::arg("newest") = -1, py::arg("absent") = 0,
               py::arg("repeats") = false);
    module.def("copy_measured", &copy_measured, py::arg("source"), py::arg("out"));
}

}  // namespace fedcore::bindings

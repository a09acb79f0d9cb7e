#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/client_id.h"
#include "bindings/registered.h"
#include "kernels/norms.h"
#include "kernels/quantise.h"

namespace fedcore::bindings {
namespace {

// The fields of fedcore.Update, in order; a test compares them.
enum At { kClient, kValue, kSteps, kExamples, kLr, kControl, kCount, kRound, kKind, kKeep, kWeight, kLoss, kUpdateId };

// Whether an object is an integer of NumPy, or a float of it.
bool is_of_numpy(PyObject* object, bool is_float) {
    const std::string_view type = Py_TYPE(object)->tp_name;
    if (PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_HEAPTYPE)) return false;  // made in Python, with any name
    return is_float ? type.rfind("numpy.float", 0) == 0
                    : type.rfind("numpy.int", 0) == 0 || type.rfind("numpy.uint", 0) == 0;
}

// A plain int below 2^53, or a plain float that is finite, or NumPy's, of at least 0; else -1.
double amount(PyObject* object, bool is_whole = false) {
    const bool is_int = PyLong_CheckExact(object) || is_of_numpy(object, false);
    if (!is_int && (is_whole || !(PyFloat_CheckExact(object) || is_of_numpy(object, true)))) return -1;
    const double value = PyFloat_AsDouble(object);
    if (value == -1) PyErr_Clear();
    return value >= 0 && (is_int ? value < 0x1p53 : std::isfinite(value)) ? value : -1;
}

// The number of an optional amount, `absent` for None, and -1 for an unusual one.
double amount_or(PyObject* object, double absent) {
    return object == Py_None ? absent : amount(object);
}

// An int within 1..most; else 0.
double whole(PyObject* object, double most) {
    const double value = amount(object, true);
    return value >= 1 && value <= most ? value : 0;
}

// `sent` for None or the same number in float32; if clients may choose rates, a float within (0, most]; else 0.
double rate(PyObject* object, double sent, bool own, double most) {
    const double value = amount_or(object, sent);
    if (own) return value > 0 && value <= most ? value : 0;
    return std::abs(value - sent) <= 1e-6 * sent ? sent : 0;
}

// A view of a model that is a NumPy vector of n float32, their bytes or a tensor of torch; else null. Its form stays as
// it is if the caller changes the model's.
py::object plain_model(PyObject* model, std::int64_t n) {
    if (PyBytes_CheckExact(model) && PyBytes_GET_SIZE(model) == 4 * n) {
        py::array_t<float> view(n, reinterpret_cast<const float*>(PyBytes_AS_STRING(model)), model);
        array_proxy(view.ptr())->flags &= ~npy_api::NPY_ARRAY_WRITEABLE_;
        return std::move(view);
    }
    return vector_over(py::reinterpret_borrow<py::object>(model), {n}, n, py::dtype::of<float>());
}

// An int within oldest..newest, or `absent` for None; else kNoRound.
constexpr std::int64_t kNoRound = -2;

std::int64_t round_of(PyObject* object, std::int64_t oldest, std::int64_t newest, std::int64_t absent) {
    if (object == Py_None) return absent;
    const double value = amount(object, true);
    const bool is_known = value >= static_cast<double>(oldest) && value <= static_cast<double>(newest);
    return is_known ? static_cast<std::int64_t>(value) : kNoRound;
}

// What a vector is; `kOther` for any other object.
enum Form : std::int64_t { kModel, kDelta, kGradient, kOther };
constexpr const char* kForms[] = {"model", "delta", "gradient"};

Form form_of(PyObject* kind) {
    int form = PyUnicode_CheckExact(kind) ? kModel : kOther;
    while (form < kOther && PyUnicode_CompareWithASCIIString(kind, kForms[form]) != 0) ++form;
    return static_cast<Form>(form);
}

// Whether all numbers differ; reorders them.
bool are_different(std::vector<std::int64_t>& numbers) {
    if (!std::is_sorted(numbers.begin(), numbers.end())) std::sort(numbers.begin(), numbers.end());
    return std::adjacent_find(numbers.begin(), numbers.end()) == numbers.end();
}

// Clients and vectors; rows of steps, examples or weights, distances and inverse distances; rows of the examples'
// sources, rounds, orders and forms.
using Objects = py::typing::List<py::object>;
using Columns = py::typing::Tuple<Objects, Objects, py::array_t<double>, py::array_t<std::int64_t>>;
// The entries of `known`, whether all models may wait, whether all updates have examples, and the bytes of the models
// as sent.
using Reading = py::typing::Optional<py::typing::Tuple<Objects, py::bool_, py::bool_, py::int_>>;
using Clients = py::typing::Set<py::object>;
using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

// The server's rate, the most steps and examples, whether clients choose rates and the greatest one, the oldest and the
// newest round, the round of an update that names none, whether a client may send several updates, and whether updates
// may have weights; then whether all elements of a model are parameters.
using Limits =
    std::tuple<double, double, double, bool, double, std::int64_t, std::int64_t, std::int64_t, bool, bool, bool>;

constexpr std::int64_t kMostElements = std::int64_t{1} << 48;

const Registered& registered(const py::object& index) {
    if (!py::isinstance<Registered>(index)) raise("ArrayError", "index: expected a ClientIndex");
    return index.cast<const Registered&>();
}

// Whether a number is below zero in every floating-point mode, also if the mode reads subnormal numbers as zero.
bool is_negative(float element) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &element, sizeof bits);
    return bits > 0x80000000u && bits <= 0xff800000u;
}

// Squared norms from here on are left to the fold, which may reject the update.
constexpr double kUsual = 1e30;

using py::detail::array_descriptor_proxy;
using py::detail::array_proxy;
using py::detail::npy_api;

// A tensor of the layout.
struct Part {
    py::object name;
    std::vector<py::ssize_t> shape;
    std::int64_t start, size;
    bool is_numbered;  // whether its name is its index
};

// Copies a tensor of float32, float16 or (of torch) bfloat16, of this shape and in C order, as float32. Returns its
// bytes, or -1 for any other object.
std::int64_t copy_tensor(py::object tensor, const std::vector<py::ssize_t>& shape, std::int64_t n, float* to) {
    const py::object bits = bits_of_torch(tensor);
    const bool brain = static_cast<bool>(bits);
    if (py::object view = brain ? bits : view_of_torch(tensor, false)) tensor = view;
    if (!is_plain_array(tensor, shape)) return -1;
    const auto* const array = array_proxy(tensor.ptr());
    const auto* const dtype = array_descriptor_proxy(array->descr);
    constexpr int kHalf = 23;
    if (!brain && dtype->type_num == npy_api::NPY_FLOAT_)
        return std::memcpy(to, array->data, static_cast<std::size_t>(4 * n)), 4 * n;
    if (!brain && dtype->type_num != kHalf) return -1;
    fedcore::dequantise(array->data, nullptr, brain ? Codec::bf16 : Codec::f16, n, to);
    return 2 * n;
}

// The updates of an open round that are of the usual form: a model as a float32 vector of n elements, of NumPy or
// torch, from one draw of a registered client, of a round within oldest..newest, without a control or an id, with a
// valid loss and weight or none. A missing round is `absent`, or unusual if that is kNoRound. The elements in the
// `nonnegative` ranges must not be negative. Python reads other updates one by one and reports errors. This saves time
// on small models, for which reading takes most of a round.
//
// A model may wait for the fold if the caller leaves it unchanged: in every case (`may_hold`), by `keep`, because it is
// immutable, or because the server owns its memory (`owns`). A copy of at most `copied` bytes may wait too. With that
// limit, a model may also be a vector of 16-bit floats. A model may be a dict of tensors with the names and shapes of
// `parts`, or a list of them if the names are its indices: of 16-bit floats too if it is copied, else it is read as a
// list of vectors. A vector may also be the difference to the open round's model, or a gradient, where no buffers are.
class PlainUpdates {
  public:
    PlainUpdates(py::object type, py::object index, std::int64_t n, const Limits& limits, Ranges nonnegative,
                 Objects parts, std::int64_t copied, bool may_hold, py::object owns)
        : type_(std::move(type)),
          kept_index_(std::move(index)),
          index_(registered(kept_index_)),
          n_(n),
          repeats_(std::get<8>(limits)),
          limits_(limits),
          nonnegative_(std::move(nonnegative)),
          listed_(std::move(parts)),
          copied_(copied),
          may_hold_(may_hold),
          owns_(std::move(owns)) {
        const bool named = PyType_Check(type_.ptr()) &&
                           PyType_HasFeature(reinterpret_cast<PyTypeObject*>(type_.ptr()), Py_TPFLAGS_TUPLE_SUBCLASS);
        if (!named) raise("ArrayError", "type: expected a type of named tuples");
        if (n < 0 || n > kMostElements) raise("RangeError", "n: expected 0 to 2^48");
        for (const auto& [start, stop] : nonnegative_)
            if (start < 0 || stop < start || stop > n) raise("ArrayError", "nonnegative: expected ranges within n");
    }

    // Reads the list of parts once it is needed.
    void read_parts() {
        std::vector<Part> parts;
        std::int64_t stop = 0;
        for (const py::handle part : listed_) {
            const py::tuple pair = items_of(part, "parts", 2);
            const auto [shape, size] = extents_of(pair[1]);
            const bool is_numbered = py::str(pair[0]).equal(py::str(std::to_string(parts.size())));
            parts.push_back({pair[0], shape, stop, size, is_numbered});
            stop = size < 0 || size > n_ - stop ? n_ + 1 : stop + size;
        }
        if (stop != n_ && !parts.empty()) raise("ArrayError", "parts: expected tensors with n elements in all");
        parts_ = std::move(parts);
    }

    std::size_t size() const { return entries_.size(); }

    // Adds a list of updates if all are usual, and of different clients that are neither in `known` nor in `others`;
    // `known` then has them. With `repeats`, the clients may be any, and `known` has (order, client) of each; `first`
    // is the order of the first one. `examples`: whether all updates must have a number of examples (1), none (0), all
    // or none (2), or any (-1).
    Reading add(const py::object& updates, const Clients& known, const Clients& others, int examples,
                std::int64_t first) {
        const py::tuple listed = items_of(updates, "updates");
        const auto k = static_cast<std::size_t>(listed.size());
        if (k == 0) return py::none();
        std::vector<Entry> read(k);
        std::vector<std::int64_t> numbers(k);
        std::size_t counted = 0;
        for (std::size_t i = 0; i < k; ++i) {
            PyObject* const update = PyTuple_GET_ITEM(listed.ptr(), static_cast<Py_ssize_t>(i));
            if (!read_claims(update, read[i], numbers[i])) return py::none();
            if (!repeats_ && (known.contains(read[i].client) || others.contains(read[i].client))) return py::none();
            counted += read[i].counted == 0 ? 0 : 1;
        }
        const bool all = counted == k, none = counted == 0;
        if ((examples == 1 && !all) || (examples == 0 && !none) || (examples == 2 && !all && !none)) return py::none();
        if (!repeats_ && !are_different(numbers)) return py::none();
        bool waits = true;
        std::int64_t bytes = 0;
        for (std::size_t i = 0; i < k; ++i) {
            PyObject* const update = PyTuple_GET_ITEM(listed.ptr(), static_cast<Py_ssize_t>(i));
            const bool keep = PyTuple_GET_ITEM(update, kKeep) == Py_True;
            const std::int64_t sent = read_model(PyTuple_GET_ITEM(update, kValue), keep, read[i], waits);
            if (sent < 0) return py::none();
            bytes += sent;
        }
        py::list keys(k);
        for (std::size_t i = 0; i < k; ++i) {
            read[i].order = first + static_cast<std::int64_t>(i);
            py::object key = repeats_ ? py::object(py::make_tuple(read[i].order, read[i].client)) : read[i].client;
            PyList_SET_ITEM(keys.ptr(), static_cast<Py_ssize_t>(i), key.release().ptr());
        }
        Reading answer = py::make_tuple(keys, waits, all, bytes);
        std::move(read.begin(), read.end(), std::back_inserter(entries_));
        for (const py::handle key : keys)  // if this fails, the caller drops all updates
            if (PySet_Add(known.ptr(), key.ptr()) != 0) throw py::error_already_set();
        return answer;
    }

    // The updates so far, which this object then forgets.
    Columns take() {
        const std::vector<Entry> taken = std::exchange(entries_, {});
        const auto k = static_cast<py::ssize_t>(taken.size());
        py::list clients(taken.size()), ys(taken.size());
        py::array_t<double> numbers({py::ssize_t{4}, k});
        py::array_t<std::int64_t> codes({py::ssize_t{4}, k});
        for (py::ssize_t i = 0; i < k; ++i) {
            const Entry& one = taken[static_cast<std::size_t>(i)];
            clients[static_cast<std::size_t>(i)] = one.client;
            ys[static_cast<std::size_t>(i)] = one.vector;
            const double number[] = {one.steps, one.examples, one.distance, 1 / one.distance};
            const std::int64_t code[] = {one.counted, one.start, one.order, one.form};
            for (py::ssize_t row = 0; row < 4; ++row)
                numbers.mutable_data()[row * k + i] = number[row], codes.mutable_data()[row * k + i] = code[row];
        }
        return py::make_tuple(clients, ys, numbers, codes);
    }

  private:
    struct Entry {
        py::object client;
        py::object vector;
        double steps, examples, distance;
        std::int64_t start, order, counted;  // 0 for no number of examples, 1 for one, 2 for a weight in its place
        Form form;
    };

    bool read_claims(PyObject* update, Entry& out, std::int64_t& number) const {
        if (reinterpret_cast<PyObject*>(Py_TYPE(update)) != type_.ptr() || PyTuple_GET_SIZE(update) != kUpdateId + 1)
            return false;
        const auto field = [update](At which) { return PyTuple_GET_ITEM(update, which); };
        const auto [lr, max_steps, max_examples, own_rates, max_lr, oldest, newest, absent, repeats, weighs, flat] =
            limits_;
        const bool counted = field(kExamples) != Py_None, weighted = field(kWeight) != Py_None;
        const double done = whole(field(kSteps), max_steps), held = amount_or(field(kExamples), 1);
        const double weight = amount_or(field(kWeight), held), used = rate(field(kLr), lr, own_rates, max_lr);
        out.start = round_of(field(kRound), oldest, newest, absent);
        out.form = form_of(field(kKind));
        const bool fits =
            out.form == kModel ||
            (out.start == newest && (out.form == kDelta ? nonnegative_.empty() : out.form == kGradient && flat));
        const bool plain = done > 0 && held >= 1e-12 && (!counted || held <= max_examples) && used > 0 && fits &&
                           std::isfinite(1 / (used * done)) && whole(field(kCount), 1) == 1 &&
                           field(kControl) == Py_None && out.start != kNoRound && weight >= 0 &&
                           (weighs || !weighted) && amount_or(field(kLoss), 0) >= 0 && field(kUpdateId) == Py_None;
        if (!plain) return false;
        out.client = py::reinterpret_steal<py::object>(
            is_of_numpy(field(kClient), false) ? PyNumber_Index(field(kClient)) : Py_NewRef(field(kClient)));
        if (!out.client) return PyErr_Clear(), false;
        out.steps = done;
        out.examples = weight;
        out.counted = weighted ? 2 : counted;
        out.distance = used * done;
        const OneThread scope(index_);
        number = number_of(index_, out.client);
        return number != kNone;
    }

    // Returns the bytes of the model as sent, or -1 for an unusual one. `waits` becomes false if the model must be
    // folded at once.
    std::int64_t read_model(PyObject* model, bool keep, Entry& out, bool& waits) {
        const bool small = 4 * n_ <= copied_;
        if (out.form == kGradient && (PyDict_Check(model) || PyList_Check(model) || PyTuple_Check(model))) return -1;
        const bool is_view = py::isinstance<py::array>(model) && array_proxy(model)->base != nullptr;
        const bool stays = may_hold_ || keep || PyBytes_CheckExact(model) ||
                           (is_view && (is_immutable(model) || owns_(py::handle(model)).is(py::bool_(true))));
        py::object vector = stays || !small ? plain_model(model, n_) : py::object();
        std::int64_t bytes = 4 * n_;
        if (small && !(stays && vector)) {
            py::array_t<float> copy(static_cast<py::ssize_t>(n_));
            float* const to = copy.mutable_data();
            bytes = for_parts(model, [to](const Part& part, py::object tensor) {
                return copy_tensor(std::move(tensor), part.shape, part.size, to + part.start);
            });
            if (bytes < 0) return -1;
            scratch_.resize(static_cast<std::size_t>(block_count(n_)));
            double square = 0;
            fedcore::squared_norms(&to, 1, n_, scratch_.data(), &square);
            waits = waits && square < kUsual;  // also false for a NaN
            out.vector = std::move(copy);
        } else if (vector) {
            waits = waits && stays;
            out.vector = std::move(vector);
        } else {
            py::list vectors;
            bytes = for_parts(model, [&](const Part& part, py::object tensor) -> std::int64_t {
                const py::object one = vector_over(std::move(tensor), part.shape, part.size, py::dtype::of<float>());
                if (!one || has_negative(one, part.start, part.size)) return -1;
                waits = waits && (may_hold_ || keep || is_immutable(one));
                vectors.append(one);
                return 4 * part.size;
            });
            out.vector = std::move(vectors);
            return bytes;
        }
        return has_negative(out.vector, 0, n_) ? -1 : bytes;
    }

    // Whether the elements of a model from `start` on, which are those of an array, are negative where none may be.
    bool has_negative(const py::object& array, std::int64_t start, std::int64_t size) const {
        const auto* const data = static_cast<const float*>(static_cast<void*>(array_proxy(array.ptr())->data));
        return std::any_of(nonnegative_.begin(), nonnegative_.end(), [&](const auto& range) {
            const std::int64_t first = std::clamp<std::int64_t>(range.first - start, 0, size);
            return std::any_of(data + first, data + std::clamp(range.second - start, first, size), is_negative);
        });
    }

    // Reads the tensors of a model, or its vector, by a function that returns their bytes; returns all bytes, or -1 if
    // one is unusual.
    template <class ReadPart>
    std::int64_t for_parts(PyObject* model, const ReadPart& read) {
        const bool is_list = PyList_CheckExact(model) || PyTuple_CheckExact(model);
        if (!is_list && !PyDict_CheckExact(model) && !PyODict_CheckExact(model))
            return read(Part{{}, {n_}, 0, n_, false}, py::reinterpret_borrow<py::object>(model));
        if (parts_.empty()) read_parts();
        if (parts_.empty() || PyObject_Size(model) != static_cast<Py_ssize_t>(parts_.size())) return -1;
        std::int64_t bytes = 0;
        for (const Part& part : parts_) {
            if (is_list && !part.is_numbered) return -1;
            PyObject* const tensor =
                is_list ? PySequence_GetItem(model, &part - parts_.data()) : PyObject_GetItem(model, part.name.ptr());
            if (tensor == nullptr) {
                if (!PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();
                PyErr_Clear();
                return -1;
            }
            const std::int64_t sent = read(part, py::reinterpret_steal<py::object>(tensor));
            if (sent < 0) return -1;
            bytes += sent;
        }
        return bytes;
    }

    py::object type_, kept_index_;
    const Registered& index_;
    std::int64_t n_;
    bool repeats_;
    Limits limits_;
    Ranges nonnegative_;
    Objects listed_;
    std::vector<Part> parts_;
    std::int64_t copied_;
    bool may_hold_;
    py::object owns_;
    std::vector<Entry> entries_;
    std::vector<double> scratch_;
};

}  // namespace

void bind_plain_updates(py::module_& module) {
    py::class_<PlainUpdates>(module, "PlainUpdates")
        .def(py::init<py::object, py::object, std::int64_t, const Limits&, Ranges, Objects, std::int64_t, bool,
                      py::object>(),
             py::arg("type"), py::arg("index"), py::arg("n"), py::arg("limits"), py::arg("nonnegative"),
             py::arg("parts"), py::arg("copied"), py::arg("may_hold"), py::arg("owns"))
        .def("__len__", &PlainUpdates::size)
        .def("add", &PlainUpdates::add, py::arg("updates"), py::arg("known"), py::arg("others"), py::arg("examples"),
             py::arg("first"))
        .def("take", &PlainUpdates::take);
}

}  // namespace fedcore::bindings

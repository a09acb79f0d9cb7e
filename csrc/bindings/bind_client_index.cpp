#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/little_endian.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/client_id.h"
#include "bindings/registered.h"
#include "store/blake2b.h"

namespace fedcore::bindings {
namespace {

constexpr std::int64_t kMostCounted = std::int64_t{1} << 62;

using Numbers = py::array_t<std::int64_t>;
using Id = py::typing::Union<py::int_, py::str>;
using Ids = py::typing::List<Id>;

py::object made(const ClientId& id) {
    if (!id.is_text) return py::reinterpret_steal<py::object>(PyLong_FromUnsignedLongLong(id.number));
    PyObject* text = PyUnicode_DecodeUTF8(id.text.data(), static_cast<Py_ssize_t>(id.text.size()), "strict");
    if (text == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(text);
}

SipKey read_key(const py::bytes& key) {
    const std::string_view bytes = key;
    if (bytes.size() != 16) raise("RangeError", "key: expected 16 bytes, got " + std::to_string(bytes.size()));
    return {little_endian(bytes.data()), little_endian(bytes.data() + 8)};
}

// An array that owns the vector's memory.
Numbers array_of(std::vector<std::int64_t> values) {
    auto owned = std::make_unique<std::vector<std::int64_t>>(std::move(values));
    const py::capsule owner(owned.get(), [](void* vector) { delete static_cast<std::vector<std::int64_t>*>(vector); });
    std::vector<std::int64_t>& held = *owned.release();
    return Numbers(static_cast<py::ssize_t>(held.size()), held.data(), owner);
}

std::int64_t number(const Registered& index, py::handle object) {
    const OneThread scope(index);
    return number_of(index, object);
}

Numbers numbers(const Registered& index, const py::object& clients) {
    if (py::isinstance<py::array>(clients)) {
        Arrays arrays;
        const AnySpan ids = arrays.input(clients, {"clients"}, {"uint64"});
        Numbers out(ids.n);
        const OneThread scope(index);
        for (std::int64_t i = 0; i < ids.n; ++i)
            out.mutable_data()[i] = index.number({false, static_cast<const std::uint64_t*>(ids.data)[i], {}});
        return out;
    }
    const py::tuple listed = items_of(clients, "clients");
    Numbers out(static_cast<py::ssize_t>(listed.size()));
    const OneThread scope(index);
    for (py::ssize_t i = 0; i < out.size(); ++i) out.mutable_data()[i] = number_of(index, py::object(listed[i]));
    return out;
}

// None if no client has the number.
py::typing::Optional<Id> id_of(const Registered& index, std::int64_t number) {
    const OneThread scope(index);
    if (!index.taken(number)) return py::none();
    return made(index.id_of(number));
}

// The ids of the clients with numbers in [start, stop), in order. Needs the scope of one thread.
Ids ids_in(const ClientIndex& index, std::int64_t start, std::int64_t stop) {
    Ids out;
    for (std::int64_t number = std::max<std::int64_t>(start, 0); number < std::min(stop, index.capacity()); ++number)
        if (index.taken(number)) out.append(made(index.id_of(number)));
    return out;
}

Ids ids(const Registered& index, std::int64_t start, std::int64_t stop) {
    const OneThread scope(index);
    return ids_in(index, start, stop);
}

// The numbers and ids of the clients that are listed one by one.
py::typing::Tuple<Numbers, Ids> listed(const Registered& index) {
    const OneThread scope(index);
    std::vector<std::int64_t> found;
    for (std::int64_t number = index.count(); number < index.capacity(); ++number)
        if (index.taken(number)) found.push_back(number);
    return py::make_tuple(array_of(std::move(found)), ids_in(index, index.count(), index.capacity()));
}

Numbers left(const Registered& index) {
    const OneThread scope(index);
    return array_of(index.left());
}

// Calls change() and converts its allocation errors.
template <class Change>
auto within_limits(const Change& change) {
    try {
        return change();
    } catch (const std::length_error& error) {
        raise("RangeError", std::string("clients: the limit is ") + error.what());
    }
}

std::int64_t add(Registered& index, py::handle object) {
    const OneThread scope(index);
    const ReadId id(object);
    return within_limits([&] { return id ? index.add(*id) : kNone; });
}

// Adds the clients under these numbers, each free and >= count. Returns the number of clients before the first rejected
// one.
std::int64_t add_at(Registered& index, const py::object& clients, const py::object& numbers) {
    Arrays arrays;
    const AnySpan at = arrays.input(numbers, {"numbers"}, {"int64"});
    const py::tuple listed = items_of(clients, "clients", at.n);
    const OneThread scope(index);
    index.reserve(at.n);
    for (std::int64_t i = 0; i < at.n; ++i) {
        const py::object client = listed[i];
        const ReadId id(client);
        const std::int64_t number = static_cast<const std::int64_t*>(at.data)[i];
        if (!id || number < index.count() || !within_limits([&] { return index.add_at(*id, number); })) return i;
    }
    return at.n;
}

std::int64_t remove(Registered& index, py::handle object) {
    const OneThread scope(index);
    const ReadId id(object);
    return within_limits([&] { return id ? index.remove(*id) : kNone; });
}

// The clients that one call has added; its destructor removes them again unless the call keeps them. Each is added
// separately, because the iterable of clients runs Python code in between.
class Added {
  public:
    Added(Registered& index, std::int64_t expected) : index_(index) {
        const OneThread scope(index_);
        index.reserve(expected);
        numbers_.reserve(static_cast<std::size_t>(expected));
    }
    Added(const Added&) = delete;
    Added& operator=(const Added&) = delete;
    ~Added() {
        const OneThread scope(index_);
        for (; !numbers_.empty(); numbers_.pop_back()) {
            try {  // the iterable may have removed some itself
                if (index_.taken(numbers_.back())) index_.remove(index_.id_of(numbers_.back()));
            } catch (const std::exception&) {
            }
        }
    }
    bool add(const ClientId& id) {
        if (numbers_.size() == numbers_.capacity()) numbers_.reserve(2 * numbers_.size() + 64);
        const OneThread scope(index_);
        const std::int64_t number = within_limits([&] { return index_.add(id); });
        if (number != kNone) numbers_.push_back(number);
        return number != kNone;
    }
    Numbers keep() { return array_of(std::exchange(numbers_, {})); }

  private:
    Registered& index_;
    std::vector<std::int64_t> numbers_;
};

// Returns (all numbers, None), or changes nothing and returns (None, the first id that is already registered).
py::typing::Tuple<py::typing::Optional<Numbers>, py::typing::Optional<Id>> add_all(Registered& index,
                                                                                   const py::object& clients,
                                                                                   const py::object& canonical) {
    if (py::isinstance<py::array>(clients)) {
        Arrays arrays;
        const AnySpan ids = arrays.input(clients, {"clients"}, {"uint64"});
        Added added(index, ids.n);
        for (std::int64_t i = 0; i < ids.n; ++i) {
            const ClientId id{false, static_cast<const std::uint64_t*>(ids.data)[i], {}};
            if (!added.add(id)) return py::make_tuple(py::none(), made(id));
        }
        return py::make_tuple(added.keep(), py::none());
    }
    const bool sized = PyList_Check(clients.ptr()) || PyTuple_Check(clients.ptr());
    const py::object ids = sized ? py::object(items_of(clients, {"clients"})) : clients;
    Added added(index, sized ? PyTuple_GET_SIZE(ids.ptr()) : 0);
    std::int64_t i = 0;
    for (const py::handle item : py::iter(ids)) {
        py::object known = py::reinterpret_borrow<py::object>(item);
        ReadId id(known);
        if (!id) {
            known = canonical(known);
            id = ReadId(known);
            if (!id)
                raise("UnknownClientError", Name{"clients", i}.text() + ": expected an int in 0 .. 2^64 - 1 or a str");
        }
        if (!added.add(*id)) return py::make_tuple(py::none(), known);
        ++i;
    }
    return py::make_tuple(added.keep(), py::none());
}

// A word for each stored id: an int itself, a text's digest, 0 for None.
Numbers id_words(const py::object& ids) {
    const py::tuple listed = items_of(ids, "ids");
    Numbers out(static_cast<py::ssize_t>(listed.size()));
    for (py::ssize_t i = 0; i < out.size(); ++i) {
        PyObject* id = PyTuple_GET_ITEM(listed.ptr(), i);
        Py_ssize_t size = 0;
        std::int64_t word = 0;
        if (PyLong_Check(id)) {
            word = PyLong_AsLongLong(id);
        } else if (id != Py_None) {
            const char* text = PyUnicode_AsUTF8AndSize(id, &size);
            if (text != nullptr) word = static_cast<std::int64_t>(blake2b_8({text, static_cast<std::size_t>(size)}));
        }
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        out.mutable_data()[i] = word;
    }
    return out;
}

// A function that returns a property of the index, in the scope of one thread.
auto asked(std::int64_t (ClientIndex::*property)() const) {
    return [property](const Registered& index) {
        const OneThread scope(index);
        return (index.*property)();
    };
}

}  // namespace

void bind_client_index(py::module_& module) {
    // Only for the known-answer tests.
    module.def(
        "siphash",
        [](const py::bytes& key, const py::bytes& data) { return siphash(read_key(key), std::string_view(data)); },
        py::arg("key"), py::arg("data"));
    module.def("id_words", &id_words, py::arg("ids"));
    py::class_<Registered>(module, "ClientIndex")
        .def(py::init([](const py::bytes& key, std::int64_t count) {
                 check_range("count", count, 0, kMostCounted);
                 return Registered(read_key(key), count);
             }),
             py::arg("key"), py::arg("count"))
        .def("__len__", asked(&ClientIndex::size))
        .def_property_readonly("count", asked(&ClientIndex::count))
        .def_property_readonly("whole", asked(&ClientIndex::whole))
        .def_property_readonly("capacity", asked(&ClientIndex::capacity))
        .def("number", &number, py::arg("client"))
        .def("numbers", &numbers, py::arg("clients"))
        .def("id_of", &id_of, py::arg("number"))
        .def("ids", &ids, py::arg("start"), py::arg("stop"))
        .def("listed", &listed)
        .def("left", &left)
        .def("add", &add, py::arg("client"))
        .def("add_all", &add_all, py::arg("clients"), py::arg("canonical"))
        .def("add_at", &add_at, py::arg("clients"), py::arg("numbers"))
        .def("remove", &remove, py::arg("client"));
}

}  // namespace fedcore::bindings

// The rows of an exchange, from Python.
#pragma once

#include <pybind11/stl.h>

#include <array>
#include <string>
#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/quantised_rows.h"
#include "kernels/exchange.h"

namespace fedcore::bindings {

// The parts of a fedcore.kernels.Codes, a named tuple.
struct Coded {
    Codec codec;
    py::object codes, scales;

    Coded(const py::tuple& row, Name name) {
        if (row.size() != 3) raise("ArrayError", name.text() + ": expected float32[n] or Codes, got another tuple");
        if (!py::isinstance<py::str>(row[0])) raise("ArrayError", name.text() + ".codec: expected a name");
        codec = codec_of(row[0].cast<std::string>());
        codes = row[1];
        scales = row[2];
    }
};

inline Name part(Name name, const char* what) {
    return {name.argument, name.index, name.second, what};
}

// The numbers of the call's arrays that hold a row.
struct RowArrays {
    std::size_t data = kNothing, scales = kNothing;
};

inline Row read_row(Arrays& arrays, const py::object& row, Name name, std::int64_t n, RowArrays* numbers) {
    if (row.is_none()) return {Codec::f32, nullptr, nullptr};
    if (!py::isinstance<py::tuple>(row)) {
        const auto plain = arrays.input<float>(row, name, n);
        numbers->data = plain.number;
        return {Codec::f32, const_cast<float*>(plain.data), nullptr};
    }
    const Coded coded(row, name);
    const AnySpan codes = arrays.input(coded.codes, part(name, ".codes"), dtypes_of(coded.codec), n);
    numbers->data = codes.number;
    if (!has_scales(coded.codec, coded.scales, part(name, ".scales"))) return {coded.codec, codes.data, nullptr};
    const auto scales = arrays.input<float>(coded.scales, part(name, ".scales"), scale_count(n));
    numbers->scales = scales.number;
    return {coded.codec, codes.data, const_cast<float*>(scales.data)};
}

inline Row writable_row(Arrays& arrays, const py::object& row, Name name, std::int64_t n, const RowArrays& replaced) {
    if (!py::isinstance<py::tuple>(row))
        return {Codec::f32, arrays.output<float>(row, name, n, replaced.data).data, nullptr};
    const Coded coded(row, name);
    Row found{coded.codec, nullptr, nullptr};
    found.data = arrays.output(coded.codes, part(name, ".codes"), dtypes_of(coded.codec), n, replaced.data).data;
    if (has_scales(coded.codec, coded.scales, part(name, ".scales")))
        found.scales = arrays.output<float>(coded.scales, part(name, ".scales"), scale_count(n), replaced.scales).data;
    return found;
}

// uint64[k, 2]: the seed and the row of each client's rounding, of which this is a part from element `first` on. May be
// None if no new row is coded.
inline void read_keys(Arrays& arrays, const py::object& keys, std::int64_t first, std::vector<RowExchange>& rows) {
    const auto k = static_cast<std::int64_t>(rows.size());
    if (keys.is_none()) {
        for (std::int64_t i = 0; i < k; ++i)
            if (rows[i].new_row.codec != Codec::f32)
                raise("ArrayError", "keys: expected uint64[k, 2], because " + Name{"new_rows", i}.text() +
                                        " is rounded stochastically, got None");
        return;
    }
    const AnySpan found = arrays.numbers(keys, {"keys"}, {"uint64"}, 2 * k, Axes::any);
    const auto* key = static_cast<const std::uint64_t*>(found.data);
    for (std::int64_t i = 0; i < k; ++i) rows[i].key = {key[2 * i], key[2 * i + 1], first};
}

// uint64[k, block_count(n)], written: the checksums of the new rows' blocks, only for float32 rows; or None.
inline void writable_sums(Arrays& arrays, const py::object& sums, std::int64_t n, std::vector<RowExchange>& rows) {
    if (sums.is_none()) return;
    if (arrays.on_device()) raise("ArrayError", "sums: expected None, because acc is on a device, got an array");
    const auto k = static_cast<std::int64_t>(rows.size()), blocks = block_count(n);
    auto* const sum =
        static_cast<std::uint64_t*>(arrays.output(sums, {"sums"}, {"uint64"}, k * blocks, kNothing, Axes::any).data);
    for (std::int64_t i = 0; i < k; ++i) {
        if (rows[i].new_row.codec != Codec::f32)
            raise("ArrayError", "sums: expected None, because " + Name{"new_rows", i}.text() + " is not float32");
        rows[i].sums = sum + i * blocks;
    }
}

// The coefficients, in the order of fedcore.kernels.Terms: (h, r, q, row) each.
using Coefficients = std::array<double, 4>;

inline Forms read_forms(const Coefficients& row, const Coefficients& adds) {
    return {{static_cast<float>(row[0]), static_cast<float>(row[1]), static_cast<float>(row[2])},
            {adds[3], adds[1], adds[0], adds[2]}};
}

// The rows of a call of k clients; its inputs are read before its other outputs.
struct ExchangedRows {
    std::vector<RowExchange> rows;
    Forms forms;

    ExchangedRows(Arrays& arrays, std::int64_t k, std::int64_t n, const py::object& old_rows, const py::object& anchors,
                  const py::object& new_rows, const Coefficients& row, const Coefficients& adds, const py::object& keys,
                  const py::object& sums, std::int64_t first)
        : rows(k), forms(read_forms(row, adds)) {
        const py::tuple old_row = items_of(old_rows, "old_rows", k);
        const py::tuple anchor = items_of(anchors, "anchors", k);
        const py::tuple new_row = items_of(new_rows, "new_rows", k);
        std::vector<RowArrays> replaced(k);
        for (std::int64_t i = 0; i < k; ++i) {
            rows[i].old_row = read_row(arrays, old_row[i], {"old_rows", i}, n, &replaced[i]);
            const py::object added = anchor[i];
            rows[i].anchor = added.is_none() ? nullptr : arrays.input<float>(added, {"anchors", i}, n).data;
            if (forms.row.q == 0 && forms.adds.q == 0) rows[i].anchor = nullptr;  // because no form uses it
            forms.alone |= rows[i].anchor != nullptr && rows[i].old_row.data == nullptr;
        }
        for (std::int64_t i = 0; i < k; ++i)
            rows[i].new_row = writable_row(arrays, new_row[i], {"new_rows", i}, n, replaced[i]);
        read_keys(arrays, keys, checked_first(first, n), rows);
        writable_sums(arrays, sums, n, rows);
    }
};

}  // namespace fedcore::bindings

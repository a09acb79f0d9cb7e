// A client's mean gradient from its update, its new row, and the sum's term, for one element or a vector of elements.
// Included by the CPU's levels and by CUDA's kernels, as codes.inl is.

// The kind of a client's tile: a model, a difference, or the finished row for the sum.
enum class Given { model, difference, row };

// The forms that a loop supports: rows replaced by h with their changes summed; any row' with sums over row' and r; or
// all forms.
enum class Form { replaces, changes, general };

// row' of one or more elements.
template <class Number>
FEDCORE_SCALAR Number row_of(const RowForm& row, Number h, Number r, Number q) {
    Number made = row.h * h;
    if (row.r != 0) made = made + row.r * r;
    if (row.q != 0) made = made + row.q * q;
    return made;
}

// The sum's term for elements, in its precision.
template <Form kForm, class Number>
FEDCORE_SCALAR Number seen_of(const SumForm& adds, Number stored, Number r, Number h, Number q) {
    Number change = adds.row * stored + adds.r * r;
    if (kForm == Form::general && adds.h != 0) change = change + adds.h * h;
    if (kForm == Form::general && adds.q != 0) change = change + adds.q * q;
    return change;
}

// h of a client's update.
template <Given kGiven, class Number>
FEDCORE_SCALAR Number gradient(Number base, Number y, float scale) {
    return kGiven == Given::model ? (base - y) * scale : kGiven == Given::difference ? -y * scale : y;
}

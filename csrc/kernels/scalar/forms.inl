// What an update says of a client's mean gradient, what its row becomes, and what the sum sees of that: of one element,
// or of a vector of them. Included by the CPU's levels and by CUDA's kernels, as codes.inl is.

// What the tile of a client is: a model, a difference, or already the row that is to be seen by the sum.
enum class Given { model, difference, row };

// How much of `Forms` a loop can do: rows that are replaced by h, what they change by being summed; any row', and sums
// that see it and r; or everything.
enum class Form { replaces, changes, general };

// row' of one or more elements.
template <class Number>
FEDCORE_SCALAR Number row_of(const RowForm& row, Number h, Number r, Number q) {
    Number made = row.h * h;
    if (row.r != 0) made = made + row.r * r;
    if (row.q != 0) made = made + row.q * q;
    return made;
}

// What the sum sees of elements, in its precision.
template <Form kForm, class Number>
FEDCORE_SCALAR Number seen_of(const SumForm& adds, Number stored, Number r, Number h, Number q) {
    Number change = adds.row * stored + adds.r * r;
    if (kForm == Form::general && adds.h != 0) change = change + adds.h * h;
    if (kForm == Form::general && adds.q != 0) change = change + adds.q * q;
    return change;
}

// h of what a client sent.
template <Given kGiven, class Number>
FEDCORE_SCALAR Number gradient(Number base, Number y, float scale) {
    return kGiven == Given::model ? (base - y) * scale : kGiven == Given::difference ? -y * scale : y;
}

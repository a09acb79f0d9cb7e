// A server optimiser's step of one element, or of a vector of them. Included by the CPU's levels and by CUDA's kernels,
// as codes.inl is; square_roots is theirs.

// The inputs of one element, and its results.
template <class Number>
struct Moments {
    Number m, s, x;
};

template <Second kSecond, class Number>
FEDCORE_SCALAR Moments<Number> turned(const OptimizerStep& step, Number v, const Moments<Number>& from) {
    Moments<Number> to = from;
    to.m = step.from_m * from.m + step.from_v * v;
    Number u = to.m;
    if (kSecond != Second::none) {
        const Number square = v * v;
        if (kSecond == Second::decay) {
            to.s = step.from_s * from.s + step.from_square * square;
        } else {
            const Number one = Number{} + 1.0f, zero = {};
            const Number sign = (from.s > square ? one : zero) - (from.s < square ? one : zero);
            to.s = from.s - step.from_square * square * sign;
        }
        u = u / (square_roots(to.s) + step.tau);
    }
    to.x = from.x - step.gamma * u;
    return to;
}

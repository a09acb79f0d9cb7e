// Included by the CPU's levels and by CUDA's kernels, as codes.inl is.

// Whether squares neither overflowed nor lost significant digits to underflow. Zero is computed again in float64.
FEDCORE_SCALAR bool is_sound(double squares) {
    return squares > 1e-30 && squares < 1e38;
}

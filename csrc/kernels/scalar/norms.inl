// Included by the CPU's levels and by CUDA's kernels, as codes.inl is.

// Whether squares neither overflowed nor lost what counts to underflow. Zero is left to float64, which says zero.
FEDCORE_SCALAR bool is_sound(double squares) {
    return squares > 1e-30 && squares < 1e38;
}

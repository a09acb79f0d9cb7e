#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace fedcore::cuda {
namespace {

Kernel step_kernel(const float*) {
    return Kernel::server_step_f32;
}
Kernel step_kernel(const double*) {
    return Kernel::server_step_f64;
}

}  // namespace

template <class Sum>
void server_step(Queue& queue, const Step& step, const StepInputs<Sum>& in, const StepOutputs& out, std::int64_t n,
                 double* partials, double* squares) {
    queue.begin();
    const std::int64_t pieces = block_count(n), tiles = pieces * kPieceTiles;
    const bool vector = are_aligned({in.sum, in.total, in.momentum, in.control, in.x, out.v, out.total, out.x});
    const StepCall<Sum> call{step, in, out, squares_for(queue, 2, tiles), n, vector};
    if (tiles > 0) queue.launch(step_kernel(in.sum), {tiles}, &call);
    read_totals(queue, call.squares, 2, pieces, kPieceTiles, partials, squares);
}
template void server_step(Queue&, const Step&, const StepInputs<float>&, const StepOutputs&, std::int64_t, double*,
                          double*);
template void server_step(Queue&, const Step&, const StepInputs<double>&, const StepOutputs&, std::int64_t, double*,
                          double*);

double optimizer_step(Queue& queue, const OptimizerStep& step, const OptimizerInputs& in, const OptimizerOutputs& out,
                      std::int64_t n, double* partials) {
    queue.begin();
    const std::int64_t pieces = block_count(n), tiles = pieces * kPieceTiles;
    const bool vector = are_aligned({in.v, in.m, in.s, in.x, out.m, out.s, out.x});
    const OptimizerCall call{step, in, out, squares_for(queue, 1, tiles), n, vector};
    if (tiles > 0) queue.launch(behind(Kernel::optimizer_step, static_cast<int>(step.second)), {tiles}, &call);
    double square = 0;
    read_totals(queue, call.squares, 1, pieces, kPieceTiles, partials, &square);
    return square;
}

void direction_step(Queue& queue, const LocalStep& step, float* y, std::int64_t n) {
    queue.begin();
    const DirectionCall call{step, y, n, are_aligned({step.grad, step.grad_prev, step.offset, step.x, y})};
    if (n > 0) queue.launch(Kernel::direction_step, {tile_count(n)}, &call);
}

}  // namespace fedcore::cuda

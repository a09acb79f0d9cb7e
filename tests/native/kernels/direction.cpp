#include "kernels/direction.h"

#include "check.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

void try_step(int present, std::int64_t n, std::size_t first) {
    Arrays make(first);
    const auto grad = make.numbers<float>(n), prev = make.numbers<float>(n), offset = make.numbers<float>(n);
    const auto x = make.numbers<float>(n);
    Array<float> y = make.numbers<float>(n);
    const std::vector<float> from(y.begin(), y.end());
    const LocalStep step{grad.data(),
                         (present & 1) != 0 ? prev.data() : nullptr,
                         (present & 2) != 0 ? offset.data() : nullptr,
                         (present & 4) != 0 ? x.data() : nullptr,
                         0.7f,
                         -0.3f,
                         0.4f,
                         (present & 8) != 0 ? 0.01f : 0.0f,
                         0.1f};
    direction_step(step, y.data(), n);
    for (std::int64_t j = 0; j < n; ++j) {
        float d = step.a * ((present & 8) != 0 ? grad[j] + step.weight_decay * from[j] : grad[j]);
        if ((present & 1) != 0) d = d + step.b * prev[j];
        if ((present & 2) != 0) d = d + offset[j];
        if ((present & 4) != 0) d = d + step.mu * (from[j] - x[j]);
        CHECK(y[j] == from[j] - step.lr * d);
    }
}

}  // namespace

TEST(local_steps_of_every_size_and_place) {
    at_edges([](std::int64_t n, std::size_t first) {
        for (int present = 0; present < 16; ++present) try_step(present, n, first);
    });
}

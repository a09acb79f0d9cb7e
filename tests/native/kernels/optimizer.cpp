#include "kernels/optimizer.h"

#include <cmath>

#include "check.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

void try_step(Second second, bool in_place, std::int64_t n, std::size_t first) {
    Arrays make(first);
    const bool has_second = second != Second::none;
    const auto v = make.numbers<float>(n);
    Array<float> m = make.numbers<float>(n), s = make.numbers<float>(has_second ? n : 0), x = make.numbers<float>(n);
    for (float& value : s) value = value * value;
    const std::vector<float> from_m(m.begin(), m.end()), from_s(s.begin(), s.end()), from_x(x.begin(), x.end());
    Array<float> m_out = make.empty<float>(n), s_out = make.empty<float>(s.size()), x_out = make.empty<float>(n);
    Array<float>&to_m = in_place ? m : m_out, &to_s = in_place ? s : s_out, &to_x = in_place ? x : x_out;
    const OptimizerStep step{second, 0.9f, 0.1f, 0.99f, 0.01f, 1e-3f, 0.1f};
    std::vector<double> scratch(block_count(n));
    const double square =
        optimizer_step(step, {v.data(), m.data(), has_second ? s.data() : nullptr, x.data()},
                       {to_m.data(), has_second ? to_s.data() : nullptr, to_x.data()}, n, scratch.data());
    double due = 0;
    for (std::int64_t j = 0; j < n; ++j) {
        const float next_m = step.from_m * from_m[j] + step.from_v * v[j];
        float u = next_m;
        if (has_second) {
            const float q = v[j] * v[j], t = step.from_square * q;
            const float sign = from_s[j] > q ? 1.0f : from_s[j] < q ? -1.0f : 0.0f;
            const float next_s = second == Second::yogi ? from_s[j] - t * sign : step.from_s * from_s[j] + t;
            u = next_m / (std::sqrt(next_s) + step.tau);
            CHECK(to_s[j] == next_s);
        }
        CHECK(to_m[j] == next_m);
        CHECK(to_x[j] == from_x[j] - step.gamma * u);
        due += static_cast<double>(to_x[j]) * static_cast<double>(to_x[j]);
    }
    CHECK(close(square, due));
}

}  // namespace

TEST(optimizer_steps_of_every_size_and_place) {
    at_edges([](std::int64_t n, std::size_t first) {
        for (const Second second : {Second::none, Second::decay, Second::yogi})
            for (const bool in_place : {false, true}) try_step(second, in_place, n, first);
    });
}

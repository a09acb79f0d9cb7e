// The bits of every kernel and draw on the same inputs, a line a result: to be compared between processors, levels and
// compilers (aarch64.sh). With the argument `flush` every call is made by a thread that takes subnormal numbers for
// zeros, as a caller's may, and within IeeeMode, as the bindings have it.
//   Exit status 77: this machine has not the level that FEDCORE_ISA asks for.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/blocks.h"
#include "base/cached.h"
#include "base/float_mode.h"
#include "base/isa.h"
#include "bits_inputs.h"
#include "kernels/aggregate.h"
#include "kernels/combine.h"
#include "kernels/direction.h"
#include "kernels/exact.h"
#include "kernels/exchange.h"
#include "kernels/mix.h"
#include "kernels/norms.h"
#include "kernels/optimizer.h"
#include "kernels/quantise.h"
#include "kernels/robust.h"
#include "sampling/bernoulli.h"
#include "sampling/permutation.h"
#include "sampling/uniform.h"
#include "sampling/weighted.h"
#include "store/checksum.h"

using namespace fedcore;

namespace {

bool flushes = false;

void flush_to_zero() {
#if defined(__aarch64__)
    std::uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | std::uint64_t{1} << 24));
#elif defined(__SSE2__)
    _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
}

// call() as a binding makes it.
template <class Call>
void made(const Call& call) {
    const IeeeMode before;  // what follows here is this program's own
    if (flushes) flush_to_zero();
    const IeeeMode mode;
    call();
}

template <class T>
void show(const std::string& name, const std::vector<T>& values) {
    std::uint64_t hash = 1469598103934665603u;  // FNV-1a
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (std::size_t i = 0; i < values.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
    std::printf("%-60s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

void sums(Problem& p, Dtype dtype, const std::vector<Bytes>& rows) {
    std::vector<const void*> listed;
    for (const Bytes& row : rows) listed.push_back(row.data());
    for (const Precision precision : {Precision::float32, Precision::float64})
        for (const bool based : {false, true})
            for (const Dtype to : {Dtype::float32, dtype}) {
                Bytes out(8 * p.n);
                const RowSum sum{listed.data(), based ? p.x.data() : nullptr, out.data(), dtype, to};
                made([&] {
                    weighted_sums(&sum, p.weights.data(), kRows, p.pieces.data(), p.count(), precision,
                                  p.scratch.data(), p.norms.data());
                });
                show("weighted_sum", out);
                show("  norms", p.norms);
            }
}

template <class Sum>
void folds(Problem& p, const std::vector<ClientUpdate>& sent, std::vector<Sum> acc) {
    const Fold<Sum> fold{acc.data(), acc.data(), sent.data()};
    made([&] { accumulate(&fold, kRows, p.pieces.data(), p.count(), p.scratch.data(), p.norms.data()); });
    show("accumulate", acc);
    show("  norms", p.norms);
}

using Integers = std::vector<std::int64_t>;

// The words of a sum, settled.
struct Words {
    Integers high, low;
    explicit Words(std::int64_t n) : high(n), low(n) {
        for (std::int64_t& value : high) value = static_cast<std::int64_t>(word()) >> 20;
        for (std::int64_t& value : low) value = static_cast<std::int64_t>(word() >> 14);
    }
    ExactSum sum() { return {high.data(), low.data()}; }
    ConstExactSum read() const { return {high.data(), low.data()}; }
    void show(const char* name) const {
        ::show(name, high);
        ::show("  low", low);
    }
};

void exact_folds(Problem& p, const std::vector<ClientUpdate>& sent) {
    Words sum(p.n), other(p.n);
    const ExactFold fold{sum.read(), sum.sum(), sent.data()};
    made([&] { accumulate(&fold, kRows, p.pieces.data(), p.count(), p.scratch.data(), p.norms.data()); });
    sum.show("accumulate_exact");
    show("  norms", p.norms);
    const ExactTerm terms[] = {{sum.read(), nullptr, 3}, {other.read(), nullptr, -5000}, {{}, p.x.data(), 7}};
    made([&] { combine_exact(terms, 3, other.sum(), p.n); });
    other.show("combine_exact");
    Floats narrow(p.n);
    Doubles wide(p.n);
    made([&] {
        read_exact(other.read(), narrow.data(), p.n);
        read_exact(other.read(), wide.data(), p.n);
    });
    show("read_exact", narrow);
    show("read_exact", wide);
}

void robust(const Problem& p, const std::vector<ClientUpdate>& sent) {
    const std::int64_t starts[] = {0, p.n};
    std::vector<ClientUpdate> many;
    while (many.size() < 20) many.insert(many.end(), sent.begin(), sent.end());
    for (const std::int64_t k : {kRows, std::int64_t{20}}) {
        const Updates updates{many.data(), starts, 1, k};
        Doubles shares(block_count(p.n) * k * (k + 1) / 2), products(k * k);
        made([&] { gram(updates, p.n, shares.data(), products.data()); });
        show("gram", products);
        const Doubles mixing(3 * k, 0.1);
        for (const bool mixed : {false, true})
            for (const Statistic& of : {Statistic{1, 2, 0}, Statistic{0, mixed ? 3 : k, 2}}) {
                Floats out(p.n);
                made([&] {
                    column_statistic(updates, mixed ? mixing.data() : nullptr, mixed ? 3 : k, of, p.n, out.data());
                });
                show("column_statistic", out);
            }
    }
}

// The forms of MimiC, SCAFFOLD and FedStale, and one with every coefficient.
constexpr Forms kForms[] = {{{1, 0, 0}, {1, -1, 0, 1}},
                            {{1, 1, 1}, {1, -1, 0, 0}},
                            {{1, 0, 0}, {1, -0.3, 0, 0}},
                            {{0.7f, 0.25f, -2}, {0.75, -0.5, 0.3, 1.25}}};

// have: no old rows, old rows, and those with anchors
void exchanges(Problem& p, const std::vector<ClientUpdate>& sent, Codec codec, const Forms& forms, int have) {
    std::vector<Coded> old, fresh;
    std::vector<RowExchange> row_exchanges;
    std::vector<std::uint64_t> checksums(kRows * block_count(p.n));
    for (std::int64_t i = 0; i < kRows; ++i) {
        old.emplace_back(codec, p.olds[i]);
        fresh.emplace_back(codec, p.x);
    }
    for (std::int64_t i = 0; i < kRows; ++i)
        row_exchanges.push_back({have > 0 ? old[i].row() : Row{Codec::f32, nullptr, nullptr},
                                 have > 1 ? p.anchors[i].data() : nullptr,
                                 fresh[i].row(),
                                 {42, static_cast<std::uint64_t>(i)},
                                 codec == Codec::f32 ? checksums.data() + i * block_count(p.n) : nullptr});
    Doubles out(p.n);
    made([&] {
        exchange(p.acc.data(), out.data(), sent.data(), row_exchanges.data(), forms, kRows, p.n, p.scratch.data(),
                 p.norms.data());
    });
    show("exchange", out);
    show("  norms", p.norms);
    show("  checksums", checksums);
    Words exact(p.n);
    made([&] {
        exchange(exact.read(), exact.sum(), sent.data(), row_exchanges.data(), forms, kRows, p.n, p.scratch.data(),
                 p.norms.data());
    });
    exact.show("exchange_exact");
    show("  norms", p.norms);
    for (const Coded& row : fresh) {
        show("  row", row.codes);
        show("  scales", row.scales);
    }
}

void steps(Problem& p) {
    const Step step{{0.3, 0.4, -0.7, 0.2, 0}, {1.5, 0.25, 1.1, 0.6, -2.5}, 0.9};
    for (const bool with : {false, true}) {
        Floats v(p.n), x(p.n);
        Doubles total(p.n), squares(2);
        const StepInputs<double> in{p.acc.data(), with ? p.total.data() : nullptr, p.g.data(),
                                    with ? p.control.data() : nullptr, p.x.data()};
        const StepOutputs to{v.data(), with ? total.data() : nullptr, x.data()};
        made([&] { server_step(step, in, to, p.n, p.scratch.data(), squares.data()); });
        show("server_step", v);
        show("  x", x);
        show("  total", total);
        show("  squares", squares);
    }
    for (unsigned terms = 0; terms < 16; ++terms) {
        Floats y = p.ys[0];
        const LocalStep local{p.g.data(),
                              (terms & 1) != 0 ? p.olds[0].data() : nullptr,
                              (terms & 2) != 0 ? p.olds[1].data() : nullptr,
                              (terms & 4) != 0 ? p.x.data() : nullptr,
                              0.7f,
                              0.3f,
                              0.1f,
                              (terms & 8) != 0 ? 1e-4f : 0.0f,
                              0.01f};
        made([&] { direction_step(local, y.data(), p.n); });
        show("direction_step", y);
    }
    const Term terms[] = {{p.acc.data(), true, 0.1}, {p.x.data(), false, -1}, {p.g.data(), false, 0.3}};
    Floats narrow(p.n);
    Doubles wide(p.n), square(1);
    made([&] {
        combine(terms, 3, narrow.data(), p.n);
        combine(terms, 3, wide.data(), p.n);
        square[0] = combined_square(terms, 3, p.n, p.scratch.data());
    });
    show("combine", narrow);
    show("  float64", wide);
    show("  square", square);
    for (const Second second : {Second::none, Second::decay, Second::yogi}) {
        Floats m(p.n), s(p.n), x(p.n), before = p.olds[0];
        for (float& value : before) value = value < 0 ? -value : value;
        const bool has = second != Second::none;
        const OptimizerStep turn{second, 0.9f, 0.1f, 0.99f, 0.01f, 1e-3f, 0.7f};
        made([&] {
            square[0] = optimizer_step(turn, {p.g.data(), p.olds[1].data(), has ? before.data() : nullptr, p.x.data()},
                                       {m.data(), has ? s.data() : nullptr, x.data()}, p.n, p.scratch.data());
        });
        show("optimizer_step", m);
        show("  s", s);
        show("  x", x);
        show("  square", square);
    }
}

void mixes(Problem& p) {
    std::vector<Floats> models = p.ys;
    std::vector<float*> listed;
    for (Floats& model : models) listed.push_back(model.data());
    const std::int64_t starts[] = {0, 2, 5, 5, 10, 12}, columns[] = {0, 4, 0, 1, 2, 0, 1, 2, 3, 4, 3, 4};
    const float weights[] = {.5f, .5f, .2f, .3f, .5f, .1f, .2f, .3f, .25f, .15f, .4f, .6f};
    const Mixing matrix{starts, columns, weights, kRows};
    std::vector<std::int64_t> memory(mix_memory(matrix));
    const MixPlan plan = plan_mix(matrix, p.n, memory.data());
    Floats scratch(plan.scratch);
    made([&] { mix(matrix, plan, listed.data(), p.n, scratch.data()); });
    for (const Floats& model : models) show("mix", model);
}

void codes(Problem& p) {
    for (const Codec codec : {Codec::bf16, Codec::f16, Codec::int8})
        for (const bool dither : {false, true}) {
            Coded coded(codec, p.x);
            Floats back(p.n);
            const DitherKey key{7, 9};
            made([&] {
                quantise(p.x.data(), codec, dither ? &key : nullptr, p.n, coded.codes.data(), coded.scale());
                dequantise(coded.codes.data(), coded.scale(), codec, p.n, back.data());
            });
            show("quantise", coded.codes);
            show("  scales", coded.scales);
            show("  back", back);
        }
    for (const float factor : {1.0f, 1e25f, 1e-25f}) {  // within and beyond the range of float32 squares
        Floats row = p.x;
        for (float& value : row) value *= factor;
        const float* listed[] = {row.data()};
        Doubles square(1);
        made([&] { squared_norms(listed, 1, p.n, p.scratch.data(), square.data()); });
        show("squared_norms", square);
    }
    std::vector<std::uint64_t> sums(4 * p.n / 1000 + 1);
    checksum(p.x.data(), 4 * p.n, 1000, sums.data());
    show("checksum", sums);
}

void draws(const Problem& p) {
    const Key key{1, 2, 3, 4};
    std::vector<std::int64_t> drawn(std::min<std::int64_t>(p.n, 500));
    const auto k = static_cast<std::int64_t>(drawn.size());
    without_replacement(p.n, k, key, drawn.data());
    show("without_replacement", drawn);
    permutation(p.n, 0, k, key, drawn.data());
    show("permutation", drawn);
    Doubles weights(p.n);
    for (double& weight : weights)
        weight = static_cast<double>(1 + word() % 1000) * (word() % 5 == 0 ? 0x1p-1060 : 1e-3);
    made([&] {
        WeightTree tree(weights.data(), p.n);
        with_replacement(tree, k, key, drawn.data());
        show("with_replacement", drawn);
        drawn.resize(weighted_without_replacement(tree, k / 2, key, drawn.data()));
    });
    show("weighted_without_replacement", drawn);
    for (double& weight : weights) weight = std::min(weight, 1.0);
    BitSet set(p.n);
    made([&] { bernoulli(weights.data(), true, key, set); });
    std::vector<std::int64_t> listed(set.size());
    set.list(listed.data());
    show("bernoulli", listed);
}

void all_of(std::int64_t n) {
    std::printf("n = %lld\n", static_cast<long long>(n));
    Problem p(n);
    for (const Dtype dtype : kDtypes) {
        std::vector<Bytes> rows;
        std::vector<ClientUpdate> sent;
        for (const Floats& y : p.ys) rows.push_back(row_of(dtype, y));
        for (std::int64_t i = 0; i < kRows; ++i)
            sent.push_back({rows[i].data(), dtype, i % 2 != 0 ? p.x.data() : nullptr, 0.37f * static_cast<float>(i + 1),
                            p.weights[i]});
        sums(p, dtype, rows);
        folds<double>(p, sent, p.acc);
        folds<float>(p, sent, p.x);
        exact_folds(p, sent);
        robust(p, sent);
        for (const Codec codec : kCodecs)
            for (const Forms& forms : kForms)
                for (const int have : {0, 1, 2}) exchanges(p, sent, codec, forms, have);
    }
    steps(p);
    mixes(p);
    codes(p);
    draws(p);
}

}  // namespace

int main(int count, char** arguments) {
    flushes = count > 1 && std::strcmp(arguments[1], "flush") == 0;
    try {
        active_isa();
    } catch (const std::runtime_error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 77;
    }
    for (const std::int64_t n : {1, 77, 2063, 40000}) all_of(n);
    set_cached_bytes(0);  // large results are stored past the caches
    all_of(2063);
}

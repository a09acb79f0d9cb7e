"""The numbers of the papers, typed from the papers and not from the presets.

Each row has the patterns of its presets (``!x`` excludes x), the key, the value and the place in the paper. A key
``algorithms.LABEL.option`` belongs to one method; ``seeds`` is their number.
"""

from typing import NamedTuple


class Number(NamedTuple):
    presets: str
    key: str
    value: object
    place: str


MIMIC_CIFAR = "mimic/figure5 mimic/figure8 mimic/no-dropout-cifar mimic/table4-cifar-* mimic/table5-*"
MIMIC_FMNIST = (
    "mimic/table3-* mimic/table4-fmnist-* mimic/figure4 mimic/figure6-* mimic/figure7 mimic/fmnist-tau50 "
    "mimic/no-dropout-fmnist mimic/readings-* mimic/random-shards-*"
)
NOT_THE_PAPERS = "!mimic/readings-batch64 !mimic/readings-literal !mimic/readings-constant"
MIMIC = [
    Number("mimic/*", "partition.name", "shards", "Sec. 7, shards of one class"),
    Number("mimic/*", "partition.clients", 30, "Sec. 7"),
    Number("mimic/* !mimic/table5-*", "partition.shards_per_client", 2, "Sec. 7, 60 shards and two a client"),
    Number("mimic/* !mimic/random-shards-*", "partition.distinct_classes", True, "Table 2, two classes a client"),
    *(Number(f"mimic/table5-c{k}", "partition.shards_per_client", k, "Table 5") for k in (2, 5, 8, 10)),
    Number("mimic/*", "local.epochs", 5, "Table 2"),
    Number("mimic/*", "seeds", 3, "Sec. 7, three trials"),
    Number("mimic/*", "pictures.over", "uploadings", "Figures 4, 5, 7, 8"),
    Number(MIMIC_FMNIST, "data.name", "fashion-mnist", "Sec. 7"),
    Number(MIMIC_FMNIST, "model.name", "lenet", "Sec. 7, the convolutions"),
    Number(f"{MIMIC_FMNIST} !mimic/*scaffold-*", "rounds", 200, "Sec. 7, 200 uploadings"),
    Number("mimic/*scaffold-*", "rounds", 100, "Sec. 7, 200 uploadings of two vectors"),
    Number("mimic/*scaffold-*", "algorithms.SCAFFOLD.control", "sent", "Table 1"),
    Number(f"{MIMIC_FMNIST} !mimic/readings-batch64", "local.batch", 16, "Table 2"),
    Number(f"{MIMIC_FMNIST} {NOT_THE_PAPERS} mimic/readings-batch64", "rate.lr.decay", 0.95, "Table 2"),
    Number("mimic/readings-literal mimic/readings-constant", "rate.server_lr.decay", 0.95, "Table 2"),
    Number("mimic/readings-literal", "rate.server_lr.initial", 0.01, "Table 2"),
    Number("mimic/readings-literal mimic/readings-constant", "rate.lr", 0.01, "Table 2"),
    Number("mimic/* !mimic/readings-literal !mimic/readings-constant", "rate.lr.name", "Exponential", "Table 2"),
    Number("mimic/* !mimic/readings-literal !mimic/readings-constant", "rate.lr.initial", 0.01, "Table 2"),
    Number(MIMIC_CIFAR, "data.name", "cifar-10", "Sec. 7"),
    Number(MIMIC_CIFAR, "model.name", "vgg11", "Sec. 7"),
    Number(MIMIC_CIFAR, "rounds", 400, "Sec. 7, 400 uploadings"),
    Number(MIMIC_CIFAR, "local.batch", 32, "Table 2"),
    Number(MIMIC_CIFAR, "rate.lr.decay", 0.99, "Table 2"),
    Number("mimic/table3-* mimic/figure4 mimic/figure5 mimic/fmnist*", "participation.name", "RoundRobin", "Sec. 7"),
    *(Number(f"mimic/table3-*tau{k}", "participation.tau_max", k, "Table 3") for k in (20, 50, 100)),
    Number("mimic/fmnist-tau50 mimic/readings-random-phase", "participation.tau_max", 50, "Table 3"),
    Number("mimic/figure4 mimic/figure5", "participation.tau_max", 20, "Figures 4 and 5"),
    Number("mimic/readings-code-tau", "participation.among.tau_max", 50, "Table 3"),
    Number("mimic/readings-code-static", "participation.among.p", 0.1, "Figures 6, 7"),
    Number("mimic/*no-dropout*", "participation.name", "Always", "Sec. 7"),
    Number("mimic/figure6-* mimic/figure7 mimic/figure8 mimic/table5-*", "participation.name", "Bernoulli", "Sec. 7"),
    Number("mimic/figure7 mimic/table5-*", "participation.p", 0.1, "Figure 7, Table 5"),
    Number("mimic/figure8", "participation.p", 0.3, "Figure 8"),
    Number("mimic/table4-*", "participation.name", "TimeVarying", "Sec. 7"),
    *(Number(f"mimic/table4-*-p{k}", "participation.share", k / 100, "Table 4") for k in (10, 30, 50)),
    Number("mimic/readings-default mimic/readings-literal", "participation.share", 0.1, "Table 4"),
    Number("mimic/readings-constant mimic/readings-batch64", "participation.share", 0.1, "Table 4"),
    Number("mimic/table5-*", "algorithms.FedAvg.weights", "uniform", "eqs. 4 and 5"),
    Number("mimic/table5-*", "algorithms.FedProx.weights", "uniform", "eqs. 4 and 5"),
]

SYNTHETIC = "flexible/*-synthetic* flexible/table5-*"
SHIFTING = "flexible/table4-* flexible/table5-* flexible/figure4-* flexible/figure5-*"
ARRIVING = "flexible/table4-* flexible/figure4-* flexible/figure5-* !flexible/figure4-departure-*"
FLEXIBLE = [
    Number("flexible/table3-*", "rounds", 200, "Sec. 5"),
    Number("flexible/*", "rate.lr.name", "Staircase", "Sec. 5, eta_0 / t"),
    Number(SYNTHETIC, "model.name", "logistic", "Sec. 5"),
    Number(SYNTHETIC, "local.batch", 20, "Sec. 5"),
    Number(SYNTHETIC, "rate.lr.initial", 1.0, "Sec. 5"),
    Number("flexible/table3-synthetic-*", "partition.clients", 50, "Sec. 5"),
    Number("flexible/table3-synthetic-*", "data.sizes", "pareto", "Sec. 5"),
    Number("flexible/table3-synthetic-iid-*", "data.name", "synthetic-iid", "Table 3, IID"),
    Number("flexible/table3-synthetic-niid-*", "data.name", "synthetic", "Table 3"),
    *(
        Number(presets, f"data.{key}", value, "Tables 3 and 5, Figures 4 and 5")
        for key in ("alpha", "beta")
        for presets, value in {
            "flexible/table3-synthetic-00-*": 0.0,
            "flexible/table3-synthetic-niid-*": 1.0,
            "flexible/table4-synthetic-*": 1.0,
            "flexible/figure*-synthetic": 1.0,
            "flexible/table5-0.1-*": 0.1,
            "flexible/table5-0.5-*": 0.5,
            "flexible/table5-1-*": 1.0,
        }.items()
    ),
    Number("flexible/*-mnist*", "data.name", "mnist", "Sec. 5"),
    Number("flexible/*-mnist*", "model.name", "mlp-mnist", "Sec. 5, 784-200-200-10"),
    Number("flexible/*-mnist* flexible/*-emnist*", "local.batch", 10, "Sec. 5"),
    Number("flexible/*-mnist*", "rate.lr.initial", 2e-3, "Sec. 5"),
    Number("flexible/table3-emnist*", "data.name", "emnist-bymerge", "Sec. 5.2"),
    Number("flexible/table4-emnist* flexible/figure4*-emnist", "data.name", "emnist-balanced", "Sec. 5.3"),
    Number("flexible/*-emnist*", "model.name", "cnn-emnist", "Sec. 5, conv 32, conv 64, FC 512"),
    Number("flexible/*-emnist*", "model.classes", 47, "Sec. 5, by merge and balanced"),
    Number("flexible/*-emnist*", "rate.lr.initial", 5e-4, "Sec. 5"),
    Number("flexible/table3-mnist-*", "partition.clients", 100, "Sec. 5"),
    Number("flexible/table3-emnist-*", "partition.clients", 62, "Sec. 5"),
    Number("flexible/table3-mnist-iid-* flexible/table3-emnist-iid-*", "partition.name", "iid-pareto", "Sec. 5"),
    Number("flexible/*mnist-niid-*", "partition.name", "one-label", "Sec. 5"),
    Number("flexible/table3-*", "participation.name", "Trace", "Sec. 5"),
    *(Number(f"flexible/table3-*-t{k}", "participation.first", k, "Table 3, |T|") for k in range(1, 9)),
    Number("flexible/table4-*mnist-* flexible/figure4-*mnist", "partition.name", "one-label", "Sec. 5"),
    Number("flexible/table4-*mnist-* flexible/figure4-*mnist", "partition.clients", 10, "Table 4, Figure 4"),
    Number("flexible/figure5-*", "partition.clients", 10, "Figure 5, seven devices and three arrivals"),
    Number("flexible/table4-synthetic-* flexible/table5-*", "partition.clients", 30, "Tables 4 and 5"),
    Number("flexible/figure4-synthetic flexible/figure4-departure-synthetic", "partition.clients", 30, "Figure 4"),
    Number(SHIFTING, "participation.name", "Schedule", "Sec. 4.2, 4.3"),
    Number(SHIFTING, "participation.among.name", "Trace", "Sec. 5"),
    Number(SHIFTING, "participation.among.first", 5, "Sec. 5, traces 1 to 5"),
    Number(ARRIVING, "objective.restart", True, "Sec. 4.2"),
    *(Number(f"flexible/table4-*-t{k}", "participation.arrivals.0", k, "Table 4") for k in (10, 30, 50, 70)),
    *(Number(f"flexible/table5-*-t{k}", "participation.departures.0", k, "Table 5") for k in range(10, 51, 5)),
    *(Number("flexible/figure5-*", f"participation.arrivals.{k}", 100 + 50 * k, "Figure 5") for k in range(3)),
    *(Number("flexible/table3-*", f"algorithms.{scheme}.scheme", scheme, "Table 1") for scheme in "ABC"),
    *(Number(ARRIVING, f"algorithms.{how}.scheme", "C", "Sec. 5") for how in ("fast", "vanilla")),
    *(Number(ARRIVING, f"algorithms.{how}.reboot", how, "Sec. 4.2") for how in ("fast", "vanilla")),
]
SHIFTING_SIZES = "flexible/table4-* flexible/table5-* flexible/figure4-* flexible/figure5-*"
"""Equal sizes, but the paper does not say which: smallest = largest."""

CIFAR = "momentum/figure1 momentum/figure1c"
RESNET = "momentum/resnet18-* momentum/figure4"
MNIST = "momentum/figure5-* momentum/figure8* momentum/warm-start"
MOMENTUM = [
    Number(f"{CIFAR} {RESNET}", "data.name", "cifar-10", "Figures 1 to 4"),
    Number(CIFAR, "model.name", "mlp-cifar10", "D.1, three layers"),
    Number(CIFAR, "local.steps", 32, "D.1, K"),
    Number(CIFAR, "local.weight_decay", 1e-4, "D.1"),
    Number(CIFAR, "grid.rate.lr", [0.005, 0.01, 0.05, 0.1, 0.5], "D.1"),
    Number(CIFAR, "grid.algorithms.beta", [0.1, 0.2, 0.5, 0.8], "D.1"),
    Number(CIFAR, "algorithms.MBSTORM.steps", 32, "D.1, gamma = eta K"),
    Number("momentum/figure1", "partition.alpha", 0.5, "Figure 1"),
    Number("momentum/figure1", "participation.name", "Always", "Figure 1"),
    Number("momentum/figure1c", "partition.alpha", 0.2, "Figure 1(c)"),
    Number("momentum/figure1c", "participation.k", 1, "Figure 1(c)"),
    Number(f"{CIFAR} {RESNET}", "partition.clients", 10, "Figures 1 to 4"),
    Number(f"{CIFAR} {RESNET} {MNIST}", "partition.name", "dirichlet", "Figures 1 to 8"),
    Number(f"{CIFAR} {RESNET} momentum/figure5-*", "algorithms.FedAvg.weights", "uniform", "Algorithms 1 to 4"),
    Number("momentum/figure8", "algorithms.beta = 1.weights", "uniform", "Algorithms 1 to 4"),
    Number(RESNET, "model.name", "resnet18", "Figures 2 to 4"),
    Number(RESNET, "local.batch", 128, "Figures 2 to 4"),
    Number(RESNET, "local.steps", 16, "Figures 2 to 4, K"),
    Number(RESNET, "rate.lr", 1e-3, "Figures 2 to 4, eta^"),
    Number("momentum/resnet18-*", "algorithms.FedAvgM.beta", 0.1, "Figures 2 to 4"),
    Number("momentum/resnet18-*", "algorithms.SCAFFOLDM.beta", 0.1, "Figures 2 to 4"),
    Number("momentum/resnet18-*", "algorithms.FedAvgM.reparameterised", True, "eqs. 31 to 33"),
    Number("momentum/resnet18-*", "algorithms.SCAFFOLDM.reparameterised", True, "eqs. 31 to 33"),
    Number("momentum/resnet18-0.5* momentum/figure4", "partition.alpha", 0.5, "Figures 2(a) and 3"),
    Number("momentum/resnet18-0.1*", "partition.alpha", 0.1, "Figure 2(b)"),
    Number("momentum/resnet18-0.5 momentum/resnet18-0.1", "participation.k", 2, "Figure 2, right"),
    Number("momentum/resnet18-0.5-s5", "participation.k", 5, "Figure 3(b), D.3"),
    Number("momentum/resnet18-*-all", "participation.name", "Always", "Figures 2, left, and 3(a)"),
    Number("momentum/figure4", "algorithms.MBSTORM.steps", 16, "D.1, gamma = eta K"),
    Number(MNIST, "data.name", "mnist", "Figures 5 to 8"),
    Number(MNIST, "model.name", "relu-mnist", "Figures 5 to 8, two layers"),
    Number(MNIST, "partition.clients", 100, "Figures 5 to 8"),
    Number(MNIST, "partition.alpha", 0.2, "Figures 5 to 8"),
    Number(MNIST, "local.batch", 32, "Figures 5 to 8"),
    Number(MNIST, "local.steps", 16, "Figures 5 to 8, K"),
    Number("momentum/figure5-* momentum/warm-start", "grid.algorithms.beta", [0.2], "Figures 5 to 8"),
    Number("momentum/figure5-*", "algorithms.MBSTORM.steps", 16, "D.1, gamma = eta K"),
    Number("momentum/figure5-s100", "participation.name", "Always", "Figure 5"),
    Number("momentum/figure5-s10", "participation.k", 10, "Figure 5"),
    Number("momentum/figure5-s5 momentum/figure8*", "participation.k", 5, "Figures 5 to 8"),
]
NUMBERS = [*MIMIC, *FLEXIBLE, *MOMENTUM]

"""For every method: one liar of ten sites, each kind of lie, over NVFlare's own messages, within ``BOUNDS``."""

import pytest

from fedcore.adapters.nvflare import Aggregator, order, reply
from tests.adapters.liars import PLAIN, ROUNDS, assert_bounded, cases, options, plain, said
from tests.adapters.nvflare.local import LocalController, wired
from tests.server.liars import LR, MODEL, N, made

SITES = [f"site-{i}" for i in range(N)]
TOLD_NO_SIZES = [method for method in PLAIN if made(method)[1] is None]  # as NVFlare's own workflow is


def answer(update):
    """The reply that says what an Update does."""
    return reply(update.value, steps=update.steps, examples=update.examples, lr=update.lr, control=update.control)


def site_of(method, kind, client):
    def work(received):
        told = order(received)
        return answer(said(method, kind, told, received.params, told.offset, client))

    return work


@pytest.mark.parametrize(("method", "kind"), cases())
def test_one_liar_of_ten_sites_moves_the_result_by_its_bound_at_most(method, kind):
    algorithm, sizes = made(method)
    controller = LocalController(
        {site: site_of(method, kind, i) for i, site in enumerate(SITES)},
        MODEL,
        algorithm,
        lr=LR,
        num_rounds=ROUNDS,
        client_sizes=sizes and dict(zip(SITES, sizes, strict=True)),
        **options(kind),
    )
    controller.run()
    assert_bounded(method, kind, controller.server.tensors(), controller.reports, SITES)


@pytest.mark.parametrize(("method", "kind"), cases(TOLD_NO_SIZES))
def test_one_liar_of_ten_sites_of_nvflare_s_own_workflow_moves_the_result_by_its_bound_at_most(method, kind):
    aggregator = Aggregator(made(method)[0], lr=LR, model={**MODEL}, **options(kind))
    aggregator._names = lambda: SITES
    for t in range(ROUNDS):
        aggregator.reset_stats()
        sent = aggregator.server.tensors()
        for i, site in enumerate(SITES):
            model = wired(answer(said(method, kind, plain(t), sent, None, i)))
            model.meta["client_name"] = site
            aggregator.accept_model(model)
        aggregator.aggregate_model()
    assert_bounded(method, kind, aggregator.server.tensors(), aggregator.reports, SITES)

"""The phases of a round, by the functions that do them: whoever renames one of these renames it here.

A function is named by its place, ``module:Class.name`` or ``module:name``. Nothing is imported for its sake: a module
that nobody has imported does nothing that could be timed.
"""

PHASES: dict[str, tuple[str, ...]] = {
    "broadcast": ("fedcore.server.server:Server.broadcast", "fedcore.server.state:State.offset"),
    "open": (
        "fedcore.server.server:Server._open",
        "fedcore.server.server:Server._whole_round",
        "fedcore.network.network:Network.open_round",
    ),
    "clients": ("fedcore.server.server:held_together",),
    "train": ("fedcore.engines.inprocess:InProcess.updates", "fedcore.engines.ray.engine:Ray.updates"),
    "send": (
        "fedcore.adapters.flower.strategy:ServerStrategy._write_model",
        "fedcore.adapters.flower.grid:StreamingGrid.send_and_receive",
    ),
    "wait": ("fedcore.adapters.flower.grid:StreamingGrid._replies",),
    "add": (
        "fedcore.server.round:Round.add_together",
        "fedcore.server.round:Round.add_all",
        "fedcore.server.whole_round:whole_round",
        "fedcore.network.round:NetworkRound.add_update",
    ),
    "check": (
        "fedcore.server.round_face:RoundFace._check",
        "fedcore.server.judge:Judge.judge",
        "fedcore.network.round:NetworkRound._check_caller",
    ),
    "read": (
        "fedcore.server.update_reader:UpdateReader.read",
        "fedcore.server.update_reader:UpdateReader.read_columns",
        "fedcore.network.round:read_vector",
        "fedcore.adapters.flower.replies:Reader.add",
    ),
    "weigh": ("fedcore.server.weighing:Weighing.weigh",),
    "fold": (
        "fedcore.server.round:Round._fold",
        "fedcore.server.whole_round:fold",
        "fedcore.aggregation.sum:Sum.fold_at_once",
        "fedcore.network.round:NetworkRound._take",
    ),
    "exchange": ("fedcore.aggregation.row_exchange:exchange", "fedcore.aggregation.sum:exchange"),
    "step": ("fedcore.server.state:State.prepare", "fedcore.server.state:State.step_by_mean"),
    "optimiser": ("fedcore.kernels:optimizer_step",),
    "mix": ("fedcore.kernels:mix",),
    "diagnose": (
        "fedcore.server.diagnostics:Diagnosis.measure",
        "fedcore.network.round:NetworkRound._diversity",
        "fedcore.network.round:NetworkRound._zeta_among",
        "fedcore.network.round:NetworkRound._consensus",
    ),
    "commit": ("fedcore.server.state:State.accept",),
    "store commit": ("fedcore.store.client_store:ClientStore.commit",),
    "report": (
        "fedcore.server.round:report_of",
        "fedcore.server.round:staleness",
        "fedcore.server.whole_round:report_of",
        "fedcore.server.whole_round:staleness",
    ),
    "finish": (
        "fedcore.server.round:Round.finish",
        "fedcore.server.whole_round:finish",
        "fedcore.server.whole_round:step_by_mean",
        "fedcore.network.round:NetworkRound.finish",
    ),
    "abort": ("fedcore.server.round_face:RoundFace.abort", "fedcore.network.round:NetworkRound.abort"),
    "evaluate": ("fedcore.engines.inprocess:InProcess.evaluate",),
    "save": (
        "fedcore.server.server:Server.save",
        "fedcore.server.server:Server.checkpoint",
        "fedcore.network.network:Network.save",
    ),
    "aggregate": ("fedcore:aggregate",),
    "kernels": (
        "fedcore.kernels:accumulate",
        "fedcore.kernels:accumulate_exact",
        "fedcore.kernels:all_finite",
        "fedcore.kernels:combine",
        "fedcore.kernels:combine_exact",
        "fedcore.kernels:combined_square",
        "fedcore.kernels:dequantise",
        "fedcore.kernels:exchange",
        "fedcore.kernels:exchange_exact",
        "fedcore.kernels:quantise",
        "fedcore.kernels:read_exact",
        "fedcore.kernels:server_step",
        "fedcore.kernels:squared_norms",
        "fedcore.kernels:sum_of_partials",
        "fedcore.kernels:sum_of_partials_exact",
        "fedcore.kernels:weighted_sum",
        "fedcore.kernels:weighted_sum_segments",
    ),
}
"""The functions of each phase, in the order of a round. A phase's time is without that of the phases within it."""

KERNELS = "kernels"
"""The phase of kernels that no other phase has called; within one, their time and bytes are that phase's."""

MEASURED = "fedcore.kernels"
"""The module whose functions tell by their arguments how many bytes they move."""

IN_PLACE = frozenset({"fedcore.kernels:mix"})
"""Those that write the arrays which they read."""

FOLLOWING = frozenset({"clients", "train", "send", "wait", "evaluate", "save"})
"""Phases that cannot know their round, and count for the last one that their thread had to do with."""

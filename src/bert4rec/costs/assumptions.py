"""What the figures of a plan rest on, in sentences."""

from __future__ import annotations

from bert4rec.costs.advice import Advice
from bert4rec.costs.answering import INDEX_SPEEDUP
from bert4rec.costs.machines import USED_NETWORK
from bert4rec.costs.memory import BYTES_AN_ANSWER, DISK_SPEED, SPILLED
from bert4rec.costs.model import EFFICIENCY, CostModel
from bert4rec.parallel import MOST_WORKERS
from bert4rec.retrieval.build import LARGE


def where_measured(costs: CostModel) -> str:
    about = costs.measured
    quiet = "" if about["is_quiet"] else ", while other programs were running: coarse figures"
    note = f" {about['note']}" if "note" in about else ""
    return (
        f"Times are scaled from measurements on {about['threads']} cores ({about['cpu']}, "
        f"{about['last']}, commit {', '.join(about['commits'])}){quiet}.{note}"
    )


def in_words(error: dict[str, float | None]) -> str:
    """How far off the fit is at points that were left out of it."""
    if error["typical"] is None:
        return f"not known ({error['n_points']} points)"
    return f"{error['typical']:.0%} ({error['worst']:.0%} at worst, {error['n_points']} points)"


def typical_errors(costs: CostModel) -> str:
    parts = [f"{kind} {in_words(error)}" for kind, error in costs.errors.items()]
    return (
        "How far off the fit is at a measured point that was left out of it, typically: "
        + ", ".join(parts)
        + "."
    )


def assumptions(costs: CostModel, advice: Advice) -> list[str]:
    """Those that matter for this plan."""
    run, machine = advice.run, advice.machine
    stated = [where_measured(costs), typical_errors(costs)]
    if machine.cores > 2:
        stated.append(
            f"A machine has {machine.cores} cores, each like those measured; every one beyond the "
            f"second counts as {EFFICIENCY:g}. This was not measured."
        )
    stated.append(
        "All users have histories of average length. Long ones among short ones cost more: "
        "windows overlap, and a piece of a batch is as long as its longest history."
    )
    if run.layout.machines > 1:
        stated.append(
            f"Machines are joined by {machine.network:g} Gbit/s, of which gradients get "
            f"{USED_NETWORK:.0%}, and nobody computes while they travel. No network was measured."
        )
    elif run.layout.world > 1:
        stated.append("Processes exchange gradients at the speed that two had here.")
    stated.append(
        "The evaluation at the end takes as long for a user as a validation does, for a baseline "
        f"as for the model; a process keeps at most {MOST_WORKERS} cores busy."
    )
    if advice.serving.compresses:
        stated.append(
            "Compressed vectors are compared as quickly as whole ones. This was not measured here."
        )
    if advice.serving.uses_index:
        stated.append(
            f"From {LARGE:,} items on, an index is searched, and takes 1/{INDEX_SPEEDUP:g} of "
            "the time of comparing with every item; validation still compares with all."
        )
    if run.layout.machines > 1:
        stated.append("Ray puts as many of the scoring actors on each machine as on the others.")
    stated.append(
        f"Disk: rows as long as in our generated CSV files, up to {SPILLED:g} times the table "
        f"while sorting what is larger than the memory, {DISK_SPEED / 1e6:g} MB a second read or "
        f"written, nothing computed meanwhile, {BYTES_AN_ANSWER} bytes a recommendation."
    )
    stated.append(
        "Early stopping may end a training sooner. GPUs are left out: none was here to measure."
    )
    return stated

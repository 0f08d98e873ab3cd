"""Fit a device's profile to a benchmark's record: the command ``flashinfer-cascade calibrate``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from flashinfer_cascade.batch import make_batch
from flashinfer_cascade.bench.results import Row
from flashinfer_cascade.choose import Chooser
from flashinfer_cascade.config import CascadeConfig, PlannerPolicy
from flashinfer_cascade.cost import CostModel, PartShape
from flashinfer_cascade.errors import InvalidBatchError
from flashinfer_cascade.fold import Cut
from flashinfer_cascade.profile import DeviceProfile
from flashinfer_cascade.segment_cost import SegmentCost

Executor = Literal["flat", "levels", "segments"]
EXECUTORS: tuple[Executor, ...] = ("flat", "levels", "segments")

CONSTANTS: dict[str, tuple[str, ...]] = {
    "segments": (
        "segment_launch_us",
        "segment_item_ns",
        "segment_token_ns",
        "segment_partial_ns",
        "segment_lone_block",
    ),
    "flat, levels": (
        *("hbm_gb_per_s", "l2_gb_per_s", "launch_us", "block_us", "tile_efficiency", "lone_block"),
        *("split_us", "split_row_ns", "merge_us", "merge_row_ns", "fa3_efficiency", "fa3_block_us"),
        *("decode_launch_us", "decode_block_us", "decode_token_ns", "decode_lone_block"),
    ),
}
"""What is fitted, by the executors whose times depend on it."""

STEPS = (1.25, 1.1, 1.04, 1.015)
HELD_OUT = 3
"""Of so many workloads one is not fitted to."""

WORST = 0.25
"""Logarithm beyond which an error counts no more: what the model does not know of must not bend the rest."""

STIFFNESS = 0.002
"""What a constant's squared logarithm against the base costs beside the mean squared error."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured time, and what is needed to predict it.

    Attributes:
        workload: its name.
        executor: what ran.
        us: measured microseconds a layer.
        held_out: whether it only judges.
    """

    workload: str
    executor: Executor
    us: float
    held_out: bool
    config: CascadeConfig
    shape: PartShape
    cut: Cut

    def predict(self, profile: DeviceProfile) -> float:
        """Microseconds."""
        if self.executor == "segments":
            return SegmentCost(self.config, profile).predict(self.shape, self.cut)
        model = CostModel(self.config, profile)
        return model.flat(self.shape)[0] if self.executor == "flat" else model.levels(self.shape, self.cut)[0]

    def error(self, profile: DeviceProfile) -> float:
        """Logarithm of predicted over measured."""
        return math.log(self.predict(profile) / self.us)


def read_samples(rows: Iterable[Row], base: DeviceProfile) -> list[Sample]:
    """What can be fitted to; cuts are those that `base` leads to.

    Raises:
        InvalidBatchError: there is nothing.
    """
    samples = []
    names: dict[str, int] = {}
    for row in rows:
        held_out = names.setdefault(row.workload, len(names)) % HELD_OUT == HELD_OUT - 1
        work, config = row.case.build()
        batch = make_batch(config, work.block_tables, work.seq_lens, work.qo_lens)
        for executor in EXECUTORS:
            if executor not in row.results:
                continue
            chooser = Chooser(config, PlannerPolicy(executor=executor), base)
            groups = chooser.split(batch)
            if len(groups) > 1:
                continue
            ((part, forest),) = groups
            cut = chooser.choose(part, batch, forest).cut
            shape = PartShape.of(batch, forest)
            samples.append(Sample(row.workload, executor, row.results[executor].us, held_out, config, shape, cut))
    if not any(not sample.held_out for sample in samples):
        raise InvalidBatchError(
            "the record has no row to fit to: measure with 'flashinfer-cascade bench --suite decode'"
        )
    return samples


def fitted_to(samples: Iterable[Sample], executors: str) -> list[Sample]:
    """What constants are fitted to, of those in CONSTANTS for these executors; nothing leaves them as they are."""
    return [s for s in samples if not s.held_out and s.executor in executors.split(", ")]


def fit(
    samples: Sequence[Sample], base: DeviceProfile, name: str, progress: Callable[[str, float], None] | None = None
) -> DeviceProfile:
    """Change one constant after another, by smaller and smaller factors, while that helps.

    The mean of squared logarithms of predicted over measured is made small, over samples that are not held out, and
    with it how far the constants are from those of the base.

    Args:
        samples: to fit to.
        base: to begin with.
        name: of the result.
        progress: told of each constant, and of the error then.
    """
    profile = base.model_copy(update={"name": name})
    for executors, constants in CONSTANTS.items():
        fitted = fitted_to(samples, executors)
        if not fitted:
            continue
        cost = _Cost(fitted, base, constants)
        least = cost(profile)
        for step in STEPS:
            for constant in constants:
                profile, least = _tune(cost, profile, least, constant, step)
                if progress is not None:
                    progress(constant, least)
    return profile


@dataclass(frozen=True, slots=True)
class _Cost:
    """What the fit makes small."""

    samples: Sequence[Sample]
    base: DeviceProfile
    constants: tuple[str, ...]

    def __call__(self, profile: DeviceProfile) -> float:
        moved = [
            math.log(a / b) ** 2 for a, b in zip(self._numbers(profile), self._numbers(self.base), strict=True) if b
        ]
        errors = [min(abs(sample.error(profile)), WORST) ** 2 for sample in self.samples]
        return sum(errors) / len(errors) + STIFFNESS * sum(moved) / max(len(moved), 1)

    def _numbers(self, profile: DeviceProfile) -> list[float]:
        values = (getattr(profile, constant) for constant in self.constants)
        return [number for value in values for number in (value if isinstance(value, tuple) else (value,))]


def _tune(cost: _Cost, profile: DeviceProfile, least: float, constant: str, step: float) -> tuple[DeviceProfile, float]:
    """Move one constant, or each of several, by a factor, as long as the error falls."""
    value = getattr(profile, constant)
    for place in range(len(value)) if isinstance(value, tuple) else (None,):
        for factor in (step, 1 / step):
            while True:
                changed = _scaled(profile, constant, place, factor)
                error = math.inf if changed is None else cost(changed)
                if changed is None or error >= least * (1 - 1e-4):
                    break
                profile, least = changed, error
    return profile, least


def _scaled(profile: DeviceProfile, constant: str, place: int | None, factor: float) -> DeviceProfile | None:
    """With one number changed, rounded to four digits; None where the profile does not admit that."""
    value = getattr(profile, constant)
    new: float | tuple[float, ...]
    if place is None:
        new = _rounded(value * factor)
    else:
        new = tuple(_rounded(x * factor) if i == place else x for i, x in enumerate(value))
    try:
        return DeviceProfile.model_validate(profile.model_dump() | {constant: new})
    except ValueError:
        return None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _error(samples: Sequence[Sample], profile: DeviceProfile) -> float:
    return sum(sample.error(profile) ** 2 for sample in samples) / len(samples)


def report(samples: Sequence[Sample], base: DeviceProfile, fitted: DeviceProfile) -> list[Table]:
    """How well both profiles predict, and every sample."""
    summary = Table("executor", "samples", "held out", *(f"{p.name}: off by" for p in (base, fitted)), box=None)
    for executor in EXECUTORS:
        for held_out in (False, True):
            some = [s for s in samples if s.executor == executor and s.held_out == held_out]
            if some:
                off = (f"{math.exp(math.sqrt(_error(some, profile))) - 1:.1%}" for profile in (base, fitted))
                summary.add_row(executor, str(len(some)), "yes" if held_out else "no", *off)
    every = Table("workload", "heads", "executor", "held out", "measured us", base.name, fitted.name, box=None)
    for sample in samples:
        heads = f"{sample.config.num_qo_heads}/{sample.config.num_kv_heads}"
        judges = "yes" if sample.held_out else ""
        predicted = (f"{sample.predict(profile):.1f}" for profile in (base, fitted))
        every.add_row(sample.workload, heads, sample.executor, judges, f"{sample.us:.1f}", *predicted)
    return [every, summary]

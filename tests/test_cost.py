"""The cost model against measurements, against FlashInfer's split rule, and its profiles."""

import importlib.util
import json
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flashinfer_cascade import CascadeConfig, CascadePlanner, DeviceProfile, PlannerPolicy
from flashinfer_cascade.batch import make_batch
from flashinfer_cascade.bench.stock import predict_stock
from flashinfer_cascade.bench.workloads import append, tree
from flashinfer_cascade.cost import TILES, CostModel, PartShape, round_tokens
from flashinfer_cascade.fold import cut_at
from flashinfer_cascade.forest import build_forest
from flashinfer_cascade.profile import PROFILES

ROOT = pathlib.Path(__file__).parent.parent


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cost_report = load_script("cost_report")


@pytest.fixture(scope="module")
def rated():
    return cost_report.ratios(json.loads(cost_report.RECORD.read_text())["results"])


def test_the_record_is_predicted(rated):
    assert len(rated) > 400
    for kind in ("flat", "levels", "launch"):
        values = [ratio for row, ratio in rated if row["kind"] == kind]
        assert cost_report.within(values, 1.4) >= 0.98
        assert cost_report.within(values, 1.15) >= 0.9
    for heads in ([32, 8], [32, 32], [64, 8], [16, 1]):
        values = [ratio for row, ratio in rated if row["kind"] != "launch" and row["heads"] == heads]
        assert cost_report.within(values, 1.4) >= 0.9


def test_the_faster_way_is_predicted_where_it_matters(rated):
    """On every tree with sharing, at every head count, where flat and levels differ by more than 10%."""
    times = {}
    for row, ratio in rated:
        if row["kind"] in ("flat", "levels"):
            times.setdefault((row["tree"], tuple(row["heads"])), {})[row["kind"]] = (row["us"], row["us"] * ratio)
    checked = 0
    for key, kinds in times.items():
        has_sharing = "," in key[0]
        if len(kinds) == 2 and has_sharing:
            (flat, flat_predicted), (levels, levels_predicted) = kinds["flat"], kinds["levels"]
            if max(flat, levels) > 1.1 * min(flat, levels):
                checked += 1
                assert (flat < levels) == (flat_predicted < levels_predicted), key
    assert checked > 50


def test_an_independent_earlier_run_is_predicted_too():
    trees = json.loads((ROOT / "tests" / "data" / "h200_earlier.json").read_text())["trees"]
    assert len(trees) == 18
    for name, row in trees.items():
        predicted = cost_report.predict_tree(row["tree"], (32, 8))
        assert abs(math.log(predicted["flat"] / row["flat"])) < math.log(1.15), name
        assert abs(math.log(predicted["levels"] / row["ml_fa2"])) < math.log(1.15), name
        if "," in row["tree"] and max(row["flat"], row["ml_fa2"]) > 1.1 * min(row["flat"], row["ml_fa2"]):
            assert (row["flat"] < row["ml_fa2"]) == (predicted["flat"] < predicted["levels"]), name


# Measured on an H200, us: one fa2 and one fa3 launch over everything, and the stock multi-level wrapper on fa2.
APPENDS = [
    ((64, 8192, 256, 1), 244, 1835, 82),
    ((64, 8192, 256, 4), 249, 1910, 188),
    ((64, 8192, 256, 16), 584, 2027, 476),
    ((64, 8192, 256, 64), 1590, 2036, 1715),
    ((16, 8192, 0, 256), 1596, 935, 1691),
    ((8, 32768, 0, 128), 1593, 938, 1607),
    ((64, 2048, 0, 64), 463, 521, 514),
    ((32, 1024, 0, 512), 1012, 673, 1361),
    ((4, 4096, 0, 2048), 1966, 1250, 2177),
]


@pytest.mark.parametrize(("shape", "fa2", "fa3", "levels"), APPENDS)
def test_appends(shape, fa2, fa3, levels):
    """Requests, shared, own and new tokens."""
    predicted = predict_stock(cost_report.config((32, 8)), PROFILES["h200"], append(*shape))
    assert predicted["fa2"] == pytest.approx(fa2, rel=0.25)
    assert predicted["fa3"] == pytest.approx(fa3, rel=0.25)
    assert predicted["levels"] == pytest.approx(levels, rel=0.25)
    best = min(fa2, fa3)
    assert (min(predicted["fa2"], predicted["fa3"]) < predicted["levels"]) == (best < levels)


def test_the_document_shows_the_models_table(monkeypatch):
    monkeypatch.setattr("sys.argv", ["cost_report.py", "--check"])
    cost_report.main()


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=30),
    st.sampled_from([(32, 8, 16), (32, 32, 1), (16, 1, 64), (64, 8, 256)]),
)
def test_blocks_are_cut_as_flashinfer_cuts_them(groups, shape):
    num_qo_heads, num_kv_heads, page_size = shape
    config = CascadeConfig(
        num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=128, page_size=page_size, dtype="bfloat16"
    )
    tiles = np.array([t for t, _ in groups])
    tokens = np.array([n for _, n in groups])
    pages = [max(-(-n // page_size), 1) for _, n in groups]
    # The definition: the smallest piece, at least 128 tokens, with which the blocks fit two an SM.
    budget = 2 * 132 // num_kv_heads
    smallest = max(128 // page_size, 1)
    fitting = [c for c in range(smallest, max(pages) + 1) if (tiles * [-(-p // c) for p in pages]).sum() <= budget]
    piece = fitting[0] if fitting else max(*pages, smallest)
    blocks, longest, is_cut = CostModel(config, PROFILES["h200"])._blocks(tiles, tokens, may_cut=True)
    assert blocks == (tiles * [-(-p // piece) for p in pages]).sum() * num_kv_heads
    assert longest == min(max(tokens), piece * page_size)
    assert is_cut == (piece < max(pages))


def test_predicted_launches_are_the_plans_levels():
    """Groups, rows and tokens of every level, gaps included, in whatever order nodes are numbered."""
    tables = [[1, 2, 3, 4, 50 + r] for r in range(3)] + [[1, 2, 3, 60 + r] for r in range(2)]
    tables += (
        [[80 + r] for r in range(2)] + [[1, 2, 9, 10, 70 + r] for r in range(3)] + [[30, 31, 90 + r] for r in range(2)]
    )
    config = cost_report.config((32, 8))
    batch = make_batch(config, tables, [16 * len(t) for t in tables])
    plan = CascadePlanner(config, PlannerPolicy(executor="levels", fold=False)).plan(tables, batch.seq_lens)
    forest = build_forest(batch)
    shape = PartShape.of(batch, forest)
    launches = CostModel(config, PROFILES["h200"]).level_launches(shape, cut_at(forest, plan.parts[0].kept))
    for launch, level in zip(launches[:-1], plan.levels()[:-1], strict=True):
        assert launch.rows.tolist() == np.diff(level.qo_indptr).tolist()
        assert launch.tokens.tolist() == (16 * np.diff(level.kv_indptr)).tolist()
    assert launches[-1].rows.tolist() == [1] * len(tables)


@pytest.mark.parametrize(("rows", "tile"), [([4] * 4, 16), ([4] * 99 + [5], 16), ([4, 5], 64), ([16] * 99 + [17], 64)])
def test_the_tile_is_of_the_floored_average(rows, tile):
    """FlashInfer divides integers: 100 requests of 4 rows and one more row still take the tile of 16."""
    model = CostModel(cost_report.config((32, 8)), PROFILES["h200"])
    assert TILES[model.tile_index(sum(rows) * 4 // len(rows))] == tile


@given(st.integers(0, 2**31 - 1))
def test_rounding_is_up_idempotent_and_bounded(tokens):
    rounded = int(round_tokens(np.array([tokens]))[0])
    assert tokens <= rounded <= tokens + max(16, tokens // 4)
    assert int(round_tokens(np.array([rounded]))[0]) == rounded


def test_rounding_never_decreases():
    rounded = round_tokens(np.arange(20_000))
    assert (np.diff(rounded) >= 0).all()
    # A decode step moves the rounded length of a request at 4096 tokens once in 1024 steps.
    assert len(np.unique(round_tokens(np.arange(4097, 8193)))) == 4


def test_a_window_shortens_what_flat_is_predicted_to_read():
    work = tree("1,64_8192,64")
    for window, longest in ((1023, 80.0), (-1, 300.0)):
        config = cost_report.config((32, 8)).model_copy(update={"window_left": window})
        part = CascadePlanner(config).plan(work.block_tables, work.seq_lens).parts[0]
        assert longest / 2 < part.predicted_us["flat"] < longest
        assert part.backends[0] in ("fa2", "fa2_uncut") or window < 0


def test_choices_depend_on_rounded_lengths_alone():
    work = tree("1,8,64_2048,512,300")
    planner = CascadePlanner(cost_report.config((32, 8)), PlannerPolicy(executor="levels"))
    plans = [planner.plan(work.block_tables, work.seq_lens - back) for back in (0, 1, 40)]
    assert len({tuple(p.parts[0].predicted_us.values()) for p in plans}) == 1
    assert len({p.parts[0].kept.tobytes() for p in plans}) == 1


def test_profiles_round_trip_and_refuse_nonsense():
    for name, profile in PROFILES.items():
        assert profile.name == name
        assert DeviceProfile.model_validate_json(profile.model_dump_json()) == profile
    values = PROFILES["h200"].model_dump()
    for change, match in (
        ({"num_sms": 0}, "greater than or equal to 1"),
        ({"hbm_gb_per_s": float("nan")}, "hbm_gb_per_s\n  Input should be"),
        ({"tile_efficiency": (0.1, 0.2)}, "Field required"),
        ({"block_us": (1.0, 0.0, 1.0)}, "greater than or equal to"),
        ({"tile_efficiency": (0.2, 0.4, 1.5)}, "less than or equal to 1"),
        ({"tensor_tflops": 5e-324}, "greater than or equal to"),
        ({"clock": 1.9}, "Extra inputs"),
    ):
        with pytest.raises(ValidationError, match=match):
            DeviceProfile(**(values | change))


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_profile_cascades_where_it_is_plain(name):
    work = tree("1,64_8192,256")
    part = CascadePlanner(cost_report.config((32, 8)), profile=name).plan(work.block_tables, work.seq_lens).parts[0]
    assert part.executor == "segments"
    assert part.kept.all()
    assert part.predicted_us["segments"] < 0.7 * part.predicted_us["flat"]

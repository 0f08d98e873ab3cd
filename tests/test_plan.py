"""The plan object: immutability, equality, pickling, and FlashInfer's form of it."""

import inspect
import pickle

import numpy as np
import pytest

from flashinfer_cascade import CapacityError, CascadeConfig, CascadePlanner, InvalidBatchError, PlannerPolicy

FORCED = PlannerPolicy(executor="levels", fold=False)


def config(**changes):
    values = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
    return CascadeConfig(**(values | changes))


def three_levels(policy=FORCED, **changes):
    """Two requests under [1 2] + [3], one under [1 2] alone, one apart; interleaved."""
    tables = [[1, 2, 3, 10], [20, 21], [1, 2, 3, 11], [1, 2, 12]]
    return CascadePlanner(config(**changes), policy).plan(tables, [49, 32, 64, 33])


def test_arrays_are_read_only():
    plan = three_levels()
    for array in plan._arrays():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    with pytest.raises(AttributeError):
        plan.row_order = None


def test_levels():
    plan = three_levels()
    assert plan.request_order.tolist() == [0, 2, 3, 1]
    assert plan.row_order.tolist() == [0, 2, 3, 1]
    assert plan.row_rank.tolist() == [0, 3, 1, 2]
    top, middle, own = plan.levels()
    assert [x.tolist() for x in top] == [[0, 3, 4], [0, 2, 2], [1, 2], [16, 0]]
    assert [x.tolist() for x in middle] == [[0, 2, 4], [0, 1, 1], [3], [16, 0]]
    assert [x.tolist() for x in own] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [10, 11, 12, 20, 21], [1, 16, 1, 16]]


def test_segments_view():
    plan = three_levels()
    assert plan.seg_row_indptr.tolist() == [0, 3, 5, 6, 7, 8, 9]
    assert plan.seg_rows.tolist() == [0, 2, 3, 0, 2, 0, 2, 3, 1]
    assert plan.seg_kv_start.tolist() == [0, 32, 48, 48, 32, 0]
    usage = plan.usage()
    assert (usage.num_segments, usage.num_partials, usage.num_levels, usage.num_slots) == (6, 9, 3, 2)
    assert usage.num_page_indices == 8


def test_levels_of_one_part_and_of_all():
    tables = [[1, 2, 10], [1, 2, 11], [1, 2, 12, 13, 14], [1, 2, 15, 16, 17]]
    plan = CascadePlanner(config(), FORCED).plan(tables, [33, 33, 80, 80], [1, 1, 40, 40])
    decode, append = plan.parts
    assert [x.tolist() for x in plan.levels(decode)[0]] == [[0, 2], [0, 2], [1, 2], [16]]
    assert [x.tolist() for x in plan.levels(append)[0]] == [[0, 80], [0, 2], [1, 2], [16]]
    assert [x.tolist() for x in plan.levels()[0]] == [[0, 2, 82], [0, 2, 4], [1, 2, 1, 2], [16, 16]]
    assert plan.levels()[1].qo_indptr.tolist() == [0, 1, 2, 42, 82]


def test_equality_is_of_content():
    assert three_levels() == three_levels()
    assert three_levels() != three_levels(page_size=16, num_kv_heads=16)
    assert three_levels() != three_levels(PlannerPolicy(executor="flat"))
    assert three_levels() != "a plan"
    with pytest.raises(TypeError, match="unhashable"):
        hash(three_levels())


def test_pickles_are_equal_and_small():
    plan = three_levels()
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    with pytest.raises(ValueError, match="read-only"):
        copy.seg_pages[0] = 1
    tables = np.arange(256 * 2048).reshape(256, 2048)
    big = CascadePlanner(config(max_kv_pages=2**20)).plan(tables, [2048 * 16] * 256)
    # The page ids themselves are 2 MiB.
    assert len(pickle.dumps(big)) < 2 * 2**20 + 64 * 2**10


def test_to_flashinfer_gives_the_arguments_of_the_wrappers_plan():
    torch = pytest.importorskip("torch")
    arguments = three_levels(logits_soft_cap=30.0).to_flashinfer()
    assert [t.tolist() for t in arguments["qo_indptr_arr"]] == [[0, 3, 4], [0, 2, 4], [0, 1, 2, 3, 4]]
    assert [t.tolist() for t in arguments["paged_kv_indptr_arr"]] == [[0, 2, 2], [0, 1, 1], [0, 1, 2, 3, 5]]
    assert [t.tolist() for t in arguments["paged_kv_indices_arr"]] == [[1, 2], [3], [10, 11, 12, 20, 21]]
    assert [t.tolist() for t in arguments["paged_kv_last_page_len"]] == [[16, 0], [16, 0], [1, 16, 1, 16]]
    for value in arguments.values():
        if isinstance(value, list):
            assert all(t.dtype == torch.int32 and t.device.type == "cpu" for t in value)
    rest = {k: v for k, v in arguments.items() if not isinstance(v, list)}
    assert rest == {
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "page_size": 16,
        "causal": False,
        "sm_scale": 128**-0.5,
        "window_left": -1,
        "logits_soft_cap": 30.0,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }


def test_to_flashinfer_names_what_the_installed_flashinfer_takes():
    pytest.importorskip("torch")
    flashinfer = pytest.importorskip("flashinfer")
    signature = inspect.signature(flashinfer.MultiLevelCascadeAttentionWrapper.plan)
    arguments = three_levels().to_flashinfer()
    signature.bind(None, **arguments)
    required = {
        name
        for name, p in signature.parameters.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and name != "self"
    }
    assert required <= set(arguments)


def test_padding_to_the_shape_of_a_captured_wrapper():
    pytest.importorskip("torch")
    arguments = three_levels().to_flashinfer(num_levels=4, slots=[1, 2, 3, 6])
    assert [t.tolist() for t in arguments["qo_indptr_arr"]] == [
        [0, 4],
        [0, 3, 4],
        [0, 2, 4, 4],
        [0, 1, 2, 3, 4, 4, 4],
    ]
    assert [t.tolist() for t in arguments["paged_kv_last_page_len"]] == [
        [0],
        [16, 0],
        [16, 0, 0],
        [1, 16, 1, 16, 0, 0],
    ]
    assert arguments["paged_kv_indptr_arr"][0].tolist() == [0, 0]
    assert all(len(t) == 8 for t in three_levels().to_flashinfer(slots=8)["paged_kv_last_page_len"])


def test_what_does_not_fit_a_captured_wrapper_is_refused():
    pytest.importorskip("torch")
    with pytest.raises(CapacityError, match="num_levels 3 > 2"):
        three_levels().to_flashinfer(num_levels=2)
    with pytest.raises(CapacityError, match="num_slots 4 > 3"):
        three_levels().to_flashinfer(slots=3)
    assert len(three_levels().to_flashinfer(slots=np.int64(8))["qo_indptr_arr"]) == 3
    assert len(three_levels().to_flashinfer(slots=np.array([4, 5, 6]))["qo_indptr_arr"][2]) == 7
    with pytest.raises(InvalidBatchError, match="the part 'decode' belongs to another plan"):
        three_levels().levels(three_levels().parts[0])
    with pytest.raises(CapacityError, match="slots names 2 levels, but there are 3"):
        three_levels().to_flashinfer(slots=[4, 4])
    for wrong, match in (
        ({"slots": "many"}, "slots is 'many': give an integer of at least 0"),
        ({"slots": [4, 4, -1]}, "slots is -1: give an integer"),
        ({"slots": [4, [4], 4]}, "slots is a list: give an integer"),
        ({"slots": np.array(4)}, "slots is a ndarray: give an integer"),
        ({"num_levels": 3.0}, r"num_levels is 3\.0: give an integer of at least 1"),
        ({"part": "decode"}, "part is 'decode': take it from the plan's parts"),
    ):
        with pytest.raises(InvalidBatchError, match=match):
            three_levels().to_flashinfer(**wrong)


def test_padding_of_several_rows_makes_nothing_causal():
    # A captured graph fixes whether its last level is causal; padding must not change that.
    plan = CascadePlanner(config(), FORCED).plan([[1, 2, 10], [1, 2, 11], []], [40, 41, 0], [1, 1, 3])
    assert plan.row_pos.tolist() == [39, 40, -1, -1, -1]
    assert not plan.causal
    assert plan.levels()[1].qo_indptr.tolist() == [0, 1, 2, 5]


def test_the_last_level_is_causal_when_some_request_appends():
    pytest.importorskip("torch")
    tables = [[1, 2, 10], [1, 2, 11]]
    plan = CascadePlanner(config(), FORCED).plan(tables, [40, 41], [8, 1])
    arguments = plan.to_flashinfer()
    assert arguments["causal"]
    assert [t.tolist() for t in arguments["qo_indptr_arr"]] == [[0, 9], [0, 8, 9]]

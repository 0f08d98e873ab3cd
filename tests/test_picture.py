"""The picture: well-formed, self-contained, of bounded size, and with the plan's numbers in it."""

import dataclasses
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from flashinfer_cascade import CascadeConfig, CascadePlanner, InvalidBatchError, PlannerPolicy
from flashinfer_cascade.picture import svg, write_picture

FORCED = PlannerPolicy(executor="levels", fold=False, max_levels=16)
FLAT = PlannerPolicy(executor="flat")
NS = {"svg": "http://www.w3.org/2000/svg"}
SHAPES = ("rect", "path")


def plan(tables, seq_lens, qo_lens=None, policy=FORCED):
    config = CascadeConfig(
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=16,
        dtype="bfloat16",
        max_batch_size=1024,
        max_kv_pages=2**20,
    )
    return CascadePlanner(config, policy).plan(tables, seq_lens, qo_lens)


def binary_tree(depth, policy=FORCED, seed=0):
    """A binary tree of nodes with one page, and requests with own KV of random length."""
    rng = np.random.default_rng(seed)
    tables, seq_lens = [], []
    for r in range(2**depth):
        path = [2**d + (r >> (depth - d)) for d in range(depth)]
        own = int(rng.integers(1, 65))
        tables.append(path + [2**15 + 4 * r + i for i in range(4)])
        seq_lens.append(16 * depth + own)
    return plan(tables, seq_lens, policy=policy)


def prefix(requests, pages, own_tokens, **options):
    tables = [[*range(pages), *range(2**15 + 64 * r, 2**15 + 64 * r + 64)] for r in range(requests)]
    return plan(tables, [16 * pages + own_tokens] * requests, **options)


def parse(picture):
    """Elements with a tooltip, as (element, tooltip); everything drawn lies inside the picture."""
    root = ET.fromstring(picture)
    assert root.tag == f"{{{NS['svg']}}}svg"
    width = float(root.get("width"))
    for rect in root.iterfind(".//svg:g//svg:rect", NS):
        x, w = float(rect.get("x")), float(rect.get("width"))
        assert w >= 0
        assert float(rect.get("height")) >= 0
        assert -0.1 <= x <= x + w <= width + 0.1
    return [(e, e.find("svg:title", NS).text) for e in root.iter() if e.tag.split("}")[1] in SHAPES and len(e)]


def texts(picture):
    return [e.text for e in ET.fromstring(picture).iterfind(".//svg:text", NS)]


def test_kept_nodes_are_drawn_over_their_requests():
    picture = svg(prefix(64, 64, 200))
    shapes = parse(picture)
    ((kept, title),) = [s for s in shapes if s[1].startswith("kept")]
    assert title == "kept, level 0: 64 requests share 1024 tokens (4.19 MB), one read of 1024 tokens"
    assert (kept.get("x"), kept.get("y"), kept.get("width")) == ("76", "0", "1024")
    assert float(kept.get("height")) == pytest.approx(440 * 1024 / 1224, abs=0.1)
    tails = [title for _, title in shapes if title.startswith("own KV")]
    assert tails == [f"own KV of request {r}: 200 tokens" for r in range(64)]
    assert "1024 tokens \N{MULTIPLICATION SIGN} 64 requests" in texts(picture)


def test_headline_numbers():
    the_plan = prefix(64, 64, 200)
    words = " ".join(texts(svg(the_plan)))
    us = the_plan.parts[0].predicted_us
    assert "KV read a layer: 321 MB flat → 56.6 MB (17.6%)" in words
    assert "decode: levels, 2 levels, 64 requests, 64 rows" in words
    assert f"predicted flat {us['flat']:.1f} us, levels {us['levels']:.1f} us a layer" in words
    assert "kept: read once (level 0)" in words
    assert "64 requests in plan order; own KV: 200 tokens" in words


def test_merged_nodes_are_hatched_and_say_how_often_they_are_read():
    picture = svg(prefix(64, 64, 200, policy=FLAT))
    assert [title for _, title in parse(picture) if title.startswith("merged")] == [
        "merged: 64 requests share 1024 tokens (4.19 MB), read 64 times"
    ]
    assert "1024 tokens \N{MULTIPLICATION SIGN} 64 requests, read 64 times" in texts(picture)
    assert "merged: shared, but read again by each segment below" in texts(picture)
    assert not [text for text in texts(picture) if text.startswith("kept")]


def test_very_unequal_lengths_get_another_scale_and_the_axis_says_so():
    linear, root = texts(svg(prefix(64, 64, 200))), texts(svg(prefix(64, 2048, 100)))
    assert "tokens along the sequence" in linear
    assert "tokens along the sequence (heights: square roots of lengths)" in root
    assert {"0", "32768", "32868"} <= set(root)


def test_parts_stand_side_by_side():
    tables = [[1, 2, 10], [1, 2, 11], [1, 2, 12, 13, 14], [1, 2, 15, 16, 17]]
    picture = svg(plan(tables, [33, 33, 80, 80], [1, 1, 40, 40]))
    boxes = [
        (float(e.get("x")), float(e.get("width"))) for e, title in parse(picture) if title.startswith("kept, level 0")
    ]
    (left, width), (right, _) = boxes
    assert left + width < right
    words = " ".join(texts(picture))
    assert "decode: levels" in words
    assert "append: levels" in words


@pytest.mark.parametrize("policy", [None, FORCED, FLAT])
def test_size_and_detail_of_the_largest_forests(policy):
    picture = svg(binary_tree(10, policy))
    assert len(picture.encode()) < 300_000
    shapes = parse(picture)
    assert sum(title.startswith(("kept", "merged")) for _, title in shapes) == 1023
    own = [title for _, title in shapes if title.startswith("own KV")]
    assert 32 <= len(own) <= 256
    assert sum(int(re.search(r"of (\d+) request", title)[1]) for title in own) == 1024


def test_outlines_of_many_requests_follow_each_length():
    the_plan = binary_tree(9, FORCED)
    picture = svg(the_plan)
    path = next(e for e, title in parse(picture) if title.startswith("own KV")).get("d")
    bottoms = {float(y) for y in re.findall(r"V([\d.]+)", path)}
    scale = 440 / (the_plan.seg_kv_start + the_plan.seg_kv_len).max()
    first = (16 * 9 + the_plan.seg_kv_len[the_plan.parts[0].seg_end - 512]) * scale
    assert min(abs(y - first) for y in bottoms) <= 0.1


@pytest.mark.parametrize("policy", [None, FORCED, FLAT])
def test_a_chain_of_500_nodes(policy):
    tables = [[*range(r + 1), 100_000 + r] for r in range(501)]
    picture = svg(plan(tables, [16 * (r + 1) + 5 for r in range(501)], policy=policy))
    assert sum(title.startswith(("kept", "merged")) for _, title in parse(picture)) == 500
    assert len(picture.encode()) < 300_000


def test_one_request():
    picture = svg(plan([[1, 2, 3]], [40], policy=None))
    assert [title for _, title in parse(picture)] == ["own KV of request 0: 40 tokens"]
    assert "1 request in plan order; own KV: 40 tokens" in texts(picture)


def test_no_sharing():
    picture = svg(plan([[4 * r, 4 * r + 1, 4 * r + 2] for r in range(64)], [33 + r % 15 for r in range(64)]))
    assert len(parse(picture)) == 64
    assert "64 requests in plan order; own KV: 33 to 47 tokens" in texts(picture)
    assert not [text for text in texts(picture) if text.startswith(("kept", "merged"))]


def test_padding_is_left_blank_and_counted():
    picture = svg(plan([[1, 2, 10], [1, 2, 11], [], []], [40, 41, 0, 0]))
    assert "4 requests in plan order, 2 of them padding; own KV: 8 to 9 tokens" in texts(picture)
    parse(picture)
    assert "2 requests in plan order, 2 of them padding" in texts(svg(plan([[], []], [0, 0])))


def test_text_is_escaped():
    the_plan = prefix(4, 4, 20)
    part = dataclasses.replace(the_plan.parts[0], reason='<script>alert("&")</script> ]]>')
    picture = svg(dataclasses.replace(the_plan, parts=(part,)))
    assert "<script>" not in picture
    assert '<script>alert("&")</script> ]]>' in " ".join(texts(picture))


def test_nothing_is_loaded_from_elsewhere():
    picture = svg(prefix(64, 64, 200))
    assert re.findall(r"https?://[^\"]*", picture) == [NS["svg"]]
    assert "href" not in picture


def test_it_is_the_same_every_time():
    assert svg(binary_tree(6)) == svg(binary_tree(6))


def test_writing(tmp_path):
    the_plan = prefix(4, 4, 20)
    write_picture(the_plan, tmp_path / "forest.SVG")
    write_picture(the_plan, str(tmp_path / "forest.svg"))
    assert (tmp_path / "forest.svg").read_text(encoding="utf-8") == svg(the_plan)


@pytest.mark.parametrize("name", ["forest.png", "forest"])
def test_other_formats_are_refused(tmp_path, name):
    with pytest.raises(
        InvalidBatchError, match=rf"{re.escape(name)}' does not end in \.svg.*write forest\.svg instead"
    ):
        write_picture(prefix(4, 4, 20), tmp_path / name)
    assert not list(tmp_path.iterdir())

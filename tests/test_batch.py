"""Block tables in every engine's form, and what is refused."""

import time

import numpy as np
import pytest

from flashinfer_cascade import CapacityError, CascadeConfig, CsrTables, InvalidBatchError
from flashinfer_cascade.batch import make_batch
from flashinfer_cascade.pages import INDEX_SLACK

TABLES = [[5, 3, 9], [5, 3], [7]]
SEQ_LENS = [9, 8, 1]


def config(**changes):
    values = {
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 4,
        "dtype": "bfloat16",
        "max_batch_size": 8,
        "max_kv_pages": 1000,
    }
    return CascadeConfig(**(values | changes))


def padded(fill, extra=0, dtype=np.int32):
    out = np.full((3, 3 + extra), fill, dtype)
    for r, table in enumerate(TABLES):
        out[r, : len(table)] = table
    return out


def as_torch(array):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array)


FORMS = {
    "lists": TABLES,
    "tuples": tuple(map(tuple, TABLES)),
    "arrays": [np.array(t) for t in TABLES],
    "mixed": [TABLES[0], np.array(TABLES[1]), tuple(TABLES[2])],
    "lookahead lists": [[*t, 11, 12] for t in TABLES],
    "padded 0": padded(0),
    "padded -1": padded(-1, dtype=np.int64),
    "wide": padded(999, extra=50),
    "more rows than requests": np.vstack([padded(0), padded(0)]),
    "transposed": np.ascontiguousarray(padded(0).T).T,
    "strided": np.repeat(padded(-1), 2, axis=1)[:, ::2],
    "uint16": padded(0, dtype=np.uint16),
    "csr": CsrTables(np.array([0, 3, 5, 6]), np.array([5, 3, 9, 5, 3, 7])),
    "csr with slack": CsrTables([0, 3, 5, 6], [5, 3, 9, 5, 3, 7, 0, 0]),
    "csr lookahead": CsrTables(np.array([0, 4, 6, 9]), np.array([5, 3, 9, 8, 5, 3, 7, 1, 2])),
}


@pytest.mark.parametrize("tables", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_batch(tables):
    batch = make_batch(config(), tables, SEQ_LENS)
    assert batch.page_begin.tolist() == [0, 3, 5]
    assert batch.page_counts.tolist() == [3, 2, 1]
    assert batch.pages.ids[:6].tolist() == [5, 3, 9, 5, 3, 7]
    assert batch.pages.ids[6:].tolist() == [-1] * INDEX_SLACK
    assert batch.seq_lens.tolist() == SEQ_LENS
    assert batch.qo_lens.tolist() == [1, 1, 1]


def test_torch_tensors():
    lens = as_torch(np.array(SEQ_LENS))
    for tables in (as_torch(padded(-1)), [as_torch(np.array(t)) for t in TABLES]):
        batch = make_batch(config(), tables, lens, as_torch(np.array([2, 1, 1])))
        assert batch.pages.ids[:6].tolist() == [5, 3, 9, 5, 3, 7]
        assert batch.qo_lens.tolist() == [2, 1, 1]


def test_tensors_on_another_device_are_refused_without_a_copy():
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidBatchError, match=r"block_tables lies on meta.*CPU copy"):
        make_batch(config(), torch.zeros(3, 3, dtype=torch.int32, device="meta"), SEQ_LENS)
    with pytest.raises(InvalidBatchError, match="seq_lens lies on meta"):
        make_batch(config(), TABLES, torch.zeros(3, dtype=torch.int32, device="meta"))


def test_the_batch_owns_its_arrays():
    table, lens = padded(0), np.array(SEQ_LENS)
    batch = make_batch(config(), table, lens)
    table[:], lens[:] = 1, 1
    assert batch.pages.ids[:3].tolist() == [5, 3, 9]
    assert batch.seq_lens.tolist() == SEQ_LENS


def test_empty_arrays_pad_whatever_their_type():
    batch = make_batch(config(), [np.array([1, 2]), np.array([]), ()], [8, 0, 0])
    assert batch.page_counts.tolist() == [2, 0, 0]


def test_a_tensor_that_requires_grad_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidBatchError, match="seq_lens is not an array of integers"):
        make_batch(config(), [[1]], torch.tensor([4.0], requires_grad=True))


def test_one_long_request_among_many_short_ones_costs_what_it_holds():
    table = np.broadcast_to(np.arange(2**17, dtype=np.int32), (4096, 2**17))
    lens = np.full(4096, 100)
    lens[0] = 2**17
    big = config(page_size=1, max_batch_size=4096, max_kv_pages=2**17, max_kv_indices=2**20)
    batch = make_batch(big, table, lens)
    assert batch.num_pages == 2**17 + 4095 * 100
    assert min(_seconds(lambda: make_batch(big, table, lens)) for _ in range(3)) < 0.1


def test_padding_requests_need_no_pages():
    batch = make_batch(config(), [[1], [], []], [1, 0, 0])
    assert batch.page_counts.tolist() == [1, 0, 0]
    assert batch.shareable_pages().tolist() == [0, 0, 0]


def test_stale_ids_behind_seq_len_are_never_looked_at():
    table = np.full((3, 40), 10**9)
    table[:, 0] = [1, 2, 3]
    batch = make_batch(config(), table, [4, 3, 0])
    assert batch.pages.ids[:2].tolist() == [1, 2]


LONG = 2**70
BAD = {
    "empty": (([], []), "batch is empty"),
    "negative length": (([[1]], [-3]), r"seq_lens\[0\] = -3 is outside"),
    "huge length": (([[1]], [2**31]), r"seq_lens\[0\] = 2147483648 is outside"),
    "beyond int64": (([[1]], [LONG]), "seq_lens holds object values|not an array of integers"),
    "nan length": (([[1]], [float("nan")]), "seq_lens holds float64 values"),
    "float length": (([[1]], [3.0]), "seq_lens holds float64 values"),
    "bool length": (([[1]], [True]), "seq_lens holds bool values"),
    "2-D lengths": (([[1]], [[3]]), r"seq_lens has shape \(1, 1\)"),
    "ragged lengths": (([[1]], [[3], [4, 5]]), "seq_lens is not an array of integers"),
    "text lengths": (([[1]], "3"), "seq_lens is '3': give a sequence"),
    "mixed bool lengths": (([[1], [1]], [True, 3]), "seq_lens holds bool values"),
    "masked lengths": (([[1]], np.ma.masked_array([3])), "seq_lens is a MaskedArray"),
    "scalar tables": ((np.array(5), [4]), "block_tables is a ndarray"),
    "scalar table": (([np.array(5)], [4]), "request 0: its table is a ndarray"),
    "set of tables": (({(1,), (2,)}, [4, 4]), "block_tables is a set"),
    "set table": (([{1, 2}], [8]), "request 0: its table is a set"),
    "masked table": ((np.ma.masked_array([[1]]), [4]), "block_tables is a MaskedArray"),
    "length only": ((type("Len", (), {"__len__": lambda self: 1})(), [4]), "block_tables is a Len"),
    "csr wrap": (
        (CsrTables([0, 2**63 - 1, -(2**63), -2, 0], [1, 2, 3, 4]), [0, 0, 0, 8]),
        "must start at 0 and never decrease",
    ),
    "short table": (([[1, 2], [1]], [8, 8]), r"request 1: its table has 1 pages, but seq_lens\[1\] = 8 needs 2"),
    "short padded": ((np.zeros((2, 1), int), [4, 8]), "request 1: its table has 1 pages"),
    "negative id": (([[1, 2], [3, -1]], [8, 8]), "request 1: page id -1 at position 1"),
    "id beyond the pool": (([[1], [1000]], [4, 4]), r"page id 1000 at position 0 is outside \[0, max_kv_pages=1000\)"),
    "id beyond int32": (([[2**40]], [4]), f"page id {2**40}"),
    "id beyond int64": (([[1], [3, LONG]], [4, 8]), f"request 1: page id {LONG} at position 1 is not a 64-bit"),
    "float id": (([[1, 2.5]], [8]), "request 0: page id 2.5 at position 1 is not a 64-bit integer"),
    "none id": (([[1, None]], [8]), "request 0: page id None at position 1"),
    "bool id": (([[5, 6], [1, 7, True]], [8, 12]), "request 1: page id True at position 2 is a bool: give integers"),
    "false id": (([[], [False, 7], [0]], [0, 8, 4]), "request 1: page id False at position 0 is a bool"),
    "bool id in a tuple": (([(3, True)], [8]), "request 0: its table holds bool values"),
    "no lengths": (([[1]], None), "seq_lens is None: give a sequence"),
    "float table": ((np.ones((1, 2)), [8]), "block_tables holds float64 values"),
    "uint64 overflow": ((np.full((1, 1), 2**64 - 1, np.uint64), [4]), "above the int64 range"),
    "a number": ((3, [4]), "block_tables is 3: give a list"),
    "text": (("ab", [4, 4]), "block_tables is 'ab': give a list"),
    "flat list": (([1, 2], [4, 4]), "request 0: its table is 1: give a sequence"),
    "nested table": (([np.ones((2, 2), int)], [4]), "request 0: its table has shape"),
    "too few tables": (([[1]], [4, 4]), "1 block tables for 2 seq_lens"),
    "too many tables": (([[1], [2]], [4]), "2 block tables for 1 seq_lens"),
    "too few rows": ((np.zeros((1, 1), int), [4, 4]), "1 block tables for 2 seq_lens"),
    "csr short": ((CsrTables([0, 1], [5]), [4, 4]), "kv_indptr has 2 entries for 2 seq_lens"),
    "csr start": ((CsrTables([1, 2], [5, 6]), [4]), r"kv_indptr\[0\] = 1, but kv_indptr must start at 0"),
    "csr decreasing": ((CsrTables([0, 2, 1], [5, 6]), [4, 4]), r"kv_indptr\[2\] = 1, but .* never decrease"),
    "csr beyond": ((CsrTables([0, 3], [5, 6]), [9]), "kv_indptr ends at 3, but kv_indices has 2"),
    "qo count": (([[1]], [4], [1, 1]), "qo_lens has 2 entries for 1 seq_lens"),
    "qo zero": (([[1]], [4], [0]), r"qo_lens\[0\] = 0 is outside"),
    "qo beyond": (([[1], [2]], [4, 3], [1, 4]), r"qo_lens\[1\] = 4 exceeds seq_lens\[1\] = 3"),
    "qo overflow": (([[1]], [4], [LONG]), "qo_lens"),
}


@pytest.mark.parametrize(("args", "match"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(args, match):
    with pytest.raises(InvalidBatchError, match=match):
        make_batch(config(), *args)


def test_capacities():
    with pytest.raises(CapacityError, match="9 requests exceed max_batch_size=8"):
        make_batch(config(), [[1]] * 9, [1] * 9)
    with pytest.raises(CapacityError, match="20 query rows exceed max_num_rows=16"):
        make_batch(config(max_num_rows=16), [[1, 2, 3, 4, 5]], [20], [20])
    with pytest.raises(CapacityError, match="hold 4 page ids, above max_kv_indices=3"):
        make_batch(config(max_kv_indices=3), [[1, 2], [1, 2]], [8, 8])


def test_a_million_page_request():
    batch = make_batch(config(max_kv_pages=2**21, max_kv_indices=2**21, page_size=1), [np.arange(10**6)], [10**6])
    assert batch.num_pages == 10**6


def test_ten_million_ids_validate_in_well_under_a_second():
    table = np.random.default_rng(0).integers(0, 2**21, (100, 100_000), dtype=np.int32)
    big = config(max_kv_pages=2**21, max_kv_indices=2**24, max_batch_size=100, page_size=1)
    best = min(_seconds(lambda: make_batch(big, table, [100_000] * 100)) for _ in range(3))
    assert best < 0.5


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

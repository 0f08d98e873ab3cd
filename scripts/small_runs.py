"""Small runs of the segments' kernels, held against the fp64 oracle: something for compute-sanitizer to watch.

compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/small_runs.py
compute-sanitizer --tool racecheck --error-exitcode 1 python scripts/small_runs.py
"""

import numpy as np
import torch

from flashinfer_cascade import CascadeConfig, CascadePlanner, CascadeRuntime, PlannerPolicy
from flashinfer_cascade.testing import (
    assert_close,
    dense_attention,
    make_kv_cache,
    make_q,
    plain_attention,
    random_batch,
)

BASE = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
POLICY = PlannerPolicy(executor="segments", fold=False, max_levels=64)

# Changes to the configuration, most new tokens of a request.
CASES = {
    "decode": ({}, 1),
    "appends": ({}, 3),
    "one KV head, page size 1": ({"num_kv_heads": 1, "page_size": 1}, 1),
}


def main():
    for name, (changes, max_new) in CASES.items():
        config = CascadeConfig(**(BASE | changes))
        rng = np.random.default_rng(1)
        batch = random_batch(rng, page_size=config.page_size, num_requests=14, max_new=max_new, max_len=400)
        q = make_q(config, batch.num_rows, device="cuda")
        cache = make_kv_cache(config, batch.num_pages, device="cuda")
        runtime = CascadeRuntime(config, "cuda")
        runtime.load(CascadePlanner(config, POLICY).plan(*batch))
        out = runtime.run(q, cache).cpu()
        oracle, _ = dense_attention(config, q.cpu(), cache.cpu(), *batch)
        assert_close(out, oracle, plain_attention(config, q.cpu(), cache.cpu(), *batch))
        print(f"{name}: {batch.num_rows} rows within the error budget")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()

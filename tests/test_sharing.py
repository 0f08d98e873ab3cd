"""Forests are looked for again when they may have changed, and not otherwise."""

import pytest

from flashinfer_cascade import CascadeConfig, CascadePlanner, PlannerPolicy

CONFIG = CascadeConfig(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=4, dtype="bfloat16")


@pytest.fixture(params=[True, False], ids=["native", "python"])
def session(request):
    policy = PlannerPolicy(executor="levels", fold=False)
    session = CascadePlanner(CONFIG, policy, native=request.param).session()
    for r in range(6):
        session.add(r, [*range(20), *range(100 * r + 100, 100 * r + 120)], 90, computed_len=89)
    return session


def forest(session):
    return session.plan().parts[0].forest


def test_growth_behind_the_first_page_of_ones_own_changes_nothing(session):
    first = forest(session)
    for step in range(40):
        session.step({r: 1000 + 6 * step + r for r in range(6)} if session.seq_len(0) % 4 == 0 else None)
        session.append(step % 6, 1, [2000 + step])
        session.plan()
        session.truncate(step % 6, session.seq_len(step % 6) - 1)
        assert forest(session) is first


def test_who_leaves_the_decodes_for_the_appends_takes_its_sharing_along(session):
    assert forest(session).end.tolist() == [6]
    session.append(4, 40, range(4000, 4008))
    parts = session.plan().parts
    assert [part.forest.order.tolist() for part in parts] == [[0, 1, 2, 3, 5], [4]]
    session.step({4: 4008})
    assert [part.forest.end.tolist() for part in session.plan().parts] == [[6]]

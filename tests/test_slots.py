"""Slots: the order of the batch follows who came and left."""

from flashinfer_cascade.slots import ENDLESS, Slots


def slots_of(*ids):
    slots = Slots(page_size=4, most=100)
    for id in ids:
        if slots.is_full:
            slots.resize()
        slots.set_length(slots.enter(id, 0, 1), 5, 2)
    return slots


def names(slots):
    by_slot = {slot: id for id, slot in slots.by_id.items()}
    return [by_slot[slot] for slot in slots.in_order().tolist()]


def test_order_is_that_of_coming():
    slots = slots_of(*"abcd")
    assert names(slots) == list("abcd")
    slots.leave("b")
    slots.enter("e", 0, 1)  # in the slot of b
    slots.leave("a")
    assert names(slots) == list("cde") == list(slots.by_id)
    slots.enter("f", 0, 1)
    slots.leave("f")
    slots.leave("e")
    slots.enter("g", 0, 1)
    assert names(slots) == list("cdg")
    slots.reorder({id: slots.by_id[id] for id in "gcd"})
    slots.leave("c")
    assert names(slots) == list("gd")


def test_slots_of_nobody_are_passed_by():
    slots = slots_of(*range(70))
    assert len(slots.seq_lens) == 100
    slot = slots.leave(3)
    assert (slots.seq_lens[slot], slots.grows[slot], slots.space[slot]) == (0, 0, ENDLESS)
    assert slots.grows.sum() == 69
    slots.set_length(slots.by_id[4], 0, 2)
    assert slots.space[slots.by_id[4]] == ENDLESS
    assert slots.grows.sum() == 68

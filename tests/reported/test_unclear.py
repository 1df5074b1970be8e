"""What was unclear: texts that name the thing, and arguments that mean what they say."""

from __future__ import annotations

import torch

import checkpoints_zoo as zoo


def test_members_are_aligned_to_the_first_selected_one() -> None:
    """Issue 16, item 6: a selection without member 0."""
    members = zoo.load("convnet-digits", members="5,7,9")
    aligned, by_id = members.align(), members.align(to=5)
    assert str(aligned) == str(by_id)
    for name, tensor in aligned.stack().items():
        assert torch.equal(tensor, by_id.stack()[name])
        assert torch.equal(tensor[0], members.stack()[name][0])
    summary = zoo.alignment(members)
    assert (summary.to, int(summary.total[0])) == ("member 5", 0)

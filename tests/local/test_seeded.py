import torch

from fedcore.local import seeded


def draw(*arguments, **options):
    with seeded(*arguments, **options):
        return torch.rand(3)


def test_numbers_depend_on_the_arguments_alone():
    torch.manual_seed(1)
    first = draw(0, "a", round=1, client=2)
    torch.manual_seed(2)
    assert torch.equal(draw(0, "a", round=1, client=2), first)
    others = [draw(1, "a", round=1, client=2), draw(0, "b", round=1, client=2), draw(0, "a", client=2), draw(0, "a")]
    assert not any(torch.equal(other, first) for other in others)


def test_torch_goes_on_as_before():
    torch.manual_seed(3)
    due = torch.rand(2)
    torch.manual_seed(3)
    draw(0, "a")
    assert torch.equal(torch.rand(2), due)

import torch

from kernels.attention.write_latent import write_latent


def test_only_the_slots_change() -> None:
    cache = torch.zeros(3, 4, 5)
    slots = torch.tensor([9, 0, 6])
    latent, key_rope = torch.randn(3, 3), torch.randn(3, 2)
    write_latent(cache, slots, latent, key_rope)
    for t, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, 4)
        assert torch.equal(cache[page, offset, :3], latent[t])
        assert torch.equal(cache[page, offset, 3:], key_rope[t])
        cache[page, offset] = 0
    assert not cache.any()


def test_no_tokens() -> None:
    cache = torch.zeros(3, 4, 5)
    write_latent(cache, torch.empty(0, dtype=torch.int64), torch.empty(0, 3), torch.empty(0, 2))
    assert not cache.any()

"""Ulysses: sequences sharded over ranks, attention on whole sequences of a rank's share of the heads.

Two all-to-alls around attn_qat.attention, with gradients through both. Each rank moves 1 / ranks of q, k, v
and the output; keys are never gathered.

`python examples/ulysses.py` runs it on two CPU processes; `torchrun --nproc-per-node N examples/ulysses.py`
on N GPUs.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: docs/distributed.md, "Leaving"
from torch.distributed._functional_collectives import all_to_all_single_autograd

import attn_qat


def exchange(x, group):
    """x[i] goes to rank i; the result's [i] came from rank i."""
    return all_to_all_single_autograd(x.contiguous(), None, None, group)


def to_heads(x, group):
    """(B, H, S / n, D), a piece of the sequence, to (B, H / n, S, D), a share of the heads."""
    ranks = dist.get_world_size(group)
    if x.shape[1] % ranks:
        raise ValueError(f"to_heads: x has {x.shape[1]} heads, takes a multiple of the {ranks} ranks")
    pieces = exchange(x.unflatten(1, (ranks, -1)).movedim(1, 0), group)
    return pieces.movedim(0, 2).flatten(2, 3)


def to_sequence(x, group):
    """The way back."""
    ranks = dist.get_world_size(group)
    shares = exchange(x.unflatten(2, (ranks, -1)).movedim(2, 0), group)
    return shares.movedim(0, 1).flatten(1, 2)


def ulysses_attention(q, k, v, group, **options):
    """attn_qat.attention on sequences sharded over `group`: q, k, v and the result are this rank's pieces.

    The heads of q, and of k and v where they have fewer, must be multiples of the ranks, and every piece as
    long.
    """
    q, k, v = (to_heads(x, group) for x in (q, k, v))
    return to_sequence(attn_qat.attention(q, k, v, **options), group)


def main() -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    torch.manual_seed(0)
    whole = [
        torch.randn(1, h, 64 * ranks, 64, device=device, dtype=torch.bfloat16)
        for h in (4 * ranks, ranks, ranks)
    ]
    whole = [x.requires_grad_() for x in whole]
    pieces = [x.detach().chunk(ranks, 2)[rank].clone().requires_grad_() for x in whole]

    want = attn_qat.attention(*whole, is_causal=True, recipe="fp4_qk")
    want.float().square().mean().backward()
    got = ulysses_attention(*pieces, group, is_causal=True, recipe="fp4_qk")
    (got.float().square().sum() / want.numel()).backward()

    assert torch.equal(got, want.chunk(ranks, 2)[rank])
    for piece, x in zip(pieces, whole, strict=True):
        assert torch.equal(piece.grad, x.grad.chunk(ranks, 2)[rank])
    if rank == 0:
        print(f"{ranks} ranks ({dist.get_backend()}): output and gradients are the bits of one rank alone")


def start(rank: int, ranks: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    main()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
        if gpu:
            torch.cuda.set_device(gpu)
        dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu)
        main()
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(start, args=(2, f"{folder}/rendezvous"), nprocs=2)

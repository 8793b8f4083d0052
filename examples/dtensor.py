"""Tensor-parallel attention: a layer whose heads are sharded over ranks, written as if there were one.

`python examples/dtensor.py` runs it on two CPU processes; `torchrun --nproc-per-node N examples/dtensor.py`
on N GPUs.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attn_qat

HEADS, HEAD_DIM, LENGTH = 8, 64, 96
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(attn_qat.attention(q, k, v).transpose(1, 2).flatten(2))


def tensor_parallel(layer: Layer, mesh) -> Layer:
    """Each rank keeps the projections of its heads. The DTensors between them are sharded on heads."""
    heads = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    plan = {"q": heads, "k": heads, "v": heads, "out": RowwiseParallel(output_layouts=Replicate())}
    return parallelize_module(layer, mesh, plan)


def main() -> None:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    alone = Layer().to(device, torch.bfloat16)
    x = torch.randn(2, LENGTH, WIDTH, device=device, dtype=torch.bfloat16)
    want = alone(x)
    want.float().square().mean().backward()
    want_grad = alone.q.weight.grad.clone()
    alone.zero_grad()

    layer = tensor_parallel(alone, mesh)
    got = layer(x)
    got.float().square().mean().backward()
    grad = layer.q.weight.grad
    error = (got - want).norm() / want.norm()
    grad_error = (grad.full_tensor() - want_grad).norm() / want_grad.norm()
    assert grad.placements == (Shard(0),)
    assert error < 6e-3 and grad_error < 2e-2, (error, grad_error)
    if dist.get_rank() == 0:
        held = grad.to_local().shape[0] // HEAD_DIM
        print(
            f"{mesh.size()} ranks ({dist.get_backend()}), {held} of {HEADS} heads each: "
            f"output within {error:.1e} of one rank, ",
            end="",
        )
        print(f"gradient within {grad_error:.1e}")
    dist.barrier()  # docs/distributed.md, "Leaving"


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

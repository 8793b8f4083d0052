"""cuDNN frontend's NVFP4 attention QAT backward on a CPU or any supported GPU: the call, then the plan.

    python examples/cudnn_backward.py

With cuDNN frontend the import would read `from cudnn import ...`; nothing else would change.
"""

import torch

import attn_qat
from attn_qat.cudnn import Nvfp4AttentionQatBackward, nvfp4_attention_qat_backward

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)
q, k, v, do = (torch.randn(1, 4, 256, 128, generator=generator).to(device, torch.bfloat16) for _ in range(4))

# The forward of the same recipe saves what the backward takes: O with P not quantised, and log-sum-exp.
softmax_scale = 128**-0.5
_, high_precision_o, lse, _ = attn_qat.forward(q, k, v, softmax_scale, False, "cudnn")

# The call allocates its results.
result = nvfp4_attention_qat_backward(do, q, k, v, high_precision_o, lse)
dq, dk, dv = result
assert dv is result["dv_tensor"]

# The plan does not: gradients and workspace are the caller's, reused from step to step.
plan = Nvfp4AttentionQatBackward(q, k, v, high_precision_o, do, lse)
plan.compile()
grads = [torch.empty_like(x) for x in (q, k, v)]
workspace = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device=device)
plan.execute(q, k, v, high_precision_o, do, lse, *grads, workspace)
assert all(torch.equal(a, b) for a, b in zip(grads, result))

saved = (x.cpu() for x in (do, q, k, v, high_precision_o, lse))
reference = attn_qat.reference.backward(*saved, softmax_scale, False, "cudnn")
print(f"{device}, {plan.selected_backend}, workspace {workspace.numel() / 2**20:.1f} MiB")
for name, grad, want in zip(result.keys(), grads, reference):
    error = torch.linalg.vector_norm(grad.cpu().double() - want) / torch.linalg.vector_norm(want)
    print(f"{name}: relative error {error:.2e} against float64")

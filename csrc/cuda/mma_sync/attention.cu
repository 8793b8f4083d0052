// What a call of this family enqueues: the quantised operands into the workspace, then the matmul kernels.
#include "cuda/common/workspace.h"
#include "cuda/mma_sync/kernels.h"

namespace attn_qat::mma_sync {
namespace {

using common::Arena;
using common::quantize_into;
using common::take_operands;

const char* why_not(const AttentionShape& s, DType dtype) {
  if (dtype == DType::kFloat32) return "takes bfloat16 or float16";
  if (s.head_dim != 64 && s.head_dim != 128) return "takes head_dim 64 or 128";
  constexpr int64_t kMaxSequence = int64_t{1} << 31;
  if (s.seq_q >= kMaxSequence || s.seq_k >= kMaxSequence) return "takes sequences shorter than 2^31";
  const int64_t tiles =
      s.batch * (s.heads_q * ((s.seq_q + 127) / 128) + s.heads_kv * ((s.seq_k + 127) / 128));
  return tiles > 0x7fffffff ? "takes at most 2^31 - 1 tiles of 128 rows" : nullptr;
}

}  // namespace

const char* why_not(const ForwardParams& p) { return why_not(p.shape, p.dtype); }
const char* why_not(const BackwardParams& p) { return why_not(p.shape, p.dtype); }

size_t forward_workspace_bytes(const AttentionShape& shape, Recipe recipe) {
  Arena arena(nullptr);
  take_operands(arena, shape, recipe, shape.seq_k);
  return arena.used();
}

size_t backward_workspace_bytes(const AttentionShape& s) {
  Arena arena(nullptr);
  take_operands(arena, s, Recipe::kFp4, s.seq_k);
  arena.take(s.batch * s.heads_q * s.seq_q * int64_t{sizeof(RowStatistics)});
  return arena.used();
}

cudaError_t forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  if (params.shape.batch * params.shape.heads_q * params.shape.seq_q == 0) return cudaSuccess;
  Arena arena(workspace);
  ForwardParams p = params;
  common::OperandParams operands = take_operands(arena, p.shape, p.recipe, p.shape.seq_k);
  const cudaError_t status = quantize_into(operands, p, stream);
  return status != cudaSuccess ? status : launch_forward(p, stream);
}

cudaError_t backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  const AttentionShape& s = params.shape;
  Arena arena(workspace);
  BackwardParams p = params;
  common::OperandParams operands = take_operands(arena, s, p.recipe, s.seq_k);
  auto* statistics =
      static_cast<RowStatistics*>(arena.take(s.batch * s.heads_q * s.seq_q * int64_t{sizeof(RowStatistics)}));
  cudaError_t status = quantize_into(operands, p, stream);
  if (status == cudaSuccess) status = common::row_statistics(p, statistics, stream);
  if (status == cudaSuccess && p.dq.data && s.batch * s.heads_q * s.seq_q > 0)
    status = launch_backward_dq(p, statistics, stream);
  if (status == cudaSuccess && p.dk.data && s.batch * s.heads_kv * s.seq_k > 0)
    status = launch_backward_dkdv(p, statistics, stream);
  return status;
}

}  // namespace attn_qat::mma_sync

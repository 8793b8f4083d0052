// What a call of this family enqueues: the quantised operands into the workspace, then the matmul kernels.
#include "cuda/common/workspace.h"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/kernels.h"

namespace attn_qat::sm90 {
namespace {

using common::Arena;
using common::quantize_into;
using common::take_operands;

const char* why_not(const AttentionShape& s, DType dtype) {
  if (dtype == DType::kFloat32) return "takes bfloat16 or float16";
  if (s.head_dim != 64 && s.head_dim != 128) return "takes head_dim 64 or 128";
  if (s.seq_q == 0 || s.seq_k == 0) return "takes at least one query and one key";
  constexpr int64_t kMaxSequence = (int64_t{1} << 31) - 256;
  if (s.seq_q > kMaxSequence || s.seq_k > kMaxSequence) return "takes sequences of at most 2^31 - 256";
  const int64_t boxes = s.batch * (s.heads_q * ((s.seq_q + 63) / 64) + s.heads_kv * ((s.seq_k + 63) / 64));
  return boxes > 0x7fffffff ? "takes at most 2^31 - 1 tiles of 64 rows" : nullptr;
}

// The forward's tensor maps of K^ and V^ do not see where a head ends: zeros stand there.
int64_t padded_keys(const AttentionShape& s) {
  return (s.seq_k + kRowPadding - 1) / kRowPadding * kRowPadding;
}

// What the backward takes besides its operands.
struct BackwardScratch {
  int64_t padded_rows, tiles;  // of query rows: of a head, in all
  RowGroupStatistics* statistics;
  GradQuery dq;
  size_t sum_bytes;

  BackwardScratch(Arena& arena, const AttentionShape& s)
      : padded_rows(query_tiles(s) * query_tile_rows(s)), tiles(s.batch * s.heads_q * query_tiles(s)) {
    const int64_t rows = s.batch * s.heads_q * padded_rows;
    statistics = static_cast<RowGroupStatistics*>(
        arena.take(rows / RowGroupStatistics::kRows * int64_t{sizeof(RowGroupStatistics)}));
    dq.turns = static_cast<int32_t*>(arena.take(tiles * int64_t{sizeof(int32_t)}));
    sum_bytes = static_cast<size_t>(rows * s.head_dim) * sizeof(float);
    dq.sums = static_cast<float*>(arena.take(static_cast<int64_t>(sum_bytes)));
  }
};

}  // namespace

const char* why_not(const ForwardParams& p) { return why_not(p.shape, p.dtype); }

const char* why_not(const BackwardParams& p) { return why_not(p.shape, p.dtype); }

size_t forward_workspace_bytes(const AttentionShape& s, Recipe recipe) {
  Arena arena(nullptr);
  take_operands(arena, s, recipe, padded_keys(s));
  return arena.used();
}

size_t backward_workspace_bytes(const AttentionShape& s) {
  Arena arena(nullptr);
  take_operands(arena, s, Recipe::kFp4, s.seq_k);
  BackwardScratch(arena, s);
  return arena.used();
}

cudaError_t forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  if (params.shape.batch * params.shape.heads_q == 0) return cudaSuccess;
  Arena arena(workspace);
  ForwardParams p = params;
  common::OperandParams operands = take_operands(arena, p.shape, p.recipe, padded_keys(p.shape));
  const cudaError_t status = quantize_into(operands, p, stream);
  return status != cudaSuccess ? status : launch_forward(p, padded_keys(p.shape), stream);
}

cudaError_t backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  const AttentionShape& s = params.shape;
  if (s.batch * s.heads_kv == 0) return cudaSuccess;
  Arena arena(workspace);
  BackwardParams p = params;
  common::OperandParams operands = take_operands(arena, s, p.recipe, s.seq_k);
  const BackwardScratch scratch(arena, s);
  cudaError_t status = quantize_into(operands, p, stream);
  if (status == cudaSuccess)
    status = common::row_group_statistics(p, scratch.padded_rows, scratch.statistics, scratch.dq.turns,
                                          scratch.tiles, stream);
  if (status == cudaSuccess && !p.deterministic)
    status = cudaMemsetAsync(scratch.dq.sums, 0, scratch.sum_bytes, stream);
  if (status == cudaSuccess) status = launch_backward(p, scratch.statistics, scratch.dq, stream);
  if (status == cudaSuccess && p.dq.data) status = launch_store_dq(p, scratch.dq, stream);
  return status;
}

}  // namespace attn_qat::sm90

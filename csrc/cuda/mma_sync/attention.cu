// What a call of this family enqueues: the quantised operands into the workspace, then the matmul kernels.
#include "cuda/mma_sync/kernels.h"

namespace attn_qat::mma_sync {
namespace {

constexpr size_t kAlignment = 256;

// Hands out pieces of the workspace; with a null base it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  void* take(int64_t bytes) {
    void* p = base_ ? base_ + used_ : nullptr;
    used_ += (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    return p;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

View contiguous(void* data, int64_t heads, int64_t rows, int64_t head_dim) {
  return {data, heads * rows * head_dim, rows * head_dim, head_dim};
}

// Takes scratch for Q^, K^ and, where the recipe quantises it, V^.
common::OperandParams take_operands(Arena& arena, const AttentionShape& s, Recipe recipe) {
  constexpr int64_t kBytes = 2;  // BF16 and FP16
  common::OperandParams o{};
  const int64_t kv = s.batch * s.heads_kv * s.seq_k * s.head_dim * kBytes;
  o.q_hat = arena.take(s.batch * s.heads_q * s.seq_q * s.head_dim * kBytes);
  o.k_hat = arena.take(kv);
  if (recipe != Recipe::kFp4Qk) o.v_hat = arena.take(kv);
  o.shape = s;
  o.recipe = recipe;
  return o;
}

// Quantises p's operands into o's scratch and points p at them.
template <class Params>
cudaError_t quantize_into(common::OperandParams& o, Params& p, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  o.q = p.q, o.k = p.k, o.v = p.v, o.dtype = p.dtype;
  p.q = contiguous(o.q_hat, s.heads_q, s.seq_q, s.head_dim);
  p.k = contiguous(o.k_hat, s.heads_kv, s.seq_k, s.head_dim);
  if (o.v_hat) p.v = contiguous(o.v_hat, s.heads_kv, s.seq_k, s.head_dim);
  return common::quantize_operands(o, stream);
}

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
  take_operands(arena, shape, recipe);
  return arena.used();
}

size_t backward_workspace_bytes(const AttentionShape& s) {
  Arena arena(nullptr);
  take_operands(arena, s, Recipe::kFp4);
  arena.take(s.batch * s.heads_q * s.seq_q * int64_t{sizeof(RowStatistics)});
  return arena.used();
}

cudaError_t forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  if (params.shape.batch * params.shape.heads_q * params.shape.seq_q == 0) return cudaSuccess;
  Arena arena(workspace);
  ForwardParams p = params;
  common::OperandParams operands = take_operands(arena, p.shape, p.recipe);
  const cudaError_t status = quantize_into(operands, p, stream);
  return status != cudaSuccess ? status : launch_forward(p, stream);
}

cudaError_t backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  const AttentionShape& s = params.shape;
  Arena arena(workspace);
  BackwardParams p = params;
  common::OperandParams operands = take_operands(arena, s, p.recipe);
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

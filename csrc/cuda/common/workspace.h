// The scratch of a matmul kernel: pieces of one workspace, first of all its quantised operands.
#pragma once
#include "cuda/launch.h"

namespace attn_qat::common {

inline constexpr size_t kWorkspaceAlignment = 256;

// Hands out pieces of the workspace; with a null base it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  void* take(int64_t bytes) {
    void* p = base_ ? base_ + used_ : nullptr;
    used_ +=
        (static_cast<size_t>(bytes) + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return p;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

inline View contiguous(void* data, int64_t heads, int64_t rows, int64_t head_dim) {
  return {data, heads * rows * head_dim, rows * head_dim, head_dim};
}

// Takes scratch for Q^, K^ and, where the recipe quantises it, V^, with padded_keys rows a head in K^ and V^.
inline OperandParams take_operands(Arena& arena, const AttentionShape& s, Recipe recipe,
                                   int64_t padded_keys) {
  constexpr int64_t kBytes = 2;  // BF16 and FP16
  OperandParams o{};
  const int64_t kv = s.batch * s.heads_kv * padded_keys * s.head_dim * kBytes;
  o.padded_keys = padded_keys;
  o.q_hat = arena.take(s.batch * s.heads_q * s.seq_q * s.head_dim * kBytes);
  o.k_hat = arena.take(kv);
  if (recipe != Recipe::kFp4Qk) o.v_hat = arena.take(kv);
  o.shape = s;
  o.recipe = recipe;
  return o;
}

// Quantises p's operands into o's scratch and points p at them.
template <class Params>
cudaError_t quantize_into(OperandParams& o, Params& p, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  o.q = p.q, o.k = p.k, o.v = p.v, o.dtype = p.dtype;
  p.q = contiguous(o.q_hat, s.heads_q, s.seq_q, s.head_dim);
  p.k = contiguous(o.k_hat, s.heads_kv, o.padded_keys, s.head_dim);
  if (o.v_hat) p.v = contiguous(o.v_hat, s.heads_kv, o.padded_keys, s.head_dim);
  return quantize_operands(o, stream);
}

}  // namespace attn_qat::common

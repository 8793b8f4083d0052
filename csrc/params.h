// One plain struct per operation: the contract between the torch glue and every kernel family.
// Standard integers and pointers only.
#pragma once
#include <cstddef>
#include <cstdint>

namespace attn_qat {

enum class DType : int32_t { kBFloat16, kFloat16, kFloat32 };

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Which operands are FP4 (contract section 2).
enum class Recipe : int32_t { kCudnn, kFp4, kFp4Qk };

// Base-2 exponent of the gain that exp2(t - E) carries while it is quantised: 2^11 <= 6 * 448.
constexpr int probability_gain(Recipe recipe) { return recipe == Recipe::kFp4 ? 11 : 0; }
template <Recipe kRecipe>
inline constexpr float kProbabilityGain = 1 << probability_gain(kRecipe);

inline constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

// What scores are multiplied with to give t = S log2 e.
constexpr float scale_log2(float softmax_scale) { return softmax_scale * static_cast<float>(kLog2e); }

// BHSD operand; strides in elements, the head dimension is contiguous.
struct View {
  void* data;
  int64_t stride_b, stride_h, stride_s;
};

// fake_quantize, quantize and dequantize see their tensor as (outer0, outer1, rows, cols), cols contiguous.
struct QuantizeParams {
  View x;                     // values: read by fake_quantize and quantize, written by dequantize
  void* out;                  // fake_quantize: contiguous values
  uint8_t* data;              // packed codes, two a byte, even index low: (outer0, outer1, other, axis / 2)
  uint8_t* scales;            // E4M3 bytes: (outer0, outer1, other, ceil(axis / 16)), or 128x4 tiles
  const float* global_scale;  // one value, or nullptr; multiplies when decoding
  int64_t outer0, outer1, rows, cols;
  bool along_rows;  // blocks run along rows (axis -2) instead of cols (axis -1)
  bool tiled_scales;
  DType dtype;
};

struct AttentionShape {
  int64_t batch, heads_q, heads_kv, seq_q, seq_k, head_dim;
};

// Training wants all four outputs. Inference has no use for high_precision_out (data nullptr) and row_exponent
// (nullptr), and lse may be nullptr too: what is not wanted is neither computed nor stored. Never with kCudnn,
// whose V no tensor core multiplies.
struct ForwardParams {
  View q, k, v;             // [B, Hq, Sq, D], [B, Hkv, Skv, D] twice
  View out;                 // [B, Hq, Sq, D]
  View high_precision_out;  // [B, Hq, Sq, D]
  float* lse;               // [B, Hq, Sq]  natural log; -inf: no visible key
  int32_t* row_exponent;    // [B, Hq, Sq]  ceil of the row maximum of t; INT32_MIN: no visible key
  AttentionShape shape;
  float softmax_scale;
  bool causal;
  Recipe recipe;
  DType dtype;

  constexpr bool training() const { return high_precision_out.data != nullptr; }
};

struct PreprocessParams {
  View high_precision_out, grad_out;  // [B, H, S, D]
  float* delta;                       // [B, H, S]  rowsum(high_precision_out * grad_out)
  int64_t batch, heads, seq, head_dim;
  DType dtype;
};

// dQ, dK/dV or all three: an output whose data is nullptr is not computed (dk and dv go together).
struct BackwardParams {
  View grad_out, q, k, v;
  View high_precision_out;  // read when delta is nullptr
  View dq, dk, dv;
  const float* lse;             // [B, Hq, Sq]  natural log
  const float* delta;           // [B, Hq, Sq], or nullptr
  const int32_t* row_exponent;  // [B, Hq, Sq], or nullptr: ceil(lse * log2 e)
  AttentionShape shape;
  float softmax_scale;
  bool causal;
  bool deterministic;  // the same bits on every run
  Recipe recipe;
  DType dtype;
};

}  // namespace attn_qat

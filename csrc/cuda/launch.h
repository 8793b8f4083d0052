// Every CUDA launcher, by kernel family: all that the torch glue may see of csrc/cuda.
//
// A launcher enqueues on the stream and returns what the launch returned; it never allocates, waits or exits,
// and it expects that the current device is the stream's. why_not: nullptr when the family can run the
// problem on a device that it was compiled for, else the reason as a sentence.
#pragma once
#include <cuda_runtime_api.h>

#include "params.h"

namespace attn_qat {

// What a backward kernel needs of a query row (contract section 4).
struct alignas(16) RowStatistics {
  float exponent;    // E
  float normaliser;  // 2^E * exp(-lse); 0 for a row with no visible key
  float delta;       // rowsum(high_precision_out * grad_out)
  float unused;
};

// The same of eight neighbouring rows, for kernels that want them side by side and -delta as a matrix operand.
struct alignas(16) RowGroupStatistics {
  static constexpr int kRows = 8;
  float exponent[kRows], normaliser[kRows];
  uint16_t minus_delta[kRows][8];  // in BF16: three whose sum it is, exactly, and zeros
};

namespace common {  // kernels that need no special unit

const char* why_not(const QuantizeParams&);  // of all three
cudaError_t fake_quantize(const QuantizeParams&, cudaStream_t);
cudaError_t quantize(const QuantizeParams&, cudaStream_t);  // padding of tiled scales is left as it is
cudaError_t dequantize(const QuantizeParams&, cudaStream_t);

const char* why_not(const PreprocessParams&);
cudaError_t preprocess(const PreprocessParams&, cudaStream_t);

// RowStatistics of every query row [B, Hq, Sq]; delta is p.delta where given, else computed.
cudaError_t row_statistics(const BackwardParams& p, RowStatistics* statistics, cudaStream_t);

// In groups, with padded_rows rows a head, a multiple of eight, those past the end zero. Also zeroes `counters`, at
// most one for each row.
cudaError_t row_group_statistics(const BackwardParams& p, int64_t padded_rows, RowGroupStatistics* statistics,
                                 int32_t* counters, int64_t counter_count, cudaStream_t);

// Attention operands on their way to a matmul kernel: contiguous BHSD, Q^ and K^ in BF16, V^ in its own
// dtype.
struct OperandParams {
  View q, k, v;
  void *q_hat, *k_hat, *v_hat;  // v_hat nullptr: V is not quantised
  int64_t padded_keys;          // rows of a head in k_hat and v_hat, those past the end zero
  AttentionShape shape;
  Recipe recipe;
  DType dtype;  // BF16 or FP16
};
cudaError_t quantize_operands(const OperandParams&, cudaStream_t);

}  // namespace common

namespace mma_sync {  // mma.sync m16n8k16: every target

const char* why_not(const ForwardParams&);
const char* why_not(const BackwardParams&);
size_t forward_workspace_bytes(const AttentionShape&, Recipe);
size_t backward_workspace_bytes(const AttentionShape&);  // the most that any recipe needs
cudaError_t forward(const ForwardParams&, void* workspace, cudaStream_t);
cudaError_t backward(const BackwardParams&, void* workspace, cudaStream_t);

}  // namespace mma_sync

namespace sm90 {  // wgmma and tensor maps: compute capability 9.0

const char* why_not(const ForwardParams&);
const char* why_not(const BackwardParams&);
size_t forward_workspace_bytes(const AttentionShape&, Recipe);
size_t backward_workspace_bytes(const AttentionShape&);  // the most that any recipe needs
cudaError_t forward(const ForwardParams&, void* workspace, cudaStream_t);
cudaError_t backward(const BackwardParams&, void* workspace, cudaStream_t);

}  // namespace sm90
}  // namespace attn_qat

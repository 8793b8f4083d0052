#include "cuda/sm90/tensor_map.h"

#include <cuda_runtime.h>

namespace attn_qat::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver at run time: linking libcuda would keep the library from loading where there is none.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  constexpr unsigned kIntroducedIn = 12000;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kIntroducedIn, cudaEnableDefault,
                                       &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess)
    return nullptr;
  return reinterpret_cast<Encode>(function);
}

template <int kRank>
cudaError_t encode(CUtensorMap* map, void* data, DType dtype, const cuuint64_t (&dims)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  static const Encode function = find_encode();
  if (!function) return cudaErrorCallRequiresNewerDriver;
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const auto type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result = function(map, type, kRank, data, dims, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

constexpr int64_t kElementBytes = 2;

}  // namespace

cudaError_t rows_map(CUtensorMap* map, const View& view, int64_t batch, int64_t heads, int64_t rows,
                     int64_t head_dim, int box_rows, DType dtype) {
  // The stride of a dimension of size 1 may be anything; the map wants a multiple of 16 bytes.
  const auto stride = [&](int64_t size, int64_t elements) {
    return static_cast<cuuint64_t>((size > 1 ? elements : head_dim) * kElementBytes);
  };
  return encode<4>(map, view.data, dtype,
                   {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(rows),
                    static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)},
                   {stride(rows, view.stride_s), stride(heads, view.stride_h), stride(batch, view.stride_b)},
                   {kPanelColumns, static_cast<cuuint32_t>(box_rows), 1, 1});
}

cudaError_t interleaved_rows_map(CUtensorMap* map, void* data, int64_t rows, int64_t head_dim, DType dtype) {
  constexpr int64_t kBoxRows = 64;
  const auto row = static_cast<cuuint64_t>(head_dim * kElementBytes);
  return encode<5>(map, data, dtype,
                   {static_cast<cuuint64_t>(head_dim), 2, 4, 8, static_cast<cuuint64_t>(rows / kBoxRows)},
                   {row, 16 * row, 2 * row, kBoxRows * row}, {kPanelColumns, 2, 4, 8, 1});
}

}  // namespace attn_qat::sm90

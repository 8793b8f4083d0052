// Tensor maps: how the copy engine finds an operand's tiles.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "params.h"

namespace attn_qat::sm90 {

inline constexpr int kPanelColumns = 64;  // of 16 bits: the 128 bytes that the swizzle covers

// Boxes of box_rows rows by 64 columns of [batch, heads, rows, head_dim]; coordinates (column, row, head, batch).
// Rows past the end become zero.
cudaError_t rows_map(CUtensorMap* map, const View& view, int64_t batch, int64_t heads, int64_t rows,
                     int64_t head_dim, int box_rows, DType dtype);

// Boxes of 64 rows by 64 columns of contiguous rows, a multiple of 64: row e + 2 c + 8 b of a box is row
// 16 c + 2 b + e in memory (b < 8, c < 4, e < 2). As columns of a wgmma accumulator the 16 rows of each c then lie in
// one thread. Coordinates (column, 0, 0, 0, box).
cudaError_t interleaved_rows_map(CUtensorMap* map, void* data, int64_t rows, int64_t head_dim, DType dtype);

}  // namespace attn_qat::sm90

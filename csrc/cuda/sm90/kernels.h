// The kernels of this family on operands that are already quantised: Q^ and K^ in BF16, V^ in the input dtype.
#pragma once
#include "cuda/launch.h"

namespace attn_qat::sm90 {

// Where P is quantised, k and v are contiguous with padded_keys rows a head, those past the end zero.
cudaError_t launch_forward(const ForwardParams&, int64_t padded_keys, cudaStream_t);

// dQ before its scale, tile by tile as the accumulators hold it: [B, Hq, tiles of query rows, consumer, 8, thread, 4].
struct GradQuery {
  float* sums;
  int32_t* turns;  // [B, Hq, tiles of query rows]: kv tiles that have been added; deterministic only
};
int64_t query_tiles(const AttentionShape&);  // of a head
int64_t query_tile_rows(const AttentionShape&);

// sums: zero unless deterministic. turns: zero.
cudaError_t launch_backward(const BackwardParams&, const RowGroupStatistics*, const GradQuery&, cudaStream_t);
cudaError_t launch_store_dq(const BackwardParams&, const GradQuery&, cudaStream_t);

}  // namespace attn_qat::sm90

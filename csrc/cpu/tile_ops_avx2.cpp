#define ATTN_QAT_ISA avx2
#define ATTN_QAT_ISA_NAME "avx2"
#include "tile_ops_impl.h"

namespace attn_qat::cpu {
const TileOps& tile_ops_avx2() { return avx2::kOps; }
}  // namespace attn_qat::cpu

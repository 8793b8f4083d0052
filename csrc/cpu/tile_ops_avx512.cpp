#define ATTN_QAT_ISA avx512
#define ATTN_QAT_ISA_NAME "avx512"
#include "tile_ops_impl.h"

namespace attn_qat::cpu {
const TileOps& tile_ops_avx512() { return avx512::kOps; }
}  // namespace attn_qat::cpu

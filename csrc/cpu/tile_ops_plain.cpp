#define ATTN_QAT_ISA plain
#define ATTN_QAT_ISA_NAME "plain"
#include "tile_ops_impl.h"

namespace attn_qat::cpu {
const TileOps& tile_ops_plain() { return plain::kOps; }
}  // namespace attn_qat::cpu

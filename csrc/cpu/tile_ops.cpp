#include "tile_ops.h"

namespace attn_qat::cpu {

const TileOps& tile_ops_plain();
#if defined(__x86_64__)
const TileOps& tile_ops_avx512();
const TileOps& tile_ops_avx2();

static bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

struct Available {
  const TileOps* ops[4] = {};
  Available() {
    int count = 0;
#if defined(__x86_64__)
    if (runs_avx512()) ops[count++] = &tile_ops_avx512();
    if (runs_avx2()) ops[count++] = &tile_ops_avx2();
#endif
    ops[count] = &tile_ops_plain();
  }
};

const TileOps* const* available_tile_ops() {
  static const Available available;
  return available.ops;
}

const TileOps& tile_ops() { return *available_tile_ops()[0]; }

}  // namespace attn_qat::cpu

// The instruction sets as a test parameter.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "cpu/tile_ops.h"
#include "cpu_testing.h"

namespace attn_qat::cpu {

inline void PrintTo(const TileOps* ops, std::ostream* os) { *os << ops->name; }

inline std::vector<const TileOps*> all_sets() {
  std::vector<const TileOps*> sets;
  for (const TileOps* const* ops = available_tile_ops(); *ops; ++ops) sets.push_back(*ops);
  return sets;
}

inline std::string set_name(const ::testing::TestParamInfo<const TileOps*>& info) { return info.param->name; }

class TileTest : public ::testing::TestWithParam<const TileOps*> {
 protected:
  const TileOps& ops = *GetParam();
};

}  // namespace attn_qat::cpu

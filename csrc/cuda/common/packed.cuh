// The packed form of a tensor: where it lies in memory, and a tile of it in shared memory.
//
// A line is what blocks run along, a row or (along rows) a column of the tensor; packed lines are contiguous.
#pragma once
#include <cuda_runtime.h>

#include "cuda/common/tiling.cuh"
#include "cuda/common/values.cuh"
#include "format/nvfp4.h"
#include "params.h"

namespace attn_qat::common {

inline constexpr int kBlockBytes = nvfp4::kBlock / 2;

struct PackedLayout {
  uint8_t *data, *scales;
  int64_t lines, blocks;  // of a head; of a line
  int64_t line_bytes;
  int64_t tiles_per_row;  // of 128x4 scales; 0: linear scales

  explicit PackedLayout(const QuantizeParams& p) : data(p.data), scales(p.scales) {
    const int64_t length = p.along_rows ? p.rows : p.cols;
    lines = p.along_rows ? p.cols : p.rows;
    blocks = ceil_div(length, nvfp4::kBlock), line_bytes = length / 2;
    tiles_per_row = p.tiled_scales ? ceil_div(blocks, 4) : 0;
  }

  __device__ __forceinline__ uint8_t* code_bytes(uint32_t head, int64_t line, int64_t byte) const {
    return data + (head * lines + line) * line_bytes + byte;
  }
  __device__ __forceinline__ uint8_t* scale(uint32_t head, int64_t line, int64_t block) const {
    if (!tiles_per_row) return scales + (head * lines + line) * blocks + block;
    const int64_t head_bytes = (lines + 127) / 128 * tiles_per_row * 512;
    return scales + head * head_bytes + nvfp4::tiled_scale_offset(line, block, tiles_per_row);
  }
  // Of the block that kLanes lanes share, in step k.
  template <int kLanes, bool kFlat, int kThreads, int kSteps>
  __device__ __forceinline__ uint8_t* scale(const Place<kFlat, kThreads, kSteps>& at, int k) const {
    if constexpr (kFlat) return scales + at.lane / kLanes + k * (kThreads / kLanes);
    return scale(at.head, at.line + k * at.step, at.lane / kLanes);
  }
};

// kGroups blocks of each of kLines columns, on their way between lanes that hold 16 rows of kColumns
// columns each, so that a warp's accesses lie along rows of the tensor, and memory, where a column's blocks
// are side by side.
template <int kLines_, int kGroups_, int kColumns>
struct PackedTile {
  static constexpr int kLines = kLines_, kGroups = kGroups_;
  uint2 codes[kLines][kGroups];
  uint8_t scales[kLines][kGroups];

  // Lanes side by side are kColumns lines apart: by line alone they would meet in the same banks.
  __device__ static constexpr int slot(int line, int group) { return group ^ line / kColumns * 2 % kGroups; }

  __device__ __forceinline__ uint2& codes_at(int line, int group) { return codes[line][slot(line, group)]; }
  __device__ __forceinline__ uint8_t& scale_at(int line, int group) {
    return scales[line][slot(line, group)];
  }
};

// Where a tile lies: its head, first line, first block of the line.
struct TilePlace {
  uint32_t head;
  int64_t line, group;
};

// Lines have kPerLine units; a thread moves the same one of every kThreads / kPerLine-th line, so that
// neighbours move neighbours: body(here(line), there(line)), in the tile and in memory.
template <int kLines, int kPerLine, int kThreads, class Here, class There, class Body>
__device__ __forceinline__ void for_each_line(int64_t lines_left, Here here, There there, Body body) {
  constexpr int kAtOnce = kThreads / kPerLine;
  static_assert(kThreads % kPerLine == 0 && kLines % kAtOnce == 0, "every thread moves one unit a time");
#pragma unroll 8
  for (int k = 0; k < kLines / kAtOnce; ++k) {
    const int line = k * kAtOnce + threadIdx.x / kPerLine;
    if (line < lines_left) body(here(line), there(line));
  }
}

// Units of codes: uint2 or uint8_t.
template <class Unit, int kThreads, class Tile, class Body>
__device__ __forceinline__ void for_each_code_unit(Tile& tile, const PackedLayout& layout,
                                                   const TilePlace& at, Body body) {
  constexpr int kUnits = sizeof(uint2) / sizeof(Unit), kPerLine = Tile::kGroups * kUnits;
  const int unit = threadIdx.x % kPerLine;
  const int64_t byte = at.group * kBlockBytes + unit * static_cast<int>(sizeof(Unit));
  if (byte >= layout.line_bytes) return;
  uint8_t* const first = layout.code_bytes(at.head, at.line, byte);
  for_each_line<Tile::kLines, kPerLine, kThreads>(
      layout.lines - at.line,
      [&](int line) { return reinterpret_cast<Unit*>(&tile.codes_at(line, unit / kUnits)) + unit % kUnits; },
      [&](int line) { return reinterpret_cast<Unit*>(first + line * layout.line_bytes); }, body);
}

template <int kThreads, class Tile, class Body>
__device__ __forceinline__ void for_each_scale(Tile& tile, const PackedLayout& layout, const TilePlace& at,
                                               Body body) {
  const int group = threadIdx.x % Tile::kGroups;
  if (at.group + group >= layout.blocks) return;
  for_each_line<Tile::kLines, Tile::kGroups, kThreads>(
      layout.lines - at.line, [&](int line) { return &tile.scale_at(line, group); },
      [&](int line) { return layout.scale(at.head, at.line + line, at.group + group); }, body);
}

// Whether 8-byte accesses reach every block of a column whole.
inline bool has_wide_blocks(const PackedLayout& layout) {
  return is_aligned(layout.data, kBlockBytes) && layout.line_bytes % kBlockBytes == 0;
}

inline constexpr int kRowThreads = 128;

// A thread of the kernels along rows and its tile. Eight lanes of 16 bytes, and sixteen blocks of a column,
// are whole cache lines on both sides; lanes of single values are a warp.

template <class T, int kWords>
struct RowTile {
  using Values = Chunk<T, kWords>;
  static constexpr int kLanes = kWords == 1 ? 32 : 8, kLog2Lanes = kWords == 1 ? 5 : 3;
  static constexpr int kGroups = kRowThreads / kLanes;
  using Packed = PackedTile<kLanes * Values::kValues, kGroups, Values::kValues>;
  int lane, group;  // of this thread, in the tile
  TilePlace origin;

  __device__ RowTile(const QuantizeParams& p, const Tiling& t)
      : lane(threadIdx.x % kLanes), group(threadIdx.x / kLanes) {
    const Place<false, kRowThreads, 1> at(t, p.cols / Values::kValues, p.rows);
    origin = {at.head, (at.lane - lane) * Values::kValues, at.line - group};
  }
  static Tiling tiling(const QuantizeParams& p) {
    return Tiling(kLog2Lanes, ceil_div(p.cols, Values::kValues), ceil_div(p.rows, nvfp4::kBlock),
                  p.outer0 * p.outer1, kRowThreads, 1);
  }
  // Of this thread's values: its first line in the tile, its first column and row in the tensor.
  __device__ int line() const { return lane * Values::kValues; }
  __device__ int64_t col() const { return origin.line + line(); }
  __device__ int64_t row() const { return (origin.group + group) * nvfp4::kBlock; }
};

}  // namespace attn_qat::common

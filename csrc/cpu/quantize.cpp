// fake_quantize, quantize and dequantize: the block format applied to tensors (contract section 1). Work is
// cut into pieces of at most 16 rows by kPieceColumns columns, so blocks along either axis stay whole.
#include "../format/nvfp4.h"
#include "attention_tiles.h"
#include "cpu.h"

namespace attn_qat::cpu {
namespace {

using nvfp4::kBlock;

constexpr int64_t kPieceColumns = 256, kLd = padded(kPieceColumns), kColumnsPerTask = 16 * kPieceColumns;

struct Piece {
  int64_t outer, row, col, rows, cols;  // outer = outer0 * outer1
};

// Calls body(piece, tile) for every piece of the tensor; tile is the worker's [16][kLd] scratch.
template <class Body>
void for_each_piece(const QuantizeParams& p, const Executor& executor, Body body) {
  const int64_t row_tasks = ceil_div(p.rows, kBlock), col_tasks = ceil_div(p.cols, kColumnsPerTask);
  for_each_task(executor, p.outer0 * p.outer1 * row_tasks * col_tasks, [&](int, int64_t task) {
    alignas(kCacheLine) float tile[kBlock * kLd];
    const int64_t outer = task / (row_tasks * col_tasks), row = task / col_tasks % row_tasks * kBlock;
    const int64_t begin = task % col_tasks * kColumnsPerTask, end = smaller(p.cols, begin + kColumnsPerTask);
    for (int64_t col = begin; col < end; col += kPieceColumns)
      body(Piece{outer, row, col, smaller(kBlock, p.rows - row), smaller(kPieceColumns, end - col)}, tile);
  });
}

char* piece_pointer(const QuantizeParams& p, const Piece& at) {
  return row_pointer(p.x, p.dtype, at.outer / p.outer1, at.outer % p.outer1, at.row) +
         at.col * dtype_bytes(p.dtype);
}

// Values over global_scale, zeros in the padding.
void load_piece(const TileOps& ops, const QuantizeParams& p, const Piece& at, float* tile) {
  ops.load(piece_pointer(p, at), p.dtype, p.x.stride_s, at.rows, at.cols, tile, kLd);
  const int64_t cols = round_up(at.cols, kBlock);
  for (int64_t i = at.rows * kLd; i < kBlock * kLd; ++i) tile[i] = 0.0f;
  if (!p.global_scale) return;
  for (int64_t r = 0; r < at.rows; ++r)
    for (int64_t c = 0; c < cols; ++c) tile[r * kLd + c] /= *p.global_scale;
}

void apply_global_scale(const QuantizeParams& p, const Piece& at, float* tile) {
  if (!p.global_scale) return;
  for (int64_t r = 0; r < at.rows; ++r)
    for (int64_t c = 0; c < at.cols; ++c) tile[r * kLd + c] *= *p.global_scale;
}

// Where block `block` of line `line` lives: a line is what the blocks run along, a row or a column of the
// tensor.
struct PackedBlock {
  uint8_t *data, *scale;
};

PackedBlock packed_block(const QuantizeParams& p, int64_t outer, int64_t line, int64_t block) {
  const int64_t lines = p.along_rows ? p.cols : p.rows, length = p.along_rows ? p.rows : p.cols;
  const int64_t blocks = ceil_div(length, kBlock), tiles_per_row = ceil_div(blocks, 4);
  const int64_t scale = p.tiled_scales ? outer * (round_up(lines, 128) * tiles_per_row * 4) +
                                             nvfp4::tiled_scale_offset(line, block, tiles_per_row)
                                       : (outer * lines + line) * blocks + block;
  return {p.data + (outer * lines + line) * (length / 2) + block * (kBlock / 2), p.scales + scale};
}

void encode_block(const float* x, int64_t stride, int64_t count, PackedBlock to) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = nvfp4::magnitude_bits(x[i * stride]);
    amax = bits > amax ? bits : amax;
  }
  const float scale = nvfp4::block_scale(amax);
  *to.scale = nvfp4::e4m3_encode(scale);
  for (int64_t i = 0; i < count; i += 2) {
    const int low = nvfp4::e2m1_encode(x[i * stride], scale),
              high = nvfp4::e2m1_encode(x[(i + 1) * stride], scale);
    to.data[i / 2] = static_cast<uint8_t>(low | high << 4);
  }
}

void decode_block(PackedBlock from, int64_t count, float* x, int64_t stride) {
  const float scale = nvfp4::e4m3_decode(*from.scale);
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t pair = from.data[i / 2];
    x[i * stride] = nvfp4::e2m1_decode(static_cast<uint8_t>(i % 2 ? pair >> 4 : pair & 15)) * scale;
  }
}

// Calls body(packed block, its first value in the tile, stride, count) for the blocks of a piece.
template <class Body>
void for_each_block(const QuantizeParams& p, const Piece& at, float* tile, Body body) {
  if (p.along_rows) {
    for (int64_t c = 0; c < at.cols; ++c)
      body(packed_block(p, at.outer, at.col + c, at.row / kBlock), tile + c, kLd, at.rows);
  } else {
    for (int64_t r = 0; r < at.rows; ++r)
      for (int64_t c = 0; c < at.cols; c += kBlock)
        body(packed_block(p, at.outer, at.row + r, (at.col + c) / kBlock), tile + r * kLd + c, 1,
             smaller(kBlock, at.cols - c));
  }
}

}  // namespace

void fake_quantize(const QuantizeParams& p, const Executor& executor) {
  const TileOps& ops = tile_ops();
  for_each_piece(p, executor, [&](const Piece& at, float* tile) {
    load_piece(ops, p, at, tile);
    const int64_t cols = round_up(at.cols, kBlock);
    if (p.along_rows)
      ops.fake_quantize_columns(tile, kLd, kBlock, cols);
    else
      ops.fake_quantize_rows(tile, kLd, at.rows, cols);
    apply_global_scale(p, at, tile);
    char* out =
        static_cast<char*>(p.out) + ((at.outer * p.rows + at.row) * p.cols + at.col) * dtype_bytes(p.dtype);
    ops.store(tile, kLd, nullptr, at.rows, at.cols, out, p.dtype, p.cols);
  });
}

void quantize(const QuantizeParams& p, const Executor& executor) {
  const TileOps& ops = tile_ops();
  for_each_piece(p, executor, [&](const Piece& at, float* tile) {
    load_piece(ops, p, at, tile);
    for_each_block(p, at, tile, [](PackedBlock to, const float* x, int64_t stride, int64_t count) {
      encode_block(x, stride, count, to);
    });
  });
}

void dequantize(const QuantizeParams& p, const Executor& executor) {
  const TileOps& ops = tile_ops();
  for_each_piece(p, executor, [&](const Piece& at, float* tile) {
    for_each_block(p, at, tile, [](PackedBlock from, float* x, int64_t stride, int64_t count) {
      decode_block(from, count, x, stride);
    });
    apply_global_scale(p, at, tile);
    ops.store(tile, kLd, nullptr, at.rows, at.cols, piece_pointer(p, at), p.dtype, p.x.stride_s);
  });
}

}  // namespace attn_qat::cpu

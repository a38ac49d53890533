// The order in which sm_100's block-scaled GEMMs read scale bytes: tiles of 128 rows × 4 blocks,
// one after the other along the blocks first. Row r, block c of a tile lies at
// (r % 32)·16 + (r / 32)·4 + c.
#pragma once

#include "common.h"

namespace dfg {

constexpr int64_t kSwizzleRows = 128, kSwizzleBlocks = 4;
constexpr int64_t kSwizzleBytes = kSwizzleRows * kSwizzleBlocks;

// Offset of one scale byte; tiles_across: tiles along the blocks.
DFG_HD int64_t swizzled_offset(int64_t row, int64_t block, int64_t tiles_across) {
  const int64_t tile = row / kSwizzleRows * tiles_across + block / kSwizzleBlocks;
  const int64_t inside = row % 32 * 16 + row % kSwizzleRows / 32 * 4 + block % kSwizzleBlocks;
  return tile * kSwizzleBytes + inside;
}

// What `block` adds to the offset of a row's first block of some tile.
DFG_HD int64_t swizzled_step(int64_t block) {
  return block / kSwizzleBlocks * kSwizzleBytes + block % kSwizzleBlocks;
}

}  // namespace dfg

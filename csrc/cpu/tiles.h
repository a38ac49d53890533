// How the CPU kernels cut X: tiles of 128 × 128, and the table of one instruction set's kernels.
#pragma once

#include "../kernels.h"

namespace dfg {

constexpr int kTile = 128;
constexpr int kSpan = 1024;  // columns of a piece in the amax kernel that needs no tile

// Up to 128 rows of X that belong to one expert (or to the whole matrix).
struct RowTile {
  int64_t row;         // first row in X
  int32_t rows;        // 1…128
  int32_t expert;      // 0 where there are no groups
  int64_t first_row;   // of the expert, in X
  int64_t column;      // stored contraction index of `row` in the columnwise plane
  int32_t column_end;  // stored contraction elements that the tile fills there, 16…128
  int64_t shift;       // added to the column tile, see spread_starts
};

// Items of `cast` and `measure`: row tile t = i / n, column tile (i + t.shift) % n with n =
// ⌈K/128⌉; of `amax`: the same with n = ⌈K/1024⌉; of `decode`: plane rows. All run items [begin,
// end).
struct Variant {
  const char* name;
  void (*cast)(const CastArgs&, const RowTile*, int64_t begin, int64_t end);
  void (*measure)(const MeasureArgs&, const RowTile*, int64_t begin, int64_t end);
  // Both measures plain: no RHT, not of the dequantized row.
  void (*amax)(const MeasureArgs&, const RowTile*, int64_t begin, int64_t end);
  void (*decode)(const DecodeArgs&, int64_t begin, int64_t end);
};

const Variant& generic_variant();
const Variant& avx2_variant();
const Variant& avx512_variant();

}  // namespace dfg

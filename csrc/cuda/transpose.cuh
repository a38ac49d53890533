// The column plane where both planes have one scale for the whole tile: the row plane's codes are
// the codes of both, so that they are made once and transposed, byte for byte.
#pragma once

#include "phases.cuh"

namespace dfg {

// Rows of four bytes to columns of four bytes.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Columns of the tile, of the codes that the row phase left (Keep::codes). Each thread takes 16
// rows of four columns.
template <class E, class S>
__device__ __forceinline__ void transpose_phase(const Target& target, const Place& place,
                                                const unsigned char* tile, const Parts& parts) {
  static_assert(kThreads == 8 * kTile / 4);
  const Plane& plane = target.plane;
  const PlaneOptions& o = plane.options;
  const int column = threadIdx.x / 8 * 4;
  const unsigned char* first =
      tile + chunk_offset<E>(along() * 16, column / 16 * E::kBytes) + column % 16;
  Encoded e[4];
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    uint32_t rows[4], columns[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      rows[k] = *reinterpret_cast<const uint32_t*>(first + (4 * part + k) * kRowBytes<E>);
    }
    transpose_bytes(rows, columns);
#pragma unroll
    for (int c = 0; c < 4; ++c) reinterpret_cast<uint32_t*>(&e[c].codes)[part] = columns[c];
  }
  const Writer<S> writer(plane, place.x_column + column, place.column_start + along() * 16);
  const int stored_columns =
      along() * 16 < place.column_extent ? clamp_to_tile(plane.stored_rows - place.x_column) : 0;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (column + c < stored_columns) writer.write_codes(c, e[c]);
  }
  if (S::kCodec == Codec::block && threadIdx.x == 0 && stored_columns > 0) {
    const UnitScale scale = unit_scale<S>(o, float_of(parts.whole), {});
    store_tile_scale(target, place.x_column, place.column_start, scale.decode);
  }
}

}  // namespace dfg

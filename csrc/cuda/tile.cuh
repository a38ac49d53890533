// A 128×128 tile of X in shared memory, and where it lies in X and in both planes.
//
// A row is split into chunks of 16 bytes, a unit of 16 elements is kBytes of them. Where a chunk
// lies is permuted so that each of these eight-thread accesses hits different banks: consecutive
// chunks (the load), the units of one row (row phase), one chunk in eight groups of 16 rows (column
// phase).
#pragma once

#include "element.cuh"

namespace dfg {

constexpr int kTile = 128;
constexpr int kThreads = 256;

template <class E>
constexpr int kRowBytes = kTile * E::kBytes;
template <class E>
constexpr int kTileBytes = kTile * kRowBytes<E>;

// Offset in bytes of a chunk of a row.
template <class E>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return row * kRowBytes<E> + (chunk ^ (chunk >> 3 & (E::kBytes - 1)) ^ (row >> 4)) * 16;
}

// Where a tile lies. Extents are what is to be written, padding included.
struct Place {
  int64_t x_row;           // first row in X, also in the row plane
  int64_t x_column;        // first column in X; first plane row of the column plane
  int rows, columns;       // of X in this tile
  int row_extent;          // plane rows of the row plane to write
  int64_t column_start;    // contraction index in the column plane
  int column_extent;       // contraction elements of the column plane to write
  int expert;              // 0 where not grouped
  int64_t expert_row;      // first row inside the expert
  bool is_first_row_tile;  // of X, or of the expert
  bool is_behind_experts;  // no tile: what the experts leave of the planes
};

__device__ __forceinline__ int clamp_to_tile(int64_t extent) {
  return static_cast<int>(extent < 0 ? 0 : extent < kTile ? extent : kTile);
}

// Begins to load the tile; elements outside X become zero. All threads, as end_load.
template <class E>
__device__ __forceinline__ void begin_load(const void* x, int64_t row_stride, const Place& place,
                                           unsigned char* tile) {
  constexpr int kPerChunk = 16 / E::kBytes;
  constexpr int kChunks = kTile / kPerChunk;  // per row
  constexpr int kRowsAtOnce = kThreads / kChunks;
  const int rows = place.rows, columns = place.columns;
  const int64_t stride = row_stride * E::kBytes;
  const auto* base =
      static_cast<const unsigned char*>(x) + place.x_row * stride + place.x_column * E::kBytes;
  const bool is_aligned =
      ((reinterpret_cast<uintptr_t>(base) | static_cast<uintptr_t>(stride)) & 15) == 0;
  const int t = threadIdx.x, chunk = t % kChunks, first = t / kChunks;
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  if (is_aligned && rows == kTile && columns == kTile) {
    const unsigned char* source = base + first * stride + chunk * 16;
#pragma unroll
    for (int i = 0; i < kTile / kRowsAtOnce; ++i, source += kRowsAtOnce * stride) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       target + chunk_offset<E>(first + i * kRowsAtOnce, chunk)),
                   "l"(source));
    }
  } else if (is_aligned) {
    // Bytes of a chunk inside X; the copy fills up with zeros.
    const int inside = max(0, min(16, (columns - chunk * kPerChunk) * E::kBytes));
    for (int row = first; row < kTile; row += kRowsAtOnce) {
      const int bytes = row < rows ? inside : 0;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                       target + chunk_offset<E>(row, chunk)),
                   "l"(bytes > 0 ? base + row * stride + chunk * 16 : base), "r"(bytes));
    }
  } else {
#pragma unroll 4
    for (int i = t; i < kTile * kTile; i += kThreads) {
      const int row = i / kTile, column = i % kTile;
      unsigned char* to =
          tile + chunk_offset<E>(row, column / kPerChunk) + column % kPerChunk * E::kBytes;
      const bool is_inside = row < rows && column < columns;
      const unsigned char* source = base + row * stride + column * E::kBytes;
      if constexpr (E::kBytes == 2) {
        *reinterpret_cast<uint16_t*>(to) =
            is_inside ? *reinterpret_cast<const uint16_t*>(source) : uint16_t{0};
      } else {
        *reinterpret_cast<uint32_t*>(to) =
            is_inside ? *reinterpret_cast<const uint32_t*>(source) : 0u;
      }
    }
  }
}

// Ends with a barrier: what was written to shared memory before is seen as well.
__device__ __forceinline__ void end_load() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}

// Which unit of which row a thread takes in step i of a row phase, and which 16 rows of which two
// columns in a column phase. Eight neighbouring lanes lie along the contraction in both.
constexpr int kRowSteps = kTile * 8 / kThreads;
constexpr int kRowsPerStep = kThreads / 8;
constexpr int kColumnSteps = kTile / 2 * 8 / kThreads;
__device__ __forceinline__ int along() { return threadIdx.x & 7; }
__device__ __forceinline__ int row_of_step(int i) { return threadIdx.x / 8 + i * kRowsPerStep; }
__device__ __forceinline__ int pair_of_step(int i) { return threadIdx.x / 8 + i * (kThreads / 8); }

// This thread's units, step by step. A step further is kRowsPerStep = 2·16 rows down, which adds 2
// to the number that a chunk's place is permuted with: an xor with 32 bytes per step.
template <class E>
struct RowUnits {
  unsigned char* tile;
  int offset[E::kBytes];  // of the chunks in step 0

  __device__ __forceinline__ explicit RowUnits(unsigned char* tile) : tile(tile) {
    static_assert(kRowsPerStep == 32);
#pragma unroll
    for (int j = 0; j < E::kBytes; ++j) {
      offset[j] = chunk_offset<E>(row_of_step(0), along() * E::kBytes + j);
    }
  }
  __device__ __forceinline__ unsigned char* at(int step, int chunk) const {
    return tile + (offset[chunk] ^ (step * 32)) + step * kRowsPerStep * kRowBytes<E>;
  }
  __device__ __forceinline__ RowUnit<E> read(int step) const {
    RowUnit<E> u;
    auto* words = reinterpret_cast<uint4*>(u.p);
#pragma unroll
    for (int j = 0; j < E::kBytes; ++j) words[j] = *reinterpret_cast<const uint4*>(at(step, j));
    return u;
  }
  __device__ __forceinline__ void write(int step, const RowUnit<E>& u) const {
    const auto* words = reinterpret_cast<const uint4*>(u.p);
#pragma unroll
    for (int j = 0; j < E::kBytes; ++j) *reinterpret_cast<uint4*>(at(step, j)) = words[j];
  }
};

// Rows 16·group … + 15 of columns 2·pair and 2·pair + 1.
template <class E>
__device__ __forceinline__ void read_column_pairs(const unsigned char* tile, int group, int pair,
                                                  typename E::Pair (&p)[16]) {
  const int at = pair * 2 * E::kBytes;
  const unsigned char* first = tile + chunk_offset<E>(group * 16, at / 16) + at % 16;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    p[k] = *reinterpret_cast<const typename E::Pair*>(first + k * kRowBytes<E>);
  }
}

}  // namespace dfg

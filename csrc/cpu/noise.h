// Random bits of one block of 16 contraction elements × 128 plane rows (numerics.md, "NVFP4").
#pragma once

#include "../codecs/philox.h"
#include "lanes.h"

namespace dfg {
namespace DFG_VARIANT {

// Where the noise of a tile is drawn from.
struct NoisePlace {
  uint32_t seed, step, stream;
  int64_t row;          // global index of lane 0
  int64_t contraction;  // global index of the tile's first contraction element
};

// Words of the up to three counters that a block's 16 elements draw from.
struct Noise {
  Words32 words[3][4];
  int first;  // the block's first element among the counters' 24
};

template <class Source>
void content_hash(const Lanes* __restrict source, Words32& __restrict hash) {
  for (int lane = 0; lane < kLanes; ++lane) hash[lane] = 0;
  for (int k = 0; k < 16; ++k) {
    const uint32_t factor = hash_factor(k);
    for (int lane = 0; lane < kLanes; ++lane) {
      hash[lane] += Source::pattern(source[k][lane]) * factor;
    }
  }
}

// source: the block before any transform; offset: its place in the tile.
inline void draw(const NoisePlace& place, Dtype dtype, const Lanes* source, int offset,
                 Noise& noise) {
  Words32 hash;
  with_element(dtype, [&](auto element) { content_hash<decltype(element)>(source, hash); });
  const int64_t j = place.contraction + offset;
  noise.first = static_cast<int>(j & 7);
  const int counters = noise.first != 0 ? 3 : 2;
  const uint32_t row = static_cast<uint32_t>(place.row);
  for (int counter = 0; counter < counters; ++counter) {
    const uint32_t j8 = static_cast<uint32_t>((j >> 3) + counter);
    Words32(&words)[4] = noise.words[counter];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Words w = philox4x32(j8, row + static_cast<uint32_t>(lane), place.step, hash[lane],
                                 place.seed, place.stream);
      words[0][lane] = w.word[0];
      words[1][lane] = w.word[1];
      words[2][lane] = w.word[2];
      words[3][lane] = w.word[3];
    }
  }
}

}  // namespace DFG_VARIANT
}  // namespace dfg

// cast_cpu and measure_cpu: cuts the work into tiles, writes what belongs to no tile (outer scales,
// padding), and runs the tiles of the chosen instruction set.
#include <stdexcept>
#include <vector>

#include "../codecs/fp8.h"
#include "../codecs/nvfp4.h"
#include "float_mode.h"
#include "kernels.h"
#include "tiles.h"
#include "variant.h"

namespace dfg {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

// What a part of a plane's contraction is rounded up to in grouped planes.
int64_t block_of(Codec codec) {
  if (codec == Codec::block) return 128;
  return codec == Codec::float8 ? 16 : 32;
}

// Stored contraction elements [begin, end) of the columnwise plane that no tile writes.
struct Gap {
  int64_t begin, end;
};

struct Cut {
  std::vector<RowTile> tiles;
  std::vector<Gap> gaps;
};

void add_tiles(int64_t first, int64_t last, int32_t expert, int64_t column, int64_t column_end,
               Cut& cut) {
  for (int64_t row = first; row < last; row += kTile) {
    const int64_t offset = column + row - first;
    const int64_t left = column_end - offset;
    cut.tiles.push_back({row, static_cast<int32_t>(last - row < kTile ? last - row : kTile), expert,
                         first, offset, static_cast<int32_t>(left < kTile ? left : kTile), 0});
  }
}

// codec, stored_contraction: of the columnwise plane; none where it is not wanted.
Cut cut_rows(int64_t rows, const Groups& groups, Codec codec, int64_t stored_contraction) {
  Cut cut;
  int64_t column = 0;
  if (groups.count == 0) {
    const int64_t covered = round_up(rows, kTile);
    column = codec != Codec::none && stored_contraction < covered ? stored_contraction : covered;
    add_tiles(0, rows, 0, 0, column, cut);
  }
  for (int32_t expert = 0; expert < groups.count; ++expert) {
    const int64_t first = expert == 0 ? 0 : groups.ends[expert - 1];
    const int64_t last = groups.ends[expert];
    const int64_t block = block_of(codec);
    const int64_t extent = last > first ? round_up(last - first, block) : block;
    if (last == first) cut.gaps.push_back({column, column + extent});
    add_tiles(first, last, expert, column, column + extent, cut);
    column += extent;
    if (groups.column_ends != nullptr) groups.column_ends[expert] = static_cast<int32_t>(column);
  }
  if (codec != Codec::none && column < stored_contraction) {
    cut.gaps.push_back({column, stored_contraction});
  }
  return cut;
}

// Bytes of codes that `elements` contraction elements take.
int64_t code_bytes(const Plane& plane, int64_t elements) {
  return plane.options.codec == Codec::nvfp4 ? elements / 2 : elements;
}

void clear_bytes(uint8_t* base, int64_t stride, int64_t first_row, int64_t last_row, int64_t begin,
                 int64_t end) {
  if (base == nullptr || begin >= end) return;
  for (int64_t row = first_row; row < last_row; ++row) {
    std::memset(base + row * stride + begin, 0, end - begin);
  }
}

// Zero codes and scales of plane rows [first_row, last_row), contraction [begin, end).
void clear(const Plane& plane, int64_t first_row, int64_t last_row, int64_t begin, int64_t end) {
  const int64_t stored = plane.stored_contraction;
  clear_bytes(plane.codes, code_bytes(plane, stored), first_row, last_row, code_bytes(plane, begin),
              code_bytes(plane, end));
  if (plane.scales == nullptr || plane.options.codec == Codec::float8) return;
  if (plane.options.swizzled) return;  // tiles write all of their 128×4 tiles of scales
  if (plane.options.codec != Codec::block) {
    const int64_t block = plane.options.codec == Codec::mxfp8 ? 32 : 16;
    clear_bytes(static_cast<uint8_t*>(plane.scales), stored / block, first_row, last_row,
                begin / block, end / block);
  } else if (!plane.options.two_dimensional) {
    float* scales = static_cast<float*>(plane.scales);
    for (int64_t block = ceil_div(begin, kTile); block < ceil_div(end, kTile); ++block) {
      for (int64_t row = first_row; row < last_row; ++row) {
        scales[block * plane.stored_rows + row] = 0.0f;
      }
    }
  }
}

// Everything of the plane that no tile writes. rows: plane rows that exist.
void write_padding(const Plane& plane, int64_t rows, int64_t contraction,
                   const std::vector<Gap>& gaps) {
  clear(plane, rows, plane.stored_rows, 0, plane.stored_contraction);
  for (const Gap& gap : gaps) clear(plane, 0, rows, gap.begin, gap.end);
  if (plane.options.codec != Codec::block || !plane.options.two_dimensional) return;
  if (plane.scales == nullptr) return;
  float* scales = static_cast<float*>(plane.scales);
  const int64_t blocks = ceil_div(contraction, kTile);
  const int64_t stride = round_up(ceil_div(plane.stored_contraction, kTile), 4);
  for (int64_t row = 0; row < ceil_div(rows, kTile); ++row) {
    for (int64_t block = blocks; block < stride; ++block) scales[row * stride + block] = 0.0f;
  }
}

float outer_scale(const PlaneOptions& options, float statistic) {
  if (options.codec == Codec::nvfp4) return nvfp4_outer(statistic);
  const float fp8_max = options.e5m2 ? Fp8<true>::kMax : Fp8<false>::kMax;
  return reciprocal(options.scale_given ? statistic
                                        : fp8_encode_scale(statistic, fp8_max, options.epsilon,
                                                           options.power_of_two));
}

// sets: how many vectors of statistics there are (experts), each of `rows` where row-scaled.
void write_outer(const Plane& plane, int64_t sets, int64_t rows) {
  if (plane.outer == nullptr) return;
  const bool by_row = plane.options.row_scaled;
  const int64_t count = by_row ? rows : 1, stride = by_row ? plane.stored_rows : 1;
  for (int64_t set = 0; set < sets; ++set) {
    float* outer = plane.outer + set * stride;
    for (int64_t row = 0; row < count; ++row) {
      outer[row] = outer_scale(plane.options, plane.statistic[set * count + row]);
    }
    for (int64_t row = count; row < stride; ++row) outer[row] = 0.0f;
  }
}

void check_seed(const PlaneOptions& options, const int64_t* seed_step) {
  if (options.codec == Codec::nvfp4 && options.stochastic && seed_step == nullptr) {
    throw std::invalid_argument(
        "seed_step is null; stochastic rounding needs [rounding seed, completed steps]");
  }
}

// Lets each thread begin at column tiles of its own: threads that write the same rows of a fresh
// columnwise plane at the same time would each pay for the page faults of all its pages.
void spread_starts(int64_t across, std::vector<RowTile>& tiles) {
  const int64_t count = static_cast<int64_t>(tiles.size());
  for (int64_t i = 0; i < count; ++i) tiles[i].shift = i * across / count;
}

bool is_plain(const Measure& measure) {
  return measure.options.codec == Codec::none || measure.options.rht == Rht::off;
}

void run_items(int64_t count, const ParallelFor& run,
               const std::function<void(int64_t, int64_t)>& body) {
  if (count == 0) return;
  run(count, [&](int64_t begin, int64_t end) {
    const SubnormalsKept mode;
    body(begin, end);
  });
}

}  // namespace

void cast_cpu(const CastArgs& args, const ParallelFor& run) {
  const SubnormalsKept mode;
  const bool grouped = args.groups.count > 0;
  const bool has_row = args.row.options.codec != Codec::none;
  const bool has_column = args.column.options.codec != Codec::none;
  if (has_row) check_seed(args.row.options, args.seed_step);
  if (has_column) check_seed(args.column.options, args.seed_step);
  const int64_t across = ceil_div(args.columns, kTile);
  Cut cut =
      cut_rows(args.rows, args.groups, args.column.options.codec, args.column.stored_contraction);
  spread_starts(across, cut.tiles);
  if (has_row) {
    const int64_t covered = round_up(args.columns, kTile);
    const std::vector<Gap> gaps = {{covered, args.row.stored_contraction}};
    write_padding(args.row, args.rows, args.columns, gaps);
    const bool by_expert = grouped && !args.row.options.row_scaled;
    write_outer(args.row, by_expert ? args.groups.count : 1, args.rows);
  }
  if (has_column) {
    write_padding(args.column, args.columns, args.rows, cut.gaps);
    write_outer(args.column, grouped ? args.groups.count : 1, args.columns);
  }
  const RowTile* tiles = cut.tiles.data();
  const Variant& kernels = variant();
  const int64_t count = static_cast<int64_t>(cut.tiles.size()) * across;
  run_items(count, run,
            [&](int64_t begin, int64_t end) { kernels.cast(args, tiles, begin, end); });
}

void measure_cpu(const MeasureArgs& args, const ParallelFor& run) {
  const bool has_column = args.column.options.codec != Codec::none;
  if (args.dequantized && has_column) check_seed(args.row_plane.options, nullptr);
  const Cut cut = cut_rows(args.rows, args.groups, Codec::none, 0);
  const RowTile* tiles = cut.tiles.data();
  const int64_t rows = static_cast<int64_t>(cut.tiles.size());
  const Variant& kernels = variant();
  const bool direct =
      is_plain(args.row) && is_plain(args.column) && !(args.dequantized && has_column);
  run_items(rows * ceil_div(args.columns, direct ? kSpan : kTile), run,
            [&](int64_t begin, int64_t end) {
              (direct ? kernels.amax : kernels.measure)(args, tiles, begin, end);
            });
}

void decode_cpu(const DecodeArgs& args, const ParallelFor& run) {
  if (args.contraction == 0) return;
  run_items(args.rows, run,
            [&](int64_t begin, int64_t end) { variant().decode(args, begin, end); });
}

}  // namespace dfg

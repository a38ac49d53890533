// Every check of the operators, before anything is launched.
#include "bindings.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

namespace dfg {
namespace {

constexpr int64_t kRowMultiple = 16;
constexpr int64_t kBlock = 128;
constexpr int64_t kAlignment = 16;         // bytes, of every code buffer
constexpr int64_t kBufferAlignment = 256;  // bytes, of buffers in one allocation

int64_t ceil_to(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// "row codes is torch.uint8 [3, 4] (contiguous) on cpu; accepted: torch.uint8 [16, 16] …"
void check_tensor(const char* side, const char* what, const at::Tensor& tensor,
                  at::ScalarType dtype, at::IntArrayRef shape, const at::Tensor& x) {
  const bool fits = tensor.scalar_type() == dtype && tensor.sizes() == shape &&
                    tensor.is_contiguous() && tensor.device() == x.device();
  TORCH_CHECK_VALUE(fits, side, what, " is ", tensor.scalar_type(), " ", tensor.sizes(),
                    tensor.is_contiguous() ? "" : " (not contiguous)", " on ", tensor.device(),
                    "; accepted: ", dtype, " ", shape, ", contiguous, on ", x.device());
}

const at::Tensor& needed(const char* side, const char* what, const OptionalTensor& tensor) {
  TORCH_CHECK_VALUE(tensor.has_value(), side, what, " is None; this format needs it");
  return *tensor;
}

void check_absent(const char* side, const char* what, const OptionalTensor& tensor,
                  const char* why) {
  TORCH_CHECK_VALUE(!tensor.has_value(), side, what, " is given; accepted: None, ", why);
}

PlaneOptions unpack(const char* side, int64_t packed, double epsilon) {
  PlaneOptions o;
  o.codec = static_cast<Codec>(packed & 0xFF);
  o.e5m2 = packed >> 8 & 1;
  o.two_dimensional = packed >> 9 & 1;
  o.power_of_two = packed >> 10 & 1;
  o.row_scaled = packed >> 11 & 1;
  o.scale_given = packed >> 12 & 1;
  o.stochastic = packed >> 13 & 1;
  o.rht = static_cast<Rht>(packed >> 14 & 3);
  o.swizzled = packed >> 16 & 1;
  o.epsilon = static_cast<float>(epsilon);
  const bool is_float8 = o.codec == Codec::float8, is_nvfp4 = o.codec == Codec::nvfp4;
  const bool is_none = o.codec == Codec::none;
  const bool fits =
      packed >= 0 && packed >> 17 == 0 && (packed & 0xFF) <= static_cast<int>(Codec::nvfp4) &&
      (packed >> 14 & 3) <= static_cast<int>(Rht::with_signs) && (!is_none || packed == 0) &&
      !(o.e5m2 && is_nvfp4) && !(o.two_dimensional && is_float8) &&
      !(o.power_of_two && !is_float8 && o.codec != Codec::block) &&
      !(o.row_scaled && !is_float8 && !is_nvfp4) &&
      !(o.scale_given && (!is_float8 || o.row_scaled)) &&
      !((o.stochastic || o.rht != Rht::off) && !is_nvfp4) &&
      !(o.swizzled && o.codec != Codec::mxfp8 && !is_nvfp4) &&
      !(o.two_dimensional && (o.rht != Rht::off || o.row_scaled)) &&
      !(is_nvfp4 && o.row_scaled && (o.stochastic || o.rht != Rht::off)) && epsilon >= 0.0;
  TORCH_CHECK_VALUE(fits, side, "options is ", packed, " with epsilon ", epsilon,
                    "; accepted: what dist_finegrain.formats.fused makes of a Format");
  return o;
}

int64_t contraction_multiple(const PlaneOptions& o) {
  return o.codec == Codec::mxfp8 || o.codec == Codec::nvfp4 ? 32 : 16;
}

// What an expert's columnwise part starts at a multiple of.
int64_t group_multiple(const PlaneOptions& o) {
  return o.codec == Codec::block ? kBlock : contraction_multiple(o);
}

bool has_scales(const PlaneOptions& o) { return o.codec != Codec::float8; }
bool has_outer(const PlaneOptions& o) {
  return o.codec == Codec::float8 || o.codec == Codec::nvfp4;
}

std::vector<int64_t> scale_shape(const PlaneOptions& o, int64_t rows, int64_t contraction,
                                 int64_t stored_rows, int64_t stored_contraction) {
  const int64_t blocks = (contraction + kBlock - 1) / kBlock;
  if (o.codec == Codec::mxfp8 || o.codec == Codec::nvfp4) {
    const int64_t bytes = stored_contraction / (o.codec == Codec::mxfp8 ? 32 : 16);
    if (o.swizzled) return {ceil_to(stored_rows, kBlock) * ceil_to(bytes, 4)};
    return {stored_rows, bytes};
  }
  if (o.two_dimensional) return {(rows + kBlock - 1) / kBlock, ceil_to(blocks, 4)};
  return {blocks, stored_rows};
}

// Extents of one plane of a call, and how its statistic and outer scale are laid out.
struct Shape {
  int64_t rows, contraction;
  int64_t experts = 0;  // 0: not grouped
  bool is_grouped_column = false;

  std::vector<int64_t> per_row_or_one(const PlaneOptions& o, int64_t row_count) const {
    if (!o.row_scaled) return {experts ? experts : 1};
    if (is_grouped_column) return {experts, row_count};
    return {row_count};
  }

  // The contraction with room for the parts of any split among the experts, and as it is stored.
  int64_t extent(const PlaneOptions& o) const {
    if (!is_grouped_column) return contraction;
    const int64_t block = group_multiple(o);
    return ceil_to(ceil_to(contraction, block) + experts * block, contraction_multiple(o));
  }
  int64_t stored_contraction(const PlaneOptions& o) const {
    return ceil_to(extent(o), contraction_multiple(o));
  }
};

void check_statistic(const char* side, const PlaneOptions& o, const Shape& shape,
                     const OptionalTensor& statistic, const at::Tensor& x) {
  if (!has_outer(o)) {
    check_absent(side, "statistic", statistic, "as block and MXFP8 scales follow from the blocks");
    return;
  }
  check_tensor(side, "statistic", needed(side, "statistic", statistic), at::kFloat,
               shape.per_row_or_one(o, shape.rows), x);
}

void check_alignment(const char* side, const uint8_t* codes) {
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(codes) % kAlignment == 0, side,
                    "codes starts at an address that is no multiple of ", kAlignment,
                    "; accepted: an aligned buffer, e.g. what torch.empty returns");
}

Plane plane_of(const char* side, at::TensorList buffers, const PlaneOptions& o, const Shape& shape,
               const OptionalTensor& statistic, const OptionalTensor& amax, const at::Tensor& x) {
  Plane plane;
  plane.options = o;
  const size_t count = o.codec == Codec::none ? 0 : 1 + has_scales(o) + has_outer(o);
  TORCH_CHECK_VALUE(buffers.size() == count, side, "plane has ", buffers.size(),
                    " buffers; accepted: ", count, " for codec ", static_cast<int>(o.codec),
                    " (codes, block scales, outer scale, where it has them)");
  if (o.codec == Codec::none) {
    check_absent(side, "statistic", statistic, "as this plane is not wanted");
    check_absent(side, "amax", amax, "as this plane is not wanted");
    return plane;
  }
  const int64_t per_byte = o.codec == Codec::nvfp4 ? 2 : 1;
  const int64_t stored_rows = ceil_to(shape.rows, kRowMultiple);
  const int64_t contraction = shape.extent(o);
  const int64_t stored_contraction = shape.stored_contraction(o);
  plane.stored_rows = stored_rows;
  plane.stored_contraction = stored_contraction;
  check_tensor(side, "codes", buffers[0], at::kByte, {stored_rows, stored_contraction / per_byte},
               x);
  plane.codes = static_cast<uint8_t*>(buffers[0].mutable_data_ptr());
  check_alignment(side, plane.codes);
  if (has_scales(o)) {
    check_tensor(side, "scales", buffers[1], o.codec == Codec::block ? at::kFloat : at::kByte,
                 scale_shape(o, shape.rows, contraction, stored_rows, stored_contraction), x);
    plane.scales = buffers[1].mutable_data_ptr();
  }
  if (has_outer(o)) {
    check_tensor(side, "outer", buffers.back(), at::kFloat, shape.per_row_or_one(o, stored_rows),
                 x);
    plane.outer = static_cast<float*>(buffers.back().mutable_data_ptr());
  }
  check_statistic(side, o, shape, statistic, x);
  if (statistic) plane.statistic = static_cast<const float*>(statistic->const_data_ptr());
  if (amax) {
    check_tensor(side, "amax", *amax, at::kFloat, {std::max<int64_t>(shape.experts, 1)}, x);
    plane.amax = static_cast<float*>(amax->mutable_data_ptr());
  }
  return plane;
}

Dtype dtype_of(const char* name, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::f32;
    case at::kHalf:
      return Dtype::f16;
    case at::kBFloat16:
      return Dtype::bf16;
    default:
      TORCH_CHECK_TYPE(false, name, " is ", tensor.scalar_type(),
                       "; accepted: torch.float32, torch.float16 or torch.bfloat16");
  }
}

// Fills what CastArgs and MeasureArgs have in common.
template <typename Args>
void set_matrix(Args& args, const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2, "x has shape ", x.sizes(), "; accepted: a matrix [M, K]");
  args.x = x.const_data_ptr();
  args.dtype = dtype_of("x", x);
  args.rows = x.size(0);
  args.columns = x.size(1);
  args.row_stride = args.rows > 1 ? x.stride(0) : args.columns;
  const bool is_readable = args.rows == 0 || ((args.columns <= 1 || x.stride(1) == 1) &&
                                              args.row_stride >= args.columns);
  TORCH_CHECK_VALUE(is_readable, "x has strides ", x.strides(), " for shape ", x.sizes(),
                    "; accepted: last stride 1 and rows that do not overlap, e.g. x.contiguous()");
}

Groups groups_of(const OptionalTensor& ends, const OptionalTensor& column_ends,
                 const at::Tensor& x) {
  Groups groups;
  if (!ends) {
    check_absent("", "column_ends", column_ends, "without ends");
    return groups;
  }
  TORCH_CHECK_VALUE(ends->dim() == 1 && ends->size(0) > 0 && ends->size(0) <= INT32_MAX,
                    "ends has shape ", ends->sizes(), "; accepted: [E] with at least one expert");
  check_tensor("", "ends", *ends, at::kInt, {ends->size(0)}, x);
  groups.count = static_cast<int32_t>(ends->size(0));
  groups.ends = static_cast<const int32_t*>(ends->const_data_ptr());
  TORCH_CHECK_VALUE(x.size(0) <= INT32_MAX, "x has ", x.size(0),
                    " rows; accepted with ends: at most ", INT32_MAX, ", as ends are int32");
  // Those of a GPU cannot be looked at without waiting for it; its kernels take the nearest in
  // order.
  int64_t before = 0;
  for (int32_t e = 0; x.is_cpu() && e < groups.count; before = groups.ends[e++]) {
    const bool is_last = e + 1 == groups.count;
    TORCH_CHECK_VALUE(groups.ends[e] >= before && groups.ends[e] <= x.size(0) &&
                          (!is_last || groups.ends[e] == x.size(0)),
                      "ends[", e, "] is ", groups.ends[e], " after ", before, " in x of ",
                      x.size(0),
                      " rows; accepted: non-decreasing ends, the last one the number of rows");
  }
  if (column_ends) {
    check_tensor("", "column_ends", *column_ends, at::kInt, {groups.count}, x);
    groups.column_ends = static_cast<int32_t*>(column_ends->mutable_data_ptr());
  }
  return groups;
}

void check_groups(const char* side, const PlaneOptions& o, int64_t experts) {
  TORCH_CHECK_VALUE(!(experts && o.codec == Codec::block && o.two_dimensional), side,
                    "plane has 128×128 blocks with ends; accepted for experts: 1×128 blocks, e.g. "
                    "Float8BlockQuantizer(fp8_dtype, block_scaling_dim=1)");
  TORCH_CHECK_VALUE(!(experts && o.swizzled), side, "plane has swizzled scales with ends; ",
                    "accepted for experts: plain scales, e.g. swizzled=False");
}

void check_dequantized(bool dequantized, const PlaneOptions& row, const PlaneOptions& column) {
  if (!dequantized) return;
  TORCH_CHECK_VALUE(row.codec != Codec::none && column.codec != Codec::none,
                    "dequantized is True without both planes; the column is made from the row");
  TORCH_CHECK_VALUE(row.rht == Rht::off,
                    "dequantized is True with RHT in the row plane; accepted: RHT in the column");
}

}  // namespace

PlaneOptions plane_options(int64_t packed) { return unpack("", packed, 0.0); }

std::vector<at::Tensor> empty_plane(int64_t options, int64_t rows, int64_t contraction,
                                    const at::Tensor& x, int64_t experts, bool is_column,
                                    int64_t spare) {
  const PlaneOptions o = plane_options(options);
  const Shape shape{rows, contraction, experts, experts > 0 && is_column};
  const int64_t stored_rows = ceil_to(rows, kRowMultiple);
  const int64_t extent = shape.extent(o), stored = shape.stored_contraction(o);
  // One allocation for what lives and is saved together: each takes longer than a small kernel.
  struct Part {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };
  std::vector<Part> parts = {
      {{stored_rows, stored / (o.codec == Codec::nvfp4 ? 2 : 1)}, at::kByte}};
  if (has_scales(o)) {
    parts.push_back({scale_shape(o, rows, extent, stored_rows, stored),
                     o.codec == Codec::block ? at::kFloat : at::kByte});
  }
  if (has_outer(o)) parts.push_back({shape.per_row_or_one(o, stored_rows), at::kFloat});
  if (spare > 0) parts.push_back({{spare}, at::kFloat});
  std::vector<int64_t> starts;
  int64_t bytes = 0;
  for (const Part& part : parts) {
    starts.push_back(bytes);
    const auto size = static_cast<int64_t>(c10::elementSize(part.dtype));
    bytes = ceil_to(bytes + c10::multiply_integers(part.sizes) * size, kBufferAlignment);
  }
  const at::Tensor buffer = at::empty({bytes}, x.options().dtype(at::kByte));
  std::vector<at::Tensor> buffers;
  for (size_t i = 0; i < parts.size(); ++i) {
    buffers.push_back(part_of(buffer, starts[i], parts[i].sizes, parts[i].dtype));
  }
  return buffers;
}

at::Tensor part_of(const at::Tensor& buffer, int64_t byte_offset, at::IntArrayRef sizes,
                   at::ScalarType dtype) {
  // Not a view of torch's: no autograd, no version shared with the rest of the buffer.
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(buffer.storage()), buffer.key_set(),
                                                   c10::scalarTypeToTypeMeta(dtype));
  impl->set_storage_offset(buffer.storage_offset() +
                           byte_offset / static_cast<int64_t>(c10::elementSize(dtype)));
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

Statistic measured_statistic(int64_t options) {
  const PlaneOptions o = plane_options(options);
  if (!has_outer(o) || o.scale_given) return Statistic::none;
  if (o.row_scaled) return Statistic::row;
  return o.rht == Rht::off ? Statistic::tensor : Statistic::rotated_tensor;
}

CastArgs cast_args(DFG_CAST_PARAMETERS) {
  CastArgs args;
  set_matrix(args, x);
  const PlaneOptions r = unpack("row ", row_options, row_epsilon);
  const PlaneOptions c = unpack("column ", column_options, column_epsilon);
  TORCH_CHECK_VALUE(r.codec != Codec::none || c.codec != Codec::none,
                    "neither a row nor a column plane is asked for");
  check_dequantized(dequantized, r, c);
  args.groups = groups_of(ends, column_ends, x);
  TORCH_CHECK_VALUE(x.numel() > 0 || args.groups.count, "x has shape ", x.sizes(),
                    "; accepted: at least one element (Format.encode makes empty planes)");
  const int64_t experts = args.groups.count;
  check_groups("row ", r, experts);
  check_groups("column ", c, experts);
  args.row = plane_of("row ", row, r, {args.rows, args.columns, experts, false}, row_statistic,
                      row_amax, x);
  args.column = plane_of("column ", column, c, {args.columns, args.rows, experts, experts > 0},
                         column_statistic, column_amax, x);
  args.dequantized = dequantized;
  if (r.stochastic || c.stochastic) {
    check_tensor("", "seed_step", needed("", "seed_step", seed_step), at::kLong, {2}, x);
    args.seed_step = static_cast<const int64_t*>(seed_step->const_data_ptr());
    TORCH_CHECK_VALUE(places.size() == 6, "places has ", places.size(),
                      " entries; accepted: stream, row and contraction origin of row and column");
    Plane* planes[] = {&args.row, &args.column};
    for (int i = 0; i < 2; ++i) {
      planes[i]->stream = static_cast<uint32_t>(places[3 * i]);
      planes[i]->row_origin = places[3 * i + 1];
      planes[i]->contraction_origin = places[3 * i + 2];
    }
  }
  if (bias_partials) {
    TORCH_CHECK_VALUE(!ends, "bias_partials is given with ends; accepted for experts: None");
    check_tensor("", "bias_partials", *bias_partials, at::kFloat,
                 {(args.rows + kBlock - 1) / kBlock, args.columns}, x);
    args.bias_partials = static_cast<float*>(bias_partials->mutable_data_ptr());
  }
  return args;
}

MeasureArgs measure_args(DFG_MEASURE_PARAMETERS) {
  MeasureArgs args;
  set_matrix(args, x);
  const PlaneOptions r = unpack("row ", row_options, row_epsilon);
  const PlaneOptions c = unpack("column ", column_options, 0.0);
  args.groups = groups_of(ends, std::nullopt, x);
  const int64_t experts = args.groups.count;
  check_groups("row ", r, experts);
  check_groups("column ", c, experts);
  TORCH_CHECK_VALUE(row_amax || column_amax, "neither row_amax nor column_amax is asked for");
  const auto set = [&](const char* side, Measure& measure, const PlaneOptions& o,
                       const Shape& shape, const OptionalTensor& amax) {
    if (!amax) return;
    TORCH_CHECK_VALUE(has_outer(o), side, "amax is given; accepted: None, as this plane's format ",
                      "measures nothing");
    check_tensor(side, "amax", *amax, at::kFloat, shape.per_row_or_one(o, shape.rows), x);
    measure = {o, static_cast<float*>(amax->mutable_data_ptr())};
  };
  const Shape row_shape{args.rows, args.columns, experts, false};
  set("row ", args.row, r, row_shape, row_amax);
  set("column ", args.column, c, {args.columns, args.rows, experts, experts > 0}, column_amax);
  args.dequantized = dequantized && column_amax.has_value();
  if (!args.dequantized) {
    check_absent("row ", "statistic", row_statistic, "unless the column is of dequantized rows");
    return args;
  }
  check_dequantized(true, r, c);
  TORCH_CHECK_VALUE(!r.stochastic, "the column's amax is of stochastically rounded rows, which ",
                    "take a seed; accepted: the row plane's decoded values as x");
  TORCH_CHECK_VALUE(!row_amax, "row_amax is asked for together with the column's amax of ",
                    "dequantized rows, which follows from it; measure the row first");
  args.row_plane.options = r;
  args.row_plane.stored_rows = ceil_to(args.rows, kRowMultiple);
  args.row_plane.stored_contraction = ceil_to(args.columns, contraction_multiple(r));
  check_statistic("row ", r, row_shape, row_statistic, x);
  if (row_statistic) {
    args.row_plane.statistic = static_cast<const float*>(row_statistic->const_data_ptr());
  }
  return args;
}

DecodeArgs decode_args(DFG_DECODE_PARAMETERS) {
  DecodeArgs args;
  const PlaneOptions o = unpack("", options, 0.0);
  TORCH_CHECK_VALUE(o.codec != Codec::none, "options is 0; accepted: those of a quantized format");
  TORCH_CHECK_VALUE(out.dim() == 2 && out.is_contiguous() && out.numel() > 0, "out has shape ",
                    out.sizes(), " and strides ", out.strides(),
                    "; accepted: a contiguous matrix [R, C] of at least one element");
  args.dtype = dtype_of("out", out);
  args.rows = out.size(0);
  args.contraction = out.size(1);
  args.out = out.mutable_data_ptr();
  TORCH_CHECK_VALUE(o.rht == Rht::off || args.contraction % 16 == 0, "out has shape ", out.sizes(),
                    "; accepted with RHT: whole groups of 16 along the contraction");
  TORCH_CHECK_VALUE(codes.dim() == 2, "codes has shape ", codes.sizes(), "; accepted: [Rp, Cp]");
  const int64_t per_byte = o.codec == Codec::nvfp4 ? 2 : 1;
  Plane& plane = args.plane;
  plane.options = o;
  plane.stored_rows = ceil_to(args.rows, kRowMultiple);
  plane.stored_contraction = codes.size(1) * per_byte;
  const int64_t multiple = contraction_multiple(o);
  TORCH_CHECK_VALUE(plane.stored_contraction % multiple == 0 &&
                        plane.stored_contraction == ceil_to(args.contraction, multiple),
                    "codes has ", plane.stored_contraction,
                    " columns; accepted: ", ceil_to(args.contraction, multiple), " for out ",
                    out.sizes());
  check_tensor("", "codes", codes, at::kByte, {plane.stored_rows, codes.size(1)}, out);
  plane.codes = const_cast<uint8_t*>(static_cast<const uint8_t*>(codes.const_data_ptr()));
  check_alignment("", plane.codes);
  if (has_scales(o)) {
    const at::Tensor& tensor = needed("", "scales", scales);
    check_tensor(
        "", "scales", tensor, o.codec == Codec::block ? at::kFloat : at::kByte,
        scale_shape(o, args.rows, args.contraction, plane.stored_rows, plane.stored_contraction),
        out);
    plane.scales = const_cast<void*>(tensor.const_data_ptr());
  }
  if (outer) {
    TORCH_CHECK_VALUE(has_outer(o), "outer is given; accepted: None, as this format has none");
    const Shape shape{args.rows, args.contraction};
    check_tensor("", "outer", *outer, at::kFloat, shape.per_row_or_one(o, plane.stored_rows), out);
    plane.outer = const_cast<float*>(static_cast<const float*>(outer->const_data_ptr()));
  }
  return args;
}

void check_update(DFG_UPDATE_PARAMETERS) {
  const size_t count = scales.size();
  TORCH_CHECK_VALUE(count > 0 && histories.size() == count && pendings.size() == count, "got ",
                    count, " scales, ", histories.size(), " histories and ", pendings.size(),
                    " pendings; accepted: one of each per slot, at least one slot");
  constexpr int64_t kWords = sizeof(DelayedSlot) / sizeof(int64_t);
  static_assert(kWords * sizeof(int64_t) == sizeof(DelayedSlot) && kWords == 5,
                "formats/fused_delayed.py packs five 64-bit words per slot");
  check_tensor("", "table", table, at::kLong, {static_cast<int64_t>(count), kWords}, table);
  for (size_t i = 0; i < count; ++i) {
    check_tensor("", "scale", scales[i], at::kFloat, {1}, table);
    check_tensor("", "pending", pendings[i], at::kFloat, {1}, table);
    const int64_t length = histories[i].numel();
    TORCH_CHECK_VALUE(length > 0 && length <= INT32_MAX, "history has ", length,
                      " amaxes; accepted: 1 to ", INT32_MAX);
    check_tensor("", "history", histories[i], at::kFloat, {length}, table);
  }
}

}  // namespace dfg

// torch.ops.dist_finegrain.gemm: every check, then cuBLASLt on the tensors' device and the current
// stream. Without a GPU the checks alone can be run, by a call with CPU tensors.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>

#include "bindings.h"
#include "gemm/problem.h"
#ifdef DFG_WITH_GEMM
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include "gemm/lt.h"
#endif

namespace dfg {
namespace {

constexpr int64_t kAlignment = 16;  // bytes: of FP8 and FP4 operands, their results and scales
constexpr int64_t kBlock = 128;

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
int64_t ceil_to(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0;
}

const char* const kElements[] = {"FP32", "FP16", "BF16", "E4M3", "E5M2", "E2M1"};

// What an operand's tensor holds.
at::ScalarType dtype_of(GemmElement element) {
  if (element == GemmElement::f16) return at::kHalf;
  if (element == GemmElement::bf16) return at::kBFloat16;
  return at::kByte;
}

GemmElement element_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return GemmElement::f32;
  return dtype == at::kHalf ? GemmElement::f16 : GemmElement::bf16;
}

// Whether cuBLASLt knows this pair of element and scale mode.
bool fits(GemmElement element, ScaleMode mode) {
  if (element == GemmElement::f16 || element == GemmElement::bf16) return mode == ScaleMode::none;
  if (element == GemmElement::e2m1) return mode == ScaleMode::vec16_e4m3;
  return element != GemmElement::f32 && mode >= ScaleMode::scalar && mode <= ScaleMode::vec32_e8m0;
}

void unpack(const char* name, int64_t options, GemmOperand* operand) {
  const int64_t element = options & 15, mode = options >> 4;
  const bool known = options >= 0 && element <= static_cast<int>(GemmElement::e2m1) &&
                     mode <= static_cast<int>(ScaleMode::vec16_e4m3);
  operand->element = static_cast<GemmElement>(element);
  operand->mode = static_cast<ScaleMode>(mode);
  TORCH_CHECK_VALUE(known && fits(operand->element, operand->mode), name, "_options is ", options,
                    "; accepted: element | scale mode << 4 as dist_finegrain.ops.lt packs them");
}

// FP32 or byte buffers of a fixed number of elements, in order.
void set_scales(const char* name, const OptionalTensor& scales, int64_t rows, int64_t k,
                const at::Tensor& a, GemmOperand* operand) {
  const ScaleMode mode = operand->mode;
  if (mode == ScaleMode::none) {
    TORCH_CHECK_VALUE(!scales, name, "_scales is given; accepted: None, as ",
                      kElements[static_cast<int>(operand->element)], " operands have none");
    return;
  }
  TORCH_CHECK_VALUE(scales.has_value(), name, "_scales is None; this operand needs them");
  at::ScalarType dtype = at::kFloat;
  int64_t count = 1;
  if (mode == ScaleMode::row) count = rows;
  if (mode == ScaleMode::vec128) count = ceil_div(k, kBlock) * rows;
  if (mode == ScaleMode::block128) count = ceil_div(rows, kBlock) * ceil_to(ceil_div(k, kBlock), 4);
  if (mode == ScaleMode::vec32_e8m0 || mode == ScaleMode::vec16_e4m3) {
    dtype = at::kByte;
    count = ceil_to(rows, kBlock) * ceil_to(k / (mode == ScaleMode::vec32_e8m0 ? 32 : 16), 4);
  }
  TORCH_CHECK_VALUE(scales->scalar_type() == dtype && scales->numel() == count &&
                        scales->is_contiguous() && scales->device() == a.device(),
                    name, "_scales is ", scales->scalar_type(), " ", scales->sizes(),
                    scales->is_contiguous() ? "" : " (not contiguous)", " on ", scales->device(),
                    "; accepted: ", dtype, " with ", count, " elements, contiguous, on ",
                    a.device());
  operand->scales = scales->const_data_ptr();
  // The library has no kernel for others, not even for a single scale.
  TORCH_CHECK_VALUE(is_aligned(operand->scales), name,
                    "_scales starts at an address that is no multiple of ", kAlignment,
                    "; accepted: an aligned buffer, e.g. what torch.empty returns");
}

// The operand and how many elements it contracts over; `extent`: the rows that the result has.
int64_t set_operand(const char* name, const at::Tensor& tensor, int64_t extent, const at::Tensor& a,
                    GemmOperand* operand) {
  const bool is_narrow = operand->element >= GemmElement::e4m3;
  const auto dtype = dtype_of(operand->element);
  TORCH_CHECK_VALUE(tensor.dim() == 2 && tensor.scalar_type() == dtype &&
                        tensor.device() == a.device() && tensor.size(0) >= extent,
                    name, " is ", tensor.scalar_type(), " ", tensor.sizes(), " on ",
                    tensor.device(), "; accepted: ", dtype, " of at least ", extent,
                    " rows, as out has, on ", a.device());
  operand->data = tensor.const_data_ptr();
  if (is_narrow) {
    const bool is_row_major = (tensor.stride(1) == 1 || tensor.size(1) == 1) &&
                              (tensor.stride(0) >= tensor.size(1) || tensor.size(0) == 1);
    const int64_t pitch = tensor.size(0) == 1 ? tensor.size(1) : tensor.stride(0);
    TORCH_CHECK_VALUE(tensor.size(1) % kAlignment == 0, name, " has rows of ", tensor.size(1),
                      " bytes; accepted: multiples of ", kAlignment, ", as planes are stored");
    TORCH_CHECK_VALUE(is_row_major && pitch % kAlignment == 0 && is_aligned(operand->data), name,
                      " has strides ", tensor.strides(),
                      "; accepted: 16-byte aligned rows of codes that do not overlap");
    const int64_t per_byte = operand->element == GemmElement::e2m1 ? 2 : 1;
    operand->stride = pitch * per_byte;
    return tensor.size(1) * per_byte;
  }
  // A dimension of extent 1 may have any stride, also one that is too small for a layout.
  const auto strides_fit = [&tensor](int fastest, int slowest) {
    return (tensor.stride(fastest) == 1 || tensor.size(fastest) == 1) &&
           (tensor.stride(slowest) >= tensor.size(fastest) || tensor.size(slowest) == 1);
  };
  operand->transposed = !strides_fit(1, 0) && strides_fit(0, 1);
  TORCH_CHECK_VALUE(strides_fit(1, 0) || operand->transposed, name, " has strides ",
                    tensor.strides(),
                    "; accepted: one of them 1, the other the extent or more, "
                    "e.g. ",
                    name, ".contiguous()");
  const int fastest = operand->transposed ? 0 : 1;
  operand->stride = std::max(tensor.stride(1 - fastest), tensor.size(fastest));
  return tensor.size(1);
}

GemmArgs gemm_args(DFG_GEMM_PARAMETERS) {
  GemmArgs args;
  const auto dtype = out.scalar_type();
  const bool is_float = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
  TORCH_CHECK_VALUE(out.dim() == 2 && out.numel() > 0 && is_float && out.device() == a.device(),
                    "out is ", dtype, " ", out.sizes(), " on ", out.device(),
                    "; accepted: a matrix of FP32, FP16 or BF16 with elements, on ", a.device());
  args.m = out.size(0);
  args.n = out.size(1);
  TORCH_CHECK_VALUE((out.stride(1) == 1 || args.n == 1) && (out.stride(0) >= args.n || args.m == 1),
                    "out has strides ", out.strides(),
                    "; accepted: last stride 1 and rows that do not overlap");
  args.out = out.mutable_data_ptr();
  args.out_element = element_of(dtype);
  args.out_stride = std::max(out.stride(0), args.n);

  unpack("a", a_options, &args.a);
  unpack("b", b_options, &args.b);
  const bool is_narrow = args.a.element >= GemmElement::e4m3;
  TORCH_CHECK_VALUE(is_narrow == (args.b.element >= GemmElement::e4m3) &&
                        (is_narrow || args.a.element == args.b.element),
                    "a holds ", kElements[static_cast<int>(args.a.element)], " and b ",
                    kElements[static_cast<int>(args.b.element)],
                    "; accepted: one 16-bit type for both, or FP8 or FP4 codes in both");
  args.k = set_operand("a", a, args.m, a, &args.a);
  const int64_t k = set_operand("b", b, args.n, a, &args.b);
  TORCH_CHECK_VALUE(args.k == k && k > 0, "a contracts over ", args.k, " elements, b over ", k,
                    "; accepted: the same number, at least 1");
  // The library has no such kernel.
  TORCH_CHECK_VALUE(args.a.mode != ScaleMode::block128 || args.b.mode != ScaleMode::block128,
                    "a and b both have 128x128 scales; accepted: at least one with 1x128");
  set_scales("a", a_scales, a.size(0), k, a, &args.a);
  set_scales("b", b_scales, b.size(0), k, a, &args.b);
  // The library takes the stride of 1×128 scales to be the number of rows of the problem.
  TORCH_CHECK_VALUE(args.a.mode != ScaleMode::vec128 || a.size(0) == args.m, "out has ", args.m,
                    " rows; accepted: ", a.size(0), ", all stored rows of a with 1x128 scales");
  TORCH_CHECK_VALUE(args.b.mode != ScaleMode::vec128 || b.size(0) == args.n, "out has ", args.n,
                    " columns; accepted: ", b.size(0), ", all stored rows of b with 1x128 scales");
  if (is_narrow) {
    TORCH_CHECK_VALUE(args.n % kAlignment == 0 && is_aligned(args.out) &&
                          args.out_stride * out.element_size() % kAlignment == 0,
                      "out is ", out.sizes(), " with strides ", out.strides(),
                      "; accepted: columns a multiple of 16, rows and address of 16 bytes, e.g. "
                      "what torch.empty returns");
  }
  args.accumulate = accumulate;
  args.fast = fast;
  TORCH_CHECK_VALUE(!fast || (args.a.mode <= ScaleMode::row && is_narrow),
                    "fast is True; accepted: False, except with one scale per matrix or row");
  if (alpha) {
    TORCH_CHECK_VALUE(
        alpha->scalar_type() == at::kFloat && alpha->numel() == 1 && alpha->device() == a.device(),
        "alpha is ", alpha->scalar_type(), " ", alpha->sizes(), " on ", alpha->device(),
        "; accepted: one torch.float32 element on ", a.device());
    args.alpha = alpha->const_data_ptr<float>();
  }
  if (bias) {
    TORCH_CHECK_VALUE(dtype != at::kFloat && bias->scalar_type() == dtype && bias->dim() == 1 &&
                          bias->size(0) == args.n && bias->is_contiguous() &&
                          bias->device() == a.device(),
                      "bias is ", bias->scalar_type(), " ", bias->sizes(), " on ", bias->device(),
                      "; accepted: [", args.n,
                      "] of out's dtype, which is FP16 or BF16, "
                      "contiguous, on ",
                      a.device());
    args.bias = bias->const_data_ptr();
  }
  return args;
}

#ifdef DFG_WITH_GEMM

void gemm(DFG_GEMM_PARAMETERS) {
  GemmArgs args = gemm_args(DFG_GEMM_ARGUMENTS);
  const c10::cuda::CUDAGuard guard(a.device());
  args.device = guard.current_device().index();
  for (const bool exact : {false, true}) {
    const auto plan = plan_gemm(args, exact);
    // Of the current stream, so that it may be handed out again as soon as this call is enqueued;
    // during graph capture it comes from the graph's pool.
    const auto bytes = static_cast<int64_t>(workspace_bytes(*plan));
    at::Tensor workspace;
    if (bytes > 0) workspace = at::empty({bytes}, a.options().dtype(at::kByte));
    void* const memory = bytes > 0 ? workspace.mutable_data_ptr() : nullptr;
    if (run_gemm(args, *plan, exact, memory, c10::cuda::getCurrentCUDAStream())) return;
  }
}

TORCH_LIBRARY_IMPL(dist_finegrain, CUDA, m) { m.impl("gemm", gemm); }

#endif

void gemm_cpu(DFG_GEMM_PARAMETERS) {
  gemm_args(DFG_GEMM_ARGUMENTS);
  TORCH_CHECK(false, "dist_finegrain::gemm: a is on ", a.device(),
              "; accepted: CUDA tensors, as this is a call of cuBLASLt");
}

TORCH_LIBRARY_IMPL(dist_finegrain, CPU, m) { m.impl("gemm", gemm_cpu); }

}  // namespace
}  // namespace dfg

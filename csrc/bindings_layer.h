// What the operators of whole layers share: how a layer is quantized, the operands of its GEMMs,
// what its autograd node saves, and the GEMMs counted.
//
//     Y = X.row · W.rowᵀ    dX = dY.row · W.colᵀ    dW = dY.col · X.colᵀ
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <array>

#include "bindings.h"

namespace dfg {

using DelayedState = c10::List<OptionalTensor>;

enum Slot { kInput, kWeight, kGradOutput, kSlots };
enum Gemm { kFprop, kDgrad, kWgrad, kGemms };

constexpr int64_t kTile = 16;  // planes of matrices of whole tiles have no padding

// What modules/direct_linear.py packs. Planes of Identity have options 0: the matrix itself.
struct LayerPlan {
  std::array<QuantizeOptions, kSlots> slots;
  std::array<bool, kGemms> fast;
  int64_t counter;

  // words: row options, column options, dequantized of each slot; fast of each GEMM; counter.
  // epsilons: of row and column of each slot.
  LayerPlan(at::IntArrayRef words, at::ArrayRef<double> epsilons);
};

// One side of a GEMM: codes and scales, or a 16-bit matrix.
struct Operand {
  at::Tensor matrix, scales;
  int64_t options = 0;
};

struct Operands {
  Operand row, column;
  OptionalTensor bias_partials;
};

// `x` quantized for the GEMMs that read it; with `bias_grad` also what db is the sum of.
Operands operands_of(const at::Tensor& x, QuantizeOptions options, bool rowwise, bool columnwise,
                     bool bias_grad);

// Element and scale mode, as `gemm` takes them, of a plane with two buffers.
int64_t gemm_options(int64_t options);

// Counts `times` GEMMs of a layer.
void count(const LayerPlan& plan, Gemm gemm, int64_t times);

// Operators below see neither torch.autocast nor autograd.
struct Below {
  at::AutoDispatchBelowAutograd autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

// Contiguous and at an address that GEMMs take: itself, or a copy.
at::Tensor aligned(const at::Tensor& buffer);

// A product can be written there, or added to it, without a copy.
bool takes_products(const at::Tensor& matrix);

// `made` written to `matrix`, or added to it with one rounding of the sum.
void deliver(const at::Tensor& made, const at::Tensor& matrix, bool adds);

// What hooks of saved tensors see, and may give back in strides of their own: Identity's column
// plane is the transpose of what is stored.
at::Tensor in_memory_order(const Operand& column);
Operand unpacked(const at::Tensor& matrix, const at::Tensor& scales, int64_t options);

// What backward reads of the forward: column planes of X and W. Undefined where it reads none.
using Saved = std::array<at::Tensor, 4>;
c10::List<OptionalTensor> listed(const at::Tensor& y, const Saved& saved);
Saved saved_from(const c10::List<OptionalTensor>& list);

// Gradients of these raise an error instead of being left out.
std::vector<at::Tensor> refusing_another(std::vector<at::Tensor> outputs);

}  // namespace dfg

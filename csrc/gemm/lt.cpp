// Row-major D = A · Bᵀ is column-major Dᵀ = op(B) · op(A): cuBLASLt's first operand is our B, its m
// our n. What is stored with k fastest is transposed there, which FP8 and FP4 ask for on sm_90.
#include "lt.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

#include "library.h"

namespace dfg {
namespace {

constexpr size_t kMaxWorkspace = size_t{32} << 20;  // what cuBLAS recommends for Hopper
constexpr size_t kMaxPlans = 8192;                  // beyond it the cache starts anew
constexpr int64_t kMaxAlignment = 256;              // cuBLASLt tells no larger ones apart
constexpr int64_t kTile = 16;

const char* name_of(GemmElement element) {
  constexpr const char* kNames[] = {"FP32", "FP16", "BF16", "E4M3", "E5M2", "E2M1"};
  return kNames[static_cast<int>(element)];
}

const char* name_of(ScaleMode mode) {
  constexpr const char* kNames[] = {"no scales", "scalar", "row", "1x128",
                                    "128x128",   "1x32",   "1x16"};
  return kNames[static_cast<int>(mode)];
}

cudaDataType_t data_type(GemmElement element) {
  constexpr cudaDataType_t kTypes[] = {CUDA_R_32F,     CUDA_R_16F,     CUDA_R_16BF,
                                       CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_4F_E2M1};
  return kTypes[static_cast<int>(element)];
}

// cublasLtMatmulMatrixScale_t; int32_t because the attribute is.
int32_t scale_mode(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::row:
      return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case ScaleMode::vec128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScaleMode::block128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case ScaleMode::vec32_e8m0:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case ScaleMode::vec16_e4m3:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    default:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

bool is_narrow(GemmElement element) { return element >= GemmElement::e4m3; }

std::string describe(const GemmArgs& p) {
  std::ostringstream text;
  text << "m=" << p.m << ", n=" << p.n << ", k=" << p.k;
  const GemmOperand* operands[] = {&p.a, &p.b};
  for (int i = 0; i < 2; ++i) {
    const GemmOperand& o = *operands[i];
    text << ", " << "AB"[i] << " " << name_of(o.element) << " (" << name_of(o.mode)
         << (o.transposed ? ", transposed" : "") << ", stride " << o.stride << ")";
  }
  text << ", out " << name_of(p.out_element) << " (stride " << p.out_stride << ")"
       << (p.bias ? ", bias" : "") << (p.alpha ? ", alpha on the device" : "")
       << (p.accumulate ? ", accumulating" : "") << (p.fast ? ", fast accumulation" : "");
  return text.str();
}

void check(cublasStatus_t status, const char* call, const GemmArgs& args) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const CublasLt& lt = cublaslt();
  std::ostringstream text;
  text << "dist_finegrain::gemm: " << call << " of cuBLASLt " << lt.version() << " answered "
       << lt.status_name(status) << " for " << describe(args);
  throw std::runtime_error(text.str());
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // this error is reported here, not by the next call
  throw std::runtime_error(std::string("dist_finegrain::gemm: ") + call + ": " +
                           cudaGetErrorString(error));
}

// Allocating is allowed while another stream of the process is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// What every call on one device shares; made at its first call and kept for good.
struct DeviceState {
  cublasLtHandle_t handle = nullptr;
  // {0, 1}: with alpha on the device, beta must be there too (one pointer mode for both; the modes
  // that keep beta on the host take a vector of alphas, which only integer products document).
  float* constants = nullptr;
};

float* make_constants() {
  // On a stream of its own: filled now, not when a graph that is being captured is replayed.
  static const float kValues[] = {0.0f, 1.0f};
  float* constants = nullptr;
  cudaStream_t stream = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&constants), sizeof kValues), "cudaMalloc");
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaMemcpyAsync(constants, kValues, sizeof kValues, cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  return constants;
}

DeviceState device_state(const GemmArgs& args) {
  static std::mutex mutex;
  // Never destroyed: at exit the library may have gone first.
  static auto& states = *new std::unordered_map<int, DeviceState>;
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceState& state = states[args.device];
  if (!state.handle || !state.constants) {
    const RelaxedCapture relaxed;
    if (!state.handle) check(cublaslt().create(&state.handle), "cublasLtCreate", args);
    if (!state.constants) state.constants = make_constants();
  }
  return state;
}

// A description of the problem that is destroyed with the scope; pointers and options are set.
class MatmulDesc {
 public:
  explicit MatmulDesc(const GemmArgs& args) : args_(args) {
    check(cublaslt().desc_create(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "MatmulDescCreate", args);
    try {
      fill();
    } catch (...) {
      cublaslt().desc_destroy(desc_);
      throw;
    }
  }
  ~MatmulDesc() { cublaslt().desc_destroy(desc_); }
  MatmulDesc(const MatmulDesc&) = delete;
  MatmulDesc& operator=(const MatmulDesc&) = delete;

  cublasLtMatmulDesc_t get() const { return desc_; }

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check(cublaslt().desc_set(desc_, attribute, &value, sizeof value), "MatmulDescSetAttribute",
          args_);
  }

  void fill() {
    set<int32_t>(CUBLASLT_MATMUL_DESC_TRANSA, args_.b.transposed ? CUBLAS_OP_N : CUBLAS_OP_T);
    set<int32_t>(CUBLASLT_MATMUL_DESC_TRANSB, args_.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (args_.b.mode != ScaleMode::none) {
      set<int32_t>(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(args_.b.mode));
      set<const void*>(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, args_.b.scales);
    }
    if (args_.a.mode != ScaleMode::none) {
      set<int32_t>(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(args_.a.mode));
      set<const void*>(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, args_.a.scales);
    }
    if (args_.fast) set<int8_t>(CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1);
    if (args_.alpha) set<int32_t>(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    if (args_.bias) {
      set<uint32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set<const void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, args_.bias);
      set<int32_t>(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(args_.out_element));
    }
  }

  const GemmArgs& args_;
  cublasLtMatmulDesc_t desc_ = nullptr;
};

int64_t alignment(const void* pointer) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer));
  return address == 0 ? kMaxAlignment : std::min(address & -address, kMaxAlignment);
}

int64_t ceil_to(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Eight sizes for each power of two from 256 on, itself included; below every multiple of 16.
int64_t coarse(int64_t size) {
  int64_t step = kTile;
  while (16 * step < size) step *= 2;
  return ceil_to(size, step);
}

bool has_free_rows(const GemmOperand& o) {
  return o.mode == ScaleMode::scalar || o.mode == ScaleMode::row;
}

// The problem that an algorithm is asked for: to ask takes 2 ms, and the rows of an expert are
// others in every step. So similar sizes share one, where it is good for any.
GemmArgs asked_for(const GemmArgs& args, bool exact) {
  GemmArgs problem = args;
  if (exact || !has_free_rows(args.a) || !has_free_rows(args.b)) return problem;
  problem.m = coarse(args.m);
  problem.k = coarse(args.k);
  for (GemmOperand* o : {&problem.a, &problem.b}) {
    // Of the stride only its alignment counts.
    const int64_t alignment = std::min(o->stride & -o->stride, kMaxAlignment);
    o->stride = ceil_to(problem.k, kMaxAlignment) + alignment % kMaxAlignment;
  }
  return problem;
}

// Everything that the choice of an algorithm depends on.
using Key = std::array<int64_t, 13>;

Key key_of(const GemmArgs& p) {
  int64_t options = 0;
  const auto pack = [&options](int64_t value, int bits) { options = options << bits | value; };
  for (const GemmOperand* o : {&p.a, &p.b}) {
    pack(static_cast<int64_t>(o->element), 4);
    pack(static_cast<int64_t>(o->mode), 4);
    pack(o->transposed, 1);
  }
  pack(static_cast<int64_t>(p.out_element), 4);
  for (const bool flag : {p.fast, p.alpha != nullptr, p.bias != nullptr}) pack(flag, 1);
  return {p.device,
          p.m,
          p.n,
          p.k,
          p.a.stride,
          p.b.stride,
          p.out_stride,
          options,
          alignment(p.a.data),
          alignment(p.b.data),
          alignment(p.out),
          alignment(p.bias),
          std::min({alignment(p.a.scales), alignment(p.b.scales), kTile})};
}

struct HashOfKey {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (const int64_t word : key) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0xBF58476D1CE4E5B9u;
      hash ^= hash >> 31;
    }
    return static_cast<size_t>(hash);
  }
};

}  // namespace

struct GemmPlan {
  cublasLtMatmulHeuristicResult_t chosen = {};
};

namespace {

// Of the problem's matrices; destroyed with the scope.
class Layouts {
 public:
  explicit Layouts(const GemmArgs& args) : args_(args) {
    try {
      create(&a_, args.a, args.m);
      create(&b_, args.b, args.n);
      create(&out_, args.out_element, args.n, args.m, args.out_stride);
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~Layouts() { destroy(); }
  Layouts(const Layouts&) = delete;
  Layouts& operator=(const Layouts&) = delete;

  cublasLtMatrixLayout_t a() const { return a_; }
  cublasLtMatrixLayout_t b() const { return b_; }
  cublasLtMatrixLayout_t out() const { return out_; }

 private:
  void create(cublasLtMatrixLayout_t* layout, const GemmOperand& o, int64_t rows) {
    const int64_t fastest = o.transposed ? rows : args_.k, slowest = o.transposed ? args_.k : rows;
    create(layout, o.element, fastest, slowest, o.stride);
  }
  void create(cublasLtMatrixLayout_t* layout, GemmElement element, int64_t fastest, int64_t slowest,
              int64_t stride) {
    check(cublaslt().layout_create(layout, data_type(element), fastest, slowest, stride),
          "MatrixLayoutCreate", args_);
  }
  void destroy() {
    for (cublasLtMatrixLayout_t layout : {a_, b_, out_}) {
      if (layout) cublaslt().layout_destroy(layout);
    }
  }

  const GemmArgs& args_;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, out_ = nullptr;
};

class Preference {
 public:
  explicit Preference(const GemmArgs& args) : args_(args) {
    check(cublaslt().preference_create(&preference_), "MatmulPreferenceCreate", args);
  }
  ~Preference() { cublaslt().preference_destroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;

  template <typename T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    check(cublaslt().preference_set(preference_, attribute, &value, sizeof value),
          "MatmulPreferenceSetAttribute", args_);
  }
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  const GemmArgs& args_;
  cublasLtMatmulPreference_t preference_ = nullptr;
};

std::shared_ptr<const GemmPlan> choose(const GemmArgs& args, cublasLtHandle_t handle) {
  const CublasLt& lt = cublaslt();
  auto plan = std::make_shared<GemmPlan>();
  const Layouts layouts(args);
  const MatmulDesc desc(args);
  Preference preference(args);
  preference.set<uint64_t>(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMaxWorkspace);
  preference.set<uint32_t>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(args.b.data));
  preference.set<uint32_t>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(args.a.data));
  preference.set<uint32_t>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(args.out));
  preference.set<uint32_t>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(args.out));
  int found = 0;
  const cublasStatus_t status =
      lt.get_heuristic(handle, desc.get(), layouts.b(), layouts.a(), layouts.out(), layouts.out(),
                       preference.get(), 1, &plan->chosen, &found);
  check(status == CUBLAS_STATUS_SUCCESS && found == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status,
        "MatmulAlgoGetHeuristic", args);
  check(plan->chosen.state, "MatmulAlgoGetHeuristic", args);
  return plan;
}

}  // namespace

std::shared_ptr<const GemmPlan> plan_gemm(const GemmArgs& real, bool exact) {
  const GemmArgs args = asked_for(real, exact);
  static std::mutex mutex;
  // Never destroyed: at exit the library may have gone first.
  static auto& plans = *new std::unordered_map<Key, std::shared_ptr<const GemmPlan>, HashOfKey>;
  const Key key = key_of(args);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = plans.find(key);
    if (found != plans.end()) return found->second;
  }
  auto plan = choose(args, device_state(args).handle);
  const std::lock_guard<std::mutex> lock(mutex);
  if (plans.size() >= kMaxPlans) plans.clear();
  // Where two threads asked at once, both use the first answer, so that their results are equal.
  return plans.emplace(key, std::move(plan)).first->second;
}

size_t workspace_bytes(const GemmPlan& plan) { return plan.chosen.workspaceSize; }

bool run_gemm(const GemmArgs& args, const GemmPlan& plan, bool exact, void* workspace,
              cudaStream_t stream) {
  const DeviceState state = device_state(args);
  const MatmulDesc desc(args);
  const Layouts layouts(args);
  const float zero = 0.0f, one = 1.0f;
  const void* alpha = args.alpha ? args.alpha : &one;
  const void* beta = args.accumulate ? &one : &zero;
  if (args.alpha) beta = state.constants + (args.accumulate ? 1 : 0);
  const cublasStatus_t status =
      cublaslt().matmul(state.handle, desc.get(), alpha, args.b.data, layouts.b(), args.a.data,
                        layouts.a(), beta, args.out, layouts.out(), args.out, layouts.out(),
                        &plan.chosen.algo, workspace, plan.chosen.workspaceSize, stream);
  const bool refuses_size =
      status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
  if (refuses_size && !exact) return false;
  check(status, "cublasLtMatmul", args);
  return true;
}

}  // namespace dfg

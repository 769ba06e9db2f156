// Operator registration through the LibTorch stable ABI, and its checks of metadata: flash_kda/interface.py comes here
// without any of its own, since Python asks a tensor ten times slower. What is refused here, flash_kda/checks.py words
// for people, so what that refuses of CUDA tensors must be refused here too.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "kda/fwd.h"

#define FLASH_KDA_STRINGIFY_(...) #__VA_ARGS__
#define FLASH_KDA_STRINGIFY(...) FLASH_KDA_STRINGIFY_(__VA_ARGS__)

// Read with ctypes by flash_kda/_library.py, without a GPU and before any operator is called.
extern "C" __attribute__((visibility("default"))) const char* flash_kda_cuda_archs() {
  return FLASH_KDA_STRINGIFY(FLASH_KDA_CUDA_ARCHS_BUILT);
}
extern "C" __attribute__((visibility("default"))) const char* flash_kda_version() {
  return FLASH_KDA_STRINGIFY(FLASH_KDA_VERSION);
}

namespace flash_kda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kMaxTokens = INT32_MAX - 16;  // chunk arithmetic inside a sequence is 32-bit; addresses are 64-bit

constexpr int64_t kMinSegment = kMinSegmentChunks * kChunk;

// The C shim's CUDA functions are absent from CPU builds of torch. Looking this one up at call time, not link time,
// lets one wheel import everywhere (libtorch_cuda is not always in the global symbol scope, hence the second look).
cudaStream_t current_stream(int32_t device) {
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    const char* name = "aoti_torch_get_current_cuda_stream";
    void* symbol = dlsym(RTLD_DEFAULT, name);
    if (symbol == nullptr) {
      if (void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD)) symbol = dlsym(library, name);
    }
    return reinterpret_cast<GetStream>(symbol);
  }();
  STD_TORCH_CHECK(get_stream != nullptr, "flash_kda: this torch has no CUDA support (",
                  "aoti_torch_get_current_cuda_stream", " not found); install a CUDA build of torch");
  void* stream = nullptr;
  STD_TORCH_CHECK(get_stream(device, &stream) == AOTI_TORCH_SUCCESS, "flash_kda: no current CUDA stream for device ",
                  device);
  return static_cast<cudaStream_t>(stream);
}

void check_aligned(const char* name, const Tensor& t, int64_t inner_dim) {
  STD_TORCH_CHECK(t.stride(inner_dim) == 1 || t.size(inner_dim) == 1, "flash_kda.fwd: ", name,
                  " must be contiguous in its last dimension, got stride ", t.stride(inner_dim));
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, "flash_kda.fwd: ", name,
                  " must start at a 16-byte aligned address");
  for (int64_t d = 0; d < inner_dim; ++d)
    STD_TORCH_CHECK(t.size(d) == 1 || t.stride(d) % 8 == 0, "flash_kda.fwd: ", name,
                    " needs strides that are multiples of 8 elements, got ", t.stride(d), " in dimension ", d);
}

void check_tensor(const char* name, const Tensor& t, ScalarType dtype, int32_t device) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, "flash_kda.fwd: ", name, " has the wrong dtype");
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, "flash_kda.fwd: ", name,
                  " must be on the CUDA device of q");
}

// [B, T, heads, 128] bf16
void check_activation(const char* name, const Tensor& t, int64_t batch, int64_t tokens, int64_t heads, int32_t device) {
  check_tensor(name, t, ScalarType::BFloat16, device);
  STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == batch && t.size(1) == tokens && t.size(2) == heads && t.size(3) == kDim,
                  "flash_kda.fwd: ", name, " must have shape [", batch, ", ", tokens, ", ", heads, ", ", kDim, "]");
  if (t.numel() > 0) check_aligned(name, t, 3);
}

void check_state(const char* name, const Tensor& t, int64_t sequences, int64_t heads, int32_t device) {
  const bool bf16 = t.scalar_type() == ScalarType::BFloat16;
  check_tensor(name, t, bf16 ? ScalarType::BFloat16 : ScalarType::Float, device);
  STD_TORCH_CHECK(
      t.dim() == 4 && t.size(0) == sequences && t.size(1) == heads && t.size(2) == kDim && t.size(3) == kDim,
      "flash_kda.fwd: ", name, " must have shape [", sequences, ", ", heads, ", ", kDim, ", ", kDim, "]");
  STD_TORCH_CHECK(t.is_contiguous(), "flash_kda.fwd: ", name, " must be contiguous");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, "flash_kda.fwd: ", name,
                  " must be 16-byte aligned");
}

// fp32, contiguous: `heads` entries, or, of `per_head`, as a vector or a row for each head; null when absent (the
// kernel then reads zeros).
const float* head_parameter(const char* name, const OptionalTensor& t, int64_t heads, int64_t per_head,
                            int32_t device) {
  if (!t.has_value()) return nullptr;
  check_tensor(name, *t, ScalarType::Float, device);
  STD_TORCH_CHECK(t->numel() == heads * per_head && t->is_contiguous(), "flash_kda.fwd: ", name,
                  " must be contiguous with ", heads * per_head, " elements");
  STD_TORCH_CHECK(t->dim() == 1 || (t->dim() == 2 && per_head > 1 && t->size(0) == heads), "flash_kda.fwd: ", name,
                  " must be a vector, or a row for each head");
  return static_cast<const float*>(t->data_ptr());
}

// A tensor and its bytes [start, stop).
struct Placed {
  const char* name;
  const Tensor* tensor;
  int64_t start, stop;
};

int64_t element_size(const Tensor& t) {
  const ScalarType type = t.scalar_type();
  return type == ScalarType::BFloat16 ? 2 : type == ScalarType::Long ? 8 : 4;
}

// Bytes from the first to past the last element over the dimensions `first` and later.
int64_t extent(const Tensor& t, int64_t first) {
  const int64_t element = element_size(t);
  int64_t bytes = element;
  for (int64_t d = first; d < t.dim(); ++d) {
    if (t.size(d) == 0) return 0;
    bytes += (t.size(d) - 1) * t.stride(d) * element;
  }
  return bytes;
}

// Cut from one buffer, out and q interleave: their byte ranges cross while no byte is shared. All strides of the first
// `level` dimensions are multiples of `period`, so it is enough that the inner blocks are apart modulo the period.
bool disjoint_at(const Placed& a, const Placed& b, int64_t level) {
  int64_t period = 0;
  for (const Tensor* t : {a.tensor, b.tensor})
    for (int64_t d = 0; d < level; ++d)
      if (t->size(d) > 1) period = std::gcd(period, t->stride(d) * element_size(*t));
  if (period == 0) return false;
  const int64_t apart = ((b.start - a.start) % period + period) % period;
  return apart >= extent(*a.tensor, level) && apart + extent(*b.tensor, level) <= period;
}

bool share_bytes(const Placed& a, const Placed& b) {
  if (a.start >= b.stop || b.start >= a.stop) return false;  // nearly always
  const int64_t levels = std::min(a.tensor->dim(), b.tensor->dim());
  for (int64_t level = 1; level < levels; ++level)
    if (disjoint_at(a, b, level)) return false;
  return true;
}

// Whether two indices may reach one element: an expanded or a sliding-window view.
bool overlaps_itself(const Tensor& t) {
  std::array<std::pair<int64_t, int64_t>, 4> dims;  // stride, size
  for (int64_t d = 0; d < 4; ++d) dims[d] = {t.size(d) > 1 ? t.stride(d) : 0, t.size(d)};
  std::sort(dims.begin(), dims.end());
  int64_t reach = 1;
  for (const auto& [stride, size] : dims) {
    if (size <= 1) continue;
    if (stride < reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

// What is written shares no byte with anything else; final_state may be initial_state itself, whose rows are read
// before the same rows are written.
void check_memory(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                  const Tensor& out, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                  const OptionalTensor& initial_state, const OptionalTensor& final_state,
                  const OptionalTensor& cu_seqlens) {
  STD_TORCH_CHECK(out.is_contiguous() || !overlaps_itself(out), "flash_kda.fwd: out reaches one element twice");
  std::array<Placed, 11> placed;
  int count = 0;
  const auto place = [&](const char* name, const Tensor* t) {
    if (t == nullptr || t->numel() == 0) return;
    const int64_t start = reinterpret_cast<intptr_t>(t->data_ptr());
    placed[count++] = {name, t, start, start + extent(*t, 0)};
  };
  const auto given = [](const OptionalTensor& t) { return t.has_value() ? &*t : nullptr; };
  const bool in_place = initial_state.has_value() && final_state.has_value() &&
                        initial_state->data_ptr() == final_state->data_ptr() &&
                        initial_state->scalar_type() == final_state->scalar_type();
  place("out", &out);
  place("final_state", given(final_state));
  const int written = count;
  place("q", &q);
  place("k", &k);
  place("v", &v);
  place("g", &g);
  place("beta", &beta);
  place("A_log", given(a_log));
  place("dt_bias", given(dt_bias));
  place("cu_seqlens", given(cu_seqlens));
  if (!in_place) place("initial_state", given(initial_state));
  for (int w = 0; w < written; ++w)
    for (int other = w + 1; other < count; ++other)
      STD_TORCH_CHECK(!share_bytes(placed[w], placed[other]), "flash_kda.fwd: ", placed[w].name, " and ",
                      placed[other].name, " use the same memory");
}

Strides strides(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

void set_sequences(FwdParams& p, const OptionalTensor& cu_seqlens, int64_t batch, int32_t device) {
  p.cu_seqlens = nullptr;
  p.cu_is_int64 = false;
  p.num_sequences = batch;
  if (!cu_seqlens.has_value()) return;
  const Tensor& cu = *cu_seqlens;
  p.cu_is_int64 = cu.scalar_type() == ScalarType::Long;
  check_tensor("cu_seqlens", cu, p.cu_is_int64 ? ScalarType::Long : ScalarType::Int, device);
  STD_TORCH_CHECK(cu.dim() == 1 && cu.size(0) >= 2 && cu.is_contiguous(),
                  "flash_kda.fwd: cu_seqlens must be [N + 1], of one sequence or more, and contiguous");
  STD_TORCH_CHECK(batch == 1, "flash_kda.fwd: cu_seqlens needs B = 1, got ", batch);
  p.cu_seqlens = cu.data_ptr();
  p.num_sequences = cu.size(0) - 1;
}

void fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, double scale, Tensor out, OptionalTensor a_log,
         OptionalTensor dt_bias, double lower_bound, OptionalTensor initial_state, OptionalTensor final_state,
         OptionalTensor cu_seqlens, int64_t segment_tokens) {
  STD_TORCH_CHECK(q.is_cuda() && q.dim() == 4 && v.dim() == 4 && beta.dim() == 3,
                  "flash_kda.fwd: q and v must be CUDA tensors of rank 4, beta of rank 3");
  const int32_t device = q.get_device_index();
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), heads_v = v.size(2);
  STD_TORCH_CHECK(heads > 0 && heads_v % heads == 0, "flash_kda.fwd: value heads (", heads_v,
                  ") must be a multiple of q/k heads (", heads, ")");
  STD_TORCH_CHECK(tokens <= kMaxTokens && heads_v <= INT32_MAX, "flash_kda.fwd: too many tokens or heads");
  STD_TORCH_CHECK(lower_bound >= -5.0 && lower_bound < 0.0, "flash_kda.fwd: lower_bound must be in [-5, 0), got ",
                  lower_bound);
  check_activation("q", q, batch, tokens, heads, device);
  check_activation("k", k, batch, tokens, heads, device);
  check_activation("v", v, batch, tokens, heads_v, device);
  check_activation("g", g, batch, tokens, heads_v, device);
  check_activation("out", out, batch, tokens, heads_v, device);
  check_tensor("beta", beta, ScalarType::BFloat16, device);
  STD_TORCH_CHECK(beta.size(0) == batch && beta.size(1) == tokens && beta.size(2) == heads_v,
                  "flash_kda.fwd: beta must have shape [", batch, ", ", tokens, ", ", heads_v, "]");
  STD_TORCH_CHECK(beta.stride(2) == 1 || heads_v == 1 || beta.numel() == 0,
                  "flash_kda.fwd: beta must be contiguous in its last dimension");

  STD_TORCH_CHECK(segment_tokens == -1 || segment_tokens == 0 ||
                      (segment_tokens >= kMinSegment && segment_tokens <= kMaxTokens && segment_tokens % kChunk == 0),
                  "flash_kda.fwd: segment_tokens must be a multiple of ", kChunk, " from ", kMinSegment,
                  " on, 0 for no segments or -1 for a choice, got ", segment_tokens);
  const int segment_chunks = segment_tokens < 0 ? -1 : static_cast<int>(segment_tokens / kChunk);

  FwdParams p{};
  p.q = q.data_ptr();
  p.k = k.data_ptr();
  p.v = v.data_ptr();
  p.g = g.data_ptr();
  p.beta = beta.data_ptr();
  p.out = out.data_ptr();
  p.q_stride = strides(q);
  p.k_stride = strides(k);
  p.v_stride = strides(v);
  p.g_stride = strides(g);
  p.beta_stride = strides(beta);
  p.out_stride = strides(out);
  p.a_log = head_parameter("A_log", a_log, heads_v, 1, device);
  p.dt_bias = head_parameter("dt_bias", dt_bias, heads_v, kDim, device);
  set_sequences(p, cu_seqlens, batch, device);
  if (initial_state.has_value()) {
    check_state("initial_state", *initial_state, p.num_sequences, heads_v, device);
    p.initial_state = initial_state->data_ptr();
    p.initial_is_bf16 = initial_state->scalar_type() == ScalarType::BFloat16;
  }
  if (final_state.has_value()) {
    check_state("final_state", *final_state, p.num_sequences, heads_v, device);
    p.final_state = final_state->data_ptr();
    p.final_is_bf16 = final_state->scalar_type() == ScalarType::BFloat16;
  }
  check_memory(q, k, v, g, beta, out, a_log, dt_bias, initial_state, final_state, cu_seqlens);
  STD_TORCH_CHECK(p.num_sequences * heads_v <= INT32_MAX, "flash_kda.fwd: more than 2^31 - 1 (sequence, head) pairs");
  p.batch = batch;
  p.seqlen = tokens;
  p.heads_v = static_cast<int>(heads_v);
  p.heads_per_group = static_cast<int>(heads_v / heads);
  p.scale = static_cast<float>(scale);
  p.lower_bound = static_cast<float>(lower_bound);

  torch::stable::accelerator::DeviceGuard guard(device);
  int sms = 0;
  STD_TORCH_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) == cudaSuccess,
                  "flash_kda.fwd: no device attributes for device ", device);
  p.plan = plan_fwd({p.num_sequences, batch * tokens, p.heads_v, p.cu_seqlens != nullptr, segment_chunks, sms});
  OptionalTensor states, order;
  if (p.plan.segment_chunks > 0) {
    states = torch::stable::new_empty(q, {2, p.plan.max_segments, heads_v, kDim, kDim}, ScalarType::Float);
    p.transitions = static_cast<float*>(states->data_ptr());
    p.offsets = p.transitions + p.plan.max_segments * heads_v * kDim * kDim;
  }
  if (p.plan.ordered) {
    order = torch::stable::new_empty(q, {p.num_sequences + 1}, ScalarType::Int);
    p.order = static_cast<int32_t*>(order->data_ptr());
    p.ticket = reinterpret_cast<unsigned*>(p.order + p.num_sequences);
  }
  const cudaError_t error = launch_fwd(p, sms, current_stream(device));
  STD_TORCH_CHECK(error == cudaSuccess, "flash_kda.fwd: launch failed: ", cudaGetErrorString(error));
}

}  // namespace

// A fragment, not STABLE_TORCH_LIBRARY: where another library has opened the namespace, a second definition of it
// throws while this library is being loaded, which ends the process.
STABLE_TORCH_LIBRARY_FRAGMENT(flash_kda, m) {
  // The same string is in flash_kda/_ops.py for installs without this library; a test compares them.
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, Tensor? A_log, "
      "Tensor? dt_bias, float lower_bound, Tensor? initial_state, Tensor(b!)? final_state, Tensor? cu_seqlens, "
      "int segment_tokens=-1) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_kda, CUDA, m) { m.impl("fwd", TORCH_BOX(&fwd)); }

}  // namespace flash_kda

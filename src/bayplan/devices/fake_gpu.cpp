// A CUDA GPU for fake tensors, in any build of torch and without a GPU: what torch asks a GPU for while
// it decides which operators run. No kernel runs and no memory is taken.
//
// NOTE [ What is exchanged ]
// While a GPU is in force (`bayplan_gpu_exchange`), three things of torch are ours, and exactly what was
// there before comes back afterwards. All of it works at any time, also when torch
// has long asked for its hooks, and in builds with and without CUDA.
// 1. The device guard of CUDA in c10's table of atomic pointers: autograd's engine asks it for streams.
//    In builds without CUDA, where there is none, ours stays and knows no device.
// 2. The table of virtual functions of torch's CUDA hooks. Hooks have no data of their own that the
//    functions below would read, so the object itself can stay.
// 3. Dispatch stubs that only the CUDA library fills: the choice of an attention kernel, and cuDNN's
//    recurrent layers.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/RNN.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cmath>
#include <cstring>

namespace {

using at::Tensor;
using at::TensorList;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using sdp::sdp_params;
using sdp::SDPBackend;

const Device first(DeviceType::CUDA, 0);

// What torch 2.13's own wheels for CUDA 13.0 are built with.
constexpr long cudnn_version = BAYPLAN_CUDNN;

// The GPU in force: its compute capability times ten, and whether it is NVIDIA's; 0 if there is none.
int capability = 0;
bool has_cudnn_attention = true;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return first; }
  Device getDevice() const override { return first; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, first); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, first); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, first); }
  DeviceIndex deviceCount() const noexcept override { return capability == 0 ? 0 : 1; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasMAGMA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool hasCuSOLVER() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return capability >= 80; }
  bool supportsBFloat16RNNWithCuDNN() const override { return capability >= 80; }
  long versionCuDNN() const override { return cudnn_version; }
  long versionRuntimeCuDNN() const override { return cudnn_version; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

// ---- attention: the rules of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Those that hold for
// all devices are torch's own, from its header sdp_utils_cpp.h.

bool is_between(int low, int high) { return low <= capability && capability <= high; }

bool is_low_precision(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

bool has_dtype(const sdp_params& given, std::initializer_list<at::ScalarType> allowed) {
  const auto type = given.query.scalar_type();
  const bool is_same = type == given.key.scalar_type() && type == given.value.scalar_type();
  return is_same && std::find(allowed.begin(), allowed.end(), type) != allowed.end();
}

bool has_low_precision(const sdp_params& given) {
  if (capability >= 80) return has_dtype(given, {at::kHalf, at::kBFloat16});
  return has_dtype(given, {at::kHalf});
}

int64_t head_of(const Tensor& tensor) { return tensor.size(-1); }

bool flash_can(const sdp_params& given) {
  const auto head = head_of(given.query);
  if (!sdp::check_runtime_disabled_flash(given, false) || !sdp::check_tensor_shapes(given, false) ||
      !sdp::check_for_attn_mask(given, false))
    return false;
  if (head != head_of(given.key) || head != head_of(given.value) || head > 256) return false;
  if (!is_between(80, 121)) return false;
  const bool has_small_memory = is_between(86, 89) || is_between(120, 121);
  if (sdp::input_requires_grad(given) && has_small_memory &&
      !(head <= 192 || (given.dropout == 0.0 && head > 224)))
    return false;
  const bool is_nested = sdp::has_for_nested_inputs(given);
  if (given.is_causal && !given.query.is_nested() && !given.key.is_nested() &&
      given.query.size(-2) != given.key.size(-2))
    return false;
  if (!has_low_precision(given)) return false;
  if (is_nested &&
      !(sdp::check_batch_size_nested(given, false) && head % 8 == 0 &&
        sdp::check_for_seq_len_0_nested_tensor(given, false)))
    return false;
  return !sdp::has_only_dense_inputs(given) ||
      (sdp::check_batch_size_and_num_heads_dense<true>(given, false) &&
       sdp::check_nonzero_sequence_lengths_dense(given, false) &&
       sdp::check_last_dim_stride_equals_1_dense<true>(given, false));
}

// What the elements of a row must divide by, for CUTLASS.
int64_t row_alignment(const sdp_params& given) {
  const bool is_half = is_low_precision(given.query);
  const bool has_tensor_cores = capability >= 80 || (capability >= 70 && is_half);
  const int64_t least = capability >= 80 ? 4 : 1;
  return has_tensor_cores ? std::max<int64_t>(least, is_half ? 8 : 4) : least;
}

// Whether rows begin where CUTLASS can load them: by their offsets, since memory itself is aligned.
bool begins_aligned(const sdp_params& given) {
  if (capability < 80 || !sdp::has_only_dense_inputs(given)) return true;
  const auto unit = row_alignment(given) * static_cast<int64_t>(given.query.element_size());
  const auto is_aligned = [unit](const Tensor& tensor) {
    const auto offset = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
    return tensor.numel() == 0 || offset % unit == 0;
  };
  return is_aligned(given.query) && is_aligned(given.key) && is_aligned(given.value);
}

bool efficient_can(const sdp_params& given) {
  if (!sdp::check_runtime_disabled_mem_efficient(given, false) || !is_between(50, 121) ||
      !sdp::check_tensor_shapes(given, false))
    return false;
  if (!begins_aligned(given)) return false;
  const auto alignment = row_alignment(given);
  const auto head = head_of(given.query), head_of_value = head_of(given.value);
  if (head != head_of(given.key) || head % alignment != 0 || head == 0 ||
      head_of_value % alignment != 0 || head_of_value == 0)
    return false;
  if (sdp::has_for_nested_inputs(given) &&
      !(sdp::check_requires_grad_and_nested(given, false) &&
        sdp::check_batch_size_nested(given, false) &&
        sdp::check_for_seq_len_0_nested_tensor(given, false)))
    return false;
  if (sdp::has_only_dense_inputs(given) &&
      !(sdp::check_nonzero_sequence_lengths_dense(given, false) &&
        sdp::check_last_dim_stride_equals_1_dense<false>(given, false) &&
        sdp::check_batch_size_and_num_heads_dense<false>(given, false)))
    return false;
  if (capability >= 80) return has_dtype(given, {at::kHalf, at::kFloat, at::kBFloat16});
  return has_dtype(given, {at::kHalf, at::kFloat});
}

bool cudnn_can(const sdp_params& given) {
  const auto& context = at::globalContext();
  if (!has_cudnn_attention || !context.userEnabledCuDNNSDP()) return false;
  if (sdp::has_for_nested_inputs(given) || !sdp::check_tensor_shapes(given, false)) return false;
  if (context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly()) return false;
  if (!has_low_precision(given) || !sdp::check_attn_mask_shape(given, false)) return false;
  if (!is_between(80, 121)) return false;
  if (given.dropout * 16.0 != std::floor(given.dropout * 16.0)) return false;
  if (!sdp::check_nonzero_sequence_lengths_dense(given, false) ||
      !sdp::check_last_dim_stride_equals_1_dense<true>(given, false) ||
      !sdp::check_batch_size_and_num_heads_dense<true, false>(given, false))
    return false;
  constexpr int64_t most_rows = 65535;
  if (given.query.size(0) > most_rows || given.query.size(1) > most_rows) return false;
  const auto query = head_of(given.query), value = head_of(given.value);
  const bool is_uneven = capability / 10 == 10 && query == 192 && value == 128;
  const int64_t most = capability == 90 ? 256 : is_uneven ? 192 : 128;
  if (query > most || value > most || query % 8 != 0 || value % 8 != 0) return false;
  const auto length = given.query.size(2), other_length = given.key.size(2);
  return other_length != 1 && (given.dropout == 0.0 || length != 1);
}

// torch puts cuDNN first on Hopper and on Blackwell's large chips, unless somebody set an order.
std::vector<SDPBackend> order_of_attention() {
  const auto order = at::globalContext().sDPPriorityOrder();
  const std::vector<SDPBackend> plain = {
      SDPBackend::flash_attention, SDPBackend::efficient_attention, SDPBackend::math,
      SDPBackend::cudnn_attention, SDPBackend::overrideable};
  const bool is_default = std::equal(order.begin(), order.end(), plain.begin(), plain.end());
  const int major = capability / 10;
  if (is_default && has_cudnn_attention && (major == 9 || major == 10))
    return {SDPBackend::cudnn_attention, SDPBackend::flash_attention,
            SDPBackend::efficient_attention, SDPBackend::math};
  return {order.begin(), order.end()};
}

int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, double dropout, bool is_causal, std::optional<double>,
    bool enable_gqa) {
  const sdp_params given{query, key, value, mask, dropout, is_causal, enable_gqa};
  for (const auto kind : order_of_attention()) {
    const bool can = kind == SDPBackend::cudnn_attention   ? cudnn_can(given)
        : kind == SDPBackend::flash_attention              ? flash_can(given)
        : kind == SDPBackend::efficient_attention          ? efficient_can(given)
        : kind == SDPBackend::math ? at::globalContext().userEnabledMathSDP()
                                   : false;
    if (can) return static_cast<int64_t>(kind);
  }
  TORCH_CHECK(
      false, "No available kernel: on a GPU of compute capability ", capability / 10, ".",
      capability % 10, " none of the attention kernels that are enabled takes these tensors");
}

// ---- recurrent layers: cuDNN's operator, with the weights as they are

enum Mode { RELU, TANH, LSTM, GRU };

std::tuple<Tensor, Tensor, Tensor> recurrent(
    Mode mode, const Tensor& input, const Tensor& hidden, const std::optional<Tensor>& cell,
    TensorList weights, bool has_biases, int64_t num_layers, double dropout, bool train,
    bool is_bidirectional, bool batch_first, at::IntArrayRef batch_sizes) {
  auto values = input, states = hidden;
  auto cells = cell;
  auto parameters = weights.vec();
  if (at::autocast::is_autocast_enabled(at::kCUDA)) {  // as torch's rule for this operator does
    const auto cast = [](const Tensor& tensor) {
      return at::autocast::cached_cast(at::kHalf, tensor, DeviceType::CUDA);
    };
    values = cast(values);
    states = cast(states);
    if (cells) cells = cast(*cells);
    for (auto& weight : parameters) weight = cast(weight);
  }
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::Autocast);
  const int64_t size = cells ? cells->size(2) : states.size(2);
  const int64_t projected = cells && states.size(2) != size ? states.size(2) : 0;
  std::optional<Tensor> random;
  if (train && dropout > 0) random = at::empty({0}, values.options().dtype(at::kByte));
  // On a GPU, all weights are views of one buffer, which is a name for memory that is there already.
  const auto buffer = at::empty({0}, parameters[0].options());
  auto [output, last, last_cell, reserve, kept] = at::_cudnn_rnn(
      values, parameters, has_biases ? 4 : 2, buffer, states, cells, mode, size, projected,
      num_layers, batch_first, dropout, train, is_bidirectional, batch_sizes, random);
  return {output, last, last_cell};
}

void lstm(
    Tensor& output, Tensor& last, Tensor& last_cell, const Tensor& input, TensorList hidden,
    TensorList weights, bool has_biases, int64_t num_layers, double dropout, bool train,
    bool is_bidirectional, bool batch_first) {
  std::tie(output, last, last_cell) = recurrent(
      LSTM, input, hidden[0], hidden[1], weights, has_biases, num_layers, dropout, train,
      is_bidirectional, batch_first, {});
}

std::vector<int64_t> sizes_in(const Tensor& batch_sizes) {
  const auto plain = batch_sizes.to(at::kCPU).contiguous();
  return {plain.const_data_ptr<int64_t>(), plain.const_data_ptr<int64_t>() + plain.numel()};
}

void lstm_packed(
    Tensor& output, Tensor& last, Tensor& last_cell, const Tensor& input,
    const Tensor& batch_sizes, TensorList hidden, TensorList weights, bool has_biases,
    int64_t num_layers, double dropout, bool train, bool is_bidirectional) {
  std::tie(output, last, last_cell) = recurrent(
      LSTM, input, hidden[0], hidden[1], weights, has_biases, num_layers, dropout, train,
      is_bidirectional, false, sizes_in(batch_sizes));
}

template <Mode mode>
void rnn(
    Tensor& output, Tensor& last, const Tensor& input, const Tensor& hidden, TensorList weights,
    bool has_biases, int64_t num_layers, double dropout, bool train, bool is_bidirectional,
    bool batch_first) {
  std::tie(output, last, std::ignore) = recurrent(
      mode, input, hidden, std::nullopt, weights, has_biases, num_layers, dropout, train,
      is_bidirectional, batch_first, {});
}

template <Mode mode>
void rnn_packed(
    Tensor& output, Tensor& last, const Tensor& input, const Tensor& batch_sizes,
    const Tensor& hidden, TensorList weights, bool has_biases, int64_t num_layers, double dropout,
    bool train, bool is_bidirectional) {
  std::tie(output, last, std::ignore) = recurrent(
      mode, input, hidden, std::nullopt, weights, has_biases, num_layers, dropout, train,
      is_bidirectional, false, sizes_in(batch_sizes));
}

// ---- the exchange

struct Stub {
  void** place;
  void* ours;
  void* before = nullptr;
};

template <typename Any, typename Function>
Stub stub(Any& of, Function function) {
  static_assert(sizeof(Any) == sizeof(at::native::DispatchStubImpl), "a stub has no other data");
  auto& inner = reinterpret_cast<at::native::DispatchStubImpl&>(of);
  return {&inner.cuda_dispatch_ptr, reinterpret_cast<void*>(function)};
}

std::vector<Stub>& stubs() {
  namespace native = at::native;
  static std::vector<Stub> all = {
      stub(native::_fused_sdp_choice_stub, &choose_attention),
      stub(native::lstm_cudnn_stub, &lstm),
      stub(native::lstm_packed_cudnn_stub, &lstm_packed),
      stub(native::gru_cudnn_stub, &rnn<GRU>),
      stub(native::gru_packed_cudnn_stub, &rnn_packed<GRU>),
      stub(native::rnn_tanh_cudnn_stub, &rnn<TANH>),
      stub(native::rnn_tanh_packed_cudnn_stub, &rnn_packed<TANH>),
      stub(native::rnn_relu_cudnn_stub, &rnn<RELU>),
      stub(native::rnn_relu_packed_cudnn_stub, &rnn_packed<RELU>),
  };
  return all;
}

void* table_of(const void* object) {
  void* table;
  std::memcpy(&table, object, sizeof(table));
  return table;
}

void set_table(const at::CUDAHooksInterface& hooks, void* table) {
  std::memcpy(const_cast<at::CUDAHooksInterface*>(&hooks), &table, sizeof(table));
}

const c10::impl::DeviceGuardImplInterface* guard_before = nullptr;
void* table_before = nullptr;

}  // namespace

// Puts a GPU in force; 0 takes it away. Returns what was in force before, to be given back.
extern "C" int bayplan_gpu_exchange(int asked) {
  static const Guard guard;
  static const Hooks ours;
  const int before = has_cudnn_attention ? capability : -capability;
  const auto place = static_cast<size_t>(DeviceType::CUDA);
  const auto& hooks = at::detail::getCUDAHooks();
  if (before == 0 && asked != 0) {
    guard_before = c10::impl::device_guard_impl_registry[place].exchange(&guard);
    table_before = table_of(&hooks);
    for (auto& each : stubs()) {
      each.before = *each.place;
      *each.place = each.ours;
    }
    set_table(hooks, table_of(&ours));
  }
  if (before != 0 && asked == 0) {
    set_table(hooks, table_before);
    for (auto& each : stubs()) *each.place = each.before;
    // Fake tensors may be alive, and torch aborts where autograd asks a guard that is not there.
    if (guard_before != nullptr) c10::impl::device_guard_impl_registry[place].store(guard_before);
  }
  capability = std::abs(asked);
  has_cudnn_attention = asked >= 0;
  return before;
}

// A device for tests without a GPU: "acc", whose memory is the CPU's, kept apart as a GPU's is.
//
// Every operator runs on CPU tensors that alias the device's memory (`run_on_cpu`); one that mixes a device tensor with
// a CPU tensor of one or more dimensions is refused, as CUDA refuses it. Storages, views, generators, streams, events and
// the statistics of the allocator behave as those of a device. What crosses the border is counted: copies in both
// directions with their bytes, and synchronisations. Streams compute at once, so that races are not found.
//
// Built and registered by stand_in_device.py, after the documentation "Facilitating New Backend Integration by
// PrivateUse1" of PyTorch.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_conj_physical_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <unordered_map>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;
constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr int MOST = 16;

DeviceIndex devices = 4;
thread_local DeviceIndex current = 0;
thread_local c10::StreamId current_stream[MOST] = {};

struct Counts {
  std::atomic<int64_t> to_device{0}, to_device_bytes{0}, to_host{0}, to_host_bytes{0}, synchronisations{0};
} counts;

void count_to_host(int64_t nbytes) {
  counts.to_host += 1;
  counts.to_host_bytes += nbytes;
}

// Memory.

struct Memory final : c10::DeviceAllocator {
  std::mutex lock;
  std::unordered_map<void*, std::pair<size_t, DeviceIndex>> sizes;
  int64_t held[MOST] = {}, peak[MOST] = {};

  static void release(void* pointer);

  c10::DataPtr allocate(size_t nbytes) override {
    void* pointer = nbytes ? c10::alloc_cpu(nbytes) : nullptr;
    if (pointer) {
      std::lock_guard<std::mutex> guard(lock);
      sizes[pointer] = {nbytes, current};
      held[current] += nbytes;
      peak[current] = std::max(peak[current], held[current]);
    }
    return {pointer, pointer, &release, Device(DEVICE, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    for (auto* stats : {&found.allocated_bytes, &found.reserved_bytes}) {
      (*stats)[0].current = held[device];
      (*stats)[0].peak = peak[device];
    }
    return found;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { peak[device] = held[device]; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    size_t all = size_t(1) << 33;
    return {all - held[device], all};
  }
} memory;

void Memory::release(void* pointer) {
  if (!pointer) return;
  {
    std::lock_guard<std::mutex> guard(memory.lock);
    auto found = memory.sizes.find(pointer);
    memory.held[found->second.second] -= found->second.first;
    memory.sizes.erase(found);
  }
  c10::free_cpu(pointer);
}

REGISTER_ALLOCATOR(DEVICE, &memory)

// Random numbers: those that the CPU draws from the same seed.

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit DeviceGenerator(DeviceIndex device)
      : GeneratorImpl(Device(DEVICE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator(device().index());
    made->inner = inner.clone();
    return made;
  }
};

at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> all;
    for (int index = 0; index < MOST; ++index) all.push_back(at::make_generator<DeviceGenerator>(index));
    return all;
  }();
  return made[device < 0 ? current : device];
}

at::Generator& cpu_twin(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// Devices, streams, events.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(DEVICE, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < devices, "invalid device ordinal ", int(device.index()));
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, device, current_stream[device.index()]); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream getNewStream(Device device, int = 0) const override {
    static std::atomic<c10::StreamId> next{1};
    return Stream(Stream::UNSAFE, Device(DEVICE, device.index() < 0 ? current : device.index()), next++);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new std::chrono::steady_clock::time_point;
    *static_cast<std::chrono::steady_clock::time_point*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<std::chrono::steady_clock::time_point*>(event);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    using Point = std::chrono::steady_clock::time_point;
    return std::chrono::duration<double, std::milli>(*static_cast<Point*>(to) - *static_cast<Point*>(from)).count();
  }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { counts.synchronisations += 1; }
  void synchronizeEvent(void*) const override { counts.synchronisations += 1; }
  void synchronizeDevice(const DeviceIndex) const override { counts.synchronisations += 1; }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current : device);
  }
  Device getDeviceFromPtr(void* pointer) const override {
    std::lock_guard<std::mutex> guard(memory.lock);
    return Device(DEVICE, memory.sizes.at(pointer).second);
  }
  bool isPinnedPtr(const void* pointer) const override;
  c10::Allocator* getPinnedMemoryAllocator() const override;
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr made = memory.allocate(nbytes);
    if (made.get() && storage.data()) memcpy(made.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

// Pinned memory is known by its address.
struct Pinned final : c10::Allocator {
  std::mutex lock;
  std::unordered_map<const void*, size_t> sizes;
  static void release(void* pointer);
  c10::DataPtr allocate(size_t nbytes) override {
    void* pointer = c10::alloc_cpu(nbytes ? nbytes : 1);
    std::lock_guard<std::mutex> guard(lock);
    sizes[pointer] = nbytes;
    return {pointer, pointer, &release, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
} pinned;

void Pinned::release(void* pointer) {
  {
    std::lock_guard<std::mutex> guard(pinned.lock);
    pinned.sizes.erase(pointer);
  }
  c10::free_cpu(pointer);
}

bool Hooks::isPinnedPtr(const void* pointer) const {
  std::lock_guard<std::mutex> guard(pinned.lock);
  return pinned.sizes.count(pointer) > 0;
}
c10::Allocator* Hooks::getPinnedMemoryAllocator() const { return &pinned; }

// Tensors.

bool is_there(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == DEVICE; }

void nothing(void*) {}

// A CPU tensor over the memory of a device tensor.
at::Tensor alias_of(const at::Tensor& tensor) {
  const c10::Storage& own = tensor.storage();
  c10::DataPtr data(const_cast<void*>(own.data()), nullptr, &nothing, Device(c10::DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), own.nbytes(), std::move(data), c10::GetAllocator(c10::DeviceType::CPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor with_storage(c10::Storage storage, const at::Tensor& shape) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), shape.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  if (shape.is_conj()) made._set_conj(true);
  if (shape.is_neg()) made._set_neg(true);
  return made;
}

// A device tensor with the values of a new CPU tensor.
at::Tensor moved(const at::Tensor& tensor, Device home) {
  if (!tensor.defined()) return tensor;
  c10::DeviceGuard guard(home);
  size_t nbytes = tensor.storage().nbytes();
  c10::DataPtr data = memory.allocate(nbytes);
  if (nbytes) memcpy(data.get(), tensor.storage().data(), nbytes);
  return with_storage(c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), &memory, true), tensor);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& into, bool) {
  if (is_there(into) && !is_there(from)) {
    counts.to_device += 1;
    counts.to_device_bytes += into.nbytes();
  } else if (is_there(from) && !is_there(into)) {
    count_to_host(from.nbytes());
  }
  at::Tensor target = is_there(into) ? alias_of(into) : into;
  target.copy_(is_there(from) ? alias_of(from) : from);
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& into) {
  into.resize_(from.sizes());
  return copy_from(from, into, false);
}

at::Scalar item(const at::Tensor& tensor) {
  count_to_host(tensor.nbytes());
  counts.synchronisations += 1;
  return alias_of(tensor).item();
}

at::Tensor& set_storage(at::Tensor& into, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(into, std::move(storage), offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& into, at::Storage storage) {
  int64_t length = storage.nbytes() / into.itemsize();
  return at::native::set_storage_cpu_(into, std::move(storage), 0, length, {});
}

at::Tensor& set_nothing(at::Tensor& into) {
  c10::DeviceGuard guard(into.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true);
  return at::native::set_storage_cpu_(into, storage, 0, {0}, {});
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() == sizes) return tensor;
  impl->generic_set_sizes_contiguous(sizes);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  return tensor;
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto at_offset = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at_offset);
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

bool is_pinned(const at::Tensor& tensor, std::optional<Device>) {
  return at::detail::getPrivateUse1Hooks().isPinnedPtr(tensor.storage().data());
}

void record_stream(at::Tensor&, Stream) {}

int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // the formula, of single operators
}

// Layers with kernels of their own on a device, here from the operators of the CPU.

at::Tensor twin(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || is_there(tensor), "Expected all tensors to be on the same device, but found at least two devices, acc:0 and cpu!");
  return tensor.defined() ? alias_of(tensor) : tensor;
}

std::optional<at::Tensor> twin(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<at::Tensor>(twin(*tensor)) : std::nullopt;
}

using Ints = c10::SymIntArrayRef;

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, Ints stride, Ints padding,
                       Ints dilation, bool transposed, Ints output_padding, c10::SymInt groups) {
  return moved(at::convolution_symint(twin(input), twin(weight), twin(bias), stride, padding, dilation, transposed, output_padding, groups), input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, Ints stride,
                                                                    Ints padding, Ints dilation, bool transposed, Ints output_padding,
                                                                    c10::SymInt groups, std::array<bool, 3> mask) {
  at::OptionalSymIntArrayRef bias_size = std::nullopt;
  std::vector<c10::SymInt> size{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  if (mask[2]) bias_size = size;
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(twin(grad), twin(input), twin(weight), bias_size, stride, padding, dilation, transposed, output_padding, groups, mask);
  return {moved(of_input, input.device()), moved(of_weight, input.device()), moved(of_bias, input.device())};
}

at::Tensor plus(const at::Tensor& tensor, const std::optional<at::Tensor>& bias) { return bias ? tensor + *bias : tensor; }

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cx,
                                                         const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto gates = (plus(twin(hidden), twin(hidden_bias)) + plus(twin(input), twin(input_bias))).chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  auto cy = f * twin(cx) + i * g;
  auto home = input.device();
  return {moved(o * cy.tanh(), home), moved(cy, home), moved(at::cat({i, f, g, o}, 1), home)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy,
                                                                  const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  auto parts = twin(workspace).chunk(4, 1);
  auto i = parts[0], f = parts[1], g = parts[2], o = parts[3], t = twin(cy).tanh();
  auto hy = twin(grad_hy).value_or(at::zeros_like(t)), gcy = twin(grad_cy).value_or(at::zeros_like(t));
  auto c = gcy + hy * o * (1 - t * t);
  auto gates = at::cat({c * g * i * (1 - i), c * twin(cx) * f * (1 - f), c * i * (1 - g * g), hy * t * o * (1 - o)}, 1);
  auto home = cx.device();
  return {moved(gates, home), moved(c * f, home), has_bias ? moved(gates.sum(0), home) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& hx,
                                            const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto in = plus(twin(input), twin(input_bias)).chunk(3, 1), hid = plus(twin(hidden), twin(hidden_bias)).chunk(3, 1);
  auto r = (hid[0] + in[0]).sigmoid(), z = (hid[1] + in[1]).sigmoid(), n = (in[2] + hid[2] * r).tanh();
  auto home = input.device();
  return {moved((twin(hx) - n) * z + n, home), moved(at::cat({r, z, n, twin(hx), hid[2]}, 1), home)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad, const at::Tensor& workspace, bool has_bias) {
  auto parts = twin(workspace).chunk(5, 1);
  auto r = parts[0], z = parts[1], n = parts[2], hx = parts[3], h = parts[4], g = twin(grad);
  auto of_n = g * (1 - z) * (1 - n * n), of_z = g * (hx - n) * z * (1 - z), of_r = of_n * h * r * (1 - r);
  auto in = at::cat({of_r, of_z, of_n}, 1), hid = at::cat({of_r, of_z, of_n * r}, 1);
  auto home = grad.device();
  return {moved(in, home), moved(hid, home), moved(g * z, home), has_bias ? moved(in.sum(0), home) : at::Tensor(), has_bias ? moved(hid.sum(0), home) : at::Tensor()};
}

// Every other operator.

// CUDA takes CPU indices for a tensor of its own.
bool takes_cpu_tensors(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::index_put";
}

void run_on_cpu(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema();
  const size_t given = schema.arguments().size();
  const size_t first = stack->size() - given;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // tensor, alias
  std::optional<Device> device;
  std::optional<at::Tensor> stranger;
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  auto on_cpu = [&](const at::Tensor& tensor) {
    if (!is_there(tensor)) {
      if (tensor.defined() && tensor.dim() > 0 && tensor.device().is_cpu()) stranger = tensor;
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", tensor.device(), "! (", schema.name(), ")");
    device = tensor.device();
    for (auto& pair : pairs)
      if (pair.first.is_same(tensor)) return pair.second;
    pairs.emplace_back(tensor, alias_of(tensor));
    return pairs.back().second;
  };
  for (size_t index = 0; index < given; ++index) {
    IValue& value = (*stack)[first + index];
    if (value.isTensor()) {
      value = on_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(on_cpu(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(on_cpu(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == DEVICE) {
      device = value.toDevice();
      value = Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().type() == DEVICE, "Expected a 'acc' device type for generator but found 'cpu'");
      value = cpu_twin(value.toGenerator());
      draws = false;
    }
  }
  TORCH_CHECK(!stranger || takes_cpu_tensors(schema.name()), "Expected all tensors to be on the same device, but found at least two devices, ",
              device ? *device : Device(DEVICE, current), " and cpu! (", schema.name(), ")");
  const Device home = device ? *device : Device(DEVICE, current);
  // Operators without a generator draw from the CPU's default, which lends itself to the device's state.
  if (draws) {
    auto cpu = at::detail::getDefaultCPUGenerator();
    auto& own = cpu_twin(default_generator(home.index()));
    auto before = cpu.get_state();
    cpu.set_state(own.get_state());
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    } catch (...) {
      cpu.set_state(before);
      throw;
    }
    own.set_state(cpu.get_state());
    cpu.set_state(before);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  // `out` arguments may have been resized: then their memory is another.
  for (auto& pair : pairs) {
    if (pair.first.sizes() == pair.second.sizes() && pair.first.storage().data() == pair.second.storage().data()) continue;
    if (pair.first.storage().data() != pair.second.storage().data()) {
      resize(pair.first, pair.second.sym_sizes(), std::nullopt);
      alias_of(pair.first).copy_(pair.second);
    } else {
      pair.first.unsafeGetTensorImpl()->set_sizes_and_strides(pair.second.sizes(), pair.second.strides(), pair.second.storage_offset());
    }
  }
  auto there = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& pair : pairs)
      if (pair.second.is_same(tensor)) return pair.first;
    for (auto& pair : pairs)
      if (tensor.storage().data() && pair.second.storage().data() == tensor.storage().data()) return with_storage(pair.first.storage(), tensor);
    return moved(tensor, home);
  };
  const size_t found = schema.returns().size();
  for (size_t index = stack->size() - found; index < stack->size(); ++index) {
    IValue& value = (*stack)[index];
    if (value.isTensor()) {
      value = there(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(there(tensor));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &set_nothing);
  library.impl("resize_", &resize);
  library.impl("view", &view);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("is_pinned", &is_pinned);
  library.impl("record_stream", &record_stream);
  library.impl("_fused_sdp_choice", &sdp_choice);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

// Autocast, by the lists that all devices share.
#define REDUCED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WHOLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

namespace autocast = at::autocast;
using namespace at::autocast;

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(REDUCED)
  AT_FORALL_FP32(WHOLE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.def("device_count", [] { return int(devices); });
  module.def("set_device_count", [](int count) { devices = count; });
  module.def("current_device", [] { return int(current); });
  module.def("set_device", [](int device) { Guard().setDevice(Device(DEVICE, device)); });
  module.def("counts", [] {
    return std::map<std::string, int64_t>{{"to_device", counts.to_device}, {"to_device_bytes", counts.to_device_bytes},
                                          {"to_host", counts.to_host}, {"to_host_bytes", counts.to_host_bytes},
                                          {"synchronisations", counts.synchronisations}};
  });
  module.def("alias", [](const at::Tensor& tensor) { return is_there(tensor) ? alias_of(tensor) : tensor; });
  module.def("default_generator", [](int device) { return default_generator(device); });
}

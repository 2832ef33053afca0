// A simulated accelerator over host memory: two devices, streams, events, pinned memory.
//
// It computes with the CPU's own kernels (`cpu_fallback`), so that what is computed on it is equal
// to the bit to itself. It counts what makes the host wait and what crosses to and from the device,
// for each thread and for all. Freed memory is given to the next that asks on the same stream, as a
// caching allocator does; freed pinned memory to the next that asks, at once.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace {
constexpr int kDevices = 2;
constexpr auto kKind = c10::DeviceType::PrivateUse1;

// ---- counters --------------------------------------------------------------------------------
enum Which { WAITS, TO_DEVICE, TO_HOST, PAGEABLE, COPIES_TO_DEVICE, COPIES_TO_HOST, ACROSS, PINNED, NUM };
struct Counts { std::atomic<int64_t> of[NUM] = {}; };
Counts everyone;
thread_local Counts mine;
thread_local int inside = 0;  // the fallback's own copies do not count
void count(Which which, int64_t amount = 1) {
  if (inside) return;
  everyone.of[which] += amount;
  mine.of[which] += amount;
}
// What the device is to lack: "streams", "events", "pinned", "waiting", by its environment.
bool lacks(const char* what) {
  const char* listed = getenv("EGSIM_WITHOUT");
  return listed && strstr(listed, what);
}
struct Inside { Inside() { ++inside; } ~Inside() { --inside; } };

// ---- streams and events ----------------------------------------------------------------------
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {0, 0};
// Which devices were begun to be used: as of a GPU, hundreds of megabytes for each process.
std::atomic<bool> begun[kDevices] = {};
std::atomic<int64_t> taken[kDevices] = {}, most_taken[kDevices] = {};  // bytes
void make_current(c10::DeviceIndex d) {
  current_device = d;
  begun[d] = true;
}
std::atomic<int64_t> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {kKind, current_device}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < kDevices, "there are ", kDevices, " simulated devices");
    if (d.index() >= 0) make_current(d.index());
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  static c10::DeviceIndex at(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, {kKind, at(d)}, current_stream[at(d)]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, {kKind, at(d)}, 0);
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    TORCH_CHECK(!lacks("streams"), "this device has one stream");
    return c10::Stream(c10::Stream::UNSAFE, {kKind, at(d)}, next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    TORCH_CHECK(!lacks("events"), "this device has no events");
    if (!*event) *event = new int(0);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<int*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void*) const override { count(WAITS); }
  void synchronizeStream(const c10::Stream&) const override { count(WAITS); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    TORCH_CHECK(!lacks("waiting"), "this device cannot be waited for as a whole");
    count(WAITS);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- memory ----------------------------------------------------------------------------------
// Never returned to the system: what is used after it was freed gives wrong numbers, no crash.
struct Pool {
  std::mutex lock;
  std::multimap<size_t, void*> free;
  std::map<char*, size_t> all;
  bool poisons = false;
  void* take(size_t& bytes) {
    // As CUDA's caching allocator of page-locked memory does, which is asked in all of these sizes.
    if (poisons) bytes = std::bit_ceil(bytes);
    std::lock_guard<std::mutex> guard(lock);
    auto found = free.upper_bound(bytes);  // what was freed last is taken first
    if (found != free.begin() && (--found)->first == bytes) {
      void* data = found->second;
      free.erase(found);
      return data;
    }
    if (poisons) count(PINNED, bytes);
    void* data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(data, 0xA5, bytes);
    all[static_cast<char*>(data)] = bytes;
    return data;
  }
  void give(void* data, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    if (poisons) memset(data, 0xA5, bytes);
    free.emplace(bytes, data);
  }
  bool has(const void* data) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = all.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (after == all.begin()) return false;
    --after;
    return data < after->first + after->second;
  }
};
struct Block { Pool* pool; size_t bytes; void* data; int device = -1; };
void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->device >= 0) taken[block->device] -= block->bytes;
  block->pool->give(block->data, block->bytes);
  delete block;
}
c10::DataPtr from(Pool& pool, size_t bytes, c10::Device device) {
  if (!bytes) return {nullptr, nullptr, &release, device};
  void* data = pool.take(bytes);
  auto* block = new Block{&pool, bytes, data};
  if (device.type() == kKind) {
    block->device = device.index();
    int64_t now = taken[block->device] += bytes, most = most_taken[block->device];
    while (now > most && !most_taken[block->device].compare_exchange_weak(most, now)) {}
  }
  return {data, block, &release, device};
}
struct DeviceAllocator final : c10::Allocator {
  std::mutex lock;
  std::map<std::pair<int, int64_t>, Pool*> pools;
  c10::DataPtr allocate(size_t bytes) override {
    Pool* pool;
    {
      std::lock_guard<std::mutex> guard(lock);
      auto& slot = pools[{current_device, current_stream[current_device]}];
      if (!slot) slot = new Pool;
      pool = slot;
    }
    return from(*pool, bytes, {kKind, current_device});
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* source, size_t bytes) const override {
    memcpy(to, source, bytes);
  }
} device_memory;
struct PinnedAllocator final : c10::Allocator {
  Pool pool;
  PinnedAllocator() { pool.poisons = true; }
  c10::DataPtr allocate(size_t bytes) override { return from(pool, bytes, c10::kCPU); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* source, size_t bytes) const override {
    memcpy(to, source, bytes);
  }
} pinned_memory;
REGISTER_ALLOCATOR(kKind, &device_memory);

// ---- generators: the devices' own, apart from the host's -----------------------------------
std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kDevices; ++i) made.push_back(at::detail::createCPUGenerator(99 + i));
    return made;
  }();
  return all;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex d) const override { return begun[d]; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { make_current(d); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto before = current_device;
    if (d >= 0) make_current(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    auto before = current_device;
    if (d >= 0) current_device = d;
    return before;
  }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.pool.has(data); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(!lacks("pinned"), "this device has no pinned memory");
    return &pinned_memory;
  }
  at::Device getDeviceFromPtr(void*) const override { return {kKind, current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    return generators()[d < 0 ? current_device : d];
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---- operators ---------------------------------------------------------------------------------
at::Tensor on_host(const at::Tensor& t) {  // the same memory under another name
  if (!t.defined() || t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(c10::kCPU));
}
c10::Device placed(c10::optional<c10::Device> device) {
  auto d = device.value_or(c10::Device(kKind));
  return {kKind, Guard::at(d)};
}
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         c10::optional<c10::ScalarType> dtype, c10::optional<c10::Layout>,
                         c10::optional<c10::Device> device, c10::optional<bool>) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys,
                                           c10::dtype_or_default(dtype));
}
at::Tensor empty(c10::IntArrayRef size, c10::optional<c10::ScalarType> dtype,
                 c10::optional<c10::Layout>, c10::optional<c10::Device> device,
                 c10::optional<bool>, c10::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype),
                                   format);
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.is_cpu() && !to.is_cpu()) {
    bool pinned = pinned_memory.pool.has(self.data_ptr());
    count(TO_DEVICE, self.nbytes());
    count(COPIES_TO_DEVICE);
    if (!pinned && self.nbytes()) count(PAGEABLE);
    if (!non_blocking) count(WAITS);
  } else if (!self.is_cpu() && to.is_cpu()) {
    count(TO_HOST, self.nbytes());
    count(COPIES_TO_HOST);
    if (!non_blocking || !pinned_memory.pool.has(to.data_ptr())) count(WAITS);
  } else if (self.device() != to.device()) {
    count(ACROSS, self.nbytes());
  }
  on_host(to).copy_(on_host(self));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}
at::Scalar local_scalar_dense(const at::Tensor& self) {
  count(WAITS);
  Inside guard;
  return on_host(self).item();
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         c10::optional<c10::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;  // its strides are kept, as on any device
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t needed = impl->numel() * impl->itemsize() + impl->storage_offset() * impl->itemsize();
  const auto& storage = self.storage();
  if (needed > storage.nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto fresh = device_memory.allocate(needed);
    if (storage.nbytes()) memcpy(fresh.get(), storage.data(), storage.nbytes());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(needed);
  }
  return self;
}
at::Tensor& set_source(at::Tensor& self, at::Storage source, c10::SymInt offset,
                       c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.data() != nullptr)
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  else
    impl->set_sizes_contiguous(sizes);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto num = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_source(self, std::move(source), 0, c10::SymIntArrayRef{c10::SymInt(num)}, {});
}
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  Inside guard;
  c10::optional<at::Tensor> b;
  if (bias.has_value() && bias->defined()) b = on_host(*bias);
  return at::convolution(on_host(input), on_host(weight), b, stride, padding, dilation, transposed,
                         output_padding, groups).to(input.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Inside guard;
  std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [a, b, c] = at::convolution_backward(
      on_host(grad), on_host(input), on_host(weight), c10::OptionalArrayRef<int64_t>(bias_sizes), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  auto moved = [&](const at::Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {moved(a), moved(b), moved(c)};
}

bool waits(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const std::set<std::string> dynamic = {
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
      "aten::unique_consecutive", "aten::unique_dim", "aten::repeat_interleave",
      "aten::bincount", "aten::histc"};
  const auto& name = op.schema().operator_name().name;
  if (dynamic.count(name)) return true;
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_")
    return false;
  const auto& indices = stack[stack.size() - op.schema().arguments().size() + 1];
  for (const auto& index : indices.toListRef())
    if (index.isTensor() && index.toTensor().defined() &&
        (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte))
      return true;
  return false;
}
// Runs the CPU's kernel on the same memory under another name, so that what a kernel writes to its
// arguments, declared or not, is there. What it makes is copied to memory of the device.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (waits(op, *stack)) count(WAITS);
  Inside guard;
  const auto& schema = op.schema();
  size_t num = schema.arguments().size(), first = stack->size() - num;
  auto device = c10::Device(kKind, current_device);
  std::vector<std::pair<at::Tensor, at::Tensor>> names;  // (ours, on the host)
  bool found = false;
  auto renamed = [&](const at::Tensor& t) {
    if (!t.defined() || t.is_cpu()) return t;
    if (!found) device = t.device();
    found = true;
    names.emplace_back(t, on_host(t));
    return names.back().second;
  };
  for (const auto& argument : schema.arguments())  // an output may have to be resized
    if (argument.alias_info() && argument.alias_info()->isWrite() && argument.kwarg_only())
      return at::native::cpu_fallback(op, stack);
  for (size_t i = 0; i < num; ++i) {
    auto& value = (*stack)[first + i];
    if (schema.arguments()[i].name() == "generator" && value.isNone()) {
      value = c10::IValue(generators()[current_device]);
    } else if (value.isTensor()) {
      value = renamed(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(renamed(t));
      value = c10::IValue(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<c10::optional<at::Tensor>> list;
      for (const c10::optional<at::Tensor>& t : value.toOptionalTensorList())
        list.push_back(t.has_value() ? c10::optional<at::Tensor>(renamed(*t)) : t);
      value = c10::IValue(list);
    } else if (value.isDevice()) {
      auto given = value.toDevice();
      if (!found && given.type() == kKind) device = placed(given);
      value = c10::IValue(c10::Device(c10::kCPU));
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  auto back = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    for (auto& [ours, host] : names)
      if (t.is_same(host)) return ours;
    auto there = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
    on_host(there).copy_(t);
    return there;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(back(t));
      value = c10::IValue(list);
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  // PyTorch's own way for other devices resizes an output that it has just reduced.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// ---- autocast --------------------------------------------------------------------------------
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv1d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

// ---- what the tests ask ----------------------------------------------------------------------
std::vector<int64_t> counts(bool all) {
  std::vector<int64_t> found;
  for (int i = 0; i < NUM; ++i) found.push_back(all ? everyone.of[i].load() : mine.of[i].load());
  return found;
}
TORCH_LIBRARY(simulated, m) {
  m.def("counts(bool all) -> int[]", &counts);
  m.def("begun() -> int[]", []() { return std::vector<int64_t>(begun, begun + kDevices); });
  m.def("forget_begun() -> ()", []() { for (auto& one : begun) one = false; });
  m.def("memory(int device) -> int[]", [](int64_t d) { return std::vector<int64_t>{taken[d], most_taken[d]}; });
  m.def("forget_most_taken() -> ()", []() { for (int d = 0; d < kDevices; ++d) most_taken[d] = taken[d].load(); });
  m.def("forget_pinned() -> ()", []() {
    std::lock_guard<std::mutex> guard(pinned_memory.pool.lock);
    pinned_memory.pool.free.clear();
  });
  m.def("device() -> int", []() -> int64_t { return current_device; });
  m.def("set_device(int device) -> ()", [](int64_t device) { Guard().setDevice({kKind, static_cast<c10::DeviceIndex>(device)}); });
  m.def("rng_state(int device) -> Tensor", [](int64_t device) { return generators()[device].get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    generators()[device].set_state(state);
  });
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    for (auto& generator : generators()) generator.set_current_seed(seed);
  });
  // The memory of a tensor, for as long as it is: nothing is kept alive.
  m.def("unowned(Tensor t) -> Tensor", [](const at::Tensor& t) {
    return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(c10::kCPU));
  });
}
}  // namespace

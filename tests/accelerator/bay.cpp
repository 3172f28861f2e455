// A test accelerator behind PrivateUse1: memory of its own with a hard cap, streams that are threads,
// timed events, pinned host memory and a generator; its kernels are the CPU's.
//
// NOTE [ What is late ]
// 1. A stream is a thread with a queue. Work of a stream runs in the order of issue; streams and the
//    host know nothing of each other unless an event, or a synchronisation, orders them.
// 2. A kernel waits for what its own stream was given before, computes on the calling thread (only
//    that tells the shapes of its results) and leaves its results in the queue: they reach the
//    device's memory later. Another stream, or a copy, that does not wait reads what was there before.
// 3. A copy runs when its turn comes: one half before the link's delay and one half after it, so that
//    one that starts too early is noticed as well as one that is not waited for. The host waits for it
//    unless it is `non_blocking` and the host's memory is pinned; other memory is read at once.
// 4. New memory is filled with 0xFF (NaN, or -1) in the order of its stream, so what is read too early
//    is noticed. As with CUDA, freed memory belongs to the stream that it was allocated for, and is
//    given out there at once; other streams have to be told of with `record_stream`.
// 5. Every time that the host waits for the device as it would on CUDA is counted: synchronisations,
//    copies that are waited for, results whose values or sizes the host asks for, memory that is
//    given back to the driver. What this device waits for on its own account (2) is not.
// 6. Random numbers follow from a seed and an offset (16 bytes of state), which every operator that
//    draws moves on, and from how many elements it has: as with CUDA, a part of a tensor does not
//    draw the whole one's numbers. They are not those of the CPU's generator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::IValue, c10::Stream, c10::StreamId;
using torch::jit::Stack;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kMaxDevices = 8;
constexpr StreamId kStreams = 256;  // of a device; later ones share a thread with earlier ones
constexpr size_t kGranularity = 512;

int num_devices = 1;
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_streams[kMaxDevices] = {};

std::atomic<int64_t> num_synchronisations = 0;  // rule 5

struct Speeds {  // set while nothing is under way
  double kernel_seconds = 0, copy_seconds = 0, bytes_per_second = 0;
} speeds;

void sleep(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// ---- streams and events: rule 1

// Once something has failed on a stream, everything that waits for the device says so.
std::mutex& failing = *new std::mutex;
std::string& failure = *new std::string;

void fail(const std::string& reason) {
  std::lock_guard lock(failing);
  if (failure.empty()) failure = reason;
}

void check_failure() {
  std::lock_guard lock(failing);
  TORCH_CHECK(failure.empty(), "bay: an asynchronous operation failed: ", failure);
}

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  uint64_t issued = 0, finished = 0;
  bool is_started = false;

  void add(std::function<void()> task) {
    std::lock_guard lock(mutex);
    if (!is_started) {
      is_started = true;
      std::thread([this] { run(); }).detach();
    }
    tasks.push_back(std::move(task));
    ++issued;
    changed.notify_all();
  }

  void drain() {
    std::unique_lock lock(mutex);
    const uint64_t target = issued;
    changed.wait(lock, [&] { return finished >= target; });
    check_failure();
  }

  bool is_idle() {
    std::lock_guard lock(mutex);
    return finished == issued;
  }

 private:
  void run() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return !tasks.empty(); });
      auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      try {
        task();
      } catch (const std::exception& error) {
        fail(error.what());
      }
      task = nullptr;  // what it holds is released before anybody hears that it is done
      lock.lock();
      ++finished;
      changed.notify_all();
    }
  }
};

struct Timeline {  // of an event: how often it was recorded, how often that was reached, and when
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;
  bool is_timed = false;
  Clock::time_point when;

  void wait(uint64_t version) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached >= version; });
  }
};
using Event = std::shared_ptr<Timeline>;

// Never destroyed: threads use them until the process ends.
Queue (*queues)[kStreams] = new Queue[kMaxDevices][kStreams];
std::mutex (*links)[2] = new std::mutex[kMaxDevices][2];  // of a device: in and out
std::atomic<StreamId> next_stream[kMaxDevices];

Queue& queue_of(DeviceIndex device, StreamId stream) { return queues[device][stream]; }
Queue& current_queue(DeviceIndex device) { return queue_of(device, current_streams[device]); }

void synchronize(DeviceIndex device) {
  for (StreamId stream = 0; stream < kStreams; ++stream) queue_of(device, stream).drain();
}

void record_event(const Event& event, Queue& queue) {
  std::lock_guard lock(event->mutex);
  queue.add([event, version = ++event->recorded] {
    std::lock_guard reached(event->mutex);
    event->reached = version;
    event->when = Clock::now();
    event->changed.notify_all();
  });
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return at::kPrivateUse1; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {at::kPrivateUse1, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "bay: invalid device ordinal ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device_of(device), current_streams[device_of(device).index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, device_of(device));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    const Device whole = device_of(device);
    return Stream(Stream::UNSAFE, whole, 1 + next_stream[whole.index()]++ % (kStreams - 1));
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return &queue(stream); }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  bool queryStream(const Stream& stream) const override { return queue(stream).is_idle(); }
  void synchronizeStream(const Stream& stream) const override {
    ++num_synchronisations;
    queue(stream).drain();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    ++num_synchronisations;
    synchronize(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override;

  void record(void** handle, const Stream& stream, const DeviceIndex, const c10::EventFlag flag)
      const override {
    if (*handle == nullptr) {
      *handle = new Event(std::make_shared<Timeline>());
      event_of(*handle)->is_timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    }
    record_event(event_of(*handle), queue(stream));
  }
  void block(void* handle, const Stream& stream) const override {
    if (handle == nullptr) return;
    Event event = event_of(handle);
    std::lock_guard lock(event->mutex);
    queue(stream).add([event, version = event->recorded] { event->wait(version); });
  }
  bool queryEvent(void* handle) const override {
    if (handle == nullptr) return true;
    std::lock_guard lock(event_of(handle)->mutex);
    return event_of(handle)->reached == event_of(handle)->recorded;
  }
  void synchronizeEvent(void* handle) const override {
    if (handle == nullptr) return;
    ++num_synchronisations;
    Event event = event_of(handle);
    uint64_t version;
    {
      std::lock_guard lock(event->mutex);
      version = event->recorded;
    }
    event->wait(version);
    check_failure();
  }
  void destroyEvent(void* handle, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(handle);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    TORCH_CHECK(begin && end, "bay: both events must be recorded before a time is taken");
    Event first = event_of(begin), last = event_of(end);
    TORCH_CHECK(first->is_timed && last->is_timed, "bay: both events need enable_timing=True");
    TORCH_CHECK(queryEvent(begin) && queryEvent(end), "bay: an event has not been reached yet");
    return std::chrono::duration<double, std::milli>(last->when - first->when).count();
  }

  static Device device_of(Device device) {
    return {at::kPrivateUse1, device.has_index() ? device.index() : current_device};
  }
  static Queue& queue(const Stream& stream) { return queue_of(stream.device_index(), stream.id()); }
  static Event& event_of(void* handle) { return *static_cast<Event*>(handle); }
};

// ---- memory: rule 4

struct Block {
  size_t size, requested;
  DeviceIndex device;
  StreamId stream;
  std::set<StreamId> users;  // other streams, by `record_stream`
};

struct Pending {  // a freed block that other streams still use
  void* address;
  Block block;
  std::vector<std::pair<Event, uint64_t>> uses;
  bool is_over() const {
    for (auto& [event, version] : uses) {
      std::lock_guard lock(event->mutex);
      if (event->reached < version) return false;
    }
    return true;
  }
};

struct Memory {  // of one device
  size_t cap = size_t(8) << 30;
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::map<std::pair<StreamId, size_t>, std::vector<void*>> free;
  std::vector<Pending> pending;
};

struct Allocator final : c10::DeviceAllocator {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
  Memory memories[kMaxDevices];

  static void release(void* address);
  c10::DataPtr allocate(size_t requested) override {
    const DeviceIndex device = current_device;
    const StreamId stream = current_streams[device];
    const size_t size = (requested + kGranularity - 1) / kGranularity * kGranularity;
    if (size == 0) return {nullptr, nullptr, &release, Device(at::kPrivateUse1, device)};
    std::unique_lock lock(mutex);
    Memory& memory = memories[device];
    void* address = take(memory, stream, size);
    if (address == nullptr && !has_room(memory, size)) {
      lock.unlock();
      ++num_synchronisations;
      synchronize(device);  // all that is pending is over then
      lock.lock();
      ++memory.stats.num_alloc_retries;
      give_back(memory);
      if (!has_room(memory, size)) refuse(memory, device, requested);
    }
    if (address == nullptr) {
      TORCH_CHECK(posix_memalign(&address, kGranularity, size) == 0, "bay: the host has no memory");
      memory.stats.reserved_bytes[0].increase(size);
      memory.stats.segment[0].increase(1);
      ++memory.stats.num_device_alloc;
    }
    blocks[address] = {size, requested, device, stream, {}};
    memory.stats.allocated_bytes[0].increase(size);
    memory.stats.active_bytes[0].increase(size);
    memory.stats.requested_bytes[0].increase(requested);
    memory.stats.allocation[0].increase(1);
    memory.stats.active[0].increase(1);
    lock.unlock();
    queue_of(device, stream).add([address, size] { memset(address, 0xFF, size); });
    return {address, address, &release, Device(at::kPrivateUse1, device)};
  }

  void free(void* address) {
    std::lock_guard lock(mutex);
    auto found = blocks.find(address);
    Block block = found->second;
    blocks.erase(found);
    Memory& memory = memories[block.device];
    memory.stats.allocated_bytes[0].decrease(block.size);
    memory.stats.requested_bytes[0].decrease(block.requested);
    memory.stats.allocation[0].decrease(1);
    Pending freed{address, block, {}};
    for (StreamId user : block.users) {
      auto event = std::make_shared<Timeline>();
      record_event(event, queue_of(block.device, user));
      freed.uses.emplace_back(event, 1);
    }
    memory.pending.push_back(std::move(freed));
    collect(memory);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex device = 0; device < num_devices; ++device) {
      ++num_synchronisations;
      synchronize(device);
      std::lock_guard lock(mutex);
      give_back(memories[device]);
    }
  }
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    std::lock_guard lock(mutex);
    auto found = blocks.find(data.get_context());
    if (found != blocks.end() && found->second.stream != stream.id())
      found->second.users.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(mutex);
    return memories[device].stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard lock(mutex);
    Memory& memory = memories[device];
    return {memory.cap - memory.stats.reserved_bytes[0].current, memory.cap};
  }

 private:
  static bool has_room(Memory& memory, size_t size) {
    return memory.stats.reserved_bytes[0].current + size <= memory.cap;
  }
  void* take(Memory& memory, StreamId stream, size_t size) {
    collect(memory);
    auto& fitting = memory.free[{stream, size}];
    if (fitting.empty()) return nullptr;
    void* address = fitting.back();
    fitting.pop_back();
    return address;
  }
  static void collect(Memory& memory) {
    std::erase_if(memory.pending, [&](Pending& freed) {
      if (!freed.is_over()) return false;
      memory.free[{freed.block.stream, freed.block.size}].push_back(freed.address);
      memory.stats.active_bytes[0].decrease(freed.block.size);
      memory.stats.active[0].decrease(1);
      return true;
    });
  }
  static void give_back(Memory& memory) {
    collect(memory);
    for (auto& [key, addresses] : memory.free) {
      for (void* address : addresses) {
        ::free(address);
        memory.stats.reserved_bytes[0].decrease(key.second);
        memory.stats.segment[0].decrease(1);
        ++memory.stats.num_device_free;
      }
    }
    memory.free.clear();
  }
  static void refuse(Memory& memory, DeviceIndex device, size_t requested) {
    ++memory.stats.num_ooms;
    const size_t live = memory.stats.allocated_bytes[0].current;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "bay out of memory. Tried to allocate ", requested,
        " bytes. bay:", int(device), " has a total capacity of ", memory.cap, " bytes, of which ",
        live, " bytes are allocated and ", memory.cap - live, " bytes are free.");
  }
  template <typename Change>
  void each_stat(DeviceIndex device, Change change) {
    std::lock_guard lock(mutex);
    auto& stats = memories[device].stats;
    for (auto* array :
         {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
          &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      change((*array)[0]);
  }
};
Allocator& allocator = *new Allocator;
void Allocator::release(void* address) {
  if (address) allocator.free(address);
}
void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const {
  allocator.recordStream(data, stream);
}

struct PinnedMemory final : at::HostAllocator {
  std::mutex mutex;
  std::atomic<size_t> cap = SIZE_MAX;
  std::map<const char*, size_t> sizes;  // copies keep what they use, so it is freed when they end

  static void release(void* address);
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, at::kCPU};
    void* address = nullptr;
    TORCH_CHECK(
        size <= cap && posix_memalign(&address, 64, size) == 0, "bay: the host has no memory to pin");
    std::lock_guard lock(mutex);
    sizes[static_cast<char*>(address)] = size;
    return {address, address, &release, at::kCPU};
  }
  bool has(const void* address) {
    std::lock_guard lock(mutex);
    auto after = sizes.upper_bound(static_cast<const char*>(address));
    if (after == sizes.begin()) return false;
    --after;
    return static_cast<const char*>(address) < after->first + after->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory& pinned = *new PinnedMemory;
void PinnedMemory::release(void* address) {
  if (address == nullptr) return;
  std::lock_guard lock(pinned.mutex);
  pinned.sizes.erase(static_cast<char*>(address));
  ::free(address);
}

// ---- random numbers: rule 6

struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  explicit Generator(DeviceIndex device)
      : GeneratorImpl(
            Device(at::kPrivateUse1, device < 0 ? current_device : device),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "bay: a state of the generator has 16 bytes");
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::detail::empty_cpu({16}, at::TensorOptions(at::kByte));
    memcpy(state.mutable_data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  at::mt19937 next(uint64_t num_elements) {  // the numbers of one operator
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15u + offset_ * 0xBF58476D1CE4E5B9u;
    mixed += num_elements * 0x94D049BB133111EBu;
    offset_ += 4;
    return at::mt19937(mixed ^ (mixed >> 31));
  }
  static c10::DeviceType device_type() { return at::kPrivateUse1; }

 private:
  Generator* clone_impl() const override {
    auto* copied = new Generator(device().index());
    copied->seed_ = seed_, copied->offset_ = offset_;
    return copied;
  }
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (DeviceIndex each = 0; each < kMaxDevices; ++each)
      all->push_back(at::make_generator<Generator>(each));
    return all;
  }();
  return (*made)[device < 0 ? current_device : device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { exchangeDevice(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({at::kPrivateUse1, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device);
  }
  bool isPinnedPtr(const void* address) const override { return pinned.has(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  Device getDeviceFromPtr(void* address) const override {
    std::lock_guard lock(allocator.mutex);
    auto found = allocator.blocks.find(address);
    TORCH_CHECK(found != allocator.blocks.end(), "bay: no device has this address");
    return {at::kPrivateUse1, found->second.device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr fresh = allocator.allocate(size);
    current_queue(storage.device().index())
        .add([to = fresh.get(), from = storage.data(), kept = std::min(size, storage.nbytes())] {
          if (kept) memcpy(to, from, kept);
        });
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ---- kernels: rule 2

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == at::kPrivateUse1;
}

// The same memory, as a CPU's kernel sees it. It is not kept alive: a stream's order does that.
Tensor seen_by_cpu(const Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

struct Late {  // results that are not in the device's memory yet
  std::vector<std::pair<Tensor, Tensor>> results;  // where to, and what
  void add(const Tensor& to, const Tensor& from) { results.emplace_back(seen_by_cpu(to), from); }
};

Tensor like_on_device(const Tensor& tensor, DeviceIndex device) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(Device(at::kPrivateUse1, device)));
}

// Calls a CPU's kernel for the arguments on the stack. `op` says what they mean: it may be another
// operator with the same arguments.
struct Call {
  const c10::FunctionSchema& schema;
  Stack& stack;
  size_t first;  // of the arguments
  DeviceIndex device = -1;
  std::vector<std::pair<Tensor, Tensor>> seen;     // tensors of the device, and what the kernel gets
  std::vector<std::pair<Tensor, Tensor>> written;  // those that it changes
  Late late;

  Call(const c10::OperatorHandle& op, Stack* arguments)
      : schema(op.schema()), stack(*arguments), first(stack.size() - schema.arguments().size()) {
    for (size_t i = first; i < stack.size(); ++i) find_device(stack[i]);
    if (device < 0) device = current_device;
  }

  void find_device(const IValue& value) {
    if (device >= 0) return;
    if (value.isTensor() && is_ours(value.toTensor())) {
      device = value.toTensor().device().index();
    } else if (value.isList()) {
      for (const IValue& element : value.toListRef()) find_device(element);
    } else if (value.isDevice() && value.toDevice().type() == at::kPrivateUse1) {
      device = Guard::device_of(value.toDevice()).index();
    }
  }

  void check_host_tensor(const Tensor& tensor) {
    const bool may_mix = tensor.dim() == 0 || schema.name().find("index") != std::string::npos;
    TORCH_CHECK(
        may_mix, "Expected all tensors to be on the same device, but found cpu beside bay:",
        int(device), " in ", schema.name());
  }

  Tensor to_cpu(const Tensor& tensor, bool is_written, bool is_result) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      check_host_tensor(tensor);
      return tensor;
    }
    TORCH_CHECK(
        tensor.device().index() == device, "Expected all tensors to be on the same device, found bay:",
        int(tensor.device().index()), " and bay:", int(device), " in ", schema.name());
    Tensor view = seen_by_cpu(tensor);
    if (is_written) {
      Tensor scratch = at::empty_strided(tensor.sizes(), tensor.strides(), view.options());
      if (!is_result) scratch.copy_(view);
      written.emplace_back(tensor, scratch);
      view = scratch;
    }
    seen.emplace_back(tensor, view);
    return view;
  }

  IValue to_cpu(const IValue& value, bool is_written, bool is_result) {
    if (value.isTensor()) return to_cpu(value.toTensor(), is_written, is_result);
    if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& tensor : value.toTensorVector())
        all.push_back(to_cpu(tensor, is_written, is_result));
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        all.push_back(
            tensor ? std::optional(to_cpu(*tensor, is_written, is_result)) : std::nullopt);
      return all;
    }
    if (value.isDevice() && value.toDevice().type() == at::kPrivateUse1) return Device(at::kCPU);
    return value;
  }

  // Numbers of the device's generator in place of the CPU's; a kernel without an argument for it
  // draws from the CPU's default one, which no other thread may use meanwhile.
  void run(const c10::OperatorHandle& kernel, bool is_random) {
    std::optional<size_t> place;
    for (size_t i = 0; i < schema.arguments().size(); ++i)
      if (schema.arguments()[i].name() == "generator") place = first + i;
    if (!is_random && !place) {
      kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      return;
    }
    at::Generator source = default_generator(device);
    if (place && stack[*place].isGenerator()) source = stack[*place].toGenerator();
    TORCH_CHECK(
        source.device().type() == at::kPrivateUse1, "Expected a 'bay' device type for generator but "
        "found '", source.device(), "'");
    at::Generator used = place ? at::detail::createCPUGenerator() : at::detail::getDefaultCPUGenerator();
    auto* engine = at::check_generator<at::CPUGeneratorImpl>(used);
    const Tensor before = used.get_state();
    uint64_t num_elements = 0;
    for (const auto& [tensor, view] : seen) num_elements = std::max<uint64_t>(num_elements, tensor.numel());
    engine->set_engine(source.get<Generator>()->next(num_elements));
    engine->set_next_float_normal_sample(std::nullopt);
    engine->set_next_double_normal_sample(std::nullopt);
    if (place) stack[*place] = used;
    kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    used.set_state(before);
  }

  Tensor to_device(const Tensor& result, const c10::AliasInfo* alias) {
    if (!result.defined()) return result;
    if (alias != nullptr) {
      for (auto& [tensor, view] : seen) {
        if (alias->isWrite() ? view.is_same(result) : view.storage().data() == result.storage().data())
          return alias->isWrite() ? tensor : viewed(tensor, view, result);
      }
    }
    Tensor made = like_on_device(result, device);
    late.add(made, result);
    return made;
  }

  static Tensor viewed(const Tensor& tensor, const Tensor& view, const Tensor& result) {
    const auto* start = static_cast<const char*>(view.data_ptr());
    const auto moved = static_cast<const char*>(result.data_ptr()) - start;
    const auto offset = tensor.storage_offset() * int64_t(tensor.itemsize()) + moved;
    Tensor made = at::empty({0}, result.options().device(tensor.device()));
    return at::cpu::set_(
        made, tensor.storage(), offset / int64_t(result.itemsize()), result.sizes(), result.strides());
  }

  void results_to_device() {
    const auto& returns = schema.returns();
    for (size_t i = 0; i < returns.size(); ++i) {
      IValue& value = stack[stack.size() - returns.size() + i];
      const c10::AliasInfo* alias = returns[i].alias_info();
      if (value.isTensor()) {
        value = to_device(value.toTensor(), alias);
      } else if (value.isTensorList()) {
        c10::List<Tensor> all;
        const c10::AliasInfo* of_each = alias && !alias->containedTypes().empty()
            ? &alias->containedTypes()[0] : alias;
        for (const Tensor& tensor : value.toTensorVector()) all.push_back(to_device(tensor, of_each));
        value = all;
      }
    }
    for (auto& [tensor, scratch] : written) {
      if (tensor.sizes() != scratch.sizes()) {
        at::native::resize_(tensor, scratch.sizes(), std::nullopt);
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(scratch.sizes(), scratch.strides());
      }
      late.add(tensor, scratch);
    }
  }

  void operator()(const c10::OperatorHandle& kernel, bool is_random) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::DeviceGuard guard(Device(at::kPrivateUse1, device));
    Queue& queue = current_queue(device);
    queue.drain();
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      const auto* alias = argument.alias_info();
      const bool is_list = alias && !alias->containedTypes().empty();
      const bool is_written = alias && (is_list ? alias->containedTypes()[0] : *alias).isWrite();
      stack[first + i] = to_cpu(stack[first + i], is_written, argument.kwarg_only());
    }
    run(kernel, is_random);
    results_to_device();
    if (late.results.empty()) return;
    queue.add([late = std::move(late), seconds = speeds.kernel_seconds] {
      sleep(seconds);
      for (auto& [to, from] : late.results) to.copy_(from);
    });
  }
};

void by_cpu(const c10::OperatorHandle& op, Stack* stack) {
  for (auto tag : {at::Tag::data_dependent_output, at::Tag::dynamic_output_shape})
    if (op.hasTag(tag)) ++num_synchronisations;
  Call(op, stack)(op, op.hasTag(at::Tag::nondeterministic_seeded));
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle& op, Stack* stack) {
  static const auto kernel = operator_named("aten::convolution");
  Call(op, stack)(kernel, false);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto kernel = operator_named("aten::convolution_backward");
  const size_t first = stack->size() - 10;
  const Tensor weight = (*stack)[first + 2].toTensor();
  const bool is_transposed = (*stack)[first + 6].toBool();
  const int64_t groups = (*stack)[first + 8].toInt();
  const int64_t channels = is_transposed ? weight.size(1) * groups : weight.size(0);
  const bool has_bias = (*stack)[first + 9].toBoolList()[2];
  stack->insert(
      stack->begin() + first + 3, has_bias ? IValue(std::vector<int64_t>{channels}) : IValue());
  Call(kernel, stack)(kernel, false);
}

// ---- what is not computed

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Guard::device_of(device.value_or(Device(at::kPrivateUse1))));
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Guard::device_of(device.value_or(Device(at::kPrivateUse1))));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// Rule 3.
Tensor copy_from(const Tensor& from, const Tensor& to, bool is_non_blocking) {
  if (to.numel() == 0) return to;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool comes = !is_ours(from), goes = !is_ours(to);
  const DeviceIndex device = (comes ? to : from).device().index();
  Tensor source = comes ? from : seen_by_cpu(from), target = goes ? to : seen_by_cpu(to);
  const Tensor& host = comes ? from : to;
  const bool is_local = !comes && !goes && from.device() == to.device();
  const bool is_free = comes || goes ? is_non_blocking && pinned.has(host.data_ptr()) : is_local;
  if (comes && !is_free) source = at::empty_strided(from.sizes(), from.strides(), from.options()).copy_(from);
  Queue& queue = current_queue(device);
  if (!comes && !goes && !is_local) synchronize(to.device().index());
  queue.add([source = source.expand(target.sizes()), target, is_local, link = &links[device][goes],
             now = speeds] {
    const int64_t rows = target.dim() ? target.size(0) : 0;
    const auto copy = [&](int64_t begin, int64_t end) {
      if (begin < end) target.narrow(0, begin, end - begin).copy_(source.narrow(0, begin, end - begin));
    };
    std::unique_lock one_at_a_time(*link, std::defer_lock);
    if (!is_local) one_at_a_time.lock();
    copy(0, rows / 2);
    sleep(is_local ? now.kernel_seconds : now.copy_seconds);
    if (!is_local && now.bytes_per_second > 0) sleep(double(target.nbytes()) / now.bytes_per_second);
    if (rows) copy(rows / 2, rows);
    else target.copy_(source);
  });
  if (!is_free && !(comes && is_non_blocking)) {
    ++num_synchronisations;
    queue.drain();
  }
  return to;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

Tensor as_strided(
    const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::cpu::as_strided(tensor, size, stride, offset);
}
Tensor view(const Tensor& tensor, at::IntArrayRef size) { return at::native::view(tensor, size); }
Tensor reshape_alias(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}
const Tensor& resize(
    const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, size, format);
}
Tensor& set_storage(
    Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  return at::cpu::set_(tensor, storage, offset, size, stride);
}
Tensor& set_whole_storage(Tensor& tensor, at::Storage storage) {
  return at::native::set_(tensor, storage);
}
Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}
void record_stream(Tensor& tensor, Stream stream) {
  allocator.recordStream(tensor.storage().data_ptr(), stream);
}
int64_t attention_kernel(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // composed of other operators
}

// torch runs LSTM cells of such a device in one kernel, which the CPU does not have.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& of_input, const Tensor& of_hidden, const Tensor& cell,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  Tensor sums = of_input + of_hidden;
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) sums = sums + *bias;
  const auto parts = sums.chunk(4, 1);
  const Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), fresh = parts[2].tanh(),
               out = parts[3].sigmoid();
  Tensor after = forget * cell + in * fresh;
  return {out * after.tanh(), after, at::cat({in, forget, fresh, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& of_hidden, const std::optional<Tensor>& of_cell, const Tensor& before,
    const Tensor& after, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const Tensor in = parts[0], forget = parts[1], fresh = parts[2], out = parts[3];
  const Tensor shown = after.tanh();
  const Tensor hidden = of_hidden && of_hidden->defined() ? *of_hidden : at::zeros_like(after);
  Tensor cell = hidden * out * (1 - shown * shown);
  if (of_cell && of_cell->defined()) cell = cell + *of_cell;
  Tensor gates = at::cat(
      {cell * fresh * in * (1 - in), cell * before * forget * (1 - forget),
       cell * in * (1 - fresh * fresh), hidden * shown * out * (1 - out)}, 1);
  return {gates, cell * forget, has_bias ? gates.sum(0) : Tensor()};
}

using Boxed = torch::CppFunction;
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(Boxed::makeFromBoxedFunction<&by_cpu>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_and_resize);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", attention_kernel);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("convolution_overrideable", Boxed::makeFromBoxedFunction<&convolution>());
  library.impl(
      "convolution_backward_overrideable", Boxed::makeFromBoxedFunction<&convolution_backward>());
  // Otherwise composed of operators with other last bits.
  for (const char* name : {"native_layer_norm", "native_group_norm"})
    library.impl(name, Boxed::makeFromBoxedFunction<&by_cpu>());
}

// ---- autocast, for operators that models are made of; all others take what they get

IValue cast_to(at::ScalarType dtype, const IValue& value) {
  const auto cast = [&](const Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, at::kPrivateUse1);
  };
  if (value.isTensor()) return cast(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<Tensor> all;
  for (const Tensor& tensor : value.toTensorVector()) all.push_back(cast(tensor));
  return all;
}

template <bool is_lower>
void autocast(const c10::OperatorHandle& op, Stack* stack) {
  const auto dtype = is_lower ? at::autocast::get_autocast_dtype(at::kPrivateUse1) : at::kFloat;
  const size_t first = stack->size() - op.schema().arguments().size();
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = cast_to(dtype, (*stack)[i]);
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name :
       {"_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input",
        "conv_transpose3d.input", "linear", "addmm", "addmv", "addr", "matmul", "mm", "mv", "bmm",
        "baddbmm", "addbmm", "prelu", "scaled_dot_product_attention"})
    library.impl(name, Boxed::makeFromBoxedFunction<&autocast<true>>());
  for (const char* name :
       {"exp", "log", "rsqrt", "softplus", "layer_norm", "group_norm", "softmax.int",
        "log_softmax.int", "cross_entropy_loss", "nll_loss", "mse_loss", "l1_loss", "cumsum",
        "sum", "sum.dim_IntList", "prod", "norm.Scalar", "pow.Tensor_Scalar", "cosine_similarity"})
    library.impl(name, Boxed::makeFromBoxedFunction<&autocast<false>>());
}

}  // namespace

extern "C" {
void bay_enable(int devices) {
  num_devices = devices;
  c10::impl::registerDeviceGuard(at::kPrivateUse1, new Guard);
  c10::SetAllocator(at::kPrivateUse1, &allocator);
  at::setHostAllocator(at::kPrivateUse1, &pinned);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
void bay_set_cap(int device, size_t bytes) {
  std::lock_guard lock(allocator.mutex);
  allocator.memories[device].cap = bytes;
}
void bay_set_pinned_cap(size_t bytes) { pinned.cap = bytes; }
void bay_set_speeds(double kernel_seconds, double copy_seconds, double bytes_per_second) {
  speeds = {kernel_seconds, copy_seconds, bytes_per_second};
}
void bay_get_random_state(int device, uint64_t* state) {
  auto* generator = default_generator(device).get<Generator>();
  state[0] = generator->seed_, state[1] = generator->offset_;
}
void bay_set_random_state(int device, const uint64_t* state) {
  auto* generator = default_generator(device).get<Generator>();
  generator->seed_ = state[0], generator->offset_ = state[1];
}
int64_t bay_num_synchronisations() { return num_synchronisations; }
void bay_fail(const char* reason) { fail(reason); }
int bay_has_failed() {
  std::lock_guard lock(failing);
  return !failure.empty();
}
// Let a stream call the host when it gets there.
void bay_launch(int device, int64_t stream, void (*call)(int64_t), int64_t argument) {
  queue_of(device, stream).add([call, argument] { call(argument); });
}
}

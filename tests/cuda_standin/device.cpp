// A stand-in for a CUDA device: the CPU's memory and kernels behind PyTorch's CUDA dispatch key, on a build without CUDA.
//
// Tensors say `cuda:0`, their storages come from an allocator of PyTorch's rules for CUDA, autograd runs their backward on a device
// thread, memory events carry the device, and kernels and copies run as late and in as odd an order as streams and events allow
// (queues.h): all that Python code for CUDA can get wrong without a GPU. What it has not: a GPU's speed.
//
// Built and loaded by standin.py, before torch is imported, since torch asks for its CUDA hooks once.

#include "queues.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/RNN.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {
using namespace at;
// The only device with memory; those before it are there, and whatever is made on them is a mistake.
const Device kDevice(DeviceType::CUDA, [] {
  const char* told = std::getenv("STANDIN_DEVICE");
  return static_cast<DeviceIndex>(told ? std::atoi(told) : 0);
}());
thread_local DeviceIndex current = 0;
thread_local int64_t stream = 0; // of kDevice
std::atomic<bool> initialised = false;
const DeviceIndex kCount = kDevice.index() + 1;
Stream stream_of(Device device, int64_t number = stream) {
  const DeviceIndex index = device.has_index() ? device.index() : current;
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), index == kDevice.index() ? number : 0);
}
void check_index(DeviceIndex index) {
  TORCH_CHECK(initialised, "CUDA is not initialized");
  TORCH_CHECK((index < 0 ? current : index) == kDevice.index(), "the stand-in has memory on ", kDevice, " alone");
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  Guard(DeviceType) {}
  Guard() = default;
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override { return Device(DeviceType::CUDA, std::exchange(current, device.index())); }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return kCount; }
  Stream getStream(Device device) const override { return stream_of(device); }
  Stream getDefaultStream(Device device) const override { return stream_of(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream_of(device, standin::new_stream()); }
  Stream getNewStream(Device device, int) const override { return stream_of(device, standin::new_stream()); }
  Stream exchangeStream(Stream next) const override {
    const Stream before = stream_of(next.device());
    if (next.device() == kDevice) stream = next.id();
    return before;
  }
  bool queryStream(const Stream& one) const override { return standin::finish(one.id(), false); }
  void synchronizeStream(const Stream& one) const override { standin::finish(one.id()); }
  bool isStreamCapturing(const Stream&) const override { return false; }
  void synchronizeDevice(const DeviceIndex) const override { standin::finish_all(); }
  static standin::Event* as_event(void* event) { return static_cast<standin::Event*>(event); }
  void record(void** event, const Stream& one, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new standin::Event;
    as_event(*event)->record(one.id());
  }
  void block(void* event, const Stream& one) const override { if (event) as_event(event)->hold(one.id()); }
  bool queryEvent(void* event) const override { return !event || as_event(event)->passed(false); }
  void synchronizeEvent(void* event) const override { if (event) as_event(event)->passed(true); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete as_event(event); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override { return as_event(begin)->until(*as_event(end)); }
};

// -- memory

// The rules of PyTorch's caching allocator: requests are rounded up to 512 bytes; up to 1 MiB they come out of segments of 2 MiB, below
// 10 MiB out of segments of 20 MiB, above out of segments of their own; the smallest free block that fits is taken, whatever was there
// before, and split, but for large ones of which at most 1 MiB would be left; neighbours that are free become one.
// With expandable_segments:True there is a range of addresses for each of the two kinds, into which pieces of 2 MiB and of 20 MiB are mapped
// where no free block fits, behind a free one where there is one; blocks are split to 512 bytes; of those that fit the one is taken that
// could grow the least; emptying the cache unmaps whole pieces.
// What is given back belongs to the stream that took it: that stream may write there at once, and does.
// With max_split_size_mb blocks of that size and more are not split, nor given to who asks for less, or for 20 MiB less than they have; with
// roundup_power2_divisions requests are rounded up to that many steps between two powers of two.
constexpr int64_t kMiB = 1 << 20, kBlock = 512, kSmall = kMiB;

struct Pool;
struct Block {
  char* address;
  int64_t size;
  bool small;
  Pool* pool;
  int64_t asked = 0;
  bool used = false;
  Block *before = nullptr, *behind = nullptr; // in its segment
  bool mapped = true;
};
struct Before {
  bool operator()(const Block* a, const Block* b) const { return a->address < b->address; }
};
struct Smaller {
  bool operator()(const Block* a, const Block* b) const { return a->size != b->size ? a->size < b->size : a->address < b->address; }
};
struct Counts {
  int64_t allocated = 0, allocated_peak = 0, requested = 0, requested_peak = 0, reserved = 0, reserved_peak = 0, large = 0, large_peak = 0;
};
std::mutex lock; // over all below
std::unordered_map<void*, Block*> blocks; // that are used
struct Pool { // each stream has its own
  int64_t stream;
  std::set<Block*, Smaller> unused[2]; // large ones, small ones
  std::set<Block*, Before> unmapped[2];
  char* ranges[2] = {nullptr, nullptr};
};
std::map<int64_t, Pool> pools;
Counts counts;
const int64_t capacity = int64_t(1) << 37;
int64_t allowed = capacity; // that the process may reserve
const char* told(const char* option) { // what stands behind the name of an option of the allocator; null where it is not given
  const char* all = std::getenv("PYTORCH_ALLOC_CONF");
  if (!all) all = std::getenv("PYTORCH_CUDA_ALLOC_CONF");
  const char* found = all ? std::strstr(all, option) : nullptr;
  return found ? found + std::strlen(option) : nullptr;
}
const bool expandable = [] {
  const char* value = told("expandable_segments:");
  return value && std::strncmp(value, "True", 4) == 0;
}();
int64_t number(const char* option, int64_t otherwise) {
  const char* value = told(option);
  return value ? std::atoll(value) : otherwise;
}
const int64_t kMostSplit = number("max_split_size_mb:", INT64_MAX / kMiB) * kMiB, kDivisions = number("roundup_power2_divisions:", 1);

// The rest with `lock` held.

int64_t add(const Block& block, int sign) { // returns what is allocated now
  counts.allocated += sign * block.size;
  counts.requested += sign * block.asked;
  counts.large += block.small ? 0 : sign;
  counts.allocated_peak = std::max(counts.allocated_peak, counts.allocated);
  counts.requested_peak = std::max(counts.requested_peak, counts.requested);
  counts.large_peak = std::max(counts.large_peak, counts.large);
  return counts.allocated;
}
// `block`, which is in no set, and its free neighbours in the same state become one, which is returned.
Block* merged(Block* block) {
  for (Block* next : {block->before, block->behind}) {
    if (!next || next->used || next->mapped != block->mapped) continue;
    if (next->mapped) block->pool->unused[block->small].erase(next);
    else block->pool->unmapped[block->small].erase(next);
    Block *first = next == block->before ? next : block, *second = first == next ? block : next;
    first->size += second->size;
    first->behind = second->behind;
    if (first->behind) first->behind->before = first;
    delete second;
    block = first;
  }
  return block;
}
// Cuts `block` after `size` bytes; the rest is returned, in no set.
Block* cut(Block* block, int64_t size) {
  Block* rest = new Block{block->address + size, block->size - size, block->small, block->pool, 0, false, block, block->behind, block->mapped};
  if (rest->behind) rest->behind->before = rest;
  block->behind = rest;
  block->size = size;
  return rest;
}
int64_t piece(const Block& block) { return block.small ? 2 * kMiB : 20 * kMiB; }
void unmap_pieces(Pool& of, bool small) {
  auto& pool = of.unused[small];
  for (Block* block : std::vector<Block*>(pool.begin(), pool.end())) {
    const int64_t at = block->address - of.ranges[small], unit = piece(*block);
    const int64_t from = (at + unit - 1) / unit * unit - at, to = (at + block->size) / unit * unit - at;
    if (to <= from) continue;
    pool.erase(block);
    if (to < block->size) pool.insert(cut(block, to));
    if (from > 0) {
      Block* rest = cut(block, from);
      pool.insert(block);
      block = rest;
    }
    madvise(block->address, block->size, MADV_DONTNEED);
    counts.reserved -= block->size;
    block->mapped = false;
    of.unmapped[small].insert(merged(block));
  }
}
// Maps the first `size` bytes of `block`, which is not mapped, in whole pieces; null where the device has no room.
Block* map_pieces(Block* block, int64_t size) {
  const int64_t unit = piece(*block), mapped = (size + unit - 1) / unit * unit;
  if (counts.reserved + mapped > allowed) return nullptr;
  block->pool->unmapped[block->small].erase(block);
  if (mapped < block->size) block->pool->unmapped[block->small].insert(cut(block, mapped));
  counts.reserved += mapped;
  counts.reserved_peak = std::max(counts.reserved_peak, counts.reserved);
  block->mapped = true;
  block = merged(block);
  block->pool->unused[block->small].insert(block);
  return block;
}
// A free block of at least `size` bytes, out of all sets, at the lowest address with room; null where the device has none.
Block* expand(Pool& pool, int64_t size, bool small) {
  if (!pool.ranges[small]) {
    const int64_t range = capacity + capacity / 8 / (20 * kMiB) * (20 * kMiB);
    pool.ranges[small] = static_cast<char*>(mmap(nullptr, range, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    TORCH_CHECK(pool.ranges[small] != MAP_FAILED, "no addresses");
    pool.unmapped[small].insert(new Block{pool.ranges[small], range, small, &pool, 0, false, nullptr, nullptr, false});
  }
  for (Block* block : pool.unmapped[small]) {
    if (block->before && !block->before->used) block = block->before;
    int64_t room = 0;
    for (const Block* next = block; next && !next->used && room < size; next = next->behind) room += next->size;
    if (room < size) continue;
    if (!block->mapped) block = map_pieces(block, std::min(block->size, size));
    while (block && block->size < size) block = map_pieces(block->behind, std::min(block->behind->size, size - block->size));
    if (block) pool.unused[small].erase(block);
    return block;
  }
  return nullptr;
}
void empty_cache() {
  standin::finish_all();
  for (auto& [_, pool] : pools) {
    if (expandable) {
      unmap_pieces(pool, false);
      unmap_pieces(pool, true);
      continue;
    }
    for (auto& free : pool.unused)
      for (auto at = free.begin(); at != free.end();) {
        Block* block = *at;
        if (block->before || block->behind) { ++at; continue; }
        counts.reserved -= block->size;
        c10::free_cpu(block->address);
        at = free.erase(at);
        delete block;
      }
  }
}
Block* reserve(Pool& pool, int64_t size) {
  const int64_t segment = size <= kSmall ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : (size + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
  if (counts.reserved + segment > allowed) empty_cache();
  if (counts.reserved + segment > allowed) return nullptr;
  counts.reserved += segment;
  counts.reserved_peak = std::max(counts.reserved_peak, counts.reserved);
  return new Block{static_cast<char*>(c10::alloc_cpu(segment)), segment, size <= kSmall, &pool};
}
int64_t rounded(int64_t asked) {
  if (kDivisions < 2 || asked <= kBlock * kDivisions) return (asked + kBlock - 1) / kBlock * kBlock;
  const int64_t power = std::bit_floor(static_cast<uint64_t>(asked)), step = power / kDivisions;
  return (asked + step - 1) / step * step;
}
Block* take(int64_t asked) {
  const int64_t size = rounded(asked);
  Pool& of = pools.try_emplace(stream, Pool{stream}).first->second;
  auto& pool = of.unused[size <= kSmall];
  Block wanted{nullptr, size, false, nullptr};
  auto found = pool.lower_bound(&wanted);
  if (found != pool.end() && (*found)->size >= (size < kMostSplit ? kMostSplit : size + 20 * kMiB)) found = pool.end();
  Block* block;
  if (found == pool.end()) {
    block = expandable ? expand(of, size, size <= kSmall) : reserve(of, size);
    if (!block && expandable) {
      empty_cache();
      block = expand(of, size, size <= kSmall);
    }
    if (!block) return nullptr;
  } else {
    const auto could = [](const Block* b) { return b->size + (b->behind && !b->behind->mapped ? b->behind->size : 0); };
    for (auto next = std::next(found); next != pool.end() && could(*next) < could(*found);) found = next++;
    block = *found;
    pool.erase(found);
  }
  const int64_t left = block->size - size;
  if (block->small || expandable ? left >= kBlock : size < kMostSplit && left > kSmall) pool.insert(cut(block, size));
  block->used = true;
  block->asked = asked;
  blocks[block->address] = block;
  return block;
}
void put_back(Block* block) {
  block->used = false;
  block = merged(block);
  block->pool->unused[block->small].insert(block);
}

constexpr int64_t kPoisoned = 4 * kMiB; // as far as freed bytes become NaN

void give_back(void* address) {
  if (!address) return;
  Block* block;
  {
    const std::lock_guard<std::mutex> guard(lock);
    block = blocks.extract(address).mapped();
  }
  standin::push(block->pool->stream, {[address, size = std::min(block->size, kPoisoned)] { memset(address, 0xff, size); }});
  int64_t now, size = block->size;
  {
    const std::lock_guard<std::mutex> guard(lock);
    now = add(*block, -1);
    put_back(block);
  }
  c10::reportMemoryUsageToProfiler(address, -size, now, now, kDevice);
}

struct BlockAllocator final : public c10::DeviceAllocator {
  DataPtr allocate(size_t asked) override {
    if (asked == 0) return {nullptr, nullptr, &give_back, kDevice};
    int64_t now, size;
    void* address;
    {
      const std::lock_guard<std::mutex> guard(lock);
      Block* block = take(asked);
      TORCH_CHECK_WITH(OutOfMemoryError, block, "CUDA out of memory. Tried to allocate ", asked, " bytes.");
      address = block->address;
      size = block->size;
      now = add(*block, 1);
    }
    c10::reportMemoryUsageToProfiler(address, size, now, counts.reserved, kDevice);
    return {address, address, &give_back, kDevice};
  }
  DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    standin::push(stream, {[=] { memcpy(target, source, nbytes); }});
  }
  bool initialized() override { return initialised; }
  void emptyCache(MempoolId_t) override {
    const std::lock_guard<std::mutex> guard(lock);
    empty_cache();
  }
  void recordStream(const DataPtr&, c10::Stream) override { TORCH_CHECK(false, "the stand-in has no record_stream"); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    const std::lock_guard<std::mutex> guard(lock);
    c10::CachingDeviceAllocator::DeviceStats found;
    const auto tell = [](auto& stat, int64_t now, int64_t peak) { stat[0].current = now, stat[0].peak = peak; };
    tell(found.allocated_bytes, counts.allocated, counts.allocated_peak);
    tell(found.active_bytes, counts.allocated, counts.allocated_peak);
    tell(found.requested_bytes, counts.requested, counts.requested_peak);
    tell(found.reserved_bytes, counts.reserved, counts.reserved_peak);
    found.allocation[2].peak = counts.large_peak;
    return found;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {
    const std::lock_guard<std::mutex> guard(lock);
    counts.allocated_peak = counts.allocated;
    counts.requested_peak = counts.requested;
    counts.reserved_peak = counts.reserved;
    counts.large_peak = counts.large;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {capacity - counts.reserved, capacity}; }
};
BlockAllocator allocator;

// -- random numbers

// A generator as CUDA's: a seed and an offset, of which each kernel takes what it needs when it is issued.
struct CudaGenerator final : public c10::GeneratorImpl {
  uint64_t seed_ = default_rng_seed_val, offset = 0;
  bool anew = true; // whether cuDNN's dropout has to begin anew
  explicit CudaGenerator() : GeneratorImpl(kDevice, DispatchKeySet(c10::DispatchKey::CUDA)) {}
  static DeviceType device_type() { return DeviceType::CUDA; }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset = 0, anew = true; }
  void set_offset(uint64_t to) override { offset = to, anew = true; }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "RNG state must be 16 bytes on the CPU");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset = words[1], anew = true;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const Tensor state = at::empty({16}, TensorOptions(kByte).device(kCPU));
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_, words[1] = offset;
    return state.getIntrusivePtr();
  }
  CudaGenerator* clone_impl() const override {
    auto* made = new CudaGenerator();
    made->seed_ = seed_, made->offset = offset;
    return made;
  }
};
const Generator& default_generator() {
  static const Generator made = at::make_generator<CudaGenerator>();
  return made;
}
Generator numbers(uint64_t seed, uint64_t offset) { // that a kernel draws
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15u + offset);
}
Generator next_numbers(const Generator& from = default_generator()) {
  auto* own = at::check_generator<CudaGenerator>(from);
  const std::lock_guard<std::mutex> guard(own->mutex_);
  return numbers(own->seed_, std::exchange(own->offset, own->offset + 4));
}

// -- host memory

std::map<const char*, int64_t> registered; // bytes from each address on, with `lock` held
bool refuses = std::getenv("STANDIN_REGISTERS") && std::strcmp(std::getenv("STANDIN_REGISTERS"), "no") == 0;

int locked(const void* address, int64_t nbytes) { // 0 as CUDA says it: done
  const auto* begin = static_cast<const char*>(address);
  const std::lock_guard<std::mutex> guard(lock);
  const auto next = registered.lower_bound(begin);
  if (next != registered.end() && next->first < begin + nbytes) return 712;
  if (next != registered.begin() && std::prev(next)->first + std::prev(next)->second > begin) return 712;
  registered[begin] = nbytes;
  return 0;
}
// Whether a copy to or from these bytes runs without the host. One that leaves a registration is refused, as CUDA does.
bool is_pinned(const void* address, int64_t nbytes) {
  const auto* begin = static_cast<const char*>(address);
  const std::lock_guard<std::mutex> guard(lock);
  auto next = registered.upper_bound(begin);
  const bool later = next != registered.end() && next->first < begin + nbytes;
  const bool here = next != registered.begin() && std::prev(next)->first + std::prev(next)->second > begin;
  const bool whole = here && std::prev(next)->first + std::prev(next)->second >= begin + nbytes;
  TORCH_CHECK(whole || (!here && !later), "CUDA error: invalid argument: a copy of ", nbytes, " bytes leaves the registered memory it begins in");
  return whole;
}
void give_pinned_back(void* address) {
  standin::finish_all();
  {
    const std::lock_guard<std::mutex> guard(lock);
    registered.erase(static_cast<char*>(address));
  }
  c10::free_cpu(address);
}
struct PinnedAllocator final : public c10::Allocator {
  DataPtr allocate(size_t nbytes) override {
    void* address = nbytes ? c10::alloc_cpu(nbytes) : nullptr;
    if (nbytes) locked(address, nbytes);
    return {address, address, nbytes ? &give_pinned_back : &c10::free_cpu, kCPU};
  }
  DeleterFnPtr raw_deleter() const override { return &give_pinned_back; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override { memcpy(target, source, nbytes); }
};
PinnedAllocator pinned_allocator;

// -- operations

int strict = 0; // whether an operation that would make the host wait for the device is let be (0), warned of (1) or an error (2)
thread_local bool inside = false; // what the stand-in does for itself is not such a one

struct Inside {
  const bool before = inside;
  Inside() { inside = true; }
  ~Inside() { inside = before; }
};

void waits(const char* what) {
  if (inside || !strict) return;
  TORCH_CHECK(strict == 1, "called a synchronizing CUDA operation: ", what);
  TORCH_WARN("called a synchronizing CUDA operation: ", what);
}

void kernel(std::function<void()> run) { standin::push(stream, {std::move(run)}); }
void settle() { standin::finish(stream); } // before the host looks at bytes

// The same bytes as a tensor of the CPU, which holds nothing.
Tensor raw(const Tensor& t) {
  if (!t.defined()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(kCPU));
}
// What a kernel reads: the device's own bytes, and of the host's what is there when it is issued.
Tensor read(const Tensor& t) {
  if (!t.defined() || !t.device().is_cpu()) return raw(t);
  Tensor taken = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) taken.unsafeGetTensorImpl()->set_wrapped_number(true);
  return taken;
}

Tensor empty_mf(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                std::optional<bool>, std::optional<MemoryFormat> mf) {
  check_index(device ? device->index() : -1);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), mf);
}
Tensor empty_s(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
               std::optional<Device> device, std::optional<bool>) {
  check_index(device ? device->index() : -1);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}
Tensor& copy_into(Tensor& self, const Tensor& src, bool non_blocking) {
  const bool moves = self.device() != src.device(), out = self.is_cpu();
  if (moves && !non_blocking) waits("copy_");
  if (!self.numel()) return self;
  const Tensor& host = out ? self : src;
  const bool plain = self.is_contiguous() && src.is_contiguous() && self.dtype() == src.dtype() && self.sizes() == src.sizes();
  const bool direct = moves && plain && is_pinned(host.data_ptr(), host.nbytes());
  kernel([target = raw(self), source = moves && !out && !direct ? read(src) : raw(src)] { target.copy_(source); });
  if (moves && (!non_blocking || (out && !direct))) settle();
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool) {
  Tensor d = dst;
  copy_into(d, self, false);
  return dst;
}
Tensor copy_from_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
const Tensor& resize_to(const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> mf) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  int64_t n = c10::multiply_integers(sizes) * self.element_size() + self.storage_offset() * self.element_size();
  if (n > (int64_t)impl->storage().nbytes()) {
    auto data = allocator.allocate(n);
    if (impl->storage().nbytes()) allocator.copy_data(data.get(), impl->storage().data(), impl->storage().nbytes());
    impl->unsafe_storage().set_data_ptr_noswap(std::move(data));
    impl->unsafe_storage().set_nbytes(n);
  }
  impl->set_sizes_contiguous(sizes);
  if (mf) impl->empty_tensor_restride(*mf);
  return self;
}
Tensor& set_storage(Tensor& r, Storage s, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = r.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(s));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.guard_int(__FILE__, __LINE__));
  return r;
}
Tensor& set_tensor(Tensor& r, const Tensor& s) {
  auto* impl = r.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(s.storage());
  impl->set_sizes_and_strides(s.sizes(), s.strides(), s.storage_offset());
  return r;
}
Tensor& set_source(Tensor& r, Storage s) {
  int64_t n = s.nbytes() / r.element_size();
  auto* impl = r.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(s));
  impl->set_sizes_contiguous({n}); impl->set_storage_offset(0);
  return r;
}
Tensor& set_none(Tensor& r) {
  Storage s(Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return set_source(r, s);
}
Scalar local_scalar(const Tensor& t) {
  waits("item");
  settle();
  return raw(t).item();
}
Tensor strided_(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> off) {
  std::optional<int64_t> o;
  if (off) o = off->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), o);
}
Tensor view_(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor to_device(const Tensor& t) {
  if (!t.defined()) return t;
  Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(kDevice));
  if (t.numel()) kernel([target = raw(made), t] { target.copy_(t); });
  return made;
}

// Each tensor in an argument, as `f` makes it.
IValue each(const IValue& value, const std::function<Tensor(const Tensor&)>& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> found;
    for (const Tensor& t : value.toTensorVector()) found.push_back(f(t));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (const auto& t : value.toOptionalTensorVector()) found.push_back(t ? std::optional(f(*t)) : t);
    return found;
  }
  return value;
}
// A Meta kernel may be Python's, which calls torch: modes and hooks of this thread do not see it.
const auto& plain = *[] {
  const at::NoGradGuard without;
  const at::AutoDispatchBelowADInplaceOrView below;
  return new at::ThreadLocalState;
}();
// Issues `op` with the arguments on `stack`, as the CPU computes it, for results of the shapes that its Meta kernel finds. Returns false, with
// nothing done, where these depend on data, or are views or no tensors. wide: whether to compute in double precision.
bool launch(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool wide = false) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const auto given = torch::jit::last(*stack, count).vec();
  const auto writes = [](const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); };
  for (const auto& made : schema.returns())
    if ((made.alias_info() && !writes(made)) || !(made.type()->isSubtypeOf(*TensorType::get()) || made.type()->isSubtypeOf(*ListType::ofTensors())))
      return false;
  std::unordered_map<c10::TensorImpl*, Tensor> metas;
  const auto meta = [&](const Tensor& t) {
    if (!t.defined() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
    Tensor& found = metas[t.unsafeGetTensorImpl()];
    if (!found.defined()) found = at::empty_strided(t.sizes(), t.strides(), t.options().device(kMeta));
    return found;
  };
  torch::jit::Stack shapes;
  try {
    const at::ThreadLocalStateGuard guard(plain);
    for (const IValue& value : given)
      shapes.push_back(value.isDevice() ? IValue(Device(kMeta)) : value.isGenerator() ? IValue() : each(value, meta));
    op.callBoxed(&shapes);
  } catch (const std::exception&) {
    return false;
  }
  torch::jit::Stack arguments, targets, results;
  for (size_t n = 0; n < count; ++n) {
    const IValue& value = given[n];
    const auto& argument = schema.arguments()[n];
    const auto type = argument.type()->kind() == TypeKind::OptionalType ? argument.type()->expectRef<OptionalType>().getElementType() : argument.type();
    if (writes(argument) && value.isTensor()) {
      const Tensor &t = value.toTensor(), &shape = metas[t.unsafeGetTensorImpl()];
      if (t.sizes() != shape.sizes()) at::native::resize_output(t, shape.sizes());
    }
    if (type->kind() == TypeKind::GeneratorType) arguments.emplace_back(value.isNone() ? next_numbers() : next_numbers(value.toGenerator()));
    else arguments.push_back(value.isDevice() ? IValue(Device(kCPU)) : each(value, writes(argument) ? raw : read));
  }
  for (size_t n = 0; n < schema.returns().size(); ++n) {
    const auto& made = schema.returns()[n];
    if (writes(made)) {
      for (size_t k = 0; k < count; ++k)
        if (writes(schema.arguments()[k]) && schema.arguments()[k].alias_info()->beforeSets() == made.alias_info()->beforeSets()) results.push_back(given[k]);
      targets.emplace_back();
      continue;
    }
    results.push_back(each(shapes[n], [](const Tensor& t) {
      return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(kDevice)) : t;
    }));
    targets.push_back(each(results.back(), raw));
  }
  kernel([op, wide, arguments, targets]() mutable {
    const auto widened = [](const Tensor& t) { return t.defined() && t.is_floating_point() ? t.to(kDouble) : t; };
    if (wide) for (IValue& value : arguments) value = each(value, widened);
    op.callBoxed(&arguments);
    for (size_t n = 0; n < targets.size(); ++n) {
      if (targets[n].isTensor() && targets[n].toTensor().defined() && arguments[n].toTensor().numel()) targets[n].toTensor().copy_(arguments[n].toTensor());
      if (targets[n].isTensorList()) for (size_t k = 0; k < targets[n].toTensorVector().size(); ++k)
        targets[n].toTensorVector()[k].copy_(arguments[n].toTensorVector()[k]);
    }
  });
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
  return true;
}
c10::OperatorHandle found(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// Convolutions as cuDNN has them: which algorithm runs depends on the flags in force in that moment, and the fastest takes a
// workspace of twice the bytes of the tensor named, deterministic ones of half of them, and what needs no cuDNN unfolds one
// sample. The two slower ones compute in double precision, so that their bits are others.
// With `cudnn.benchmark` each thread that meets a convolution for the first time tries all algorithms, in a workspace of twenty times
// those bytes, and remembers which it took.
struct Convolution {
  bool fastest;
  DataPtr workspace;
  explicit Convolution(const Tensor& t) {
    const auto& flags = at::globalContext();
    const bool native = !flags.userEnabledCuDNN(), deterministic = flags.deterministicCuDNN() || flags.deterministicAlgorithms();
    fastest = !native && !deterministic;
    const int64_t nbytes = t.numel() * t.element_size();
    workspace = allocator.allocate(fastest ? 2 * nbytes : native ? nbytes / std::max<int64_t>(1, t.size(0)) : nbytes / 2);
    if (!fastest) kernel([native] { std::this_thread::sleep_for(std::chrono::milliseconds(native ? 4 : 2)); });
  }
};
void convolve(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  thread_local std::unordered_set<std::string> met;
  const bool backward = op.schema().name() == "aten::convolution_backward";
  const auto given = torch::jit::last(*stack, op.schema().arguments().size());
  const Tensor t = given[backward].toTensor(), weight = given[backward + 1].toTensor();
  const std::string key = c10::str(t.sizes(), weight.sizes(), t.scalar_type(), backward);
  if (at::globalContext().benchmarkCuDNN() && met.insert(key).second) allocator.allocate(20 * t.numel() * t.element_size());
  const Convolution by(given[0].toTensor());
  TORCH_CHECK(launch(op, stack, !by.fastest), "the stand-in has no such convolution");
}
// Batch norm is cuDNN's too where that is enabled, and then saves a tensor more.
std::tuple<Tensor, Tensor, Tensor> three(const char* name, torch::jit::Stack stack) {
  TORCH_CHECK(launch(found(name), &stack), "the stand-in has no such ", name);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> normalized(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                                            const std::optional<Tensor>& mean, const std::optional<Tensor>& variance,
                                                            bool training, double factor, double epsilon) {
  const auto [y, m, s] = three("aten::native_batch_norm", {input, weight, bias, mean, variance, training, factor, epsilon});
  return {y, m, s, at::zeros({64}, input.options().dtype(kByte))};
}
std::tuple<Tensor, Tensor, Tensor> normalized_backward(const Tensor& input, const Tensor& grad, const Tensor& weight,
                                                             const std::optional<Tensor>&, const std::optional<Tensor>&,
                                                             const std::optional<Tensor>& mean, const std::optional<Tensor>& scale,
                                                             double epsilon, const Tensor&) {
  return three("aten::native_batch_norm_backward", {grad, input, weight, IValue(), IValue(), mean, scale, true, epsilon, c10::List<bool>({true, true, true})});
}
std::tuple<Tensor, Tensor> dropped(const Tensor& input, double p, std::optional<bool> train) {
  const Tensor output = at::empty_like(input), mask = at::empty_like(input, input.options().dtype(kBool));
  kernel([o = raw(output), m = raw(mask), i = raw(input), bits = next_numbers(), kept = train.value_or(true) ? 1 - p : 1.0] {
    m.bernoulli_(kept, bits);
    at::mul_out(const_cast<Tensor&>(o), i * m, at::scalar_tensor(kept > 0 ? 1 / kept : 0.0, i.options()));
  });
  return {output, mask};
}

// Memory-efficient attention, which saves where it drew its dropout as numbers on the host.
struct Attention {
  Tensor q, k, v;
  double p, scale;
  bool causal;
  uint64_t seed, offset;
  Attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool causal, std::optional<double> scale, uint64_t seed, uint64_t offset)
      : q(raw(query)), k(raw(key)), v(raw(value)), p(dropout), scale(scale.value_or(1 / std::sqrt(query.size(-1)))), causal(causal), seed(seed), offset(offset) {}
  Tensor scores() const {
    const Tensor found = at::matmul(q.to(kFloat), k.to(kFloat).mT()) * scale;
    return causal ? found.masked_fill(at::ones_like(found).triu(1).to(kBool), -INFINITY) : found;
  }
  Tensor mask(const Tensor& like) const { return at::empty_like(like).bernoulli_(1 - p, numbers(seed, offset)).div_(1 - p); }
};
std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
                                                     bool, double p, bool causal, std::optional<double> scale) {
  TORCH_CHECK(!bias, "the stand-in has no attention with a bias");
  auto* own = at::check_generator<CudaGenerator>(default_generator());
  const uint64_t seed = own->seed_, offset = p > 0 ? std::exchange(own->offset, own->offset + 4) : own->offset;
  const Tensor output = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  const Tensor sums = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(kFloat));
  kernel([a = Attention(q, k, v, p, causal, scale, seed, offset), o = raw(output), s = raw(sums)] {
    const Tensor scores = a.scores(), weights = scores.softmax(-1);
    s.copy_(scores.logsumexp(-1));
    o.copy_(at::matmul(a.p > 0 ? weights * a.mask(weights) : weights, a.v.to(kFloat)));
  });
  const auto number = [](uint64_t n) { return at::scalar_tensor(static_cast<int64_t>(n), TensorOptions(kLong).device(kCPU)); };
  return {output, sums, number(seed), number(offset)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&,
                                                              const Tensor& out, const Tensor& sums, const Tensor& seed, const Tensor& offset, double p,
                                                              std::array<bool, 4>, bool causal, std::optional<double> scale) {
  TORCH_CHECK(seed.is_cpu() && offset.is_cpu(), "the host reads where the dropout was drawn, at an address of the device");
  const Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  const Attention made(q, k, v, p, causal, scale, seed.item<int64_t>(), offset.item<int64_t>());
  kernel([a = made, g = raw(grad), o = raw(out), s = raw(sums), dq = raw(dq), dk = raw(dk), dv = raw(dv)] {
    const Tensor weights = (a.scores() - s.unsqueeze(-1)).exp(), mask = a.p > 0 ? a.mask(weights) : at::ones_like(weights), wide = g.to(kFloat);
    dv.copy_(at::matmul((weights * mask).mT(), wide));
    const Tensor ds = weights * (at::matmul(wide, a.v.to(kFloat).mT()) * mask - (wide * o.to(kFloat)).sum(-1, true)) * a.scale;
    dq.copy_(at::matmul(ds, a.k.to(kFloat)));
    dk.copy_(at::matmul(ds.mT(), a.q.to(kFloat)));
  });
  return {dq, dk, dv, Tensor()};
}
int64_t attention_choice(const Tensor& q, const Tensor& k, const Tensor&, const std::optional<Tensor>& mask, double, bool, std::optional<double>, bool) {
  const bool plain = q.dim() == 4 && q.size(1) == k.size(1) && !mask;
  return static_cast<int64_t>(at::globalContext().userEnabledMemEfficientSDP() && plain ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
}
// LSTMs as cuDNN has them: the dropout between their layers comes out of a buffer of the device's, which each run changes unseen. The first run after
// the generator's state was set makes it anew, from a number that the host waits for.
Tensor dropout_state(int64_t seed, const Tensor& like) {
  const Tensor made = at::empty({2 << 20}, like.options().dtype(kByte));
  kernel([words = static_cast<int64_t*>(made.data_ptr()), seed] { words[0] = seed, words[1] = 0; });
  return made;
}
Tensor recurrent_dropout(const Tensor& state, const Tensor& like, double p) {
  const Tensor made = at::empty(like.sizes(), like.options());
  kernel([t = raw(made), words = static_cast<int64_t*>(state.data_ptr()), p] { t.bernoulli_(1 - p, numbers(words[0], words[1]++)).div_(1 - p); });
  return made;
}
// All layers, on the CPU; of several, `masks` lie between them.
std::vector<Tensor> layers_on_cpu(const std::vector<Tensor>& given, const std::optional<Tensor>& masks, bool batch_first) {
  const int64_t layers = given[1].size(0), each = (static_cast<int64_t>(given.size()) - 3) / layers;
  Tensor x = given[0];
  std::vector<Tensor> hidden, cells;
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (layer && masks) x = x * (*masks)[layer - 1];
    const auto weights = TensorList(given).slice(3 + layer * each, each);
    const Tensor first[] = {given[1].slice(0, layer, layer + 1), given[2].slice(0, layer, layer + 1)};
    auto [y, h, c] = at::lstm(x, first, weights, each == 4, 1, 0.0, false, false, batch_first);
    x = y;
    hidden.push_back(h);
    cells.push_back(c);
  }
  return {x, at::cat(hidden), at::cat(cells)};
}
std::vector<Tensor> as_cpus(TensorList tensors) {
  settle();
  std::vector<Tensor> found;
  for (const Tensor& t : tensors) found.push_back(raw(t));
  return found;
}
std::vector<Tensor> lstm_forward(TensorList given, const std::optional<Tensor>& masks, bool batch_first) {
  const auto made = layers_on_cpu(as_cpus(given), masks ? std::optional(raw(*masks)) : masks, batch_first);
  return {to_device(made[0]), to_device(made[1]), to_device(made[2])};
}
std::vector<Tensor> lstm_backward(TensorList gradients, TensorList given, const std::optional<Tensor>& masks, bool batch_first) {
  const AutoGradMode with_graph(true);
  std::vector<Tensor> leaves, found;
  for (const Tensor& t : as_cpus(given)) leaves.push_back(t.detach().requires_grad_(true));
  const auto made = layers_on_cpu(leaves, masks ? std::optional(raw(*masks)) : masks, batch_first);
  for (const Tensor& t : torch::autograd::grad(made, leaves, as_cpus(gradients))) found.push_back(to_device(t));
  return found;
}
template <typename F>
auto operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<F>();
}
struct Lstm : torch::autograd::Function<Lstm> {
  static std::vector<Tensor> forward(torch::autograd::AutogradContext* kept, TensorList given, double p, bool batch_first) {
    const AutoDispatchBelowADInplaceOrView below;
    std::optional<Tensor> masks;
    const int64_t layers = given[1].size(0), width = given[1].size(2);
    if (p > 0 && layers > 1) {
      static Tensor state;
      if (std::exchange(at::check_generator<CudaGenerator>(default_generator())->anew, false) || !state.defined()) {
        const auto seed = at::empty({}, given[0].options().dtype(kLong)).random_().item<int64_t>();
        state = operation<Tensor(int64_t, const Tensor&)>("standin::dropout_state").call(seed, given[0]);
      }
      const auto like = given[0].new_empty({layers - 1, given[0].size(0), given[0].size(1), width});
      masks = operation<Tensor(const Tensor&, const Tensor&, double)>("standin::recurrent_dropout").call(state, like, p);
    }
    auto made = operation<decltype(lstm_forward)>("standin::lstm").call(given, masks, batch_first);
    std::vector<Tensor> saved(given.begin(), given.end());
    saved.insert(saved.end(), {made[0], masks.value_or(Tensor())}); // cuDNN's backward reads the output too
    kept->save_for_backward(saved);
    kept->saved_data["batch_first"] = batch_first;
    return made;
  }
  static std::vector<Tensor> backward(torch::autograd::AutogradContext* kept, std::vector<Tensor> gradients) {
    auto given = kept->get_saved_variables();
    const Tensor masks = given.back();
    given.resize(given.size() - 2);
    auto found = operation<decltype(lstm_backward)>("standin::lstm_backward")
                     .call(gradients, given, masks.defined() ? std::optional(masks) : std::nullopt, kept->saved_data["batch_first"].toBool());
    found.resize(found.size() + 2);
    return found;
  }
};
void lstm(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input, TensorList hx, TensorList parameters, bool, int64_t, double p, bool train,
          bool bidirectional, bool batch_first) {
  TORCH_CHECK(!bidirectional, "the stand-in has no bidirectional LSTM");
  std::vector<Tensor> given{input, hx[0], hx[1]};
  given.insert(given.end(), parameters.begin(), parameters.end());
  const auto made = Lstm::apply(TensorList(given), train ? p : 0.0, batch_first);
  output = made[0], hy = made[1], cy = made[2];
}
// Every other operation as the CPU computes it; the host waits where the shapes of results depend on data.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  for (const char* waiting : {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2"})
    if (name == waiting) waits(waiting);
  if (launch(op, stack)) return;
  const Inside guard;
  at::native::cpu_fallback(op, stack);
}
}  // namespace

namespace at { namespace {
struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override { initialised = true; }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return initialised; }
  DeviceIndex deviceCount() const override { return kCount; }
  int getNumGPUs() const override { return kCount; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index < 0 ? current : index); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  Generator getNewGenerator(DeviceIndex) const override { // the default one comes first, for `torch.cuda.default_generators`
    static bool first = true;
    return std::exchange(first, false) ? default_generator() : at::make_generator<CudaGenerator>();
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data, 1); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void deviceSynchronize(DeviceIndex) const override { standin::finish_all(); }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
}
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
static int allocating = (c10::SetAllocator(DeviceType::CUDA, &allocator, 10), 0);

static int recurrent = (at::native::lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm), 0);
static int attending = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_choice), 0);

TORCH_LIBRARY(standin, m) {
  m.def("dropout_state(int seed, Tensor like) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("recurrent_dropout(Tensor state, Tensor like, float p) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("lstm(Tensor[] given, Tensor? masks, bool batch_first) -> Tensor[]");
  m.def("lstm_backward(Tensor[] gradients, Tensor[] given, Tensor? masks, bool batch_first) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(standin, CUDA, m) {
  m.impl("dropout_state", dropout_state);
  m.impl("recurrent_dropout", recurrent_dropout);
  m.impl("lstm", lstm_forward);
  m.impl("lstm_backward", lstm_backward);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_mf);
  m.impl("empty_strided", empty_s);
  m.impl("copy_", copy_into);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_resize);
  m.impl("resize_", resize_to);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_", set_none);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", strided_);
  m.impl("view", view_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl("native_dropout", dropped);
  m.impl("_scaled_dot_product_efficient_attention", attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", attention_backward);
  m.impl("cudnn_batch_norm", normalized);
  m.impl("cudnn_batch_norm_backward", normalized_backward);
}

// -- for standin.py

extern "C" {
void standin_init() { at::globalContext().lazyInitDevice(DeviceType::CUDA); }
void standin_resize(c10::StorageImpl* storage, int64_t nbytes) {
  DataPtr data = allocator.allocate(nbytes);
  if (const auto kept = std::min<int64_t>(nbytes, storage->nbytes()))
    kernel([to = data.get(), from = storage->data_ptr().get(), kept] { memcpy(to, from, kept); });
  storage->set_data_ptr(std::move(data));
  storage->set_nbytes(nbytes);
}
int64_t standin_allocated() { return counts.allocated; }
int64_t standin_allocated_peak() { return counts.allocated_peak; }
int64_t standin_requested() { return counts.requested; }
int64_t standin_requested_peak() { return counts.requested_peak; }
int64_t standin_reserved() { return counts.reserved; }
int64_t standin_reserved_peak() { return counts.reserved_peak; }
int64_t standin_large_peak() { return counts.large_peak; }
int64_t standin_capacity() { return capacity; }
void standin_allow(int64_t nbytes) { allowed = nbytes; }
void standin_empty_cache() { allocator.emptyCache({}); }
void standin_reset_peak() { allocator.resetPeakStats(0); }
void standin_strict(int mode) { strict = mode; }
int standin_count() { return kCount; }
int standin_current() { return current; }
int standin_exchange(int index) { return std::exchange(current, static_cast<DeviceIndex>(index < 0 ? current : index)); }
int64_t standin_stream() { return stream; }
void standin_set_stream(int64_t number) { stream = number; }
void standin_sleep() { standin::push(stream, {nullptr, nullptr, true}); }
void standin_synchronize() { standin::finish_all(); }
int standin_register(void* address, int64_t nbytes) { return refuses ? 801 : locked(address, nbytes); }
int standin_unregister(void* address) {
  const std::lock_guard<std::mutex> guard(lock);
  return registered.erase(static_cast<char*>(address)) ? 0 : 713;
}
}

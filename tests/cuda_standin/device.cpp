// A stand-in for a CUDA device: the CPU's memory and kernels behind PyTorch's CUDA dispatch key, on a build without CUDA.
//
// Tensors say `cuda:0`, their storages come from an allocator of PyTorch's rules for CUDA, autograd runs their
// backward on a device thread, and memory events carry the device: all that Python code for CUDA can get wrong without a
// GPU. What it has not: time. Everything is done when the call returns, so nothing overlaps and nothing can come too late.
//
// Built and loaded by standin.py, before torch is imported, since torch asks for its CUDA hooks once.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/RNN.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
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
const DeviceIndex kCount = kDevice.index() + 1;
Stream stream_of(Device device) { return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device.has_index() ? device.index() : current), 0); }
void check_index(DeviceIndex index) {
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
  Stream getStream(Device device) const noexcept override { return stream_of(device); }
  Stream getDefaultStream(Device device) const override { return stream_of(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream_of(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return kCount; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

// -- memory

// The rules of PyTorch's caching allocator: requests are rounded up to 512 bytes; up to 1 MiB they come out of segments of 2 MiB, below
// 10 MiB out of segments of 20 MiB, above out of segments of their own; the smallest free block that fits is taken, whatever was there
// before, and split, but for large ones of which at most 1 MiB would be left; neighbours that are free become one.
// With expandable_segments:True there is a range of addresses for each of the two kinds, into which pieces of 2 MiB and of 20 MiB are mapped
// where no free block fits, behind a free one where there is one; blocks are split to 512 bytes; of those that fit the one is taken that
// could grow the least; emptying the cache unmaps whole pieces.
// With max_split_size_mb blocks of that size and more are not split, nor given to who asks for less, or for 20 MiB less than they have; with
// roundup_power2_divisions requests are rounded up to that many steps between two powers of two.
constexpr int64_t kMiB = 1 << 20, kBlock = 512, kSmall = kMiB;

struct Block {
  char* address;
  int64_t size, asked = 0;
  bool small, used = false;
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
std::set<Block*, Smaller> unused[2]; // large ones, small ones
std::set<Block*, Before> unmapped[2];
char* ranges[2] = {nullptr, nullptr};
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
    if (next->mapped) unused[block->small].erase(next);
    else unmapped[block->small].erase(next);
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
  Block* rest = new Block{block->address + size, block->size - size, 0, block->small, false, block, block->behind, block->mapped};
  if (rest->behind) rest->behind->before = rest;
  block->behind = rest;
  block->size = size;
  return rest;
}
int64_t piece(const Block& block) { return block.small ? 2 * kMiB : 20 * kMiB; }
void unmap_pieces(bool small) {
  auto& pool = unused[small];
  for (Block* block : std::vector<Block*>(pool.begin(), pool.end())) {
    const int64_t at = block->address - ranges[small], unit = piece(*block);
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
    unmapped[small].insert(merged(block));
  }
}
// Maps the first `size` bytes of `block`, which is not mapped, in whole pieces; null where the device has no room.
Block* map_pieces(Block* block, int64_t size) {
  const int64_t unit = piece(*block), mapped = (size + unit - 1) / unit * unit;
  if (counts.reserved + mapped > allowed) return nullptr;
  unmapped[block->small].erase(block);
  if (mapped < block->size) unmapped[block->small].insert(cut(block, mapped));
  counts.reserved += mapped;
  counts.reserved_peak = std::max(counts.reserved_peak, counts.reserved);
  block->mapped = true;
  block = merged(block);
  unused[block->small].insert(block);
  return block;
}
// A free block of at least `size` bytes, out of all sets, at the lowest address with room; null where the device has none.
Block* expand(int64_t size, bool small) {
  if (!ranges[small]) {
    const int64_t range = capacity + capacity / 8 / (20 * kMiB) * (20 * kMiB);
    ranges[small] = static_cast<char*>(mmap(nullptr, range, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    TORCH_CHECK(ranges[small] != MAP_FAILED, "no addresses");
    unmapped[small].insert(new Block{ranges[small], range, 0, small, false, nullptr, nullptr, false});
  }
  for (Block* block : unmapped[small]) {
    if (block->before && !block->before->used) block = block->before;
    int64_t room = 0;
    for (const Block* next = block; next && !next->used && room < size; next = next->behind) room += next->size;
    if (room < size) continue;
    if (!block->mapped) block = map_pieces(block, std::min(block->size, size));
    while (block && block->size < size) block = map_pieces(block->behind, std::min(block->behind->size, size - block->size));
    if (block) unused[small].erase(block);
    return block;
  }
  return nullptr;
}
void empty_cache() {
  if (expandable) {
    unmap_pieces(false);
    unmap_pieces(true);
    return;
  }
  for (auto& pool : unused)
    for (auto at = pool.begin(); at != pool.end();) {
      Block* block = *at;
      if (block->before || block->behind) { ++at; continue; }
      counts.reserved -= block->size;
      c10::free_cpu(block->address);
      at = pool.erase(at);
      delete block;
    }
}
Block* reserve(int64_t size) {
  const int64_t segment = size <= kSmall ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : (size + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
  if (counts.reserved + segment > allowed) empty_cache();
  if (counts.reserved + segment > allowed) return nullptr;
  counts.reserved += segment;
  counts.reserved_peak = std::max(counts.reserved_peak, counts.reserved);
  return new Block{static_cast<char*>(c10::alloc_cpu(segment)), segment, 0, size <= kSmall};
}
int64_t rounded(int64_t asked) {
  if (kDivisions < 2 || asked <= kBlock * kDivisions) return (asked + kBlock - 1) / kBlock * kBlock;
  const int64_t power = std::bit_floor(static_cast<uint64_t>(asked)), step = power / kDivisions;
  return (asked + step - 1) / step * step;
}
Block* take(int64_t asked) {
  const int64_t size = rounded(asked);
  auto& pool = unused[size <= kSmall];
  Block wanted{nullptr, size};
  auto found = pool.lower_bound(&wanted);
  if (found != pool.end() && (*found)->size >= (size < kMostSplit ? kMostSplit : size + 20 * kMiB)) found = pool.end();
  Block* block;
  if (found == pool.end()) {
    block = expandable ? expand(size, size <= kSmall) : reserve(size);
    if (!block && expandable) {
      empty_cache();
      block = expand(size, size <= kSmall);
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
  unused[block->small].insert(block);
}

void give_back(void* address) {
  if (!address) return;
  int64_t now, size;
  {
    std::lock_guard<std::mutex> guard(lock);
    const auto found = blocks.find(address);
    Block* block = found->second;
    size = block->size;
    now = add(*block, -1);
    blocks.erase(found);
    put_back(block);
  }
  c10::reportMemoryUsageToProfiler(address, -size, now, now, kDevice);
}

struct BlockAllocator final : public c10::Allocator {
  DataPtr allocate(size_t asked) override {
    if (asked == 0) return {nullptr, nullptr, &give_back, kDevice};
    int64_t now, size;
    void* address;
    {
      std::lock_guard<std::mutex> guard(lock);
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
  void copy_data(void* target, const void* source, std::size_t nbytes) const override { memcpy(target, source, nbytes); }
};
BlockAllocator allocator;

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

// The same bytes as a tensor of the CPU.
Tensor as_cpu(const Tensor& t) {
  if (!t.defined() || t.device().is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(kCPU));
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
  if (self.device() != src.device() && !non_blocking) waits("copy_");
  if (self.numel()) {
    Tensor target = as_cpu(self);
    target.copy_(as_cpu(src).expand_as(target));
  }
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
    if (impl->storage().nbytes()) memcpy(data.get(), impl->storage().data(), impl->storage().nbytes());
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
  return as_cpu(t).item();
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
  if (t.numel()) as_cpu(made).copy_(t);
  return made;
}

// Convolutions as cuDNN has them: which algorithm runs depends on the flags in force in that moment, and the fastest takes a
// workspace of twice the bytes of the tensor named, deterministic ones of half of them, and what needs no cuDNN unfolds one
// sample. The two slower ones compute in double precision, so that their bits are others.
// With `cudnn.benchmark` each thread that meets a convolution for the first time tries all algorithms, in a workspace of twenty times
// those bytes, and remembers which it took.
struct Convolution {
  bool fastest;
  DataPtr workspace;
  static void benchmark(const Tensor& t, const Tensor& weight, bool backward) {
    thread_local std::unordered_set<std::string> met;
    const std::string key = c10::str(t.sizes(), weight.sizes(), t.scalar_type(), backward);
    if (at::globalContext().benchmarkCuDNN() && met.insert(key).second) allocator.allocate(20 * t.numel() * t.element_size());
  }
  explicit Convolution(const Tensor& t) {
    const auto& flags = at::globalContext();
    const bool native = !flags.userEnabledCuDNN(), deterministic = flags.deterministicCuDNN() || flags.deterministicAlgorithms();
    fastest = !native && !deterministic;
    const int64_t nbytes = t.numel() * t.element_size();
    workspace = allocator.allocate(fastest ? 2 * nbytes : native ? nbytes / std::max<int64_t>(1, t.size(0)) : nbytes / 2);
    if (!fastest) std::this_thread::sleep_for(std::chrono::milliseconds(native ? 4 : 2));
  }
  Tensor in(const Tensor& t) const { return !t.defined() || fastest ? as_cpu(t) : as_cpu(t).to(kDouble); }
  Tensor out(const Tensor& t, const Tensor& like) const { return t.defined() ? to_device(t.to(like.scalar_type())) : t; }
};
Tensor convolve(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  Convolution::benchmark(input, weight, false);
  const Convolution by(input);
  std::optional<Tensor> b;
  if (bias && bias->defined()) b = by.in(*bias);
  return by.out(at::convolution(by.in(input), by.in(weight), b, stride, padding, dilation, transposed, output_padding, groups), input);
}
std::tuple<Tensor, Tensor, Tensor> convolve_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, OptionalIntArrayRef bias,
                                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Convolution::benchmark(input, weight, true);
  const Convolution by(input);
  auto [x, w, b] = at::convolution_backward(by.in(grad), by.in(input), by.in(weight), bias, stride, padding, dilation, transposed, output_padding, groups, mask);
  return {by.out(x, input), by.out(w, weight), by.out(b, weight)};
}
// Batch norm is cuDNN's too where that is enabled, and then saves a tensor more.
std::tuple<Tensor, Tensor, Tensor, Tensor> normalized(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                                            const std::optional<Tensor>& mean, const std::optional<Tensor>& variance,
                                                            bool training, double factor, double epsilon) {
  const auto cpu = [](const std::optional<Tensor>& t) { return t ? std::optional<Tensor>(as_cpu(*t)) : t; };
  auto [y, m, s] = at::native_batch_norm(as_cpu(input), as_cpu(weight), cpu(bias), cpu(mean), cpu(variance), training, factor, epsilon);
  return {to_device(y), to_device(m), to_device(s), at::zeros({64}, input.options().dtype(kByte))};
}
std::tuple<Tensor, Tensor, Tensor> normalized_backward(const Tensor& input, const Tensor& grad, const Tensor& weight,
                                                             const std::optional<Tensor>&, const std::optional<Tensor>&,
                                                             const std::optional<Tensor>& mean, const std::optional<Tensor>& scale,
                                                             double epsilon, const Tensor&) {
  auto [x, w, b] = at::native_batch_norm_backward(as_cpu(grad), as_cpu(input), as_cpu(weight), {}, {}, as_cpu(*mean), as_cpu(*scale), true, epsilon, {true, true, true});
  return {to_device(x), to_device(w), to_device(b)};
}
// LSTMs as cuDNN has them: the dropout between their layers comes out of a buffer of the device's that goes on from run to run. The first run after
// the generator's state was set fills it anew, from a number that the host waits for.
bool fill_anew = true;
Tensor recurrent_dropout(const Tensor& like, double p) {
  static Tensor buffer;
  static Generator bits;
  if (std::exchange(fill_anew, false)) {
    waits("item");
    bits = at::detail::createCPUGenerator(at::empty({}, kLong).random_().item<int64_t>());
    buffer = at::empty({2 << 20}, like.options().dtype(kByte));
  }
  return to_device(at::empty(like.sizes(), like.options().device(kCPU)).bernoulli_(1 - p, bits).div_(1 - p));
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
  std::vector<Tensor> found;
  for (const Tensor& t : tensors) found.push_back(as_cpu(t));
  return found;
}
std::vector<Tensor> lstm_forward(TensorList given, const std::optional<Tensor>& masks, bool batch_first) {
  const auto made = layers_on_cpu(as_cpus(given), masks ? std::optional(as_cpu(*masks)) : masks, batch_first);
  return {to_device(made[0]), to_device(made[1]), to_device(made[2])};
}
std::vector<Tensor> lstm_backward(TensorList gradients, TensorList given, const std::optional<Tensor>& masks, bool batch_first) {
  const AutoGradMode with_graph(true);
  std::vector<Tensor> leaves, found;
  for (const Tensor& t : as_cpus(given)) leaves.push_back(t.detach().requires_grad_(true));
  const auto made = layers_on_cpu(leaves, masks ? std::optional(as_cpu(*masks)) : masks, batch_first);
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
      const auto like = given[0].new_empty({layers - 1, given[0].size(0), given[0].size(1), width});
      masks = operation<Tensor(const Tensor&, double)>("standin::recurrent_dropout").call(like, p);
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
// Every other operation: arguments to the CPU, the CPU's kernel, results back.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  for (const char* waiting : {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2"})
    if (name == waiting) waits(waiting);
  const Inside guard;
  at::native::cpu_fallback(op, stack);
}
}  // namespace

namespace at { namespace {
struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kCount; }
  int getNumGPUs() const override { return kCount; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index < 0 ? current : index); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void deviceSynchronize(DeviceIndex) const override {}
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
}
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
static int registered = (c10::SetAllocator(DeviceType::CUDA, &allocator, 10), 0);

static int recurrent = (at::native::lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm), 0);

TORCH_LIBRARY(standin, m) {
  m.def("recurrent_dropout(Tensor like, float p) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("lstm(Tensor[] given, Tensor? masks, bool batch_first) -> Tensor[]");
  m.def("lstm_backward(Tensor[] gradients, Tensor[] given, Tensor? masks, bool batch_first) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(standin, CUDA, m) {
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
  m.impl("convolution", convolve);
  m.impl("convolution_backward", convolve_backward);
  m.impl("cudnn_batch_norm", normalized);
  m.impl("cudnn_batch_norm_backward", normalized_backward);
}

// -- for standin.py

extern "C" {
int64_t standin_allocated() { return counts.allocated; }
int64_t standin_allocated_peak() { return counts.allocated_peak; }
int64_t standin_requested() { return counts.requested; }
int64_t standin_requested_peak() { return counts.requested_peak; }
int64_t standin_reserved() { return counts.reserved; }
int64_t standin_reserved_peak() { return counts.reserved_peak; }
int64_t standin_large_peak() { return counts.large_peak; }
int64_t standin_capacity() { return capacity; }
void standin_allow(int64_t nbytes) { allowed = nbytes; }
void standin_empty_cache() {
  std::lock_guard<std::mutex> guard(lock);
  empty_cache();
}
void standin_reset_peak() {
  std::lock_guard<std::mutex> guard(lock);
  counts.allocated_peak = counts.allocated;
  counts.requested_peak = counts.requested;
  counts.reserved_peak = counts.reserved;
  counts.large_peak = counts.large;
}
void standin_strict(int mode) { strict = mode; }
void standin_fill_anew() { fill_anew = true; }
int standin_count() { return kCount; }
int standin_current() { return current; }
int standin_exchange(int index) { return std::exchange(current, static_cast<DeviceIndex>(index < 0 ? current : index)); }
}

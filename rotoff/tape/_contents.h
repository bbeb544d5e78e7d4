// Contents, references and slots, operators and settings: what contents.py and operators.py say, below Python.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <atomic>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace rotoff {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::Storage;
using torch::jit::Stack;

// The tape's own key. Nothing is registered on it, and it lies directly below Python's: modes, wrapper subclasses and
// transforms act first.
constexpr auto KEY = DispatchKey::Fake;
constexpr auto IN_PYTHON = DispatchKey::TESTING_ONLY_GenericMode;  // of dispatch.py
static_assert(static_cast<int>(KEY) + 1 == static_cast<int>(DispatchKey::Python), "choose another key for this torch");
const DispatchKeySet BELOW(DispatchKeySet::FULL_AFTER, KEY);
// Autograd, modes, autocast, transforms and the tape; not what an operation needs to read its arguments.
const DispatchKeySet ABOVE = (DispatchKeySet(DispatchKeySet::FULL) ^ BELOW)
                                 .remove(DispatchKey::Conjugate)
                                 .remove(DispatchKey::Negative)
                                 .remove(DispatchKey::ZeroTensor);
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{ABOVE};
};

inline std::string CHANGED, LOST;  // errors, from Python
int64_t checksum(const Storage& storage);

inline std::string changed_text(c10::IntArrayRef shape) {
  std::string told, text = CHANGED;
  for (size_t n = 0; n < shape.size(); ++n) told += (n ? ", " : "") + std::to_string(shape[n]);
  return text.replace(text.find("{}"), 2, "(" + told + (shape.size() == 1 ? ",)" : ")"));
}

// -- operators

// What chooses kernels below autograd: getter, setter.
struct Setting {
  int (*get)(at::Context&);
  void (*put)(at::Context&, int);
};
using Reduction = at::CuBLASReductionOption;
inline bool reduced(int r) { return Reduction(r) == Reduction::AllowReducedPrecisionWithSplitK; }
inline bool split(int r) { return Reduction(r) != Reduction::DisallowReducedPrecisionDisallowSplitK; }
template <at::Float32Backend B, at::Float32Op O>
void put_precision(at::Context& c, int x) {
  c.setFloat32Precision(B, O, at::Float32Precision::NONE);
  if (int(c.float32Precision(B, O)) != x)  // else it follows that of the backend, or of all
    c.setFloat32Precision(B, O, at::Float32Precision(x));
}
#define PRECISION(B, O)                                                                       \
  { [](at::Context& c) { return int(c.float32Precision(at::Float32Backend::B, at::Float32Op::O)); }, \
    put_precision<at::Float32Backend::B, at::Float32Op::O> }
#define SETTING(getter, setter) \
  { [](at::Context& c) { return int(c.getter()); }, [](at::Context& c, int x) { c.setter(x); } }
inline const Setting SETTINGS[] = {
    {[](at::Context&) { return int(c10::GradMode::is_enabled()); },
     [](at::Context&, int x) { c10::GradMode::set_enabled(x); }},
    {[](at::Context&) { return int(c10::get_default_dtype_as_scalartype()); },
     [](at::Context&, int x) { c10::set_default_dtype(c10::scalarTypeToTypeMeta(c10::ScalarType(x))); }},
    SETTING(userEnabledNNPACK, setUserEnabledNNPACK),
    SETTING(userEnabledMkldnn, setUserEnabledMkldnn),
    SETTING(userEnabledCuDNN, setUserEnabledCuDNN),
    SETTING(benchmarkCuDNN, setBenchmarkCuDNN),
    SETTING(deterministicCuDNN, setDeterministicCuDNN),
    {[](at::Context& c) { return int(c.allowFP16ReductionCuBLAS()); },
     [](at::Context& c, int x) { c.setAllowFP16ReductionCuBLAS(reduced(x), split(x)); }},
    {[](at::Context& c) { return int(c.allowBF16ReductionCuBLAS()); },
     [](at::Context& c, int x) { c.setAllowBF16ReductionCuBLAS(reduced(x), split(x)); }},
    SETTING(allowFP16AccumulationCuBLAS, setAllowFP16AccumulationCuBLAS),
    {[](at::Context& c) { return int(c.blasPreferredBackend()); },
     [](at::Context& c, int x) { c.setBlasPreferredBackend(at::BlasBackend(x)); }},
    PRECISION(CUDA, CONV), PRECISION(CUDA, RNN), PRECISION(CUDA, MATMUL),
    PRECISION(MKLDNN, CONV), PRECISION(MKLDNN, RNN), PRECISION(MKLDNN, MATMUL),
    SETTING(userEnabledFlashSDP, setSDPUseFlash),
    SETTING(userEnabledMemEfficientSDP, setSDPUseMemEfficient),
    SETTING(userEnabledMathSDP, setSDPUseMath),
    SETTING(userEnabledCuDNNSDP, setSDPUseCuDNN),
    {[](at::Context& c) { return c.deterministicAlgorithms() + 2 * c.deterministicAlgorithmsWarnOnly(); },
     [](at::Context& c, int x) { c.setDeterministicAlgorithms(x % 2, x / 2); }},
};
using Settings = std::array<int, std::size(SETTINGS)>;

inline Settings settings() {
  Settings present;
  for (size_t n = 0; n < present.size(); ++n) present[n] = SETTINGS[n].get(at::globalContext());
  return present;
}

inline void put_settings(const Settings& wanted) {
  for (size_t n = 0; n < wanted.size(); ++n)
    if (SETTINGS[n].get(at::globalContext()) != wanted[n]) SETTINGS[n].put(at::globalContext(), wanted[n]);
}

struct SettingsKept {
  Settings before = settings();
  ~SettingsKept() { put_settings(before); }
};

// zlib's, which Python has.
inline uint32_t crc32(const std::string& text) {
  uint32_t sum = ~0u;
  for (unsigned char c : text) {
    sum ^= c;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (sum & 1 ? 0xEDB88320u : 0);
  }
  return ~sum;
}

// What the schema of an operator says; see operators.py.
struct Kind {
  bool view, random, makes = false, kept;
  std::vector<bool> writes;  // for each argument
  uint32_t name_sum;

  explicit Kind(const OperatorHandle& op) {
    const auto& schema = op.schema();
    view = !schema.returns().empty();
    for (const auto& result : schema.returns()) {
      const auto* alias = result.alias_info();
      view = view && alias && !alias->isWrite();
      makes = makes || !alias;
    }
    random = op.hasTag(at::Tag::nondeterministic_seeded);
    for (const auto& argument : schema.arguments()) {
      const auto* alias = argument.alias_info();
      const auto& name = argument.name();
      // batch norms change their running statistics, and their schemas do not say so
      writes.push_back((alias && alias->isWrite()) || name == "running_mean" || name == "running_var");
    }
    const auto& name = schema.name();
    const auto colons = name.find("::");
    const auto space = name.substr(0, colons);
    kept = space.find("c10d") != std::string::npos;
    const auto& overload = schema.overload_name();
    name_sum = crc32(space + "." + name.substr(colons + 2) + "." + (overload.empty() ? "default" : overload));
  }
};

// An operator that goes may leave its address to another one.
inline std::atomic<int> operators_gone{0};
struct Gone : c10::OpRegistrationListener {
  void onOperatorRegistered(const OperatorHandle&) override {}
  void onOperatorDeregistered(const OperatorHandle&) override { ++operators_gone; }
};

inline std::shared_ptr<const Kind> kind_of(const OperatorHandle& op) {
  thread_local ska::flat_hash_map<const c10::FunctionSchema*, std::shared_ptr<const Kind>> kinds;
  thread_local int gone = 0;
  if (gone != operators_gone) kinds.clear(), gone = operators_gone;
  auto& kind = kinds[&op.schema()];
  if (!kind) kind = std::make_shared<Kind>(op);
  return kind;
}

// Calls `f` with the number within the list, or -1, of each tensor of an argument.
template <class F>
void each_tensor(const IValue& x, F f) {
  if (x.isTensor()) {
    f(-1, x.toTensor());
  } else if (x.isTensorList()) {
    int n = 0;
    for (const Tensor& t : x.toTensorList()) f(n++, t);
  } else if (x.isOptionalTensorList()) {
    int n = 0;
    for (const IValue& item : x.toListRef()) f(n++, item.isTensor() ? item.toTensor() : Tensor());
  }
}

// Calls `f` with each tensor that an operator has returned and its number; lists are taken apart, all else counts.
template <class F>
void each_result(c10::ArrayRef<IValue> results, F f) {
  int first = 0;
  for (const IValue& x : results) {
    each_tensor(x, [&](int n, const Tensor& t) { f(first + std::max(n, 0), t); });
    first += x.isList() ? static_cast<int>(x.toListRef().size()) : 1;
  }
}

// Puts a tensor into an argument; a list must be the argument's own.
inline void put(IValue& x, int item, const Tensor& t) {
  if (item < 0) {
    x = t;
  } else if (x.isTensorList()) {
    x.toTensorList().set(item, t);
  } else {
    x.toOptionalTensorList().set(item, t.defined() ? std::optional<Tensor>(t) : std::nullopt);
  }
}

inline IValue own(const IValue& x) {
  if (x.isTensorList()) return x.toTensorList().copy();
  if (x.isOptionalTensorList()) return x.toOptionalTensorList().copy();
  return x;
}

// The generator from which an operator draws; none if it is not known.
inline at::Generator generator_of(c10::ArrayRef<IValue> args) {
  std::optional<c10::Device> where;
  for (const auto& x : args)
    if (x.isGenerator()) return x.toGenerator();
  for (const auto& x : args)
    if (x.isDevice()) where = x.toDevice();
  for (const auto& x : args)
    each_tensor(x, [&](int, const Tensor& t) { if (t.defined() && !where) where = t.device(); });
  const auto device = where.value_or(at::kCPU);
  return device.is_cpu() || device.is_cuda() ? at::globalContext().defaultGenerator(device) : at::Generator();
}

// -- contents

// The version counter of a tensor, and what it said. It outlives the tensor, and has none of its bytes.
struct Witness {
  c10::VariableVersion counter;
  uint32_t version;

  explicit Witness(const Tensor& t) : counter(t.unsafeGetTensorImpl()->version_counter()), version(now()) {}
  uint32_t now() const { return counter.enabled() ? counter.current_version() : 0; }
  bool changed() const { return now() != version; }
};

constexpr int RESIDENT = -1;
constexpr size_t SMALL = 1 << 16;

// One content of one storage; see contents.py.
struct Content {
  const int op, out, stage;
  const size_t nbytes;
  int maker, lent = 0;
  bool read = false, once = false;
  Storage held;
  std::weak_ptr<Content> next;  // the operation that made it has it

  Content(int op, int out, int stage, const Storage& storage)
      : op(op), out(out), stage(stage), nbytes(storage.nbytes()), maker(op), made_in_(storage.getWeakStorageImpl()),
        weak_(made_in_) {}

  static std::shared_ptr<Content> resident(const Storage& storage, const Tensor& t) {
    auto content = std::make_shared<Content>(RESIDENT, 0, 0, storage);
    content->held = storage;
    content->watch(Witness(t));
    content->shape_ = t.sizes().vec();
    return content;
  }

  void watch(Witness witness) { witness_ = std::move(witness); }

  void overwrites(int by) {
    maker = by;
    new_ = true;
  }

  // Autograd counts a write after the operation has run, and before another one begins.
  void settle() {
    if (new_ && witness_ && witness_->now() == witness_->version + 1) ++witness_->version;
    new_ = false;
  }

  void hold(const Storage& storage) {
    if (!weak_ || *weak_ != storage.getWeakStorageImpl()) {
      weak_ = storage.getWeakStorageImpl();
      witness_.reset();
      sum_.reset();
    }
    held = storage;
  }

  // Finds this content in `storage` from now on, as long as something has it.
  void is_in(const Storage& storage) {
    if (!weak_ || *weak_ != storage.getWeakStorageImpl()) weak_ = storage.getWeakStorageImpl();
  }

  // Keeps a copy of what others may change unseen.
  void keep_copy(Storage copy) {
    held = std::move(copy);
    witness_.reset();
  }

  void lose(Storage copy) {
    held = std::move(copy);
    weak_.reset();
    witness_.reset();
  }

  Storage storage(bool seen) const {
    Storage found = held;
    if (!found && weak_ && (seen || witness_))
      if (auto alive = weak_->lock()) found = Storage(std::move(alive));
    if (!found || found.nbytes() != nbytes) return Storage();  // its owner has emptied it, as FSDP does
    if (changed()) {
      if (maker == RESIDENT) throw std::runtime_error(changed_text(shape_));
      return Storage();
    }
    if (sum_ && !seen && checksum(found) != *sum_) return Storage();
    return found;
  }

  bool changed() const { return witness_ && witness_->changed(); }

  bool held_in(const Storage& storage) const { return held && held.is_alias_of(storage); }

  void seal(bool of_residents, size_t owned) {
    settle();
    if (op == RESIDENT || !read || witness_ || !held) return;
    const bool in_python = held.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();  // lives as long, and counts
    if (held.use_count() <= 1 + in_python + owned + lent) return;
    if (of_residents && !once)
      held = Storage();
    else
      sum_ = checksum(held);
  }

 private:
  // So that no other storage gets its address, by which a tape knows it.
  const c10::weak_intrusive_ptr<c10::StorageImpl> made_in_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> weak_;
  std::optional<Witness> witness_;
  std::vector<int64_t> shape_;  // of the tensor through which a resident was seen first
  std::optional<int64_t> sum_;
  bool new_ = false;  // whether an operation has just overwritten a resident
};

using ContentPtr = std::shared_ptr<Content>;

inline Tensor tensor_on(const Storage& storage, caffe2::TypeMeta dtype) {
  const DispatchKeySet keys(c10::computeDispatchKey(std::nullopt, at::kStrided, storage.device()));
  return at::detail::make_tensor<c10::TensorImpl>(Storage(storage), keys, dtype);
}

inline Tensor bytes_in(const Storage& storage) {
  auto t = tensor_on(storage, caffe2::TypeMeta::Make<uint8_t>());
  t.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return t;
}

inline Storage clone(const Storage& storage) {
  BelowAutograd below;
  return bytes_in(storage).clone().storage();
}

// A tensor without its bytes; arg, item: where the operation has it.
struct Reference {
  ContentPtr content, into;
  c10::SmallVector<int64_t, 5> size, stride;
  int64_t offset;
  caffe2::TypeMeta dtype;
  bool conj, neg;
  int arg = 0, item = -1;

  Reference(ContentPtr content, const Tensor& t)
      : content(std::move(content)), size(t.sizes().begin(), t.sizes().end()),
        stride(t.strides().begin(), t.strides().end()), offset(t.storage_offset()), dtype(t.dtype()),
        conj(t.is_conj()), neg(t.is_neg()) {}

  Tensor on(const Storage& storage) const {
    auto t = tensor_on(storage, dtype);
    t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
    t._set_conj(conj);
    t._set_neg(neg);
    return t;
  }
};

// What autograd keeps of a saved tensor: a resident itself, else a reference, and the bytes while they are kept.
struct Slot {
  int stage;
  Witness witness;
  Tensor tensor;
  std::optional<Reference> reference;
  Storage own;

  Slot(int stage, const Tensor& t) : stage(stage), witness(t) {}

  void give(const Storage& storage) {
    own = storage;
    reference->content->is_in(storage);
  }

  void check() const {
    if (witness.changed())
      throw std::runtime_error(changed_text(reference ? c10::IntArrayRef(reference->size) : tensor.sizes()));
  }
};

// Whether a tensor is no more than a geometry of a storage; see contents.py.
inline bool is_plain(const Tensor& t) {
  static const DispatchKeySet odd({DispatchKey::Python, DispatchKey::Quantized, DispatchKey::MkldnnCPU,
                                   DispatchKey::Sparse, DispatchKey::SparseCsr, DispatchKey::NestedTensor,
                                   DispatchKey::BatchedNestedTensor, DispatchKey::ZeroTensor,
                                   DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                   DispatchKey::Functionalize, KEY});
  if (!t.defined()) return false;
  auto* impl = t.unsafeGetTensorImpl();
  return !impl->key_set().has_any(odd) && impl->has_storage() && impl->layout() == at::kStrided && !impl->is_meta();
}

// A number of the model's code that torch has made a tensor of: Python sees the number.
inline bool is_number(const Tensor& t) { return t.defined() && t.unsafeGetTensorImpl()->is_wrapped_number(); }

}  // namespace rotoff

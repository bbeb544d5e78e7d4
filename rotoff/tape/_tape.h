// The tape: Note [The rules of the tape] in tape.py says what it does, and functions have that file's names.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "_contents.h"

namespace rotoff {

struct Operation {
  OperatorHandle op;
  int stage;
  std::vector<IValue> args;  // without its plain tensors
  std::vector<Reference> references;
  std::vector<ContentPtr> made;
  at::Generator generator;
  Tensor state;
  std::shared_ptr<const Settings> settings;

  bool reads_residents() const {
    return std::all_of(references.begin(), references.end(), [](const Reference& r) { return r.content->op == RESIDENT; });
  }

  // Calls `f` with what it makes: the contents of new storages, then those of storages from before.
  template <class F>
  void each_new(F f) const {
    for (const auto& content : made) f(content);
    for (const auto& r : references)
      if (r.into && r.into->op != RESIDENT) f(r.into);
  }
};

// A tensor that an operation changes: the place of its reference, and its storage before.
struct Write {
  size_t reference;
  Tensor tensor;
  Storage storage;
};
using Writes = c10::SmallVector<Write, 2>;
using NewContents = c10::SmallVector<std::pair<c10::StorageImpl*, ContentPtr>, 4>;

inline ContentPtr find(const NewContents& contents, c10::StorageImpl* key) {
  for (const auto& [other, content] : contents)
    if (other == key) return content;
  return nullptr;
}

// Of operators, as class Known of tape.py.
struct Known {
  ska::flat_hash_set<uint64_t> sure;
  std::set<std::pair<uint64_t, int>> held;
};

struct Tape {
  std::vector<Operation> operations;
  std::map<int, int> begins{{0, 0}};
  int stage = 0, reached = 0;
  int64_t position = 0, ahead = -1;
  std::function<void()> come_to;
  uint64_t key = 0;
  bool paused = false;
  bool in_python = false;  // whether it only tells a tape in Python of each operation
  bool unsure = false;  // whether there was an operation that is not known
  int64_t replayed = 0;
  std::shared_ptr<const Known> known;
  std::recursive_mutex lock;

  // Of the thread that records, the innermost tape. An operation is noted by it, and then by those around it.
  static inline thread_local Tape* recording = nullptr;

  void begin() {
    outer_ = recording;
    recording = this;
    seen_ = true;
    c10::impl::tls_set_dispatch_key_included(KEY, true);
  }

  void end() {
    recording = outer_;
    if (!recording) c10::impl::tls_set_dispatch_key_included(KEY, false);
    ska::flat_hash_map<c10::StorageImpl*, size_t> owned;
    for (const auto& [_, slots] : slots_)
      for (const auto& weak : slots)
        if (const auto slot = weak.lock(); slot && slot->own) ++owned[slot->own.unsafeGetStorageImpl()];
    for (auto& [_, content] : contents_)
      content->seal(content->op != RESIDENT && operations[content->op].reads_residents(),
                    content->held ? owned[content->held.unsafeGetStorageImpl()] : 0);
    contents_.clear();
    seen_ = false;
  }

  void enter(int next) {
    if (unsure)
      for (size_t n = begins[stage]; n < operations.size(); ++n) operations[n].each_new(hold_present);
    stage = next;
    key = next;
    begins[stage] = static_cast<int>(operations.size());
  }

  void let_go(int of) {
    for (int n = begins.at(of); n < begins.at(stage); ++n)
      operations[n].each_new([](const ContentPtr& content) { content->held = Storage(); });
  }

  // What the dispatcher calls for each operation below autograd. As a mode of Python, a tape does not see what runs
  // while modes are off.
  static void dispatched(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const bool seen = recording && !recording->paused && !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python);
    if (seen && recording->in_python) {
      Outside outside;
      op.callBoxedForDispatchKey(IN_PYTHON, *stack);
      auto& last = stack->back();  // of ``nn.Parameter(t)`` it is one that Python must not have seen as a tensor
      if (kind_of(op)->view && last.isTensor()) last = without_graph(last.toTensor());
      return;
    }
    c10::impl::ExcludeDispatchKeyGuard unseen(KEY);
    if (seen)
      recording->record(op, keys, stack);
    else
      op.redispatchBoxed(keys & BELOW, stack);
  }

  ContentPtr content_of(const Tensor& t) {
    const auto& storage = t.storage();
    auto& content = contents_[storage.unsafeGetStorageImpl()];
    if (content) content->settle();
    if (!content || (content->op == RESIDENT && content->held && content->changed()))
      content = Content::resident(storage, t);
    if (content->op == RESIDENT && !storage.resizable()) {  // NumPy's memory: it may change unseen
      if (content->held_in(storage) || !same_bytes(content->held, storage)) {
        content = Content::resident(storage, t);
        content->keep_copy(clone(storage));
      }
    }
    return content;
  }

  // Tells that the position ahead is reached.
  void look() {
    if (position != ahead) return;
    ahead = -1;
    come_to();
  }

  std::shared_ptr<Slot> pack(const Tensor& t, const std::function<bool(int, int)>& is_kept) {
    look();
    ++position;
    auto slot = std::make_shared<Slot>(stage, t);
    const auto& storage = t.storage();
    const auto found = contents_.find(storage.unsafeGetStorageImpl());
    if (found == contents_.end() || found->second->op == RESIDENT) {
      slot->tensor = t;
      return slot;
    }
    const auto& content = found->second;
    slot->reference.emplace(content, t);
    content->watch(slot->witness);
    slots_[stage].push_back(slot);
    const int n = content->op - begins[stage];
    if (unsure || is_kept(n, content->out)) slot->own = storage;
    return slot;
  }

  // The slots of a stage that autograd still has.
  std::vector<std::shared_ptr<Slot>> live(int stage) const {
    std::vector<std::shared_ptr<Slot>> slots;
    const auto found = slots_.find(stage);
    if (found == slots_.end()) return slots;
    for (const auto& weak : found->second) {
      auto slot = weak.lock();
      if (!slot) continue;
      // PyTorch saves memory and not contents: a write that changes no version counts
      while (auto later = slot->reference->content->next.lock()) slot->reference->content = later;
      slots.push_back(std::move(slot));
    }
    return slots;
  }

  ContentPtr content(int stage, int n, int out) const {
    const auto first = begins.find(stage);
    if (first == begins.end() || first->second + n >= static_cast<int>(operations.size())) return nullptr;
    ContentPtr found;
    operations[first->second + n].each_new([&](const ContentPtr& c) { if (!found && c->out == out) found = c; });
    return found;
  }

  std::vector<Storage> make(const std::vector<ContentPtr>& contents);

 private:
  friend class Making;

  ska::flat_hash_map<c10::StorageImpl*, ContentPtr> contents_;  // the present ones
  ska::flat_hash_map<int, std::vector<std::weak_ptr<Slot>>> slots_;
  std::shared_ptr<const Settings> settings_;
  Tape* outer_ = nullptr;
  bool seen_ = false;  // whether all writes so far were seen

  static void hold_present(const ContentPtr& content) {
    if (auto storage = content->storage(true)) content->hold(storage), content->once = true;
  }

  static bool same_bytes(const Storage& a, const Storage& b) {
    BelowAutograd below;
    return a.nbytes() == b.nbytes() && bytes_in(a).equal(bytes_in(b));
  }

  // Within, the tapes around the recording one see what runs.
  struct Outside {
    Tape* inner = recording;
    Outside() { recording = inner->outer_; }
    ~Outside() { recording = inner; }
  };

  static void run(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    Outside outside;
    dispatched(op, keys, stack);
  }

  void record(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const auto kind = kind_of(op);
    const auto args = torch::jit::last(*stack, kind->writes.size());
    if (kind->view && all_plain(args)) return run(op, keys, stack);
    look();
    Writes writes;
    auto noted = operation(op, *kind, args, writes);
    for (const auto& write : writes) {
      auto& content = *noted.references[write.reference].content;
      const bool needed = content.op != RESIDENT || content.read || kind->makes || content.nbytes <= SMALL;
      if (needed && content.held_in(write.storage)) content.lose(clone(write.storage));
    }
    run(op, keys, stack);
    const auto made = new_contents(noted, *kind, writes, torch::jit::last(*stack, op.schema().returns().size()));
    if (kind->kept)
      for (const auto& [_, content] : made) hold_present(content);
    if (std::any_of(made.begin(), made.end(), [](const auto& one) { return one.second->maker != RESIDENT; }))
      note(std::move(noted), *kind, made);
  }

  static bool all_plain(c10::ArrayRef<IValue> args) {
    bool all = true;
    for (const auto& x : args) each_tensor(x, [&](int, const Tensor& t) { all = all && (!t.defined() || is_plain(t)); });
    return all;
  }

  // Returns the operation as it is before it runs, and in `writes` the tensors that it changes.
  Operation operation(const OperatorHandle& op, const Kind& kind, c10::ArrayRef<IValue> args, Writes& writes) {
    Operation noted{op, stage, {}, {}, {}, {}, {}, nullptr};
    noted.args.reserve(args.size());
    for (size_t n = 0; n < args.size(); ++n) {
      noted.args.push_back(own(args[n]));
      each_tensor(args[n], [&](int item, const Tensor& t) {
        if (!is_plain(t) || is_number(t)) {
          if (t.defined() && t.requires_grad()) put(noted.args[n], item, without_graph(t));
          return;
        }
        if (kind.writes[n]) writes.push_back({noted.references.size(), t, t.storage()});
        put(noted.args[n], item, Tensor());
        auto& reference = noted.references.emplace_back(content_of(t), t);
        reference.arg = static_cast<int>(n);
        reference.item = item;
      });
    }
    if (kind.random && (noted.generator = generator_of(args)).defined()) {
      BelowAutograd below;
      std::lock_guard<std::mutex> alone(noted.generator.mutex());
      noted.state = noted.generator.get_state();
    }
    return noted;
  }

  // Its graph would hold the slots, and these the tape.
  static Tensor without_graph(const Tensor& t) {
    auto* impl = t.unsafeGetTensorImpl();
    return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
  }

  // Returns the contents that an operation has just made.
  NewContents new_contents(Operation& op, const Kind& kind, const Writes& writes, c10::ArrayRef<IValue> results) {
    const int number = static_cast<int>(operations.size());
    NewContents made;
    for (const auto& write : writes) {
      auto* key = write.storage.unsafeGetStorageImpl();
      if (write.tensor.storage().unsafeGetStorageImpl() != key) continue;  // set_: what it shows now is not of this tape
      auto& reference = op.references[write.reference];
      auto content = find(made, key);
      if (!content) {
        auto& old = *reference.content;
        content = old.op == RESIDENT
            ? Content::resident(write.storage, write.tensor)
            : std::make_shared<Content>(number, -1 - static_cast<int>(made.size()), stage, write.storage);
        const bool copied = old.held && !old.held_in(write.storage);
        if (old.op == RESIDENT && copied) content->overwrites(number);
        if (!copied) old.lose(Storage());
        old.next = content;
        made.emplace_back(key, contents_[key] = content);
      }
      reference.into = content;
    }
    if (kind.view) return made;
    each_result(results, [&](int n, const Tensor& t) {
      if (!is_plain(t)) return;
      auto* key = t.storage().unsafeGetStorageImpl();
      if (find(made, key)) return;
      auto& content = contents_[key];
      if (content && std::any_of(op.references.begin(), op.references.end(),
                                 [&](const Reference& r) { return r.content == content; }))
        return;
      content = std::make_shared<Content>(number, n, stage, t.storage());
      op.made.push_back(content);
      made.emplace_back(key, content);
    });
    return made;
  }

  void note(Operation op, const Kind& kind, const NewContents& made) {
    key = key * 0x5851F42D4C957F2D + kind.name_sum;
    for (const auto& reference : op.references) {
      reference.content->read = true;
      for (auto n : reference.size) key = key * 31 + static_cast<uint64_t>(n) + 1;
    }
    const auto now = rotoff::settings();
    if (!settings_ || *settings_ != now) settings_ = std::make_shared<Settings>(now);
    op.settings = settings_;
    operations.push_back(std::move(op));
    ++position;
    if (!known) return;
    unsure = unsure || !known->sure.count(key);
    for (const auto& [_, content] : made)
      if (content->op != RESIDENT && known->held.count({key, content->out})) hold_present(content);
  }
};

// Contents that are wanted, made again: what of a backward slice is not there.
class Making {
 public:
  Making(Tape& tape, const std::vector<ContentPtr>& contents) : tape_(tape) {
    for (const auto& content : contents) uses_[content.get()].wanted = true;
    find_slice(contents);
    for (int number : order_)
      for (const auto& reference : tape.operations[number].references) uses_[reference.content.get()].last = number;
  }

  void run() {
    if (order_.empty()) return;
    BelowAutograd below;
    SettingsKept kept;
    for (int number : order_) {
      run(number);
      ++tape_.replayed;
    }
  }

  const Storage& operator[](const ContentPtr& content) { return uses_[content.get()].storage; }

 private:
  struct Use {
    Storage storage;
    bool wanted = false, there = false;
    int last = -1;  // the last operation that reads it
    bool needed_after(int number) const { return wanted || last > number; }
  };

  Tape& tape_;
  ska::flat_hash_map<Content*, Use> uses_;  // of all that is wanted or read; none is added while operations run
  std::vector<int> order_;

  // Finds what is there, and in `order_` the operations that make the rest.
  void find_slice(std::vector<ContentPtr> todo) {
    ska::flat_hash_set<Content*> seen;
    std::vector<bool> taken(tape_.operations.size());
    while (!todo.empty()) {
      const auto content = std::move(todo.back());
      todo.pop_back();
      if (!seen.insert(content.get()).second) continue;
      if (auto storage = content->storage(tape_.seen_)) {
        auto& use = uses_[content.get()];
        use.storage = std::move(storage);
        use.there = true;
      } else if (content->maker == RESIDENT) {
        throw std::runtime_error(LOST);
      } else if (!taken[content->maker]) {
        taken[content->maker] = true;
        order_.push_back(content->maker);
        for (const auto& reference : tape_.operations[content->maker].references) todo.push_back(reference.content);
      }
    }
    std::sort(order_.begin(), order_.end());
  }

  void run(int number) {
    auto& op = tape_.operations[number];
    c10::SmallVector<std::pair<Content*, Storage>, 2> changed;
    auto storage_of = [&](const ContentPtr& content) -> Storage& {
      for (auto& [other, storage] : changed)
        if (other == content.get()) return storage;
      return uses_[content.get()].storage;
    };
    for (const auto& r : op.references) {
      auto& use = uses_[r.content.get()];
      if (r.into && &storage_of(r.content) == &use.storage)
        changed.emplace_back(r.content.get(), use.there || use.needed_after(number) ? clone(use.storage) : use.storage);
    }
    Stack stack(op.args);
    int listed = -1;
    for (const auto& r : op.references) {
      if (r.item >= 0 && listed != r.arg) stack[r.arg] = own(op.args[r.arg]), listed = r.arg;
      put(stack[r.arg], r.item, r.on(storage_of(r.content)));
    }
    put_settings(*op.settings);
    call(op, stack);
    if (!op.made.empty())
      each_result(stack, [&](int n, const Tensor& t) {
        for (const auto& content : op.made)
          if (content->out == n) take(content, number, t.storage());
      });
    for (const auto& r : op.references)
      if (r.into && r.into->maker != RESIDENT) take(r.into, number, storage_of(r.content));
    for (const auto& r : op.references)
      if (auto& use = uses_[r.content.get()]; !use.needed_after(number)) use.storage = Storage();
  }

  // Runs the operation with the generator's state of then.
  static void call(const Operation& op, Stack& stack) {
    struct State {
      at::Generator generator;
      Tensor now;
      explicit State(const Operation& op) : generator(op.generator) {
        if (!op.state.defined()) return;
        std::lock_guard<std::mutex> alone(generator.mutex());
        now = generator.get_state();
        generator.set_state(op.state);
      }
      ~State() {
        if (!now.defined()) return;
        std::lock_guard<std::mutex> alone(generator.mutex());
        generator.set_state(now);
      }
    } state(op);
    op.op.callBoxed(&stack);
  }

  void take(const ContentPtr& content, int number, const Storage& storage) {
    const auto found = uses_.find(content.get());
    if (found != uses_.end() && found->second.needed_after(number) && !found->second.storage)
      found->second.storage = storage;
  }
};

inline std::vector<Storage> Tape::make(const std::vector<ContentPtr>& contents) {
  Making making(*this, contents);
  making.run();
  std::vector<Storage> found;
  for (const auto& content : contents) found.push_back(making[content]);
  return found;
}

}  // namespace rotoff

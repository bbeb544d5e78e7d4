// Streams and events of the stand-in, as late as they may be.
//
// A stream is a queue of tasks, and one thread, the device, runs them. A task runs when the host waits for it, when another stream's task has
// to come after it, and else at random. So kernels and copies come in any order that streams and events allow, and where a wait is left out,
// bytes are read before they are written or after they are gone. STANDIN_SEED gives another order.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace standin {

struct Queue;
struct Mark { // a point of a stream's work
  Queue* queue;
  int64_t position;
  bool passed = false;
  std::chrono::steady_clock::time_point time{};
};
struct Task {
  std::function<void()> run;
  std::shared_ptr<Mark> after; // that must be passed before
  bool sleeps = false; // goes on only where somebody waits for it
};
struct Queue {
  std::deque<Task> tasks;
  int64_t done = 0;
  int64_t issued() const { return done + static_cast<int64_t>(tasks.size()); }
};

// All below live for as long as the process, and `device` is held over them; no task issues another.
inline auto& device = *new std::mutex;
inline auto& queues = *new std::vector<std::unique_ptr<Queue>>; // by the number of the stream
inline std::mt19937 chance{static_cast<unsigned>(std::atoi(std::getenv("STANDIN_SEED") ? std::getenv("STANDIN_SEED") : "0"))};

struct Worker {
  std::mutex mutex;
  std::condition_variable changed;
  const std::function<void()>* job = nullptr;
  std::exception_ptr failed;
  pid_t process = getpid();
  Worker() {
    std::thread([this] {
      const at::NoGradGuard without;
      const at::AutoDispatchBelowADInplaceOrView below;
      std::unique_lock<std::mutex> guard(mutex);
      while (true) {
        changed.wait(guard, [this] { return job; });
        try {
          (*job)();
        } catch (...) {
          failed = std::current_exception();
        }
        job = nullptr;
        changed.notify_all();
      }
    }).detach();
  }
  // On that thread: what the device computes knows no gradients, hooks, modes nor profiler of the thread that waits for it.
  void run(const std::function<void()>& what) {
    TORCH_CHECK(process == getpid(), "Cannot re-initialize CUDA in forked subprocess");
    std::unique_lock<std::mutex> guard(mutex);
    job = &what;
    changed.notify_all();
    changed.wait(guard, [this] { return !job; });
    if (failed) std::rethrow_exception(std::exchange(failed, nullptr));
  }
};

// On the device's thread: runs the tasks of `queue` up to `position`. awaited: whether somebody waits for them. Returns whether all have run.
inline bool advance(Queue& queue, int64_t position, bool awaited) {
  while (queue.done < position) {
    Task& next = queue.tasks.front();
    if (next.sleeps && !awaited) return false;
    if (next.after && !next.after->passed && !advance(*next.after->queue, next.after->position, awaited)) return false;
    const Task task = std::move(next);
    queue.tasks.pop_front();
    ++queue.done;
    if (task.run) task.run();
  }
  return true;
}

inline bool reach(Queue& queue, int64_t position, bool awaited) {
  static auto& worker = *new Worker;
  bool reached = queue.done >= position;
  if (!reached) worker.run([&] { reached = advance(queue, position, awaited); });
  return reached;
}
inline Queue& at_stream(int64_t stream) {
  while (static_cast<int64_t>(queues.size()) <= stream) queues.push_back(std::make_unique<Queue>());
  return *queues[stream];
}

inline void push(int64_t stream, Task task) {
  const std::lock_guard<std::mutex> guard(device);
  Queue& queue = at_stream(stream);
  queue.tasks.push_back(std::move(task));
  const unsigned n = chance() % 16;
  Queue& next = n < 4 ? queue : *queues[chance() % queues.size()];
  if (n < 5) reach(next, next.issued(), false);
}
inline bool finish(int64_t stream, bool awaited = true) {
  const std::lock_guard<std::mutex> guard(device);
  Queue& queue = at_stream(stream);
  return reach(queue, queue.issued(), awaited);
}
inline void finish_all() {
  const std::lock_guard<std::mutex> guard(device);
  for (auto& queue : queues) reach(*queue, queue->issued(), true);
}
inline int64_t new_stream() {
  const std::lock_guard<std::mutex> guard(device);
  const int64_t stream = std::max<int64_t>(1, queues.size());
  at_stream(stream);
  return stream;
}

struct Event {
  std::shared_ptr<Mark> mark; // null: was never recorded, and holds nobody up
  void record(int64_t stream) {
    {
      const std::lock_guard<std::mutex> guard(device);
      Queue& queue = at_stream(stream);
      mark = std::make_shared<Mark>(Mark{&queue, queue.issued() + 1});
    }
    push(stream, {[mark = mark] { mark->passed = true, mark->time = std::chrono::steady_clock::now(); }});
  }
  void hold(int64_t stream) const {
    if (mark) push(stream, {nullptr, mark});
  }
  bool passed(bool awaited) const {
    if (!mark) return true;
    const std::lock_guard<std::mutex> guard(device);
    return reach(*mark->queue, mark->position, awaited);
  }
  double until(const Event& end) const { // milliseconds
    TORCH_CHECK(mark && end.mark, "both events must be recorded");
    TORCH_CHECK(mark->passed && end.mark->passed, "CUDA error: device not ready");
    return std::chrono::duration<double, std::milli>(end.mark->time - mark->time).count();
  }
};

}  // namespace standin
